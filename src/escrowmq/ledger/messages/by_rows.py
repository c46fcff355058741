"""The plain case of SEND and PREPARE, as rows: what ``producing.py`` would decide, without columns until the event is
built.

Plain is what nearly every small request is: topics that exist, sessions that may act, ids that are new, transactions
that are open and of the group, everything within its limits. A row that is anything else makes the whole command *not
plain*: it is decided as columns, by the rules of ``producing.py``, so none of them stands here a second time. What
stands here is only that a plain row is accepted, and what it does: the same events, the same answers, the same state,
which ``tests/ledger/test_ways.py`` holds against columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import numpy as np

from escrowmq.ledger.columns import codes as code
from escrowmq.ledger.commands import Part, PrepareRows, Rules, SendRows
from escrowmq.ledger.events import Decision, Event, Few
from escrowmq.ledger.messages.dedup import Dedup, Run
from escrowmq.ledger.messages.entering import Entering
from escrowmq.ledger.queues.topics import Topic, Topics
from escrowmq.ledger.transactions.halves import Halves
from escrowmq.ledger.transactions.sessions import Sessions
from escrowmq.ledger.transactions.table import NONE, OPEN, TransactionTable
from escrowmq.message.hashes import hash_key
from escrowmq.message.ids import fill_ids, transaction_id
from escrowmq.message.immunity import PROPERTY
from escrowmq.schemas import Kind

_OWN_ID = slice(0, 8), slice(8, 16)


@dataclass(slots=True)
class _Sender:
    """One session of a command, and its part in it."""

    group: int
    first_us: int
    begins: int = 0


class ProducingRows:
    """Decides the plain cases of SEND and PREPARE. It has no state of its own."""

    def __init__(self, topics: Topics, sessions: Sessions, dedup: Dedup, transactions: TransactionTable) -> None:
        self._topics = topics
        self._sessions = sessions
        self._dedup = dedup
        self._transactions = transactions

    def decide(self, command: SendRows | PrepareRows, rules: Rules, now_us: int, next_position: int) -> Decision | None:
        """One event, and a row of the answer for each message; None: not plain."""
        half = isinstance(command, PrepareRows)
        parts = command.parts
        senders = self._senders(parts, half, rules)
        rows = parts[0].rows if len(parts) == 1 else list(chain.from_iterable(part.rows for part in parts))
        names, bodies, keys, tags, pairs, given, wished, born, delays, immunities, joins = zip(*rows, strict=True)
        if senders is None or not self._within_limits(bodies, keys, tags, pairs, delays, immunities, half, rules):
            return None
        topics = self._find_named(names)
        queues = None if topics is None else _queues(topics, names, keys, wished)
        runs = None if topics is None else self._runs(parts, topics, names, given)
        if topics is None or queues is None or runs is None:
            return None
        queue_ids = [topics[name].queue_ids[queue] for name, queue in zip(names, queues, strict=True)]
        visible = [now_us + delay if delay else 0 for delay in delays] if any(delays) else None
        size = len(rows)
        epochs: Sequence[int] = [parts[0].session] * size
        if len(senders) > 1:
            epochs = [part.session for part in parts for _ in part.rows]
        halves, dues, firsts = None, None, None
        if half:
            halves = self._halves(epochs, senders, joins, immunities, rules, now_us)
            if halves is None:
                return None
            dues, firsts = halves.due_us, self._firsts(halves, next_position)
        elif joins.count(None) < size:
            return None
        columns = (
            names,
            keys,
            tags,
            pairs,
            bodies,
            b"".join([fill_ids([row[5] for row in part.rows], *part.first_id) for part in parts]),
            queues,
            queue_ids,
            born,
            [0] * size if visible is None else visible,
            [0] * size if dues is None else dues,
            [NONE] * size if firsts is None else firsts,
            epochs,
        )
        kind = Kind.HALF if half else Kind.PLAIN
        entering = Entering(
            [epoch for epoch in senders if epoch],
            list(topics.values()),
            runs,
            tags if tags.count(None) < size else None,
            queue_ids,
            list(map(len, bodies)),
            visible,
            halves,
        )
        positions = range(next_position, next_position + size)
        if halves is not None:
            answer = self._half_answers(positions, queues, halves)
        else:
            answer = self._plain_answers(positions, queues, queue_ids, delays)
        return Decision((Event(kind, Few(kind, columns), entering),), answer)

    # What makes it plain

    def _senders(self, parts: Sequence[Part], half: bool, rules: Rules) -> dict[int, _Sender] | None:
        """Return the sessions, if they may act."""
        sessions, senders = self._sessions, dict[int, _Sender]()
        if half and rules.reject_transactional:
            return None
        for part in parts:
            epoch = part.session
            if epoch not in senders:
                if sessions.status(epoch, transactional=half, rules=rules) != code.OK:
                    return None
                group = sessions.group(epoch)
                senders[epoch] = _Sender(group, sessions.first_us(group, rules) if half else 0)
        return senders

    def _within_limits(
        self,
        bodies: Sequence[bytes],
        keys: Sequence[str | None],
        tags: Sequence[str | None],
        pairs: Sequence[list[tuple[str, str]] | None],
        delays: Sequence[int],
        immunities: Sequence[int],
        half: bool,
        rules: Rules,
    ) -> bool:
        size = len(bodies)
        if max(map(len, bodies)) > rules.max_body_bytes:
            return False
        if keys.count(None) < size and max(map(_bytes, keys)) > rules.max_key_bytes:
            return False
        if tags.count(None) < size:
            if max(map(_bytes, tags)) > rules.max_tag_bytes:
                return False
            topics = self._topics
            fresh = sum(topics.tag_number(tag) is None for tag in {*tags} - {None} if tag is not None)
            if fresh and topics.tag_count + fresh > rules.max_tags:
                return False
        if pairs.count(None) < size:
            for properties in pairs:
                if properties and sum(_bytes(a) + _bytes(b) for a, b in properties) > rules.max_properties_bytes:
                    return False
                if half and properties and any(name == PROPERTY for name, _ in properties):
                    return False  # an immunity, to be read
        if any(delays) and not 0 <= min(delays) <= max(delays) <= rules.max_delay_us:
            return False
        return not any(immunities) or 0 <= min(immunities) <= max(immunities) <= rules.half_retention_us

    def _find_named(self, names: Sequence[str]) -> dict[str, Topic] | None:
        """Return the topics that are named, if all of them exist."""
        by_name, found = self._topics.by_name, dict[str, Topic]()
        for name in set(names) if len(names) > 1 else names:
            if (topic := by_name.get(name)) is None:
                return None
            found[name] = topic
        return found

    def _runs(
        self, parts: Sequence[Part], topics: dict[str, Topic], names: Sequence[str], given: Sequence[bytes | None]
    ) -> list[Run] | None:
        """Return the message ids as runs of consecutive ones, if all of them are new."""
        runs: list[list[int]] = []  # instance, first sequence, count
        own = given.count(None) < len(given)
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
                    high, low = (int.from_bytes(identity[half], "big") for half in _OWN_ID)
                    _lengthen(runs, high, low, 1)
        if any(self._dedup.knows(*run) for run in runs):
            return None
        if len(runs) > 1:
            ordered = sorted(runs)
            for one, other in pairwise(ordered):
                if one[0] == other[0] and one[1] + one[2] > other[1]:
                    return None  # an id that stands here twice
        if len(topics) == 1:
            (topic,) = topics.values()
            return [Run(instance, first, count, topic.number) for instance, first, count in runs]
        found, at = list[Run](), 0
        for instance, first, count in runs:
            numbers = [topics[name].number for name in names[at : at + count]]
            same = numbers.count(numbers[0]) == count
            found.append(Run(instance, first, count, numbers[0] if same else np.array(numbers, np.int32)))
            at += count
        return found

    # Half messages

    def _halves(
        self,
        epochs: Sequence[int],
        senders: dict[int, _Sender],
        joins: Sequence[bytes | None],
        immunities: Sequence[int],
        rules: Rules,
        now_us: int,
    ) -> Halves | None:
        """Return the transactions that they begin and join, if they may."""
        size = len(epochs)
        owners = None
        if joins.count(None) < size and (owners := self._owners(epochs, senders, joins, rules)) is None:
            return None
        begins: dict[int, int] = {}
        if owners is None and len(senders) == 1:
            begins[senders[epochs[0]].group] = size
        else:
            for row, epoch in enumerate(epochs):
                if owners is None or owners[row] == NONE:
                    group = senders[epoch].group
                    begins[group] = begins.get(group, 0) + 1
        for group, count in begins.items():
            if count > rules.max_open_transactions - self._transactions.open.get(group, 0):
                return None
        if any(immunities):
            pairs = zip(epochs, immunities, strict=True)
            dues = [now_us + (immunity or senders[epoch].first_us) for epoch, immunity in pairs]
        elif len(senders) == 1:
            dues = [now_us + senders[epochs[0]].first_us] * size
        else:
            dues = [now_us + senders[epoch].first_us for epoch in epochs]
        return Halves(epochs, dues, owners, begins)

    def _owners(
        self, epochs: Sequence[int], senders: dict[int, _Sender], joins: Sequence[bytes | None], rules: Rules
    ) -> list[int] | None:
        """Return the transaction (ordinal) that each row joins, if it may; ``NONE``: none."""
        table, added = self._transactions, dict[int, int]()
        owners = []
        for epoch, identity in zip(epochs, joins, strict=True):
            if identity is None:
                owners.append(NONE)
                continue
            owner = table.find_id(identity)
            if owner == NONE or table.value("state", owner) != OPEN:
                return None
            if self._sessions.group(int(table.value("epoch", owner))) != senders[epoch].group:
                return None
            added[owner] = added.get(owner, 0) + 1
            owners.append(owner)
        for owner, count in added.items():
            if table.value("messages", owner) + count > rules.max_transaction_messages:
                return None
        return owners

    def _firsts(self, halves: Halves, next_position: int) -> Sequence[int]:
        """Return the position of the first message of each row's transaction."""
        own = range(next_position, next_position + len(halves.epochs))
        if halves.owners is None:
            return own
        value = self._transactions.value
        return [
            at if owner == NONE else int(value("first", owner)) for at, owner in zip(own, halves.owners, strict=True)
        ]

    # Answers

    def _half_answers(self, positions: range, queues: Sequence[int], halves: Halves) -> list[tuple[Any, ...]]:
        shard, value = self._transactions.shard, self._transactions.value
        answers: list[tuple[Any, ...]] = []
        owners = halves.owners or [NONE] * len(positions)
        for position, queue, epoch, owner in zip(positions, queues, halves.epochs, owners, strict=True):
            if owner == NONE:
                identity = transaction_id(shard, epoch, position)
            else:
                identity = transaction_id(shard, int(value("epoch", owner)), int(value("first", owner)))
            answers.append((code.OK, position, queue, NONE, identity))
        return answers

    def _plain_answers(
        self, positions: range, queues: Sequence[int], queue_ids: Sequence[int], delays: Sequence[int]
    ) -> list[tuple[Any, ...]]:
        """Return plain messages have the offset that they will get; delayed ones have none yet."""
        ends = {queue_id: self._topics.queues[queue_id].end for queue_id in set(queue_ids)}
        answers: list[tuple[Any, ...]] = []
        for position, queue, queue_id, delay in zip(positions, queues, queue_ids, delays, strict=True):
            offset = NONE
            if not delay:
                offset = ends[queue_id]
                ends[queue_id] = offset + 1
            answers.append((code.OK, position, queue, offset, None))
        return answers


