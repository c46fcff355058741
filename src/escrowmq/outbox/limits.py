"""What the broker would refuse is refused before the business transaction commits: afterwards nobody could tell the caller.

The broker's own limits, from the same table of settings and environment variables (``ESCROWMQ_MAX_BODY_BYTES``, ...); a caller
whose broker has others passes its :class:`~escrowmq.settings.BrokerSettings`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from escrowmq.client.producing.outgoing import Checker, Limits, MessageIds, OutgoingCodec, check_name
from escrowmq.errors import Code, Misuse, Rejected
from escrowmq.settings import BrokerSettings

Content = tuple[str, bytes, str | None, str | None, str | None, bytes, int]
"""Topic, body, key, tag, properties (a JSON object, or None), message id, delay in microseconds."""

_ELSEWHERE = "a row of the table has no place for it: the relay's target chooses queues, and no half message is made"


@cache
def checker(settings: BrokerSettings | None) -> Checker:
    """The checker of a broker's limits; None: the defaults and the environment."""
    return Checker(Limits.of(dataclasses.asdict(settings or BrokerSettings.load())))


def contents(rows: Sequence[tuple[Any, ...]]) -> list[Content]:
    """Checked rows of :class:`~escrowmq.client.producing.outgoing.Checker` as they are stored; ids are made where none is given.

    Raises Misuse(BAD_ARGUMENT) for what a table cannot hold: a queue, a ``check_immunity``, a NUL character.
    """
    for row in rows:
        if row[6] != -1 or row[9]:
            raise Misuse(Code.BAD_ARGUMENT, "a queue or check_immunity was given", _ELSEWHERE)
        if (row[2] is not None and "\0" in row[2]) or (row[3] is not None and "\0" in row[3]):
            raise _nul()
    made = iter(_new_ids(sum(row[5] is None for row in rows)))
    return [
        (row[0], row[1], row[2], row[3], _json(row[4]), next(made) if row[5] is None else row[5], row[8])
        for row in rows
    ]


def columns(data: pa.RecordBatch | pa.Table, settings: BrokerSettings | None) -> list[Content]:
    """Contents from columns named as in :data:`escrowmq.schemas.OUTGOING`; only ``topic`` and ``body`` must be there.

    Raises Rejected naming the limit and the first row over it, Rejected(BAD_BATCH) for wrong columns, or as
    :func:`contents`.
    """
    if isinstance(data, pa.Table):
        data = pa.RecordBatch.from_struct_array(pa.concat_arrays(data.to_struct_array().chunks)) if len(data) else None
    if data is None or not data.num_rows:
        return []
    with _lock:
        batch = _codec.columns(data)
    limits = checker(settings).limits
    for topic in pc.unique(batch.column("topic")).to_pylist():
        check_name(topic, Code.BAD_TOPIC_NAME)
    _refuse_longer(batch, "body", limits.max_body_bytes, Code.BODY_TOO_LARGE)
    _refuse_longer(batch, "key", limits.max_key_bytes, Code.KEY_TOO_LARGE)
    _refuse_longer(batch, "tag", limits.max_tag_bytes, Code.TAG_TOO_LARGE)
    _refuse(pc.greater(_pair_bytes(batch), limits.max_properties_bytes), Code.PROPERTIES_TOO_LARGE)
    delays = batch.column("delay_us")
    _refuse(pc.or_(pc.less(delays, 0), pc.greater(delays, round(limits.max_delay * 1e6))), Code.BAD_DELAY)
    half = batch.column("immunity_us").to_numpy().any() or batch.column("transaction").null_count < batch.num_rows
    if half or (batch.column("queue").to_numpy() != -1).any():
        raise Misuse(Code.BAD_ARGUMENT, "a queue, immunity_us or transaction was given", _ELSEWHERE)
    if any(pc.any(pc.match_substring(batch.column(name), "\0")).as_py() for name in ("key", "tag")):
        raise _nul()
    topics, bodies, keys, tags, pairs, ids, waits = (
        batch.column(name).to_pylist()
        for name in ("topic", "body", "key", "tag", "properties", "message_id", "delay_us")
    )
    return list(zip(topics, bodies, keys, tags, map(_json, pairs), ids, waits, strict=True))


def _refuse_longer(batch: pa.RecordBatch, name: str, limit: int, code: Code) -> None:
    _refuse(pc.greater(pc.binary_length(batch.column(name)), limit), code)


def _refuse(over: pa.Array, code: Code) -> None:
    rows = np.flatnonzero(pc.fill_null(over, False).to_numpy(zero_copy_only=False))
    if len(rows):
        raise Rejected(code, f"row {rows[0]} of the batch is over the limit, and {len(rows) - 1} more")


def _pair_bytes(batch: pa.RecordBatch) -> pa.Array:
    """Bytes of names and values of each row's properties."""
    pairs = batch.column("properties")
    values = pc.fill_null(pc.binary_length(pairs.items), 0)
    ends = np.concatenate([[0], np.cumsum(pc.add(pc.binary_length(pairs.keys), values).to_numpy())])
    offsets = pairs.offsets.to_numpy()
    return pa.array(ends[offsets[1:]] - ends[offsets[:-1]])


def _json(pairs: Iterable[tuple[str, str]] | None) -> str | None:
    return json.dumps(dict(pairs), ensure_ascii=False, separators=(",", ":")) if pairs else None


def _nul() -> Misuse:
    return Misuse(Code.BAD_ARGUMENT, "a key or tag has a NUL character", "PostgreSQL cannot store one in a text")


# Ids: 8 random bytes of this process, then a counter; a forked child begins a series of its own.

_lock = threading.Lock()


def _new_ids(count: int) -> list[bytes]:
    with _lock:
        made = _ids.take(count).tobytes()
    return [made[at : at + 16] for at in range(0, 16 * count, 16)]


def _renew() -> None:
    global _lock, _ids, _codec
    _lock, _ids, _codec = threading.Lock(), MessageIds(), OutgoingCodec()


_ids = MessageIds()
_codec = OutgoingCodec()
os.register_at_fork(after_in_child=_renew)
