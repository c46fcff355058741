"""The state table of transactions: which decision counts, and what is answered to one that comes too late.

States and what may follow them::

    from \\ event    COMMIT       ROLLBACK      checks exhausted        retention     recheck
    OPEN            COMMITTED    ROLLED_BACK   PARKED / ROLLED_BACK    EXPIRED       OPEN, no checks spent
    PARKED          COMMITTED    ROLLED_BACK   -                       EXPIRED       OPEN, no checks spent
    COMMITTED       (already)    (conflict)    -                       -             (decided)
    ROLLED_BACK     (conflict)   (already)     -                       -             (decided)
    EXPIRED         (expired)    (expired)     -                       -             (decided)

The first decision in the log is final (I5); "checks exhausted" is the last ask unanswered for an interval, or
``half_retention``. Answers not named here say that the decision took effect.
"""

from __future__ import annotations

import numpy as np

from escrowmq.errors import Code
from escrowmq.ledger.columns.arrays import Int64s, UInt8s
from escrowmq.ledger.events import Event, event_of
from escrowmq.model import DecidedBy, Outcome, TransactionState
from escrowmq.schemas import Kind

OPEN, COMMITTED, ROLLED_BACK, PARKED, EXPIRED = (int(s) for s in TransactionState)
UNKNOWN, COMMIT, ROLLBACK = (int(o) for o in Outcome)
BY_OPERATOR = int(DecidedBy.OPERATOR)
NONE = -1

_REPEATED: dict[tuple[int, int], Code] = {
    (COMMITTED, Outcome.COMMIT): Code.ALREADY_COMMITTED,
    (COMMITTED, Outcome.ROLLBACK): Code.CONFLICT,
    (ROLLED_BACK, Outcome.COMMIT): Code.CONFLICT,
    (ROLLED_BACK, Outcome.ROLLBACK): Code.ALREADY_ROLLED_BACK,
    (COMMITTED, Outcome.UNKNOWN): Code.ALREADY_COMMITTED,
    (ROLLED_BACK, Outcome.UNKNOWN): Code.ALREADY_ROLLED_BACK,
    (EXPIRED, Outcome.COMMIT): Code.EXPIRED,
    (EXPIRED, Outcome.ROLLBACK): Code.EXPIRED,
    (EXPIRED, Outcome.UNKNOWN): Code.EXPIRED,
    (OPEN, Outcome.UNKNOWN): Code.NOTED,
    (PARKED, Outcome.UNKNOWN): Code.NOTED,
}
ANSWER = np.full((5, 3), Code.OK, np.uint8)  # [state, outcome]; OK: this one decides
for (_state, _outcome), _code in _REPEATED.items():
    ANSWER[_state, _outcome] = _code
DECIDES = np.array([Code.NOTED, Code.COMMITTED, Code.ROLLED_BACK], np.uint8)  # [outcome]
BECOMES = np.array([OPEN, COMMITTED, ROLLED_BACK], np.uint8)  # [outcome]


def decided(first: Int64s, state: UInt8s | int, by: DecidedBy, epochs: Int64s | int) -> Event:
    """The decisions of the transactions that begin at the positions ``first``."""
    size = len(first)
    columns = (np.broadcast_to(np.asarray(column), size) for column in (state, int(by), epochs))
    return event_of(Kind.DECIDED, first, *columns)


def first_deciders(rows: Int64s, deciding: Int64s, ordinals: Int64s, outcomes: UInt8s, codes: UInt8s) -> Int64s:
    """A transaction may stand in one batch twice: its first deciding row decides, the rows after it come too late."""
    owners, index = np.unique(ordinals[deciding], return_index=True)
    winners = deciding[index]
    winner = winners[np.minimum(np.searchsorted(owners, ordinals[rows]), len(owners) - 1)]
    late = (ordinals[winner] == ordinals[rows]) & (winner < rows)
    codes[rows[late]] = ANSWER[BECOMES[outcomes[winner[late]]], outcomes[rows[late]]]
    return np.sort(winners)
