"""Lists topics, producer groups, writers and transactions of a ledger as plain dicts for JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from escrowmq.errors import Code, error
from escrowmq.ledger.columns.arrays import Int64s
from escrowmq.ledger.commands import TopicRules
from escrowmq.ledger.ledger import Ledger
from escrowmq.ledger.transactions import policies
from escrowmq.ledger.transactions.table import NONE, OPEN, PARKED
from escrowmq.model import DecidedBy, TransactionId, TransactionState


def topics_list(ledger: Ledger) -> list[dict[str, Any]]:
    """Topics with their queues' first and next offsets."""
    queues = ledger.topics.queues
    return [
        {
            "name": topic.name,
            "queues": [
                {
                    "queue": number,
                    "queue_id": queue_id,
                    "head": queues[queue_id].head,
                    "end": queues[queue_id].end,
                    "bytes": queues[queue_id].bytes_kept,
                }
                for number, queue_id in enumerate(topic.queue_ids)
            ],
            **retention_of(topic.rules),
        }
        for topic in ledger.topics.by_name.values()
    ]


def retention_of(rules: TopicRules) -> dict[str, float]:
    """What a topic has of its own: ``retention`` (seconds), ``retention_size`` (bytes of each queue)."""
    own: dict[str, float] = {}
    if rules.retention_us is not None:
        own["retention"] = rules.retention_us / 1e6
    if rules.retention_bytes is not None:
        own["retention_size"] = rules.retention_bytes
    return own


def queue_offsets(ledger: Ledger, topic: str, queue: int | None, time_us: int | None) -> list[dict[str, Any]]:
    """``queue, head, end`` and, with a time, ``offset_at`` (the first offset that became visible then or later, ``end``
    without one) of one queue of a topic, or of all. Rejected(UNKNOWN_TOPIC, BAD_QUEUE)."""
    first = ledger.queue_id(topic, queue or 0)  # raises
    ids = [first] if queue is not None else ledger.topics.queue_ids(topic)
    listed = []
    for queue_id in ids:
        index = ledger.queue(queue_id)
        line = {"queue": index.place.queue, "head": index.head, "end": index.end}
        listed.append(line if time_us is None else {**line, "offset_at": index.offset_at(time_us)})
    return listed


def queues_beyond(ledger: Ledger, topic: str, after: Mapping[int, int], every: bool) -> list[dict[str, int]]:
    """``queue, head, end`` of a topic's queues that have offsets from those of ``after`` (by queue) on; ``every``: also
    of queues not named there, from their first on, and a topic that does not exist is no error. Rejected(UNKNOWN_TOPIC, BAD_QUEUE)."""
    places = dict(after)
    if every:
        ids = ledger.topics.queue_ids(topic) if ledger.topics.has(topic) else []
        places = {number: after.get(number, ledger.queue(id).head) for number, id in enumerate(ids)}
    indexes = [(ledger.queue(ledger.queue_id(topic, queue)), offset) for queue, offset in sorted(places.items())]
    return [{"queue": i.place.queue, "head": i.head, "end": i.end} for i, offset in indexes if i.end > offset]


def producers_list(ledger: Ledger) -> list[dict[str, Any]]:
    """Producer groups with what they have undecided; ``oldest_us``: when the oldest of that was prepared, None without."""
    oldest = _oldest_open(ledger)
    sessions, rules = ledger.sessions, ledger.rules
    return [
        {
            "group": name,
            **policies.described(
                sessions.own.get(ordinal), rules, sessions.kind(ordinal, rules), sessions.is_transactional(ordinal)
            ),
            "open": ledger.transactions.open.get(ordinal, 0),
            "parked": ledger.transactions.parked.get(ordinal, 0),
            "oldest_us": oldest.get(ordinal),
        }
        for ordinal, name in sessions.groups.items()
    ]


def writers_list(ledger: Ledger, after: bytes, limit: int) -> list[dict[str, Any]]:
    """Writers of numbered batches from ``after`` (not included) on, by their ids: the last batch and when it was decided,
    when anything was done under its producer group, and what is undecided there."""
    used = ledger.sessions.used_us()
    return [
        {
            "writer": writer.hex(),
            "group": ledger.sessions.groups[group],
            "batch": batch,
            "decided_us": decided_us,
            "used_us": used[group],
            "open": ledger.transactions.open.get(group, 0),
            "parked": ledger.transactions.parked.get(group, 0),
        }
        for writer, group, batch, decided_us in ledger.writers.listed(after, limit)
    ]


