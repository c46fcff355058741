"""Describes consumer groups and their dead letters as plain dicts for JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from escrowmq.ledger.columns.arrays import Int64s
from escrowmq.ledger.commands import Rules, Subscription
from escrowmq.ledger.groups import limits, subscriptions
from escrowmq.ledger.groups.cursors import Cursor, State
from escrowmq.ledger.groups.dead.letters import NOT_DEAD
from escrowmq.ledger.groups.dead.listing import Letters
from escrowmq.ledger.groups.group import ALL, Group
from escrowmq.ledger.queues.queues import QueueIndex
from escrowmq.ledger.queues.topics import Topics


def described(subscription: Subscription, rules: Rules) -> dict[str, Any]:
    """Return ``topics, tags, ordered, in_doubt, start, max_attempts, retry_backoff, retry_backoff_max, retry_delays``
    as they apply to a group; times in seconds."""
    times = subscriptions.redelivery(subscription, rules)
    return {
        "topics": list(subscription.topics),
        "tags": list(subscription.tags),
        **{name: getattr(subscription, name) for name in ("ordered", "in_doubt", "start")},
        "max_attempts": times.attempts,
        "retry_backoff": times.first_us / 1e6,
        "retry_backoff_max": times.most_us / 1e6,
        "retry_delays": [delay / 1e6 for delay in times.delays_us],
    }


def describe(group: Group, topics: Topics, rules: Rules) -> dict[str, Any]:
    """Return ``group`` (its ordinal), ``name``, the fields of :func:`described`, ``leases, dead_letters, queues``.

    ``queues`` has one dict per queue: ``queue_id, topic, queue, head, end, floor`` (everything below is done), ``next``
    (everything from there on waits), then counts of messages: ``waiting`` and one per state, in lower case. It includes
    unfinished queues of a topic that the group left.
    """
    left = [id for id, cursor in group.cursors.items() if cursor.unfinished]
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
        "limits": limits.given(group.limits),
        "queues": queues,
    }


def describe_place(queue: QueueIndex, queue_id: int) -> dict[str, Any]:
    """Return ``queue_id, topic, queue`` of a queue."""
    return {"queue_id": queue_id, "topic": queue.place.topic, "queue": queue.place.queue}


def _describe_queue(cursor: Cursor, topics: Topics) -> dict[str, Any]:
    queue = topics.queues[cursor.queue_id]
    return {
        **describe_place(queue, cursor.queue_id),
        "head": queue.head,
        "end": queue.end,
        "floor": cursor.floor,
        "next": cursor.next,
        "waiting": queue.end - cursor.next,
        **{state.name.lower(): cursor.counts[state] for state in State if state != State.GONE},
    }


def positions_of(topics: Topics, queue_ids: Int64s, offsets: Int64s, group: Group | None) -> Int64s:
    """Return the log positions of a group's messages at these queues and offsets: of the edit where an operator edited
    one; -1 if they left the log. ``group`` None: it was deleted, so its edits are unknown."""
    positions = np.full(len(offsets), -1, np.int64)
    for queue_id in np.unique(queue_ids).tolist():
        rows = np.flatnonzero(queue_ids == queue_id)
        stored = topics.queues[queue_id].positions_at(offsets[rows])
        edited = None if group is None else group.cursor(queue_id).edited
        positions[rows] = stored if edited is None else np.where(stored < 0, -1, edited.instead(offsets[rows], stored))
    return positions


def deaths(group: Group, queue_ids: Int64s, offsets: Int64s) -> tuple[Int64s, Int64s]:
    """Return the time of death (µs) and the attempts of the dead letters at these queues and offsets; ``NOT_DEAD``
    where there is none."""
    died_us, attempts = np.empty(len(offsets), np.int64), np.empty(len(offsets), np.int64)
    for queue_id in np.unique(queue_ids).tolist():
        rows = np.flatnonzero(queue_ids == queue_id)
        died_us[rows], attempts[rows] = group.cursor(queue_id).dead.deaths(offsets[rows])
    return died_us, attempts


def last_death_us(group: Group) -> int:
    """Return the time (µs) of the latest death among a group's dead letters; -1 without any."""
    return max((cursor.dead.last_us for cursor in group.cursors.values() if len(cursor.dead)), default=NOT_DEAD)


def dead_letters(letters: Letters, topics: Topics, group: Group | None) -> list[dict[str, Any]]:
    """Return a dict ``queue_id, topic, queue, offset, position, attempts, cause, dead_us`` of each dead letter that is
    still in the log. ``group``: as of :func:`positions_of`."""
    positions = positions_of(topics, letters.queue_ids, letters.offsets, group)
    columns = (letters.queue_ids, letters.offsets, positions, letters.attempts, letters.causes, letters.dead_us)
    names = ("offset", "position", "attempts", "cause", "dead_us")
    return [
        {**describe_place(topics.queues[queue_id], queue_id), **dict(zip(names, values, strict=True))}
        for queue_id, *values in zip(*(column.tolist() for column in columns), strict=True)
        if values[1] >= 0
    ]


def consuming(groups: Iterable[Group], topic: str, queue_ids: Sequence[int]) -> list[str]:
    """Return the names of the groups that consume a topic, or left it with unfinished messages in ``queue_ids``."""
    return [
        group.name
        for group in groups
        if topic in group.subscription.topics
        or any(cursor.unfinished for id in queue_ids if (cursor := group.cursors.get(id)) is not None)
    ]


def dead_in(groups: Iterable[Group], queue_ids: Sequence[int]) -> int:
    """Return the number of dead letters of all these groups in these queues."""
    found = (group.cursors.get(id) for group in groups for id in queue_ids)
    return sum(len(cursor.dead) for cursor in found if cursor is not None)
