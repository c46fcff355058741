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
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from escrowmq.compensation.journal import Database, Journal, transaction
from escrowmq.compensation.recovery import PERMANENT, split_pieces
from escrowmq.compensation.remedies import apply_in_steps
from escrowmq.compensation.sets.seam import SetStore
from escrowmq.errors import EscrowError
from escrowmq.outbox import inbox
from escrowmq.outbox.inbox import claim_batch_tx
from escrowmq.outbox.migrations import translated
from escrowmq.outbox.session import transaction_of
from escrowmq.outbox.tables import trans_recv_log
from escrowmq.platform.backoff import Backoff
from escrowmq.platform.clock import now_us
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
    ``sets``. The entry is written before the message is acknowledged, also if its effect happened earlier. ``group``
    names the marks (None: the consumer's group); the scheduler must use the same. A failed store stops nothing, see
    above; its errors are logged. Returns the number of effects. Raises as ``inbox.consume``."""
    entries = Entries(database, sets)
    hook: dict[str, Any] = {"within": entries.within} if entries.together else {"after": entries.after}
    hook |= {"group": group, "max_messages": max_messages, "idle_timeout": idle_timeout}
    return inbox.consume(consumer, database, handler, **hook)


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
            for ids in split_pieces([message.message_id for message in messages]):
                self._sets.add_commits_tx(connection, ids, now_us())

    def after(self, messages: Sequence[Received]) -> None:
        """Write the entries after the transaction was committed. Never raises: the mark replaces a missing entry."""
        reach("compensation.effect-committed")
        if self._backoff.left():
            return
        try:
            for ids in split_pieces([message.message_id for message in messages]):
                self._sets.add_commits(ids, now_us())
        except EscrowError as problem:
            self._backoff.failed()
            logger.warning("the commit set of %s was not written; effects continue: %s", self._sets.name, problem)
            try:
                self._journal.suspend(str(problem))
            except (EscrowError, SQLAlchemyError) as other:  # the next process records it
                logger.warning("the suspension of %s could not be recorded: %s", self._sets.name, other)
        else:
            self._backoff.worked()


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
    here, there = ((url.get_backend_name(), url.host, url.port, url.database) for url in (mine.url, other.url))
    return here == there and mine.url.database not in (None, "", ":memory:")


class DatabaseEffects:
    """Runs ``handler`` in transactions of the business database, once for each mark of ``group``."""

    def __init__(self, database: Database, handler: Handler, group: str) -> None:
        self._database = database
        self._handler = handler
        self._group = group

    def apply(self, messages: Sequence[Any]) -> list[bool | Exception]:
        """Apply all in one transaction, else one by one. Raises Misuse(NO_TABLES | SCHEMA_VERSION | NO_TRANSACTION)."""
        return apply_in_steps(messages, self._apply_together, max(len(messages), 1), PERMANENT)

    def _apply_together(self, messages: Sequence[Any]) -> list[bool]:
        with self._database.begin() as session:
            first = claim_batch_tx(session, messages, self._group)
            for message, new in zip(messages, first, strict=True):
                if new:
                    self._handler(session, message)
        return first
