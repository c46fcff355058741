"""Decides operator actions on a whole consumer group: set where it continues, pause, limit or delete it. Changes no
state.

Rules of a reset:

1. Each of its queues gets one offset from which all waits. What a member received before is redelivered as a repeat,
   its attempts counted anew (``cursors.py``). Undelivered messages below are passed over (SKIPPED).
2. All leases of these queues end, and ended ones are forgotten: whatever is settled of them afterwards is LEASE_LOST
   (I27). No progress that is acknowledged afterwards is of a lease from before.
3. Dead letters below stay: a reset is no discard. Those from the offset on wait as all others.
4. A group with ``in_doubt="hold"`` keeps leased messages for their member until it is back or fenced. So a reset is a
   CONFLICT while something of these queues is leased, unless it is forced.

While a group is paused nothing is leased, but leased messages can be settled; expired ones are given back without being
counted.
"""

from __future__ import annotations

from typing import Any

from escrowmq.errors import Code, error
from escrowmq.ledger.commands import DeleteGroup, LimitGroup, PauseGroup, ResetGroup
from escrowmq.ledger.events import Decision, event_of, event_of_rows
from escrowmq.ledger.groups import limits, subscriptions
from escrowmq.ledger.groups.cursors import Cursor, State
from escrowmq.ledger.groups.group import ALL, Group
from escrowmq.ledger.groups.groups import Groups
from escrowmq.ledger.groups.reports import describe_place
from escrowmq.ledger.queues.queues import QueueIndex
from escrowmq.ledger.queues.topics import Topics
from escrowmq.schemas import Kind


def decide_reset(groups: Groups, cmd: ResetGroup, topics: Topics) -> Decision:
    """Decide where a group continues, by the rules above. Raises UNKNOWN_GROUP, UNKNOWN_TOPIC, BAD_QUEUE, BAD_REQUEST,
    CONFLICT.

    Answer, for each queue: ``queue_id, topic, queue, end``; ``was`` and ``now``, the first offset to deliver; and how
    many messages were settled and wait ``again``, are ``skipped``, were ``leased``, or were ``dead`` letters and wait.
    """
    group, places = groups.group(cmd.group), dict(cmd.places or ())
    moves = []
    for id in _choose(group, cmd, topics):
        cursor, queue = group.cursor(id), topics.queues[id]
        moves.append((cursor, queue, _target(cursor, queue, cmd, places.get(id))))
    held = sum(len(cursor.leases) for cursor, _, _ in moves)
    if held and subscriptions.holds(group.subscription) and not cmd.force:
        hint = "pause the group and wait until they are done, fence their members, or force it: others get the same"
        raise error(Code.CONFLICT, f"members of consumer group {cmd.group!r} hold {held} leases there", hint)
    rows = [
        (group.ordinal, cursor.queue_id, target)
        for cursor, _, target in moves
        if target != cursor.next or cursor.leases or len(cursor.retries)
    ]
    events = (event_of_rows(Kind.GROUP_RESET, rows),) if rows else ()
    return Decision(events, [_describe_move(*move) for move in moves])


def _choose(group: Group, cmd: ResetGroup, topics: Topics) -> list[int]:
    """Return the ids of the queues that the command resets. Raises BAD_REQUEST, UNKNOWN_TOPIC, BAD_QUEUE."""
    if sum(way is not None for way in (cmd.start, cmd.offset, cmd.shift, cmd.places)) != 1:
        ways = "to a start, to an offset, by a number of offsets, or to places: one of these"
        raise error(Code.BAD_REQUEST, f"a reset is {ways}")
    if cmd.queue is not None and cmd.topic is None:
        raise error(Code.BAD_REQUEST, "a queue is one of a topic's: name the topic")
    if cmd.offset is not None and cmd.queue is None:
        raise error(Code.BAD_REQUEST, "an offset is one of a queue's: name the topic and the queue")
    all_of_them = subscriptions.queue_ids(group.subscription.topics, topics)
    if cmd.places is not None:
        chosen = [queue_id for queue_id, _ in cmd.places]
        if cmd.topic is not None or len(set(chosen)) < len(chosen) or not set(chosen) <= set(all_of_them):
            raise error(Code.BAD_REQUEST, "places are of queues of the group's, each named once, and without a topic")
        return sorted(chosen)
    if cmd.topic is None:
        return all_of_them
    _check_topic(group, cmd.topic)
    return topics.queue_ids(cmd.topic) if cmd.queue is None else [topics.queue_id(cmd.topic, cmd.queue)]


def _check_topic(group: Group, topic: str) -> None:
    if topic not in group.subscription.topics:
        hint = f"it has {', '.join(group.subscription.topics)}"
        raise error(Code.UNKNOWN_TOPIC, f"the topic {topic!r} is none of consumer group {group.name!r}", hint)


