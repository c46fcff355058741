"""Causes for which a transaction waits."""

from __future__ import annotations

from typing import Final

import numpy as np

from escrowmq.ledger.columns.arrays import Int64s
from escrowmq.ledger.ledger import Ledger
from escrowmq.ledger.transactions import policies
from escrowmq.ledger.transactions.table import OPEN, PARKED

CAUSES: Final = ("not_due", "due", "unanswered", "asked_out", "aged", "decided")
"""Why a transaction waits: its first question is not due; one is due, and nobody was there to be asked; it was asked
about, and another question or the end of waiting comes; it is parked after its last question; it is parked before that
(``half_retention``, or it cannot be read).
"""
_NOT_DUE, _DUE, _UNANSWERED, _ASKED_OUT, _AGED, _DECIDED = range(len(CAUSES))


def causes_of(ledger: Ledger, rows: Int64s, now_us: int) -> Int64s:
    """Return why each transaction waits, by row number, as an index of :data:`CAUSES`."""
    table = ledger.transactions
    state, checks, due_us = (table.rows[name][rows] for name in ("state", "checks", "due_us"))
    most = np.full(len(rows), policies.asking(None, ledger.rules).most, np.int64)
    if ledger.sessions.own:
        groups = table.groups_of(rows + table.rows.first)
        for group, own in ledger.sessions.own.items():
            most[groups == group] = policies.asking(own, ledger.rules).most
    spent = checks >= most
    of_open = np.where(~spent & (due_us <= now_us), _DUE, np.where(checks > 0, _UNANSWERED, _NOT_DUE))
    of_parked = np.where(spent, _ASKED_OUT, _AGED)
    return np.where(state == OPEN, of_open, np.where(state == PARKED, of_parked, _DECIDED))
