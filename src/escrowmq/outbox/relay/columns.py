"""Rows of the table to an OUTGOING batch, column by column."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from escrowmq import schemas
from escrowmq.outbox.tables import trans_message

_c = trans_message.c
COLUMNS = (
    _c.seq, _c.lane, _c.state, _c.attempts, _c.id, _c.topic, _c.key, _c.tag, _c.properties, _c.body, _c.created_us, _c.delay_us,
)  # fmt: skip


class Row(NamedTuple):
    """What the driver gives, in the order of :data:`COLUMNS`."""

    seq: int
    lane: int
    state: int
    attempts: int
    id: bytes
    topic: str
    key: str | None
    tag: str | None
    properties: str | None
    body: bytes
    created_us: int
    delay_us: int


def outgoing(rows: Sequence[Any]) -> pa.RecordBatch:
    """The batch of at least one row of the shape of :class:`Row`."""
    n = len(rows)
    _, _, _, _, ids, topics, keys, tags, properties, bodies, created, delays = zip(*rows, strict=True)
    zeros = pa.array(np.zeros(n, np.int64))
    arrays = [
        pa.array(topics, pa.utf8()),
        pa.array(keys, pa.utf8()),
        pa.array(tags, pa.utf8()),
        _maps(properties),
        pa.array(bodies, pa.binary()),
        pa.array(ids, schemas.ID),
        pa.array(np.full(n, -1, np.int32)),
        pa.array(created, pa.int64()),
        pa.array(delays, pa.int64()),
        zeros,
        pa.nulls(n, schemas.ID),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schemas.OUTGOING)


def _maps(texts: Sequence[str | None]) -> pa.Array:
    given = [text for text in texts if text is not None]
    if not given:
        return pa.nulls(len(texts), schemas.PROPERTIES)
    objects: list[dict[str, str]] = json.loads(f"[{','.join(given)}]")  # one call for all
    sizes = iter([len(pairs) for pairs in objects])
    ends = list(accumulate((0 if text is None else next(sizes) for text in texts), initial=0))
    offsets = pa.array(
        [None if text is None else end for text, end in zip(texts, ends, strict=False)] + [ends[-1]], pa.int32()
    )
    names = pa.array(list(chain.from_iterable(objects)), pa.utf8())
    values = pa.array(list(chain.from_iterable(pairs.values() for pairs in objects)), pa.utf8())
    return pa.MapArray.from_arrays(offsets, names, values)
