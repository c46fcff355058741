"""The view ``%group-acts``: what persons did to places of consumer groups, as the log has it.

Four acts concern a place of a queue for one group: its dead letter was retried, discarded or replaced by an edited
message, or the group was set to continue at it. Together with the topic they say which messages a group is to have
handled; so whoever compares a consumer's database with the topic (the audit) reads them. They come in the log's order:
of two acts on one place the later one counts.

An edited message names the one that it replaced in a property; the view has it as a column.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from escrowmq.broker.reads.chunks import Chunk, kept, scan
from escrowmq.broker.reads.filters import Filter
from escrowmq.broker.reads.marking import lost_rows, shown
from escrowmq.broker.reads.readable import Readable
from escrowmq.errors import Code, error
from escrowmq.ledger.columns.arrays import Int64s
from escrowmq.ledger.groups.groups import DISCARD
from escrowmq.log.seam import Frame
from escrowmq.message.names import EDITED_FROM
from escrowmq.schemas import GROUP_ACT_VIEW, Kind
from escrowmq.wire import GROUP_ACT_VIEW_NAME, ReadRequest

GROUP_ACTS = (Kind.DEAD_SETTLED, Kind.EDITED, Kind.GROUP_RESET)  # the kinds of frames that the view shows

_CONTENT = ("message_id", "key", "tag", "properties", "body")
_OF_ROWS = frozenset({"group", "topic", "queue", "offset", "act", "edited_from", *_CONTENT})
_COLUMNS = ["group", "queue_id", "offset", "act", *_CONTENT]


def read_group_acts(
    engine: Readable, request: ReadRequest, wanted: Filter, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of ``%group-acts`` (columns of GROUP_ACT_VIEW) from ``start`` to before ``end``, filtered by
    time and group."""
    if wanted.columns:
        raise error(Code.BAD_REQUEST, f"{GROUP_ACT_VIEW_NAME} has neither tags nor keys")
    content = [
        name for name in _CONTENT if name in schema.names or (name == "properties" and "edited_from" in schema.names)
    ]
    columns = [name for name in _COLUMNS if name not in _CONTENT or name in content]
    chunks = scan(engine, GROUP_ACTS, columns, request, schema, lambda frame: _alike(frame, columns))
    return (_rows(engine, wanted, schema, chunk) for chunk in chunks)


def _alike(frame: Frame, columns: list[str]) -> Frame:
    """Return the frame with the same columns, whatever its kind: what was done as a word, and null for the content
    of what is no message."""
    batch, count = frame.batch, frame.batch.num_rows
    arrays = []
    for name in columns:
        if name == "act":
            arrays.append(_acts(frame.kind, batch))
        elif name in batch.schema.names:
            arrays.append(batch.column(name))
        else:
            arrays.append(pa.nulls(count, GROUP_ACT_VIEW.field(name).type))
    return replace(frame, content=pa.RecordBatch.from_arrays(arrays, names=columns))


def _acts(kind: Kind, batch: pa.RecordBatch) -> pa.Array:
    if kind == Kind.DEAD_SETTLED:
        return pc.if_else(pc.equal(batch.column("act"), DISCARD), "discard", "retry")
    return pa.array(np.full(batch.num_rows, "edit" if kind == Kind.EDITED else "reset"), pa.utf8())


def _rows(engine: Readable, wanted: Filter, schema: pa.Schema, chunk: Chunk) -> pa.RecordBatch:
    positions, rows, times = kept(chunk, wanted.times(chunk[2])) if wanted.timed else chunk
    made = {"position": pa.array(positions), "acted_us": pa.array(times)}
    made |= _names(engine, rows.column("group").to_numpy(), rows.column("queue_id").to_numpy())
    if "edited_from" in schema.names:
        made["edited_from"] = pc.map_lookup(rows.column("properties"), EDITED_FROM, "first")
    batch = shown(schema, made, rows, _OF_ROWS, {})
    if wanted.group is None:
        return batch
    chosen = pc.fill_null(pc.equal(made["group"], wanted.group), False)
    return batch.filter(pc.or_(chosen, pa.array(lost_rows(rows))))


def _names(engine: Readable, groups: Int64s, queue_ids: Int64s) -> dict[str, pa.Array]:
    """Group, topic and queue by their numbers. The name of a deleted group that another one has now is left out."""
    group_ids, group_index = np.unique(groups, return_inverse=True)
    unique_ids, queue_index = np.unique(queue_ids, return_inverse=True)

    def look() -> tuple[list[str | None], list[tuple[str, int] | tuple[None, None]]]:
        ledger = engine.shard.ledger
        known = ledger.groups.names()
        names = [known.get(id) for id in group_ids.tolist()]
        now = [None if name is None else ledger.groups.by_name.get(name) for name in names]
        places = [ledger.topics.queues[id].place if id >= 0 else None for id in unique_ids.tolist()]
        return (
            [
                name if one is None or one.ordinal == id else None
                for name, one, id in zip(names, now, group_ids.tolist(), strict=True)
            ],
            [(place.topic, place.queue) if place else (None, None) for place in places],
        )

    names, places = engine.look(look).result()
    topics, queues = zip(*places, strict=True) if places else ((), ())
    return {
        "group": pa.array(names, pa.utf8()).take(pa.array(group_index)),
        "topic": pa.array(topics, pa.utf8()).take(pa.array(queue_index)),
        "queue": pa.array(queues, pa.int32()).take(pa.array(queue_index)),
    }
