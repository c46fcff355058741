"""The state of one message for each consumer group of its topic."""

from __future__ import annotations

from typing import Any

import numpy as np

from escrowmq.broker.reads.history import Way, read_history
from escrowmq.broker.reads.readable import Readable
from escrowmq.errors import Code, error
from escrowmq.ledger.groups import order, receiving, subscriptions
from escrowmq.ledger.groups.cursors import Cursor, State
from escrowmq.ledger.groups.group import Group
from escrowmq.ledger.ledger import Ledger
from escrowmq.schemas import Kind
from escrowmq.wire.actions.standing import AskOfMessage, AtGroup, OfMessage

MOST_GROUPS = 1_000  # groups of one answer


def message_standing(engine: Readable, request: AskOfMessage) -> OfMessage:
    """See :data:`~escrowmq.wire.actions.standing.OF_MESSAGE`. UNKNOWN_TOPIC, BAD_QUEUE, NOT_FOUND, RANGE_PURGED."""
    offset = request["offset"]

    def look() -> tuple[OfMessage, int, dict[int, Way]]:
        ledger = engine.shard.ledger
        queue_id = ledger.queue_id(request["topic"], request["queue"])
        queue = ledger.queue(queue_id)
        place = f"{request['topic']}/{request['queue']}"
        if offset >= queue.end:
            raise error(Code.NOT_FOUND, f"{place} ends before offset {offset}")
        if offset < queue.head:
            raise error(Code.RANGE_PURGED, f"offset {offset} of {place} has left the log; the first is {queue.head}")
        known, topic = ledger.groups.groups.values(), request["topic"]
        groups = [one for one in known if queue_id in one.cursors or topic in one.subscription.topics]
        now_us = engine.clock.now_us()
        ways = {
            one.ordinal: Way(one.name, _at_group(ledger, one, queue_id, offset, now_us)) for one in groups[:MOST_GROUPS]
        }
        position = int(queue.positions(offset, offset + 1)[0])
        stands = [way.stands for way in ways.values()]
        answer: OfMessage = {"position": position, "placed_us": queue.visible_us(offset), "groups": stands}
        if len(groups) > MOST_GROUPS:
            answer["more"] = len(groups) - MOST_GROUPS
        return answer, queue_id, ways

    answer, queue_id, ways = engine.look(look).result()
    for at in answer["groups"]:
        at["receiving"] = engine.receiving(at["group"])
        if "lease" in at:
            at["leased_us"] = _read_lease_time(engine, at["lease"])
    if request.get("history", False):
        answer["events"], until_us = read_history(engine, queue_id, offset, answer["placed_us"], ways)
        if until_us is not None:
            answer["until_us"] = until_us
    return answer


def _at_group(ledger: Ledger, group: Group, queue_id: int, offset: int, now_us: int) -> AtGroup:
    cursor, queue = group.cursor(queue_id), ledger.topics.queues[queue_id]
    subscription = group.subscription
    stands: AtGroup = {
        "group": group.name,
        "state": "waiting",
        "subscribed": queue.place.topic in subscription.topics,
        "ordered": subscription.ordered,
        "max_attempts": subscriptions.redelivery(subscription, ledger.rules).attempts,
        "receiving": 0,
        "paused": group.is_paused(queue.place.topic),
        "limited": group.room(now_us) <= 0,
    }
    more: Any = {}
    if offset >= cursor.next:
        tags = receiving.tag_numbers(subscription.tags, ledger.topics)
        chosen = tags is None or bool(receiving.match_tags(queue, offset, offset + 1, tags)[0])
        more = {"before": offset - max(cursor.next, queue.head), "chosen": chosen}
    else:
        state = _state(cursor, offset)
        if state is State.LEASED:
            more = _lease(group, cursor, offset)
        elif state is State.RETRYING:
            more = _retry(cursor, offset, subscription.ordered)
        elif state is State.DEAD and (letter := cursor.dead.letter(offset)) is not None:
            more = dict(zip(("dead_us", "attempt", "cause"), letter, strict=True))
        more["state"] = state.name.lower()
    return {**stands, **more}


def _state(cursor: Cursor, offset: int) -> State:
    if offset >= cursor.base:
        return State(int(cursor.states["state"][offset - cursor.base]))
    starts, states = cursor.runs()
    return State(int(states[int(np.searchsorted(starts, offset, side="right")) - 1]))


def _lease(group: Group, cursor: Cursor, offset: int) -> dict[str, Any]:
    lease = next(one for one in cursor.leases.values() if one.holds(offset))
    member = group.members.get(lease.member)
    return {
        "lease": lease.id,
        "attempt": lease.attempt,
        "deadline_us": None if subscriptions.holds(group.subscription) else lease.deadline_us,
        "member": lease.member,
        "instance": None if member is None else member.name,
        "in_doubt": offset >= lease.doubt,
    }


def _retry(cursor: Cursor, offset: int, ordered: bool) -> dict[str, Any]:
    rows = order.read_waiting(cursor)
    row = cursor.retries.span(offset, offset)[0]
    found = {"attempt": int(rows.attempts[row]), "due_us": int(rows.due_us[row])}
    if ordered:
        of_key = rows.keys[:row] == rows.keys[row] if rows.knows_all else np.ones(row, bool)
        if of_key.any():
            found["behind"] = int(rows.offsets[int(of_key.argmax())])
    return found


def _read_lease_time(engine: Readable, lease: int) -> int | None:
    """Return when a lease was made (microseconds), from the log: its id is the position of its row. None if that has
    left the log."""
    if lease < engine.log.first_position or engine.log.kind_at(np.array([lease]))[0] not in (Kind.LEASED, Kind.HANDED):
        return None
    return int(engine.log.time_at(np.array([lease]))[0])
