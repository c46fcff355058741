"""Checksums of single bodies, behind the record batch of a frame of several messages (FORMAT.md has the map).

A frame has one checksum. Beside it stand one digest over everything but the bytes of the bodies, and one digest of each
body. When the frame's own is wrong, they tell which of its rows may still be trusted, so that one damaged body takes no
other message along; and whoever wants one row of a large frame reads its columns and one body (:class:`SoundColumns`),
and leaves the other bodies where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from escrowmq.schemas import STORED, Kind

Bools = npt.NDArray[np.bool_]

_DIGEST = 8
_digest: Callable[[Any], bytes] = xxhash.xxh3_64_digest
_MASK = (1 << 64) - 1
_COLUMN = "body"
_COPIED = 512  # bytes: smaller bodies are digested faster as copies than as views


def size_of(rows: int) -> int:
    """Return bytes of the checksums of a frame of ``rows`` messages: none for one, which the frame's own checksum
    covers."""
    return _DIGEST * (rows + 1) if rows > 1 else 0


def checksums(message: pa.Buffer, kind: Kind, sequence: int, salt: int) -> bytes:
    """Return the checksums that follow the record batch ``message`` (not compressed) of frame ``sequence``."""
    batch = pa.ipc.read_record_batch(message, STORED[kind])
    others, bodies = _digests(message, batch, sequence, salt)
    return others + bodies


def checksums_of(message: bytes, start: int, end: int, contents: Sequence[bytes], sequence: int, salt: int) -> bytes:
    """Compute :func:`checksums` of a message whose bodies ``contents`` lie from ``start`` to ``end``."""
    view = memoryview(message)
    digest = xxhash.xxh3_64(view[:start], seed=(salt + sequence) & _MASK)
    digest.update(view[end:])
    return digest.digest() + b"".join(map(_digest, contents))


def intact_rows(
    message: pa.Buffer, trailer: pa.Buffer, batch: pa.RecordBatch, sequence: int, salt: int
) -> Bools | None:
    """Return which rows of a frame that does not check are as they were written; None if more than bodies is damaged.

    ``batch`` was read from ``message`` and need not be valid: nothing of it is followed before it is known to be what
    was written.
    """
    if not _is_sound(message, trailer, batch, sequence, salt):
        return None
    stored = np.frombuffer(trailer, np.uint64, batch.num_rows, _DIGEST)
    found = np.frombuffer(_body_digests(batch), np.uint64)
    return np.asarray(stored == found, np.bool_)


@dataclass(frozen=True, slots=True)
class SoundColumns:
    """A frame of messages of which everything but the bodies is known to be as it was written. ``position`` is that of
    its first row, ``time_us`` the broker's time of the append."""

    position: int
    time_us: int
    batch: pa.RecordBatch
    """Its bodies were not looked at: take them from :meth:`row`."""
    digests: pa.Buffer
    """Of the bodies, in the order of the rows."""

    def row(self, number: int) -> pa.RecordBatch | None:
        """One row, its body compared with its checksum; None if that is wrong."""
        body = self.batch.column(_COLUMN)[number].as_buffer()
        stored = self.digests.slice(_DIGEST * number, _DIGEST)
        return self.batch.slice(number, 1) if _digest(body) == stored.to_pybytes() else None


def sound_columns(
    message: pa.Buffer, trailer: pa.Buffer, batch: pa.RecordBatch, sequence: int, salt: int, position: int, time_us: int
) -> SoundColumns | None:
    """Return the columns of a frame whose own checksum nobody has looked at; None if they are damaged. Reads no body.
    ``batch`` was read from
    ``message`` and need not be valid."""
    if not _is_sound(message, trailer, batch, sequence, salt):
        return None
    return SoundColumns(position, time_us, batch, trailer.slice(_DIGEST))


def _is_sound(message: pa.Buffer, trailer: pa.Buffer, batch: pa.RecordBatch, sequence: int, salt: int) -> bool:
    """Return whether everything but the bodies is as it was written."""
    try:
        others = _other_bytes(message, batch, sequence, salt)
    except (ValueError, IndexError):
        return False
    return bool(others == trailer.slice(0, _DIGEST).to_pybytes())


def _digests(message: pa.Buffer, batch: pa.RecordBatch, sequence: int, salt: int) -> tuple[bytes, bytes]:
    return _other_bytes(message, batch, sequence, salt), _body_digests(batch)


def _other_bytes(message: pa.Buffer, batch: pa.RecordBatch, sequence: int, salt: int) -> bytes:
    """Return the digest of a message's bytes but for those of the bodies: columns, offsets, and Arrow's description
    of them."""
    data = batch.column(_COLUMN).buffers()[2]
    start = end = message.size
    if data is not None and data.size:
        start = data.address - message.address
        end = start + data.size
        if not 0 <= start <= end <= message.size:
            raise ValueError("the bodies lie elsewhere")
    view = memoryview(message)
    # The seed: bytes of another frame do not pass for this one's.
    digest = xxhash.xxh3_64(view[:start], seed=(salt + sequence) & _MASK)
    digest.update(view[end:])
    return digest.digest()


def _body_digests(batch: pa.RecordBatch) -> bytes:
    """One digest for each body, one after the other."""
    column = batch.column(_COLUMN)
    _, places, data = column.buffers()
    if data is None or data.size <= _COPIED * batch.num_rows:
        return b"".join(map(_digest, column.to_pylist()))
    offsets = np.frombuffer(places, np.int32, batch.num_rows + 1)
    size = int(offsets[1]) - int(offsets[0])
    if (
        np.count_nonzero(offsets[1:] - offsets[:-1] == size) == batch.num_rows
        and 0 <= offsets[0] <= offsets[-1] <= data.size
    ):
        # Bodies of one length are the rows of an array: a third faster than slices of a view.
        rows = np.frombuffer(data, np.uint8, batch.num_rows * size, int(offsets[0])).reshape(batch.num_rows, size)
        return b"".join(map(_digest, rows))
    view = memoryview(data)
    return b"".join([xxhash.xxh3_64_digest(view[start:end]) for start, end in pairwise(offsets.tolist())])
