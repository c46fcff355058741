"""The transaction table: the columns, how a transaction or a half message is found in them, and the one way to change a
state.

A transaction is one row: the position of its first half message, its session, its state. Further half messages are a
chain of rows in a second table. Positions rise, so a transaction is found from its id by binary search. Retention drops
transactions; those undecided until then are remembered as EXPIRED for late requests. ``ending.py`` and ``checkback.py``
have the rules of the states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    Ints,
    UInt8s,
    all_equal,
    all_true,
    locate,
    places_of_few,
    with_zeros,
)
from escrowmq.ledger.events import Event, event_of
from escrowmq.ledger.transactions import oldest
from escrowmq.ledger.transactions.sessions import NO_GROUP, Sessions
from escrowmq.message.ids import records, split_transaction_id
from escrowmq.model import DecidedBy, Outcome, TransactionState
from escrowmq.schemas import Kind

OPEN, COMMITTED, ROLLED_BACK, PARKED, EXPIRED = (int(s) for s in TransactionState)
UNKNOWN, COMMIT, ROLLBACK = (int(o) for o in Outcome)
BY_OPERATOR = int(DecidedBy.OPERATOR)
NONE = -1
MAX_EXPIRED = 1 << 20
"""Half messages remembered that left the log undecided (at most 20 MiB, more than a weekend's); then the oldest go."""
_EXPIRED_COLUMNS = {"position": np.int64, "first": np.int64, "epoch": np.uint32}


@dataclass(frozen=True, slots=True)
class Halves:
    """The transactions of half messages that were decided as rows; a list has one item for each message."""

    epochs: Ints
    due_us: Ints
    owners: Ints | None  # the transaction (ordinal) to join; ``NONE``: a new one. None: all begin one.
    begins: dict[int, int]  # the number of new transactions by producer group


def decided(first: Int64s, state: UInt8s | int, by: DecidedBy, epochs: Int64s | int) -> Event:
    """Return the DECIDED event that gives ``state`` to the transactions whose first half messages are at the positions
    ``first``. ``by``: who decided; ``epochs``: their sessions."""
    columns = (np.broadcast_to(np.asarray(column), len(first)) for column in (state, int(by), epochs))
    return event_of(Kind.DECIDED, first, *columns)


class TransactionTable:
    """All transactions of a shard and their half messages. Rows are numbered by ordinal (see ``columns/arrays.py``)."""

    def __init__(self, shard: int, sessions: Sessions) -> None:
        self.shard = shard
        self._sessions = sessions
        message = {"queue_id": np.int32, "tag": np.int32, "size": np.int32}  # size of its body
        self.rows = Columns(
            {
                "first": np.int64,  # position of the first half message; rises
                "epoch": np.uint32,
                "state": np.uint8,
                "by": np.uint8,
                "checks": np.int32,
                "messages": np.int32,
                "due_us": np.int64,  # the next check; after the last check, the end of waiting
                **message,  # of the first half message
                "last": np.int64,  # newest row of `joined`, -1 none
            }
        )
        self.joined = Columns({"position": np.int64, "owner": np.int64, "before": np.int64, **message})
        self._delayed = Columns({"position": np.int64, "visible_us": np.int64})  # half messages with a delay
        self.times = Columns({"position": np.int64, "time_us": np.int64})  # when positions were prepared
        self._expired = Columns(_EXPIRED_COLUMNS)  # half messages that left the log undecided
        self.open: dict[int, int] = {}
        """OPEN transactions of each producer group, as ``parked`` has those that are PARKED."""
        self.parked: dict[int, int] = {}
        self._floor = 0  # no OPEN transaction below this ordinal
        self.oldest = oldest.OldestOpen(self.rows, self.groups_of)

    def enter(self, batch: pa.RecordBatch, tags: Int32s, sizes: Int32s, position: int, time_us: int) -> Int64s:
        """Store half messages (rows of Kind.HALF) from log ``position`` on; ``sizes``: bytes of their bodies. Returns
        the ordinals of the transactions that begin."""
        names = ("transaction", "visible_us", "epoch", "due_us", "queue_id")
        owner, visible, epochs, due_us, queue_ids = (batch.column(name).to_numpy() for name in names)
        own = np.arange(position, position + batch.num_rows)
        self.note_time(position, time_us)
        late = np.flatnonzero(visible > 0)
        if len(late):
            self.hold_back(own[late], visible[late])
        begins = owner == own
        if all_true(begins):
            begun = self._begin(own, epochs, due_us, queue_ids, tags, sizes)
        else:
            at = np.flatnonzero(begins)
            begun = self._begin(*(column[at] for column in (own, epochs, due_us, queue_ids, tags, sizes)))
            at = np.flatnonzero(~begins)
            self._join(*(column[at] for column in (own, owner, queue_ids, tags, sizes)))
            epochs = epochs[begins]
        self._count(self.open, epochs, 1)
        return begun

    def note_time(self, position: int, time_us: int) -> None:
        """Note that half messages from ``position`` on became durable at ``time_us``."""
        times = self.times
        if not len(times) or times.item("time_us", len(times) - 1) < time_us:
            times.extend(1, position=position, time_us=time_us)

    def _begin(self, first: Any, epochs: Any, due_us: Any, queue_ids: Any, tags: Any, sizes: Any) -> Int64s:
        """Add transactions, one for each of ``first``; the other values are sequences of that length, or one value for
        all. Returns their ordinals."""
        message = {"queue_id": queue_ids, "tag": tags, "size": sizes}
        new = {"state": OPEN, "by": 0, "checks": 0, "messages": 1, "last": NONE}
        ordinal = self.rows.extend(len(first), first=first, epoch=epochs, due_us=due_us, **message, **new)
        return np.arange(ordinal, ordinal + len(first))

    def _join(self, positions: Any, owner: Any, queue_ids: Any, tags: Any, sizes: Any) -> None:
        owners = self.find(owner)
        rows, ordinals = owners - self.rows.first, np.arange(len(owners)) + self.joined.end
        before = self.rows["last"][rows]
        order = np.argsort(owners, kind="stable")
        same = owners[order][1:] == owners[order][:-1]
        before[order[1:][same]] = ordinals[order[:-1][same]]
        message = {"queue_id": queue_ids, "tag": tags, "size": sizes}
        self.joined.extend(len(owners), position=positions, owner=owners, before=before, **message)
        np.maximum.at(self.rows["last"], rows, ordinals)
        np.add.at(self.rows["messages"], rows, 1)

    def enter_rows(self, halves: Halves, queue_ids: Ints, tags: Ints, sizes: Ints, position: int) -> Int64s:
        """As :meth:`enter`, of messages that were decided as rows, apart from their times and delays."""
        own = range(position, position + len(queue_ids))
        columns: Sequence[Ints] = (own, halves.epochs, halves.due_us, queue_ids, tags, sizes)
        if halves.owners is not None:
            self._join_rows(halves.owners, own, queue_ids, tags, sizes)
            at = [row for row, owner in enumerate(halves.owners) if owner == NONE]
            columns = [[column[row] for row in at] for column in columns]
        for group, count in halves.begins.items():
            self.open[group] = self.open.get(group, 0) + count
        return self._begin(*columns)

    def _join_rows(self, owners: Ints, own: range, queue_ids: Ints, tags: Ints, sizes: Ints) -> None:
        last, messages = self.rows["last"], self.rows["messages"]
        for position, owner, queue_id, tag, size in zip(own, owners, queue_ids, tags, sizes, strict=True):
            if owner != NONE:
                of = owner - self.rows.first
                message = {"queue_id": queue_id, "tag": tag, "size": size}
                last[of] = self.joined.extend(1, position=position, owner=owner, before=last[of], **message)
                messages[of] += 1

    def hold_back(self, positions: Int64s | Ints, visible_us: Int64s | Ints) -> None:
        """Note that the half messages at these positions, once committed, are not visible before ``visible_us``."""
        self._delayed.extend(len(positions), position=positions, visible_us=visible_us)

    def decide(self, ordinals: Int64s, states: UInt8s, by: UInt8s) -> None:
        """Set the final states of undecided transactions, and who decided (``by``)."""
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
        """Change OPEN transactions to PARKED."""
        self._change(ordinals, PARKED)
        self._count(self.parked, self.column("epoch", ordinals), 1)

    def reopen(self, ordinals: Int64s) -> None:
        """Change undecided transactions to OPEN."""
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
        """Add (``sign`` 1) or subtract (-1) a transaction for each of these sessions, in the counts by group."""
        if not len(epochs):
            return
        distinct, sizes = (epochs[:1], [len(epochs)]) if all_equal(epochs) else np.unique(epochs, return_counts=True)
        for group, size in zip(self._sessions.groups_of(distinct.astype(np.int64)).tolist(), sizes, strict=True):
            counts[group] = counts.get(group, 0) + sign * int(size)

    def forget_group(self, group: int) -> None:
        """Remove the counts of a producer group without undecided transactions."""
        self.open.pop(group, None)
        self.parked.pop(group, None)

    def oldest_open(self) -> int:
        """Return the ordinal of the oldest OPEN transaction; ``rows.end`` when none is."""
        self._floor = self.first_open(self._floor, reopened=True)
        return self._floor

    def first_open(self, ordinal: int, *, reopened: bool) -> int:
        """Return the ordinal of the first OPEN transaction from ``ordinal`` on; ``rows.end`` when none is.
        ``reopened``: see :meth:`open_rows`."""
        ordinal = max(ordinal, self.rows.first)
        while ordinal < self.rows.end:
            start = ordinal - self.rows.first
            chunk = self.open_rows(start, start + oldest.CHUNK, reopened=reopened)
            if chunk.any():
                return ordinal + int(chunk.argmax())
            ordinal += len(chunk)
        return ordinal

    def open_rows(self, start: int, end: int, *, reopened: bool) -> Bools:
        """Return which rows ``start`` .. ``end``-1 are OPEN; ``reopened``: those that an operator reopened, too."""
        found: Bools = self.rows["state"][start:end] == OPEN
        return found if reopened else found & (self.rows["by"][start:end] != BY_OPERATOR)

    def undecided(self, low: int = 0) -> Int64s:
        """Return the row numbers of OPEN and PARKED transactions from ``low`` on, rising."""
        states = self.rows["state"][low:]
        return np.flatnonzero((states == OPEN) | (states == PARKED)) + low

    def undecided_of(self, group: int) -> Int64s:
        """Return ordinals of a producer group's OPEN and PARKED transactions, rising."""
        if not self.open.get(group) and not self.parked.get(group):
            return np.empty(0, np.int64)
        low = 0 if self.parked.get(group) else max(self._floor - self.rows.first, 0)
        ordinals = self.undecided(low) + self.rows.first
        own: Int64s = ordinals[self.groups_of(ordinals) == group]
        return own

    def undecided_epochs(self) -> Int64s:
        """Return the sessions that began OPEN or PARKED transactions, each once."""
        epochs: Int64s = np.unique(self.rows["epoch"][self.undecided()]).astype(np.int64)
        return epochs

    def undecided_in(self, queue_ids: Ints) -> tuple[Int64s, int]:
        """Return rising ordinals of undecided transactions with messages for these queues; and how many messages."""
        ordinals = self.undecided() + self.rows.first
        index, _, of_message, *_ = self.messages_of(ordinals)
        chosen = index[np.isin(of_message, queue_ids)]
        return ordinals[np.unique(chosen)], len(chosen)

    def find(self, positions: Int64s) -> Int64s:
        """Return ordinals of transactions by the position of their first half message; -1 where there is none."""
        index = locate(self.rows["first"], positions)
        return np.where(index >= 0, index + self.rows.first, NONE)

    def find_ids(self, ids: pa.Array) -> tuple[Int64s, UInt8s]:
        """Return ordinals of transaction ids, and a code per row: OK, WRONG_SHARD, UNKNOWN_TRANSACTION, EXPIRED."""
        raw = records(ids)
        codes = np.zeros(len(ids), np.uint8)
        positions, epochs = raw["position"].astype(np.int64), raw["epoch"]
        ordinals = self.find(positions)
        known = np.flatnonzero(ordinals != NONE)
        ordinals[known[self.column("epoch", ordinals[known]) != epochs[known]]] = NONE
        lost = np.flatnonzero(ordinals == NONE)
        codes[lost] = code.UNKNOWN_TRANSACTION
        if len(lost) and len(self._expired):
            at = locate(self._expired["position"], positions[lost])
            same = (self._expired["epoch"][at] == epochs[lost]) & (self._expired["first"][at] == positions[lost])
            codes[lost[(at >= 0) & same]] = code.EXPIRED
        foreign = raw["shard"] != self.shard
        codes[foreign], ordinals[foreign] = code.WRONG_SHARD, NONE
        return ordinals, codes

    def find_few(self, ids: Sequence[bytes]) -> list[tuple[int, int, int, int]] | None:
        """Return row number, position, epoch and state of each of these transaction ids; None if one is not here."""
        named = [split_transaction_id(id) for id in ids]
        firsts, epochs, states = (self.rows[name] for name in ("first", "epoch", "state"))
        positions = [position for _, _, position in named]
        if not len(firsts) or max(positions) > firsts.item(-1):
            return None
        found = []
        for row, (shard, epoch, position) in zip(places_of_few(firsts, positions), named, strict=True):
            if shard != self.shard or firsts.item(row) != position or epochs.item(row) != epoch:
                return None
            found.append((row, position, epoch, states.item(row)))
        return found

    def expired(self, positions: Int64s) -> Bools:
        """Return which of the half messages at these log positions left the log undecided."""
        return np.asarray(locate(self._expired["position"], positions) >= 0, bool)

    def owner_of(self, positions: Int64s) -> Int64s:
        """Return ordinals of the transactions of half messages, by log position; -1 where there is none (any more)."""
        owners = self.find(positions)
        joined = locate(self.joined["position"], positions)
        hit = (owners == NONE) & (joined >= 0)
        owners[hit] = self.joined["owner"][joined[hit]]
        owners[owners < self.rows.first] = NONE
        return owners

    def queue_ids_of(self, positions: Int64s, owners: Int64s) -> Int64s:
        """Return the queue ids of half messages, by log position; ``owners``: ordinals of their transactions."""
        ids = self.column("queue_id", owners).astype(np.int64)
        hanging = self.column("first", owners) != positions
        ids[hanging] = self.joined["queue_id"][np.searchsorted(self.joined["position"], positions[hanging])]
        return ids

    def halves(self) -> tuple[Int64s, Int32s]:
        """Return the log positions and queue ids of all half messages."""
        positions = np.concatenate((self.rows["first"], self.joined["position"]))
        return positions, np.concatenate((self.rows["queue_id"], self.joined["queue_id"]))

    def groups_of(self, ordinals: Int64s) -> Int64s:
        """Return the producer groups of transactions; ``NO_GROUP`` for decided ones whose session is forgotten."""
        return self._sessions.groups_of(self.column("epoch", ordinals).astype(np.int64))

    def foreign(self, ordinals: Int64s, groups: Int64s | int) -> Bools:
        """Return which transactions belong to another group than ``groups``. Those of forgotten sessions do not: they
        are decided, and any group may read how."""
        owners = self.groups_of(ordinals)
        others: Bools = (owners != groups) & (owners != NO_GROUP)
        return others

    def column(self, name: str, ordinals: Int64s) -> npt.NDArray[Any]:
        """Return the values of one column for the transactions with these ordinals."""
        return self.rows[name][ordinals - self.rows.first]

    def value(self, name: str, ordinal: int) -> Any:
        """As :meth:`column`, of one transaction."""
        return self.rows[name][ordinal - self.rows.first]

    def prepared_us(self, positions: Int64s) -> Int64s:
        """Return the time (µs) at which the half message at each log position became durable."""
        index = np.searchsorted(self.times["position"], positions, side="right") - 1
        return self.times["time_us"][np.maximum(index, 0)]

    def count_prepared(self, before_us: int) -> int:
        """Return how many transactions, from the first row on, were prepared before ``before_us``."""
        index = int(np.searchsorted(self.times["time_us"], before_us))
        if index == len(self.times):
            return len(self.rows)
        return int(np.searchsorted(self.rows["first"], self.times["position"][index]))

    def messages_of(self, ordinals: Int64s) -> tuple[Int64s, Int64s, Int32s, Int32s, Int32s]:
        """Return all half messages of these transactions, by transaction and position: index into ``ordinals``, log
        position, queue id, tag number and body size of each."""
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

    def messages_of_few(self, rows: Ints) -> list[tuple[int, int, int, int]]:
        """As :meth:`messages_of`, for a few row numbers: position, queue id, tag, size."""
        first, queue_id, tag, size, last = (self.rows[of] for of in ("first", "queue_id", "tag", "size", "last"))
        found = []
        for row in rows:
            found.append((first.item(row), queue_id.item(row), tag.item(row), size.item(row)))
            if (link := last.item(row)) != NONE:
                found += self._chain(link)[::-1]
        return found

    def _chain(self, link: int) -> list[tuple[int, int, int, int]]:
        """Return the messages that joined a transaction, from the row ``link`` of ``joined`` back."""
        names = ("position", "queue_id", "tag", "size", "before")
        position, queue_id, tag, size, before = (self.joined[name] for name in names)
        found = []
        while link != NONE:
            row = link - self.joined.first
            found.append((position.item(row), queue_id.item(row), tag.item(row), size.item(row)))
            link = before.item(row)
        return found

    def visible_us(self, positions: Int64s) -> Int64s:
        """Return the time (µs) before which each half message, by log position, must not be visible; 0: at once."""
        if not len(self._delayed):
            return np.zeros(len(positions), np.int64)
        at = locate(self._delayed["position"], positions)
        return np.where(at >= 0, self._delayed["visible_us"][at], 0)

    @property
    def holds_back(self) -> bool:
        """Return whether any half message has a delay."""
        return len(self._delayed) > 0

    def whole_below(self, position: int) -> int:
        """Return ``position``; or, if a transaction has messages on both sides of it, the last begin of a transaction
        before it where none has."""
        if not len(self.joined):
            return position
        firsts = self.column("first", self.joined["owner"]).astype(np.int64)
        ends = self.joined["position"]
        if not ((firsts < position) & (ends >= position)).any():
            return position
        order = np.argsort(firsts, kind="stable")
        firsts, reached = firsts[order], np.maximum.accumulate(ends[order])
        before = np.searchsorted(firsts, firsts, side="left")  # how many begin before each
        whole = (before == 0) | (reached[before - 1] < firsts)
        return int(firsts[whole & (firsts <= position)][-1])

    def trim(self, position: int) -> None:
        """Drop the half messages and transactions below log ``position``; all of them are decided."""
        gone = int(np.searchsorted(self.rows["first"], position))
        self._remember(np.flatnonzero(self.rows["state"][:gone] == EXPIRED) + self.rows.first)
        self.rows.trim(self.rows.first + gone)
        for table in (self.joined, self._delayed):
            table.trim(table.first + int(np.searchsorted(table["position"], position)))
        keep = max(int(np.searchsorted(self.times["position"], position, side="right")) - 1, 0)
        self.times.trim(self.times.first + keep)

    def _remember(self, ordinals: Int64s) -> None:
        """Remember the half messages of expired transactions that leave the log, for late requests."""
        if not len(ordinals):
            return
        index, positions, *_ = self.messages_of(ordinals)
        new = (positions, *(self.column(name, ordinals)[index] for name in ("first", "epoch")))
        known = (self._expired[name] for name in _EXPIRED_COLUMNS)
        columns = [np.concatenate(both) for both in zip(known, new, strict=True)]
        order = np.argsort(columns[0], kind="stable")[-MAX_EXPIRED:]
        self._expired = Columns(_EXPIRED_COLUMNS)
        values = {name: column[order] for name, column in zip(_EXPIRED_COLUMNS, columns, strict=True)}
        self._expired.extend(len(order), **values)

    @property
    def _stored(self) -> dict[str, Columns]:
        """The tables of a snapshot."""
        return {
            "transactions": self.rows,
            "joined": self.joined,
            "delayed_halves": self._delayed,
            "prepare_times": self.times,
            "expired_halves": self._expired,
        }

    def snapshot(self) -> dict[str, pa.Table]:
        return {name: columns.to_table() for name, columns in self._stored.items()}

    def restore(self, tables: dict[str, pa.Table]) -> None:
        """Restore :meth:`snapshot`; the counts are rebuilt. Older snapshots have no sizes and no expired halves."""
        sized = {name: with_zeros(tables[name], "size", np.int32) for name in ("transactions", "joined")}
        tables = tables | sized
        for name, columns in self._stored.items():
            if name in tables:
                columns.load(tables[name])
        self._floor = self.rows.first
        for counts, state in ((self.parked, PARKED), (self.open, OPEN)):
            self._count(counts, self.rows["epoch"][self.rows["state"] == state], 1)
