"""The Django app."""

from __future__ import annotations

from django.apps import AppConfig


class EscrowConfig(AppConfig):
    """The app ``escrowmq``: the tables of :mod:`escrowmq.outbox`, and the records of tasks."""

    name = "escrowmq.django"
    label = "escrowmq"
    verbose_name = "EscrowMQ"
    default_auto_field = "django.db.models.BigAutoField"
