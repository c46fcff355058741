"""Assigns queues, or parts of a queue, to consumers: rows of ``trans_recv_offset``, fenced by an epoch.

A :class:`Slot` is a queue, or a virtual queue: the offsets of a queue whose remainder by ``stride`` is ``part``. The
slots of a queue never overlap in one group. A row names its owner. Another owner gets it only when it was released, or
taken over by an operator, because only a person can know that a silent consumer is dead. A consumer that claims a row
raises its epoch, and from then on the previous one can commit nothing any more.

Each queue has a row of stride 0 beside its slots. All claims lock it first, so that two claims cannot miss each other.

Operator actions (:func:`move`, :func:`fence`, :func:`divide`) are recorded: :mod:`escrowmq.outbox.acts`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from math import gcd
from typing import Any, Unpack

import sqlalchemy as sa

from escrowmq.client.bus import Bus
from escrowmq.errors import Code, Fenced, Misuse, Rejected
from escrowmq.outbox.acts import Operator, record
from escrowmq.outbox.dialects import insert_if_absent
from escrowmq.outbox.session import transaction_of
from escrowmq.outbox.tables import trans_recv_offset

MOST_SLOTS = 1_000
"""Slots of one operator action."""
Start = Callable[["Slot"], int]
_T = trans_recv_offset.c
_ORDER = (_T.consumer_group, _T.topic, _T.shard, _T.queue, _T.stride, _T.part)


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """The offsets of one queue for which ``offset % stride == part``."""

    shard: int
    queue: int
    stride: int = 1
    part: int = 0

    def __post_init__(self) -> None:
        if self.stride < 1 or not 0 <= self.part < self.stride:
            text = f"part {self.part} of stride {self.stride}"
            raise Misuse(Code.BAD_ARGUMENT, text, "parts count from 0 to stride - 1")

    def overlaps(self, other: Slot) -> bool:
        """Return whether some offset belongs to both slots."""
        same_queue = (self.shard, self.queue) == (other.shard, other.queue)
        return same_queue and (self.part - other.part) % gcd(self.stride, other.stride) == 0

    def first(self, offset: int) -> int:
        """Return this slot's first offset that is not below ``offset``."""
        return offset + (self.part - offset) % self.stride


@dataclass(frozen=True, slots=True)
class Claim:
    """A slot that this consumer owns."""

    slot: Slot
    next_offset: int
    epoch: int
    was: str | None = None
    """The owner before this claim."""


@dataclass(frozen=True, slots=True)
class Place:
    """The position of a slot."""

    group: str
    topic: str
    slot: Slot
    next_offset: int
    epoch: int
    owner: str | None
    """The consumer that has it; None: nobody."""


@dataclass(frozen=True, slots=True)
class Moved:
    """The result for one slot: OK, NOT_FOUND, or CONFLICT: it has an owner. ``was``: its offset before."""

    slot: Slot
    code: Code
    was: int | None


def slots_of(
    bus: Bus, topic: str, *, queues: Iterable[int] | None = None, stride: int = 1, part: int = 0
) -> list[Slot]:
    """Return the slots of a topic's queues (``queues``: of these only) at all reachable brokers: whole queues, or of
    each the part ``part`` of ``stride``.

    Raises UNKNOWN_TOPIC, BAD_QUEUE; Overloaded(BROKER_AWAY) if that is unknown while a broker is away.
    """
    found = ends_of(bus, topic)
    wanted = None if queues is None else set(queues)
    if missing := (wanted or set()) - {queue for _, queue in found}:
        raise Rejected(Code.BAD_QUEUE, f"{topic!r} has no queue {min(missing)}")
    return [Slot(shard, queue, stride, part) for shard, queue in sorted(found) if wanted is None or queue in wanted]


def ends_of(bus: Bus, topic: str) -> dict[tuple[int, int], tuple[int, int]]:
    """Return by (shard, queue), of the reachable brokers, two offsets: of the first stored message, and of the next one
    to be stored. Raises UNKNOWN_TOPIC, Overloaded(BROKER_AWAY) if a broker that has it may be away."""
    return {(line["shard"], line["queue"]): (line["head"], line["end"]) for line in bus.admin.offsets(topic)}


