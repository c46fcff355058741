"""The half-set consumer: whoever reads the announcements records them in the half set, and acknowledges them only then.

What was acknowledged is in the store, or the store was lost: then ``settled_us`` of the journal says from where the
topic is read again. While the compensation is suspended nothing is taken, so announcements wait where they are safe, at
the broker.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from sqlalchemy.exc import DBAPIError

from escrowmq.client.bus import Bus
from escrowmq.compensation.feeds import KeyFeed, TopicKeys, id_of_key
from escrowmq.compensation.journal import Database, Journal
from escrowmq.compensation.recovery import MARGIN, Recovery, pieces
from escrowmq.compensation.sets.seam import SetStore
from escrowmq.errors import Code, EscrowError, error
from escrowmq.outbox.dialects import in_a_line
from escrowmq.platform.backoff import Backoff
from escrowmq.platform.failpoints import reach

if TYPE_CHECKING:
    from collections.abc import Sequence

    from escrowmq.client.consuming.consumer import Consumer
    from escrowmq.client.consuming.received import ReceivedBatch

logger = logging.getLogger(__name__)

NEVER_DEAD = 1 << 30
"""Deliveries until a key would be a dead letter, and so forgotten: a store may be away for long."""
POLL = 0.5
"""Seconds between two looks whether to stop."""
FIRST_PAUSE, LAST_PAUSE = 0.2, 5.0
"""Seconds between two looks whether the store is back."""


class HalfSet:
    """The half set of one compensation, for whoever has announced ids and their times: what comes by another broker,
    too.

    ``group`` (None: the name of ``sets``) names the marks of the consumers of the messages, which a recovery reads.
    Thread-safe.
    """

    def __init__(
        self, database: Database, sets: SetStore, feed: KeyFeed, *, group: str | None = None, margin: float = MARGIN
    ) -> None:
        self.journal = Journal(database, sets.name)
        self._sets = sets
        self._recovery = Recovery(self.journal, sets, feed, sets.name if group is None else group, margin)

    def ready(self) -> bool:
        """Return whether announcements may be taken from their broker now; a recovery is made if one is needed. Raises
        Misuse(NO_TABLES | SCHEMA_VERSION), and the database's own errors."""
        return self._recovery.ensure() is not None

    @property
    def problem(self) -> EscrowError | None:
        """Why :meth:`ready` said no."""
        return self._recovery.problem

    def add(self, ids: Sequence[bytes], stored_us: Sequence[int]) -> None:
        """Record announcements, each with the time at which its broker stored it (microseconds since 1970). Acknowledge
        them at that broker when this has returned, and not otherwise.

        Raises Overloaded(QUEUE_FULL) while the compensation is suspended, and the errors of a set store, which suspend
        it.
        """
        standing = self.journal.read()
        if standing is None or standing.suspended:
            raise error(Code.QUEUE_FULL, f"compensation {self._sets.name} is suspended", "wait until ready() says so")
        try:
            for some, times in zip(pieces(ids), pieces(stored_us), strict=True):
                self._sets.add_halves(some, times)
        except EscrowError as problem:
            self._recovery.suspend(problem)
            raise
        reach("compensation.halves-added")


class HalfSetConsumer:
    """Consumes a key topic of ours into the half set. Several may run at once.

    ``group`` is the consumer group of the keys (None: the name of ``sets`` and ``.keys``); ``marks`` the group of the
    consumers of the messages (None: the name of ``sets``). Raises as :class:`Journal`.
    """

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
        self.group = keys_group(sets.name) if group is None else group
        self.half_set = HalfSet(database, sets, TopicKeys(bus, topic, self.group), group=marks, margin=margin)

    def run(self, stop: threading.Event | None = None, idle_timeout: float | None = None) -> int:
        """Consume until ``stop`` is set, or no key was taken for ``idle_timeout`` seconds; how many were.

        A store, broker or database that is away is waited for. Raises Misuse(NO_TABLES | SCHEMA_VERSION) and what else
        waiting does not mend.
        """
        ended = threading.Event() if stop is None else stop
        backoff = Backoff(FIRST_PAUSE, LAST_PAUSE)
        count, last = 0, time.monotonic()
        while not ended.is_set() and not _idle(last, idle_timeout):
            before = count
            try:
                if self.half_set.ready():
                    with self._bus.consumer(self.group, self._topic, max_attempts=NEVER_DEAD) as consumer:
                        backoff.worked()
                        while not ended.is_set() and not _idle(last, idle_timeout):
                            taken = self._some(consumer, POLL if idle_timeout is None else min(POLL, idle_timeout))
                            if taken:
                                count, last = count + taken, time.monotonic()
                    continue
            except EscrowError as problem:
                if not _passes(problem):
                    raise
                logger.warning("the half set of %s waits: %s", self.half_set.journal.name, problem)
            except DBAPIError as problem:
                logger.warning("the half set of %s waits: %s", self.half_set.journal.name, in_a_line(problem))
            if count == before:
                ended.wait(min(backoff.failed(), POLL if idle_timeout is None else min(POLL, idle_timeout)))
        return count

    def _some(self, consumer: Consumer, wait: float) -> int:
        """Return the keys of one batch, if one comes within ``wait`` seconds."""
        for batch in consumer.batches(self._max, idle_timeout=wait):
            try:
                self._take(batch)
            except BaseException:
                batch.nack(0.0, "the half set cannot take it", wait=False)
                raise
            try:
                batch.ack()
            except EscrowError as problem:  # they are recorded: recorded again they are the same
                logger.info("%d keys were recorded but not acknowledged: %s", len(batch), problem)
            return len(batch)
        return 0

    def _take(self, batch: ReceivedBatch) -> None:
        rows = batch.arrow
        pairs = zip(rows.column("key").to_pylist(), rows.column("message_id").to_pylist(), strict=True)
        self.half_set.add([id_of_key(key, identity) for key, identity in pairs], rows.column("stored_us").to_pylist())


def keys_group(name: str) -> str:
    """Return the consumer group that reads the keys of compensation ``name``, unless another is named."""
    return f"{name}.keys"


def _idle(last: float, idle_timeout: float | None) -> bool:
    return idle_timeout is not None and time.monotonic() - last >= idle_timeout


_PASSING = frozenset(
    {
        Code.DISCONNECTED,
        Code.TIMED_OUT,
        Code.BROKER_AWAY,
        Code.QUEUE_FULL,
        Code.DISK_FULL,
        Code.LEASE_LOST,
        Code.BAD_SETTING,
    }
)


def _passes(problem: EscrowError) -> bool:
    """Return whether waiting may mend it, or somebody meanwhile."""
    return problem.code in _PASSING
