"""The transaction table: columns, and how a transaction or a half message is found in them.

A transaction is one row: the position of its first half message, the session that prepared it, its state. Further half
messages of it are rows of a second table that hang on it as a chain. Positions rise, so a transaction is found from its
id by binary search; nothing is kept per message but these columns.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from escrowmq.ledger.columns import codes as code
from escrowmq.ledger.columns.growing import Columns
from escrowmq.ledger.transactions.decisions import NONE
from escrowmq.ledger.transactions.sessions import NOBODY, Sessions
from escrowmq.message.ids import records

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
UInt8s = npt.NDArray[np.uint8]


class TransactionTable:
    """All transactions of a shard and their half messages. Rows are numbered by ordinal (see ``columns.py``)."""

    def __init__(self, shard: int, sessions: Sessions) -> None:
        self.shard = shard
        self._sessions = sessions
        self.rows = Columns(
            {
                "first": np.int64,  # position of the first half message; rises
                "epoch": np.uint32,
                "state": np.uint8,
                "by": np.uint8,
                "checks": np.int32,
                "messages": np.int32,
                "due_us": np.int64,  # the next ask; after the last ask, the end of waiting
                "queue_id": np.int32,  # of the first half message, as are tag and (elsewhere) visible_us
                "tag": np.int32,
                "last": np.int64,  # newest row of `joined`, -1 none
            }
        )
        self.joined = Columns(
            {"position": np.int64, "owner": np.int64, "before": np.int64, "queue_id": np.int32, "tag": np.int32}
        )
        self._delayed = Columns({"position": np.int64, "visible_us": np.int64})  # half messages with a delay
        self._times = Columns({"position": np.int64, "time_us": np.int64})  # when positions were prepared

    # Finding

    def find(self, positions: Int64s) -> Int64s:
        """Ordinals of transactions by the position of their first half message; -1 where there is none."""
        first = self.rows["first"]
        index = np.searchsorted(first, positions)
        found = index < len(first)
        found[found] = first[index[found]] == positions[found]
        ordinals: Int64s = np.where(found, index + self.rows.first, NONE)
        return ordinals

    def find_ids(self, ids: pa.Array) -> tuple[Int64s, UInt8s]:
        """Ordinals of transaction ids, and a code a row: OK, WRONG_SHARD or UNKNOWN_TRANSACTION."""
        raw = records(ids)
        codes = np.zeros(len(ids), np.uint8)
        ordinals = self.find(raw["position"].astype(np.int64))
        known = np.flatnonzero(ordinals != NONE)
        wrong = self.rows["epoch"][ordinals[known] - self.rows.first] != raw["epoch"][known]
        ordinals[known[wrong]] = NONE
        codes[ordinals == NONE] = code.UNKNOWN_TRANSACTION
        foreign = raw["shard"] != self.shard
        codes[foreign], ordinals[foreign] = code.WRONG_SHARD, NONE
        return ordinals, codes

    def owner_of(self, positions: Int64s) -> Int64s:
        """Ordinals of the transactions that half messages belong to; -1 where there is none (any more)."""
        owners = self.find(positions)
        index = np.searchsorted(self.joined["position"], positions)
        hit = (owners == NONE) & (index < len(self.joined))
        hit[hit] = self.joined["position"][index[hit]] == positions[hit]
        owners[hit] = self.joined["owner"][index[hit]]
        owners[owners < self.rows.first] = NONE
        return owners

    def groups_of(self, ordinals: Int64s) -> Int64s:
        """Producer groups of transactions; ``NOBODY`` of those decided whose group is forgotten."""
        return self._sessions.groups_of(self.column("epoch", ordinals).astype(np.int64))

    def foreign(self, ordinals: Int64s, groups: Int64s | int) -> npt.NDArray[np.bool_]:
        """Which transactions belong to another group than ``groups``. Those of nobody are decided, and anyone may hear how."""
        owners = self.groups_of(ordinals)
        others: npt.NDArray[np.bool_] = (owners != groups) & (owners != NOBODY)
        return others

    def column(self, name: str, ordinals: Int64s) -> npt.NDArray[Any]:
        """One column at some ordinals."""
        return self.rows[name][ordinals - self.rows.first]

    def prepared_us(self, positions: Int64s) -> Int64s:
        """When half messages became durable."""
        times = self._times
        index = np.searchsorted(times["position"], positions, side="right") - 1
        return times["time_us"][np.maximum(index, 0)]

    def messages_of(self, ordinals: Int64s) -> tuple[Int64s, Int64s, Int32s, Int32s]:
        """All half messages of transactions: index into ``ordinals``, position, queue id, tag; by index, then position."""
        owners = np.arange(len(ordinals))
        parts = [(owners, *(self.column(name, ordinals) for name in ("first", "queue_id", "tag")))]
        links = self.column("last", ordinals).astype(np.int64)
        hanging = links != NONE
        if not hanging.any():
            return parts[0]  # type: ignore[return-value]
        while hanging.any():
            owners, rows = owners[hanging], links[hanging] - self.joined.first
            parts.append((owners, *(self.joined[name][rows] for name in ("position", "queue_id", "tag"))))
            links = self.joined["before"][rows]
            hanging = links != NONE
        index, positions, queue_ids, tags = (np.concatenate(column) for column in zip(*parts, strict=True))
        order = np.lexsort((positions, index))
        return index[order], positions[order], queue_ids[order], tags[order]

    def queue_ids_of(self, positions: Int64s, owners: Int64s) -> Int64s:
        """Queue ids of half messages, their transactions being ``owners``."""
        ids = self.column("queue_id", owners).astype(np.int64)
        hanging = self.column("first", owners) != positions
        ids[hanging] = self.joined["queue_id"][np.searchsorted(self.joined["position"], positions[hanging])]
        return ids

    def visible_us(self, positions: Int64s) -> Int64s:
        """Until when half messages are to be held back; 0: not at all."""
        if not len(self._delayed):
            return np.zeros(len(positions), np.int64)
        index = np.minimum(np.searchsorted(self._delayed["position"], positions), len(self._delayed) - 1)
        visible: Int64s = np.where(self._delayed["position"][index] == positions, self._delayed["visible_us"][index], 0)
        return visible

    # Storage

    def _trim(self, position: int) -> None:
        """Let go of everything below ``position``."""
        gone = int(np.searchsorted(self.rows["first"], position))
        self.rows.trim(self.rows.first + gone)
        for table in (self.joined, self._delayed):
            table.trim(table.first + int(np.searchsorted(table["position"], position)))
        keep = max(int(np.searchsorted(self._times["position"], position, side="right")) - 1, 0)
        self._times.trim(self._times.first + keep)

    def snapshot(self) -> dict[str, pa.Table]:
        """The state as tables."""
        return {
            "transactions": self.rows.to_table(),
            "joined": self.joined.to_table(),
            "delayed_halves": self._delayed.to_table(),
            "prepare_times": self._times.to_table(),
        }

    def _load(self, tables: dict[str, pa.Table]) -> None:
        """Take the columns back from a snapshot."""
        self.rows.load(tables["transactions"])
        self.joined.load(tables["joined"])
        self._delayed.load(tables["delayed_halves"])
        self._times.load(tables["prepare_times"])
