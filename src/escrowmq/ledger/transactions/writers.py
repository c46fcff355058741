"""Writers of numbered batches (a Spark query): one event commits all transactions of a batch, exactly once.

A job prepares the rows of batch *n* in many processes, some of them more than once (a task is repeated, or runs twice).
Its driver then names the valid transactions and commits them as (writer, n). The ledger keeps the last batch of each
writer.

Rules:

1. A writer has a producer group of its own, and its batches follow each other: so transactions of the group that are
   undecided when a batch is committed, and not named, are of an attempt that lost.
2. The first commit of (writer, n) is one frame: all named transactions become visible or, after a crash, none; all
   others that are undecided in the group are rolled back.
3. A commit of (writer, n) when the writer's last batch is n or later changes no decision: it is the repeat of a driver
   that crashed before it noted its success. All undecided transactions of the group are rolled back.
4. A commit that names a transaction that cannot be committed (of another group, unknown, rolled back, expired) is
   rejected as a whole.
5. Batches of a writer rise; gaps are allowed.
6. A writer is forgotten with its producer group, after long disuse.

Expiry of idle producer sessions: every process that ever produced left a session; every Spark query and named batch
write a group and a writer. Idle sessions are forgotten by an event with their epochs; a group goes with its last
session, and its writer with the group.

1. The last use of a session is the time of the last frame of its own: its opening, a message, a decision. So it is part
   of the fold, and a restart neither forgets it nor resets it.
2. A session with undecided transactions stays: its group is checked, and decides. So does one whose process is
   connected for check-backs.
3. Decided transactions need no session: late decisions of any group are answered by the state (I5). Message ids are
   remembered without sessions (I9).
4. An operator can forget a writer at once, with all sessions of its group, unless something is undecided there.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from escrowmq.errors import Code, error
from escrowmq.ledger.columns import codes as code
from escrowmq.ledger.columns.arrays import Int64s, int64s, table_of
from escrowmq.ledger.commands import CommitBatch, Forget, ForgetWriter, Rules
from escrowmq.ledger.events import Decision, Event, event_of
from escrowmq.ledger.transactions.checkback import CheckBack
from escrowmq.ledger.transactions.sessions import Sessions
from escrowmq.ledger.transactions.table import COMMITTED, NONE, ROLLED_BACK, TransactionTable
from escrowmq.model import DecidedBy
from escrowmq.schemas import ID, Kind

_STORED = pa.schema([("writer", ID), *int64s("group", "batch", "decided_us")])


class Writers:
    """The last decided batch of each writer, by its 16 bytes."""

    def __init__(self, sessions: Sessions, table: TransactionTable) -> None:
        self._sessions = sessions
        self._table = table
        self._last: dict[bytes, tuple[int, int, int]] = {}  # writer: (producer group, batch, when it was decided)
        self._writers: dict[int, bytes] = {}  # by producer group

    def __len__(self) -> int:
        return len(self._last)

    def last(self, writer: bytes) -> int | None:
        """Return the number of the writer's last decided batch; None for an unknown writer."""
        known = self._last.get(writer)
        return None if known is None else known[1]

    def group(self, writer: bytes) -> int | None:
        """Return the number of the writer's producer group; None for an unknown writer."""
        known = self._last.get(writer)
        return None if known is None else known[0]

    def list_after(self, after: bytes, limit: int) -> list[tuple[bytes, int, int, int]]:
        """Return at most ``limit`` writers in order of their bytes, behind ``after``: writer, producer group, last
        batch, when it was decided (µs)."""
        chosen = heapq.nsmallest(limit, (writer for writer in self._last if writer > after))
        return [(writer, *self._last[writer]) for writer in chosen]

    def decide_commit(self, command: CommitBatch, rules: Rules) -> Decision:
        """Decide the commit of a numbered batch, or answer its repeat, by the rules above. Answer: ``status``, the
        writer's ``last`` batch, the number of transactions ``rolled_back``. Raises UNKNOWN_SESSION, FENCED, GROUP_KIND,
        WRONG_GROUP, TOO_MANY, CONFLICT, or the code of a transaction that is not known."""
        group = self._sessions.group_of(command.session, rules, transactional=True)
        owner, last, _ = self._last.get(command.writer, (group, NONE, 0))
        if command.writer not in self._last and len(self._last) >= rules.max_writers:
            raise error(Code.TOO_MANY, f"there are {len(self._last)} writers", "max_writers")
        if self._writers.get(group, command.writer) != command.writer or owner != group:
            hint = "`escrowmq writers list` shows it; `escrowmq writers forget WRITER` lets the writer begin anew"
            raise error(Code.WRONG_GROUP, "a writer has a producer group of its own, and this is another", hint)
        repeated = command.writer in self._last and last >= command.number
        ordinals = self._list_owned(command, group, skip_unknown=repeated)
        undecided = self._table.undecided_of(group)
        if repeated:
            ordinals, lost = ordinals[:0], undecided
        elif missing := len(np.setdiff1d(ordinals, undecided, assume_unique=True)):
            raise error(Code.CONFLICT, f"{missing} transactions of the batch are already decided")
        else:
            last, lost = command.number, np.setdiff1d(undecided, ordinals, assume_unique=True)
        status = Code.ALREADY_COMMITTED if repeated else Code.COMMITTED
        events = () if repeated and not len(lost) else (self._event(command, ordinals, lost),)
        return Decision(events, {"status": status.name, "last": last, "rolled_back": len(lost)})

    def _list_owned(self, command: CommitBatch, group: int, *, skip_unknown: bool) -> Int64s:
        """Return the ordinals of the batch's transactions, each once. ``skip_unknown``: of a repeated commit, some may
        have left with retention. Raises the code of an unknown one, or WRONG_GROUP."""
        ordinals, codes = self._table.find_ids(command.transactions)
        wrong = np.flatnonzero(codes != code.OK)
        left = np.isin(codes[wrong], (code.UNKNOWN_TRANSACTION, code.EXPIRED))
        if len(wrong) and not (skip_unknown and left.all()):
            raise error(Code(int(codes[wrong[0]])), f"{len(wrong)} transactions of the batch are not known here")
        ordinals = np.unique(ordinals[ordinals != NONE])
        if self._table.foreign(ordinals, group).any():
            raise error(Code.WRONG_GROUP)
        return ordinals

    def _event(self, command: CommitBatch, winners: Int64s, losers: Int64s) -> Event:
        """Return the event that commits ``winners`` and rolls back ``losers``. A batch without transactions is one row
        without a transaction, so that it is remembered."""
        first = self._table.column("first", np.concatenate((winners, losers))).astype(np.int64)
        states = np.repeat(np.array([COMMITTED, ROLLED_BACK], np.uint8), (len(winners), len(losers)))
        if not len(first):
            first, states = np.array([NONE], np.int64), np.array([COMMITTED], np.uint8)
        size = len(first)
        by, epochs, numbers = (np.full(size, n) for n in (int(DecidedBy.PRODUCER), command.session, command.number))
        return event_of(Kind.BATCH_DECIDED, first, states, by, epochs, [command.writer] * size, numbers)

    def apply_decided(self, batch: pa.RecordBatch, time_us: int) -> None:
        """Apply the writer's part of Kind.BATCH_DECIDED."""
        writer, number, epoch = (batch.column(name)[0].as_py() for name in ("writer", "batch", "epoch"))
        group, known = self._sessions.group(epoch), self._last.get(writer)
        if known is None or known[1] < number:
            self._last[writer] = (group, number, time_us)
            self._writers[group] = writer

    def forget_group(self, group: int) -> None:
        """Forget the writer of a producer group, if it has one."""
        if (writer := self._writers.pop(group, None)) is not None:
            del self._last[writer]

    def snapshot(self) -> dict[str, pa.Table]:
        return {"writers": table_of(_STORED, [(writer, *last) for writer, last in self._last.items()])}

    def restore(self, tables: dict[str, pa.Table], time_us: int) -> None:
        """Restore :meth:`snapshot`. Format 1 had no times (they become ``time_us``), or no writers."""
        if (table := tables.get("writers")) is None:
            return
        if "decided_us" not in table.column_names:
            table = table.append_column("decided_us", pa.array(np.full(table.num_rows, time_us)))
        writers, *rest = (table[name].to_pylist() for name in ("writer", "group", "batch", "decided_us"))
        self._last = dict(zip(writers, zip(*rest, strict=True), strict=True))
        self._writers = {group: writer for writer, (group, *_) in self._last.items()}


