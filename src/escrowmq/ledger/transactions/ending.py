"""Ending transactions: commits, rollbacks and expiry; the first decision of each is final.

States and what may follow them::

    from \\ event    COMMIT       ROLLBACK      checks exhausted        retention     recheck
    OPEN            COMMITTED    ROLLED_BACK   PARKED / ROLLED_BACK    EXPIRED       OPEN, no checks spent
    PARKED          COMMITTED    ROLLED_BACK   -                       EXPIRED       OPEN, no checks spent
    COMMITTED       (already)    (conflict)    -                       -             (decided)
    ROLLED_BACK     (conflict)   (already)     -                       -             (decided)
    EXPIRED         (expired)    (expired)     -                       -             (decided)

The first decision in the log is final (I5); "checks exhausted" is the last ask unanswered for an interval, or
``half_retention``. Answers not named here say that the decision took effect.

Rules:

1. The first decision in the log is final (I5). A decision names position *and* epoch, so it can hit no other
   transaction (I6), and comes from a session of the group that prepared it (I15).
2. Who is asked when no decision comes, and what follows the last question, is ruled in ``checkback.py``.
3. A few decisions are taken row by row when all of them are *plain*: of a session that may act, about transactions of
   its group that are here, none named twice. Whatever is not plain is not ruled there: all of them are decided as
   columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from escrowmq.errors import Code
from escrowmq.ledger.columns import codes as code
from escrowmq.ledger.columns.arrays import Int32s, Int64s, UInt8s
from escrowmq.ledger.commands import End, EndRows, Rules
from escrowmq.ledger.events import Decision, Event, event_of_rows
from escrowmq.ledger.transactions.sessions import OPERATOR, Sessions
from escrowmq.ledger.transactions.table import (
    BY_OPERATOR,
    COMMITTED,
    EXPIRED,
    OPEN,
    PARKED,
    ROLLBACK,
    ROLLED_BACK,
    UNKNOWN,
    TransactionTable,
    decided,
)
from escrowmq.model import DecidedBy
from escrowmq.schemas import ENDED, Kind

ANSWER = np.array(
    [  # to UNKNOWN, COMMIT, ROLLBACK; OK: this one decides
        [Code.NOTED, Code.OK, Code.OK],  # OPEN
        [Code.ALREADY_COMMITTED, Code.ALREADY_COMMITTED, Code.CONFLICT],  # COMMITTED
        [Code.ALREADY_ROLLED_BACK, Code.CONFLICT, Code.ALREADY_ROLLED_BACK],  # ROLLED_BACK
        [Code.NOTED, Code.OK, Code.OK],  # PARKED
        [Code.EXPIRED, Code.EXPIRED, Code.EXPIRED],  # EXPIRED
    ],
    np.uint8,
)
DECIDES = np.array([Code.NOTED, Code.COMMITTED, Code.ROLLED_BACK], np.uint8)  # [outcome]
BECOMES = np.array([OPEN, COMMITTED, ROLLED_BACK], np.uint8)  # [outcome]

DecidedRow: TypeAlias = tuple[int, int, int, int]
"""A row of Kind.DECIDED: the transaction's first position, its state, who decided, and that session."""