class Assignments:
    """The rows of one consumer group and topic. Every method writes inside the transaction of its connection."""

    def __init__(self, group: str, topic: str) -> None:
        self.group, self.topic = group, topic

    def claim(
        self, connection: sa.Connection, slots: Sequence[Slot], owner: str, start: Start, take_over: bool
    ) -> list[Claim]:
        """Make ``owner`` the owner of ``slots``, all or none, and raise their epochs. Returns their claims in the order
        of the slots. A slot without a row begins at ``start(slot)``.

        Raises Misuse(BAD_ARGUMENT) for slots that overlap, Rejected(ALREADY_EXISTS) for one of another owner unless
        ``take_over``.
        """
        claims = []
        for slot in sorted(slots):  # all before the first read: some databases read as of that moment
            self._lock(connection, slot)
        for slot in sorted(slots):
            rows = self._rows(connection, slot)
            if other := next((row for row in rows if row != slot and row.overlaps(slot)), None):
                text = f"part {slot.part} of {slot.stride} of queue {slot.queue} overlaps"
                hint = "all consumers of a queue use one stride; divide() changes it when the queue is at rest"
                raise Misuse(Code.BAD_ARGUMENT, f"{text} part {other.part} of {other.stride}", hint)
            if slot not in rows:
                first = start(slot)
                connection.execute(sa.insert(trans_recv_offset), self._row(slot, first, 1, owner))
                claims.append(Claim(slot, first, 1))
                continue
            # the epoch first: this waits for a consumer that is moving the row, which is read afterwards
            self._change(connection, slot, epoch=_T.epoch + 1)
            row = connection.execute(sa.select(trans_recv_offset).where(*self._where(slot))).one()
            if row.owner is not None and row.owner != owner and not take_over:
                hint = "close that consumer; if it is surely dead: take_over=True, or fence()"
                raise self._owned(slot.queue, row.owner, hint)
            self._change(connection, slot, owner=owner)
            claims.append(Claim(slot, row.next_offset, row.epoch, row.owner))
        return claims

    def move(self, connection: sa.Connection, claim: Claim, next_offset: int) -> Claim:
        """Set the offset of a claimed slot to ``next_offset``; return the new claim. Raises Fenced unless the row is as
        this claim left it; the caller's transaction must not commit then."""
        unchanged = (_T.epoch == claim.epoch, _T.next_offset == claim.next_offset)
        if self._change(connection, claim.slot, *unchanged, next_offset=next_offset) != 1:
            text = f"queue {claim.slot.queue} of {self.topic!r} was taken over from this consumer"
            raise Fenced(Code.FENCED, text, "stop it; nothing of this batch was committed")
        return Claim(claim.slot, next_offset, claim.epoch)

    def release(self, connection: sa.Connection, claims: Iterable[Claim]) -> None:
        """Clear the owner of those claimed slots that no other consumer has claimed since."""
        for claim in claims:
            self._change(connection, claim.slot, _T.epoch == claim.epoch, owner=None)

    def put(self, connection: sa.Connection, slot: Slot, next_offset: int) -> tuple[Code, int | None]:
        """Set the offset of a slot without an owner to ``next_offset``. Returns OK, CONFLICT (it has an owner) or
        NOT_FOUND, and its offset before (None if not found)."""
        mine = self._where(slot)
        if connection.scalar(sa.select(sa.func.count()).select_from(trans_recv_offset).where(*mine)) == 0:
            return Code.NOT_FOUND, None  # before _lock() makes a guard of a mistyped queue
        self._lock(connection, slot)
        # the epoch first, as in claim(); a consumer that released the slot can move it no more
        changed = self._change(connection, slot, _T.owner.is_(None), epoch=_T.epoch + 1)
        row = connection.execute(sa.select(trans_recv_offset).where(*mine)).one_or_none()
        if row is None:
            return Code.NOT_FOUND, None
        if not changed:
            return Code.CONFLICT, row.next_offset
        self._change(connection, slot, next_offset=next_offset)
        return Code.OK, row.next_offset

    def _owned(self, queue: int, owner: str, hint: str | None = None) -> Rejected:
        return Rejected(Code.ALREADY_EXISTS, f"queue {queue} of {self.topic!r} is {owner!r}'s", hint)

    def _row(self, slot: Slot, next_offset: int, epoch: int, owner: str | None) -> dict[str, Any]:
        row = {**asdict(slot), "next_offset": next_offset, "epoch": epoch, "owner": owner}
        return {"consumer_group": self.group, "topic": self.topic, **row}

    def _of_queue(self, slot: Slot) -> tuple[Any, ...]:
        group = (_T.consumer_group == self.group, _T.topic == self.topic)
        return (*group, _T.shard == slot.shard, _T.queue == slot.queue)

    def _where(self, slot: Slot) -> tuple[Any, ...]:
        return (*self._of_queue(slot), _T.stride == slot.stride, _T.part == slot.part)

    def _change(self, connection: sa.Connection, slot: Slot, *only: sa.ColumnElement[bool], **values: Any) -> int:
        change = sa.update(trans_recv_offset).where(*self._where(slot), *only)
        return connection.execute(change.values(**values)).rowcount

    def _lock(self, connection: sa.Connection, slot: Slot) -> None:
        """Lock the slot's queue until the end of the transaction, by its row of stride 0, which is created if it is
        missing."""
        guard = {**self._row(slot, 0, 0, None), "stride": 0, "part": 0}
        connection.execute(insert_if_absent(connection.dialect.name, trans_recv_offset), guard)
        mine = (*self._of_queue(slot), _T.stride == 0)
        connection.execute(sa.update(trans_recv_offset).where(*mine).values(epoch=_T.epoch + 1))

    def _rows(self, connection: sa.Connection, slot: Slot) -> dict[Slot, Any]:
        query = sa.select(trans_recv_offset).where(*self._of_queue(slot), _T.stride > 0)
        return {_slot(row): row for row in connection.execute(query)}


def _slot(row: Any) -> Slot:
    return Slot(row.shard, row.queue, row.stride, row.part)


