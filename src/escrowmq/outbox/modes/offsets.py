"""The consumer's offset in its own database: it moves in the transaction of the effect, so each message has one effect.

The broker keeps nothing about such a consumer: it reads queues by offset, as many consumers as slots, assigned by hand.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import numpy as np
import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

from escrowmq.client.bus import Bus
from escrowmq.client.delivery import Content, Rows
from escrowmq.client.outgoing import check_name
from escrowmq.errors import Code, EscrowError, Misuse, Unknown
from escrowmq.outbox.modes.assignments import Assignments, Claim, Slot, ends_of, slots_of
from escrowmq.platform.failpoints import reach

_log = logging.getLogger(__name__)
IDLE_SECONDS = 0.05
"""Between two looks at queues that had nothing new."""
_FOREVER = 1 << 62


class Taken(Sequence[Content]):
    """Messages of one queue, in order: ``arrow`` is a record batch of schema DELIVERY; iterating gives its messages."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self.arrow = batch
        self._rows = Rows(0, batch)

    def __len__(self) -> int:
        return int(self.arrow.num_rows)

    @overload
    def __getitem__(self, row: int) -> Content: ...
    @overload
    def __getitem__(self, row: slice) -> list[Content]: ...
    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return [Content(self._rows, one) for one in range(*row.indices(len(self)))]
        return Content(self._rows, range(len(self))[row])


Effect = Callable[[Session, Taken], object]


