"""``python manage.py URL COMMAND ...``: a command of the test project, on the database of this SQLAlchemy URL."""

import sys

import django_project
from django.core.management import execute_from_command_line

if __name__ == "__main__":
    # A task whose worker stands still must not run twice; lanes of a relay may change hands.
    django_project.configure(sys.argv.pop(1), tasks={"lease": 30.0}, ESCROWMQ={"RELAY": {"lease": 1.0}})
    execute_from_command_line(sys.argv)
