"""The state of every topic and group, for metrics with labels: one look at the ledger, then the times of positions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from escrowmq.broker.reads.readable import HoldsLedger, Readable
from escrowmq.ledger.groups.cursors import State
from escrowmq.ledger.groups.group import Group
from escrowmq.ledger.groups.limits import NO_LIMITS
from escrowmq.ledger.groups.subscriptions import queue_ids
from escrowmq.ledger.listings import producers_list, topics_list


@dataclass(slots=True)
class Standing:
    """One topic or group: its labels and its numbers by name."""

    labels: dict[str, str]
    numbers: dict[str, float]
    oldest: int = -1  # position of the oldest message that is not done; -1: all are


def standing(engine: Readable) -> dict[str, list[Standing]]:
    """Return the state of all topics and groups by kind: ``topic`` (stored, end), ``consumer`` (for each group and
    topic: lag, leased, retrying, dead, lag_seconds, acked) and ``producer`` (for each group: open, parked,
    oldest_seconds, connected)."""
    found: dict[str, list[Standing]] = engine.look(lambda: _look(engine.shard)).result()
    now_us = engine.clock.now_us()
    behind = [one for one in found["consumer"] if one.oldest >= engine.log.first_position]
    times = engine.log.time_at(np.array([one.oldest for one in behind], np.int64))
    for one, time_us in zip(behind, times.tolist(), strict=True):
        one.numbers["lag_seconds"] = max(now_us - time_us, 0) / 1e6
    for one in found["producer"]:
        since = one.numbers.pop("oldest_us")
        one.numbers["oldest_seconds"] = max(now_us - since, 0) / 1e6 if since else 0.0
        one.numbers["connected"] = engine.listeners.count(one.labels["group"])
    return found


def _look(shard: HoldsLedger) -> dict[str, list[Standing]]:
    ledger = shard.ledger
    topics = []
    for topic in topics_list(ledger):
        ends = [(queue["head"], queue["end"]) for queue in topic["queues"]]
        numbers = {"stored": sum(end - head for head, end in ends), "end": sum(end for _, end in ends)}
        topics.append(Standing({"topic": topic["name"]}, numbers))
    consumers = [one for group in ledger.groups.groups.values() for one in _of_group(shard, group)]
    producers = []
    for one in producers_list(ledger):
        numbers = {"open": one["open"], "parked": one["parked"], "oldest_us": one["oldest_us"] or 0}
        producers.append(Standing({"group": one["group"]}, numbers))
    return {"topic": topics, "consumer": consumers, "producer": producers}


def _of_group(shard: HoldsLedger, group: Group) -> list[Standing]:
    """Return the state of a consumer group in each of its topics, from the ledger, with the position of its oldest
    unfinished message."""
    found: dict[str, Standing] = {}
    topics = shard.ledger.topics
    for id in {*group.cursors, *queue_ids(group.subscription.topics, topics)}:
        queue, cursor = topics.queues[id], group.cursor(id)
        name = queue.place.topic
        one = found.setdefault(name, Standing({"group": group.name, "topic": name}, dict.fromkeys(_COUNTED, 0.0)))
        waiting = max(queue.end - max(cursor.next, queue.head), 0)
        leased, retrying = cursor.counts[State.LEASED], cursor.counts[State.RETRYING]
        counts = (
            waiting + leased + retrying,
            leased,
            retrying,
            cursor.counts[State.DEAD],
            0.0,
            cursor.counts[State.ACKED],
        )
        one.numbers["paused"] = float(group.is_paused(name))
        one.numbers["limited"] = float(group.limits != NO_LIMITS)
        for number, count in zip(_COUNTED, counts, strict=True):
            one.numbers[number] += count
        unfinished = [max(cursor.next, queue.head)] if waiting else []
        unfinished += [lease.start for lease in cursor.leases.values()] + cursor.retries.offsets[:1].tolist()
        if unfinished and queue.head <= (offset := min(unfinished)) < queue.end:
            position = int(queue.positions(offset, offset + 1)[0])
            one.oldest = position if one.oldest < 0 else min(one.oldest, position)
    return list(found.values())


_COUNTED = ("lag", "leased", "retrying", "dead", "lag_seconds", "acked")
