"""Writes the result of a batch into the table.

If all was sent, that is one statement, a transaction of its own, which only touches rows of lanes that are leased at that moment. Anything
else is one transaction that holds the worker's lanes while it writes, so that a worker that lost them changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from escrowmq.outbox.dialects import Dialect
from escrowmq.outbox.relay.holding import free
from escrowmq.outbox.relay.leases import Leases
from escrowmq.outbox.relay.verdicts import Verdict
from escrowmq.outbox.tables import State, trans_message
from escrowmq.platform.failpoints import reach

_c = trans_message.c


def _in_state(*states: State) -> sa.ColumnElement[bool]:
    return _c.state.in_(
        [sa.literal_column(str(int(state))) for state in states]
    )  # literals: also for many rows at once


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
        bound = {"seqs": self._dialect.numbers([row[0] for row in rows]), "owner": self._leases.owner}
        return self._sent(connection, self._leases.mine(), bound)

    def mixed(self, rows: Sequence[Any], verdict: Verdict, behind: Sequence[tuple[int, int]]) -> tuple[int, set[int]]:
        """Some were not sent, or keys are freed or held: how many were marked as sent, and the lanes (of those concerned) that are still this worker's."""
        sent = [rows[place] for place in verdict.sent]
        behind = [*behind, *verdict.behind]
        lanes = {row.lane for row in sent} | {aside.lane for aside in verdict.aside} | {lane for _, lane in behind}
        with self._dialect.transaction() as connection:
            mine = self._leases.still_mine(connection, lanes)
            reach("relay.fenced")
            seqs = [row.seq for row in sent if row.lane in mine]
            marked = self._sent(connection, sa.true(), {"seqs": self._dialect.numbers(seqs)}) if seqs else 0
            self._put_aside(connection, verdict, mine)
            held = [seq for seq, lane in behind if lane in mine]
            if held:
                statement = sa.update(trans_message).where(self._among, _c.state == State.PENDING.value)
                connection.execute(statement.values(state=State.HELD.value), {"seqs": self._dialect.numbers(held)})
            free(connection, [key for key in verdict.freed if key[0] in mine])
            reach("relay.marking")
        return marked, mine

    def _sent(self, connection: sa.Connection, mine: sa.ColumnElement[bool], bound: dict[str, Any]) -> int:
        if self._deletes:
            gone = sa.delete(trans_message).where(self._among, _OVER, mine)
            return connection.execute(gone, bound).rowcount
        marked = connection.execute(
            sa.update(trans_message)
            .where(self._among, _OPEN, mine)
            .values(state=State.SENT.value, sent_us=self._dialect.now_us),
            bound,
        ).rowcount
        return marked + self._sent_and_done(connection, mine, bound) if marked < _count(bound) else marked

    def _sent_and_done(self, connection: sa.Connection, mine: sa.ColumnElement[bool], bound: dict[str, Any]) -> int:
        """Callbacks that were quicker than this mark: the rows stay DONE, and have been sent now."""
        done = sa.update(trans_message).where(self._among, _c.state == State.DONE.value, mine)
        return connection.execute(done.values(sent_us=self._dialect.now_us), bound).rowcount

    def _put_aside(self, connection: sa.Connection, verdict: Verdict, mine: set[int]) -> None:
        rows = [
            {
                "the_seq": aside.seq,
                "new_state": int(aside.state),
                "new_attempts": aside.attempts,
                "new_due_us": aside.due_us,
                "new_error": aside.error,
            }
            for aside in verdict.aside
            if aside.lane in mine
        ]
        if rows:
            statement = sa.update(trans_message).where(_c.seq == sa.bindparam("the_seq"), _OPEN)
            connection.execute(
                statement.values(
                    state=sa.bindparam("new_state"),
                    attempts=sa.bindparam("new_attempts"),
                    due_us=sa.bindparam("new_due_us"),
                    error=sa.bindparam("new_error"),
                ),
                rows,
            )


def _count(bound: dict[str, Any]) -> int:
    seqs = bound["seqs"]
    return seqs.count(",") + 1 if isinstance(seqs, str) else len(seqs)
