"""Expires idle producer sessions, their groups and writers.

Every process that ever produced left a session; every Spark query and named batch write a group and a writer. So idle
sessions are forgotten by an event with their epochs; a group goes with its last session, and its writer with the group.

Rules:

1. The last use of a session is the time of the last frame of its own: its opening, a message, a decision. So it is part
   of the fold, and a restart neither forgets it nor resets it.
2. A session with undecided transactions stays: its group is checked, and decides. So does one whose process is
   connected for check-backs.
3. Decided transactions need no session: late decisions of any group are answered by the state (I5). Message ids are
   remembered without sessions (I9).
4. An operator can forget a writer at once, with all sessions of its group, unless something is undecided there.
"""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Forgetting:
    """Decides and applies the expiry of sessions and writers. It has no state of its own."""

    sessions: Sessions
    table: TransactionTable
    checkback: CheckBack
    writers: Writers

    def decide_forget(self, command: Forget) -> Decision:
        """Forget idle sessions, the oldest first."""
        idle = self.sessions.idle(command.before_us)
        if not len(idle):
            return Decision((), 0)
        needed = np.concatenate((command.connected, self.table.undecided_epochs()))
        idle = np.setdiff1d(idle, needed, assume_unique=False)[: command.limit]
        return Decision(_events(idle), len(idle))

    def decide_forget_writer(self, command: ForgetWriter) -> Decision:
        """Forget one writer. Raises NOT_FOUND, CONFLICT while something is undecided."""
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
