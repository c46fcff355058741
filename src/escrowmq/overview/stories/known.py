"""Rows of databases about a message. Imports no SQLAlchemy, so that a timeline of brokers alone works without it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from escrowmq.wire.actions.acts import Act


@dataclass(slots=True)
class InDatabase:
    """One database's rows about one message id, as dicts by table."""

    database: str
    message_id: bytes
    outbox: dict[str, Any] | None = None
    driven: dict[str, Any] | None = None
    marks: list[dict[str, Any]] = field(default_factory=list)
    """Rows of the inbox: the consumer groups that handled the message."""
    prepared: list[dict[str, Any]] = field(default_factory=list)
    """Rows of consumer groups that received the message before it was decided."""
    cases: list[dict[str, Any]] = field(default_factory=list)
    acts: list[Act] = field(default_factory=list)
    """Operator actions on it in this database."""
    sets: list[dict[str, Any]] = field(default_factory=list)
    """Its entries in the sets of compensations: ``name, what, time_us``."""

    @property
    def is_known(self) -> bool:
        """Return whether the database has anything about the message."""
        tables = (self.outbox, self.driven, self.marks, self.prepared, self.cases, self.sets, self.acts)
        return any(tables)


@dataclass(slots=True)
class Databases:
    """The rows of all databases."""

    rows: list[InDatabase] = field(default_factory=list)
    barriers: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
