"""Lists topics, producer groups, writers and transactions of a ledger as plain dicts for JSON, and summarizes undecided
transactions by producer group and cause, in steps: producers continue between two of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np

from escrowmq.errors import Code, error
from escrowmq.ledger.columns.arrays import Int64s, all_true, locate
from escrowmq.ledger.commands import TopicRules
from escrowmq.ledger.ledger import Ledger
from escrowmq.ledger.queues.queues import QueueIndex
from escrowmq.ledger.transactions import policies
from escrowmq.ledger.transactions.table import NONE, OPEN, PARKED
from escrowmq.model import DecidedBy, TransactionId, TransactionState

CAUSES: Final = ("not_due", "due", "unanswered", "asked_out", "aged", "decided")
"""Why a transaction waits: its first check is not due; a check is due, and no producer was connected; it was checked,
and another check or the end of waiting follows; it is parked after its last check; it is parked before that
(``half_retention``, or it cannot be read)."""
_NOT_DUE, _DUE, _UNANSWERED, _ASKED_OUT, _AGED, _DECIDED = range(len(CAUSES))


def causes_of(ledger: Ledger, rows: Int64s, now_us: int) -> Int64s:
    """Return why each transaction (by row number in the table) waits at ``now_us``, as an index of :data:`CAUSES`."""
    table = ledger.transactions
    state, checks, due_us = (table.rows[name][rows] for name in ("state", "checks", "due_us"))
    most = np.full(len(rows), policies.check_rules(None, ledger.rules).most, np.int64)
    if ledger.sessions.own:
        groups = table.groups_of(rows + table.rows.first)
        for group, own in ledger.sessions.own.items():
            most[groups == group] = policies.check_rules(own, ledger.rules).most
    spent = checks >= most
    of_open = np.where(~spent & (due_us <= now_us), _DUE, np.where(checks > 0, _UNANSWERED, _NOT_DUE))
    of_parked = np.where(spent, _ASKED_OUT, _AGED)
    return np.where(state == OPEN, of_open, np.where(state == PARKED, of_parked, _DECIDED))


def topics_list(ledger: Ledger) -> list[dict[str, Any]]:
    """List topics as dicts: ``name``; ``queues``, each with id, first and next offset, and bytes; ``retention`` and
    ``retention_size`` if the topic has its own."""
    listed = []
    for topic in ledger.topics.by_name.values():
        indexes = [(queue_id, ledger.queue(queue_id)) for queue_id in topic.queue_ids]
        queues = [{"queue_id": id, **describe_queue(index), "bytes": index.bytes_kept} for id, index in indexes]
        listed.append({"name": topic.name, "queues": queues, **retention_of(topic.rules)})
    return listed


def describe_queue(queue: QueueIndex) -> dict[str, int]:
    """Return ``queue, head, end`` of a queue."""
    return {"queue": queue.place.queue, "head": queue.head, "end": queue.end}


def retention_of(rules: TopicRules) -> dict[str, float]:
    """Return a topic's own retention: ``retention`` (seconds), ``retention_size`` (bytes of each queue)."""
    own: dict[str, float] = {}
    if rules.retention_us is not None:
        own["retention"] = rules.retention_us / 1e6
    if rules.retention_bytes is not None:
        own["retention_size"] = rules.retention_bytes
    return own


def queue_offsets(ledger: Ledger, topic: str, queue: int | None, time_us: int | None) -> list[dict[str, Any]]:
    """Return ``queue, head, end`` of one queue of a topic (``queue`` None: of all); with ``time_us`` also
    ``offset_at``, the first offset visible then or later, else ``end``. Raises Rejected(UNKNOWN_TOPIC, BAD_QUEUE)."""
    first = ledger.queue_id(topic, queue or 0)  # raises
    indexes = [ledger.queue(id) for id in ([first] if queue is not None else ledger.topics.queue_ids(topic))]
    at = [{} if time_us is None else {"offset_at": index.offset_at(time_us)} for index in indexes]
    return [{**describe_queue(index), **offset} for index, offset in zip(indexes, at, strict=True)]


