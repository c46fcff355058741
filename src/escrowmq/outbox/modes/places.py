"""Offsets of consumer groups in a database (``trans_recv_offset``), for an operator: list, move, fence, divide. Every
act is recorded: :mod:`escrowmq.outbox.acts`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import sqlalchemy as sa

from escrowmq.errors import Code, Misuse
from escrowmq.outbox.acts import record
from escrowmq.outbox.modes.assignments import Assignments, Slot
from escrowmq.outbox.session import transaction_of
from escrowmq.outbox.tables import trans_recv_offset

MOST_SLOTS = 1_000
"""Of one act."""
_T = trans_recv_offset.c
_ORDER = (_T.consumer_group, _T.topic, _T.shard, _T.queue, _T.stride, _T.part)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a slot stands."""

    group: str
    topic: str
    slot: Slot
    next_offset: int
    epoch: int
    owner: str | None
    """The consumer that has it; None: nobody."""


@dataclass(frozen=True, slots=True)
class Moved:
    """The result for one slot: OK, NOT_FOUND, or CONFLICT: somebody owns it. ``was``: where it stood."""

    slot: Slot
    code: Code
    was: int | None


def list_places(
    engine: sa.Engine,
    group: str | None = None,
    topic: str | None = None,
    *,
    limit: int = 1000,
    after: Place | None = None,
) -> list[Place]:
    """Slots of one group or topic, or of all, in order; the next page is ``after`` the last one."""
    wanted = _T.stride > 0  # a row of stride 0 guards its queue
    if group is not None:
        wanted &= _T.consumer_group == group
    if topic is not None:
        wanted &= _T.topic == topic
    if after is not None:
        slot = after.slot
        last = (after.group, after.topic, slot.shard, slot.queue, slot.stride, slot.part)
        wanted &= sa.tuple_(*_ORDER) > sa.tuple_(*(sa.literal(value) for value in last))
    page = sa.select(trans_recv_offset).where(wanted).order_by(*_ORDER).limit(limit)
    with engine.connect() as connection, transaction_of(connection, trans_recv_offset):
        return [_place(row) for row in connection.execute(page)]


def move(
    engine: sa.Engine,
    group: str,
    topic: str,
    places: Mapping[Slot, int],
    *,
    by: str | None = None,
    why: str | None = None,
) -> list[Moved]:
    """Put slots to other offsets, so that messages are handled again, or passed over; one result a slot. Only what
    nobody owns is moved: close its consumer, or :func:`fence` it if it is surely dead.

    Messages that are handled again have their effect again. Raises Misuse(BAD_ARGUMENT).
    """
    _check(places)
    if any(isinstance(offset, bool) or not isinstance(offset, int) or offset < 0 for offset in places.values()):
        raise Misuse(Code.BAD_ARGUMENT, "an offset is a whole number from 0")
    rows = Assignments(group, topic)
    about = {"group": group, "topic": topic, "places": [[*_numbers(slot), to] for slot, to in sorted(places.items())]}
    with record(engine, "offsets.move", about, by=by, why=why) as (connection, ended):
        done = {slot: Moved(slot, *rows.put(connection, slot, places[slot])) for slot in sorted(places)}
        ended["results"] = dict(Counter(one.code.name for one in done.values()))
        ended["each"] = [[one.code.name, one.was] for one in done.values()]
    return [done[slot] for slot in places]


def fence(
    engine: sa.Engine,
    group: str,
    topic: str,
    slots: Sequence[Slot],
    *,
    by: str | None = None,
    why: str | None = None,
) -> None:
    """Take slots from a consumer that is surely dead, or must be stopped: it can commit nothing about them any more."""
    _check(slots)
    rows = Assignments(group, topic)
    about = {"group": group, "topic": topic, "slots": [_numbers(slot) for slot in sorted(slots)]}
    with record(engine, "offsets.fence", about, by=by, why=why) as (connection, ended):
        ended["owners"] = rows.fence(connection, slots)


def divide(
    engine: sa.Engine,
    group: str,
    topic: str,
    shard: int,
    queue: int,
    stride: int,
    *,
    by: str | None = None,
    why: str | None = None,
) -> list[Slot]:
    """Divide a queue that is at rest into ``stride`` virtual queues; their slots. Raises as :meth:`Assignments.divide`:
    then it is not recorded, either."""
    about = {"group": group, "topic": topic, "shard": shard, "queue": queue, "stride": stride}
    with record(engine, "offsets.divide", about, by=by, why=why) as (connection, ended):
        slots = Assignments(group, topic).divide(connection, shard, queue, stride)
        ended["slots"] = len(slots)
    return slots


def _check(slots: Mapping[Slot, Any] | Sequence[Slot]) -> None:
    if len(slots) > MOST_SLOTS:
        raise Misuse(Code.BAD_ARGUMENT, f"{len(slots)} slots in one act", f"at most {MOST_SLOTS}")


def _numbers(slot: Slot) -> list[int]:
    return list(asdict(slot).values())


def _place(row: Any) -> Place:
    slot = Slot(row.shard, row.queue, row.stride, row.part)
    return Place(row.consumer_group, row.topic, slot, row.next_offset, row.epoch, row.owner)
