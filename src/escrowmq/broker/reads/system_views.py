"""The system views of half messages, decisions and (``group_views.py``) consumer groups, in log order.

The rows come from the log; the current state of a transaction comes from the ledger, a chunk of rows at a time.

Readers follow a view as they follow a topic: it has one queue, numbered 0. Offsets in a view are log positions; in the
dead letters of a group, which come and go, they are times of death, in microseconds since 1970.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from escrowmq import wire
from escrowmq.broker.reads import group_views
from escrowmq.broker.reads.chunks import Chunk, chunked, kept, lost_rows, range_of, shown
from escrowmq.broker.reads.filters import Filter
from escrowmq.broker.reads.readable import Readable
from escrowmq.errors import Code, error
from escrowmq.ledger.columns.arrays import Bools, Int64s
from escrowmq.ledger.groups.reports import last_death_us
from escrowmq.log.seam import Frame
from escrowmq.message.ids import transaction_ids
from escrowmq.schemas import ID, STORED, Kind
from escrowmq.settings import nearest


@dataclass(frozen=True, slots=True)
class _View:
    """How one of :data:`escrowmq.wire.VIEWS` is read."""

    kinds: Sequence[Kind]  # of frames
    stored: Callable[[set[str]], list[str]]  # the stored columns that some columns of the view require
    make: Callable[[Readable, Chunk, set[str]], dict[str, pa.Array]]  # those columns of it that are not stored ones
    own: frozenset[str]  # its columns that are lost with a damaged row (besides bodies)
    mask: Callable[[Filter, pa.RecordBatch], Bools] | None = None  # which rows it shows; None: all
    align: Callable[[Frame, list[str]], Frame] | None = None  # gives frames of all kinds the stored columns


def read_view(
    engine: Readable, request: wire.ReadRequest, wanted: Filter, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a system view that ``wanted`` selects, from ``start`` to before ``end`` of the request, with
    the columns of ``schema``."""
    name = request["source"]
    if wanted.columns and name != wire.HALF_VIEW_NAME:
        raise error(Code.BAD_REQUEST, f"{name} has neither tags nor keys")
    view, names = _VIEWS[name], {*schema.names, *wanted.columns, *(["group"] if wanted.group is not None else [])}
    columns = view.stored(names)

    def rows(chunk: Chunk) -> pa.RecordBatch:
        mask = wanted.times(chunk[2])
        if view.mask is not None:
            mask &= view.mask(wanted, chunk[1]) | lost_rows(chunk[1])
        chunk = chunk if mask.all() else kept(chunk, mask)
        made = view.make(engine, chunk, names)
        batch = shown(schema, {"position": pa.array(chunk[0]), **made}, chunk[1], view.own)
        if wanted.group is None:
            return batch
        chosen = pc.fill_null(pc.equal(made["group"], wanted.group), False)
        return batch.filter(pc.or_(chosen, pa.array(lost_rows(chunk[1]))))

    first, durable = engine.log.first_position, engine.look(lambda: engine.log.next_position).result()
    start, end = range_of(request, "position", first, durable)
    marking = wire.DAMAGED_COLUMN in schema.names
    frames: Iterable[Frame] = engine.log.frames_at(start, view.kinds, end, damaged=marking) if start < end else ()
    if view.align is not None:
        frames = map(view.align, frames, repeat(columns))
    return map(rows, chunked(frames, start, end, columns, marking))


def _make_halves(engine: Readable, chunk: Chunk, names: set[str]) -> dict[str, pa.Array]:
    positions, stored, times = chunk
    states, checks, due, first, epochs = _half_states(engine, positions)
    gone = first < 0  # the ledger has removed the transaction
    own, own_epochs = stored.column("transaction").to_numpy(), stored.column("epoch").to_numpy().astype(np.int64)
    begun = np.where(gone, own, first).astype(np.int64)
    ids = transaction_ids(engine.log.shard, np.where(gone, own_epochs, epochs), begun)
    return {
        "stored_us": pa.array(times),
        "due_us": pa.array(np.where(gone, 0, due)),
        "transaction": pc.if_else(pa.array(gone & lost_rows(stored)), pa.scalar(None, ID), ids),
        "state": pa.array(states),
        "checks": pa.array(np.where(gone, 0, checks).astype(np.int32)),
    }


