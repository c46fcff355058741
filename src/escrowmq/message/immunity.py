"""RocketMQ's user property ``CheckImmunityTimeInSeconds``: the message itself says when it is asked about first.

Rules, for half messages (of a plain message it is a property like any other):

1. Its value is a whole number of seconds as text, at most ``half_retention``; ``"0"`` is no wish, as
   ``check_immunity=0``.
2. ``check_immunity`` says the same thing. Both may be given if they agree.
3. What breaks a rule is refused with BAD_IMMUNITY: RocketMQ passes over what it cannot read.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from escrowmq.errors import Code
from escrowmq.message.limits import Int64s, RowLimits, UInt8s

PROPERTY = "CheckImmunityTimeInSeconds"


def immunities(batch: pa.RecordBatch, limits: RowLimits) -> tuple[Int64s, UInt8s]:
    """Of a batch of schema OUTGOING: microseconds before the first question about each row (0: nothing is said), and
    one code per row, OK or BAD_IMMUNITY."""
    times, properties = batch.column("immunity_us").to_numpy(), batch.column("properties")
    codes = np.zeros(batch.num_rows, np.uint8)
    if properties.null_count == len(properties):
        return times, codes
    rows, values = named(properties)
    if not len(rows):
        return times, codes
    readable = np.asarray(pc.match_substring_regex(values, r"^[0-9]{1,9}\z"))
    wished = np.zeros(len(rows), np.int64)
    wished[readable] = np.asarray(values.filter(pa.array(readable)).cast(pa.int64())) * 1_000_000
    given = times[rows]
    wrong = ~readable | (wished > limits.half_retention_us) | ((given > 0) & (wished > 0) & (given != wished))
    codes[rows[wrong]] = Code.BAD_IMMUNITY
    times = times.copy()
    times[rows] = np.maximum(given, wished)
    return times, codes


def named(properties: pa.Array) -> tuple[Int64s, pa.Array]:
    """Return the rows that have the property, and its values. A row that names it twice counts by the first."""
    hits = np.flatnonzero(np.asarray(pc.equal(properties.keys, PROPERTY)))
    if not len(hits):
        return hits, pa.array([], pa.utf8())
    # the child arrays are whole, whatever slice this is, so the offsets address them
    bounds = np.frombuffer(properties.buffers()[1], np.int32, len(properties) + 1, 4 * properties.offset)
    rows = np.searchsorted(bounds, hits, side="right") - 1
    inside = (hits >= bounds[0]) & (hits < bounds[-1])
    inside[inside] = np.asarray(properties.is_valid())[rows[inside]]
    rows, first = np.unique(rows[inside], return_index=True)
    return rows, properties.items.take(pa.array(hits[inside][first]))
