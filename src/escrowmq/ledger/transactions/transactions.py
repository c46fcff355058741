"""Transactions: half messages in escrow, their one decision, and who is to be asked when it does not come.

Theory of operation. The columns are those of ``transaction_table.py``; here is what may happen to a row, and who waits
for what: a question, the end of waiting after the last question, or ``half_retention``.

Rules:

1. States and what may follow them stand in ``decisions.py``, as a table.
2. The first decision in the log is final (I5). A decision names position *and* epoch, so it can hit no other
   transaction (I6), and comes from a session of the group that prepared it (I15).
3. Only OPEN transactions past their time are asked (I10), at most ``check_max`` times, each ask an event before it is
   an act (I11). Taking nobody's attempt is left to the caller: it asks for a group only when somebody is there.
4. After the last ask an interval passes; then the transaction is parked or rolled back, as the rules say (I12). The
   same at ``half_retention``, asked or not; but one that a person opened anew is past that age on purpose, and is
   asked again in full instead.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from escrowmq.ledger.columns import codes as code
from escrowmq.ledger.columns.growing import all_equal, unique_in_order
from escrowmq.ledger.columns.schedule import DueIndex
from escrowmq.ledger.commands import AskChecks, Asked, Decision, End, Event, Rules
from escrowmq.ledger.transactions.decisions import (
    ANSWER,
    BECOMES,
    BY_OPERATOR,
    COMMITTED,
    DECIDES,
    EXPIRED,
    NONE,
    OPEN,
    PARKED,
    ROLLBACK,
    ROLLED_BACK,
    UNKNOWN,
    decided_batch,
    first_deciders,
)
from escrowmq.ledger.transactions.sessions import OPERATOR, Sessions
from escrowmq.ledger.transactions.table import TransactionTable
from escrowmq.model import DecidedBy
from escrowmq.schemas import ENDED, STORED, Kind

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
UInt8s = npt.NDArray[np.uint8]
Bools = npt.NDArray[np.bool_]


class Transactions(TransactionTable):
    """The rules over the transaction table, and who waits for what."""

    def __init__(self, shard: int, sessions: Sessions) -> None:
        super().__init__(shard, sessions)
        self._check_max = Rules().check_max
        self._due: dict[int, DueIndex] = {}  # by producer group
        self._last_waits = DueIndex(self._alive_last)  # the last ask is out
        self.open: dict[int, int] = {}
        self.parked: dict[int, int] = {}
        self._floor = 0  # no OPEN transaction below this ordinal
        self._young = 0  # none that half_retention concerns below this ordinal

    # Half messages

    def apply_half(self, batch: pa.RecordBatch, tags: Int32s, position: int, time_us: int) -> None:
        """Kind.HALF."""
        size = batch.num_rows
        own = np.arange(position, position + size)
        owner = batch.column("transaction").to_numpy()
        visible = batch.column("visible_us").to_numpy()
        if not len(self._times) or self._times["time_us"][-1] < time_us:
            self._times.extend(1, position=position, time_us=time_us)
        late = np.flatnonzero(visible > 0)
        if len(late):
            self._delayed.extend(len(late), position=own[late], visible_us=visible[late])
        begins = owner == own
        if begins.all():
            self._begin(batch, tags, own, slice(None))
            return
        if begins.any():
            self._begin(batch, tags, own, np.flatnonzero(begins))
        self._join(batch, tags, own, owner, np.flatnonzero(~begins))

    def _begin(self, batch: pa.RecordBatch, tags: Int32s, own: Int64s, at: slice | Int64s) -> None:
        first, due = own[at], batch.column("due_us").to_numpy()[at]
        epochs = batch.column("epoch").to_numpy()[at]
        ordinal = self.rows.extend(
            len(first),
            first=first,
            epoch=epochs,
            state=OPEN,
            by=0,
            checks=0,
            messages=1,
            due_us=due,
            queue_id=batch.column("queue_id").to_numpy()[at],
            tag=tags[at],
            last=NONE,
        )
        ordinals = np.arange(ordinal, ordinal + len(first))
        self._count(self.open, ordinals, 1)
        self._schedule(ordinals, due)

    def _join(self, batch: pa.RecordBatch, tags: Int32s, own: Int64s, owner: Int64s, at: Int64s) -> None:
        owners = self.find(owner[at])
        order = np.argsort(owners, kind="stable")
        at, owners = at[order], owners[order]
        rows = owners - self.rows.first
        begins = np.concatenate(([True], owners[1:] != owners[:-1]))
        ordinals = np.empty(len(at), np.int64)
        ordinals[np.argsort(own[at], kind="stable")] = np.arange(self.joined.end, self.joined.end + len(at))
        before = np.where(begins, self.rows["last"][rows], np.concatenate(([NONE], ordinals[:-1])))
        by_position = np.argsort(own[at], kind="stable")
        self.joined.extend(
            len(at),
            position=own[at][by_position],
            owner=owners[by_position],
            before=before[by_position],
            queue_id=batch.column("queue_id").to_numpy()[at][by_position],
            tag=tags[at][by_position],
        )
        ends = np.append(begins[1:], True)
        self.rows["last"][rows[ends]] = ordinals[ends]
        np.add.at(self.rows["messages"], rows, 1)

    # Decisions

    def decide_end(self, command: End, rules: Rules) -> Decision:
        """Answer each row by the state table; the rows that decide become one event."""
        outcomes = command.batch.column("outcome").to_numpy()
        ordinals, codes = self.find_ids(command.batch.column("transaction"))
        sessions = self._sessions.check(command.sessions, transactional=None, rules=rules)
        codes = np.where(sessions != code.OK, sessions, codes)
        codes[outcomes > ROLLBACK] = code.BAD_REQUEST
        rows = np.flatnonzero(codes == code.OK)
        if command.by != DecidedBy.OPERATOR:
            rows = self._owned(rows, ordinals, command.sessions, codes)
        elif (command.sessions != OPERATOR).any():
            codes[rows], rows = code.BAD_REQUEST, rows[:0]
        states = self.column("state", ordinals[rows])
        codes[rows] = ANSWER[states, outcomes[rows]]
        rows = rows[(states == OPEN) | (states == PARKED)]
        codes[rows] = DECIDES[outcomes[rows]]
        winners = rows[outcomes[rows] != UNKNOWN]
        if len(winners) and not (np.diff(ordinals[rows]) > 0).all():
            winners = first_deciders(rows, winners, ordinals, outcomes, codes)
        answer = pa.RecordBatch.from_arrays([pa.array(codes)], schema=ENDED)
        if not len(winners):
            return Decision((), answer)
        first = self.column("first", ordinals[winners]).astype(np.int64)
        batch = decided_batch(first, BECOMES[outcomes[winners]], command.by, command.sessions[winners])
        return Decision((Event(Kind.DECIDED, batch),), answer)

    def _owned(self, rows: Int64s, ordinals: Int64s, sessions: Int64s, codes: UInt8s) -> Int64s:
        """The rows whose session is of the transaction's group; the others get their code."""
        anonymous = sessions[rows] == OPERATOR
        codes[rows[anonymous]] = code.UNKNOWN_SESSION
        rows = rows[~anonymous]
        foreign = self.foreign(ordinals[rows], self._sessions.groups_of(sessions[rows]))
        codes[rows[foreign]] = code.WRONG_GROUP
        owned: Int64s = rows[~foreign]
        return owned

    def apply_decided(self, batch: pa.RecordBatch) -> tuple[Int64s, Int64s, Int32s, Int32s]:
        """Kind.DECIDED. What became visible by it, as of :meth:`messages_of`."""
        ordinals = self.find(batch.column("transaction").to_numpy())
        rows = ordinals - self.rows.first
        states = batch.column("state").to_numpy()
        was_parked = self.rows["state"][rows] == PARKED
        self._count(self.parked, ordinals[was_parked], -1)
        self._count(self.open, ordinals[~was_parked], -1)
        self.rows["state"][rows] = states
        self.rows["by"][rows] = batch.column("decided_by").to_numpy()
        committed = states == COMMITTED
        return self.messages_of(ordinals if committed.all() else ordinals[committed])

    # Check-back

    def decide_ask(self, command: AskChecks, now_us: int) -> Decision:
        """Which transactions of a group to ask about now; CHECKED goes to the log before the question to the producer."""
        group = self._sessions.ordinal(command.group)
        index = None if group is None else self._due.get(group)
        due = np.empty(0, np.int64) if index is None else unique_in_order(index.due(now_us, command.limit))
        if not len(due):
            return Decision((), Asked(due, due, due))
        first, epochs, checks = (self.column(name, due).astype(np.int64) for name in ("first", "epoch", "checks"))
        batch = pa.RecordBatch.from_arrays([pa.array(first)], schema=STORED[Kind.CHECKED])
        return Decision((Event(Kind.CHECKED, batch),), Asked(first, epochs, checks + 1))

    def apply_checked(self, batch: pa.RecordBatch, time_us: int, rules: Rules) -> None:
        """Kind.CHECKED."""
        ordinals = self.find(batch.column("transaction").to_numpy())
        rows = ordinals - self.rows.first
        self.rows["checks"][rows] += 1
        due_us = time_us + rules.check_interval_us
        self.rows["due_us"][rows] = due_us
        last = self.rows["checks"][rows] >= rules.check_max
        self._last_waits.put(ordinals[last], due_us)
        self._schedule(ordinals[~last], np.full(int((~last).sum()), due_us))

    def decide_tick(self, now_us: int, limit: int, rules: Rules) -> list[Event]:
        """Park, or roll back, what was asked for the last time an interval ago or has come to half_retention."""
        for group, index in self._due.items():
            index.sweep(now_us, self.open.get(group, 0))
        asked_out = self._last_waits.due(now_us, limit)
        aged = self._aged(now_us - rules.half_retention_us, limit)
        return self._exhaust(np.unique(np.concatenate((asked_out, aged))), rules)

    def _aged(self, before_us: int, limit: int) -> Int64s:
        """OPEN transactions prepared at ``before_us`` or earlier, but for those that a person opened anew."""
        index = int(np.searchsorted(self._times["time_us"], before_us, side="right"))
        end = int(self._times["position"][index]) if index < len(self._times) else None
        low = self._oldest_young() - self.rows.first
        high = len(self.rows) if end is None else int(np.searchsorted(self.rows["first"], end))
        if not len(self._times) or high <= low:
            return np.empty(0, np.int64)
        return np.flatnonzero(self._open_rows(low, high, reopened=False))[:limit] + low + self.rows.first

    def _exhaust(self, ordinals: Int64s, rules: Rules) -> list[Event]:
        if not len(ordinals):
            return []
        first = self.column("first", ordinals).astype(np.int64)
        if rules.exhausted_rollback:
            return [Event(Kind.DECIDED, decided_batch(first, ROLLED_BACK, DecidedBy.EXHAUSTED, OPERATOR))]
        return [Event(Kind.PARKED, pa.RecordBatch.from_arrays([pa.array(first)], schema=STORED[Kind.PARKED]))]

    def apply_parked(self, batch: pa.RecordBatch) -> None:
        """Kind.PARKED."""
        ordinals = self.find(batch.column("transaction").to_numpy())
        self.rows["state"][ordinals - self.rows.first] = PARKED
        self._count(self.open, ordinals, -1)
        self._count(self.parked, ordinals, 1)

    def decide_recheck(self, ids: pa.Array) -> Decision:
        """Open parked or undecided transactions anew. Answer: a code a row."""
        ordinals, codes = self.find_ids(ids)
        rows = np.flatnonzero(codes == code.OK)
        undecided = np.isin(self.column("state", ordinals[rows]), (OPEN, PARKED))
        codes[rows[~undecided]] = code.TRANSACTION_DECIDED
        chosen = np.unique(ordinals[rows[undecided]])
        if not len(chosen):
            return Decision((), codes)
        first = self.column("first", chosen).astype(np.int64)
        batch = pa.RecordBatch.from_arrays([pa.array(first)], schema=STORED[Kind.REOPENED])
        return Decision((Event(Kind.REOPENED, batch),), codes)

    def apply_reopened(self, batch: pa.RecordBatch, time_us: int) -> None:
        """Kind.REOPENED."""
        ordinals = self.find(batch.column("transaction").to_numpy())
        rows = ordinals - self.rows.first
        was_parked = ordinals[self.rows["state"][rows] == PARKED]
        self._count(self.parked, was_parked, -1)
        self._count(self.open, was_parked, 1)
        self.rows["state"][rows] = OPEN
        self.rows["by"][rows] = BY_OPERATOR  # so far only that: half_retention no longer counts
        self.rows["checks"][rows] = 0
        self.rows["due_us"][rows] = time_us
        self._floor = min(self._floor, int(ordinals.min()))
        self._schedule(ordinals, np.full(len(ordinals), time_us))

    def check_due_us(self, group: int, now_us: int) -> int | None:
        """When the group's next question is due; None when nothing is open."""
        if not self.open.get(group) or group not in self._due:
            return None
        return self._due[group].next_due_us(now_us)

    def next_due_us(self, now_us: int, rules: Rules) -> int | None:
        """When :meth:`decide_tick` next has something to do."""
        times = [self._last_waits.next_due_us(now_us)]
        oldest = self._oldest_young()
        if oldest < self.rows.end:
            first = self.rows["first"][oldest - self.rows.first]
            times.append(int(self.prepared_us(np.array([first]))[0]) + rules.half_retention_us)
        return min((t for t in times if t is not None), default=None)

    def earliest_us(self, rules: Rules) -> int | None:
        """:meth:`decide_tick` has nothing to do before this, and perhaps not even then."""
        times = [self._last_waits.earliest_us()]
        young = max(self._young, self.rows.first)
        if young < self.rows.end:
            first = self.rows["first"][young - self.rows.first : young - self.rows.first + 1]
            times.append(int(self.prepared_us(first)[0]) + rules.half_retention_us)
        return min((t for t in times if t is not None), default=None)

    def earliest_check_us(self, group: int) -> int | None:
        """The group has nothing to be asked before this, and perhaps not even then."""
        return self._due[group].earliest_us() if self.open.get(group) and group in self._due else None

    def undecided_of(self, group: int) -> Int64s:
        """Ordinals of a producer group's OPEN and PARKED transactions, rising."""
        if not self.open.get(group) and not self.parked.get(group):
            return np.empty(0, np.int64)
        low = 0 if self.parked.get(group) else max(self._floor - self.rows.first, 0)
        states = self.rows["state"][low:]
        ordinals = np.flatnonzero((states == OPEN) | (states == PARKED)) + low + self.rows.first
        own: Int64s = ordinals[self.groups_of(ordinals) == group]
        return own

    def undecided_epochs(self) -> Int64s:
        """Sessions that began what is OPEN or PARKED, each once."""
        states = self.rows["state"]
        epochs: Int64s = np.unique(self.rows["epoch"][(states == OPEN) | (states == PARKED)]).astype(np.int64)
        return epochs

    def forget_group(self, group: int) -> None:
        """A producer group is gone; nothing of it is undecided."""
        self.open.pop(group, None)
        self.parked.pop(group, None)
        self._due.pop(group, None)

    def oldest_open(self) -> int:
        """The lowest ordinal that is OPEN; ``rows.end`` when none is."""
        self._floor = self._first_open(self._floor, reopened=True)
        return self._floor

    def _oldest_young(self) -> int:
        """As :meth:`oldest_open`, without those opened anew; nothing becomes one of these but by its prepare."""
        self._young = self._first_open(self._young, reopened=False)
        return self._young

    def _first_open(self, ordinal: int, *, reopened: bool) -> int:
        ordinal = max(ordinal, self.rows.first)
        while ordinal < self.rows.end:
            start = ordinal - self.rows.first
            chunk = self._open_rows(start, start + 65_536, reopened=reopened)
            if chunk.any():
                return ordinal + int(chunk.argmax())
            ordinal += len(chunk)
        return ordinal

    def _open_rows(self, start: int, end: int, *, reopened: bool) -> Bools:
        found: Bools = self.rows["state"][start:end] == OPEN
        return found if reopened else found & (self.rows["by"][start:end] != BY_OPERATOR)

    # Retention

    def expire(self, visible_us: int, limit_position: int) -> tuple[int, list[Event]]:
        """How far retention may go for undecided transactions, and the EXPIRED decisions it needs for that: those
        prepared before ``visible_us`` are expired, a younger one is a stop."""
        undecided = np.flatnonzero(np.isin(self.rows["state"], (OPEN, PARKED)))
        first = self.rows["first"][undecided]
        old = self.prepared_us(first) < visible_us if len(first) else np.empty(0, np.bool_)
        stops = first[~old]
        limit = min(limit_position, int(stops[0])) if len(stops) else limit_position
        gone = first[old & (first < limit)]
        if not len(gone):
            return limit, []
        return limit, [Event(Kind.DECIDED, decided_batch(gone, EXPIRED, DecidedBy.RETENTION, OPERATOR))]

    def apply_trim(self, position: int) -> None:
        """Let go of everything below ``position``; all of it is decided."""
        self._trim(position)

    # Keeping count

    def _alive(self, ordinals: Int64s, due_us: int, *, last: bool = False) -> Bools:
        rows = ordinals - self.rows.first
        alive = rows >= 0
        kept = rows[alive]
        spent = self.rows["checks"][kept] >= self._check_max
        alive[alive] = (self.rows["state"][kept] == OPEN) & (self.rows["due_us"][kept] == due_us) & (spent == last)
        return alive

    def _alive_last(self, ordinals: Int64s, due_us: int) -> Bools:
        return self._alive(ordinals, due_us, last=True)

    def _schedule(self, ordinals: Int64s, due_us: Int64s) -> None:
        if not len(ordinals):
            return
        groups = self.groups_of(ordinals)
        if all_equal(groups):
            self._due.setdefault(int(groups[0]), DueIndex(self._alive)).put(ordinals, due_us)
            return
        for group in np.unique(groups).tolist():
            mine = groups == group
            self._due.setdefault(group, DueIndex(self._alive)).put(ordinals[mine], due_us[mine])

    def _count(self, counts: dict[int, int], ordinals: Int64s, sign: int) -> None:
        if not len(ordinals):
            return
        epochs = self.column("epoch", ordinals)
        if all_equal(epochs):
            group = int(self._sessions.groups_of(epochs[:1].astype(np.int64))[0])
            counts[group] = counts.get(group, 0) + sign * len(ordinals)
            return
        groups, sizes = np.unique(self.groups_of(ordinals), return_counts=True)
        for group, size in zip(groups.tolist(), sizes.tolist(), strict=True):
            counts[group] = counts.get(group, 0) + sign * size

    # Snapshots

    def restore(self, tables: dict[str, pa.Table], rules: Rules) -> None:
        """Become what :meth:`snapshot` gave; counts and due times are rebuilt from the rows."""
        self._load(tables)
        self._floor = self._young = self.rows.first
        for counts, state in ((self.parked, PARKED), (self.open, OPEN)):
            self._count(counts, np.flatnonzero(self.rows["state"] == state) + self.rows.first, 1)
        self.apply_rules(rules)

    def apply_rules(self, rules: Rules) -> None:
        """Who waits for a question and who for the end of waiting depends on how many questions there are."""
        self._check_max = rules.check_max
        self._due, self._last_waits = {}, DueIndex(self._alive_last)
        waiting = np.flatnonzero(self.rows["state"] == OPEN)
        last = self.rows["checks"][waiting] >= rules.check_max
        for rows, put in ((waiting[last], self._last_waits.put), (waiting[~last], self._schedule)):
            put(rows + self.rows.first, self.rows["due_us"][rows])
