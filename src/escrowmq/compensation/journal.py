"""The state of a compensation: one row of ``trans_compensation`` in the business database.

The set store holds the two sets, and can lose them: it is down, it was emptied, another server answers under its
address. What is needed to put that right must not be in it, so it is here:

- ``epoch``: of the store (``SetStore.epoch``) when it was last known to be whole. Another epoch: entries may be
  missing.
- ``settled_us``: a broker time. Every key that became visible in the key topic before it is settled, or in the store of
  that epoch. So reading the key topic again from there makes a store that was emptied whole.
- ``suspended_us``: since when, by the database's clock, the store is not relied on. The half-set consumer takes nothing
  then, and every mark in ``trans_recv_log`` since (with a margin) may lack its entry in the commit set.

Every change is one UPDATE that names what it was made of (compare and set on ``version``), so two schedulers, or one
that slept through a suspension, never undo what they did not see.
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
"""Where the business tables are: what has ``begin()``, as for :func:`escrowmq.outbox.inbox.consume`."""

MARKS_PAGE = 5_000
"""Marks read in one statement of a recovery."""
MAX_REASON = 500
"""Characters of a reason that are kept."""

_ROW = trans_compensation.c
_SEEN = trans_recv_log.c
_STANDS = sa.or_(_SEEN.topic.is_(None), sa.not_(_SEEN.topic.startswith("%", autoescape=True)))
"""Not taken away by a person, who wants the message handled again (``outbox/handled.py``)."""


@dataclass(frozen=True, slots=True)
class Standing:
    """The row as it was read; times are microseconds since 1970."""

    name: str
    version: int
    epoch: str | None
    """Of the store; None: it was never seen."""
    settled_us: int
    """By the brokers' clock; 0: from the beginning of the key topic."""
    suspended_us: int | None
    """By the database's clock; None: it is not suspended."""
    reason: str | None
    """Why it is, or was last, suspended."""
    changed_us: int
    """When the row last changed, by the database's clock: each run of a scheduler that could use the store raises
    ``settled_us``."""

    @property
    def suspended(self) -> bool:
        """Whether the store is not relied on."""
        return self.suspended_us is not None


@contextmanager
def transaction(database: Database, table: sa.Table = trans_compensation) -> Iterator[sa.Connection]:
    """Yield a transaction of one's own in the business database, on the connection that holds ``table``. Raises
    Misuse(NO_TABLES | SCHEMA_VERSION)."""
    with database.begin() as session, transaction_of(session, table) as connection:
        yield connection


class Journal:
    """The row of compensation ``name``. Thread-safe. Every method is a transaction of its own.

    Raises Rejected(BAD_GROUP_NAME); Misuse(NO_TABLES | SCHEMA_VERSION); SQLAlchemy's own errors when the database is
    away.
    """

    def __init__(self, database: Database, name: str) -> None:
        check_name(name, Code.BAD_GROUP_NAME)
        self.database = database
        self.name = name
        self._mine = _ROW.name == name

    def read(self) -> Standing | None:
        """Return how it stands; None: this compensation never began."""
        with transaction(self.database) as connection:
            return self._read(connection)

    def begin(self, epoch: str | None, reason: str | None = None) -> Standing:
        """Return how it stands; if it never began it begins now, with a store of ``epoch`` (None: it does not answer,
        for ``reason``: suspended).

        To be called before the first key is acknowledged: what was acknowledged before would be in no epoch.
        """
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
        """Rely on the store no longer; False: it was suspended already, or never began. The earlier time and reason
        stay."""
        with transaction(self.database) as connection:
            now_us = database_now_us(connection)
            values = {"suspended_us": now_us, "reason": _cut(reason), "changed_us": now_us, "version": _ROW.version + 1}
            change = sa.update(trans_compensation).where(self._mine, _ROW.suspended_us.is_(None)).values(values)
            return connection.execute(change).rowcount == 1

    def resume(self, seen: Standing, epoch: str) -> bool:
        """Rely on the store again, of this ``epoch``: the end of a recovery that began with ``seen``. False: something
        changed meanwhile, so the recovery must be made again."""
        with transaction(self.database) as connection:
            values = {"epoch": epoch, "suspended_us": None, "changed_us": database_now_us(connection)}
            return self._set(connection, seen, {**values, "version": seen.version + 1})

    def raise_settled(self, seen: Standing, settled_us: int) -> bool:
        """Move ``settled_us`` on, never back; False: something changed since ``seen`` (a suspension, a recovery,
        another scheduler), or it would not move."""
        if seen.suspended or settled_us <= seen.settled_us:
            return False
        with transaction(self.database) as connection:
            values = {"settled_us": settled_us, "changed_us": database_now_us(connection), "version": seen.version + 1}
            return self._set(connection, seen, values)

    def _set(self, connection: sa.Connection, seen: Standing, values: dict[str, Any]) -> bool:
        change = sa.update(trans_compensation).where(self._mine, _ROW.version == seen.version).values(values)
        return connection.execute(change).rowcount == 1

    def _read(self, connection: sa.Connection) -> Standing | None:
        columns = [getattr(_ROW, name) for name in Standing.__slots__]
        row = connection.execute(sa.select(*columns).where(self._mine)).one_or_none()
        return None if row is None else Standing(*row)

    def now_us(self) -> int:
        """Return the database's clock."""
        with transaction(self.database) as connection:
            return database_now_us(connection)

    def marks(self, group: str, since_us: int) -> Iterator[list[bytes]]:
        """Yield ids of the messages that consumer group ``group`` handled since then (by the database's clock), in
        pages, each read in a transaction of its own. A mark of a transaction that commits meanwhile may be missing."""
        at_us, after = since_us, b""
        while True:
            later = sa.or_(_SEEN.seen_us > at_us, sa.and_(_SEEN.seen_us == at_us, _SEEN.message_id > after))
            page = sa.select(_SEEN.message_id, _SEEN.seen_us).where(
                _SEEN.consumer_group == group, _SEEN.seen_us >= at_us, later, _STANDS
            )
            with transaction(self.database, trans_recv_log) as connection:
                rows = connection.execute(page.order_by(_SEEN.seen_us, _SEEN.message_id).limit(MARKS_PAGE)).all()
            if not rows:
                return
            yield [bytes(row.message_id) for row in rows]
            at_us, after = rows[-1].seen_us, bytes(rows[-1].message_id)


def _cut(reason: str | None) -> str | None:
    return None if reason is None else reason[:MAX_REASON]
