"""De-duplication by topic and message id (invariant I9): a repeat gets the position of the first message of its id in
its topic.

An id is (instance, sequence). Clients count the sequence up, so *runs* of consecutive ids at consecutive positions are
stored: one run for a whole batch, and steady clients extend their last run. Ids chosen by a caller are runs of one.

The same id in two topics is two messages, so a run has a topic; a run of rows in several topics (a transaction of two
topics) is *mixed* and has the topic of each row. Runs of one instance that overlap, being of several topics, are in
several layers; within a layer none overlap, so a search is one bisection a layer, and nearly all instances have one
layer. Layers are an index only: results do not depend on them.

Where an id stands twice in one topic (a prepare that was replaced), the newer one is found: positions rise.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from escrowmq.ledger.columns.arrays import Bools, Columns, Int32s, Int64s, all_equal, all_true, locate
from escrowmq.ledger.commands import Rules
from escrowmq.ledger.queues.delays import Delays
from escrowmq.ledger.queues.topics import Topics
from escrowmq.ledger.transactions.table import TransactionTable
from escrowmq.message.ids import records
from escrowmq.schemas import MESSAGE_ID_DTYPE

_SLICES = 16  # a run is extended for at most this part of the window, so that it can leave as a whole
_MIXED = -1  # "topic" of a run whose rows lie in several
_LONGEST_MIXED = 65_536  # a longer run of one topic does not become mixed: its topics would be written out row by row

Known = tuple[int, int]  # first sequence of a run, its ordinal
Places = Callable[[Int64s], tuple[Int32s, Bools]]
"""The topic (-1: unknown) and the kind (half?) of the messages at some positions."""


def split_runs(ids: pa.Array) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64], Int64s]:
    """Return instances and sequences (uint64) of ids, and the rows at which a run of consecutive ids begins."""
    if not len(ids):
        return np.empty(0, np.uint64), np.empty(0, np.uint64), np.empty(0, np.int64)
    raw = records(ids, MESSAGE_ID_DTYPE)
    instances, sequences = raw["instance"].astype(np.uint64), raw["sequence"].astype(np.uint64)
    goes_on = sequences[1:] - sequences[:-1] == 1
    if all_equal(instances) and all_true(goes_on) and sequences[-1] >= sequences[0]:
        return instances, sequences, np.zeros(1, np.int64)  # one run, as steady clients make them
    breaks = (instances[1:] != instances[:-1]) | ~goes_on | (sequences[1:] == 0)
    return instances, sequences, np.flatnonzero(np.concatenate(([True], breaks)))


def _overlap(instances: npt.NDArray[np.uint64], sequences: npt.NDArray[np.uint64], counts: Int64s) -> bool:
    """Return whether two of these runs (instance, first sequence and count of each; at least two runs) share an id."""
    order = np.lexsort((sequences, instances))
    instances, sequences = instances[order], sequences[order]
    lasts = sequences + (counts[order] - 1).astype(np.uint64)
    return bool(np.count_nonzero((instances[1:] == instances[:-1]) & (sequences[1:] <= lasts[:-1])))


@dataclass(frozen=True, slots=True)
class Found:
    """Known facts about the ids of a batch, row by row."""

    positions: Int64s  # of the newest message with the row's topic and id; -1: none
    halves: Bools  # whether that one is a half message
    firsts: Int64s | None
    """The first row of this batch with the same topic and id; None: no id of the batch stands twice."""


class Run(NamedTuple):
    """Consecutive ids of messages at consecutive positions, with their topic, or the topic of each."""

    instance: int
    first: int
    size: int
    topic: int | Int32s


class Dedup:
    """The message ids stored lately, with their topics and positions."""

    def __init__(self) -> None:
        ids, counts = ("instance", "sequence"), ("count", "position", "time_us")
        types = dict.fromkeys(ids, np.uint64) | dict.fromkeys(counts, np.int64)
        self._runs = Columns(types | {"topic": np.int32, "half": np.bool_})
        self._mixed: dict[int, Columns] = {}  # the topic of each row of the mixed runs, by ordinal
        self._layers: list[dict[int, list[Known]]] = []  # by instance, sorted; no layer has one that those below lack

    def __len__(self) -> int:
        return len(self._runs)

    def find(self, ids: pa.Array, topics: Int32s) -> Found:
        """Look up message ids, each in the topic (number) of its row."""
        size = len(ids)
        found = Found(np.full(size, -1, np.int64), np.zeros(size, np.bool_), None)
        if not size:
            return found
        instances, sequences, starts = split_runs(ids)
        ends = np.append(starts[1:], size)
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            instance = int(instances[start])
            for layer in self._layers:
                if (known := layer.get(instance)) is None:
                    break
                out = found.positions[start:end], found.halves[start:end]
                self._find_run(known, int(sequences[start]), topics[start:end], *out)
        if len(starts) > 1 and _overlap(instances[starts], sequences[starts], ends - starts):
            order = np.lexsort((topics, sequences, instances))
            same = np.ones(size - 1, np.bool_)
            for column in (instances, sequences, topics):
                same &= column[order][1:] == column[order][:-1]
            if same.any():
                begins = np.flatnonzero(np.concatenate(([True], ~same)))
                firsts = np.empty(size, np.int64)
                firsts[order] = np.repeat(order[begins], np.diff(np.append(begins, size)))
                return Found(found.positions, found.halves, firsts)
        return found

    def _find_run(self, known: list[Known], sequence: int, topics: Int32s, positions: Int64s, halves: Bools) -> None:
        """Search one layer's runs ``known`` of an instance for the ids ``sequence``, ``sequence`` + 1, ... in
        ``topics``, and write what is found, if newer, into ``positions`` and ``halves``."""
        end = sequence + len(topics)
        index = bisect_right(known, (sequence, 1 << 62)) - 1
        for first, ordinal in known[max(index, 0) :]:
            if first >= end:
                break
            row = ordinal - self._runs.first
            low, high = max(first, sequence), min(first + int(self._runs["count"][row]), end)
            if low >= high:
                continue
            here = slice(low - sequence, high - sequence)
            topic = int(self._runs["topic"][row])
            theirs = self._mixed[ordinal]["topic"][low - first : high - first] if topic == _MIXED else topic
            begin = int(self._runs["position"][row]) + low - first
            found = np.arange(begin, begin + high - low)
            newer = (topics[here] == theirs) & (found > positions[here])
            positions[here][newer] = found[newer]
            halves[here][newer] = self._runs["half"][row]

    def knows(self, instance: int, sequence: int, count: int) -> bool:
        """Return whether one of ``count`` ids of an instance from ``sequence`` on is known, in any topic."""
        end = sequence + count
        return any(self._last_before(layer.get(instance), end)[0] > sequence for layer in self._layers)

    def _last_before(self, known: list[Known] | None, end: int) -> tuple[int, int]:
        """Return the end sequence and the ordinal of the last of the runs ``known`` that begins before the sequence
        ``end``; -1 and -1 without one."""
        index = -1 if known is None else bisect_left(known, (end, -1)) - 1
        if known is None or index < 0:
            return -1, -1
        first, ordinal = known[index]
        return first + self._runs.item("count", ordinal - self._runs.first), ordinal

    def add(
        self, ids: pa.Array, topics: Int32s | int, position: int, time_us: int, rules: Rules, *, half: bool = False
    ) -> None:
        """Add ids whose messages (plain or ``half``) stand at ``position``, ``position`` + 1, ... in ``topics`` (or all
        in one); forget old ids. An id that its topic knew now stands for the newer message."""
        instances, sequences, starts = split_runs(ids)
        runs = []
        for start, end in pairwise([*starts.tolist(), len(ids)]):
            topic = topics if isinstance(topics, int) else _narrow(topics[start:end])
            runs.append(Run(int(instances[start]), int(sequences[start]), end - start, topic))
        self.add_runs(runs, position, time_us, rules, half=half)

    def add_runs(self, runs: Sequence[Run], position: int, time_us: int, rules: Rules, *, half: bool) -> None:
        """As :meth:`add`, of ids that are split into runs already."""
        for run in runs:
            self._add_run(run, half, position, time_us, rules)
            position += run.size
        self._forget(time_us, rules)

    def _add_run(self, run: Run, half: bool, position: int, time_us: int, rules: Rules) -> None:
        """Add a run whose first message is at ``position``, or lengthen the run that it follows. The choice does not
        depend on the layers."""
        instance, sequence, count, topic = run
        free, before, apart = -1, -1, True
        for number, layer in enumerate(self._layers):
            known = layer.get(instance)
            end, ordinal = self._last_before(known, sequence + count)
            if end > sequence:
                apart = False
                continue
            if end == sequence and self._goes_on(ordinal, half, position, time_us, rules):
                before = ordinal
            free = number if free < 0 else free
            if known is None:
                break
        if before >= 0 and apart and self._lengthen(before, count, topic):
            return
        ids = {"instance": instance, "sequence": sequence, "count": count}
        of_run = _MIXED if not isinstance(topic, int) else topic
        ordinal = self._runs.extend(1, **ids, position=position, time_us=time_us, topic=of_run, half=half)
        if of_run == _MIXED:
            self._note_topics(ordinal, count, topic)
        self._index(instance, (sequence, ordinal), free)

    def _goes_on(self, ordinal: int, half: bool, position: int, time_us: int, rules: Rules) -> bool:
        """Return whether a message at ``position`` can continue the run ``ordinal``: it is the next position and of the
        same kind, and the run is not too old."""
        row, item = ordinal - self._runs.first, self._runs.item
        return (
            item("position", row) + item("count", row) == position
            and bool(item("half", row)) == half
            and time_us - item("time_us", row) <= rules.dedup_window_us // _SLICES
        )

    def _lengthen(self, ordinal: int, count: int, topic: Int32s | int) -> bool:
        row = ordinal - self._runs.first
        own, has = self._runs.item("topic", row), self._runs.item("count", row)
        if own == _MIXED:
            self._note_topics(ordinal, count, topic)
        elif not isinstance(topic, int) or topic != own:
            if has > _LONGEST_MIXED:
                return False
            self._note_topics(ordinal, has, own)
            self._note_topics(ordinal, count, topic)
            self._runs["topic"][row] = _MIXED
        self._runs.put("count", row, has + count)
        return True

    def _note_topics(self, ordinal: int, count: int, topic: Int32s | int) -> None:
        self._mixed.setdefault(ordinal, Columns({"topic": np.int32})).extend(count, topic=topic)

    def _index(self, instance: int, run: Known, free: int) -> None:
        """Add a run to layer number ``free``; -1: to a new layer."""
        if free < 0:
            free = len(self._layers)
            self._layers.append({})
        insort(self._layers[free].setdefault(instance, []), run)

    def _forget(self, time_us: int, rules: Rules) -> None:
        oldest, runs = time_us - rules.dedup_window_us - rules.dedup_window_us // _SLICES, self._runs
        if len(runs) <= rules.dedup_max and (not len(runs) or runs.item("time_us", 0) >= oldest):
            return
        gone = int(np.searchsorted(runs["time_us"], oldest, side="left"))
        gone = max(gone, len(runs) - rules.dedup_max)
        pairs = zip(runs["instance"][:gone].tolist(), runs["sequence"][:gone].tolist(), strict=True)
        for ordinal, (instance, sequence) in enumerate(pairs, runs.first):
            self._unindex(instance, (sequence, ordinal))
            self._mixed.pop(ordinal, None)
        runs.trim(runs.first + gone)

    def _unindex(self, instance: int, run: Known) -> None:
        for number, layer in enumerate(self._layers):
            known = layer[instance]
            index = bisect_left(known, run)
            if index < len(known) and known[index] == run:
                del known[index]
                if not known:
                    self._close_ranks(instance, number)
                return

    def _close_ranks(self, instance: int, number: int) -> None:
        """Move the runs of an instance down by one layer, after its layer ``number`` became empty."""
        above = [layer.pop(instance) for layer in self._layers[number:] if instance in layer]
        for place, known in enumerate(above[1:], number):
            self._layers[place][instance] = known
        while self._layers and not self._layers[-1]:
            self._layers.pop()

    def snapshot(self) -> dict[str, pa.Table]:
        topics = [self._mixed[ordinal]["topic"] for ordinal in sorted(self._mixed)]
        column = np.concatenate(topics) if topics else np.empty(0, np.int32)
        return {"dedup": self._runs.to_table(), "dedup_topics": pa.table({"topic": column})}

    def restore(self, tables: dict[str, pa.Table], places: Callable[[], Places], rules: Rules) -> None:
        """Restore :meth:`snapshot`. Ids of formats 1 and 2 had no topics: what ``places`` returns finds them."""
        if "dedup_topics" not in tables:
            self._restore_without_topics(tables["dedup"], places(), rules)
            return
        self._runs.load(tables["dedup"])
        topics, at = tables["dedup_topics"]["topic"].to_numpy(), 0
        for row in np.flatnonzero(self._runs["topic"] == _MIXED).tolist():
            count = int(self._runs["count"][row])
            self._note_topics(self._runs.first + row, count, topics[at : at + count])
            at += count
        columns = (self._runs[name].tolist() for name in ("instance", "sequence", "count"))
        for ordinal, (instance, sequence, count) in enumerate(zip(*columns, strict=True), self._runs.first):
            self._index(instance, (sequence, ordinal), self._free_layer(instance, sequence, count))

    def _free_layer(self, instance: int, sequence: int, count: int) -> int:
        ends = (self._last_before(layer.get(instance), sequence + count)[0] for layer in self._layers)
        return next((number for number, end in enumerate(ends) if end <= sequence), -1)

    def _restore_without_topics(self, old: pa.Table, places: Places, rules: Rules) -> None:
        """Restore an old snapshot; ``places`` finds the topics of its ids. Ids of messages that left with retention are
        forgotten: sent again, they are stored."""
        self._runs.first = int((old.schema.metadata or {}).get(b"first", b"0"))
        names = ("instance", "sequence", "count", "position", "time_us")
        for instance, sequence, count, position, time_us in zip(*(old[n].to_pylist() for n in names), strict=True):
            topics, halves = places(np.arange(position, position + count))
            kinds = np.where(topics < 0, -1, halves)
            starts = np.flatnonzero(np.concatenate(([True], kinds[1:] != kinds[:-1])))
            for start, end in pairwise([*starts.tolist(), count]):
                if kinds[start] >= 0:
                    run = Run(instance, sequence + start, end - start, _narrow(topics[start:end]))
                    self._add_run(run, bool(kinds[start]), position + start, time_us, rules)


def _narrow(topics: Int32s) -> Int32s | int:
    """Return the one topic if all are equal, else the array."""
    return int(topics[0]) if all_equal(topics) else topics


def places_of(topics: Topics, delays: Delays, transactions: TransactionTable) -> Places:
    """Return a function of log positions that returns topic (-1: left by retention) and kind (half?) of the messages
    there, in a restored ledger."""
    queues = [(queue.positions(queue.head, queue.end), queue_id) for queue_id, queue in enumerate(topics.queues)]
    plain, plain_ids = [p for p, _ in queues], [np.full(len(p), queue_id) for p, queue_id in queues]
    waiting, waiting_ids = delays.held()
    halves, half_ids = transactions.halves()
    positions = np.concatenate([halves, waiting, *plain]).astype(np.int64)
    queue_ids = np.concatenate([half_ids, waiting_ids, *plain_ids]).astype(np.int32)
    rising, first = np.unique(positions, return_index=True)  # the first of equals: a half message before its place
    of_queue = np.broadcast_to(topics.numbers_of_queues(queue_ids[first]), len(first))
    half = first < len(halves)

    def places(wanted: Int64s) -> tuple[Int32s, Bools]:
        at = locate(rising, wanted)
        known = at >= 0
        found, kinds = np.full(len(wanted), -1, np.int32), np.zeros(len(wanted), np.bool_)
        found[known], kinds[known] = of_queue[at[known]], half[at[known]]
        return found, kinds

    return places
