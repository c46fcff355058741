"""The plain case of SEND and PREPARE, as rows: what ``producing.py`` would decide, without columns until the event is
built.

Plain is what nearly every small request is: topics that exist, sessions that may act, new ids, open transactions of the
group, everything within its limits. Any other row makes the whole command *not plain*: it is decided as columns, by the
rules of ``producing.py``, so no rule is stated here a second time. A plain row is accepted, with the same events,
answers and state as columns; ``tests/ledger/test_ways.py`` compares the two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, repeat
from typing import Any, NamedTuple

import numpy as np

from escrowmq.ledger.columns import codes as code
from escrowmq.ledger.columns.arrays import Ints
from escrowmq.ledger.commands import Part, PrepareRows, Rules, SendRows
from escrowmq.ledger.events import Decision, Event, Few
from escrowmq.ledger.messages.dedup import Dedup, Run
from escrowmq.ledger.queues.delays import Delays
from escrowmq.ledger.queues.queues import NO_TAG
from escrowmq.ledger.queues.topics import Topic, Topics
from escrowmq.ledger.transactions.checkback import CheckBack
from escrowmq.ledger.transactions.sessions import Sessions
from escrowmq.ledger.transactions.table import NONE, OPEN, Halves, TransactionTable
from escrowmq.message.hashes import hash_key
from escrowmq.message.ids import fill_ids, transaction_id
from escrowmq.message.immunity import PROPERTY
from escrowmq.schemas import Kind


class _Rows(NamedTuple):
    """The columns of a command's rows, as of :mod:`escrowmq.wire.parcels`."""

    names: Sequence[str]
    bodies: Sequence[bytes]
    keys: Sequence[str | None]
    tags: Sequence[str | None]
    pairs: Sequence[list[tuple[str, str]] | None]
    ids: Sequence[bytes | None]
    queues: Ints
    born: Ints
    delays: Ints
    immunities: Ints
    joins: Sequence[bytes | None]


@dataclass(frozen=True, slots=True)
class Entering:
    """What applying messages that were decided as rows needs; a list has one item for each message."""

    sessions: Ints  # each once, without 0
    topics: Sequence[Topic]
    runs: Sequence[Run]
    tags: Sequence[str | None]
    queue_ids: Ints
    sizes: Ints  # of the bodies
    visible_us: Ints | None  # not before this; 0: at once. None: all at once
    halves: Halves | None = None  # of half messages


_Senders = dict[int, tuple[int, int]]  # by session: its group, and the time before the first check