class Ending:
    """Decides END and expiry, over the transaction table. It has no state of its own."""

    def __init__(self, table: TransactionTable, sessions: Sessions) -> None:
        self._table = table
        self._sessions = sessions

    def decide_end(self, command: End, rules: Rules) -> Decision:
        """Answer each row by the state table; the rows that decide become one event."""
        outcomes = command.batch.column("outcome").to_numpy()
        ordinals, codes = self._table.find_ids(command.batch.column("transaction"))
        sessions = self._sessions.check(command.sessions, transactional=None, rules=rules)
        codes = np.where(sessions != code.OK, sessions, codes)
        codes[outcomes > ROLLBACK] = code.BAD_REQUEST
        rows = np.flatnonzero(codes == code.OK)
        if command.by != DecidedBy.OPERATOR:
            rows = self._find_owned(rows, ordinals, command.sessions, codes)
        elif (command.sessions != OPERATOR).any():
            codes[rows], rows = code.BAD_REQUEST, rows[:0]
        states = self._table.column("state", ordinals[rows])
        codes[rows] = ANSWER[states, outcomes[rows]]
        rows = rows[(states == OPEN) | (states == PARKED)]
        codes[rows] = DECIDES[outcomes[rows]]
        winners = rows[outcomes[rows] != UNKNOWN]
        if len(winners) and not (np.diff(ordinals[rows]) > 0).all():
            winners = _first_deciders(rows, winners, ordinals, outcomes, codes)
        answer = pa.RecordBatch.from_arrays([pa.array(codes)], schema=ENDED)
        if not len(winners):
            return Decision((), answer)
        first = self._table.column("first", ordinals[winners])
        event = decided(first, BECOMES[outcomes[winners]], command.by, command.sessions[winners])
        return Decision((event,), answer)

    def _find_owned(self, rows: Int64s, ordinals: Int64s, sessions: Int64s, codes: UInt8s) -> Int64s:
        """Return the rows whose session is of the transaction's group; the others get their code."""
        anonymous = sessions[rows] == OPERATOR
        codes[rows[anonymous]] = code.UNKNOWN_SESSION
        rows = rows[~anonymous]
        foreign = self._table.foreign(ordinals[rows], self._sessions.groups_of(sessions[rows]))
        codes[rows[foreign]] = code.WRONG_GROUP
        owned: Int64s = rows[~foreign]
        return owned

    def decide_few(self, command: EndRows, rules: Rules) -> Decision | None:
        """As :meth:`decide_end`, row by row. None: not all of them are plain."""
        parts, by = command.parts, int(command.by)
        if by == BY_OPERATOR:
            return None
        found = self._table.find_few([row[0] for part in parts for row in part.rows])
        if found is None or len(set(found)) < len(found):
            return None
        codes, winners = bytearray(), list[DecidedRow]()
        ours = iter(found)
        group, last = None, -1  # most are of one session
        for part in parts:
            session = part.session
            if session != last:
                if (group := self._sessions.group_that_may(session, rules)) is None:
                    return None
                last = session
            for _, outcome in part.rows:
                _, first, epoch, state = next(ours)
                foreign = epoch != session and self._sessions.group(epoch) != group
                if foreign or not UNKNOWN <= outcome <= ROLLBACK:
                    return None
                if state not in (OPEN, PARKED):
                    codes.append(ANSWER.item(state, outcome))
                    continue
                codes.append(DECIDES.item(outcome))
                if outcome != UNKNOWN:
                    winners.append((first, BECOMES.item(outcome), by, session))
        events = (event_of_rows(Kind.DECIDED, winners, keep=True),) if winners else ()
        return Decision(events, bytes(codes))

    def apply_few(self, decided: Sequence[DecidedRow]) -> list[tuple[int, int, int, int]]:
        """Kind.DECIDED as rows: position, queue id, tag and size of what became visible, as :meth:`apply_decided` has
        them."""
        rows = self._table.decide_few(decided)
        return self._table.messages_of_few(
            [row for row, (_, state, _, _) in zip(rows, decided, strict=True) if state == COMMITTED]
        )

    def apply_decided(self, batch: pa.RecordBatch) -> tuple[Int64s, Int64s, Int32s, Int32s, Int32s]:
        """Kind.DECIDED. What became visible by it, as of :meth:`TransactionTable.messages_of`."""
        ordinals = self._table.find(batch.column("transaction").to_numpy())
        states = batch.column("state").to_numpy()
        self._table.decide(ordinals, states, batch.column("decided_by").to_numpy())
        committed = states == COMMITTED
        return self._table.messages_of(ordinals if committed.all() else ordinals[committed])

    def decide_expire(self, visible_us: int, limit_position: int) -> tuple[int, list[Event]]:
        """Return how far retention may go for undecided transactions, and the EXPIRED decisions that it needs for
        that: those prepared before ``visible_us`` are expired, a younger one is a stop."""
        first = self._table.rows["first"][self._table.undecided()]
        old = self._table.prepared_us(first) < visible_us if len(first) else np.empty(0, np.bool_)
        stops = first[~old]
        limit = min(limit_position, int(stops[0])) if len(stops) else limit_position
        gone = first[old & (first < limit)]
        return limit, [decided(gone, EXPIRED, DecidedBy.RETENTION, OPERATOR)] if len(gone) else []


def _first_deciders(rows: Int64s, deciding: Int64s, ordinals: Int64s, outcomes: UInt8s, codes: UInt8s) -> Int64s:
    """Return a transaction may stand in one batch twice: its first deciding row decides, the rows after it come too
    late."""
    owners, index = np.unique(ordinals[deciding], return_index=True)
    winners = deciding[index]
    winner = winners[np.minimum(np.searchsorted(owners, ordinals[rows]), len(owners) - 1)]
    late = (ordinals[winner] == ordinals[rows]) & (winner < rows)
    codes[rows[late]] = ANSWER[BECOMES[outcomes[winner[late]]], outcomes[rows[late]]]
    return np.sort(winners)
