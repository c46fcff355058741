"""``manage.py escrowmq_purge``: delete results of finished tasks."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DEFAULT_DB_ALIAS
from django.utils import timezone

from escrowmq.django.models import TaskRecord

CHUNK = 1_000
"""Rows of one transaction."""


class Command(BaseCommand):
    """Delete old results, in short transactions."""

    help = "Delete the results of tasks that finished some days ago."

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the age and the database."""
        parser.add_argument("--older-than", type=float, required=True, metavar="DAYS", help="Their least age.")
        parser.add_argument("--database", default=DEFAULT_DB_ALIAS, help="Alias of the database with the tasks.")

    def handle(self, *, older_than: float, database: str, **_: Any) -> None:
        """Delete. A task that is not finished is kept."""
        if not 0 <= older_than < 1e5:
            raise CommandError("--older-than: a number of days")
        ended = [TaskRecord.Status.FAILED, TaskRecord.Status.SUCCESSFUL]
        before = timezone.now() - timedelta(days=older_than)
        rows = TaskRecord.objects.using(database)
        old, deleted = rows.filter(status__in=ended, finished_at__lt=before), 0
        while ids := list(old.values_list("pk", flat=True)[:CHUNK]):
            deleted += rows.filter(pk__in=ids).delete()[0]
        self.stdout.write(f"deleted: {deleted:,}")
