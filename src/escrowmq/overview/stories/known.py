"""Rows of databases about a message: the rows that were read. Needs no SQLAlchemy, so that brokers alone can be asked
without it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from escrowmq.wire.actions.acts import Act


@dataclass(slots=True)
class InDatabase:
    """One database's rows about one message id; rows as dicts, by what they are."""

    database: str
    message_id: bytes
    outbox: dict[str, Any] | None = None
    driven: dict[str, Any] | None = None
    marks: list[dict[str, Any]] = field(default_factory=list)
    """Of the inbox: who has consumed it."""
    prepared: list[dict[str, Any]] = field(default_factory=list)
    """Consumers that got it before it was decided."""
    cases: list[dict[str, Any]] = field(default_factory=list)
    acts: list[Act] = field(default_factory=list)
    """What operators did to it here."""
    sets: list[dict[str, Any]] = field(default_factory=list)
    """Where it is in the sets of a compensation: ``name, what, time_us``."""

    @property
    def says_something(self) -> bool:
        """Whether the database knows it at all."""
        tables = (self.outbox, self.driven, self.marks, self.prepared, self.cases, self.sets, self.acts)
        return any(tables)


@dataclass(slots=True)
class Databases:
    """The rows of all databases."""

    rows: list[InDatabase] = field(default_factory=list)
    barriers: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
