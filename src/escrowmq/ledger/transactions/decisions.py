"""States and outcomes of transactions as plain integers, and the event of their decisions."""

from __future__ import annotations

import numpy as np

from escrowmq.ledger.columns.arrays import Int64s, UInt8s
from escrowmq.ledger.events import Event, event_of
from escrowmq.model import DecidedBy, Outcome, TransactionState
from escrowmq.schemas import Kind

OPEN, COMMITTED, ROLLED_BACK, PARKED, EXPIRED = (int(s) for s in TransactionState)
UNKNOWN, COMMIT, ROLLBACK = (int(o) for o in Outcome)
BY_OPERATOR = int(DecidedBy.OPERATOR)
NONE = -1


def decided(first: Int64s, state: UInt8s | int, by: DecidedBy, epochs: Int64s | int) -> Event:
    """The decisions of the transactions that begin at the positions ``first``."""
    size = len(first)
    columns = (np.broadcast_to(np.asarray(column), size) for column in (state, int(by), epochs))
    return event_of(Kind.DECIDED, first, *columns)
