"""Ids of messages and transactions (16 bytes), as Arrow columns, NumPy records and values."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from escrowmq.errors import Code, Misuse
from escrowmq.message.values import make_transaction_id
from escrowmq.model import TransactionId
from escrowmq.schemas import ID, TRANSACTION_ID_DTYPE

Int64s = npt.NDArray[np.int64]
message_id_of = struct.Struct(">QQ").pack  # packs a message id of a series from its instance and its number (16 bytes)
transaction_id = struct.Struct(">IIQ").pack  # packs a transaction id from its shard, epoch and position (16 bytes)
split_transaction_id = struct.Struct(">IIQ").unpack  # unpacks shard, epoch and position of a transaction id


# Columns and NumPy records


def records(ids: pa.Array, dtype: npt.DTypeLike = TRANSACTION_ID_DTYPE) -> npt.NDArray[Any]:
    """View a column of ids as NumPy records of 16 bytes, without a copy. Null rows contain arbitrary bytes."""
    return np.frombuffer(ids.buffers()[1], dtype, len(ids), 16 * ids.offset)


def column_of(raw: bytes | npt.NDArray[Any], valid: npt.NDArray[np.bool_] | None = None) -> pa.FixedSizeBinaryArray:
    """Build a column from consecutive ids (bytes, or records that are no longer changed); null where not ``valid``."""
    data = pa.py_buffer(raw)
    validity = None if valid is None or valid.all() else pa.array(valid).buffers()[1]
    return pa.FixedSizeBinaryArray.from_buffers(ID, data.size // 16, [validity, data])


def transaction_ids(
    shard: int, epochs: npt.NDArray[np.integer] | int, positions: Int64s, valid: npt.NDArray[np.bool_] | None = None
) -> pa.FixedSizeBinaryArray:
    """Return the transaction ids of one shard, from session epochs and positions; null where not ``valid``."""
    raw = np.empty(len(positions), TRANSACTION_ID_DTYPE)
    raw["shard"], raw["epoch"], raw["position"] = shard, epochs, positions
    return column_of(raw, valid)


def transactions(ids: pa.Array) -> Iterable[TransactionId | None]:
    """Return the values of a column of transaction ids; an endless iterator if all are null."""
    if ids.null_count == len(ids):
        return itertools.repeat(None)
    raw = records(ids)
    generated = map(make_transaction_id, raw["shard"].tolist(), raw["epoch"].tolist(), raw["position"].tolist())
    if not ids.null_count:
        return generated
    return (one if is_valid else None for one, is_valid in zip(generated, ids.is_valid().to_pylist(), strict=True))


def shards(ids: pa.Array) -> npt.NDArray[np.uint32]:
    """Return the shard of each transaction id of a column without nulls."""
    return records(ids)["shard"].astype(np.uint32)


def fill_ids(given: Sequence[bytes | None], instance: int, sequence: int) -> bytes:
    """Concatenate message ids, with ids of a series from ``sequence`` on in place of None."""
    count = len(given)
    missing = given.count(None)
    generated = b"".join(message_id_of(instance, number) for number in range(sequence, sequence + missing))
    if missing == count:
        return generated
    new_ids = (generated[at : at + 16] for at in itertools.count(0, 16))
    return b"".join(next(new_ids) if one is None else one for one in given)


# Input of users


def id_column(ids: Any) -> pa.Array:
    """Convert transaction ids to one Arrow column of 16 bytes; nulls are kept. Accepts an Arrow array, a NumPy array of
    16-byte records, or an iterable of TransactionId, their printed form, 16 bytes or None. Raises
    Misuse(BAD_ARGUMENT)."""
    if isinstance(ids, pa.ChunkedArray):
        ids = ids.combine_chunks()
    if isinstance(ids, pa.Array) and ids.type == ID:
        return ids
    if isinstance(ids, pa.Array):
        ids = ids.to_pylist()
    if isinstance(ids, np.ndarray) and ids.dtype.itemsize == 16 and ids.dtype.fields is not None:
        return column_of(ids.astype(TRANSACTION_ID_DTYPE).tobytes())
    if isinstance(ids, str | bytes | TransactionId) or not isinstance(ids, Iterable):
        raise Misuse(Code.BAD_ARGUMENT, f"{type(ids).__name__} is not a column of transaction ids")
    return pa.array([None if one is None else id_bytes(one) for one in ids], ID)


def id_bytes(identity: TransactionId | str | bytes) -> bytes:
    """Convert a transaction id in any form to its 16 bytes. Raises Misuse(BAD_ARGUMENT) for anything else."""
    if isinstance(identity, TransactionId):
        return bytes(identity)
    if isinstance(identity, str):
        return bytes(TransactionId.parse(identity))
    if isinstance(identity, bytes):
        return bytes(TransactionId.from_bytes(identity))
    raise Misuse(Code.BAD_ARGUMENT, f"{type(identity).__name__} is not a transaction id")
