"""Expires idle producer sessions, their groups and writers.

Theory of operation. Every process that ever produced left a session, every Spark query and every batch write under a
name a group and a writer. They are small, and there is no end of them. So a session that has done nothing for long is
forgotten by an event that names its epoch; a group goes with its last session, and with the group what its writer
decided last.

Rules:

1. When a session was used last is the time of the last frame of its own: its opening, a message, a decision. So it is
   part of the fold, and a restart neither forgets it nor begins anew.
2. A session that prepared something undecided stays: its transaction's group is asked, and decides. So does one whose
   process listens for questions now.
3. What is decided needs no session. A transaction whose session is forgotten answers late decisions of any group by its
   state: the first decision stands (I5), and nothing can change it. Message ids are remembered without sessions (I9).
4. Manually a writer is forgotten at once, with all sessions of its group; not while anything is undecided there.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from escrowmq.errors import Code, error
from escrowmq.ledger.columns.arrays import Int64s
from escrowmq.ledger.commands import Forget, ForgetWriter
from escrowmq.ledger.events import Decision, Event, event_of
from escrowmq.ledger.transactions.checkback import CheckBack
from escrowmq.ledger.transactions.sessions import Sessions
from escrowmq.ledger.transactions.table import TransactionTable
from escrowmq.ledger.transactions.writers import Writers
from escrowmq.schemas import Kind


class Forgetting:
    """Which sessions and writers may go, and everything that goes with them."""

    def __init__(self, sessions: Sessions, table: TransactionTable, checkback: CheckBack, writers: Writers) -> None:
        self._sessions = sessions
        self._table = table
        self._checkback = checkback
        self._writers = writers

    def decide_forget(self, command: Forget) -> Decision:
        """Forget what is idle, the oldest sessions first."""
        idle = self._sessions.idle(command.before_us)
        if not len(idle):
            return Decision((), 0)
        needed = np.concatenate((command.connected, self._table.undecided_epochs()))
        idle = np.setdiff1d(idle, needed, assume_unique=False)[: command.limit]
        return Decision(_events(idle), len(idle))

    def decide_forget_writer(self, command: ForgetWriter) -> Decision:
        """Forget one writer. Raises NOT_FOUND, CONFLICT while something is undecided."""
        group = self._writers.group(command.writer)
        if group is None:
            raise error(Code.NOT_FOUND, "no such writer on this broker")
        name = self._sessions.groups[group]
        undecided = self._table.open.get(group, 0) + self._table.parked.get(group, 0)
        if undecided:
            sentence = f"the writer's group {name!r} has {undecided} undecided transactions"
            raise error(Code.CONFLICT, sentence, "decide them first: escrowmq transactions list --state undecided")
        epochs = self._sessions.of_group(group)
        return Decision(_events(epochs), {"group": name, "sessions": len(epochs)})

    def apply(self, batch: pa.RecordBatch) -> None:
        for group in self._sessions.forget(batch.column("epoch").to_numpy().astype(np.int64)):
            for part in (self._table, self._checkback, self._writers):
                part.forget_group(group)


def _events(epochs: Int64s) -> tuple[Event, ...]:
    return (event_of(Kind.FORGOTTEN, epochs),) if len(epochs) else ()