def _half_states(engine: Readable, positions: Int64s) -> Any:
    return engine.look(lambda: engine.shard.ledger.half_states(positions)).result()


def _make_decisions(engine: Readable, chunk: Chunk, names: set[str]) -> dict[str, pa.Array]:
    _, decided, times = chunk
    halves, own_epochs = decided.column("transaction"), decided.column("epoch").to_numpy().astype(np.int64)
    _, _, _, first, epochs = _half_states(engine, halves.to_numpy())
    ids = transaction_ids(engine.log.shard, np.where(first < 0, own_epochs, epochs), halves.to_numpy())
    return {"half_position": halves, "transaction": ids, "decided_us": pa.array(times)}


_VIEWS = {
    wire.HALF_VIEW_NAME: _View(
        (Kind.HALF,),
        lambda names: [name for name in STORED[Kind.HALF].names if name in names | {"transaction", "epoch"}],
        _make_halves,
        frozenset({"topic", "key", "tag", "properties", "message_id", "queue", "born_us"}),
        lambda wanted, rows: wanted.content(rows),
    ),
    wire.OP_VIEW_NAME: _View(
        (Kind.DECIDED, Kind.BATCH_DECIDED),
        lambda _: STORED[Kind.DECIDED].names,  # a batch's decisions have more, which describe the batch
        _make_decisions,
        frozenset({"half_position", "transaction", "state", "decided_by"}),
        lambda _, rows: rows.column("transaction").to_numpy() >= 0,  # a batch of no transactions is a row without one
    ),
    wire.ACK_VIEW_NAME: _View(
        (Kind.ACKED,), lambda _: STORED[Kind.ACKED].names, group_views.make_acks, group_views.OWN_OF_ACKS
    ),
    wire.GROUP_ACT_VIEW_NAME: _View(
        (Kind.DEAD_SETTLED, Kind.EDITED, Kind.GROUP_RESET),
        group_views.stored_of_acts,
        group_views.make_acts,
        group_views.OWN_OF_ACTS,
        align=group_views.align_acts,
    ),
}
OF_GROUPS = (wire.ACK_VIEW_NAME, wire.GROUP_ACT_VIEW_NAME)
"""The views whose rows are of consumer groups, and can be filtered by them."""


# Following a view


def view_range(engine: Readable, view: str, time_us: int | None) -> dict[str, Any]:
    """Return ``queue`` (0), ``head`` and ``end`` of a view's offsets and, with a time, ``offset_at``: the first offset
    at that time. Raises Rejected(UNKNOWN_TOPIC, UNKNOWN_GROUP)."""
    if view in wire.VIEWS:
        line = {"queue": 0, "head": engine.log.first_position, "end": engine.log.next_position}
        return line if time_us is None else {**line, "offset_at": engine.log.position_at(time_us)}
    _last_death_us(engine, view)  # raises
    end = engine.shard.time_us  # more may die in this very round
    line = {"queue": 0, "head": 0, "end": end}
    return line if time_us is None else {**line, "offset_at": min(time_us, end)}


def view_beyond(engine: Readable, view: str, after: int) -> list[dict[str, Any]]:
    """Return ``queue``, ``head`` and ``end`` of a view, in a list, if it has rows at offset ``after`` or later; else an
    empty list."""
    if view in wire.VIEWS:
        return [view_range(engine, view, None)] if engine.log.holds(after, _VIEWS[view].kinds) else []
    last = _last_death_us(engine, view)
    return [{"queue": 0, "head": 0, "end": last + 1}] if last >= after else []


def _last_death_us(engine: Readable, view: str) -> int:
    if not view.startswith(wire.DEAD_LETTER_PREFIX):
        names = [*wire.VIEWS, wire.DEAD_LETTER_PREFIX + "GROUP"]
        hint = nearest(view, names) or f"there are {', '.join(names)}"
        raise error(Code.UNKNOWN_TOPIC, f"no system view {view!r}", hint)
    return last_death_us(engine.shard.ledger.groups.group(view[len(wire.DEAD_LETTER_PREFIX) :]))
