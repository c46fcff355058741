"""The transaction table: the columns, how a transaction or a half message is found in them, and the one way to change a
state.

A transaction is one row: the position of its first half message, the session that prepared it, its state. Further half
messages of it are rows of a second table that hang on it as a chain. Positions rise, so a transaction is found from its
id by binary search; nothing is kept per message but these columns. Of a transaction that left with retention nothing is
kept, unless it was undecided until then: that it EXPIRED is remembered for late requests. What may
become of a row is ruled in ``ending.py`` and ``checkback.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from escrowmq.ledger.columns import codes as code
from escrowmq.ledger.columns.arrays import (
    Bools,
    Columns,
    Int32s,
    Int64s,
    UInt8s,
    all_equal,
    all_true,
    locate,
    places_of_few,
    with_zeros,
)
from escrowmq.ledger.events import Event, event_of
from escrowmq.ledger.transactions.halves import Halves
from escrowmq.ledger.transactions.oldest import OldestOpen
from escrowmq.ledger.transactions.sessions import NO_GROUP, Sessions
from escrowmq.ledger.transactions.undecided import LeftUndecided
from escrowmq.message.ids import records, split_transaction_id
from escrowmq.model import DecidedBy, Outcome, TransactionState
from escrowmq.schemas import Kind

OPEN, COMMITTED, ROLLED_BACK, PARKED, EXPIRED = (int(s) for s in TransactionState)
UNKNOWN, COMMIT, ROLLBACK = (int(o) for o in Outcome)
BY_OPERATOR = int(DecidedBy.OPERATOR)
NONE = -1


def decided(first: Int64s, state: UInt8s | int, by: DecidedBy, epochs: Int64s | int) -> Event:
    """Return the decisions of the transactions that begin at the positions ``first``."""
    size = len(first)
    columns = (np.broadcast_to(np.asarray(column), size) for column in (state, int(by), epochs))
    return event_of(Kind.DECIDED, first, *columns)


class TransactionTable:
    """All transactions of a shard and their half messages. Rows are numbered by ordinal (see ``columns/arrays.py``)."""

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
                "size": np.int32,  # of its body
                "last": np.int64,  # newest row of `joined`, -1 none
            }
        )
        self.joined = Columns(
            {
                "position": np.int64,
                "owner": np.int64,
                "before": np.int64,
                "queue_id": np.int32,
                "tag": np.int32,
                "size": np.int32,
            }
        )
        self._delayed = Columns({"position": np.int64, "visible_us": np.int64})  # half messages with a delay
        self.times = Columns({"position": np.int64, "time_us": np.int64})  # when positions were prepared
        self._expired = LeftUndecided()
        self.open: dict[int, int] = {}
        """OPEN transactions of each producer group, as ``parked`` has those that are PARKED."""
        self.parked: dict[int, int] = {}
        self._floor = 0  # no OPEN transaction below this ordinal
        self.oldest = OldestOpen(self.rows, self.groups_of)

    # Entering

    def enter(self, batch: pa.RecordBatch, tags: Int32s, sizes: Int32s, position: int, time_us: int) -> Int64s:
        """Store half messages (rows of Kind.HALF) with the ``sizes`` of their bodies; the ordinals of the transactions
        that they begin."""
        own = np.arange(position, position + batch.num_rows)
        owner = batch.column("transaction").to_numpy()
        visible = batch.column("visible_us").to_numpy()
        self._note_time(position, time_us)
        late = np.flatnonzero(visible > 0)
        if len(late):
            self._delayed.extend(len(late), position=own[late], visible_us=visible[late])
        begins = owner == own
        if all_true(begins):
            return self._begin(batch, tags, sizes, own, slice(None))
        begun = self._begin(batch, tags, sizes, own, np.flatnonzero(begins))
        self._join(batch, tags, sizes, own, owner, np.flatnonzero(~begins))
        return begun

    def _note_time(self, position: int, time_us: int) -> None:
        times = self.times
        if not len(times) or times.item("time_us", len(times) - 1) < time_us:
            times.extend(1, position=position, time_us=time_us)

    def _begin(self, batch: pa.RecordBatch, tags: Int32s, sizes: Int32s, own: Int64s, at: slice | Int64s) -> Int64s:
        first, epochs = own[at], batch.column("epoch").to_numpy()[at]
        ordinal = self.rows.extend(
            len(first),
            first=first,
            epoch=epochs,
            state=OPEN,
            by=0,
            checks=0,
            messages=1,
            due_us=batch.column("due_us").to_numpy()[at],
            queue_id=batch.column("queue_id").to_numpy()[at],
            tag=tags[at],
            size=sizes[at],
            last=NONE,
        )
        self._count(self.open, epochs, 1)
        return np.arange(ordinal, ordinal + len(first))

    def _join(self, batch: pa.RecordBatch, tags: Int32s, sizes: Int32s, own: Int64s, owner: Int64s, at: Int64s) -> None:
        owners = self.find(owner[at])
        order = np.argsort(owners, kind="stable")
        at, owners = at[order], owners[order]
        rows = owners - self.rows.first
        begins = np.concatenate(([True], owners[1:] != owners[:-1]))
        by_position = np.argsort(own[at], kind="stable")
        ordinals = np.empty(len(at), np.int64)
        ordinals[by_position] = np.arange(self.joined.end, self.joined.end + len(at))
        before = np.where(begins, self.rows["last"][rows], np.concatenate(([NONE], ordinals[:-1])))
        self.joined.extend(
            len(at),
            position=own[at][by_position],
            owner=owners[by_position],
            before=before[by_position],
            queue_id=batch.column("queue_id").to_numpy()[at][by_position],
            tag=tags[at][by_position],
            size=sizes[at][by_position],
        )
        ends = np.append(begins[1:], True)
        self.rows["last"][rows[ends]] = ordinals[ends]
        np.add.at(self.rows["messages"], rows, 1)

    def enter_rows(
        self,
        halves: Halves,
        queue_ids: Sequence[int],
        tags: Sequence[int] | int,
        sizes: Sequence[int],
        position: int,
        time_us: int,
    ) -> Int64s:
        """As :meth:`enter`, of what was decided as rows."""
        own, owners = range(position, position + len(queue_ids)), halves.owners
        self._note_time(position, time_us)
        first: Sequence[int] = own
        epochs, due_us = halves.epochs, halves.due_us
        if owners is not None:
            self._join_rows(owners, own, queue_ids, tags, sizes)
            at = [row for row, owner in enumerate(owners) if owner == NONE]
            columns = (own, epochs, due_us, queue_ids, sizes)
            first, epochs, due_us, queue_ids, sizes = ([of[row] for row in at] for of in columns)
            tags = tags if isinstance(tags, int) else [tags[row] for row in at]
        ordinal = self.rows.extend(
            len(first),
            first=first,
            epoch=epochs,
            state=OPEN,
            by=0,
            checks=0,
            messages=1,
            due_us=due_us,
            queue_id=queue_ids,
            tag=tags,
            size=sizes,
            last=NONE,
        )
        for group, count in halves.begins.items():
            self.open[group] = self.open.get(group, 0) + count
        return np.arange(ordinal, ordinal + len(first))

    def _join_rows(
        self,
        owners: Sequence[int],
        own: range,
        queue_ids: Sequence[int],
        tags: Sequence[int] | int,
        sizes: Sequence[int],
    ) -> None:
        last, messages = self.rows["last"], self.rows["messages"]
        for row, owner in enumerate(owners):
            if owner != NONE:
                of = owner - self.rows.first
                tag = tags if isinstance(tags, int) else tags[row]
                last[of] = self.joined.extend(
                    1,
                    position=own[row],
                    owner=owner,
                    before=last[of],
                    queue_id=queue_ids[row],
                    tag=tag,
                    size=sizes[row],
                )
                messages[of] += 1

    def hold_back(self, positions: Sequence[int], visible_us: Sequence[int]) -> None:
        """Set the delay of these half messages: they are not visible before then."""
        self._delayed.extend(len(positions), position=positions, visible_us=visible_us)

    # States

    def decide(self, ordinals: Int64s, states: UInt8s, by: UInt8s) -> None:
        """Undecided transactions get their final states."""
        self._change(ordinals, states)
        self.rows["by"][ordinals - self.rows.first] = by

    def decide_few(self, decided: Sequence[tuple[int, int, int, int]]) -> list[int]:
        """As :meth:`decide`, for rows of Kind.DECIDED (each transaction once); their row numbers."""
        firsts, states, by, epochs = (self.rows[name] for name in ("first", "state", "by", "epoch"))
        rows = places_of_few(firsts, [first for first, _, _, _ in decided])
        group, last = NO_GROUP, -1  # most are of one session
        for row, (_, state, decided_by, _) in zip(rows, decided, strict=True):
            counts = self.parked if states.item(row) == PARKED else self.open
            if (epoch := epochs.item(row)) != last:
                group, last = self._sessions.group(epoch), epoch
            counts[group] = counts.get(group, 0) - 1
            states[row] = state
            by[row] = decided_by
        return rows

    def park(self, ordinals: Int64s) -> None:
        """OPEN transactions become PARKED."""
        self._change(ordinals, PARKED)
        self._count(self.parked, self.column("epoch", ordinals), 1)

    def reopen(self, ordinals: Int64s) -> None:
        """Undecided transactions become OPEN."""
        self._change(ordinals, OPEN)
        self._count(self.open, self.column("epoch", ordinals), 1)
        self._floor = min(self._floor, int(ordinals.min()))
        self.oldest.back_to(self._floor)

    def _change(self, ordinals: Int64s, states: UInt8s | int) -> None:
        rows = ordinals - self.rows.first
        was_parked, epochs = self.rows["state"][rows] == PARKED, self.rows["epoch"][rows]
        if np.count_nonzero(was_parked):
            self._count(self.parked, epochs[was_parked], -1)
            epochs = epochs[~was_parked]
        self._count(self.open, epochs, -1)
        self.rows["state"][rows] = states

    def _count(self, counts: dict[int, int], epochs: npt.NDArray[np.uint32], sign: int) -> None:
        """Transactions of these sessions are one more, or one less, among those of their groups."""
        if not len(epochs):
            return
        if all_equal(epochs):
            group = int(self._sessions.groups_of(epochs[:1].astype(np.int64))[0])
            counts[group] = counts.get(group, 0) + sign * len(epochs)
            return
        groups, sizes = np.unique(self._sessions.groups_of(epochs.astype(np.int64)), return_counts=True)
        for group, size in zip(groups.tolist(), sizes.tolist(), strict=True):
            counts[group] = counts.get(group, 0) + sign * size

    def forget_group(self, group: int) -> None:
        """Forget a producer group, which has nothing undecided."""
        self.open.pop(group, None)
        self.parked.pop(group, None)

    # What is undecided

    def oldest_open(self) -> int:
        """Return the lowest ordinal that is OPEN; ``rows.end`` when none is."""
        self._floor = self.first_open(self._floor, reopened=True)
        return self._floor

    def first_open(self, ordinal: int, *, reopened: bool) -> int:
        """Return the lowest ordinal from ``ordinal`` on that is OPEN; ``rows.end`` when none is. ``reopened``: as
        of :meth:`open_rows`."""
        ordinal = max(ordinal, self.rows.first)
        while ordinal < self.rows.end:
            start = ordinal - self.rows.first
            chunk = self.open_rows(start, start + 65_536, reopened=reopened)
            if chunk.any():
                return ordinal + int(chunk.argmax())
            ordinal += len(chunk)
        return ordinal

    def open_rows(self, start: int, end: int, *, reopened: bool) -> Bools:
        """Return which rows of a range are OPEN; ``reopened``: whether those count that a person opened anew."""
        found: Bools = self.rows["state"][start:end] == OPEN
        return found if reopened else found & (self.rows["by"][start:end] != BY_OPERATOR)

    def undecided(self) -> Int64s:
        """Row numbers of all OPEN and PARKED transactions, rising."""
        states = self.rows["state"]
        return np.flatnonzero((states == OPEN) | (states == PARKED))

    def undecided_of(self, group: int) -> Int64s:
        """Return ordinals of a producer group's OPEN and PARKED transactions, rising."""
        if not self.open.get(group) and not self.parked.get(group):
            return np.empty(0, np.int64)
        low = 0 if self.parked.get(group) else max(self._floor - self.rows.first, 0)
        states = self.rows["state"][low:]
        ordinals = np.flatnonzero((states == OPEN) | (states == PARKED)) + low + self.rows.first
        own: Int64s = ordinals[self.groups_of(ordinals) == group]
        return own

    def undecided_epochs(self) -> Int64s:
        """Sessions that began what is OPEN or PARKED, each once."""
        epochs: Int64s = np.unique(self.rows["epoch"][self.undecided()]).astype(np.int64)
        return epochs

    # Finding

    def find(self, positions: Int64s) -> Int64s:
        """Return ordinals of transactions by the position of their first half message; -1 where there is none."""
        index = locate(self.rows["first"], positions)
        return np.where(index >= 0, index + self.rows.first, NONE)

    def find_ids(self, ids: pa.Array) -> tuple[Int64s, UInt8s]:
        """Return ordinals of transaction ids, and one code per row: OK, WRONG_SHARD, UNKNOWN_TRANSACTION, or
        EXPIRED of what left undecided."""
        raw = records(ids)
        codes = np.zeros(len(ids), np.uint8)
        ordinals = self.find(raw["position"].astype(np.int64))
        known = np.flatnonzero(ordinals != NONE)
        wrong = self.rows["epoch"][ordinals[known] - self.rows.first] != raw["epoch"][known]
        ordinals[known[wrong]] = NONE
        lost = np.flatnonzero(ordinals == NONE)
        codes[lost] = code.UNKNOWN_TRANSACTION
        codes[lost[self._expired.begin_with(raw[lost])]] = code.EXPIRED
        foreign = raw["shard"] != self.shard
        codes[foreign], ordinals[foreign] = code.WRONG_SHARD, NONE
        return ordinals, codes

    def find_id(self, identity: bytes) -> int:
        """As :meth:`find_ids`, of one id; ``NONE`` where that has another code than OK."""
        shard, epoch, position = split_transaction_id(identity)
        firsts = self.rows["first"]
        if shard != self.shard or not len(firsts) or position > firsts[-1]:
            return NONE
        row = int(firsts.searchsorted(position))
        known = firsts[row] == position and self.rows["epoch"][row] == epoch
        return row + self.rows.first if known else NONE

    def value(self, name: str, ordinal: int) -> Any:
        """As :meth:`column`, of one transaction."""
        return self.rows[name][ordinal - self.rows.first]

    def find_few(self, ids: Sequence[bytes]) -> list[tuple[int, int, int]] | None:
        """Position, epoch and state of each of a few transactions; None when one of them is not here (see
        :meth:`find_ids`)."""
        named = [split_transaction_id(id) for id in ids]
        firsts, size = self.rows["first"], len(self.rows)
        positions = [position for _, _, position in named]
        if not size or max(positions) > firsts.item(-1):
            return None
        found = []
        epochs, states = self.rows["epoch"], self.rows["state"]
        for row, (shard, epoch, position) in zip(places_of_few(firsts, positions), named, strict=True):
            if shard != self.shard or firsts.item(row) != position or epochs.item(row) != epoch:
                return None
            found.append((position, epoch, states.item(row)))
        return found

    def expired(self, positions: Int64s) -> Bools:
        """Return which half messages left the log undecided."""
        return self._expired.holds(positions)

    def owner_of(self, positions: Int64s) -> Int64s:
        """Return ordinals of the transactions that half messages belong to; -1 where there is none (any more)."""
        owners = self.find(positions)
        joined = locate(self.joined["position"], positions)
        hit = (owners == NONE) & (joined >= 0)
        owners[hit] = self.joined["owner"][joined[hit]]
        owners[owners < self.rows.first] = NONE
        return owners

    def groups_of(self, ordinals: Int64s) -> Int64s:
        """Return the producer groups of transactions; ``NO_GROUP`` for decided ones whose session is forgotten."""
        return self._sessions.groups_of(self.column("epoch", ordinals).astype(np.int64))

    def foreign(self, ordinals: Int64s, groups: Int64s | int) -> Bools:
        """Return which transactions belong to another group than ``groups``. Those of forgotten sessions are decided,
        and any
        group may learn how."""
        owners = self.groups_of(ordinals)
        others: Bools = (owners != groups) & (owners != NO_GROUP)
        return others

    def column(self, name: str, ordinals: Int64s) -> npt.NDArray[Any]:
        """One column at some ordinals."""
        return self.rows[name][ordinals - self.rows.first]

    def prepared_us(self, positions: Int64s) -> Int64s:
        """Return when half messages became durable."""
        times = self.times
        index = np.searchsorted(times["position"], positions, side="right") - 1
        return times["time_us"][np.maximum(index, 0)]

    def messages_of(self, ordinals: Int64s) -> tuple[Int64s, Int64s, Int32s, Int32s, Int32s]:
        """Return all half messages of transactions: index into ``ordinals``, position, queue id, tag, size; by
        index, then position."""
        owners = np.arange(len(ordinals))
        parts = [(owners, *(self.column(name, ordinals) for name in ("first", "queue_id", "tag", "size")))]
        links = self.column("last", ordinals).astype(np.int64)
        hanging = links != NONE
        if not hanging.any():
            return parts[0]  # type: ignore[return-value]
        while hanging.any():
            owners, rows = owners[hanging], links[hanging] - self.joined.first
            parts.append((owners, *(self.joined[name][rows] for name in ("position", "queue_id", "tag", "size"))))
            links = self.joined["before"][rows]
            hanging = links != NONE
        index, positions, queue_ids, tags, sizes = (np.concatenate(column) for column in zip(*parts, strict=True))
        order = np.lexsort((positions, index))
        return index[order], positions[order], queue_ids[order], tags[order], sizes[order]

    def messages_of_few(self, rows: Sequence[int]) -> list[tuple[int, int, int, int]]:
        """As :meth:`messages_of`, for a few row numbers: position, queue id, tag, size."""
        first, queue_id, tag, size, last = (self.rows[of] for of in ("first", "queue_id", "tag", "size", "last"))
        found = []
        for row in rows:
            found.append((first.item(row), queue_id.item(row), tag.item(row), size.item(row)))
            link = last.item(row)
            if link != NONE:
                found += self._chain(link)[::-1]
        return found

    def _chain(self, link: int) -> list[tuple[int, int, int, int]]:
        """Position, queue id, tag and size of the messages that joined a transaction, the last of them being ``link``;
        newest first."""
        names = ("position", "queue_id", "tag", "size", "before")
        position, queue_id, tag, size, before = (self.joined[name] for name in names)
        found = []
        while link != NONE:
            row = link - self.joined.first
            found.append((position.item(row), queue_id.item(row), tag.item(row), size.item(row)))
            link = before.item(row)
        return found

    def visible_us(self, positions: Int64s) -> Int64s:
        """Until when half messages are to be held back; 0: not at all."""
        if not len(self._delayed):
            return np.zeros(len(positions), np.int64)
        at = locate(self._delayed["position"], positions)
        return np.where(at >= 0, self._delayed["visible_us"][at], 0)

    @property
    def holds_back(self) -> bool:
        """Whether any half message has a delay."""
        return len(self._delayed) > 0

    # Storage

    def trim(self, position: int) -> None:
        """Let go of everything below ``position``; all of it is decided."""
        gone = int(np.searchsorted(self.rows["first"], position))
        self._remember(np.flatnonzero(self.rows["state"][:gone] == EXPIRED) + self.rows.first)
        self.rows.trim(self.rows.first + gone)
        for table in (self.joined, self._delayed):
            table.trim(table.first + int(np.searchsorted(table["position"], position)))
        keep = max(int(np.searchsorted(self.times["position"], position, side="right")) - 1, 0)
        self.times.trim(self.times.first + keep)

    def _remember(self, ordinals: Int64s) -> None:
        """Remember transactions that leave the log undecided."""
        if not len(ordinals):
            return
        index, positions, *_ = self.messages_of(ordinals)
        firsts, epochs = (self.column(name, ordinals)[index] for name in ("first", "epoch"))
        self._expired.add(positions, firsts, epochs)

    def snapshot(self) -> dict[str, pa.Table]:
        return {
            "transactions": self.rows.to_table(),
            "joined": self.joined.to_table(),
            "delayed_halves": self._delayed.to_table(),
            "prepare_times": self.times.to_table(),
            "expired_halves": self._expired.to_table(),
        }

    def restore(self, tables: dict[str, pa.Table]) -> None:
        """Become what :meth:`snapshot` gave; the counts are rebuilt from the rows."""
        self.rows.load(with_zeros(tables["transactions"], "size", np.int32))  # older snapshots have no sizes
        self.joined.load(with_zeros(tables["joined"], "size", np.int32))
        self._delayed.load(tables["delayed_halves"])
        self.times.load(tables["prepare_times"])
        if "expired_halves" in tables:  # since format 3
            self._expired.load(tables["expired_halves"])
        self._floor = self.rows.first
        for counts, state in ((self.parked, PARKED), (self.open, OPEN)):
            self._count(counts, self.rows["epoch"][self.rows["state"] == state], 1)
