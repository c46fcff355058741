"""The views of consumer groups: ``%acks``, what consumers acknowledged, one row per run of offsets; and
``%group-acts``, what operators did to places of groups.

An acknowledgement in the log names a lease and a run. Its group and queue are in the row that made the lease, whose
position is the lease's id: the rows of a chunk's leases are looked up together. The row of a lease that was handed over
(HANDED, of a group with ``in_doubt="hold"``) has its attempt and names the lease before it: the chain is followed back
to a LEASED row, one hand-over of all leases at a time. Only the log is read, so a range gives the same rows as long as
it is stored. If a lease's row is dropped or damaged, its group, topic, queue and attempt are null.

An operator retries, discards or edits a dead letter, or resets a group to a place. With the topic, these rows give the
messages that a group must have handled, for the audit. Of two on one place the later one counts. The id of the message
that an edited one replaces, which is one of its properties, is a column.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from escrowmq.broker.reads.chunks import Chunk
from escrowmq.broker.reads.readable import Readable
from escrowmq.errors import Code, EscrowError
from escrowmq.ledger.columns.arrays import Int64s
from escrowmq.ledger.groups.groups import DISCARD
from escrowmq.ledger.queues.queues import Place
from escrowmq.log.seam import Frame, StoredLog
from escrowmq.message.names import EDITED_FROM
from escrowmq.schemas import GROUP_ACT_VIEW, STORED, Kind

NONE = -1
GAP = 256  # positions between two leases that are read over: a seek in the log costs as much as some frames

_LEASE_ROW = ("group", "queue_id", "attempt", "old")
_LEASE_COLUMNS = {
    kind: [(line, name) for line, name in enumerate(_LEASE_ROW) if name in STORED[kind].names]
    for kind in (Kind.LEASED, Kind.HANDED)
}
_OF_LEASES = {"group", "topic", "queue", "attempt"}
OWN_OF_ACKS = frozenset({"start", "count", "lease"} | _OF_LEASES)
_CONTENT = ("message_id", "key", "tag", "properties", "body")
OWN_OF_ACTS = frozenset({"group", "topic", "queue", "offset", "act", "edited_from", *_CONTENT})


def _names(engine: Readable, groups: Int64s, queue_ids: Int64s, *, reused: bool) -> dict[str, pa.Array]:
    """Return the columns group, topic and queue for group numbers and queue ids; null for -1. A group that was deleted
    keeps its name with ``reused``; else it is null if another group has that name now."""
    group_ids, group_index = np.unique(groups, return_inverse=True)
    unique_ids, queue_index = np.unique(queue_ids, return_inverse=True)

    def look() -> tuple[list[str | None], list[Place | None]]:
        ledger = engine.shard.ledger
        known, now = ledger.groups.names(), {} if reused else ledger.groups.by_name
        names = {id: known.get(id) for id in group_ids.tolist()}
        return (
            [None if name in now and now[name].ordinal != id else name for id, name in names.items()],
            [ledger.topics.queues[id].place if id >= 0 else None for id in unique_ids.tolist()],
        )

    names, places = engine.look(look).result()
    topics, queues = [place and place.topic for place in places], [place and place.queue for place in places]
    return {
        "group": pa.array(names, pa.utf8()).take(pa.array(group_index)),
        "topic": pa.array(topics, pa.utf8()).take(pa.array(queue_index)),
        "queue": pa.array(queues, pa.int32()).take(pa.array(queue_index)),
    }


# Acknowledgements


def make_acks(engine: Readable, chunk: Chunk, names: set[str]) -> dict[str, pa.Array]:
    """Return the columns ``names`` of ``%acks`` that are not stored in a chunk's rows: time, group, topic, queue and
    attempt."""
    made = {"acked_us": pa.array(chunk[2])}
    if _OF_LEASES.isdisjoint(names):
        return made
    groups, queue_ids, attempts = lease_rows(engine.log, chunk[1].column("lease").to_numpy())
    made["attempt"] = pa.array(attempts.astype(np.int32), mask=attempts < 0)
    return made | _names(engine, groups, queue_ids, reused=True)


def lease_rows(log: StoredLog, leases: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """Return group (its ordinal), queue id and attempt of each lease; -1 for what the log no longer holds."""
    groups, queue_ids, attempts, olds = _rows(log, leases)
    while len(handed := np.flatnonzero(olds >= 0)):
        groups[handed], queue_ids[handed], _, olds[handed] = _rows(log, olds[handed])
    return groups, queue_ids, attempts


def _rows(log: StoredLog, leases: Int64s) -> Int64s:
    """Return the columns ``_LEASE_ROW`` of the log rows that made the leases: an array with a line per column. -1 where
    a row lacks a column or is no longer readable."""
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
    """Read the lease rows at the ascending log positions ``ids``, neighbours in one scan, and write their values into
    ``found``, a line per column."""
    edges = np.flatnonzero(np.diff(ids) > GAP) + 1
    for near in np.split(ids, edges) if len(ids) else ():
        for frame in log.frames_at(int(near[0]), list(_LEASE_COLUMNS), int(near[-1]) + 1, damaged=True):
            begin, end = ids.searchsorted((frame.position, frame.position + frame.batch.num_rows))
            if frame.damage is None and begin < end:  # a damaged one is as if it had left
                rows = ids[begin:end] - frame.position
                for line, name in _LEASE_COLUMNS[frame.kind]:
                    found[line, begin:end] = frame.batch.column(name).to_numpy()[rows]


# Operator actions


def stored_of_acts(names: set[str]) -> list[str]:
    """Return the stored columns from which the columns ``names`` of ``%group-acts`` are made."""
    used = names | ({"properties"} if "edited_from" in names else set())
    return ["group", "queue_id", "offset", "act", *(name for name in _CONTENT if name in used)]


def align_acts(frame: Frame, columns: list[str]) -> Frame:
    """Return the frame with these columns, whatever its kind: ``act`` is a word (discard, retry, edit, reset), and a
    column that its kind does not have is null."""
    batch = frame.batch
    if frame.kind == Kind.DEAD_SETTLED:
        act = pc.if_else(pc.equal(batch.column("act"), DISCARD), "discard", "retry")
    else:
        act = pa.array(["edit" if frame.kind == Kind.EDITED else "reset"] * batch.num_rows, pa.utf8())
    made = {"act": act}
    for name in columns:
        if name not in batch.schema.names:
            made.setdefault(name, pa.nulls(batch.num_rows, GROUP_ACT_VIEW.field(name).type))
    arrays = [made[name] if name in made else batch.column(name) for name in columns]
    return replace(frame, content=pa.RecordBatch.from_arrays(arrays, names=columns))


def make_acts(engine: Readable, chunk: Chunk, names: set[str]) -> dict[str, pa.Array]:
    """Return the columns ``names`` of ``%group-acts`` that are not stored in a chunk's rows: time, names, and the id of
    an edited message."""
    _, rows, times = chunk
    made = {"acted_us": pa.array(times)}
    if "edited_from" in names:
        made["edited_from"] = pc.map_lookup(rows.column("properties"), EDITED_FROM, "first")
    return made | _names(engine, rows.column("group").to_numpy(), rows.column("queue_id").to_numpy(), reused=False)
