"""Describes consumer groups and their dead letters as plain dicts for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from escrowmq.ledger.groups import subscriptions
from escrowmq.ledger.groups.cursors import Cursor, State
from escrowmq.ledger.groups.group import Group
from escrowmq.ledger.queues.topics import Topics


def describe(group: Group, topics: Topics) -> dict[str, Any]:
    """``group`` (its ordinal), ``name, topics, tags, ordered, in_doubt, leases, dead_letters, queues``.

    ``queues`` has one dict per queue: ``queue_id, topic, queue, head, end, floor`` (everything below is done), ``next``
    (everything from there on waits), then counts of messages: ``waiting`` and one per state, in lower case.
    """
    ids = subscriptions.queue_ids(group.subscription.topics, topics)
    queues = [_describe_queue(group.cursor(queue_id), topics) for queue_id in ids]
    return {
        "group": group.ordinal,
        "name": group.name,
        "topics": list(group.subscription.topics),
        "tags": list(group.subscription.tags),
        "ordered": group.subscription.ordered,
        "in_doubt": group.subscription.in_doubt,
        "leases": group.leases,
        "dead_letters": sum(queue["dead"] for queue in queues),
        "queues": queues,
    }


def _describe_queue(cursor: Cursor, topics: Topics) -> dict[str, Any]:
    queue = topics.queues[cursor.queue_id]
    return {
        "queue_id": cursor.queue_id,
        "topic": queue.place.topic,
        "queue": queue.place.queue,
        "head": queue.head,
        "end": queue.end,
        "floor": cursor.floor,
        "next": cursor.next,
        "waiting": queue.end - cursor.next,
        **{state.name.lower(): cursor.counts[state] for state in State if state != State.GONE},
    }


def dead_letters(group: Group, topics: Topics, limit: int, after: Sequence[int] | None) -> list[dict[str, Any]]:
    """By queue id and offset: ``queue_id, topic, queue, offset, position, attempts, cause, dead_us``."""
    listed: list[dict[str, Any]] = []
    last_id, last_offset = after if after is not None else (-1, -1)
    for queue_id in sorted(id for id in group.cursors if id >= last_id):
        dead, queue = group.cursors[queue_id].dead, topics.queues[queue_id]
        first = dead.span(last_offset + 1, last_offset + 1)[0] if queue_id == last_id else 0
        for row in range(first, min(len(dead), first + limit - len(listed))):
            offset = int(dead.offsets[row])
            listed.append(
                {
                    "queue_id": queue_id,
                    "topic": queue.place.topic,
                    "queue": queue.place.queue,
                    "offset": offset,
                    "position": int(queue.positions(offset, offset + 1)[0]),
                    "attempts": int(dead["attempts"][row]),
                    "cause": dead["cause"][row],
                    "dead_us": int(dead["dead_us"][row]),
                }
            )
    return listed