def _oldest_open(ledger: Ledger) -> dict[int, int]:
    """When each group's oldest OPEN transaction was prepared."""
    table = ledger.transactions
    first = table.oldest_open()
    ordinals = np.flatnonzero(table.rows["state"][first - table.rows.first :] == OPEN) + first
    groups, rows = np.unique(table.groups_of(ordinals), return_index=True)
    times = table.prepared_us(table.column("first", ordinals[rows]).astype(np.int64))
    return dict(zip(groups.tolist(), times.tolist(), strict=True))


def transactions(
    ledger: Ledger,
    *,
    state: str | None = None,
    group: str | None = None,
    before_us: int | None = None,
    limit: int = 100,
    after: int = -1,
) -> list[dict[str, Any]]:
    """Transactions in the order of their prepare, from position ``after`` (not included) on.

    ``state``: a name of TransactionState, or "undecided" for OPEN and PARKED; ``before_us``: prepared before that time.
    Rejected(UNKNOWN_GROUP), Rejected(BAD_REQUEST).
    """
    table = ledger.transactions
    keep = table.rows["first"] > after
    if state is not None:
        keep &= np.isin(table.rows["state"], _states(state))
    if group is not None:
        ordinal = ledger.sessions.ordinal(group)
        if ordinal is None:
            raise error(Code.UNKNOWN_GROUP, f"no producer group {group!r}")
        keep &= table.groups_of(np.arange(table.rows.first, table.rows.end)) == ordinal
    rows = np.flatnonzero(keep)
    if before_us is not None:
        rows = rows[table.prepared_us(table.rows["first"][rows]) < before_us]
    return [_describe(ledger, int(row) + table.rows.first) for row in rows[:limit]]


def _states(name: str) -> list[int]:
    if name.lower() == "undecided":
        return [OPEN, PARKED]
    try:
        return [int(TransactionState[name.upper()])]
    except KeyError:
        names = ", ".join(s.name.lower() for s in TransactionState)
        raise error(Code.BAD_REQUEST, f"{name!r} is not a state", f"one of undecided, {names}") from None


def transaction(ledger: Ledger, identity: TransactionId) -> dict[str, Any]:
    """One transaction, with ``positions``: those of its half messages. Rejected(UNKNOWN_TRANSACTION, WRONG_SHARD)."""
    if identity.shard != ledger.shard:
        raise error(Code.WRONG_SHARD, f"{identity} lives on another broker")
    ordinal = int(ledger.transactions.find(np.array([identity.position]))[0])
    if ordinal == NONE or int(ledger.transactions.column("epoch", np.array([ordinal]))[0]) != identity.epoch:
        raise error(Code.UNKNOWN_TRANSACTION, f"no transaction {identity} on this broker")
    _, positions, *_ = ledger.transactions.messages_of(np.array([ordinal]))
    return {**_describe(ledger, ordinal), "positions": positions}


def messages_of(ledger: Ledger, first: Int64s) -> tuple[Int64s, Int64s]:
    """All half messages of the transactions with these first positions: positions, and index into ``first``."""
    index, positions, *_ = ledger.transactions.messages_of(ledger.transactions.find(first))
    return positions, index


def _describe(ledger: Ledger, ordinal: int) -> dict[str, Any]:
    table = ledger.transactions
    at = np.array([ordinal])
    value = {name: int(table.column(name, at)[0]) for name in ("first", "epoch", "state", "by", "checks", "messages")}
    state = TransactionState(value["state"])
    described: dict[str, Any] = {
        "id": str(TransactionId(ledger.shard, value["epoch"], value["first"])),
        "position": value["first"],
        "group": ledger.sessions.groups.get(int(table.groups_of(at)[0])),  # None: forgotten
        "instance": ledger.sessions.instance(value["epoch"]),
        "state": state.name.lower(),
        "checks": value["checks"],
        "messages": value["messages"],
        "prepared_us": int(table.prepared_us(np.array([value["first"]]))[0]),
    }
    if state == TransactionState.OPEN:
        described["due_us"] = int(table.column("due_us", at)[0])
    elif state != TransactionState.PARKED:
        described["decided_by"] = DecidedBy(value["by"]).name.lower()
    return described