@dataclass(frozen=True, slots=True)
class Forgetting:
    """Decides and applies the expiry of sessions and writers. It has no state of its own."""

    sessions: Sessions
    table: TransactionTable
    checkback: CheckBack
    writers: Writers

    def decide_forget(self, command: Forget) -> Decision:
        """Decide that idle sessions are forgotten, the oldest first; connected ones and those with undecided
        transactions stay. Answer: their number."""
        idle = self.sessions.idle(command.before_us)
        if not len(idle):
            return Decision((), 0)
        needed = np.concatenate((command.connected, self.table.undecided_epochs()))
        idle = np.setdiff1d(idle, needed, assume_unique=False)[: command.limit]
        return Decision(_events(idle), len(idle))

    def decide_forget_writer(self, command: ForgetWriter) -> Decision:
        """Decide that a writer and its sessions are forgotten. Raises NOT_FOUND, CONFLICT (undecided transactions)."""
        group = self.writers.group(command.writer)
        if group is None:
            raise error(Code.NOT_FOUND, "no such writer on this broker")
        name = self.sessions.groups[group]
        if undecided := self.table.open.get(group, 0) + self.table.parked.get(group, 0):
            sentence = f"the writer's group {name!r} has {undecided} undecided transactions"
            raise error(Code.CONFLICT, sentence, "decide them first: escrowmq transactions list --state undecided")
        epochs = self.sessions.of_group(group)
        return Decision(_events(epochs), {"group": name, "sessions": len(epochs)})

    def apply(self, batch: pa.RecordBatch) -> None:
        for group in self.sessions.forget(batch.column("epoch").to_numpy().astype(np.int64)):
            for part in (self.table, self.checkback, self.writers):
                part.forget_group(group)


def _events(epochs: Int64s) -> tuple[Event, ...]:
    return (event_of(Kind.FORGOTTEN, epochs),) if len(epochs) else ()
