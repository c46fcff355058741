"""Compares a repeat with the message that it repeats: key, tag, properties and body (invariant I9).

A decision looks at ids alone, because the bodies are in the log. The holder of the log reads them for the decision's
:class:`~escrowmq.ledger.events.Repeats`, and rejects here rows with other content: such a row is another message under
a taken id, and nothing of it was stored.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from escrowmq.ledger.columns import codes as code
from escrowmq.ledger.columns.arrays import Bools, Int64s
from escrowmq.schemas import PRODUCED

CONTENT = ("key", "tag", "properties", "body")
"""What makes a message the same, beside its topic and id. Delays, queues and clocks may differ."""


def differing(given: pa.RecordBatch, stored: pa.RecordBatch) -> Bools:
    """Return which rows differ in their content; both have the columns of :data:`CONTENT` and one length."""
    other = np.zeros(given.num_rows, np.bool_)
    for name in CONTENT:
        one, two = given.column(name), stored.column(name)
        if one.equals(two):
            continue
        if pa.types.is_map(one.type):
            pairs = zip(one.to_pylist(), two.to_pylist(), strict=True)
            # None equals no properties, and their order does not matter.
            other |= np.fromiter((dict(a or ()) != dict(b or ()) for a, b in pairs), np.bool_, len(other))
        else:
            same = pc.fill_null(pc.equal(one, two), False).to_numpy(zero_copy_only=False)
            absent = pc.and_(pc.is_null(one), pc.is_null(two)).to_numpy(zero_copy_only=False)
            other |= ~(same | absent)
    return other


def refused(answer: pa.RecordBatch, rows: Int64s, status: int = code.MESSAGE_ID_TAKEN) -> pa.RecordBatch:
    """Return an answer of schema PRODUCED in which these rows are rejected with the code ``status``."""
    if not len(rows):
        return answer
    columns = [answer.column(name).to_numpy().copy() for name in ("code", "position", "queue", "offset")]
    for column, value in zip(columns, (status, -1, -1, -1), strict=True):
        column[rows] = value
    lost = np.zeros(answer.num_rows, np.bool_)
    lost[rows] = True
    transaction = answer.column("transaction")
    ids = pc.if_else(pa.array(lost), pa.scalar(None, transaction.type), transaction)
    return pa.RecordBatch.from_arrays([*map(pa.array, columns), ids], schema=PRODUCED)