def queues_beyond(ledger: Ledger, topic: str, after: Mapping[int, int], every: bool) -> list[dict[str, int]]:
    """Return ``queue, head, end`` of those queues of a topic that have messages at or after the offset that ``after``
    has for them (by queue number). ``every``: other queues too, from their first offset on; then the topic need not
    exist. Raises Rejected(UNKNOWN_TOPIC, BAD_QUEUE)."""
    places = dict(after)
    if every:
        ids = ledger.topics.queue_ids(topic) if ledger.topics.has(topic) else []
        places = {number: after.get(number, ledger.queue(id).head) for number, id in enumerate(ids)}
    indexes = [(ledger.queue(ledger.queue_id(topic, queue)), offset) for queue, offset in sorted(places.items())]
    return [describe_queue(index) for index, offset in indexes if index.end > offset]


def producers_list(ledger: Ledger) -> list[dict[str, Any]]:
    """List producer groups as dicts: ``group``, their rules, the numbers of ``open`` and ``parked`` transactions, and
    ``oldest_us``: when the oldest open one was prepared, or None."""
    sessions, rules, table = ledger.sessions, ledger.rules, ledger.transactions
    found = table.oldest.find(table.open, table.oldest_open())
    firsts = table.column("first", np.array([*found.values()], np.int64)).astype(np.int64)
    oldest = dict(zip(found, table.prepared_us(firsts).tolist(), strict=True))
    listed = []
    for number, name in sessions.groups.items():
        kind, transactional = sessions.kind(number, rules), number in sessions.transactional
        described = policies.described(sessions.own.get(number), rules, kind, transactional)
        listed.append({"group": name, **described, **_count_undecided(ledger, number), "oldest_us": oldest.get(number)})
    return listed


def _count_undecided(ledger: Ledger, group: int) -> dict[str, int]:
    table = ledger.transactions
    return {"open": table.open.get(group, 0), "parked": table.parked.get(group, 0)}


def writers_list(ledger: Ledger, after: bytes, limit: int) -> list[dict[str, Any]]:
    """List up to ``limit`` writers as dicts by id, from behind the id ``after``: the last batch, the last use of the
    group, and the numbers of its undecided transactions."""
    used = ledger.sessions.used_us()
    return [
        {
            "writer": writer.hex(),
            "group": ledger.sessions.groups[group],
            "batch": batch,
            "decided_us": decided_us,
            "used_us": used[group],
            **_count_undecided(ledger, group),
        }
        for writer, group, batch, decided_us in ledger.writers.list_after(after, limit)
    ]


def transactions(ledger: Ledger, *, limit: int = 100, after: int = -1, **wanted: Any) -> list[dict[str, Any]]:
    """Describe at most ``limit`` transactions selected by ``wanted`` (the fields of :class:`Wanted`), by position, from
    behind the position ``after``. Raises UNKNOWN_GROUP, BAD_REQUEST."""
    found, place = some_transactions(ledger, Wanted(**wanted), limit, after)
    while place is not None and len(found) < limit:
        more, place = some_transactions(ledger, Wanted(**wanted), limit - len(found), place)
        found += more
    return found


@dataclass(frozen=True, slots=True)
class Wanted:
    """A selection of transactions. ``state``: a name of TransactionState, or "undecided" for OPEN and PARKED;
    ``before_us``: prepared before that time; ``cause``: one of :data:`CAUSES` at ``now_us``."""

    state: str | None = None
    group: str | None = None
    before_us: int | None = None
    cause: str | None = None
    now_us: int = 0


