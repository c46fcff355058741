"""The columns of each source as Spark sees them, and how they are made from Arrow batches of the wire.

Needs no Spark. Times become timestamps without a copy (both are microseconds of UTC), states become words, ids stay 16
bytes.
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
"""Makes one column from a wire batch and the number of the shard that it came from."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its Spark type, the wire columns that it needs, and how it is made from them."""

    name: str
    spark: str
    needs: tuple[str, ...]
    make: Make


def _plain(name: str, spark: str, wire: str | None = None) -> Column:
    source = wire or name
    return Column(name, spark, (source,), lambda batch, _: batch.column(source))


def _time(name: str, wire: str) -> Column:
    def make(batch: pa.RecordBatch, _: int) -> pa.Array:
        return batch.column(wire).view(TIMESTAMP)

    return Column(name, "timestamp", (wire,), make)


def _word(name: str, wire: str, words: Sequence[str]) -> Column:
    table = pa.array(words, pa.utf8())

    def make(batch: pa.RecordBatch, _: int) -> pa.Array:
        return table.take(batch.column(wire))

    return Column(name, _TEXT, (wire,), make)


def _shard(batch: pa.RecordBatch, shard: int) -> pa.Array:
    return pa.array(np.full(batch.num_rows, shard))


def _binary(name: str, wire: str) -> Column:
    return Column(name, "binary", (wire,), lambda batch, _: batch.column(wire).cast(pa.binary()))


_STATES = [state.name.lower() for state in TransactionState]
_DECIDERS = [by.name.lower() for by in DecidedBy]


def _visible_state(batch: pa.RecordBatch, _: int) -> pa.Array:
    """Return ``committed`` for a message of a transaction, null for a plain one: nothing else is visible in a topic."""
    return pc.if_else(batch.column("transaction").is_valid(), "committed", pa.scalar(None, pa.utf8()))


_DAMAGED = _plain(DAMAGED_COLUMN, _TEXT)
"""Where the log is damaged under the row, whose content is null then."""

_CONTENT = [
    _plain("topic", _TEXT),
    Column("shard", "bigint", (), _shard),
    _plain("queue", "int"),
]
_BODY = [
    _plain("key", _TEXT),
    _plain("tag", _TEXT),
    _plain("properties", "map<string,string>"),
    _plain("body", "binary"),
    _binary("message_id", "message_id"),
    _time("born", "born_us"),
    _time("stored", "stored_us"),
]

TOPIC = [
    *_CONTENT,
    _plain("offset", "bigint"),
    *_BODY,
    _plain("position", "bigint"),
    _binary("transaction_id", "transaction"),
    Column("state", _TEXT, ("transaction",), _visible_state),
    _DAMAGED,
]
HALF = [
    *_CONTENT,
    _plain("position", "bigint"),
    *_BODY,
    _time("due", "due_us"),
    _binary("transaction_id", "transaction"),
    _word("state", "state", _STATES),
    _plain("checks", "int"),
    _DAMAGED,
]
OP = [
    Column("shard", "bigint", (), _shard),
    _plain("position", "bigint"),
    _plain("half_position", "bigint"),
    _binary("transaction_id", "transaction"),
    _word("state", "state", _STATES),
    _word("decided_by", "decided_by", _DECIDERS),
    _time("decided", "decided_us"),
    _DAMAGED,
]
ACKS = [
    Column("shard", "bigint", (), _shard),
    _plain("position", "bigint"),
    _time("acked", "acked_us"),
    _plain("group", _TEXT),
    _plain("topic", _TEXT),
    _plain("queue", "int"),
    _plain("start", "bigint"),
    _plain("count", "bigint"),
    _plain("attempt", "int"),
    _plain("lease", "bigint"),
    _DAMAGED,
]

GROUP_ACTS = [
    Column("shard", "bigint", (), _shard),
    _plain("position", "bigint"),
    _time("acted", "acted_us"),
    _plain("group", _TEXT),
    _plain("topic", _TEXT),
    _plain("queue", "int"),
    _plain("offset", "bigint"),
    _plain("act", _TEXT),
    _binary("message_id", "message_id"),
    _plain("edited_from", _TEXT),
    _plain("key", _TEXT),
    _plain("tag", _TEXT),
    _plain("properties", "map<string,string>"),
    _plain("body", "binary"),
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
    """Return the named columns, in that order; all if ``names`` is None. Misuse(BAD_SETTING) names one that is not
    there."""
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
    """Return the wire columns to ask the broker for; the cheapest one if only the number of rows is wanted."""
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
