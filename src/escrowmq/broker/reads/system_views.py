"""The system views of half messages, decisions, acknowledgements (in ``acks.py``) and acts on groups
(``group_acts.py``), in log order.

The rows come from the log; what became of a transaction since is asked of the ledger, a chunk of rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from escrowmq.broker.reads.acks import read_acks
from escrowmq.broker.reads.chunks import Chunk, kept, scan
from escrowmq.broker.reads.filters import Filter
from escrowmq.broker.reads.group_acts import GROUP_ACTS, read_group_acts
from escrowmq.broker.reads.marking import lost_rows, shown
from escrowmq.broker.reads.readable import Readable
from escrowmq.errors import Code, error
from escrowmq.ledger.columns.arrays import Int64s
from escrowmq.message.ids import transaction_ids
from escrowmq.schemas import ID, STORED, Kind
from escrowmq.wire import ACK_VIEW_NAME, GROUP_ACT_VIEW_NAME, HALF_VIEW_NAME, OP_VIEW_NAME, ReadRequest

_OF_MESSAGES = frozenset({"topic", "key", "tag", "properties", "message_id", "queue", "born_us", "transaction"})
_OF_DECISIONS = frozenset({"half_position", "transaction", "state", "decided_by"})
"""The columns of a view that come from its own rows: what is lost when they are damaged (besides bodies)."""

Read = Callable[[Readable, ReadRequest, Filter, pa.Schema], Iterator[pa.RecordBatch]]


def _halves(engine: Readable, request: ReadRequest, wanted: Filter, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    used = {"transaction", "epoch", *schema.names, *wanted.columns}
    columns = [name for name in STORED[Kind.HALF].names if name in used]
    return (
        _half_rows(engine, wanted, schema, chunk)
        for chunk in scan(engine, VIEW_KINDS[HALF_VIEW_NAME], columns, request, schema)
    )


def _half_rows(engine: Readable, wanted: Filter, schema: pa.Schema, chunk: Chunk) -> pa.RecordBatch:
    if wanted.active:
        chunk = kept(chunk, wanted.times(chunk[2]) & (wanted.content(chunk[1]) | lost_rows(chunk[1])))
    positions, stored, times = chunk
    states, checks, due, first, epochs = _half_states(engine, positions)
    gone = first < 0
    own, own_epochs = stored.column("transaction").to_numpy(), stored.column("epoch").to_numpy().astype(np.int64)
    made = {
        "position": pa.array(positions),
        "stored_us": pa.array(times),
        "due_us": pa.array(np.where(gone, 0, due)),
        "transaction": transaction_ids(
            engine.log.shard, np.where(gone, own_epochs, epochs), np.where(gone, own, first).astype(np.int64)
        ),
        "state": pa.array(states),
        "checks": pa.array(np.where(gone, 0, checks).astype(np.int32)),
    }
    transactions = pc.if_else(pa.array(gone), pa.scalar(None, ID), made["transaction"])  # what the ledger knows
    return shown(schema, made, stored, _OF_MESSAGES, {"transaction": transactions})


def _half_states(engine: Readable, positions: Int64s) -> Any:
    return engine.look(lambda: engine.shard.ledger.half_states(positions)).result()


def _decisions(engine: Readable, request: ReadRequest, wanted: Filter, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    if wanted.columns:
        raise error(Code.BAD_REQUEST, f"{OP_VIEW_NAME} has neither tags nor keys")
    columns = STORED[Kind.DECIDED].names  # a batch's decisions have more, which describe the batch
    chunks = scan(engine, VIEW_KINDS[OP_VIEW_NAME], columns, request, schema)
    return (_decision_rows(engine, wanted, schema, chunk) for chunk in chunks)


def _decision_rows(engine: Readable, wanted: Filter, schema: pa.Schema, chunk: Chunk) -> pa.RecordBatch:
    # A batch of no transactions is a row without one.
    mask = ((chunk[1].column("transaction").to_numpy() >= 0) | lost_rows(chunk[1])) & wanted.times(chunk[2])
    positions, decided, times = chunk if mask.all() else kept(chunk, mask)
    halves = decided.column("transaction").to_numpy()
    _, _, _, first, epochs = _half_states(engine, halves)
    own_epochs = decided.column("epoch").to_numpy().astype(np.int64)
    made = {
        "position": pa.array(positions),
        "half_position": decided.column("transaction"),
        "transaction": transaction_ids(engine.log.shard, np.where(first < 0, own_epochs, epochs), halves),
        "decided_us": pa.array(times),
    }
    return shown(schema, made, decided, _OF_DECISIONS, {})


VIEW_KINDS = {
    HALF_VIEW_NAME: (Kind.HALF,),
    OP_VIEW_NAME: (Kind.DECIDED, Kind.BATCH_DECIDED),
    ACK_VIEW_NAME: (Kind.ACKED,),
    GROUP_ACT_VIEW_NAME: GROUP_ACTS,
}
"""The kinds of frames that each view shows."""
SYSTEM_VIEWS: dict[str, Read] = {
    HALF_VIEW_NAME: _halves,
    OP_VIEW_NAME: _decisions,
    ACK_VIEW_NAME: read_acks,
    GROUP_ACT_VIEW_NAME: read_group_acts,
}
"""How each view of :data:`escrowmq.wire.VIEWS` is read."""
OF_GROUPS = (ACK_VIEW_NAME, GROUP_ACT_VIEW_NAME)
"""The views whose rows are of consumer groups, and can be filtered by them."""
