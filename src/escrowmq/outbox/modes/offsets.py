"""The consumer's offset in its own database: it moves in the transaction of the effect, so each message has one effect.

The broker stores nothing about such a consumer: it reads queues by offset, in as many consumers as slots, assigned
manually.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple
from datetime import UTC, datetime
from math import inf
from threading import Event
from typing import Any, overload

import numpy as np
import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

from escrowmq.client.bus import Bus
from escrowmq.client.consuming.delivery import Rows
from escrowmq.client.links.presence import Missing
from escrowmq.client.reading.reader import ReadBatch, Reader, ReadMessage, message_at
from escrowmq.errors import Code, Misuse, Rejected
from escrowmq.message.names import check_name
from escrowmq.outbox.acts import record
from escrowmq.outbox.modes.assignments import Assignments, Claim, Slot, Start, ends_of
from escrowmq.outbox.modes.both_reach import has_signs
from escrowmq.platform.failpoints import reach

_log = logging.getLogger(__name__)
STOP_SECONDS = 0.5
"""Time (s) after which an idle consumer checks whether to stop."""


class Taken(Sequence[ReadMessage]):
    """Messages of one queue, in order: ``arrow`` is a record batch of schema DELIVERY; iterating gives its messages.
    The body of a damaged message (``damaged``) raises DAMAGED, which rolls the effect back."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self.arrow = batch
        self._rows = Rows(0, batch)

    def __len__(self) -> int:
        return int(self.arrow.num_rows)

    @overload
    def __getitem__(self, row: int) -> ReadMessage: ...
    @overload
    def __getitem__(self, row: slice) -> list[ReadMessage]: ...
    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return [message_at(self._rows, one) for one in range(*row.indices(len(self)))]
        return message_at(self._rows, range(len(self))[row])


Effect = Callable[[Session, Taken], object]


