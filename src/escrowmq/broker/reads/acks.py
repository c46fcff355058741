"""The view ``%acks``: what consumers acknowledged, one row per run of offsets, as the log has it.

Rules:

1. The log stores of an acknowledgement its lease and its run. Whose it was, and of which queue, is in the row that made
   the lease: the lease's id is that row's position. So the rows of a chunk's leases are looked up together.
2. A lease of a group that holds what is in doubt may have been handed over (HANDED). Its row has its attempt, and names
   the lease before it: the chain is followed back to a LEASED row, one hand-over of all leases at a time.
3. Only the log is asked, never what the ledger happens to remember of leases. So the same range gives the same rows as
   long as it is stored; when retention has dropped a lease's own row, or it is damaged, group, topic, queue and attempt
   are null from then on.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from escrowmq.broker.reads.chunks import Chunk, kept, scan
from escrowmq.broker.reads.filters import Filter
from escrowmq.broker.reads.marking import lost_rows, shown
from escrowmq.broker.reads.readable import Readable
from escrowmq.errors import Code, EscrowError, error
from escrowmq.ledger.columns.arrays import Int64s
from escrowmq.log.seam import StoredLog
from escrowmq.schemas import ACK_VIEW, STORED, Kind
from escrowmq.wire import ACK_VIEW_NAME, ReadRequest

NONE = -1
GAP = 256
"""Positions between two leases that are read over: seeking in the log costs as much as reading some frames."""

_LEASE_ROW = ("group", "queue_id", "attempt", "old")
_SAYS = {
    kind: [(line, name) for line, name in enumerate(_LEASE_ROW) if name in STORED[kind].names]
    for kind in (Kind.LEASED, Kind.HANDED)
}
_OF_ROWS = frozenset({"group", "topic", "queue", "start", "count", "attempt", "lease"})
_OF_LEASES = {"group", "topic", "queue", "attempt"}


def read_acks(engine: Readable, request: ReadRequest, wanted: Filter, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the rows of ``%acks`` (columns of ACK_VIEW) from ``start`` to before ``end``, filtered by time and
    group."""
    if wanted.columns:
        raise error(Code.BAD_REQUEST, f"{ACK_VIEW_NAME} has neither tags nor keys")
    chunks = scan(engine, [Kind.ACKED], STORED[Kind.ACKED].names, request, schema)
    return (_ack_rows(engine, wanted, schema, chunk) for chunk in chunks)


def _ack_rows(engine: Readable, wanted: Filter, schema: pa.Schema, chunk: Chunk) -> pa.RecordBatch:
    positions, acked, times = kept(chunk, wanted.times(chunk[2])) if wanted.timed else chunk
    made = {"position": pa.array(positions), "acked_us": pa.array(times)}
    if wanted.group is not None or not _OF_LEASES.isdisjoint(schema.names):
        made |= _lease_columns(engine, acked.column("lease").to_numpy())
    batch = shown(schema, made, acked, _OF_ROWS, {})
    if wanted.group is None:
        return batch
    chosen = pc.fill_null(pc.equal(made["group"], wanted.group), False)
    return batch.filter(pc.or_(chosen, pa.array(lost_rows(acked))))


def _lease_columns(engine: Readable, leases: Int64s) -> dict[str, pa.Array]:
    """Group, topic, queue and attempt of leases; null where the lease's row has left the log."""
    groups, queue_ids, attempts = lease_rows(engine.log, leases)
    group_ids, group_index = np.unique(groups, return_inverse=True)
    unique_ids, queue_index = np.unique(queue_ids, return_inverse=True)

    def names() -> tuple[list[str | None], list[tuple[str, int] | tuple[None, None]]]:
        ledger = engine.shard.ledger
        known = ledger.groups.names()
        partitions = [ledger.topics.queues[id].place if id >= 0 else None for id in unique_ids.tolist()]
        return (
            [known.get(id) for id in group_ids.tolist()],
            [(place.topic, place.queue) if place else (None, None) for place in partitions],
        )

    group_names, partitions = engine.look(names).result()
    topics, queues = zip(*partitions, strict=True) if partitions else ((), ())
    made = {
        "group": pa.array(group_names, pa.utf8()).take(pa.array(group_index)),
        "topic": pa.array(topics, pa.utf8()).take(pa.array(queue_index)),
        "queue": pa.array(queues, pa.int32()).take(pa.array(queue_index)),
        "attempt": pa.array(attempts, mask=attempts < 0),
    }
    return {name: column.cast(ACK_VIEW.field(name).type) for name, column in made.items()}


def lease_rows(log: StoredLog, leases: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """Group (its ordinal), queue id and attempt of each lease, by its id; -1 for what the log no longer holds."""
    groups, queue_ids, attempts, olds = _rows(log, leases)
    while len(handed := np.flatnonzero(olds >= 0)):
        groups[handed], queue_ids[handed], _, olds[handed] = _rows(log, olds[handed])
    return groups, queue_ids, attempts


def _rows(log: StoredLog, leases: Int64s) -> Int64s:
    """Return the facts of the rows that made the leases: four arrays in the order of ``_LEASE_ROW``, -1 where a row
    lacks one."""
    ids, inverse = np.unique(leases, return_inverse=True)
    found = np.full((len(_LEASE_ROW), len(ids)), NONE, np.int64)
    while True:
        stored = int(np.searchsorted(ids, log.first_position))
        try:
            _fill(log, ids[stored:], found[:, stored:])
        except EscrowError as problem:
            if problem.code is not Code.RANGE_PURGED:
                raise
            continue  # retention came in between: what is stored now is looked up anew
        return found[:, inverse]


def _fill(log: StoredLog, ids: Int64s, found: Int64s) -> None:
    """Write the rows at the rising positions ``ids`` into ``found``, neighbours in one scan."""
    edges = np.flatnonzero(np.diff(ids) > GAP) + 1
    for near in np.split(ids, edges) if len(ids) else ():
        first, last = int(near[0]), int(near[-1])
        for frame in log.frames_at(first, list(_SAYS), last + 1, damaged=True):
            if frame.damage is not None:
                continue  # as if it had left
            begin, end = ids.searchsorted((frame.position, frame.position + frame.batch.num_rows))
            if begin == end:
                continue
            rows = ids[begin:end] - frame.position
            for line, name in _SAYS[frame.kind]:
                found[line, begin:end] = frame.batch.column(name).to_numpy()[rows]
