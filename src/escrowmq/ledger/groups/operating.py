"""Decides what operators do to a whole consumer group: set where it continues, pause it, delete it. Reads the state,
changes nothing.

Rules of a reset:

1. Each of its queues gets one offset from which all waits. What a member was given before is redelivered as a repeat,
   its attempts counted anew (``again.py``). What lies below and was still to be delivered is passed over (SKIPPED).
2. All leases of these queues end, and with them what is remembered of ended ones: whatever is settled of them
   afterwards is LEASE_LOST (I27). No progress that is acknowledged afterwards is of a lease from before.
3. Dead letters below stay: a reset is no discard. Those from the offset on wait as all others.
4. What a group with ``in_doubt="hold"`` has handed out is nobody else's until its member is back or fenced; so there
   CONFLICT while something of these queues is leased, unless it is forced.

While a group is paused nothing is leased, but what is out can be settled; what ends by time is given back without being
counted.
"""

from __future__ import annotations

from typing import Any

from escrowmq.errors import Code, error
from escrowmq.ledger.commands import DeleteGroup, PauseGroup, ResetGroup
from escrowmq.ledger.events import Decision, event_of, event_of_rows
from escrowmq.ledger.groups import subscriptions
from escrowmq.ledger.groups.cursors import Cursor, State
from escrowmq.ledger.groups.group import ALL, Group
from escrowmq.ledger.groups.groups import Groups
from escrowmq.ledger.queues.queues import QueueIndex
from escrowmq.ledger.queues.topics import Topics
from escrowmq.schemas import Kind


def decide_reset(groups: Groups, cmd: ResetGroup, topics: Topics) -> Decision:
    """See the rules. The answer has for each queue ``queue_id, topic, queue, end``; ``was`` and ``now``, the first
    offset that is to be delivered; and messages: ``again`` were settled and wait now, ``skipped`` are passed over,
    ``leased`` were held by members, ``dead`` were dead letters and wait now. UNKNOWN_GROUP, UNKNOWN_TOPIC, BAD_QUEUE,
    BAD_REQUEST, CONFLICT."""
    group = groups.group(cmd.group)
    chosen = _choose(group, cmd, topics)
    places = dict(cmd.places or ())
    pairs = [(group.cursor(id), _target(group.cursor(id), topics.queues[id], cmd, places.get(id))) for id in chosen]
    held = sum(len(cursor.leases) for cursor, _ in pairs)
    if held and subscriptions.holds(group.subscription) and not cmd.force:
        hint = (
            "pause the group and wait until they are done, fence their members, or force it: others are given the "
            "same then"
        )
        raise error(Code.CONFLICT, f"members of consumer group {cmd.group!r} hold {held} leases there", hint)
    rows = [(group.ordinal, cursor.queue_id, target) for cursor, target in pairs if _changes(cursor, target)]
    moves = [_move(cursor, topics.queues[cursor.queue_id], target) for cursor, target in pairs]
    return Decision((event_of_rows(Kind.GROUP_RESET, rows),) if rows else (), moves)


def _choose(group: Group, cmd: ResetGroup, topics: Topics) -> list[int]:
    """Return the queues that are meant."""
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
    if cmd.queue is None:
        return topics.queue_ids(cmd.topic)
    return [topics.queue_id(cmd.topic, cmd.queue)]


def _check_topic(group: Group, topic: str) -> None:
    if topic not in group.subscription.topics:
        named = ", ".join(group.subscription.topics)
        raise error(
            Code.UNKNOWN_TOPIC, f"the topic {topic!r} is none of consumer group {group.name!r}", f"it has {named}"
        )


def _target(cursor: Cursor, queue: QueueIndex, cmd: ResetGroup, place: int | None) -> int:
    """Return where the group continues in a queue."""
    if place is not None:
        return min(max(place, queue.head), queue.end)
    if cmd.offset is not None:
        if not queue.head <= cmd.offset <= queue.end:
            stored = f"it has {queue.head} to {queue.end - 1}" if queue.end > queue.head else "it is empty"
            where = f"{queue.place.topic}/{queue.place.queue}"
            raise error(
                Code.BAD_REQUEST,
                f"the offset {cmd.offset} is not in queue {where}",
                f"{stored}; its end is {queue.end}",
            )
        return cmd.offset
    if cmd.shift is not None:
        return min(max(_place(cursor, queue) + cmd.shift, queue.head), queue.end)
    if cmd.start == "earliest":
        return queue.head
    return queue.end if cmd.start == "latest" else queue.offset_at(int(cmd.start or 0))


def _place(cursor: Cursor, queue: QueueIndex) -> int:
    return max(cursor.place, queue.head)


def _changes(cursor: Cursor, target: int) -> bool:
    return bool(target != cursor.next or cursor.leases or len(cursor.retries))


def _move(cursor: Cursor, queue: QueueIndex, target: int) -> dict[str, Any]:
    above, below = cursor.counts_from(target), cursor.counts_from(0)
    for state in (State.LEASED, State.RETRYING):
        below[state] -= above[state]
    return {
        "queue_id": cursor.queue_id,
        "topic": queue.place.topic,
        "queue": queue.place.queue,
        "end": queue.end,
        "was": _place(cursor, queue),
        "now": target,
        "again": above[State.ACKED] + above[State.DISCARDED],
        "skipped": below[State.LEASED] + below[State.RETRYING] + max(target - max(cursor.next, queue.head), 0),
        "leased": cursor.counts[State.LEASED],
        "dead": above[State.DEAD],
    }


def decide_pause(groups: Groups, cmd: PauseGroup) -> Decision:
    """Answer: whether ``all`` is paused, the ``topics`` that are so by name, and the messages that are ``leased``, in
    those that are paused or not. UNKNOWN_GROUP, UNKNOWN_TOPIC; CONFLICT for one topic of a group that is paused as a
    whole, which is to continue."""
    group = groups.group(cmd.group)
    for topic in cmd.topics:
        _check_topic(group, topic)
    if not cmd.paused and cmd.topics and ALL in group.paused:
        hint = "resume the group, and pause the topics that are to stay so"
        raise error(Code.CONFLICT, f"consumer group {cmd.group!r} is paused as a whole", hint)
    named = dict.fromkeys(cmd.topics or ((ALL,) if cmd.paused else group.paused))
    rows = [(group.ordinal, topic, cmd.paused) for topic in named if (topic in group.paused) != cmd.paused]
    paused = {*group.paused, *named} if cmd.paused else set(group.paused) - set(named)
    leased = sum(cursor.counts[State.LEASED] for cursor in group.cursors.values())
    answer = {"all": ALL in paused, "topics": sorted(paused - {ALL}), "leased": leased}
    return Decision((event_of_rows(Kind.GROUP_PAUSED, rows),) if rows else (), answer)


def decide_delete(groups: Groups, cmd: DeleteGroup, next_position: int) -> Decision:
    """Forget a group. The answer: its ``number``, and what goes with it: ``leased, retrying, dead_letters, members``.
    UNKNOWN_GROUP, CONFLICT."""
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
