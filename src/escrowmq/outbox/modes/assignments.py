"""Assigns queues, or parts of a queue, to consumers: rows of ``trans_recv_offset``, fenced by an epoch.

A :class:`Slot` is a queue, or a virtual queue: the offsets of one whose remainder by ``stride`` is ``part``. The slots
of a queue never overlap in one group. A row names its owner; another owner gets it only when it was let go, or taken
over manually, because only a person can know that a silent consumer is dead. A consumer that claims a row raises its
epoch, and from then on the one before can commit nothing any more.

Each queue has a row of stride 0 beside its slots: all claims lock it first, so that two cannot overlook each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from math import gcd
from typing import Any

import sqlalchemy as sa

from escrowmq.client.bus import Bus
from escrowmq.errors import Code, Fenced, Misuse, Rejected
from escrowmq.outbox.dialects import insert_if_absent
from escrowmq.outbox.tables import trans_recv_offset

_T = trans_recv_offset.c


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """The offsets of one queue for which ``offset % stride == part``."""

    shard: int
    queue: int
    stride: int = 1
    part: int = 0

    def __post_init__(self) -> None:
        if self.stride < 1 or not 0 <= self.part < self.stride:
            raise Misuse(
                Code.BAD_ARGUMENT, f"part {self.part} of stride {self.stride}", "parts count from 0 to stride - 1"
            )

    def overlaps(self, other: Slot) -> bool:
        """Return whether some offset belongs to both."""
        same_queue = (self.shard, self.queue) == (other.shard, other.queue)
        return same_queue and (self.part - other.part) % gcd(self.stride, other.stride) == 0

    def first(self, offset: int) -> int:
        """Its first offset that is not below ``offset``."""
        return offset + (self.part - offset) % self.stride


@dataclass(frozen=True, slots=True)
class Claim:
    """A slot that this consumer owns."""

    slot: Slot
    next_offset: int
    epoch: int


def slots_of(
    bus: Bus, topic: str, *, queues: Iterable[int] | None = None, stride: int = 1, part: int = 0
) -> list[Slot]:
    """Slots of a topic's queues at all brokers that are there (or of some queues): whole, or one part of each.

    Raises UNKNOWN_TOPIC, BAD_QUEUE; Overloaded(BROKER_AWAY) if that is unknown while a broker is away.
    """
    found = ends_of(bus, topic)
    wanted = None if queues is None else set(queues)
    if missing := (wanted or set()) - {queue for _, queue in found}:
        raise Rejected(Code.BAD_QUEUE, f"{topic!r} has no queue {min(missing)}")
    return [Slot(shard, queue, stride, part) for shard, queue in sorted(found) if wanted is None or queue in wanted]


def ends_of(bus: Bus, topic: str) -> dict[tuple[int, int], tuple[int, int]]:
    """By shard and queue, of the brokers that are there: the first offset that is stored and the one that comes next.
    Raises UNKNOWN_TOPIC, Overloaded(BROKER_AWAY) if a broker that has it may be away."""
    return {(line["shard"], line["queue"]): (line["head"], line["end"]) for line in bus.admin.offsets(topic)}


class Assignments:
    """The rows of one consumer group and topic. Every method takes a connection and writes inside its transaction."""

    def __init__(self, group: str, topic: str) -> None:
        self.group, self.topic = group, topic

    def claim(
        self,
        connection: sa.Connection,
        slots: Sequence[Slot],
        owner: str,
        start: Callable[[Slot], int],
        take_over: bool,
        owners: dict[Slot, str | None] | None = None,
    ) -> list[Claim]:
        """Make ``slots`` the owner's, all or none; a new one begins at ``start(slot)``. ``owners`` receives who had
        each.

        Raises Misuse(BAD_ARGUMENT) for slots that overlap, Rejected(ALREADY_EXISTS) for one that is another owner's
        unless ``take_over``.
        """
        claims = []
        for slot in sorted(slots):  # all of them before anything is read: some databases read as of their first look
            self._lock(connection, slot)
        for slot in sorted(slots):
            rows = self._rows(connection, slot)
            for other in [row for row in rows if row != slot and row.overlaps(slot)]:
                raise Misuse(
                    Code.BAD_ARGUMENT,
                    f"part {slot.part} of {slot.stride} of queue {slot.queue} overlaps part {other.part} of "
                    f"{other.stride}",
                    "all consumers of a queue use one stride; divide() changes it when the queue is at rest",
                )
            if slot not in rows:
                first = start(slot)
                connection.execute(sa.insert(trans_recv_offset), self._row(slot, first, 1, owner))
                claims.append(Claim(slot, first, 1))
                continue
            mine = self._where(slot)
            # the epoch first: that waits for a consumer that is in the middle of moving the row, and looks at it
            # afterwards
            connection.execute(sa.update(trans_recv_offset).where(*mine).values(epoch=_T.epoch + 1))
            row = connection.execute(sa.select(trans_recv_offset).where(*mine)).one()
            if row.owner is not None and row.owner != owner and not take_over:
                raise Rejected(
                    Code.ALREADY_EXISTS,
                    f"queue {slot.queue} of {self.topic!r} is {row.owner!r}'s",
                    "close that consumer; if it is surely dead: take_over=True, or fence()",
                )
            if owners is not None:
                owners[slot] = row.owner
            connection.execute(sa.update(trans_recv_offset).where(*mine).values(owner=owner))
            claims.append(Claim(slot, row.next_offset, row.epoch))
        return claims

    def move(self, connection: sa.Connection, claim: Claim, next_offset: int) -> Claim:
        """Move on. Raises Fenced unless the row is as this claim left it; the caller's transaction must not commit
        then."""
        mine = (*self._where(claim.slot), _T.epoch == claim.epoch, _T.next_offset == claim.next_offset)
        moved = connection.execute(sa.update(trans_recv_offset).where(*mine).values(next_offset=next_offset))
        if moved.rowcount != 1:
            raise Fenced(
                Code.FENCED,
                f"queue {claim.slot.queue} of {self.topic!r} was taken over from this consumer",
                "stop it; nothing of this batch was committed",
            )
        return Claim(claim.slot, next_offset, claim.epoch)

    def release(self, connection: sa.Connection, claims: Iterable[Claim]) -> None:
        """Let go of what is still this consumer's."""
        for claim in claims:
            mine = (*self._where(claim.slot), _T.epoch == claim.epoch)
            connection.execute(sa.update(trans_recv_offset).where(*mine).values(owner=None))

    def fence(self, connection: sa.Connection, slots: Iterable[Slot]) -> list[str | None]:
        """Take ``slots`` from the consumer that has them: manually, when that consumer is surely dead or must be
        stopped. Who had each, sorted."""
        owners: list[str | None] = []
        for slot in sorted(slots):
            self._lock(connection, slot)
            mine = self._where(slot)
            connection.execute(sa.update(trans_recv_offset).where(*mine).values(epoch=_T.epoch + 1))
            owners.append(connection.scalar(sa.select(_T.owner).where(*mine)))
            connection.execute(sa.update(trans_recv_offset).where(*mine).values(owner=None))
        return owners

    def put(self, connection: sa.Connection, slot: Slot, next_offset: int) -> tuple[Code, int | None]:
        """Put a slot that nobody owns to another place, manually; and where it stood. CONFLICT: somebody owns it;
        NOT_FOUND: there is none."""
        mine = self._where(slot)
        if connection.scalar(sa.select(sa.func.count()).select_from(trans_recv_offset).where(*mine)) == 0:
            return Code.NOT_FOUND, None  # and no guard is made for a queue that is mistyped
        self._lock(connection, slot)
        # the epoch first, as in claim(); whoever let go of the slot can move it no more
        raised = sa.update(trans_recv_offset).where(*mine, _T.owner.is_(None)).values(epoch=_T.epoch + 1)
        changed = connection.execute(raised).rowcount
        row = connection.execute(sa.select(trans_recv_offset).where(*mine)).one_or_none()
        if row is None:
            return Code.NOT_FOUND, None
        if not changed:
            return Code.CONFLICT, row.next_offset
        connection.execute(sa.update(trans_recv_offset).where(*mine).values(next_offset=next_offset))
        return Code.OK, row.next_offset

    def divide(self, connection: sa.Connection, shard: int, queue: int, stride: int) -> list[Slot]:
        """Divide a queue anew into ``stride`` parts; the slots. It must be at rest: let go by all, and none ahead of
        another.

        Raises Rejected(ALREADY_EXISTS) if a part has an owner, Misuse(BAD_ARGUMENT) if a part is ahead of what another
        has still to do.
        """
        whole = Slot(shard, queue)
        self._lock(connection, whole)
        rows = self._rows(connection, whole)
        if owned := next((row for row in rows.values() if row.owner is not None), None):
            raise Rejected(Code.ALREADY_EXISTS, f"queue {queue} of {self.topic!r} is {owned.owner!r}'s")
        frontier = min((slot.first(row.next_offset) for slot, row in rows.items()), default=0)
        if not rows or any(slot.first(frontier) < row.next_offset for slot, row in rows.items()):
            raise Misuse(
                Code.BAD_ARGUMENT,
                f"the parts of queue {queue} of {self.topic!r} stand at different places, or there are none",
                "let its consumers come to the end of the queue first",
            )
        epoch = max(row.epoch for row in rows.values()) + 1
        connection.execute(sa.delete(trans_recv_offset).where(*self._of_queue(whole), _T.stride > 0))
        slots = [Slot(shard, queue, stride, part) for part in range(stride)]
        connection.execute(sa.insert(trans_recv_offset), [self._row(slot, frontier, epoch, None) for slot in slots])
        return slots

    def _row(self, slot: Slot, next_offset: int, epoch: int, owner: str | None) -> dict[str, Any]:
        row = {**asdict(slot), "next_offset": next_offset, "epoch": epoch, "owner": owner}
        return {"consumer_group": self.group, "topic": self.topic, **row}

    def _of_queue(self, slot: Slot) -> tuple[Any, ...]:
        group = (_T.consumer_group == self.group, _T.topic == self.topic)
        return (*group, _T.shard == slot.shard, _T.queue == slot.queue)

    def _where(self, slot: Slot) -> tuple[Any, ...]:
        return (*self._of_queue(slot), _T.stride == slot.stride, _T.part == slot.part)

    def _lock(self, connection: sa.Connection, slot: Slot) -> None:
        """Lock the queue's row of stride 0 until the end of the transaction."""
        guard = {**self._row(slot, 0, 0, None), "stride": 0, "part": 0}
        connection.execute(insert_if_absent(connection.dialect.name, trans_recv_offset), guard)
        mine = (*self._of_queue(slot), _T.stride == 0)
        connection.execute(sa.update(trans_recv_offset).where(*mine).values(epoch=_T.epoch + 1))

    def _rows(self, connection: sa.Connection, slot: Slot) -> dict[Slot, Any]:
        query = sa.select(trans_recv_offset).where(*self._of_queue(slot), _T.stride > 0)
        return {Slot(row.shard, row.queue, row.stride, row.part): row for row in connection.execute(query)}