def _target(cursor: Cursor, queue: QueueIndex, cmd: ResetGroup, place: int | None) -> int:
    """Return the offset at which the group continues in one queue: the command's ``offset``, a ``shift`` from where it
    is, ``place``, or the command's ``start``. Raises BAD_REQUEST for an ``offset`` that is not stored; the others are
    limited to what is stored."""
    if cmd.offset is not None:
        if not queue.head <= cmd.offset <= queue.end:
            stored = f"it has {queue.head} to {queue.end - 1}" if queue.end > queue.head else "it is empty"
            where = f"{queue.place.topic}/{queue.place.queue}"
            hint = f"{stored}; its end is {queue.end}"
            raise error(Code.BAD_REQUEST, f"the offset {cmd.offset} is not in queue {where}", hint)
        return cmd.offset
    if cmd.shift is not None:
        place = _place(cursor, queue) + cmd.shift
    if place is not None:
        return min(max(place, queue.head), queue.end)
    return queue.offset_of_start(cmd.start or "0")


def _place(cursor: Cursor, queue: QueueIndex) -> int:
    return max(cursor.place, queue.head)


def _describe_move(cursor: Cursor, queue: QueueIndex, target: int) -> dict[str, Any]:
    above, below = cursor.counts_from(target), cursor.counts_from(0)
    undone = sum(below[state] - above[state] for state in (State.LEASED, State.RETRYING))
    return {
        **describe_place(queue, cursor.queue_id),
        "end": queue.end,
        "was": _place(cursor, queue),
        "now": target,
        "again": above[State.ACKED] + above[State.DISCARDED],
        "skipped": undone + max(target - max(cursor.next, queue.head), 0),
        "leased": cursor.counts[State.LEASED],
        "dead": above[State.DEAD],
    }


def decide_pause(groups: Groups, cmd: PauseGroup) -> Decision:
    """Pause or resume a group, or some of its topics. Raises UNKNOWN_GROUP, UNKNOWN_TOPIC; CONFLICT to resume a topic
    while the whole group is paused.

    Answer: whether ``all`` is paused, the ``topics`` paused by name, and the number of ``leased`` messages.
    """
    group = groups.group(cmd.group)
    for topic in cmd.topics:
        _check_topic(group, topic)
    if not cmd.paused and cmd.topics and ALL in group.paused:
        hint = "resume the group, and pause the topics that are to stay so"
        raise error(Code.CONFLICT, f"consumer group {cmd.group!r} is paused as a whole", hint)
    named = dict.fromkeys(cmd.topics or ((ALL,) if cmd.paused else group.paused))
    rows = [(group.ordinal, topic, cmd.paused) for topic in named if (topic in group.paused) != cmd.paused]
    paused = {*group.paused, *named} if cmd.paused else set(group.paused) - set(named)
    answer = {"all": ALL in paused, "topics": sorted(paused - {ALL}), "leased": group.in_flight}
    return Decision((event_of_rows(Kind.GROUP_PAUSED, rows),) if rows else (), answer)


def decide_limit(groups: Groups, cmd: LimitGroup) -> Decision:
    """Decide that a group gets these limits and no others (see ``limits.py``). Raises UNKNOWN_GROUP, BAD_REQUEST."""
    group = groups.group(cmd.group)
    limits.check(cmd.limits)
    event = event_of(Kind.GROUP_LIMITED, [group.ordinal], [limits.dump(cmd.limits)])
    answer = {**limits.given(cmd.limits), "leased": group.in_flight}
    return Decision(() if cmd.limits == group.limits else (event,), answer)


def decide_delete(groups: Groups, cmd: DeleteGroup, next_position: int) -> Decision:
    """Decide that a group is deleted. Answer: its ``number``, how many messages were ``leased``, ``retrying``,
    ``dead_letters``, and how many named ``members`` it had. Raises UNKNOWN_GROUP, also if its number is another;
    CONFLICT while messages are leased, unless forced."""
    group = groups.group(cmd.group)
    if cmd.number not in (None, group.ordinal):
        raise error(Code.UNKNOWN_GROUP, f"the consumer group {cmd.group!r} is another one now", "look at it again")
    if group.leases and not cmd.force:
        hint = "stop its consumers and wait for their leases to end (`escrowmq groups members`), or force it"
        raise error(Code.CONFLICT, f"consumers of group {cmd.group!r} hold {group.leases} leases", hint)
    counts = {
        name: sum(cursor.counts[state] for cursor in group.cursors.values())
        for name, state in (("leased", State.LEASED), ("retrying", State.RETRYING), ("dead_letters", State.DEAD))
    }
    event = event_of(Kind.GROUP_DELETED, [next_position], [group.ordinal])
    return Decision((event,), {"number": group.ordinal, **counts, "members": len(group.members)})