class OffsetConsumer:
    """``OffsetConsumer(bus, engine, "cart", "orders", assignment).run(effect)``; ``effect(session, messages)`` once a message.

    ``assignment``: :func:`slots_of` the topic (None: all of it). ``owner`` names this consumer; one that is started again under its name
    takes its own slots back, whoever else must be told ``take_over``. ``start``: where a slot begins that was never read:
    "earliest", "latest" or an offset. ``on_purged``: "raise" RANGE_PURGED when retention was quicker than this consumer, or
    "skip" to the first offset that is left, with a line in the log. One thread at a time.

    Raises Misuse(BAD_ARGUMENT) for slots that overlap others of the group, Rejected(ALREADY_EXISTS) if another owner has one,
    UNKNOWN_TOPIC.
    """

    def __init__(
        self,
        bus: Bus,
        engine: sa.Engine,
        group: str,
        topic: str,
        assignment: Sequence[Slot] | None = None,
        *,
        owner: str = "consumer",
        take_over: bool = False,
        start: str | int = "earliest",
        on_purged: str = "raise",
        sessions: Callable[[], Session] | None = None,
    ) -> None:
        check_name(group, Code.BAD_GROUP_NAME)
        if on_purged not in ("raise", "skip"):
            raise Misuse(Code.BAD_ARGUMENT, f"on_purged = {on_purged!r}", "raise or skip")
        if start not in ("earliest", "latest") and (isinstance(start, bool) or not isinstance(start, int)):
            raise Misuse(Code.BAD_ARGUMENT, f"start = {start!r}", 'an offset, "earliest" or "latest"')
        self._bus, self._engine, self._topic = bus, engine, topic
        self._skips = on_purged == "skip"
        self._sessions = sessions or sessionmaker(engine)
        self._rows = Assignments(group, topic)
        wanted = slots_of(bus, topic) if assignment is None else list(assignment)
        ends = ends_of(bus, topic)

        def first(slot: Slot) -> int:
            if isinstance(start, int):
                return start
            return ends[slot.shard, slot.queue][start == "latest"]

        with engine.begin() as connection:
            claims = self._rows.claim(connection, wanted, owner, first, take_over)
        self._claims = {claim.slot: claim for claim in claims}

    def __enter__(self) -> OffsetConsumer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def positions(self) -> dict[Slot, int]:
        """The next offset of each slot, as this consumer last moved it."""
        return {slot: claim.next_offset for slot, claim in self._claims.items()}

    def close(self) -> None:
        """Let go of the slots: any consumer may claim them now. (A consumer that dies keeps them: see ``take_over``.)"""
        with self._engine.begin() as connection:
            self._rows.release(connection, self._claims.values())

    def poll(self, effect: Effect, max_messages: int = 1000) -> int:
        """Go once over all slots: up to ``max_messages`` of each, each slot in a transaction of its own; how many had their effect.

        Raises what the effect raised (its transaction is rolled back, the slot stays where it was), Fenced if a slot was taken
        over (so is that), RANGE_PURGED, Unknown when a broker is away.
        """
        return sum(self._step(claim, effect, max_messages) for claim in list(self._claims.values()))

    def run(
        self,
        effect: Effect,
        *,
        max_messages: int = 1000,
        idle_timeout: float | None = None,
        stop: threading.Event | None = None,
    ) -> int:
        """:meth:`poll` again and again until ``stop`` is set, or nothing came for ``idle_timeout`` seconds; how many.

        A broker that is away is waited for. Raises as :meth:`poll` otherwise.
        """
        stopping, total, last = stop or threading.Event(), 0, time.monotonic()
        while not stopping.is_set():
            try:
                found = self.poll(effect, max_messages)
            except Unknown as problem:
                _log.debug("cannot read now: %s", problem)
                found = 0
            total += found
            if found:
                last = time.monotonic()
            elif idle_timeout is not None and time.monotonic() - last > idle_timeout:
                break
            else:
                stopping.wait(IDLE_SECONDS)
        return total

    def _step(self, claim: Claim, effect: Effect, max_messages: int) -> int:
        read = self._read(claim, max_messages)
        reach("offsets.read")
        if read is None or not read.num_rows:
            return 0
        offsets = read.column("offset").to_numpy()
        chosen = np.flatnonzero(offsets % claim.slot.stride == claim.slot.part)
        mine = read if len(chosen) == len(offsets) else read.take(pa.array(chosen))
        self._claims[claim.slot] = self._apply(claim, int(offsets[-1]) + 1, Taken(mine), effect)
        reach("offsets.applied")
        return len(chosen)

    def _apply(self, claim: Claim, next_offset: int, messages: Taken, effect: Effect) -> Claim:
        """The effect and the offset, in one transaction; the offset first, because it locks the row and tells the fenced."""
        with self._sessions() as session, session.begin():
            moved = self._rows.move(session.connection(), claim, next_offset)
            if len(messages):
                effect(session, messages)
            session.flush()
            reach("offsets.applying")
        return moved

    def _read(self, claim: Claim, max_messages: int) -> pa.RecordBatch | None:
        slot = claim.slot
        number = self._bus.router.of_shard(slot.shard, 30.0)
        # an end, because "from 0 to no end" means "what is there", and would pass over what retention took
        window = {"start": claim.next_offset, "end": _FOREVER, "max_rows": max_messages * slot.stride}
        request = {"source": self._topic, "queue": slot.queue, "columns": None, **window}
        try:
            return one_batch(self._bus.router.links[number].read(request))
        except EscrowError as problem:
            if problem.code is not Code.RANGE_PURGED or not self._skips:
                raise
            self._skip(claim)
            return None

    def _skip(self, claim: Claim) -> None:
        slot = claim.slot
        head = ends_of(self._bus, self._topic)[slot.shard, slot.queue][0]
        _log.warning(
            "offsets %d to %d of queue %d of %r have left the log unread: skipped",
            claim.next_offset,
            head - 1,
            slot.queue,
            self._topic,
        )
        with self._engine.begin() as connection:
            self._claims[slot] = self._rows.move(connection, claim, head)


def one_batch(reader: pa.RecordBatchReader) -> pa.RecordBatch | None:
    """All that a reader gives, as one batch; None if that is nothing."""
    batches: Iterator[pa.RecordBatch] = iter(reader)
    found = [batch for batch in batches if batch.num_rows]
    return pa.Table.from_batches(found).combine_chunks().to_batches()[0] if found else None


def fence(engine: sa.Engine, group: str, topic: str, slots: Sequence[Slot]) -> None:
    """Take slots from a consumer that is surely dead, or must be stopped: it can commit nothing about them any more."""
    with engine.begin() as connection:
        Assignments(group, topic).fence(connection, slots)


def divide(engine: sa.Engine, group: str, topic: str, shard: int, queue: int, stride: int) -> list[Slot]:
    """Divide a queue that is at rest into ``stride`` virtual queues; their slots. Raises as :meth:`Assignments.divide`."""
    with engine.begin() as connection:
        return Assignments(group, topic).divide(connection, shard, queue, stride)
