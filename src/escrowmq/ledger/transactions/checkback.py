"""Check-back scheduling: when a transaction is checked, and what follows when no answer comes.

Each OPEN transaction waits for one thing: its next check, or, after the last one, the end of waiting. Both are due
times, in indexes derived from the table's columns. ``half_retention`` is an age. Which producers are connected is known
to the broker (``broker/writer/checkback.py``).

Rules:

1. Only OPEN transactions past their time are checked (I10), at most ``check_max`` times, each check an event before it
   is sent (I11). The caller asks for checks of connected groups only, so an absent producer costs no attempt.
2. After the last check an interval passes; then the transaction is parked or rolled back, as the rules say (I12). The
   same at ``half_retention``, checked or not; but one that an operator reopened is checked in full again instead.
3. A producer group may have its own interval, number of checks and end of waiting (``policies.py``). They apply to all
   that it has undecided from then on; a check that is due already keeps its time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pyarrow as pa

from escrowmq.ledger.columns import codes as code
from escrowmq.ledger.columns.arrays import Bools, Int64s, all_equal
from escrowmq.ledger.columns.schedule import NEVER_US, DueIndex
from escrowmq.ledger.commands import AskChecks, Asked, Park, Rules
from escrowmq.ledger.events import Decision, Event, event_of
from escrowmq.ledger.transactions.policies import CheckRules, check_rules
from escrowmq.ledger.transactions.sessions import OPERATOR, Sessions
from escrowmq.ledger.transactions.table import BY_OPERATOR, OPEN, PARKED, ROLLED_BACK, Halves, TransactionTable, decided
from escrowmq.model import DecidedBy
from escrowmq.schemas import Kind


class CheckBack:
    """The due times of undecided transactions."""

    def __init__(self, table: TransactionTable, sessions: Sessions) -> None:
        self._table = table
        self._sessions = sessions
        self._rules = Rules()
        self._due: dict[int, DueIndex] = {}  # waiting for a check, by producer group
        self._last_waits = DueIndex(partial(self._alive, last=True))  # waiting after the last check
        self._young = 0  # below this ordinal half_retention concerns none
        self._aged_us = NEVER_US  # before this time half_retention concerns none

    @property
    def wake_us(self) -> int:
        """A lower bound of the time (µs) of the next work of :meth:`decide_tick`; ``NEVER_US``: none."""
        return min(self._last_waits.wake_us, self._aged_us)

    def ask_us(self, group: str) -> int:
        """Return a lower bound of the time (µs) when a transaction of a producer group is due for a check;
        ``NEVER_US``: it has no open one."""
        ordinal = self._sessions.ordinal(group)
        if ordinal is None or not self._table.open.get(ordinal) or ordinal not in self._due:
            return NEVER_US
        return self._due[ordinal].wake_us

    def begin(self, ordinals: Int64s, time_us: int) -> None:
        """Schedule the first check of transactions that began at ``time_us``; the table has their due times."""
        self._schedule(ordinals, self._table.column("due_us", ordinals))
        self._aged_us = min(self._aged_us, time_us + self._rules.half_retention_us)

    def begin_rows(self, ordinals: Int64s, halves: Halves, time_us: int) -> None:
        """As :meth:`begin`, of transactions that were decided as rows."""
        due_us = halves.due_us
        if len(halves.begins) == 1 and halves.owners is None and due_us.count(due_us[0]) == len(ordinals):
            (group,) = halves.begins
            self._index(group).put(ordinals, due_us[0], self._table.open.get(group, 0))
            self._aged_us = min(self._aged_us, time_us + self._rules.half_retention_us)
        elif len(ordinals):
            self.begin(ordinals, time_us)

    def decide_ask(self, command: AskChecks, now_us: int) -> Decision:
        """Choose transactions of a group that are due for a check; the answer names them. CHECKED is logged before the
        producer is asked."""
        group = self._sessions.ordinal(command.group)
        index = None if group is None else self._due.get(group)
        due = np.empty(0, np.int64) if index is None else index.due(now_us, command.limit)
        first, epochs, checks = (
            self._table.column(name, due).astype(np.int64) for name in ("first", "epoch", "checks")
        )
        return Decision((event_of(Kind.CHECKED, first),) if len(due) else (), Asked(first, epochs, checks + 1))

    def apply_checked(self, batch: pa.RecordBatch, time_us: int) -> None:
        table = self._table
        ordinals = table.find(batch.column("transaction").to_numpy())
        due_us = time_us + self._of(ordinals, lambda rules: rules.interval_us)
        rows = ordinals - table.rows.first
        table.rows["checks"][rows] += 1
        table.rows["due_us"][rows] = due_us
        last = table.rows["checks"][rows] >= self._of(ordinals, lambda rules: rules.most)
        self._last_waits.put(ordinals[last], due_us[last])
        self._schedule(ordinals[~last], due_us[~last])
        for group, _ in self._by_group(ordinals):
            self._due[group].done()

    def decide_recheck(self, ids: pa.Array) -> Decision:
        """Decide that parked or undecided transactions are checked again from the first check. Answer: codes."""
        ordinals, codes = self._table.find_ids(ids)
        rows = np.flatnonzero(codes == code.OK)
        undecided = np.isin(self._table.column("state", ordinals[rows]), (OPEN, PARKED))
        codes[rows[~undecided]] = code.TRANSACTION_DECIDED
        chosen = np.unique(ordinals[rows[undecided]])
        if not len(chosen):
            return Decision((), codes)
        return Decision((event_of(Kind.REOPENED, self._table.column("first", chosen)),), codes)

    def apply_reopened(self, batch: pa.RecordBatch, time_us: int) -> None:
        table, ordinals = self._table, self._table.find(batch.column("transaction").to_numpy())
        rows = ordinals - table.rows.first
        table.reopen(ordinals)
        table.rows["by"][rows] = BY_OPERATOR  # so far only that: half_retention no longer counts
        table.rows["checks"][rows] = 0
        table.rows["due_us"][rows] = time_us
        self._schedule(ordinals, np.full(len(ordinals), time_us))

    def decide_tick(self, now_us: int, limit: int) -> list[Event]:
        """Return the events that park or roll back transactions, as their rules say: an interval after their last
        check, or at half_retention."""
        asked_out = self._last_waits.due(now_us, limit)
        ordinals = np.unique(np.concatenate((asked_out, self._find_aged(now_us, limit))))
        if not len(ordinals):
            return []
        first = self._table.column("first", ordinals)
        rolled_back = self._of(ordinals, lambda rules: rules.rollback).astype(np.bool_)
        lost, parked = first[rolled_back], first[~rolled_back]
        events = [decided(lost, ROLLED_BACK, DecidedBy.EXHAUSTED, OPERATOR)] if len(lost) else []
        return [*events, event_of(Kind.PARKED, parked)] if len(parked) else events

    def _find_aged(self, now_us: int, limit: int) -> Int64s:
        """Return ordinals of up to ``limit`` OPEN transactions that reached half_retention, except reopened ones."""
        table, age_us = self._table, self._rules.half_retention_us
        self._young = table.first_open(self._young, reopened=False)
        low = self._young - table.rows.first
        oldest = table.prepared_us(table.rows["first"][low : low + 1])
        self._aged_us = int(oldest[0]) + age_us if len(oldest) else NEVER_US
        if now_us < self._aged_us:
            return np.empty(0, np.int64)
        high = table.count_prepared(now_us - age_us + 1)
        return np.flatnonzero(table.open_rows(low, high, reopened=False))[:limit] + self._young

    def decide_park(self, cmd: Park) -> Decision:
        """Park a transaction that cannot be checked; see :class:`~escrowmq.ledger.commands.Park`."""
        (ordinal,) = self._table.find(np.array([cmd.transaction], np.int64))
        if ordinal < 0 or self._table.value("state", ordinal) != OPEN:
            return Decision((), False)
        return Decision((event_of(Kind.PARKED, [self._table.value("first", ordinal)]),), True)

    def apply_parked(self, batch: pa.RecordBatch) -> None:
        self._table.park(self._table.find(batch.column("transaction").to_numpy()))
        self._last_waits.done()

    def interval_us(self, group: str) -> int:
        """Return the time (µs) between two checks of a transaction of a producer group."""
        ordinal = self._sessions.ordinal(group)
        return check_rules(None if ordinal is None else self._sessions.own.get(ordinal), self._rules).interval_us

    def _of(self, ordinals: Int64s, value: Callable[[CheckRules], int]) -> Int64s:
        """Return ``value`` of the check-back rules of each transaction's group; the shard's if it is forgotten."""
        own = self._sessions.own
        if not own:
            return np.broadcast_to(np.int64(value(check_rules(None, self._rules))), len(ordinals))
        groups, row = np.unique(self._table.groups_of(ordinals), return_inverse=True)
        values = [value(check_rules(own.get(group), self._rules)) for group in groups.tolist()]
        return np.array(values, np.int64)[row]

    def _alive(self, ordinals: Int64s, due_us: Int64s | int, *, last: bool = False) -> Bools:
        table, rows = self._table, ordinals - self._table.rows.first
        alive: Bools = rows >= 0
        if not alive.all():
            due_us = due_us if isinstance(due_us, int) else due_us[alive]
            rows = rows[alive]
        spent = table.rows["checks"][rows] >= self._of(rows + table.rows.first, lambda rules: rules.most)
        alive[alive] = (table.rows["state"][rows] == OPEN) & (table.rows["due_us"][rows] == due_us) & (spent == last)
        return alive

    def _schedule(self, ordinals: Int64s, due_us: Int64s) -> None:
        for group, mine in self._by_group(ordinals):
            self._index(group).put(ordinals[mine], due_us[mine], self._table.open.get(group, 0))

    def _index(self, group: int) -> DueIndex:
        if (index := self._due.get(group)) is None:
            index = self._due[group] = DueIndex(self._alive)
        return index

    def _by_group(self, ordinals: Int64s) -> Iterator[tuple[int, slice | Bools]]:
        """Yield each producer group of transactions, and which of ``ordinals`` are its own (mask or slice)."""
        epochs = self._table.column("epoch", ordinals).astype(np.int64)
        if len(epochs) and all_equal(epochs):
            yield self._sessions.group(int(epochs[0])), slice(None)
        else:
            groups = self._sessions.groups_of(epochs)
            yield from ((group, groups == group) for group in np.unique(groups).tolist())

    def forget_group(self, group: int) -> None:
        """Forget a producer group without undecided transactions."""
        self._due.pop(group, None)

    def restore(self, rules: Rules) -> None:
        """Rebuild the indexes from a restored table."""
        self._young = self._table.rows.first
        self.apply_rules(rules)

    def apply_rules(self, rules: Rules) -> None:
        """Apply changed rules of the shard or of a group: they change the times of checks, so indexes are rebuilt."""
        self._rules = rules
        self._aged_us = 0  # check at once: half_retention may have changed
        self._due, self._last_waits = {}, DueIndex(partial(self._alive, last=True))
        waiting = np.flatnonzero(self._table.rows["state"] == OPEN)
        last = self._table.rows["checks"][waiting] >= self._of(waiting + self._table.rows.first, lambda of: of.most)
        for rows, put in ((waiting[last], self._last_waits.put), (waiting[~last], self._schedule)):
            put(rows + self._table.rows.first, self._table.rows["due_us"][rows])