# For operators


def list_places(
    engine: sa.Engine,
    group: str | None = None,
    topic: str | None = None,
    *,
    limit: int = 1000,
    after: Place | None = None,
) -> list[Place]:
    """List the slots of one group or topic, or of all, with owner and next offset, in the order of their keys; the next
    page is ``after`` the last one."""
    wanted = _T.stride > 0  # a row of stride 0 guards its queue
    if group is not None:
        wanted &= _T.consumer_group == group
    if topic is not None:
        wanted &= _T.topic == topic
    if after is not None:
        last = (after.group, after.topic, *astuple(after.slot))
        wanted &= sa.tuple_(*_ORDER) > sa.tuple_(*(sa.literal(value) for value in last))
    page = sa.select(trans_recv_offset).where(wanted).order_by(*_ORDER).limit(limit)
    with engine.connect() as connection, transaction_of(connection, trans_recv_offset):
        return [
            Place(row.consumer_group, row.topic, _slot(row), row.next_offset, row.epoch, row.owner)
            for row in connection.execute(page)
        ]


def move(
    engine: sa.Engine, group: str, topic: str, places: Mapping[Slot, int], **operator: Unpack[Operator]
) -> list[Moved]:
    """Set slots to other offsets, so that messages are handled again, or skipped; return OK, NOT_FOUND or CONFLICT per
    slot. Only slots without an owner move: close the consumer, or :func:`fence` it if it is surely dead.

    Messages that are handled again have their effect again. Raises Misuse(BAD_ARGUMENT).
    """
    _check(places)
    if any(isinstance(offset, bool) or not isinstance(offset, int) or offset < 0 for offset in places.values()):
        raise Misuse(Code.BAD_ARGUMENT, "an offset is a whole number from 0")
    rows = Assignments(group, topic)
    about = {"group": group, "topic": topic, "places": [[*astuple(slot), to] for slot, to in sorted(places.items())]}
    with record(engine, "offsets.move", about, **operator) as (connection, ended):
        done = {slot: Moved(slot, *rows.put(connection, slot, places[slot])) for slot in sorted(places)}
        ended["results"] = dict(Counter(one.code.name for one in done.values()))
        ended["each"] = [[one.code.name, one.was] for one in done.values()]
    return [done[slot] for slot in places]


def fence(engine: sa.Engine, group: str, topic: str, slots: Sequence[Slot], **operator: Unpack[Operator]) -> None:
    """Take slots from a consumer that is surely dead, or must be stopped: they have no owner then, and it can commit
    nothing about them any more."""
    _check(slots)
    rows = Assignments(group, topic)
    about = {"group": group, "topic": topic, "slots": [list(astuple(slot)) for slot in sorted(slots)]}
    with record(engine, "offsets.fence", about, **operator) as (connection, ended):
        owners: list[str | None] = []
        for slot in sorted(slots):
            rows._lock(connection, slot)
            rows._change(connection, slot, epoch=_T.epoch + 1)
            owners.append(connection.scalar(sa.select(_T.owner).where(*rows._where(slot))))
            rows._change(connection, slot, owner=None)
        ended["owners"] = owners


def divide(
    engine: sa.Engine, group: str, topic: str, shard: int, queue: int, stride: int, **operator: Unpack[Operator]
) -> list[Slot]:
    """Divide a queue anew into ``stride`` virtual queues; return their slots. All must be released, and none ahead of
    another.

    Raises Rejected(ALREADY_EXISTS) if a part has an owner, Misuse(BAD_ARGUMENT) if a part is ahead of another's pending
    offsets; and records nothing then.
    """
    rows, whole = Assignments(group, topic), Slot(shard, queue)
    about = {"group": group, "topic": topic, "shard": shard, "queue": queue, "stride": stride}
    with record(engine, "offsets.divide", about, **operator) as (connection, ended):
        rows._lock(connection, whole)
        found = rows._rows(connection, whole)
        if owned := next((row for row in found.values() if row.owner is not None), None):
            raise rows._owned(queue, owned.owner)
        frontier = min((slot.first(row.next_offset) for slot, row in found.items()), default=0)
        if not found or any(slot.first(frontier) < row.next_offset for slot, row in found.items()):
            text = f"the parts of queue {queue} of {topic!r} stand at different places, or there are none"
            raise Misuse(Code.BAD_ARGUMENT, text, "let its consumers come to the end of the queue first")
        epoch = max(row.epoch for row in found.values()) + 1
        connection.execute(sa.delete(trans_recv_offset).where(*rows._of_queue(whole), _T.stride > 0))
        slots = [Slot(shard, queue, stride, part) for part in range(stride)]
        connection.execute(sa.insert(trans_recv_offset), [rows._row(slot, frontier, epoch, None) for slot in slots])
        ended["slots"] = len(slots)
    return slots


def _check(slots: Mapping[Slot, Any] | Sequence[Slot]) -> None:
    if len(slots) > MOST_SLOTS:
        raise Misuse(Code.BAD_ARGUMENT, f"{len(slots)} slots in one act", f"at most {MOST_SLOTS}")
