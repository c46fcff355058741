"""De-duplication by message id (invariant I9): a repeated id gets the position of its first message.

An id is (instance, sequence). Clients count the sequence up, so what is remembered is *runs* of consecutive ids at
consecutive positions: one run for a whole batch, however long, and steady clients extend their last run. Ids that a
caller made up are runs of one.
"""

from __future__ import annotations

from bisect import bisect_right, insort

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from escrowmq.ledger.columns.arrays import Columns, Int64s
from escrowmq.ledger.commands import Rules
from escrowmq.message.ids import records
from escrowmq.schemas import MESSAGE_ID_DTYPE

_SLICES = 16  # a run is extended for at most this part of the window, so that it can leave as a whole


def split_runs(ids: pa.Array) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64], Int64s]:
    """Instances and sequences (uint64) of ids, and the rows at which a run of consecutive ids begins."""
    raw = records(ids, MESSAGE_ID_DTYPE)
    instances = raw["instance"].astype(np.uint64)
    sequences = raw["sequence"].astype(np.uint64)
    breaks = (instances[1:] != instances[:-1]) | (sequences[1:] != sequences[:-1] + np.uint64(1)) | (sequences[1:] == 0)
    return instances, sequences, np.flatnonzero(np.concatenate(([True], breaks))) if len(ids) else np.empty(0, np.int64)


class Dedup:
    """Which message ids were stored lately, and at which position."""

    def __init__(self) -> None:
        ids, counts = ("instance", "sequence"), ("count", "position", "time_us")
        self._runs = Columns(dict.fromkeys(ids, np.uint64) | dict.fromkeys(counts, np.int64))
        self._by_instance: dict[int, list[tuple[int, int]]] = {}  # sorted (first sequence, run ordinal)

    def __len__(self) -> int:
        return len(self._runs)

    def find(self, ids: pa.Array) -> tuple[Int64s, Int64s]:
        """For each row the position of an earlier message with its id, else -1; and the first row of this batch with
        the same id (its own number when there is none before it)."""
        size = len(ids)
        positions = np.full(size, -1, np.int64)
        firsts = np.arange(size)
        if not size:
            return positions, firsts
        instances, sequences, starts = split_runs(ids)
        ends = np.append(starts[1:], size)
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            if known := self._by_instance.get(int(instances[start])):
                self._find_run(known, int(sequences[start]), positions[start:end])
        if len(starts) > 1:
            order = np.lexsort((sequences, instances))
            same = (instances[order][1:] == instances[order][:-1]) & (sequences[order][1:] == sequences[order][:-1])
            if same.any():
                begins = np.flatnonzero(np.concatenate(([True], ~same)))
                firsts[order] = np.repeat(order[begins], np.diff(np.append(begins, size)))
        return positions, firsts

    def _find_run(self, known: list[tuple[int, int]], sequence: int, out: Int64s) -> None:
        """Fill ``out`` for ids ``sequence``, ``sequence`` + 1, ...; overlapping runs: the first stored wins."""
        end = sequence + len(out)
        index = bisect_right(known, (sequence, 1 << 62)) - 1
        for first, ordinal in known[max(index, 0) :]:
            if first >= end:
                break
            row = ordinal - self._runs.first
            count = int(self._runs["count"][row])
            low, high = max(first, sequence), min(first + count, end)
            if low < high:
                begin = int(self._runs["position"][row]) + low - first
                out[low - sequence : high - sequence] = np.arange(begin, begin + high - low)

    def add(self, ids: pa.Array, position: int, time_us: int, rules: Rules) -> None:
        """Remember ids (none of them known) whose messages stand at ``position``, ``position`` + 1, ...; forget the old."""
        instances, sequences, starts = split_runs(ids)
        ends = np.append(starts[1:], len(ids))
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            self._add_run(int(instances[start]), int(sequences[start]), end - start, position + start, time_us, rules)
        self._forget(time_us, rules)

    def _add_run(self, instance: int, sequence: int, count: int, position: int, time_us: int, rules: Rules) -> None:
        known = self._by_instance.setdefault(instance, [])
        if known:
            first, ordinal = known[-1]
            row = ordinal - self._runs.first
            has = int(self._runs["count"][row])
            if (
                first + has == sequence
                and int(self._runs["position"][row]) + has == position
                and time_us - int(self._runs["time_us"][row]) <= rules.dedup_window_us // _SLICES
            ):
                self._runs["count"][row] += count
                return
        ordinal = self._runs.extend(
            1, instance=instance, sequence=sequence, count=count, position=position, time_us=time_us
        )
        insort(known, (sequence, ordinal))

    def _forget(self, time_us: int, rules: Rules) -> None:
        oldest = time_us - rules.dedup_window_us - rules.dedup_window_us // _SLICES
        gone = int(np.searchsorted(self._runs["time_us"], oldest, side="left"))
        gone = max(gone, len(self._runs) - rules.dedup_max)
        if gone <= 0:
            return
        instances = self._runs["instance"][:gone].tolist()
        sequences = self._runs["sequence"][:gone].tolist()
        for ordinal, (instance, sequence) in enumerate(zip(instances, sequences, strict=True), self._runs.first):
            known = self._by_instance[instance]
            known.remove((sequence, ordinal)) if len(known) > 1 else self._by_instance.pop(instance)
        self._runs.trim(self._runs.first + gone)

    def snapshot(self) -> dict[str, pa.Table]:
        return {"dedup": self._runs.to_table()}

    def restore(self, tables: dict[str, pa.Table]) -> None:
        self._runs.load(tables["dedup"])
        rows = zip(self._runs["instance"].tolist(), self._runs["sequence"].tolist(), strict=True)
        for ordinal, (instance, sequence) in enumerate(rows, self._runs.first):
            self._by_instance.setdefault(instance, []).append((sequence, ordinal))
        for known in self._by_instance.values():
            known.sort()
