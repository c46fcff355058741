"""Checks messages against the broker's limits before the business transaction commits. Later there is no caller to
raise an error to.

The limits come from the same table of settings and environment variables (``ESCROWMQ_MAX_BODY_BYTES``, ...); a caller
whose broker has others passes its :class:`~escrowmq.settings.BrokerSettings`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from escrowmq.client.producing.outgoing import OutgoingCodec, one_batch
from escrowmq.errors import Code, Misuse, Rejected
from escrowmq.message.limits import Limits, refusals
from escrowmq.message.names import check_name
from escrowmq.message.row import Checker, OutgoingRow
from escrowmq.settings import BrokerSettings

_ELSEWHERE = "a row of the table has no place for it: the relay's target chooses queues, and no half message is made"


class Content(NamedTuple):
    """A message as the table keeps it. ``properties``: a JSON object, or None."""

    topic: str
    body: bytes
    key: str | None
    tag: str | None
    properties: str | None
    id: bytes
    delay_us: int


@cache
def checker(settings: BrokerSettings | None) -> Checker:
    """The checker of a broker's limits; None: the defaults and the environment."""
    return Checker(Limits.of(dataclasses.asdict(settings or BrokerSettings.load())))


def contents(rows: Sequence[OutgoingRow]) -> list[Content]:
    """Checked rows as they are stored; ids are made where none is given.

    Raises Misuse(BAD_ARGUMENT) for what a table cannot hold: a queue, a ``check_immunity``, a NUL character.
    """
    for row in rows:
        if row.queue != -1 or row.immunity_us:
            raise Misuse(Code.BAD_ARGUMENT, "a queue or check_immunity was given", _ELSEWHERE)
        if "\0" in (row.key or "") or "\0" in (row.tag or ""):
            raise _nul()
    ids = complete_ids([row.message_id for row in rows])
    return [
        Content(row.topic, row.body, row.key, row.tag, _json(row.properties), identity, row.delay_us)
        for row, identity in zip(rows, ids, strict=True)
    ]


def columns(data: pa.RecordBatch | pa.Table, settings: BrokerSettings | None) -> list[Content]:
    """Contents from columns named as in :data:`escrowmq.schemas.OUTGOING`; only ``topic`` and ``body`` must be there.

    Raises Rejected naming the first row that is over a limit, Rejected(BAD_BATCH) for wrong columns, or as
    :func:`contents`.
    """
    if not data.num_rows:
        return []
    batch = _codec.columns(one_batch(data) if isinstance(data, pa.Table) else data)
    for topic in pc.unique(batch.column("topic")).to_pylist():
        check_name(topic, Code.BAD_TOPIC_NAME)
    codes = refusals(batch, checker(settings).limits)
    if codes.any():
        first = int(np.flatnonzero(codes)[0])
        others = np.count_nonzero(codes == codes[first]) - 1
        raise Rejected(Code(codes[first]), f"row {first} of the batch is over the limit, and {others} more")
    half = batch.column("immunity_us").to_numpy().any() or batch.column("transaction").null_count < batch.num_rows
    if half or (batch.column("queue").to_numpy() != -1).any():
        raise Misuse(Code.BAD_ARGUMENT, "a queue, immunity_us or transaction was given", _ELSEWHERE)
    if any(pc.any(pc.match_substring(batch.column(name), "\0")).as_py() for name in ("key", "tag")):
        raise _nul()
    topics, bodies, keys, tags, pairs, ids, delays = (
        batch.column(name).to_pylist()
        for name in ("topic", "body", "key", "tag", "properties", "message_id", "delay_us")
    )
    return list(map(Content._make, zip(topics, bodies, keys, tags, map(_json, pairs), ids, delays, strict=True)))


def _json(pairs: Iterable[tuple[str, str]] | None) -> str | None:
    return json.dumps(dict(pairs), ensure_ascii=False, separators=(",", ":")) if pairs else None


def _nul() -> Misuse:
    return Misuse(Code.BAD_ARGUMENT, "a key or tag has a NUL character", "PostgreSQL cannot store one in a text")


# Ids are one series per process.


def complete_ids(given: Sequence[bytes | None]) -> list[bytes]:
    """The ids given, with new ones in the place of None. Thread-safe."""
    raw = _codec.ids.complete(given)
    return [raw[at : at + 16] for at in range(0, len(raw), 16)]


_codec = OutgoingCodec()
