"""Builds Arrow batches: deliveries from stored rows, and acknowledgements that release leases."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

import numpy as np
import pyarrow as pa

from escrowmq.errors import EscrowError
from escrowmq.ledger.columns.arrays import Int64s
from escrowmq.ledger.commands import Leased
from escrowmq.log.seam import StoredLog
from escrowmq.message.ids import transaction_ids
from escrowmq.model import Act
from escrowmq.schemas import DELIVERY, SETTLING


def owners_of(stored: pa.RecordBatch, positions: Int64s, log: StoredLog) -> pa.Array:
    """Return the transaction id of each stored message as a column: null for plain and for unreadable ones. An id has
    the epoch of the session that *began* the transaction. A message that joined from a later session of the same group
    has another epoch, so the first message is looked up."""
    first = stored.column("transaction").to_numpy()
    epochs = stored.column("epoch").to_numpy().astype(np.int64)
    joined = np.flatnonzero((first >= 0) & (first != positions))
    if len(joined):
        # If the first message is gone or damaged, the message's own session is the best guess.
        joined = joined[first[joined] >= log.first_position]
        unique, inverse = np.unique(first[joined], return_inverse=True)
        with suppress(EscrowError):  # retention came in between
            begun, damaged = log.salvage(unique, ["epoch"])
            lost = [row for row, damage in damaged.items() if not damage.body_only]
            known = ~np.isin(inverse, lost)
            epochs[joined[known]] = begun.column("epoch").to_numpy()[inverse[known]]
    return transaction_ids(log.shard, epochs, first, first >= 0)


DELIVERED: dict[str, tuple[str, ...]] = {
    "offset": (),
    "position": (),
    "lease": (),
    "attempt": (),
    "stored_us": (),
    "transaction": ("transaction", "epoch"),
    "damaged": ("message_id",),  # any: reading it checks the checksums of its frame
}
"""The stored columns of which a column of DELIVERY is made, if it is not the stored one of its name."""


def batch_of(schema: pa.Schema, made: Mapping[str, pa.Array], rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch of ``schema``: each column from ``made`` if it is there, else from ``rows``."""
    arrays = [made[field.name] if field.name in made else rows.column(field.name) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def delivered(
    stored: pa.RecordBatch,
    transactions: pa.Array | None,
    positions: Int64s,
    offsets: Int64s,
    leases: Int64s | None = None,
    attempts: Int64s | None = None,
    schema: pa.Schema = DELIVERY,
) -> pa.RecordBatch:
    """Convert stored rows to a batch of ``schema``, some columns of DELIVERY. Without ``leases`` and ``attempts``, as
    for readers, they are -1 and 0."""
    size = stored.num_rows
    made = {
        "offset": pa.array(offsets, pa.int64()),
        "position": pa.array(positions, pa.int64()),
        "transaction": transactions,
        "lease": pa.array(np.full(size, -1) if leases is None else leases, pa.int64()),
        "attempt": pa.array(np.zeros(size, np.int32) if attempts is None else attempts.astype(np.int32)),
    }
    return batch_of(schema, made, stored)


def releasing(leased: Leased) -> pa.RecordBatch:
    """Return the rows of a SETTLE that release leased messages: one row per lease. The offsets of each lease must be
    consecutive."""
    ids, firsts, counts = np.unique(leased.leases, return_index=True, return_counts=True)
    starts, size = leased.offsets[firsts], len(firsts)
    runs = [ids, starts, leased.offsets[firsts + counts - 1] - starts + 1]
    acts, delays = np.full(size, Act.RELEASE, np.uint8), np.zeros(size, np.int64)
    columns = [*map(pa.array, (*runs, acts, delays)), pa.nulls(size, pa.utf8())]
    return pa.RecordBatch.from_arrays(columns, schema=SETTLING)
