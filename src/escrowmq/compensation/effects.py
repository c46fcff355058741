"""Effect, mark and entry of the commit set as one step; the same step for a consumer and for the scheduler.

The mark, in ``trans_recv_log`` of the database that holds the effect, is the truth: who finds it does nothing. The
entry of the commit set only saves the scheduler a look-up.

- A set store in the business database itself: the entry is written in the transaction of effect and mark.
- Any other: the transaction commits, the entry is made, then the message is acknowledged. A process that dies in
  between gets the message again, finds the mark, and makes the entry. If the store is away, the effects continue
  without it: the suspension is noted in the journal, and the recovery reads the marks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from escrowmq.compensation.journal import Database, Journal, transaction
from escrowmq.compensation.recovery import pieces
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
    """``handler(session, message)``: the effect. The message is a received one, or one that the scheduler looked up:
    both have ``topic, key, tag, properties, body, message_id, transaction_id``."""

logger = logging.getLogger(__name__)

FIRST_PAUSE, LAST_PAUSE = 0.2, 5.0
"""Seconds for which a store that failed is left alone, from the first failure to later ones."""
_STOPS = frozenset({Code.NO_TABLES, Code.SCHEMA_VERSION, Code.NO_TRANSACTION})


class InTransaction(Protocol):
    """A set store whose entries can be written in a transaction of the caller's."""

    @property
    def engine(self) -> sa.Engine:
        """Of the database that it is in."""
        ...

    def add_commits_tx(self, connection: sa.Connection, ids: Sequence[bytes], now_us: int) -> None:
        """As :meth:`SetStore.add_commits`, inside the transaction of ``connection``."""
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
    """As :func:`escrowmq.outbox.inbox.consume`, and each message that has had its effect, now or before, is in the
    commit set of ``sets`` before it is acknowledged; how many effects there were.

    ``group`` names the marks (None: the consumer's own); the scheduler must be given the same. A store that fails stops
    nothing, see above; its errors are logged. Raises as ``inbox.consume``.
    """
    entries = Entries(database, sets)
    hook: dict[str, Any] = {"within": entries.within} if entries.together else {"after": entries.after}
    return inbox.consume(
        consumer, database, handler, group=group, max_messages=max_messages, idle_timeout=idle_timeout, **hook
    )


class Entries:
    """Makes entries of the commit set beside or within the transactions of one consumer. Thread-safe."""

    def __init__(self, database: Database, sets: SetStore) -> None:
        self._sets: Any = sets
        self._journal = Journal(database, sets.name)
        self._backoff = Backoff(FIRST_PAUSE, LAST_PAUSE)
        self.together = is_in(database, sets)
        """Whether an entry is written in the transaction of its effect."""
        if self.together:
            sets.epoch()  # makes its tables

    def within(self, session: Any, messages: Sequence[Received]) -> None:
        """In the transaction of their effects."""
        with transaction_of(session, trans_recv_log) as connection:
            for ids in pieces(_ids(messages)):
                self._sets.add_commits_tx(connection, ids, _now_us())

    def after(self, messages: Sequence[Received]) -> None:
        """When the transaction is committed. It never raises: an entry that is missing is found by its mark."""
        reach("compensation.effect-committed")
        if self._backoff.left():
            return
        try:
            for ids in pieces(_ids(messages)):
                self._sets.add_commits(ids, _now_us())
        except EscrowError as problem:
            self._backoff.failed()
            self._note(problem)
        else:
            self._backoff.worked()

    def _note(self, problem: EscrowError) -> None:
        logger.warning("the commit set of %s was not written; effects go on: %s", self._sets.name, problem)
        try:
            self._journal.suspend(str(problem))
        except (EscrowError, SQLAlchemyError) as other:  # then whoever comes next notes it
            logger.warning("the suspension of %s could not be noted: %s", self._sets.name, other)


def is_in(database: Database, sets: SetStore) -> bool:
    """Return whether a set store is in the business database, so that one transaction holds both."""
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
    return named and _place(mine.url) == _place(other.url)


def _place(url: sa.URL) -> tuple[Any, ...]:
    return url.get_backend_name(), url.host, url.port, url.database


def _ids(messages: Sequence[Any]) -> list[bytes]:
    return [message.message_id for message in messages]


def _now_us() -> int:
    return time.time_ns() // 1000


# The scheduler's side


class Effects(Protocol):
    """A scheduler's way to handle messages that it looked up."""

    def apply(self, messages: Sequence[Any]) -> list[bool | Exception]:
        """Of each message: True: it has its effect now; False: it had it already; an error: it has none, and another
        try may help."""
        ...


class DatabaseEffects:
    """``handler`` in transactions of the business database, once for each mark of ``group``."""

    def __init__(self, database: Database, handler: Handler, group: str) -> None:
        self._database = database
        self._handler = handler
        self._group = group

    def apply(self, messages: Sequence[Any]) -> list[bool | Exception]:
        """All in one transaction; if that fails, in one each. Raises Misuse(NO_TABLES | SCHEMA_VERSION |
        NO_TRANSACTION)."""
        if not messages:
            return []
        try:
            return list(self._take(messages))
        except Exception as problem:
            _stop_on(problem)
            if len(messages) == 1:
                return [problem]
            logger.info("%d messages failed together; doing them one by one: %r", len(messages), problem)
        results: list[bool | Exception] = []
        for message in messages:
            try:
                results += self._take([message])
            except Exception as problem:
                _stop_on(problem)
                results.append(problem)
        return results

    def _take(self, messages: Sequence[Any]) -> list[bool]:
        with self._database.begin() as session:
            first = claim_batch_tx(session, messages, self._group)
            for message, new in zip(messages, first, strict=True):
                if new:
                    self._handler(session, message)
        return first


def _stop_on(problem: Exception) -> None:
    if isinstance(problem, Misuse) and problem.code in _STOPS:
        raise problem
