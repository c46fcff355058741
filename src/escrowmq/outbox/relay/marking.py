"""Writes the results of a batch into the outbox table, and moves kept rows through their later states.

If all rows were sent, that is one statement, a transaction of its own, which only touches rows of lanes that are leased
at that moment. Anything else is one transaction that locks the worker's lanes while it writes, so that a worker that
lost them changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any

import numpy as np
import sqlalchemy as sa

from escrowmq.errors import Code
from escrowmq.outbox.dialects import Dialect
from escrowmq.outbox.relay.holding import free
from escrowmq.outbox.relay.leases import Leases
from escrowmq.outbox.relay.reading import SEQ
from escrowmq.outbox.relay.verdicts import Verdict
from escrowmq.outbox.tables import State, state_is, trans_message
from escrowmq.outbox.targets.seam import REFUSED, Codes
from escrowmq.platform.failpoints import reach

_c = trans_message.c
PURGE_ROWS = 2000
"""Rows of one purge: locks are short, and other work continues between two."""
NO_CALLBACK = "sent, and no callback came"


def _in_state(*states: State) -> sa.ColumnElement[bool]:
    return _c.state.in_([sa.literal_column(str(int(state))) for state in states])  # also for many rows at once


_OPEN = _in_state(State.PENDING, State.RETRYING)
"""Only such rows are marked: a callback may have made one DONE already, an operator may have discarded one."""
_OVER = _in_state(State.PENDING, State.RETRYING, State.DONE)
"""Rows that are deleted after their OK."""


class Marker:
    """Writes the marks of one worker. ``deletes``: sent rows are deleted, not kept."""

    def __init__(self, dialect: Dialect, leases: Leases, deletes: bool) -> None:
        self._dialect, self._leases, self._deletes = dialect, leases, deletes
        self._among = dialect.among(_c.seq, "seqs")

    def mark_all(self, connection: sa.Connection, rows: Sequence[Any]) -> int:
        """Mark rows that were all sent: SENT, or deleted if none are kept. Returns how many were marked (fewer if lanes
        were lost)."""
        return self._mark_sent(connection, list(map(SEQ, rows)), self._leases.mine(), owner=self._leases.owner)

    def mark_mixed(
        self, rows: Sequence[Any], verdict: Verdict, behind: Sequence[tuple[int, int]]
    ) -> tuple[int, set[int]]:
        """Write a verdict where some rows were not sent, or keys are freed or held. ``behind``: numbers and lanes of
        more rows to hold. Returns how many were marked as sent, and the lanes (of the affected ones) that are still
        this worker's."""
        sent = [rows[place] for place in verdict.sent]
        behind = [*behind, *verdict.behind]
        lanes = {row.lane for row in sent} | {aside.lane for aside in verdict.aside} | {lane for _, lane in behind}
        with self._dialect.transaction() as connection:
            mine = self._leases.still_mine(connection, lanes)
            reach("relay.fenced")
            seqs = [row.seq for row in sent if row.lane in mine]
            marked = self._mark_sent(connection, seqs, sa.true()) if seqs else 0
            aside = [
                {"the_seq": a.seq, "state": int(a.state), "attempts": a.attempts, "due_us": a.due_us, "error": a.error}
                for a in verdict.aside
                if a.lane in mine
            ]
            if aside:
                connection.execute(sa.update(trans_message).where(_c.seq == sa.bindparam("the_seq"), _OPEN), aside)
            if held := [seq for seq, lane in behind if lane in mine]:
                statement = sa.update(trans_message).where(self._among, _c.state == State.PENDING.value)
                connection.execute(statement.values(state=State.HELD.value), {"seqs": self._dialect.numbers(held)})
            free(connection, [key for key in verdict.freed if key[0] in mine])
            reach("relay.marking")
        return marked, mine

    def _mark_sent(
        self, connection: sa.Connection, seqs: Sequence[int], mine: sa.ColumnElement[bool], **owner: str
    ) -> int:
        bound = {"seqs": self._dialect.numbers(seqs), **owner}
        if self._deletes:
            return connection.execute(sa.delete(trans_message).where(self._among, _OVER, mine), bound).rowcount
        change = sa.update(trans_message).values(sent_us=self._dialect.now_us)
        pending = change.where(self._among, _OPEN, mine).values(state=State.SENT.value)
        marked = connection.execute(pending, bound).rowcount
        if marked < len(seqs):  # rows whose callback came before this mark: they stay DONE
            done = change.where(self._among, _c.state == State.DONE.value, mine)
            marked += connection.execute(done, bound).rowcount
        return marked


# Rows that were kept: those without a callback, those that were kept long enough


def purge(dialect: Dialect, connection: sa.Connection, before_us: int, states: Sequence[State]) -> int:
    """Delete up to PURGE_ROWS rows of each of those states that were sent at ``before_us`` or earlier; return how many.

    Two statements, because MySQL takes no LIMIT in a subquery; the second checks the states again. The time is a
    number, because an expression of the database's clock would not use the index.
    """
    purged = 0
    for state in states:
        old = sa.select(_c.seq).where(state_is(state), _c.sent_us.is_not(None), _c.sent_us <= before_us)
        seqs = list(connection.scalars(old.order_by(_c.sent_us).limit(PURGE_ROWS)))
        reach("relay.purging")
        if seqs:
            gone = sa.delete(trans_message).where(dialect.among(_c.seq, "seqs"), _c.state == state.value)
            purged += connection.execute(gone, {"seqs": dialect.numbers(seqs)}).rowcount
            reach("relay.purged")
    return purged


def give_up(dialect: Dialect, leases: Leases, rows: Sequence[Any]) -> int:
    """Move these SENT rows, which have no callback, to WAITING if this worker still has their lanes; return how
    many."""
    return _note(dialect, leases, rows, state=State.WAITING.value)


def count_resends(dialect: Dialect, leases: Leases, rows: Sequence[Any], codes: Codes) -> int:
    """Add an attempt to SENT rows that were sent again, where ``codes`` has a definite answer (OK or refused); return
    how many were OK.

    A refusal counts like a missing callback: the next attempt follows after the same interval.
    """
    known = (codes == Code.OK) | REFUSED[codes]
    tried = list(compress(rows, known.tolist()))
    _note(dialect, leases, tried, sent_us=dialect.now_us, attempts=_c.attempts + 1)
    return int(np.count_nonzero(codes == Code.OK))


def _note(dialect: Dialect, leases: Leases, rows: Sequence[Any], **values: Any) -> int:
    with dialect.transaction() as connection:
        mine = leases.still_mine(connection, {row.lane for row in rows})
        seqs = dialect.numbers([row.seq for row in rows if row.lane in mine])
        change = sa.update(trans_message).where(dialect.among(_c.seq, "seqs"), _c.state == State.SENT.value)
        return connection.execute(change.values(error=NO_CALLBACK, **values), {"seqs": seqs}).rowcount
