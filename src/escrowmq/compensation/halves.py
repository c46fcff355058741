"""The half-set consumer: records announcements in the half set, and acknowledges them only then.

An acknowledged announcement is in the store, or the store was lost: then ``settled_us`` of the journal is the time from
which the topic is read again. During a suspension nothing is consumed, so announcements stay safe at the broker.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from sqlalchemy.exc import DBAPIError

from escrowmq.client.bus import Bus
from escrowmq.compensation.feeds import KeyFeed, TopicKeys, to_key_times
from escrowmq.compensation.journal import Database, Journal
from escrowmq.compensation.recovery import MARGIN, Recovery, split_pieces
from escrowmq.compensation.sets.seam import SetStore
from escrowmq.errors import AWAY, Code, EscrowError, error
from escrowmq.outbox.dialects import in_a_line
from escrowmq.platform.backoff import Backoff
from escrowmq.platform.failpoints import reach

if TYPE_CHECKING:
    from collections.abc import Sequence

    from escrowmq.client.consuming.consumer import Consumer
    from escrowmq.client.consuming.received import ReceivedBatch

logger = logging.getLogger(__name__)

NEVER_DEAD = 1 << 30
"""Deliveries until a key becomes a dead letter, and so is lost: a store may be unavailable for long."""
POLL = 0.5
"""Poll interval (s) for the stop event."""
FIRST_PAUSE, LAST_PAUSE = 0.2, 5.0
"""Shortest and longest pause (s) between two checks whether the store is available."""
_TEMPORARY = {*AWAY, Code.QUEUE_FULL, Code.DISK_FULL, Code.LEASE_LOST, Code.BAD_SETTING}
"""Errors that a retry, or a change made meanwhile, may resolve."""


class HalfSet:
    """The half set of one compensation, for any reader of announced ids and their times, also from another broker.
    ``group`` (None: the name of ``sets``) names the marks of the message consumers, which a recovery reads.
    Thread-safe."""

    def __init__(
        self, database: Database, sets: SetStore, feed: KeyFeed, *, group: str | None = None, margin: float = MARGIN
    ) -> None:
        self.journal = Journal(database, sets.name)
        self._sets = sets
        self._recovery = Recovery(self.journal, sets, feed, sets.name if group is None else group, margin)

    def ready(self) -> bool:
        """Decide whether announcements may be consumed now, after a recovery if one is needed. Raises Misuse(NO_TABLES
        | SCHEMA_VERSION), and the database's own errors."""
        return self._recovery.ensure() is not None

    @property
    def problem(self) -> EscrowError | None:
        """The reason why :meth:`ready` returned False."""
        return self._recovery.problem

    def add(self, ids: Sequence[bytes], stored_us: Sequence[int]) -> None:
        """Record announcements with the times at which their broker stored them (microseconds since 1970). Acknowledge
        them at that broker only after this has returned. Raises Overloaded(QUEUE_FULL) while the compensation is
        suspended, and the errors of a set store, which suspend it."""
        standing = self.journal.read()
        if standing is None or standing.suspended:
            raise error(Code.QUEUE_FULL, f"compensation {self._sets.name} is suspended", "wait until ready() is True")
        try:
            for part, times in zip(split_pieces(ids), split_pieces(stored_us), strict=True):
                self._sets.add_halves(part, times)
        except EscrowError as problem:
            self._recovery.suspend(str(problem))
            raise
        reach("compensation.halves-added")


class HalfSetConsumer:
    """Consumes a key topic of this broker into the half set. Several may run at once. ``group`` is the consumer group
    of the keys (None: the name of ``sets`` plus ``.keys``); ``marks`` the group of the message consumers (None: the
    name of ``sets``). Raises as :class:`Journal`."""

    def __init__(
        self,
        bus: Bus,
        topic: str,
        database: Database,
        sets: SetStore,
        *,
        group: str | None = None,
        marks: str | None = None,
        max_messages: int = 1_000,
        margin: float = MARGIN,
    ) -> None:
        self._bus = bus
        self._topic = topic
        self._max = max_messages
        self.group = f"{sets.name}.keys" if group is None else group
        self.half_set = HalfSet(database, sets, TopicKeys(bus, topic, self.group), group=marks, margin=margin)

    def run(self, stop: threading.Event | None = None, idle_timeout: float | None = None) -> int:
        """Consume until ``stop`` is set, or no key arrived for ``idle_timeout`` seconds; return the number of keys.
        Waits while a store, broker or database is unavailable. Raises Misuse(NO_TABLES | SCHEMA_VERSION) and other
        permanent errors."""
        stopping = threading.Event() if stop is None else stop
        backoff, poll = Backoff(FIRST_PAUSE, LAST_PAUSE), POLL if idle_timeout is None else min(POLL, idle_timeout)
        count, last = 0, time.monotonic()
        while not stopping.is_set() and not is_idle(last, idle_timeout):
            before = count
            try:
                if self.half_set.ready():
                    with self._bus.consumer(self.group, self._topic, max_attempts=NEVER_DEAD) as consumer:
                        backoff.worked()
                        while not stopping.is_set() and not is_idle(last, idle_timeout):
                            if keys := self._receive(consumer, poll):
                                count, last = count + keys, time.monotonic()
                    continue
            except (EscrowError, DBAPIError) as problem:
                if isinstance(problem, EscrowError) and problem.code not in _TEMPORARY:
                    raise
                logger.warning("the half set of %s waits: %s", self.half_set.journal.name, in_a_line(problem))
            if count == before:
                stopping.wait(min(backoff.failed(), poll))
        return count

    def _receive(self, consumer: Consumer, wait: float) -> int:
        """Record one batch of keys if it arrives within ``wait`` seconds; return their number."""
        for batch in consumer.batches(self._max, idle_timeout=wait):
            try:
                self._record(batch)
            except BaseException:
                batch.nack(0.0, "the half set cannot take it", wait=False)
                raise
            try:
                batch.ack()
            except EscrowError as problem:  # already recorded; recording them again changes nothing
                logger.info("%d keys were recorded but not acknowledged: %s", len(batch), problem)
            return len(batch)
        return 0

    def _record(self, batch: ReceivedBatch) -> None:
        self.half_set.add(*to_key_times(batch.arrow))


def is_idle(last: float, idle_timeout: float | None) -> bool:
    """Return whether nothing arrived since ``last`` (monotonic) for ``idle_timeout`` seconds (None: no limit)."""
    return idle_timeout is not None and time.monotonic() - last >= idle_timeout
