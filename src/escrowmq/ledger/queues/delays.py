"""Delayed messages: stored in the log, but in no consume queue until a release by the broker's clock puts them there
(I21: never early).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from escrowmq.ledger.columns.arrays import Bools, Columns, Int32s, Int64s, locate, with_zeros
from escrowmq.ledger.columns.schedule import DueIndex
from escrowmq.ledger.events import Decision, Event, event_of
from escrowmq.schemas import Kind


class Delays:
    """Delayed messages, in order of arrival."""

    def __init__(self) -> None:
        messages = {"position": np.int64, "queue_id": np.int32, "tag": np.int32}
        self._rows = Columns(messages | {"visible_us": np.int64, "size": np.int32, "waiting": np.bool_})
        self._due = DueIndex(self._alive)
        self.waiting = 0

    def _alive(self, ordinals: Int64s, _due_us: Int64s | int) -> Bools:
        rows = ordinals - self._rows.first
        alive = rows >= 0
        alive[alive] = self._rows["waiting"][rows[alive]]
        return alive

    def add(self, positions: Any, queue_ids: Any, tags: Any, visible_us: Any, sizes: Any) -> None:
        """Delay messages until ``visible_us``; ``sizes``: of their bodies. Arrays or sequences of one length."""
        messages = {"position": positions, "queue_id": queue_ids, "tag": tags, "size": sizes}
        first = self._rows.extend(len(positions), **messages, visible_us=visible_us, waiting=True)
        self._due.put(np.arange(first, first + len(positions)), np.asarray(visible_us, np.int64))
        self.waiting += len(positions)

    def decide_release(self, now_us: int, limit: int) -> list[Event]:
        """Return the event that releases up to ``limit`` due messages, in a list; empty if none is due."""
        ordinals = self._due.due(now_us, limit)
        if not len(ordinals):
            return []
        return [event_of(Kind.RELEASED, self._rows["position"][ordinals - self._rows.first], ordinals)]

    def decide_recall(self, positions: Int64s, queue_ids: Sequence[int]) -> Decision:
        """Decide that the messages at these log positions are dropped, if they still wait for one of these queues.
        Answer: their number."""
        rows = np.flatnonzero(np.isin(self._rows["position"], positions))
        rows = rows[self._rows["waiting"][rows] & np.isin(self._rows["queue_id"][rows], queue_ids)]
        if not len(rows):
            return Decision((), 0)
        event = event_of(Kind.RECALLED, self._rows["position"][rows], rows + self._rows.first)
        return Decision((event,), len(rows))

    def take(self, ordinals: Int64s) -> tuple[Int64s, Int32s, Int32s, Int32s]:
        """Remove released or recalled messages. Returns their positions, queue ids, tags and sizes."""
        rows = ordinals - self._rows.first
        names = ("position", "queue_id", "tag", "size")
        positions, queue_ids, tags, sizes = (self._rows[name][rows].copy() for name in names)
        self._release(rows)
        self._due.done()
        return positions, queue_ids, tags, sizes

    def drop(self, queue_ids: Sequence[int]) -> None:
        """Drop delayed messages of these queues, because their topic is deleted."""
        self._release(self._waiting_for(queue_ids))

    def count(self, queue_ids: Sequence[int]) -> int:
        """Return the number of delayed messages of these queues."""
        return len(self._waiting_for(queue_ids))

    def _waiting_for(self, queue_ids: Sequence[int]) -> Int64s:
        return np.flatnonzero(self._rows["waiting"] & np.isin(self._rows["queue_id"], queue_ids))

    def _release(self, rows: Int64s) -> None:
        self._rows["waiting"][rows] = False
        self.waiting -= len(rows)
        still = np.flatnonzero(self._rows["waiting"])
        self._rows.trim(self._rows.first + (int(still[0]) if len(still) else len(self._rows)))

    @property
    def wake_us(self) -> int:
        """A lower bound of the time (µs) of the next release; ``NEVER_US``: none."""
        return self._due.wake_us

    def queue_ids_of(self, positions: Int64s) -> Int64s:
        """Return the queue id of each delayed message, by log position; -1 for others. It scans: for repeats only."""
        waiting = np.flatnonzero(self._rows["waiting"])
        waiting = waiting[np.argsort(self._rows["position"][waiting])]
        index = locate(self._rows["position"][waiting], positions)
        return np.where(index >= 0, np.append(self._rows["queue_id"][waiting], 0)[index], -1)

    def held(self) -> tuple[Int64s, Int32s]:
        """Return the log positions and queue ids of all delayed messages."""
        waiting = self._rows["waiting"]
        return self._rows["position"][waiting], self._rows["queue_id"][waiting]

    def lowest_position(self) -> int | None:
        """Return the lowest log position of a delayed message; None without any."""
        waiting = self._rows["position"][self._rows["waiting"]]
        return int(waiting.min()) if len(waiting) else None

    def snapshot(self) -> dict[str, pa.Table]:
        return {"delays": self._rows.to_table()}

    def restore(self, tables: dict[str, pa.Table]) -> None:
        self._rows.load(with_zeros(tables["delays"], "size", np.int32))
        rows = np.flatnonzero(self._rows["waiting"])
        self.waiting = len(rows)
        self._due.put(rows + self._rows.first, self._rows["visible_us"][rows])
