"""What nobody uses any more is forgotten: producer sessions, their groups, and the writers of those.

Theory of operation. Every process that ever produced left a session, every Spark query and every batch write under a name a
group and a writer. They are small, and there is no end of them. So a session that has done nothing for long is forgotten by an
event that names its epoch; a group goes with its last session, and with the group what its writer decided last.

Rules:

1. When a session was used last is the time of the last frame of its own: its opening, a message, a decision. So it is part of the
   fold, and a restart neither forgets it nor begins anew.
2. A session that prepared something undecided stays: its transaction's group is asked, and decides. So does one whose process
   listens for questions now.
3. What is decided needs no session. A transaction whose group is forgotten answers late decisions by its state, whoever asks:
   the first decision stands (I5), and nobody can change anything. Message ids are remembered without sessions (I9).
4. By hand a writer is forgotten at once, with all sessions of its group; not while anything is undecided there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from escrowmq.errors import Code, error
from escrowmq.ledger.commands import Decision, Event, Forget, ForgetWriter
from escrowmq.schemas import STORED, Kind

if TYPE_CHECKING:
    from escrowmq.ledger.ledger import Ledger

Int64s = npt.NDArray[np.int64]


def decide_forget(ledger: Ledger, command: Forget) -> Decision:
    """Forget what is idle, the oldest sessions first."""
    idle = ledger.sessions.idle(command.before_us)
    if not len(idle):
        return Decision((), 0)
    needed = np.concatenate((command.connected, ledger.transactions.undecided_epochs()))
    idle = np.setdiff1d(idle, needed, assume_unique=False)[: command.limit]
    return Decision(_events(idle), len(idle))


def decide_forget_writer(ledger: Ledger, command: ForgetWriter) -> Decision:
    """Forget one writer. Raises NOT_FOUND, CONFLICT while something is undecided."""
    group = ledger.writers.group(command.writer)
    if group is None:
        raise error(Code.NOT_FOUND, "no such writer on this broker")
    undecided = ledger.transactions.open.get(group, 0) + ledger.transactions.parked.get(group, 0)
    if undecided:
        sentence = f"the writer's group {ledger.sessions.groups[group]!r} has {undecided} undecided transactions"
        raise error(Code.CONFLICT, sentence, "decide them first: escrowmq transactions list --state undecided")
    epochs = ledger.sessions.of_group(group)
    return Decision(_events(epochs), {"group": ledger.sessions.groups[group], "sessions": len(epochs)})


def _events(epochs: Int64s) -> tuple[Event, ...]:
    if not len(epochs):
        return ()
    batch = pa.RecordBatch.from_arrays([pa.array(epochs.astype(np.uint32))], schema=STORED[Kind.FORGOTTEN])
    return (Event(Kind.FORGOTTEN, batch),)


def apply_forgotten(ledger: Ledger, batch: pa.RecordBatch) -> None:
    """Kind.FORGOTTEN."""
    for group in ledger.sessions.forget(batch.column("epoch").to_numpy().astype(np.int64)):
        ledger.transactions.forget_group(group)
        ledger.writers.forget_group(group)
