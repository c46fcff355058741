"""The columns of each source in Spark, and how they are made from Arrow batches of the wire.

Imports no Spark. Times become timestamps without a copy (both are microseconds in UTC), states become words, ids stay
16 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from escrowmq import wire
from escrowmq.errors import Code, Misuse
from escrowmq.model import DecidedBy, TransactionState
from escrowmq.settings import nearest

_TEXT = "string"
_ARROW: dict[str, pa.DataType] = {
    _TEXT: pa.utf8(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "timestamp": pa.timestamp("us"),
    "map<string,string>": pa.map_(pa.utf8(), pa.utf8()),
    "binary": pa.binary(),
}
"""By Spark's name of the type."""
_TIMESTAMP = pa.timestamp("us", tz="UTC")
Make = Callable[[pa.RecordBatch, int], pa.Array]
"""Makes one column from a wire batch and the number of its shard."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its Spark type, the wire columns that it needs, and a function that makes it."""

    name: str
    spark: str
    needs: tuple[str, ...]
    make: Make


def _make_plain(name: str, spark: str, source: str) -> Column:
    return Column(name, spark, (source,), lambda batch, _: batch.column(source))


def _make_cast(name: str, spark: str, source: str, kind: pa.DataType) -> Column:
    return Column(name, spark, (source,), lambda batch, _: batch.column(source).cast(kind))


def _make_word(name: str, words: type[Enum]) -> Column:
    table = pa.array([one.name.lower() for one in words], pa.utf8())
    return Column(name, _TEXT, (name,), lambda batch, _: table.take(batch.column(name)))


def _make_shard(batch: pa.RecordBatch, shard: int) -> pa.Array:
    return pa.array(np.full(batch.num_rows, shard))


def _make_visible_state(batch: pa.RecordBatch, _: int) -> pa.Array:
    """Return ``committed`` for a message of a transaction, null for a plain one. A topic shows no other states."""
    return pc.if_else(batch.column("transaction").is_valid(), "committed", pa.scalar(None, pa.utf8()))


_NAMES = {
    _TEXT: f"topic key tag group act edited_from {wire.DAMAGED_COLUMN}",
    "int": "queue checks attempt",
    "bigint": "offset position half_position start count lease",
    "map<string,string>": "properties",
    "binary": "body",
}
_TIMES = ("born", "stored", "due", "decided", "acked", "acted")
_EVERY = [
    *(_make_plain(name, spark, name) for spark, names in _NAMES.items() for name in names.split()),
    *(_make_cast(name, "timestamp", f"{name}_us", _TIMESTAMP) for name in _TIMES),
    _make_cast("message_id", "binary", "message_id", pa.binary()),
    _make_cast("transaction_id", "binary", "transaction", pa.binary()),
    _make_word("state", TransactionState),
    _make_word("decided_by", DecidedBy),
    Column("shard", "bigint", (), _make_shard),
]


def _list_columns(names: str) -> list[Column]:
    """Return columns by name, and last the one that shows where the log is damaged (the others are null then)."""
    every = {column.name: column for column in _EVERY}
    return [every[name] for name in (*names.split(), wire.DAMAGED_COLUMN)]


_BODY = "key tag properties body message_id born stored"
TOPIC = [
    column if column.name != "state" else Column("state", _TEXT, ("transaction",), _make_visible_state)
    for column in _list_columns(f"topic shard queue offset {_BODY} position transaction_id state")
]
HALF = _list_columns(f"topic shard queue position {_BODY} due transaction_id state checks")
OP = _list_columns("shard position half_position transaction_id state decided_by decided")
ACKS = _list_columns("shard position acked group topic queue start count attempt lease")
GROUP_ACTS = _list_columns(
    "shard position acted group topic queue offset act message_id edited_from key tag properties body"
)

_VIEWS = {
    wire.HALF_VIEW_NAME: HALF,
    wire.OP_VIEW_NAME: OP,
    wire.ACK_VIEW_NAME: ACKS,
    wire.GROUP_ACT_VIEW_NAME: GROUP_ACTS,
}


def columns_of(source: str) -> list[Column]:
    """Return all columns of a topic or system view."""
    if source in _VIEWS:
        return _VIEWS[source]
    if source.startswith("%") and not source.startswith(wire.DEAD_LETTER_PREFIX):
        views = [*_VIEWS, wire.DEAD_LETTER_PREFIX + "GROUP"]
        hint = nearest(source, views) or f"there are {', '.join(views)}"
        raise Misuse(Code.BAD_SETTING, f"no system view {source!r}", hint)
    return TOPIC


def choose(source: str, names: Sequence[str] | None) -> list[Column]:
    """Return the named columns, in that order; all if ``names`` is None. Raises Misuse(BAD_SETTING) for an unknown
    name."""
    every = {column.name: column for column in columns_of(source)}
    if names is None:
        return list(every.values())
    for name in names:
        if name not in every:
            hint = nearest(name, list(every)) or f"there are {', '.join(every)}"
            raise Misuse(Code.BAD_SETTING, f"{source} has no column {name!r}", hint)
    if len(set(names)) < len(names):
        raise Misuse(Code.BAD_SETTING, f"a column is named twice: {', '.join(names)}")
    return [every[name] for name in names]


def spark_schema(chosen: Sequence[Column]) -> str:
    """Return the schema as Spark's DDL text."""
    return ", ".join(f"`{column.name}` {column.spark}" for column in chosen)


def arrow_schema(chosen: Sequence[Column]) -> pa.Schema:
    """Return the schema in Arrow, with times in UTC without a zone."""
    return pa.schema([(column.name, _ARROW[column.spark]) for column in chosen])


def wire_columns(source: str, chosen: Sequence[Column]) -> list[str]:
    """Return the wire columns to request from the broker; the cheapest one if only the number of rows is needed."""
    needed = {name for column in chosen for name in column.needs}
    schema = wire.read_schema(source, damaged=True)
    return [name for name in schema.names if name in needed] or ["position"]


def as_spark(batch: pa.RecordBatch, chosen: Sequence[Column], shard: int, schema: pa.Schema) -> pa.RecordBatch:
    """Convert a wire batch to ``schema``, which has the chosen columns in their order."""
    arrays = [column.make(batch, shard).cast(field.type) for column, field in zip(chosen, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
