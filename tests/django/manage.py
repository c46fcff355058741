"""``python manage.py URL COMMAND ...``: a command of the test project, on the database of this SQLAlchemy URL."""

import sys

import django_project
from django.core.management import execute_from_command_line

if __name__ == "__main__":
    quick = {"lease": 1.0}
    django_project.configure(sys.argv.pop(1), tasks=quick, ESCROWMQ={"RELAY": quick})
    execute_from_command_line(sys.argv)
