"""Makes columns: deliveries from stored columns, and acknowledgements that give leases back."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from escrowmq.errors import EscrowError
from escrowmq.ledger.commands import Leased
from escrowmq.message.ids import transaction_ids
from escrowmq.model import Act
from escrowmq.schemas import DELIVERY, SETTLING

Int64s = npt.NDArray[np.int64]
Read = Callable[[Int64s], pa.RecordBatch]


def owners_of(stored: pa.RecordBatch, positions: Int64s, shard: int, read: Read) -> pa.Array:
    """The transaction column of stored messages: null for plain ones.

    An id carries the epoch of the session that *began* the transaction; a message that joined it from a later session
    of the same group has another, so for those the first message is looked up.
    """
    first = stored.column("transaction").to_numpy()
    epochs = stored.column("epoch").to_numpy().astype(np.int64)
    joined = np.flatnonzero((first >= 0) & (first != positions))
    if len(joined):
        unique, inverse = np.unique(first[joined], return_inverse=True)
        try:
            epochs[joined] = read(unique).column("epoch").to_numpy()[inverse]
        except EscrowError:
            pass  # the first message left with retention; its own session is the best guess that is left
    return transaction_ids(shard, epochs, first, first >= 0)


DELIVERED: dict[str, tuple[str, ...]] = {
    "offset": (),
    "position": (),
    "lease": (),
    "attempt": (),
    "stored_us": (),
    "transaction": ("transaction", "epoch"),
}
"""The stored columns that a column of DELIVERY is made of, where it is not the stored one of its name."""


def delivered_columns(
    schema: pa.Schema,
    stored: pa.RecordBatch,
    transactions: pa.Array | None,
    positions: Int64s,
    offsets: Int64s,
    leases: Int64s | None = None,
    attempts: Int64s | None = None,
) -> pa.RecordBatch:
    """Stored rows (those columns of them that are needed) as rows of ``schema``, some columns of DELIVERY; without
    ``leases`` as browsed."""
    size = stored.num_rows
    made: dict[str, Callable[[], pa.Array]] = {
        "offset": lambda: pa.array(offsets, pa.int64()),
        "position": lambda: pa.array(positions, pa.int64()),
        "transaction": lambda: transactions,
        "lease": lambda: pa.array(np.full(size, -1) if leases is None else leases, pa.int64()),
        "attempt": lambda: pa.array(np.zeros(size, np.int32) if attempts is None else attempts.astype(np.int32)),
    }
    arrays = [made[f.name]() if f.name in made else stored.column(f.name) for f in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def delivery(
    stored: pa.RecordBatch,
    transactions: pa.Array,
    positions: Int64s,
    offsets: Int64s,
    leases: Int64s | None = None,
    attempts: Int64s | None = None,
) -> pa.RecordBatch:
    """Stored rows as rows of schema DELIVERY; without ``leases`` as browsed."""
    return delivered_columns(DELIVERY, stored, transactions, positions, offsets, leases, attempts)


def releasing(leased: Leased) -> pa.RecordBatch:
    """Acknowledgements that give everything leased back unseen: one row per lease, which a receive holds as one run of offsets."""
    _, firsts, counts = np.unique(leased.leases, return_index=True, return_counts=True)
    lasts = firsts + counts - 1
    starts, size = leased.offsets[firsts], len(firsts)
    columns = [
        pa.array(leased.leases[firsts]),
        pa.array(starts),
        pa.array(leased.offsets[lasts] - starts + 1),
        pa.array(np.full(size, Act.RELEASE, np.uint8)),
        pa.array(np.zeros(size, np.int64)),
        pa.nulls(size, pa.utf8()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SETTLING)
