"""Describes consumer groups and their dead letters as plain dicts for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from escrowmq.ledger.columns.arrays import Int64s
from escrowmq.ledger.commands import Rules, Subscription
from escrowmq.ledger.groups import subscriptions
from escrowmq.ledger.groups.cursors import Cursor, State
from escrowmq.ledger.groups.group import ALL, Group
from escrowmq.ledger.queues.topics import Topics

_UNDONE = (State.LEASED, State.RETRYING, State.DEAD)


def described(subscription: Subscription, rules: Rules) -> dict[str, Any]:
    """``topics, tags, ordered, in_doubt, start, max_attempts, retry_backoff, retry_backoff_max, retry_delays`` (seconds) as they
    count for a group."""
    times = subscriptions.redelivery(subscription, rules)
    return {
        "topics": list(subscription.topics),
        "tags": list(subscription.tags),
        "ordered": subscription.ordered,
        "in_doubt": subscription.in_doubt,
        "start": subscription.start,
        "max_attempts": times.attempts,
        "retry_backoff": times.first_us / 1e6,
        "retry_backoff_max": times.most_us / 1e6,
        "retry_delays": [delay / 1e6 for delay in times.delays_us],
    }


def describe(group: Group, topics: Topics, rules: Rules) -> dict[str, Any]:
    """``group`` (its ordinal), ``name``, what :func:`described` says, ``leases, dead_letters, queues``.

    ``queues`` has one dict per queue: ``queue_id, topic, queue, head, end, floor`` (everything below is done), ``next``
    (everything from there on waits), then counts of messages: ``waiting`` and one per state, in lower case. Queues of a topic
    that the group left are among them while something of them is not done.
    """
    left = [id for id, cursor in group.cursors.items() if any(cursor.counts[state] for state in _UNDONE)]
    ids = sorted({*subscriptions.queue_ids(group.subscription.topics, topics), *left})
    queues = [_describe_queue(group.cursor(queue_id), topics) for queue_id in ids]
    return {
        "group": group.ordinal,
        "name": group.name,
        **described(group.subscription, rules),
        "leases": group.leases,
        "dead_letters": sum(queue["dead"] for queue in queues),
        "paused": ALL in group.paused,
        "paused_topics": sorted(set(group.paused) - {ALL}),
        "paused_us": min(group.paused.values(), default=None),
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


def dead_between(group: Group, topics: Topics, first_us: int, before_us: int) -> tuple[Int64s, Int64s, Int64s]:
    """Positions, queue ids and offsets of what died from ``first_us`` to before ``before_us``, in the order in which it died."""
    found: list[tuple[Int64s, Int64s, Int64s, Int64s]] = []
    for queue_id, cursor in group.cursors.items():
        dead, queue = cursor.dead, topics.queues[queue_id]
        times = dead["dead_us"]
        offsets = dead.offsets[(times >= first_us) & (times < before_us)]
        if len(offsets):
            stored = queue.positions(int(offsets[0]), int(offsets[-1]) + 1)[offsets - offsets[0]]
            times = times[(times >= first_us) & (times < before_us)]
            found.append((times, stored, np.full(len(offsets), queue_id), offsets))
    if not found:
        nothing = np.empty(0, np.int64)
        return nothing, nothing, nothing
    times, positions, queue_ids, offsets = (np.concatenate(parts) for parts in zip(*found, strict=True))
    order = np.lexsort((offsets, queue_ids, times))
    return positions[order], queue_ids[order], offsets[order]


def last_death_us(group: Group) -> int:
    """When the last of a group's dead letters died; -1 without any."""
    return max((int(c.dead["dead_us"].max()) for c in group.cursors.values() if len(c.dead)), default=-1)


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