@dataclass(frozen=True, slots=True)
class ProducingRows:
    """Decides and applies the plain cases of SEND and PREPARE. It has no state of its own."""

    topics: Topics
    sessions: Sessions
    dedup: Dedup
    delays: Delays
    transactions: TransactionTable
    checkback: CheckBack

    def decide(self, command: SendRows | PrepareRows, rules: Rules, now_us: int, next_position: int) -> Decision | None:
        """Decide a SEND or PREPARE: one event, and as answer a row of schema PRODUCED for each message. None: some
        message is not plain, so the command must be decided as columns."""
        half, parts = isinstance(command, PrepareRows), command.parts
        listed = parts[0].rows if len(parts) == 1 else list(chain.from_iterable(part.rows for part in parts))
        rows, size = _Rows(*zip(*listed, strict=True)), len(listed)
        senders, topics = self._senders(parts, half, rules), self._find_topics(rows.names)
        if senders is None or topics is None or not self._within_limits(rows, half, rules):
            return None
        queues, runs = _choose_queues(topics, rows), self._find_runs(parts, topics, rows)
        if queues is None or runs is None or not (half or rows.joins.count(None) == size):
            return None
        queue_ids = [topics[name].queue_ids[queue] for name, queue in zip(rows.names, queues, strict=True)]
        visible = [now_us + delay if delay else 0 for delay in rows.delays] if any(rows.delays) else None
        epochs: Ints = [parts[0].session] * size
        if len(senders) > 1:
            epochs = [part.session for part in parts for _ in part.rows]
        positions, zeros = range(next_position, next_position + size), [0] * size
        halves, dues, firsts = None, zeros, [NONE] * size
        if half:
            if (halves := self._halves(epochs, senders, rows, rules, now_us)) is None:
                return None
            begins = self._begins(halves, positions)
            dues, firsts = list(halves.due_us), [first for first, _ in begins]
            named = [transaction_id(self.transactions.shard, epoch, first) for first, epoch in begins]
            answer = [(code.OK, *row) for row in zip(positions, queues, repeat(NONE, size), named, strict=True)]
        else:
            answer = self._plain_answers(positions, queues, queue_ids, rows.delays)
        ids = b"".join([fill_ids([row[5] for row in part.rows], *part.first_id) for part in parts])
        texts = (rows.names, rows.keys, rows.tags, rows.pairs, rows.bodies)
        columns = (*texts, ids, queues, queue_ids, rows.born, visible or zeros, dues, firsts, epochs)
        used, sizes = [epoch for epoch in senders if epoch], list(map(len, rows.bodies))
        entering = Entering(used, list(topics.values()), runs, rows.tags, queue_ids, sizes, visible, halves)
        kind = Kind.HALF if half else Kind.PLAIN
        return Decision((Event(kind, Few(kind, columns), entering),), answer)

    def _senders(self, parts: Sequence[Part], half: bool, rules: Rules) -> _Senders | None:
        """Return group and time before the first check by session; None if a session may not send."""
        sessions, senders = self.sessions, _Senders()
        if half and rules.reject_transactional:
            return None
        for part in parts:
            epoch = part.session
            if epoch not in senders:
                if sessions.status(epoch, transactional=half, rules=rules) != code.OK:
                    return None
                group = sessions.group(epoch)
                senders[epoch] = (group, sessions.first_us(group, rules) if half else 0)
        return senders

    def _within_limits(self, rows: _Rows, half: bool, rules: Rules) -> bool:
        size, tags = len(rows.bodies), rows.tags
        if max(map(len, rows.bodies)) > rules.max_body_bytes:
            return False
        if rows.keys.count(None) < size and max(map(_count_bytes, rows.keys)) > rules.max_key_bytes:
            return False
        if tags.count(None) < size:
            if max(map(_count_bytes, tags)) > rules.max_tag_bytes:
                return False
            fresh = sum(self.topics.tag_number(tag) is None for tag in {*tags} if tag is not None)
            if fresh and self.topics.tag_count + fresh > rules.max_tags:
                return False
        if rows.pairs.count(None) < size:
            for pairs in filter(None, rows.pairs):
                if sum(_count_bytes(a) + _count_bytes(b) for a, b in pairs) > rules.max_properties_bytes:
                    return False
                if half and any(name == PROPERTY for name, _ in pairs):
                    return False  # an immunity, to be parsed
        if any(rows.delays) and not 0 <= min(rows.delays) <= max(rows.delays) <= rules.max_delay_us:
            return False
        return not any(rows.immunities) or 0 <= min(rows.immunities) <= max(rows.immunities) <= rules.half_retention_us

    def _find_topics(self, names: Sequence[str]) -> dict[str, Topic] | None:
        """Return the topics by name; None if one of them does not exist."""
        by_name = self.topics.by_name
        found = {name: by_name.get(name) for name in (set(names) if len(names) > 1 else names)}
        return None if None in found.values() else found  # type: ignore[return-value]

    def _find_runs(self, parts: Sequence[Part], topics: dict[str, Topic], rows: _Rows) -> list[Run] | None:
        """Return the message ids as runs of consecutive ones; None if one is known, or appears twice."""
        runs: list[list[int]] = []  # instance, first sequence, count
        own = rows.ids.count(None) < len(rows.ids)
        for part in parts:
            instance, sequence = part.first_id
            if not own:
                _lengthen(runs, instance, sequence, len(part.rows))
                continue
            for row in part.rows:
                if (identity := row[5]) is None:
                    _lengthen(runs, instance, sequence, 1)
                    sequence += 1
                else:
                    _lengthen(runs, int.from_bytes(identity[:8], "big"), int.from_bytes(identity[8:], "big"), 1)
        if any(self.dedup.knows(*run) for run in runs):
            return None
        if any(one[0] == other[0] and one[1] + one[2] > other[1] for one, other in pairwise(sorted(runs))):
            return None  # an id appears twice
        if len(topics) == 1:
            (topic,) = topics.values()
            return [Run(instance, first, count, topic.number) for instance, first, count in runs]
        found, at = list[Run](), 0
        for instance, first, count in runs:
            numbers = [topics[name].number for name in rows.names[at : at + count]]
            same = numbers.count(numbers[0]) == count
            found.append(Run(instance, first, count, numbers[0] if same else np.array(numbers, np.int32)))
            at += count
        return found

    def _halves(self, epochs: Ints, senders: _Senders, rows: _Rows, rules: Rules, now_us: int) -> Halves | None:
        """Return the transaction that each half message begins or joins; None if one may not."""
        size, owners = len(epochs), None
        if rows.joins.count(None) < size and (owners := self._owners(epochs, senders, rows.joins, rules)) is None:
            return None
        group, first_us = senders[epochs[0]]
        begins: dict[int, int] = {group: size}
        if owners is not None or len(senders) > 1:
            pairs = zip(epochs, owners or repeat(NONE), strict=False)
            begins = Counter(senders[epoch][0] for epoch, owner in pairs if owner == NONE)
        for group, count in begins.items():
            if count > rules.max_open_transactions - self.transactions.open.get(group, 0):
                return None
        dues = [now_us + first_us] * size
        if any(rows.immunities) or len(senders) > 1:
            waits = zip(rows.immunities, epochs, strict=True)
            dues = [now_us + (immunity or senders[epoch][1]) for immunity, epoch in waits]
        return Halves(epochs, dues, owners, begins)

    def _owners(self, epochs: Ints, senders: _Senders, joins: Sequence[bytes | None], rules: Rules) -> list[int] | None:
        """Return the transaction (ordinal) that each row joins, ``NONE`` if it begins one; None if one may not join."""
        table = self.transactions
        if (found := table.find_few([identity for identity in joins if identity is not None])) is None:
            return None
        ours, owners = iter(found), list[int]()
        for epoch, identity in zip(epochs, joins, strict=True):
            if identity is None:
                owners.append(NONE)
                continue
            row, _, owner_epoch, state = next(ours)
            if state != OPEN or self.sessions.group(owner_epoch) != senders[epoch][0]:
                return None
            owners.append(row + table.rows.first)
        for owner, count in Counter(owners).items():
            if owner != NONE and table.value("messages", owner) + count > rules.max_transaction_messages:
                return None
        return owners

    def _begins(self, halves: Halves, positions: range) -> list[tuple[int, int]]:
        """Return the log position of the first message of each row's transaction, and the session that began it."""
        own = zip(positions, halves.epochs, strict=True)
        if halves.owners is None:
            return list(own)
        value = self.transactions.value
        return [
            begun if owner == NONE else (int(value("first", owner)), int(value("epoch", owner)))
            for begun, owner in zip(own, halves.owners, strict=True)
        ]

    def _plain_answers(self, positions: range, queues: Ints, queue_ids: Ints, delays: Ints) -> list[tuple[Any, ...]]:
        """Return a row of PRODUCED for each plain message, with its future offset; delayed ones have none yet."""
        ends = {queue_id: self.topics.queues[queue_id].end for queue_id in set(queue_ids)}
        answers: list[tuple[Any, ...]] = []
        for position, queue, queue_id, delay in zip(positions, queues, queue_ids, delays, strict=True):
            answers.append((code.OK, position, queue, NONE if delay else ends[queue_id], None))
            ends[queue_id] += not delay
        return answers

    def apply(self, entering: Entering, position: int, time_us: int, rules: Rules) -> None:
        """Apply a PLAIN or HALF event that was decided as rows. ``position``: of its first row."""
        halves, queue_ids, visible = entering.halves, entering.queue_ids, entering.visible_us
        plain = halves is None
        for epoch in entering.sessions:
            self.sessions.note_one(epoch, time_us, sent=plain)
        self.dedup.add_runs(entering.runs, position, time_us, rules, half=not plain)
        for topic in entering.topics:
            topic.turn += 1
        number = self.topics.number_tag
        tags = [NO_TAG if tag is None else number(tag) for tag in entering.tags]
        positions = range(position, position + len(queue_ids))
        if halves is None:
            self.place(positions, queue_ids, tags, entering.sizes, visible, time_us)
            return
        if visible is not None:
            late = [(at, visible_us) for at, visible_us in zip(positions, visible, strict=True) if visible_us]
            self.transactions.hold_back(*zip(*late, strict=True))
        self.transactions.note_time(position, time_us)
        begun = self.transactions.enter_rows(halves, queue_ids, tags, entering.sizes, position)
        self.checkback.begin_rows(begun, halves, time_us)

    def place(
        self, positions: Ints, queue_ids: Ints, tags: Ints, sizes: Ints, visible: Ints | None, time_us: int
    ) -> None:
        """Append a few messages to their queues at ``time_us``; those with a later time in ``visible`` are delayed
        instead (None: none is)."""
        if visible is None and queue_ids.count(queue_ids[0]) == len(queue_ids):
            self.topics.queues[queue_ids[0]].append(positions, tags, time_us, sum(sizes))
            return
        by_queue: dict[int, list[tuple[int, int, int]]] = {}
        times = visible or repeat(0)
        for position, queue_id, tag, size, visible_us in zip(positions, queue_ids, tags, sizes, times, strict=False):
            if visible_us > time_us:
                self.delays.add([position], [queue_id], [tag], [visible_us], [size])
            else:
                by_queue.setdefault(queue_id, []).append((position, tag, size))
        for queue_id, messages in by_queue.items():
            at, numbers, bytes_ = zip(*messages, strict=True)
            self.topics.queues[queue_id].append(at, numbers, time_us, sum(bytes_))


