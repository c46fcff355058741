"""Effect, mark and commit-set entry as one step; the same step for a consumer and for the scheduler.

The mark, in ``trans_recv_log`` of the database that holds the effect, is authoritative: a process that finds it does
nothing. The commit-set entry only saves the scheduler a look-up.

- A set store in the business database itself: the entry is written in the transaction of effect and mark.
- Any other: the transaction commits, the entry is written, then the message is acknowledged. After a crash in between
  the message is redelivered, finds the mark, and the entry is written. If the store is unavailable, effects continue
  without it: the journal records the suspension, and the recovery reads the marks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from escrowmq.compensation.journal import Database, Journal, transaction
from escrowmq.compensation.recovery import split_pieces
from escrowmq.compensation.sets.seam import SetStore
from escrowmq.errors import Code, EscrowError, Misuse
from escrowmq.outbox import inbox
from escrowmq.outbox.inbox import claim_batch_tx
from escrowmq.outbox.migrations import translated
from escrowmq.outbox.session import transaction_of
from escrowmq.outbox.tables import trans_recv_log
from escrowmq.platform.backoff import Backoff
from escrowmq.platform.failpoints import reach

if TYPE_CHECKING:
    from escrowmq.client.consuming.consumer import Consumer
    from escrowmq.client.consuming.received import Received

    Handler = Callable[[Any, Any], object]
    """``handler(session, message)``: the effect. The message was received, or looked up by the scheduler: both have
    ``topic, key, tag, properties, body, message_id, transaction_id``."""

logger = logging.getLogger(__name__)

FIRST_PAUSE, LAST_PAUSE = 0.2, 5.0
"""Shortest and longest pause (s) before a failed store is used again."""
_PERMANENT = frozenset({Code.NO_TABLES, Code.SCHEMA_VERSION, Code.NO_TRANSACTION})


class InTransaction(Protocol):
    """A set store whose entries can be written in the caller's transaction."""

    @property
    def engine(self) -> sa.Engine:
        """Engine of the database that holds the store."""
        ...

    def add_commits_tx(self, connection: sa.Connection, ids: Sequence[bytes], now_us: int) -> None:
        """Do :meth:`SetStore.add_commits` inside the transaction of ``connection``."""
        ...


def consume(
    consumer: Consumer,
    database: Database,
    sets: SetStore,
    handler: Handler,
    *,
    group: str | None = None,
    max_messages: int = 500,
    idle_timeout: float | None = None,
) -> int:
    """Consume like :func:`escrowmq.outbox.inbox.consume`, and record each handled message in the commit set of
    ``sets``.

    The entry is written before the message is acknowledged, also if its effect happened earlier. ``group`` names the
    marks (None: the consumer's group); the scheduler must use the same. A failed store stops nothing, see above; its
    errors are logged. Returns the number of effects. Raises as ``inbox.consume``.
    """
    entries = Entries(database, sets)
    hook: dict[str, Any] = {"within": entries.within} if entries.together else {"after": entries.after}
    return inbox.consume(
        consumer, database, handler, group=group, max_messages=max_messages, idle_timeout=idle_timeout, **hook
    )


class Entries:
    """Writes commit-set entries after or within the transactions of one consumer. Thread-safe."""

    def __init__(self, database: Database, sets: SetStore) -> None:
        self._sets: Any = sets
        self._journal = Journal(database, sets.name)
        self._backoff = Backoff(FIRST_PAUSE, LAST_PAUSE)
        self.together = is_in(database, sets)
        """Whether an entry is written in the transaction of its effect."""
        if self.together:
            sets.epoch()  # creates its tables

    def within(self, session: Any, messages: Sequence[Received]) -> None:
        """Write the entries in the transaction of their effects."""
        with transaction_of(session, trans_recv_log) as connection:
            for ids in split_pieces(_ids(messages)):
                self._sets.add_commits_tx(connection, ids, _now_us())

    def after(self, messages: Sequence[Received]) -> None:
        """Write the entries after the transaction was committed. Never raises: the mark replaces a missing entry."""
        reach("compensation.effect-committed")
        if self._backoff.left():
            return
        try:
            for ids in split_pieces(_ids(messages)):
                self._sets.add_commits(ids, _now_us())
        except EscrowError as problem:
            self._backoff.failed()
            self._record_suspension(problem)
        else:
            self._backoff.worked()

    def _record_suspension(self, problem: EscrowError) -> None:
        logger.warning("the commit set of %s was not written; effects continue: %s", self._sets.name, problem)
        try:
            self._journal.suspend(str(problem))
        except (EscrowError, SQLAlchemyError) as other:  # the next process records it
            logger.warning("the suspension of %s could not be recorded: %s", self._sets.name, other)


def is_in(database: Database, sets: SetStore) -> bool:
    """Decide whether a set store is in the business database, so that one transaction holds both."""
    other = getattr(sets, "engine", None)
    if not isinstance(other, sa.Engine):
        return False
    with transaction(database, trans_recv_log) as connection:
        mine = connection.engine
        if translated(connection) != other.get_execution_options().get("schema_translate_map", {}).get(None):
            return False
    if mine.pool is other.pool:
        return True
    named = bool(mine.url.database) and mine.url.database != ":memory:"
    return named and _location(mine.url) == _location(other.url)


def _location(url: sa.URL) -> tuple[Any, ...]:
    return url.get_backend_name(), url.host, url.port, url.database


def _ids(messages: Sequence[Any]) -> list[bytes]:
    return [message.message_id for message in messages]


def _now_us() -> int:
    return time.time_ns() // 1000


# The scheduler's side


class Effects(Protocol):
    """Applies messages that the scheduler has looked up."""

    def apply(self, messages: Sequence[Any]) -> list[bool | Exception]:
        """Apply each message: True (new effect), False (had it before), or an error (no effect; retry possible)."""
        ...


class DatabaseEffects:
    """Runs ``handler`` in transactions of the business database, once for each mark of ``group``."""

    def __init__(self, database: Database, handler: Handler, group: str) -> None:
        self._database = database
        self._handler = handler
        self._group = group

    def apply(self, messages: Sequence[Any]) -> list[bool | Exception]:
        """Apply all in one transaction, else one by one. Raises Misuse(NO_TABLES | SCHEMA_VERSION | NO_TRANSACTION)."""
        if not messages:
            return []
        try:
            return list(self._apply_together(messages))
        except Exception as problem:
            _raise_permanent(problem)
            if len(messages) == 1:
                return [problem]
            logger.info("%d messages failed together; retrying them one by one: %r", len(messages), problem)
        results: list[bool | Exception] = []
        for message in messages:
            try:
                results += self._apply_together([message])
            except Exception as problem:
                _raise_permanent(problem)
                results.append(problem)
        return results

    def _apply_together(self, messages: Sequence[Any]) -> list[bool]:
        with self._database.begin() as session:
            first = claim_batch_tx(session, messages, self._group)
            for message, new in zip(messages, first, strict=True):
                if new:
                    self._handler(session, message)
        return first


def _raise_permanent(problem: Exception) -> None:
    if isinstance(problem, Misuse) and problem.code in _PERMANENT:
        raise problem