def some_transactions(
    ledger: Ledger, wanted: Wanted, limit: int, after: int
) -> tuple[list[dict[str, Any]], int | None]:
    """Describe at most ``limit`` of the transactions that ``wanted`` selects, from behind the position ``after``, as
    far as one step reads; and return the position to continue after, or None. Raises UNKNOWN_GROUP, BAD_REQUEST."""
    table = ledger.transactions
    states = None if wanted.state is None else _states(wanted.state)
    ordinal = None if wanted.group is None else ledger.sessions.ordinal(wanted.group)
    if wanted.group is not None and ordinal is None:
        raise error(Code.UNKNOWN_GROUP, f"no producer group {wanted.group!r}")
    first = table.rows["first"]
    start = int(np.searchsorted(first, after, side="right")) + table.rows.first
    before = wanted.before_us
    end = table.rows.end if before is None else table.count_prepared(before) + table.rows.first
    rows, place = some_rows(ledger, start, end, states)
    if ordinal is not None:
        rows = rows[table.groups_of(rows + table.rows.first) == ordinal]
    if wanted.cause is not None:
        rows = rows[causes_of(ledger, rows, wanted.now_us) == CAUSES.index(wanted.cause)]
    if len(rows) > limit:
        rows, place = rows[:limit], int(rows[limit - 1]) + 1 + table.rows.first
    last = None if place >= end else int(first[place - 1 - table.rows.first])
    return described(ledger, rows + table.rows.first), last


def some_rows(ledger: Ledger, start: int, end: int, states: Sequence[int] | None) -> tuple[Int64s, int]:
    """Return the row numbers of transactions in one of ``states`` (None: any) from the ordinal ``start`` to before
    ``end``, of at most :data:`LOOKED` transactions and about :data:`SPAN` results; and the ordinal to continue from."""
    rows = ledger.transactions.rows
    at, found = max(start, rows.first), list[Int64s]()
    count, most = 0, min(end, max(start, rows.first) + LOOKED)
    while at < most and count < SPAN:
        last = min(at + SPAN, most)
        part = slice(at - rows.first, last - rows.first)
        fitting = np.arange(part.start, part.stop)
        if states is not None:
            fitting = fitting[np.isin(rows["state"][part], states)]
        found.append(fitting)
        count += len(fitting)
        at = last
    return np.concatenate([*found, np.empty(0, np.int64)]), max(at, start)


SPAN = 65_536  # results of one step, about: some milliseconds of the writer
LOOKED = 64 * SPAN  # transactions whose states one step reads


UNDECIDED = (OPEN, PARKED)


def _states(name: str) -> Sequence[int]:
    if name.lower() == "undecided":
        return UNDECIDED
    try:
        return [int(TransactionState[name.upper()])]
    except KeyError:
        names = ", ".join(s.name.lower() for s in TransactionState)
        raise error(Code.BAD_REQUEST, f"{name!r} is not a state", f"one of undecided, {names}") from None


def transaction(ledger: Ledger, identity: TransactionId) -> dict[str, Any]:
    """Describe one transaction, with the ``positions`` of its half messages. Raises UNKNOWN_TRANSACTION,
    WRONG_SHARD."""
    if identity.shard != ledger.shard:
        raise error(Code.WRONG_SHARD, f"{identity} lives on another broker")
    ordinals = ledger.transactions.find(np.array([identity.position]))
    if ordinals[0] == NONE or ledger.transactions.column("epoch", ordinals)[0] != identity.epoch:
        raise error(Code.UNKNOWN_TRANSACTION, f"no transaction {identity} on this broker")
    _, positions, *_ = ledger.transactions.messages_of(ordinals)
    return {**described(ledger, ordinals)[0], "positions": positions}


def messages_of(ledger: Ledger, first: Int64s) -> tuple[Int64s, Int64s]:
    """Return all half messages of some transactions, each named in ``first`` by the position of its first half message:
    the log position of each message, and the index in ``first`` of its transaction."""
    index, positions, *_ = ledger.transactions.messages_of(ledger.transactions.find(first))
    return positions, index


