"""A Django site: ``python manage.py COMMAND``."""

import sys

from django.conf import settings
from django.core.management import execute_from_command_line

if __name__ == "__main__":
    database = {"ENGINE": "django.db.backends.sqlite3", "NAME": "shop.db"}
    settings.configure(
        INSTALLED_APPS=["escrowmq.django", "shop"],
        DATABASES={"default": {**database, "OPTIONS": {"transaction_mode": "IMMEDIATE", "timeout": 20}}},
        TASKS={"default": {"BACKEND": "escrowmq.django.tasks.EscrowBackend"}},
        ESCROWMQ={"URL": "file:./data"},  # a broker inside one process; for several: "escrow://127.0.0.1:7700"
        DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
    )
    execute_from_command_line(sys.argv)
