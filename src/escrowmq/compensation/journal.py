"""State of a compensation: one row of ``trans_compensation`` in the business database.

The set store can lose the two sets: it fails, it is emptied, another server takes over its address. The data for a
recovery must not be in it, so it is here:

- ``epoch``: of the store (``SetStore.epoch``) when it was last known to be complete. Another epoch: entries may be
  missing.
- ``settled_us``: a broker time. Every key that became visible in the key topic before it is settled, or in the store of
  that epoch. So reading the key topic again from there restores a store that was emptied.
- ``suspended_us``: start of the suspension by the database's clock. During it the half-set consumer consumes nothing,
  and any mark in ``trans_recv_log`` since then (with a margin) may lack its entry in the commit set.

Every change is one UPDATE with a compare-and-set on ``version``, so a concurrent or delayed scheduler never overwrites
a change that it did not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

from escrowmq.errors import Code
from escrowmq.message.names import check_name
from escrowmq.outbox.dialects import database_now_us, insert_if_absent
from escrowmq.outbox.session import transaction_of
from escrowmq.outbox.tables import trans_compensation, trans_recv_log

Database = sessionmaker[Session] | sa.Engine
"""The database of the business tables: any object with ``begin()``, as for :func:`escrowmq.outbox.inbox.consume`."""

MARKS_PAGE = 5_000
"""Marks read by one statement of a recovery."""
MAX_REASON = 500
"""Stored characters of a reason."""

_ROW = trans_compensation.c
_SEEN = trans_recv_log.c
_NOT_REVOKED = sa.or_(_SEEN.topic.is_(None), sa.not_(_SEEN.topic.startswith("%", autoescape=True)))
"""Not revoked by an operator to have the message handled again (``outbox/handled.py``)."""


@dataclass(frozen=True, slots=True)
class Standing:
    """The row as it was read; times are microseconds since 1970."""

    name: str
    version: int
    epoch: str | None
    """Epoch of the store; None before its first use."""
    settled_us: int
    """By the brokers' clock; 0: from the beginning of the key topic."""
    suspended_us: int | None
    """By the database's clock; None if not suspended."""
    reason: str | None
    """Reason of the current or last suspension."""
    changed_us: int
    """Last change by the database's clock: each scheduler run that could use the store raises ``settled_us``."""

    @property
    def suspended(self) -> bool:
        """Return whether the store is unreliable."""
        return self.suspended_us is not None


@contextmanager
def transaction(database: Database, table: sa.Table = trans_compensation) -> Iterator[sa.Connection]:
    """Open a separate transaction on the connection with ``table``. Raises Misuse(NO_TABLES | SCHEMA_VERSION)."""
    with database.begin() as session, transaction_of(session, table) as connection:
        yield connection


class Journal:
    """The row of compensation ``name``. Thread-safe. Every method is a separate transaction. Raises
    Rejected(BAD_GROUP_NAME); Misuse(NO_TABLES | SCHEMA_VERSION); SQLAlchemy's own errors if the database is
    unavailable."""

    def __init__(self, database: Database, name: str) -> None:
        check_name(name, Code.BAD_GROUP_NAME)
        self.database = database
        self.name = name
        self._own_row = _ROW.name == name

    def read(self) -> Standing | None:
        """Return the row; None if this compensation never began."""
        with transaction(self.database) as connection:
            return self._read(connection)

    def begin(self, epoch: str | None, reason: str | None = None) -> Standing:
        """Return the row; create it if needed, with a store of ``epoch`` (None: unavailable, so suspended for
        ``reason``). Must be called before the first key is acknowledged: earlier ones would belong to no epoch."""
        with transaction(self.database) as connection:
            found = self._read(connection)
            if found is None:
                now_us = database_now_us(connection)
                row = {"name": self.name, "version": 1, "epoch": epoch, "settled_us": 0, "changed_us": now_us}
                row |= {"suspended_us": now_us if epoch is None else None, "reason": _cut(reason)}
                connection.execute(insert_if_absent(connection.dialect.name, trans_compensation), [row])
                found = self._read(connection)
                assert found is not None
            return found

    def suspend(self, reason: str) -> bool:
        """Suspend the use of the store, with the first time and reason. Returns False if suspended or never begun."""
        with transaction(self.database) as connection:
            now_us = database_now_us(connection)
            values = {"suspended_us": now_us, "reason": _cut(reason), "changed_us": now_us, "version": _ROW.version + 1}
            change = sa.update(trans_compensation).where(self._own_row, _ROW.suspended_us.is_(None)).values(values)
            return connection.execute(change).rowcount == 1

    def resume(self, seen: Standing, epoch: str) -> bool:
        """Complete a recovery that began with ``seen``: use the store again, with this ``epoch``. Returns False if the
        row changed meanwhile, so the recovery must be repeated."""
        return self._update(seen, {"epoch": epoch, "suspended_us": None})

    def raise_settled(self, seen: Standing, settled_us: int) -> bool:
        """Advance ``settled_us``. Returns False if the row changed since ``seen``, or without an increase."""
        if seen.suspended or settled_us <= seen.settled_us:
            return False
        return self._update(seen, {"settled_us": settled_us})

    def _update(self, seen: Standing, values: dict[str, Any]) -> bool:
        change = sa.update(trans_compensation).where(self._own_row, _ROW.version == seen.version)
        with transaction(self.database) as connection:
            more = {"changed_us": database_now_us(connection), "version": seen.version + 1}
            return connection.execute(change.values(values | more)).rowcount == 1

    def _read(self, connection: sa.Connection) -> Standing | None:
        columns = [getattr(_ROW, name) for name in Standing.__slots__]
        row = connection.execute(sa.select(*columns).where(self._own_row)).one_or_none()
        return None if row is None else Standing(*row)

    def now_us(self) -> int:
        """Return the time of the database's clock."""
        with transaction(self.database) as connection:
            return database_now_us(connection)

    def marks(self, group: str, since_us: int) -> Iterator[list[bytes]]:
        """Yield ids of messages that consumer group ``group`` handled since then (by the database's clock), in pages,
        each read in a separate transaction. A mark of a transaction that commits meanwhile may be missing."""
        at_us, after = since_us, b""
        while True:
            later = sa.or_(_SEEN.seen_us > at_us, sa.and_(_SEEN.seen_us == at_us, _SEEN.message_id > after))
            page = sa.select(_SEEN.message_id, _SEEN.seen_us).where(
                _SEEN.consumer_group == group, _SEEN.seen_us >= at_us, later, _NOT_REVOKED
            )
            with transaction(self.database, trans_recv_log) as connection:
                rows = connection.execute(page.order_by(_SEEN.seen_us, _SEEN.message_id).limit(MARKS_PAGE)).all()
            if not rows:
                return
            yield [bytes(row.message_id) for row in rows]
            at_us, after = rows[-1].seen_us, bytes(rows[-1].message_id)


def _cut(reason: str | None) -> str | None:
    return None if reason is None else reason[:MAX_REASON]
