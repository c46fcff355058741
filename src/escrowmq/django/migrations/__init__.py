"""Migrations of the app. A new version of the outbox's tables gets one that calls :func:`upgrade` again."""

from __future__ import annotations

from typing import Any

from escrowmq.django.database import lend
from escrowmq.outbox.migrations import migrate


def upgrade(_apps: Any, schema_editor: Any) -> None:
    """Create the tables of the outbox, or upgrade them. Idempotent: ``escrowmq outbox migrate`` may have done it."""
    with lend(schema_editor.connection) as lent:
        migrate(lent)


def keep(_apps: Any, _schema_editor: Any) -> None:
    """Keep the tables when the migration is reversed: they may hold messages that were not sent."""
