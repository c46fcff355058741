"""Lists topics, producer groups, writers and transactions of a ledger as plain dicts for JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from escrowmq.errors import Code, error
from escrowmq.ledger.columns.arrays import Int64s, all_true, locate
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
    cause: str | None = None,
    now_us: int = 0,
) -> list[dict[str, Any]]:
    """Transactions in the order of their prepare, from position ``after`` (not included) on.

    ``state``: a name of TransactionState, or "undecided" for OPEN and PARKED; ``before_us``: prepared before that time; ``cause``: one
    of :data:`CAUSES` at ``now_us``. Rejected(UNKNOWN_GROUP), Rejected(BAD_REQUEST).
    """
    table = ledger.transactions
    first = table.rows["first"]
    states = None if state is None else _states(state)
    ordinal = None if group is None else ledger.sessions.ordinal(group)
    if group is not None and ordinal is None:
        raise error(Code.UNKNOWN_GROUP, f"no producer group {group!r}")
    at, end = int(np.searchsorted(first, after, side="right")), _prepared_before(ledger, before_us)
    found: list[Int64s] = []
    left = limit
    while at < end and left > 0:  # in pieces, so that a page costs no look at everything
        last = min(at + SPAN, end)
        rows = np.arange(at, last)
        if states is not None:
            rows = rows[np.isin(table.rows["state"][at:last], states)]
        if ordinal is not None:
            rows = rows[table.groups_of(rows + table.rows.first) == ordinal]
        if cause is not None:
            rows = rows[_causes_of(ledger, rows, now_us) == CAUSES.index(cause)]
        found.append(rows[:left])
        left -= len(found[-1])
        at = last
    return _described(ledger, np.concatenate([*found, np.empty(0, np.int64)]) + table.rows.first)


SPAN = 65_536
"""Transactions looked at at a time."""


def _prepared_before(ledger: Ledger, before_us: int | None) -> int:
    """How many rows, from the first one on, were prepared before a time."""
    table = ledger.transactions
    if before_us is None:
        return len(table.rows)
    index = int(np.searchsorted(table.times["time_us"], before_us))
    if index == len(table.times):
        return len(table.rows)
    return int(np.searchsorted(table.rows["first"], table.times["position"][index]))


CAUSES: Final = ("not_due", "due", "unanswered", "asked_out", "aged", "decided")
"""Why a transaction waits: its first question is not due; one is due, and nobody was there to be asked; it was asked about, and another question
or the end of waiting comes; it is parked after its last question; it is parked before that (``half_retention``, or it cannot be read).
"""
_NOT_DUE, _DUE, _UNANSWERED, _ASKED_OUT, _AGED, _DECIDED = range(len(CAUSES))


def _causes_of(ledger: Ledger, rows: Int64s, now_us: int) -> Int64s:
    """Why each transaction waits, as an index of :data:`CAUSES`."""
    table = ledger.transactions
    state, checks, due_us = (table.rows[name][rows] for name in ("state", "checks", "due_us"))
    most = np.full(len(rows), policies.asking(None, ledger.rules).most, np.int64)
    if ledger.sessions.own:
        groups = table.groups_of(rows + table.rows.first)
        for group, own in ledger.sessions.own.items():
            most[groups == group] = policies.asking(own, ledger.rules).most
    spent = checks >= most
    of_open = np.where(~spent & (due_us <= now_us), _DUE, np.where(checks > 0, _UNANSWERED, _NOT_DUE))
    of_parked = np.where(spent, _ASKED_OUT, _AGED)
    return np.where(state == OPEN, of_open, np.where(state == PARKED, of_parked, _DECIDED))


def undecided(
    ledger: Ledger, group: str | None, after: int, limit: int, samples: int, now_us: int
) -> list[dict[str, Any]]:
    """What is undecided, by producer group and cause: the groups with numbers above ``after``, at most ``limit``, each with ``number``, ``group``
    and ``causes``: ``state, cause, count, oldest_us, newest_us, checks`` (least and most), and ``samples``, the oldest. Rejected(UNKNOWN_GROUP).
    """
    table, only = ledger.transactions, None if group is None else ledger.sessions.ordinal(group)
    if group is not None and only is None:
        raise error(Code.UNKNOWN_GROUP, f"no producer group {group!r}")
    waiting = {number for counts in (table.open, table.parked) for number, count in counts.items() if count}
    chosen = sorted(number for number in waiting if number > after and only in (None, number))[:limit]
    if not chosen:
        return []
    states = table.rows["state"]
    rows = np.flatnonzero((states == OPEN) | (states == PARKED))
    places = locate(np.array(chosen, np.int64), table.groups_of(rows + table.rows.first))
    if not all_true(mine := places >= 0):
        rows, places = rows[mine], places[mine]
    kinds = (places * len(CAUSES) + _causes_of(ledger, rows, now_us)).astype(np.uint16)  # NumPy sorts these in one pass
    rows = rows[np.argsort(kinds, kind="stable")]
    counts = np.bincount(kinds)
    ends = np.cumsum(counts)
    found = np.flatnonzero(counts)
    lines: dict[int, dict[str, Any]] = {
        number: {"number": number, "group": ledger.sessions.groups.get(number), "causes": []} for number in chosen
    }
    for kind in found.tolist():
        start, end = int(ends[kind] - counts[kind]), int(ends[kind])
        place, cause = divmod(kind, len(CAUSES))
        number = chosen[place]
        part = rows[start:end]
        oldest, newest = table.prepared_us(table.rows["first"][part[[0, -1]]]).tolist()
        checks = table.rows["checks"][part]
        lines[number]["causes"].append(
            {
                "state": TransactionState(int(table.rows["state"][part[0]])).name.lower(),
                "cause": CAUSES[cause],
                "count": end - start,
                "oldest_us": oldest,
                "newest_us": newest,
                "checks": [int(checks.min()), int(checks.max())],
                "samples": _described(ledger, part[:samples] + table.rows.first),
            }
        )
    return list(lines.values())


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
    return _described(ledger, np.array([ordinal]))[0]


def _described(ledger: Ledger, ordinals: Int64s) -> list[dict[str, Any]]:
    table, sessions = ledger.transactions, ledger.sessions
    names = ("first", "epoch", "state", "by", "checks", "messages", "due_us")
    values = {name: table.column(name, ordinals) for name in names}
    prepared, groups = table.prepared_us(values["first"]).tolist(), table.groups_of(ordinals).tolist()
    listed = []
    for row in zip(*(values[name].tolist() for name in names), prepared, groups, strict=True):
        first, epoch, number, by, checks, messages, due_us, prepared_us, group = row
        state = TransactionState(number)
        described: dict[str, Any] = {
            "id": str(TransactionId(ledger.shard, epoch, first)),
            "position": first,
            "group": sessions.groups.get(group),  # None: forgotten
            "instance": sessions.instance(epoch),
            "state": state.name.lower(),
            "checks": checks,
            "messages": messages,
            "prepared_us": prepared_us,
        }
        if state == TransactionState.OPEN:
            described["due_us"] = due_us
        elif state != TransactionState.PARKED:
            described["decided_by"] = DecidedBy(by).name.lower()
        listed.append(described)
    return listed
