"""Preparation of one task's rows as half messages: a few transactions for many rows. Imports no Spark.

A row goes to the broker of its key, or of its content if it has no key: a repeat of the batch must reach the same
broker (see :mod:`escrowmq.client.producing.writers`).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from escrowmq.client.links.router import broker_of
from escrowmq.client.producing.producer import Producer
from escrowmq.errors import Code, Misuse, Rejected, error
from escrowmq.message.immunity import find_property
from escrowmq.platform.times import to_us
from escrowmq.schemas import ID
from escrowmq.settings import nearest

COLUMNS = {
    "body": ("binary", "string"),
    "key": ("string",),
    "tag": ("string",),
    "properties": ("map<string,string>",),
    "topic": ("string",),
}
"""The columns that a written DataFrame may have, with their Spark types. ``body`` is required."""

MOST = 10_000
"""Maximum number of rows per transaction; less if the brokers have a lower limit."""


def check_columns(types: Mapping[str, str], topic: str | None) -> None:
    """Raise Misuse(BAD_SETTING), naming the column, for a DataFrame that cannot be written. ``types`` are simple names
    of Spark types."""
    for name, kind in types.items():
        if name not in COLUMNS:
            wanted = nearest(name, list(COLUMNS)) or f"columns: {', '.join(COLUMNS)}; select or rename the others away"
            raise Misuse(Code.BAD_SETTING, f"no column {name!r} in a message", wanted)
        if kind not in COLUMNS[name]:
            raise Misuse(Code.BAD_SETTING, f"column {name!r} is {kind}, not {' or '.join(COLUMNS[name])}", "cast it")
    if "body" not in types:
        hint = "name the bytes to send so: col.alias('body')"
        raise Misuse(Code.BAD_SETTING, "the DataFrame has no column 'body'", hint)
    if topic is None and "topic" not in types:
        raise Misuse(Code.BAD_SETTING, "no topic", "option 'topic', or a column 'topic' in every row")
    if topic is not None and "topic" in types:
        raise Misuse(Code.BAD_SETTING, "option 'topic' and a column 'topic': which?", "drop one of them")


class Preparation:
    """The transactions of one task. ``ids`` are their ids, ``rows`` is the number of their rows together, with at most
    ``most`` in each."""

    def __init__(
        self, producer: Producer, shards: list[int], topic: str | None, immunity: float, most: int = MOST
    ) -> None:
        self.ids: list[bytes] = []
        self.rows = 0
        self._producer = producer
        self._shards = shards
        self._topic = topic
        self._most = min(most, MOST)
        self._immunity_us = to_us(immunity)
        # by shard: the transaction that takes more rows, and how many it has
        self._open: dict[int, tuple[bytes, int]] = {}

    def add(self, batch: pa.RecordBatch) -> None:
        """Prepare one Arrow batch. It is durable on return. Raises the error of the first rejected row."""
        content = self._make_content(batch)
        where = self._assign_brokers(content)
        for number in np.unique(where).tolist():
            mine = content if (where == number).all() else content.take(pa.array(np.flatnonzero(where == number)))
            self._prepare_rows(mine, self._shards[number])
        self.rows += batch.num_rows

    def _make_content(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        for name in ("body", "topic"):
            if name in columns and columns[name].null_count:
                row = columns[name].is_null().index(True).as_py()
                text = f"column {name!r} is null in the {_describe_row(columns, row)}"
                raise Rejected(Code.BAD_BATCH, text, "fill or filter the nulls of that column")
        if self._topic is not None:
            columns["topic"] = pa.repeat(pa.scalar(self._topic), batch.num_rows)
        columns["body"] = columns["body"].cast(pa.binary())
        times = np.full(batch.num_rows, self._immunity_us, np.int64)
        if "properties" in columns and pa.types.is_map(columns["properties"].type):
            times[find_property(columns["properties"])[0]] = 0  # these rows set it in a property
        columns["immunity_us"] = pa.array(times)
        return pa.RecordBatch.from_pydict(columns)

    def _assign_brokers(self, content: pa.RecordBatch) -> npt.NDArray[np.int64]:
        count = len(self._shards)
        if count == 1:
            return np.zeros(content.num_rows, np.int64)
        named = content.column("key") if "key" in content.schema.names else pa.nulls(content.num_rows, pa.utf8())
        pairs = zip(named.to_pylist(), content.column("body").to_pylist(), strict=True)
        return np.array([broker_of(body.hex() if key is None else key, count) for key, body in pairs], np.int64)

    def _prepare_rows(self, rows: pa.RecordBatch, shard: int) -> None:
        at = 0
        while at < rows.num_rows:
            identity, held = self._open.get(shard, (None, 0))
            size = 1 if identity is None else min(self._most - held, rows.num_rows - at)
            part = rows.slice(at, size)
            if identity is not None:
                joined = pa.repeat(pa.scalar(identity, ID), size)
                part = part.append_column(pa.field("transaction", ID), joined)
            receipts = self._producer.prepare_batch(part, shard=shard)
            if not receipts.ok:
                row = int(np.flatnonzero(receipts.codes)[0])
                code = Code(int(receipts.codes[row]))
                columns = dict(zip(part.schema.names, part.columns, strict=True))
                raise error(code, f"{code.sentence}: the {_describe_row(columns, row)}")
            if identity is None:
                identity = receipts.transactions[0].as_py()
                self.ids.append(identity)
            self._open[shard] = (identity, held + size)
            if held + size >= self._most:
                del self._open[shard]
            at += size


def _describe_row(columns: Mapping[str, pa.Array], row: int) -> str:
    """Describe one row so that a user can find it, with as little of its body as needed."""
    known = {name: columns[name][row].as_py() for name in ("topic", "key", "body") if name in columns}
    parts = [f"{name} {known[name]!r:.100}" for name in ("topic", "key") if known.get(name) is not None]
    if (body := known["body"]) is not None:
        begins = f" that begins with {body[:20]!r}" if known.get("key") is None else ""
        parts.append(f"a body of {len(body)} bytes{begins}")
    return f"row with {', '.join(parts)}" if parts else f"row number {row} of its Arrow batch"
