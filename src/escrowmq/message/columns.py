"""Conversion of outgoing rows to a batch of schema OUTGOING."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from escrowmq import schemas
from escrowmq.message.ids import column_of

_ZEROS = pa.array(np.zeros(1 << 16, np.int64))
_ANY_QUEUE = pa.array(np.full(1 << 16, -1, np.int32))


def outgoing_batch(rows: Sequence[tuple[Any, ...]], ids: bytes) -> pa.RecordBatch:
    """Build a batch from rows (at least one :class:`~escrowmq.message.row.OutgoingRow`) and their concatenated ids."""
    n = len(rows)
    topics, bodies, keys, tags, pairs, _, queues, born, delays, immunities, joins = zip(*rows, strict=True)
    arrays = [
        pa.array(topics, pa.utf8()),
        optional(keys, pa.utf8()),
        optional(tags, pa.utf8()),
        optional(pairs, schemas.PROPERTIES),
        pa.array(bodies, pa.binary()),
        column_of(ids),
        _ANY_QUEUE[:n] if n <= 1 << 16 and min(queues) == -1 == max(queues) else pa.array(queues, pa.int32()),
        pa.array(born, pa.int64()),
        _numbers(delays),
        _numbers(immunities),
        optional(joins, schemas.ID),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schemas.OUTGOING)


def optional(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Build a column of values that may be None, and often all are."""
    return pa.nulls(len(values), kind) if values.count(None) == len(values) else pa.array(values, kind)


def _numbers(values: Sequence[int]) -> pa.Array:
    return pa.array(values, pa.int64()) if any(values) or len(values) > 1 << 16 else _ZEROS[: len(values)]