class OffsetConsumer:
    """``OffsetConsumer(bus, engine, "cart", "orders", owner="cart-1").run(effect)``; ``effect(session, messages)`` once
    per message.

    ``assignment``: :func:`slots_of` the topic (None: all of it, with queues that are made later, at any broker).
    ``owner`` names this consumer alone; restarted under its name it claims its own slots again (and fences a process
    that still runs under it), another name needs ``take_over``. ``start``: where a slot begins that was never read:
    "earliest", "latest" or an offset. ``on_purged``: "raise" RANGE_PURGED when retention removed unread messages, or
    "skip" to the first offset that is left, with a line in the log. One thread at a time.

    Raises Misuse(BAD_ARGUMENT) for slots that overlap others of the group, Rejected(ALREADY_EXISTS) if another owner
    has one, UNKNOWN_TOPIC. Reading raises Misuse(BAD_ARGUMENT) where a part of a queue has messages of the both-reach
    mode: a prepare and its decision would go to different consumers.
    """

    def __init__(
        self,
        bus: Bus,
        engine: sa.Engine,
        group: str,
        topic: str,
        assignment: Sequence[Slot] | None = None,
        *,
        owner: str,
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
        self._assignment = None if assignment is None else list(assignment)
        self._owner, self._take_over, self._start = owner, take_over, start
        self._made = datetime.now(UTC)
        self._claims: dict[Slot, Claim] = {}
        self._missing: list[Missing] = []
        self._claim(None)
        self._behind = self._overtaken = False
        self._reader = self._read()

    @property
    def missing(self) -> list[Missing]:
        """Of several brokers, those that are not read now, with the reason. Their slots are claimed when they are
        back."""
        known = {one["broker"] for one in self._missing}
        return [*self._missing, *(one for one in self._reader.missing if one["broker"] not in known)]

    def _claim(self, since: datetime | None) -> bool:
        """Claim the new slots at reachable brokers; return whether there were any. ``since``: with start "latest", a
        slot that is found later begins at the first message visible at this time or later (None: at the end of its
        queue)."""
        lines = self._bus.admin.offsets(self._topic, time=since if self._start == "latest" else None)
        self._missing = lines.missing
        found = {(line["shard"], line["queue"]): line for line in lines}
        wanted = [Slot(*place) for place in sorted(found)] if self._assignment is None else self._assignment
        unknown = [slot for slot in wanted if (slot.shard, slot.queue) not in found]
        if unknown and not self._missing:
            place = f"queue {unknown[0].queue} at shard {unknown[0].shard:08x}"
            raise Rejected(Code.BAD_QUEUE, f"{self._topic!r} has no {place}")
        fresh = [slot for slot in wanted if slot not in self._claims and slot not in unknown]

        def first(slot: Slot) -> int:
            if isinstance(self._start, int):
                return self._start
            line: Any = found[slot.shard, slot.queue]
            return int(line["head"] if self._start == "earliest" else line.get("offset_at", line["end"]))

        claims = self._claim_slots(fresh, first)
        self._claims.update((claim.slot, claim) for claim in claims)
        return bool(claims)

    def _claim_slots(self, fresh: Sequence[Slot], first: Start) -> list[Claim]:
        """Claim slots that this consumer does not have yet; one without a row begins at ``first(slot)``.

        Raises Rejected(ALREADY_EXISTS) if another owner has one. With ``take_over`` it is taken over instead, which is
        recorded as an operator action (:mod:`escrowmq.outbox.acts`).
        """
        try:
            with self._engine.begin() as connection:
                return self._rows.claim(connection, fresh, self._owner, first, False)
        except Rejected as problem:
            if problem.code is not Code.ALREADY_EXISTS or not self._take_over:
                raise
        slots = [list(astuple(slot)) for slot in sorted(fresh)]
        about = {"group": self._rows.group, "topic": self._topic, "owner": self._owner, "slots": slots}
        with record(self._engine, "offsets.take_over", about) as (connection, ended):
            claims = self._rows.claim(connection, fresh, self._owner, first, True)
            ended["owners"] = [claim.was for claim in claims]
        return claims

    def _read(self) -> Reader:
        """Return a reader from the claimed offsets; if all of the topic was claimed, it finds queues that are created
        later, too."""
        places = self._positions()
        return self._bus.reader(self._topic, queues=None if self._assignment is None else list(places), start=places)

    def _read_again(self) -> None:
        self._reader.close()
        self._reader = self._read()
        self._behind = self._overtaken = False

    def __enter__(self) -> OffsetConsumer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def positions(self) -> dict[Slot, int]:
        """The next offset of each slot, as last moved by this consumer."""
        return {slot: claim.next_offset for slot, claim in self._claims.items()}

    def close(self) -> None:
        """Release the slots, so that any consumer may claim them; one that dies keeps them: see ``take_over``."""
        self._reader.close()
        with self._engine.begin() as connection:
            self._rows.release(connection, self._claims.values())

    def poll(self, effect: Effect, max_messages: int = 1000) -> int:
        """Apply ``effect`` to up to ``max_messages`` available messages of one queue, in one transaction. Returns how
        many; 0: there are none.

        Raises what the effect raised (its transaction is rolled back, the slot is unchanged), Fenced if the slot was
        taken over (likewise), RANGE_PURGED.
        """
        return next((count for count in self._steps(effect, max_messages, 0.0) if count), 0)

    def run(
        self, effect: Effect, *, max_messages: int = 1000, idle_timeout: float | None = None, stop: Event | None = None
    ) -> int:
        """Repeat :meth:`poll` until ``stop`` is set, or no message arrives for ``idle_timeout`` seconds. Returns how
        many messages were handled.

        Waits for a broker that is away. Raises as :meth:`poll`.
        """
        total, last = 0, time.monotonic()
        stop = stop or Event()
        idle = inf if idle_timeout is None else idle_timeout
        while not stop.is_set():
            for count in self._steps(effect, max_messages, min(idle, STOP_SECONDS)):
                total, last = total + count, time.monotonic()
                if stop.is_set():
                    break
            if time.monotonic() - last >= idle:
                break
        return total

    def _steps(self, effect: Effect, max_messages: int, idle_timeout: float) -> Iterator[int]:
        """Read batches and apply ``effect`` to the new messages of each slot; yield for each batch how many were
        handled. First claims the slots of brokers that are back. Ends when none arrives for ``idle_timeout``
        seconds."""
        away = {one["broker"] for one in self._bus.missing()} if self._missing else set()
        if any(one["broker"] not in away for one in self._missing) and self._claim(self._made):
            self._read_again()  # with the slots of a broker that was away before
        if self._overtaken:
            self._read_again()
        if self._behind:
            self._reader.seek(self._positions())
            self._behind = False
        try:
            for batch in self._reader.batches(max_messages, idle_timeout=idle_timeout):
                reach("offsets.read")
                self._behind = True  # the database is behind the reader until it has moved too
                if self._is_new(batch.place):
                    # if this claim fails, only a new reader returns this batch again
                    self._overtaken = True
                    self._claim(self._made)
                    if self._is_new(batch.place):  # its broker has gone away meanwhile
                        return
                    self._overtaken = False
                count = self._give(batch, effect)
                self._behind = False
                reach("offsets.applied")
                yield count
        except Rejected as problem:
            if problem.code is not Code.RANGE_PURGED or not self._skips:
                raise
            self._skip()

    def _is_new(self, place: tuple[int, int]) -> bool:
        """Return whether ``place`` (shard and queue) is a queue without a claim, created after all of the topic was
        claimed."""
        return self._assignment is None and not any((slot.shard, slot.queue) == place for slot in self._claims)

    def _give(self, batch: ReadBatch, effect: Effect) -> int:
        offsets, given = batch.arrow.column("offset").to_numpy(), 0
        for slot, claim in self._claims.items():
            fresh = offsets >= claim.next_offset
            if (slot.shard, slot.queue) != batch.place or not fresh.any():
                continue
            if slot.stride > 1 and has_signs(batch.arrow.column("properties")):
                text = f"queue {slot.queue} of {self._topic!r} has messages of the both-reach mode, and this consumer"
                hint = (
                    "a prepare and its decision must reach one consumer: give it the whole queue, or use split_topic()"
                )
                raise Misuse(Code.BAD_ARGUMENT, f"{text} reads part {slot.part} of {slot.stride} of it", hint)
            rows = np.flatnonzero(fresh & (offsets % slot.stride == slot.part))
            messages = Taken(batch.arrow if len(rows) == len(offsets) else batch.arrow.take(pa.array(rows)))
            self._claims[slot] = self._apply(claim, batch.next_offset, messages, effect)
            given += len(rows)
        return given

    def _positions(self) -> dict[tuple[int, int], int]:
        """Return by (shard, queue) the offset at which to continue to read: the lowest of its slots."""
        found: dict[tuple[int, int], int] = {}
        for slot, claim in self._claims.items():
            place = (slot.shard, slot.queue)
            found[place] = min(found.get(place, claim.next_offset), claim.next_offset)
        return found

    def _apply(self, claim: Claim, next_offset: int, messages: Taken, effect: Effect) -> Claim:
        """Move the claimed slot to ``next_offset`` and apply the effect, in one transaction; return the new claim. The
        offset first, because that locks the row and fails if fenced."""
        with self._sessions() as session, session.begin():
            moved = self._rows.move(session.connection(), claim, next_offset)
            if len(messages):
                effect(session, messages)
            session.flush()
            reach("offsets.applying")
        return moved

    def _skip(self) -> None:
        """After RANGE_PURGED: move every slot behind the first stored offset of its queue to that offset, and log what
        is skipped."""
        ends = ends_of(self._bus, self._topic)
        for slot, claim in self._claims.items():
            head = ends.get((slot.shard, slot.queue), (0, 0))[0]  # nothing is known of a broker that is away
            if claim.next_offset >= head:
                continue
            lost = (claim.next_offset, head - 1, slot.queue, self._topic)
            _log.warning("offsets %d to %d of queue %d of %r have left the log unread: skipped", *lost)
            with self._engine.begin() as connection:
                self._claims[slot] = self._rows.move(connection, claim, head)
        self._behind = True
