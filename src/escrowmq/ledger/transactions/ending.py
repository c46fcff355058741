"""Ending transactions: commits, rollbacks and expiry; the first decision of each is final.

States and their transitions::

    from \\ event    COMMIT       ROLLBACK      checks exhausted        retention     recheck
    OPEN            COMMITTED    ROLLED_BACK   PARKED / ROLLED_BACK    EXPIRED       OPEN, no checks spent
    PARKED          COMMITTED    ROLLED_BACK   -                       EXPIRED       OPEN, no checks spent
    COMMITTED       (already)    (conflict)    -                       -             (decided)
    ROLLED_BACK     (conflict)   (already)     -                       -             (decided)
    EXPIRED         (expired)    (expired)     -                       -             (decided)

"checks exhausted" is an interval without a decision after the last check, or ``half_retention``. Answers not named here
say that the decision took effect.

Rules:

1. The first decision in the log is final (I5). A decision names position *and* epoch, so it affects no other
   transaction (I6), and comes from a session of the group that prepared it (I15).
2. ``checkback.py`` has the rules for checks when no decision comes, and for what follows the last one.
3. A few decisions are taken row by row when all of them are *plain*: of a session that may act, about known
   transactions of its group, none named twice. All others are decided as columns.
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
        """Decide commits and rollbacks. Answer: a code for each row (schema ENDED), by the state table above; the rows
        that decide become one event."""
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
        events: tuple[Event, ...] = ()
        if len(winners):
            first = self._table.column("first", ordinals[winners])
            events = (decided(first, BECOMES[outcomes[winners]], command.by, command.sessions[winners]),)
        return Decision(events, pa.RecordBatch.from_arrays([pa.array(codes)], schema=ENDED))

    def _find_owned(self, rows: Int64s, ordinals: Int64s, sessions: Int64s, codes: UInt8s) -> Int64s:
        """Return those of ``rows`` whose session is of the transaction's group; set the codes of the others
        (UNKNOWN_SESSION, WRONG_GROUP)."""
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
        codes, winners, ours = bytearray(), list[DecidedRow](), iter(found)
        group, last = None, -1  # most are of one session
        for part in parts:
            session = part.session
            if session != last and (group := self._sessions.group_that_may(session, rules)) is None:
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
        """As :meth:`apply_decided`, of rows. Returns position, queue id, tag and size of the visible messages."""
        rows = zip(self._table.decide_few(decided), decided, strict=True)
        return self._table.messages_of_few([row for row, (_, state, _, _) in rows if state == COMMITTED])

    def apply_decided(self, batch: pa.RecordBatch) -> tuple[Int64s, Int64s, Int32s, Int32s, Int32s]:
        """Apply Kind.DECIDED: set the states. Returns the messages that became visible, as of
        :meth:`TransactionTable.messages_of`."""
        ordinals = self._table.find(batch.column("transaction").to_numpy())
        states = batch.column("state").to_numpy()
        self._table.decide(ordinals, states, batch.column("decided_by").to_numpy())
        committed = states == COMMITTED
        return self._table.messages_of(ordinals if committed.all() else ordinals[committed])

    def decide_expire(self, visible_us: int, limit_position: int) -> tuple[int, list[Event]]:
        """Return the position up to which the log may be dropped, at most ``limit_position``, and the event (in a list)
        that expires undecided transactions below it, prepared before ``visible_us``. A younger one is the limit."""
        first = self._table.rows["first"][self._table.undecided()]
        old = self._table.prepared_us(first) < visible_us if len(first) else np.empty(0, np.bool_)
        stops = first[~old]
        limit = min(limit_position, int(stops[0])) if len(stops) else limit_position
        gone = first[old & (first < limit)]
        return limit, [decided(gone, EXPIRED, DecidedBy.RETENTION, OPERATOR)] if len(gone) else []


def _first_deciders(rows: Int64s, deciding: Int64s, ordinals: Int64s, outcomes: UInt8s, codes: UInt8s) -> Int64s:
    """Return the first of the rows ``deciding`` of each transaction; set the codes of later rows, which find it
    decided."""
    owners, index = np.unique(ordinals[deciding], return_index=True)
    winners = deciding[index]
    winner = winners[np.minimum(np.searchsorted(owners, ordinals[rows]), len(owners) - 1)]
    late = (ordinals[winner] == ordinals[rows]) & (winner < rows)
    codes[rows[late]] = ANSWER[BECOMES[outcomes[winner[late]]], outcomes[rows[late]]]
    return np.sort(winners)