def _bytes(text: str | None) -> int:
    """Return bytes of a text. Raises UnicodeEncodeError, which makes it not plain."""
    if text is None:
        return 0
    return len(text) if text.isascii() else len(text.encode())


def _lengthen(runs: list[list[int]], instance: int, sequence: int, count: int) -> None:
    """Add ids to the runs: to the last one, if they follow it."""
    if runs:
        last = runs[-1]
        if last[0] == instance and last[1] + last[2] == sequence:
            last[2] += count
            return
    runs.append([instance, sequence, count])


def _queues(
    topics: dict[str, Topic], names: Sequence[str], keys: Sequence[str | None], wished: Sequence[int]
) -> list[int] | None:
    """Return the number of each row's queue, if it exists: the one named, else by key, else the one whose turn it
    is."""
    size = len(names)
    if len(topics) == 1 and wished.count(-1) == size and keys.count(None) == size:
        (topic,) = topics.values()
        return [topic.turn % len(topic.queue_ids)] * size
    queues = []
    for name, key, wish in zip(names, keys, wished, strict=True):
        topic = topics[name]
        count = len(topic.queue_ids)
        if wish == -1:
            wish = topic.turn % count if key is None else hash_key(key) % count
        elif not 0 <= wish < count:
            return None
        queues.append(wish)
    return queues
