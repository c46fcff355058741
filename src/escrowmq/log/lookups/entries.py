"""Entries of look-up files: one message id or key in 8 bytes.

From the highest bit: 26 bits of the hash of the id or key, 6 bits of the hash of the topic, 32 bits of the position,
relative to the first of the run. Entries are unique and sort by hash, topic, position. Moving a run's first position
adds one number to all of them, which keeps their order, so runs are merged without decoding. If two values share the
same 26 bits, the row itself decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from escrowmq.log.seam import Frame
from escrowmq.message.hashes import hash_bytes, hash_ids, hash_keys
from escrowmq.message.limits import common_text
from escrowmq.schemas import ID

Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]

Column = Literal["message_id", "key"]
COLUMNS: tuple[Column, Column] = ("message_id", "key")  # the columns that can be looked up, in file order

POSITION_BITS = 32
MOST_POSITIONS = 1 << POSITION_BITS  # maximum range of positions of one run
TAG_BITS = 6
TAGS = 1 << TAG_BITS
_HASH_SHIFT = POSITION_BITS + TAG_BITS
_POSITION = np.uint64(MOST_POSITIONS - 1)
FEW = 64  # up to this many rows of a frame are compared one by one; more are compared as columns


@dataclass(frozen=True)
class Query:
    """A query: an id (16 bytes) or a key, in one topic or in any (None)."""

    column: Column
    value: bytes | str
    topic: str | None = None

    @cached_property
    def bounds(self) -> tuple[int, int]:
        """The lowest and the highest entry (of a run or tail) that can match."""
        value = self.value if isinstance(self.value, bytes) else self.value.encode()
        low = hash_bytes(value) >> _HASH_SHIFT << _HASH_SHIFT
        if self.topic is None:
            return low, low | (1 << _HASH_SHIFT) - 1
        low |= _tag_of(hash_bytes(self.topic.encode())) << POSITION_BITS
        return low, low | (MOST_POSITIONS - 1)

    def rows(self, batch: pa.RecordBatch, among: Int64s | None = None) -> Int64s:
        """Return the matching rows of a message batch, ascending; with ``among``, only rows of these."""
        if among is not None and len(among) <= FEW:  # a comparison in Arrow costs as much as a hundred rows
            columns = [(batch.column(self.column), self.value)]
            if self.topic is not None:
                columns.append((batch.column("topic"), self.topic))
            same = [all(column[row].as_py() == value for column, value in columns) for row in among.tolist()]
            return among[np.array(same, np.bool_)]
        value = pa.scalar(self.value, ID) if self.column == "message_id" else self.value
        mask = _equals(batch.column(self.column), value)
        if self.topic is not None:
            mask &= _equals(batch.column("topic"), self.topic)
        rows = np.flatnonzero(mask)
        return rows if among is None else rows[np.isin(rows, among)]


def _equals(column: pa.Array, value: object) -> npt.NDArray[np.bool_]:
    equal = pc.fill_null(pc.equal(column, value), False)
    return np.array(equal.to_numpy(zero_copy_only=False), np.bool_)


def _tag_of(hash_of_topic: int) -> int:
    return hash_of_topic >> (64 - TAG_BITS)


def entries_of(frames: Sequence[Frame], base: int) -> tuple[UInt64s, UInt64s]:
    """Encode the entries of message frames, ids and keys separately, in the order of their rows. Positions in them are
    relative to ``base``."""
    starts = [frame.position - base for frame in frames]
    ranges = [np.arange(start, start + frame.count) for start, frame in zip(starts, frames, strict=True)]
    low = np.concatenate(ranges).view(np.uint64)
    low |= _tags(_concat(frames, "topic")) << np.uint64(POSITION_BITS)
    ids = _top(hash_ids(_concat(frames, "message_id"))) | low
    keys = _concat(frames, "key")
    if keys.null_count == len(keys):
        return ids, np.empty(0, np.uint64)
    hashed = _top(hash_keys(keys)) | low
    return ids, hashed[keys.is_valid().to_numpy(zero_copy_only=False)] if keys.null_count else hashed


def positions_of(entries: UInt64s, base: int) -> Int64s:
    """Return the log positions of entries that were encoded relative to ``base``, in their order."""
    return (entries & _POSITION).view(np.int64) + base


def _concat(frames: Sequence[Frame], column: str) -> pa.Array:
    if len(frames) == 1:
        return frames[0].batch.column(column)
    return pa.concat_arrays([frame.batch.column(column) for frame in frames])


def _tags(topics: pa.Array) -> UInt64s | np.uint64:
    """Return the topic bits of each row; a single number if all topics are equal."""
    if (only := common_text(topics)) is not None:
        return np.uint64(_tag_of(hash_bytes(only.encode())))
    return hash_keys(topics) >> np.uint64(64 - TAG_BITS)


def _top(hashes: UInt64s) -> UInt64s:
    """Return the hashes with only the bits that an entry stores; modifies ``hashes``."""
    hashes >>= np.uint64(_HASH_SHIFT)
    hashes <<= np.uint64(_HASH_SHIFT)
    return hashes
