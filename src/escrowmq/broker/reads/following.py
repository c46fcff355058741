"""The end of a system view, for readers that follow a view as they follow a topic.

A view has one queue, numbered 0. ``%half``, ``%op``, ``%acks`` and ``%group-acts`` count by log positions; the dead
letters of a group, which come and go, by the time at which a message died, in microseconds since 1970.
"""

from __future__ import annotations

from typing import Any

from escrowmq.broker.reads.readable import Readable
from escrowmq.broker.reads.system_views import VIEW_KINDS
from escrowmq.errors import Code, error
from escrowmq.ledger.groups.reports import last_death_us
from escrowmq.settings import nearest
from escrowmq.wire import DEAD_LETTER_PREFIX


def view_range(engine: Readable, view: str, time_us: int | None) -> dict[str, Any]:
    """``queue, head, end`` and, with a time, ``offset_at``, of a view. On the writer. UNKNOWN_TOPIC, UNKNOWN_GROUP."""
    if view in VIEW_KINDS:
        line = {"queue": 0, "head": engine.log.first_position, "end": engine.log.next_position}
        return line if time_us is None else {**line, "offset_at": engine.log.position_at(time_us)}
    _last_death_us(engine, view)  # raises
    end = engine.shard.time_us  # more may die in this very round
    line = {"queue": 0, "head": 0, "end": end}
    return line if time_us is None else {**line, "offset_at": min(time_us, end)}


def view_beyond(engine: Readable, view: str, after: int) -> list[dict[str, Any]]:
    """Return a list of one if the view has rows at ``after`` or later, else an empty list. At the end of a round,
    when nothing can die in it any more."""
    if view in VIEW_KINDS:
        return [view_range(engine, view, None)] if engine.log.holds(after, VIEW_KINDS[view]) else []
    last = _last_death_us(engine, view)
    return [{"queue": 0, "head": 0, "end": last + 1}] if last >= after else []


def _last_death_us(engine: Readable, view: str) -> int:
    if not view.startswith(DEAD_LETTER_PREFIX):
        names = [*VIEW_KINDS, DEAD_LETTER_PREFIX + "GROUP"]
        raise error(
            Code.UNKNOWN_TOPIC, f"no system view {view!r}", nearest(view, names) or f"there are {', '.join(names)}"
        )
    return last_death_us(engine.shard.ledger.groups.group(view[len(DEAD_LETTER_PREFIX) :]))
