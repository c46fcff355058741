"""The system views: what the log knows of half messages, of decisions and (``acks.py``) of acknowledgements, by log position.

The rows come from the log; what became of a transaction since is asked of the ledger, a chunk of rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from escrowmq.broker.reads.acks import read_acks
from escrowmq.broker.reads.chunks import scan
from escrowmq.broker.reads.filters import Filter
from escrowmq.broker.reads.readable import Readable
from escrowmq.errors import Code, error
from escrowmq.message.ids import transaction_ids
from escrowmq.schemas import STORED, Kind
from escrowmq.wire import ACK_VIEW_NAME, HALF_VIEW_NAME, OP_VIEW_NAME, ReadRequest

Int64s = npt.NDArray[np.int64]
Read = Callable[[Readable, ReadRequest, Filter, pa.Schema], Iterator[pa.RecordBatch]]


def _halves(engine: Readable, request: ReadRequest, wanted: Filter, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    used = {"transaction", "epoch", *schema.names, *wanted.columns}
    columns = [name for name in STORED[Kind.HALF].names if name in used]
    chunks = scan(engine, [Kind.HALF], columns, request)

    def batches() -> Iterator[pa.RecordBatch]:
        for positions, stored, times in chunks:
            if wanted.active:
                mask = wanted.times(times) & wanted.content(stored)
                positions, stored, times = positions[mask], stored.filter(pa.array(mask)), times[mask]
            states, checks, due, first, epochs = _half_states(engine, positions)
            gone = first < 0
            own = stored.column("transaction").to_numpy(), stored.column("epoch").to_numpy().astype(np.int64)
            ids = transaction_ids(
                engine.log.shard, np.where(gone, own[1], epochs), np.where(gone, own[0], first).astype(np.int64)
            )
            made = {
                "position": pa.array(positions),
                "stored_us": pa.array(times),
                "due_us": pa.array(np.where(gone, 0, due)),
                "transaction": ids,
                "state": pa.array(states),
                "checks": pa.array(np.where(gone, 0, checks).astype(np.int32)),
            }
            arrays = [made[f.name] if f.name in made else stored.column(f.name) for f in schema]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    return batches()


def _half_states(engine: Readable, positions: Int64s) -> Any:
    return engine.look(lambda: engine.shard.ledger.half_states(positions)).result()


def _decisions(engine: Readable, request: ReadRequest, wanted: Filter, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    if wanted.columns:
        raise error(Code.BAD_REQUEST, f"{OP_VIEW_NAME} has neither tags nor keys")
    columns = STORED[Kind.DECIDED].names  # a batch's decisions have more, which tell of the batch
    chunks = scan(engine, [Kind.DECIDED, Kind.BATCH_DECIDED], columns, request)

    def batches() -> Iterator[pa.RecordBatch]:
        for positions, decided, times in chunks:
            # A batch of no transactions is a row without one.
            mask = (decided.column("transaction").to_numpy() >= 0) & wanted.times(times)
            if not mask.all():
                positions, decided, times = positions[mask], decided.filter(pa.array(mask)), times[mask]
            halves = decided.column("transaction").to_numpy()
            _, _, _, first, epochs = _half_states(engine, halves)
            own = decided.column("epoch").to_numpy().astype(np.int64)
            made = {
                "position": pa.array(positions),
                "half_position": decided.column("transaction"),
                "transaction": transaction_ids(engine.log.shard, np.where(first < 0, own, epochs), halves),
                "decided_us": pa.array(times),
            }
            arrays = [made[f.name] if f.name in made else decided.column(f.name) for f in schema]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    return batches()


SYSTEM_VIEWS: dict[str, Read] = {HALF_VIEW_NAME: _halves, OP_VIEW_NAME: _decisions, ACK_VIEW_NAME: read_acks}
"""How each view of :data:`escrowmq.wire.VIEWS` is read."""
