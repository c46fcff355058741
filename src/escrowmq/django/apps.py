"""The Django app."""

from __future__ import annotations

from django.apps import AppConfig

from escrowmq.platform.extras import missing_package

try:
    import sqlalchemy  # noqa: F401  # admin pages and tasks need it: Django would show its own traceback
except ModuleNotFoundError as problem:
    raise missing_package("sqlalchemy", "escrowmq.django", "django") from problem


class EscrowConfig(AppConfig):
    """The app ``escrowmq``: the tables of :mod:`escrowmq.outbox`, and the records of tasks."""

    name = "escrowmq.django"
    label = "escrowmq"
    verbose_name = "EscrowMQ"
    default_auto_field = "django.db.models.BigAutoField"
