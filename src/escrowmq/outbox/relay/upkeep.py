"""Upkeep of rows that were sent: those without a callback are sent again, those that were kept long enough are deleted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa

from escrowmq.errors import Code
from escrowmq.outbox.dialects import Dialect
from escrowmq.outbox.relay.leases import Leases
from escrowmq.outbox.relay.reading import state_is
from escrowmq.outbox.tables import State, trans_message
from escrowmq.outbox.targets.seam import REFUSED
from escrowmq.platform.failpoints import reach

_c = trans_message.c
PURGE_ROWS = 2000
"""Rows of one purge: locks are short, and other work goes on between two."""
NO_CALLBACK = "sent, and no callback came"


def purge(dialect: Dialect, connection: sa.Connection, before_us: int, states: Sequence[State]) -> int:
    """Delete up to PURGE_ROWS rows of those states that were durably sent before that time; how many.

    Two statements, because MySQL takes no LIMIT in a subquery. The states are asked again in the second. The time is a number
    and no expression: a database's clock moves, and so would not be looked up in the index.
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
    """Those SENT rows wait for a person now: no callback ever came. How many."""
    with dialect.transaction() as connection:
        mine = leases.still_mine(connection, {row.lane for row in rows})
        seqs = [row.seq for row in rows if row.lane in mine]
        waiting = sa.update(trans_message).where(dialect.among(_c.seq, "seqs"), _c.state == State.SENT.value)
        bound = {"seqs": dialect.numbers(seqs)}
        return connection.execute(waiting.values(state=State.WAITING.value, error=NO_CALLBACK), bound).rowcount


def sent_again(dialect: Dialect, leases: Leases, rows: Sequence[Any], codes: npt.NDArray[np.uint8]) -> int:
    """Note a try on those SENT rows that got a definite answer; how many were OK.

    A refusal counts like a missing callback: the next one comes after the same interval.
    """
    known = (codes == Code.OK) | REFUSED[codes]
    with dialect.transaction() as connection:
        mine = leases.still_mine(connection, {row.lane for row in rows})
        seqs = [row.seq for row, counts in zip(rows, known.tolist(), strict=True) if counts and row.lane in mine]
        again = sa.update(trans_message).where(dialect.among(_c.seq, "seqs"), _c.state == State.SENT.value)
        bound = {"seqs": dialect.numbers(seqs)}
        connection.execute(again.values(sent_us=dialect.now_us, attempts=_c.attempts + 1, error=NO_CALLBACK), bound)
    return int(np.count_nonzero(codes == Code.OK))