def _count_bytes(text: str | None) -> int:
    """Return the size of a text in UTF-8 bytes; 0 for None."""
    if text is None:
        return 0
    return len(text) if text.isascii() else len(text.encode())


def _lengthen(runs: list[list[int]], instance: int, sequence: int, count: int) -> None:
    """Add ``count`` consecutive ids to ``runs``: to the last run if they follow it, else as a new one."""
    if runs and runs[-1][0] == instance and runs[-1][1] + runs[-1][2] == sequence:
        runs[-1][2] += count
    else:
        runs.append([instance, sequence, count])


def _choose_queues(topics: dict[str, Topic], rows: _Rows) -> list[int] | None:
    """Return each row's queue number: named, else by key, else by rotation; None if a named one does not exist."""
    size = len(rows.names)
    if len(topics) == 1 and rows.queues.count(-1) == size and rows.keys.count(None) == size:
        (topic,) = topics.values()
        return [topic.turn % len(topic.queue_ids)] * size
    queues = []
    for name, key, queue in zip(rows.names, rows.keys, rows.queues, strict=True):
        topic, count = topics[name], len(topics[name].queue_ids)
        if queue == -1:
            queue = topic.turn % count if key is None else hash_key(key) % count
        elif not 0 <= queue < count:
            return None
        queues.append(queue)
    return queues
