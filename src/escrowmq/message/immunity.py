"""RocketMQ's user property ``CheckImmunityTimeInSeconds``: the message contains the time of its first check-back.

Rules, for half messages (in a plain message it is an ordinary property):

1. Its value is a whole number of seconds as text, at most ``half_retention``; ``"0"`` sets nothing, like
   ``check_immunity=0``.
2. ``check_immunity`` has the same meaning. Both may be given if they agree.
3. A violation is rejected with BAD_IMMUNITY; RocketMQ ignores unreadable values.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from escrowmq.errors import Code
from escrowmq.message.limits import Int64s, RowLimits, UInt8s

PROPERTY = "CheckImmunityTimeInSeconds"


def read_immunities(batch: pa.RecordBatch, limits: RowLimits) -> tuple[Int64s, UInt8s]:
    """Return the time (µs) before the first check-back of each row (0: not set), and its code, OK or BAD_IMMUNITY."""
    times, properties = batch.column("immunity_us").to_numpy(), batch.column("properties")
    codes = np.zeros(batch.num_rows, np.uint8)
    if properties.null_count == len(properties):
        return times, codes
    rows, values = find_property(properties)
    if not len(rows):
        return times, codes
    readable = np.asarray(pc.match_substring_regex(values, r"^[0-9]{1,9}\z"))
    requested = np.zeros(len(rows), np.int64)
    requested[readable] = np.asarray(values.filter(pa.array(readable)).cast(pa.int64())) * 1_000_000
    given = times[rows]
    wrong = ~readable | (requested > limits.half_retention_us) | ((given > 0) & (requested > 0) & (given != requested))
    codes[rows[wrong]] = Code.BAD_IMMUNITY
    times = times.copy()
    times[rows] = np.maximum(given, requested)
    return times, codes


def find_property(properties: pa.Array) -> tuple[Int64s, pa.Array]:
    """Return the rows with the property, and its values. If a row has it twice, the first counts."""
    hits = np.flatnonzero(np.asarray(pc.equal(properties.keys, PROPERTY)))
    if not len(hits):
        return hits, pa.array([], pa.utf8())
    # the child arrays are whole, also for a slice, so the offsets address them
    bounds = np.frombuffer(properties.buffers()[1], np.int32, len(properties) + 1, 4 * properties.offset)
    rows = np.searchsorted(bounds, hits, side="right") - 1
    inside = (hits >= bounds[0]) & (hits < bounds[-1])
    inside[inside] = np.asarray(properties.is_valid())[rows[inside]]
    rows, first = np.unique(rows[inside], return_index=True)
    return rows, properties.items.take(pa.array(hits[inside][first]))
