"""The place of every stored message, by its position: for snapshots of formats 1 and 2, whose message ids had no
topics.
"""

from __future__ import annotations

import numpy as np

from escrowmq.ledger.columns.arrays import Bools, Int32s, Int64s, locate
from escrowmq.ledger.messages.dedup import Places
from escrowmq.ledger.queues.delays import Delays
from escrowmq.ledger.queues.topics import Topics
from escrowmq.ledger.transactions.spanning import halves as all_halves
from escrowmq.ledger.transactions.table import TransactionTable


def places_of(topics: Topics, delays: Delays, transactions: TransactionTable) -> Places:
    """Return what a restored ledger knows of positions: the topic (-1: removed by retention) and whether it was
    half."""
    queues = [(queue.positions(queue.head, queue.end), queue_id) for queue_id, queue in enumerate(topics.queues)]
    plain, plain_ids = [p for p, _ in queues], [np.full(len(p), queue_id) for p, queue_id in queues]
    waiting, waiting_ids = delays.held()
    halves, half_ids = all_halves(transactions)
    positions = np.concatenate([halves, waiting, *plain]).astype(np.int64)
    queue_ids = np.concatenate([half_ids, waiting_ids, *plain_ids]).astype(np.int32)
    rising, first = np.unique(positions, return_index=True)  # the first of equals: a half message before its place
    of_queue = np.broadcast_to(topics.numbers_of_queues(queue_ids[first]), len(first))
    half = first < len(halves)

    def places(wanted: Int64s) -> tuple[Int32s, Bools]:
        at = locate(rising, wanted)
        known = at >= 0
        found, kinds = np.full(len(wanted), -1, np.int32), np.zeros(len(wanted), np.bool_)
        found[known], kinds[known] = of_queue[at[known]], half[at[known]]
        return found, kinds

    return places