def described(ledger: Ledger, ordinals: Int64s) -> list[dict[str, Any]]:
    """Describe transactions, by their ordinals, as dicts: ``id, position, group, instance, state, checks, messages,
    prepared_us``; of OPEN ones also ``due_us``, of decided ones ``decided_by``."""
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


@dataclass(slots=True)
class _Alike:
    """Transactions of one group that wait for the same cause."""

    state: str
    cause: str
    count: int
    oldest_us: int
    newest_us: int
    checks: list[int]  # least and most
    samples: list[dict[str, Any]] = field(default_factory=list)


class Waiting:
    """A summary in progress. Later transactions are left out; those decided between two steps may be in it or not."""

    def __init__(self, ledger: Ledger, group: str | None, after: int, limit: int, samples: int, now_us: int) -> None:
        """Begin a summary of ``group`` (None: of all groups with undecided transactions and numbers above ``after``, at
        most ``limit``), with up to ``samples`` transactions of each cause. Raises Rejected(UNKNOWN_GROUP)."""
        table, only = ledger.transactions, None if group is None else ledger.sessions.ordinal(group)
        if group is not None and only is None:
            raise error(Code.UNKNOWN_GROUP, f"no producer group {group!r}")
        waiting = {number for counts in (table.open, table.parked) for number, count in counts.items() if count}
        self._chosen = sorted(number for number in waiting if number > after and only in (None, number))[:limit]
        self._names = [ledger.sessions.groups.get(number) for number in self._chosen]
        self._alike: list[dict[int, _Alike]] = [{} for _ in self._chosen]
        self._samples, self._now_us = samples, now_us
        self._next, self._end = table.rows.first, table.rows.end

    def look(self, ledger: Ledger) -> bool:
        """Add the transactions of one more step. Returns whether any are left to add."""
        table = ledger.transactions
        if self._chosen:
            rows, self._next = some_rows(ledger, self._next, self._end, UNDECIDED)
            if len(rows):
                self._take(ledger, rows, table.groups_of(rows + table.rows.first))
        return bool(self._chosen) and self._next < self._end

    def _take(self, ledger: Ledger, rows: Int64s, groups: Int64s) -> None:
        table = ledger.transactions
        places = locate(np.array(self._chosen, np.int64), groups)
        if not all_true(mine := places >= 0):
            rows, places = rows[mine], places[mine]
        kinds = (places * len(CAUSES) + causes_of(ledger, rows, self._now_us)).astype(np.uint16)  # sorted in one pass
        rows = rows[np.argsort(kinds, kind="stable")]
        counts = np.bincount(kinds)
        ends = np.cumsum(counts)
        for kind in np.flatnonzero(counts).tolist():
            part = rows[int(ends[kind] - counts[kind]) : int(ends[kind])]
            place, cause = divmod(kind, len(CAUSES))
            oldest_us, newest_us = table.prepared_us(table.rows["first"][part[[0, -1]]]).tolist()
            checks = table.rows["checks"][part]
            least, most = int(checks.min()), int(checks.max())
            if (one := self._alike[place].get(cause)) is None:
                state = TransactionState(int(table.rows["state"][part[0]])).name.lower()
                one = _Alike(state, CAUSES[cause], 0, oldest_us, newest_us, [least, most])
                self._alike[place][cause] = one
            one.count += len(part)
            one.newest_us = newest_us
            one.checks = [min(one.checks[0], least), max(one.checks[1], most)]
            few = part[: max(self._samples - len(one.samples), 0)]
            one.samples += described(ledger, few + table.rows.first)

    def to_json(self) -> list[dict[str, Any]]:
        """Return ``number``, ``group`` and ``causes`` of each group. A cause has ``state, cause, count, oldest_us,
        newest_us, checks`` (least and most), and ``samples``, the oldest."""
        return [
            {"number": number, "group": name, "causes": [asdict(causes[cause]) for cause in sorted(causes)]}
            for number, name, causes in zip(self._chosen, self._names, self._alike, strict=True)
        ]
