"""Writes the results of a batch into the outbox table, and takes rows that were kept through their later states.

If all was sent, that is one statement, a transaction of its own, which only touches rows of lanes that are leased at
that moment. Anything else is one transaction that holds the worker's lanes while it writes, so that a worker that lost
them changes nothing.
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
from escrowmq.outbox.relay.verdicts import Aside, Verdict
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
"""Only such rows are marked: a callback may have made one DONE already, a person may have discarded one."""
_OVER = _in_state(State.PENDING, State.RETRYING, State.DONE)
"""What is deleted after its OK."""


class Marker:
    """Marks of one worker. ``deletes``: what was sent leaves the table, unless it is to be kept."""

    def __init__(self, dialect: Dialect, leases: Leases, deletes: bool) -> None:
        self._dialect = dialect
        self._leases = leases
        self._deletes = deletes
        self._among = dialect.among(_c.seq, "seqs")

    def all_sent(self, connection: sa.Connection, rows: Sequence[Any]) -> int:
        """Every row was sent, nothing else happened; how many were marked (fewer if lanes were lost)."""
        return self._mark_sent(connection, [row[0] for row in rows], self._leases.mine(), owner=self._leases.owner)

    def mixed(self, rows: Sequence[Any], verdict: Verdict, behind: Sequence[tuple[int, int]]) -> tuple[int, set[int]]:
        """Return some were not sent, or keys are freed or held: how many were marked as sent, and the lanes (of
        those concerned) that are still this worker's."""
        sent = [rows[place] for place in verdict.sent]
        behind = [*behind, *verdict.behind]
        lanes = {row.lane for row in sent} | {aside.lane for aside in verdict.aside} | {lane for _, lane in behind}
        with self._dialect.transaction() as connection:
            mine = self._leases.still_mine(connection, lanes)
            reach("relay.fenced")
            seqs = [row.seq for row in sent if row.lane in mine]
            marked = self._mark_sent(connection, seqs, sa.true()) if seqs else 0
            if aside := [_make_aside(one) for one in verdict.aside if one.lane in mine]:
                connection.execute(sa.update(trans_message).where(_c.seq == sa.bindparam("the_seq"), _OPEN), aside)
            held = [seq for seq, lane in behind if lane in mine]
            if held:
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
        if marked < len(seqs):  # callbacks that were quicker than this mark: the rows stay DONE, and have been sent now
            done = change.where(self._among, _c.state == State.DONE.value, mine)
            marked += connection.execute(done, bound).rowcount
        return marked


def _make_aside(row: Aside) -> dict[str, Any]:
    values = {"state": int(row.state), "attempts": row.attempts, "due_us": row.due_us, "error": row.error}
    return {"the_seq": row.seq, **values}


# Rows that were kept: those without a callback, those that were kept long enough


def purge(dialect: Dialect, connection: sa.Connection, before_us: int, states: Sequence[State]) -> int:
    """Delete up to PURGE_ROWS rows of those states that were durably sent before that time; how many.

    Two statements, because MySQL takes no LIMIT in a subquery. The states are asked again in the second. The time is a
    number and no expression: a database's clock moves, and so would not be looked up in the index.
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
    """Return those SENT rows wait for a person now: no callback ever came. How many."""
    return _note(dialect, leases, rows, state=State.WAITING.value)


def sent_again(dialect: Dialect, leases: Leases, rows: Sequence[Any], codes: Codes) -> int:
    """Note a try on those SENT rows that got a definite answer; how many were OK.

    A refusal counts like a missing callback: the next one comes after the same interval.
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
