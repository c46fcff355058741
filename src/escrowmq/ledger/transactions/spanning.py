"""The extent of transactions: the queues of their messages, and the piece of the log from their first message to their
last.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from escrowmq.ledger.columns.arrays import Int32s, Int64s
from escrowmq.ledger.transactions.table import TransactionTable


def queue_ids_of(table: TransactionTable, positions: Int64s, owners: Int64s) -> Int64s:
    """Queue ids of half messages, their transactions being ``owners``."""
    ids = table.column("queue_id", owners).astype(np.int64)
    hanging = table.column("first", owners) != positions
    ids[hanging] = table.joined["queue_id"][np.searchsorted(table.joined["position"], positions[hanging])]
    return ids


def halves(table: TransactionTable) -> tuple[Int64s, Int32s]:
    """Return the positions and queue ids of all half messages."""
    parts = ((table.rows["first"], table.joined["position"]), (table.rows["queue_id"], table.joined["queue_id"]))
    positions, queue_ids = map(np.concatenate, parts)
    return positions, queue_ids


def undecided_in(table: TransactionTable, queue_ids: Sequence[int]) -> tuple[Int64s, int]:
    """Return ordinals of OPEN and PARKED transactions that have messages for these queues, rising, and how many
    messages these are."""
    ordinals = table.undecided() + table.rows.first
    index, _, of_message, *_ = table.messages_of(ordinals)
    chosen = index[np.isin(of_message, queue_ids)]
    return ordinals[np.unique(chosen)], len(chosen)


def whole_below(table: TransactionTable, position: int) -> int:
    """Return the highest position up to ``position`` that parts no transaction: each lies wholly below it, or
    wholly not."""
    if not len(table.joined):
        return position
    firsts = table.column("first", table.joined["owner"]).astype(np.int64)
    ends = table.joined["position"]
    if not ((firsts < position) & (ends >= position)).any():
        return position
    order = np.argsort(firsts, kind="stable")
    firsts, reached = firsts[order], np.maximum.accumulate(ends[order])
    before = np.searchsorted(firsts, firsts, side="left")  # what begins before each
    parts_none = (before == 0) | (reached[before - 1] < firsts)
    return int(firsts[parts_none & (firsts <= position)][-1])
