"""The columns of each source in Spark, and how they are made from Arrow batches of the wire.

Imports no Spark. Times become timestamps without a copy (both are microseconds in UTC), states become words, ids stay
16 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from escrowmq.errors import Code, Misuse
from escrowmq.model import DecidedBy, TransactionState
from escrowmq.settings import nearest
from escrowmq.wire import (
    ACK_VIEW_NAME,
    DAMAGED_COLUMN,
    DEAD_LETTER_PREFIX,
    GROUP_ACT_VIEW_NAME,
    HALF_VIEW_NAME,
    OP_VIEW_NAME,
    read_schema,
)

TIMESTAMP = pa.timestamp("us", tz="UTC")
_TEXT = "string"
Make = Callable[[pa.RecordBatch, int], pa.Array]
"""Makes one column from a wire batch and the number of its shard."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its Spark type, the wire columns that it needs, and a function that makes it."""

    name: str
    spark: str
    needs: tuple[str, ...]
    make: Make


def _make_plain(name: str, spark: str, wire: str | None = None) -> Column:
    source = wire or name
    return Column(name, spark, (source,), lambda batch, _: batch.column(source))


def _make_time(name: str, wire: str) -> Column:
    def make(batch: pa.RecordBatch, _: int) -> pa.Array:
        return batch.column(wire).view(TIMESTAMP)

    return Column(name, "timestamp", (wire,), make)


def _make_word(name: str, wire: str, words: Sequence[str]) -> Column:
    table = pa.array(words, pa.utf8())

    def make(batch: pa.RecordBatch, _: int) -> pa.Array:
        return table.take(batch.column(wire))

    return Column(name, _TEXT, (wire,), make)


def _make_shard(batch: pa.RecordBatch, shard: int) -> pa.Array:
    return pa.array(np.full(batch.num_rows, shard))


def _make_binary(name: str, wire: str) -> Column:
    return Column(name, "binary", (wire,), lambda batch, _: batch.column(wire).cast(pa.binary()))


_STATES = [state.name.lower() for state in TransactionState]
_DECIDERS = [by.name.lower() for by in DecidedBy]


def _make_visible_state(batch: pa.RecordBatch, _: int) -> pa.Array:
    """Return ``committed`` for a message of a transaction, null for a plain one. A topic shows no other states."""
    return pc.if_else(batch.column("transaction").is_valid(), "committed", pa.scalar(None, pa.utf8()))


_DAMAGED = _make_plain(DAMAGED_COLUMN, _TEXT)
"""Where the log is damaged under the row, whose content is null then."""

_CONTENT = [
    _make_plain("topic", _TEXT),
    Column("shard", "bigint", (), _make_shard),
    _make_plain("queue", "int"),
]
_BODY = [
    _make_plain("key", _TEXT),
    _make_plain("tag", _TEXT),
    _make_plain("properties", "map<string,string>"),
    _make_plain("body", "binary"),
    _make_binary("message_id", "message_id"),
    _make_time("born", "born_us"),
    _make_time("stored", "stored_us"),
]

TOPIC = [
    *_CONTENT,
    _make_plain("offset", "bigint"),
    *_BODY,
    _make_plain("position", "bigint"),
    _make_binary("transaction_id", "transaction"),
    Column("state", _TEXT, ("transaction",), _make_visible_state),
    _DAMAGED,
]
HALF = [
    *_CONTENT,
    _make_plain("position", "bigint"),
    *_BODY,
    _make_time("due", "due_us"),
    _make_binary("transaction_id", "transaction"),
    _make_word("state", "state", _STATES),
    _make_plain("checks", "int"),
    _DAMAGED,
]
OP = [
    Column("shard", "bigint", (), _make_shard),
    _make_plain("position", "bigint"),
    _make_plain("half_position", "bigint"),
    _make_binary("transaction_id", "transaction"),
    _make_word("state", "state", _STATES),
    _make_word("decided_by", "decided_by", _DECIDERS),
    _make_time("decided", "decided_us"),
    _DAMAGED,
]
ACKS = [
    Column("shard", "bigint", (), _make_shard),
    _make_plain("position", "bigint"),
    _make_time("acked", "acked_us"),
    _make_plain("group", _TEXT),
    _make_plain("topic", _TEXT),
    _make_plain("queue", "int"),
    _make_plain("start", "bigint"),
    _make_plain("count", "bigint"),
    _make_plain("attempt", "int"),
    _make_plain("lease", "bigint"),
    _DAMAGED,
]

GROUP_ACTS = [
    Column("shard", "bigint", (), _make_shard),
    _make_plain("position", "bigint"),
    _make_time("acted", "acted_us"),
    _make_plain("group", _TEXT),
    _make_plain("topic", _TEXT),
    _make_plain("queue", "int"),
    _make_plain("offset", "bigint"),
    _make_plain("act", _TEXT),
    _make_binary("message_id", "message_id"),
    _make_plain("edited_from", _TEXT),
    _make_plain("key", _TEXT),
    _make_plain("tag", _TEXT),
    _make_plain("properties", "map<string,string>"),
    _make_plain("body", "binary"),
    _DAMAGED,
]

_VIEWS = {HALF_VIEW_NAME: HALF, OP_VIEW_NAME: OP, ACK_VIEW_NAME: ACKS, GROUP_ACT_VIEW_NAME: GROUP_ACTS}


def columns_of(source: str) -> list[Column]:
    """Return all columns of a topic or system view."""
    if source in _VIEWS:
        return _VIEWS[source]
    if source.startswith("%") and not source.startswith(DEAD_LETTER_PREFIX):
        views = [*_VIEWS, DEAD_LETTER_PREFIX + "GROUP"]
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
            raise Misuse(
                Code.BAD_SETTING,
                f"{source} has no column {name!r}",
                nearest(name, list(every)) or f"there are {', '.join(every)}",
            )
    if len(set(names)) < len(names):
        raise Misuse(Code.BAD_SETTING, f"a column is named twice: {', '.join(names)}")
    return [every[name] for name in names]


def spark_schema(chosen: Sequence[Column]) -> str:
    """Return the schema as Spark's DDL text."""
    return ", ".join(f"`{column.name}` {column.spark}" for column in chosen)


def wire_columns(source: str, chosen: Sequence[Column]) -> list[str]:
    """Return the wire columns to request from the broker; the cheapest one if only the number of rows is needed."""
    needed = {name for column in chosen for name in column.needs}
    schema = read_schema(source, damaged=True)
    return [name for name in schema.names if name in needed] or ["position"]


def as_spark(batch: pa.RecordBatch, chosen: Sequence[Column], shard: int, schema: pa.Schema) -> pa.RecordBatch:
    """Convert a wire batch to ``schema``, which has the chosen columns in their order."""
    arrays = [column.make(batch, shard) for column in chosen]
    arrays = [
        array if array.type.equals(field.type) else array.cast(field.type)
        for array, field in zip(arrays, schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
