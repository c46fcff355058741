"""Whether a repeat is the message that it repeats: key, tag, properties and body, row against row (invariant I9).

Deciding looks at ids alone, because the bodies are in the log. Whoever holds the log reads there what a decision's
:class:`~escrowmq.ledger.events.Repeats` name, and refuses here the rows that say something else: such a row is another
message under a taken id, and nothing of it was stored.
"""

from __future__ import annotations

from typing import Any

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
            other |= np.fromiter((_properties(a) != _properties(b) for a, b in pairs), np.bool_, len(other))
        else:
            same = pc.fill_null(pc.equal(one, two), False).to_numpy(zero_copy_only=False)
            absent = pc.and_(pc.is_null(one), pc.is_null(two)).to_numpy(zero_copy_only=False)
            other |= ~(same | absent)
    return other


def _properties(items: list[tuple[str, Any]] | None) -> dict[str, Any]:
    """None are the same as no properties, and their order says nothing."""
    return dict(items or ())


def refused(answer: pa.RecordBatch, rows: Int64s, status: int = code.MESSAGE_ID_TAKEN) -> pa.RecordBatch:
    """Return an answer of schema PRODUCED in which these rows are refused."""
    if not len(rows):
        return answer
    columns = {name: answer.column(name).to_numpy().copy() for name in ("code", "position", "queue", "offset")}
    columns["code"][rows] = status
    for name in ("position", "queue", "offset"):
        columns[name][rows] = -1
    keep = np.ones(answer.num_rows, np.bool_)
    keep[rows] = False
    transaction = answer.column("transaction")
    ids = pc.if_else(pa.array(keep), transaction, pa.scalar(None, transaction.type))
    return pa.RecordBatch.from_arrays([*map(pa.array, columns.values()), ids], schema=PRODUCED)
