"""Checksums of single bodies, stored after the record batch of a frame of several messages (see FORMAT.md).

Besides the frame's own checksum there is one digest over everything but the bodies, and one digest per body. If the
frame's checksum is wrong, they show which rows are intact, so one damaged body affects no other message. A reader of
one row of a large frame reads its columns and one body (:class:`SoundColumns`), and no other body.
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

from escrowmq.platform.disk import Chunk

Bools = npt.NDArray[np.bool_]

_DIGEST = 8
_digest: Callable[[Any], bytes] = xxhash.xxh3_64_digest
_MASK = (1 << 64) - 1
_COLUMN = "body"
_COPIED = 512  # bytes: smaller bodies are digested faster as copies than as views


def size_of(rows: int) -> int:
    """Return the bytes of the checksums of ``rows`` messages: none for one, which the frame's own checksum covers."""
    return _DIGEST * (rows + 1) if rows > 1 else 0


def checksums(pieces: Sequence[Chunk], batch: pa.RecordBatch, sequence: int, salt: int) -> bytes:
    """Compute the checksums that follow the message of ``batch`` (not compressed) in frame ``sequence``. The message is
    in ``pieces``, of which one may be the memory of all bodies."""
    column = batch.column(_COLUMN)
    data, offsets = column.buffers()[2], _offsets(column)
    start, size = data.address + int(offsets[0]) if data is not None else 0, int(offsets[-1] - offsets[0])

    def is_bodies(piece: Chunk) -> bool:  # Arrow may write up to 63 bytes that follow them
        return isinstance(piece, pa.Buffer) and piece.address == start and 0 <= piece.size - size < 64

    others = [piece for piece in pieces if not is_bodies(piece)]
    if len(others) == len(pieces) - 1:
        return _digest_chunks(others, sequence, salt) + _body_digests(batch)
    message = pa.py_buffer(b"".join(pieces)) if len(pieces) > 1 else pa.py_buffer(pieces[0])
    batch = pa.ipc.read_record_batch(message, batch.schema)
    return _other_bytes(message, batch, sequence, salt) + _body_digests(batch)


def checksums_of(message: bytes, start: int, end: int, contents: Sequence[bytes], sequence: int, salt: int) -> bytes:
    """Compute as :func:`checksums`, for an encoded message whose bodies ``contents`` lie from ``start`` to ``end``."""
    return _digest_others(message, start, end, sequence, salt) + b"".join(map(_digest, contents))


def intact_rows(
    message: pa.Buffer, trailer: pa.Buffer, batch: pa.RecordBatch, sequence: int, salt: int
) -> Bools | None:
    """Return a mask of the rows whose bodies are intact, for a frame with a wrong checksum; ``trailer``: its stored
    checksums. None if more than bodies is damaged, or may be."""
    if not _is_sound(message, trailer, batch, sequence, salt):
        return None
    stored = np.frombuffer(trailer, np.uint64, batch.num_rows, _DIGEST)
    return np.asarray(stored == np.frombuffer(_body_digests(batch), np.uint64), np.bool_)


@dataclass(frozen=True, slots=True)
class SoundColumns:
    """A message frame whose content except the bodies is verified: position of its first row, time of the append."""

    position: int
    time_us: int
    batch: pa.RecordBatch  # its bodies are not verified: take them from :meth:`row`
    digests: pa.Buffer  # digests of the bodies, in row order

    def row(self, number: int) -> pa.RecordBatch | None:
        """Return one row, with only its own body read and verified; None if the checksum is wrong."""
        body = self.batch.column(_COLUMN)[number].as_buffer()
        stored = self.digests.slice(_DIGEST * number, _DIGEST)
        return self.batch.slice(number, 1) if _digest(body) == stored.to_pybytes() else None


def sound_columns(
    message: pa.Buffer, trailer: pa.Buffer, batch: pa.RecordBatch, sequence: int, salt: int, position: int, time_us: int
) -> SoundColumns | None:
    """Verify all of a message frame except its bodies, by the stored checksums in ``trailer``, without reading a body.
    Returns None if it is damaged."""
    if not _is_sound(message, trailer, batch, sequence, salt):
        return None
    return SoundColumns(position, time_us, batch, trailer.slice(_DIGEST))


def _is_sound(message: pa.Buffer, trailer: pa.Buffer, batch: pa.RecordBatch, sequence: int, salt: int) -> bool:
    try:
        others = _other_bytes(message, batch, sequence, salt)
    except (ValueError, IndexError):
        return False
    return bool(others == trailer.slice(0, _DIGEST).to_pybytes())


def _other_bytes(message: pa.Buffer, batch: pa.RecordBatch, sequence: int, salt: int) -> bytes:
    """Return the digest of a message without its bodies: columns, offsets, and Arrow's description of them."""
    data = batch.column(_COLUMN).buffers()[2]
    start = end = message.size
    if data is not None and data.size:
        start = data.address - message.address
        end = start + data.size
        if not 0 <= start <= end <= message.size:
            raise ValueError("the bodies lie elsewhere")
    return _digest_others(message, start, end, sequence, salt)


def _digest_others(message: bytes | pa.Buffer, start: int, end: int, sequence: int, salt: int) -> bytes:
    view = memoryview(message)
    return _digest_chunks([view[:start], view[end:]], sequence, salt)


def _digest_chunks(chunks: Sequence[Chunk], sequence: int, salt: int) -> bytes:
    # The seed distinguishes this frame's bytes from another frame's.
    digest = xxhash.xxh3_64(seed=(salt + sequence) & _MASK)
    for chunk in chunks:
        digest.update(chunk)
    return digest.digest()


def _offsets(column: pa.Array) -> npt.NDArray[np.int32]:
    return np.frombuffer(column.buffers()[1], np.int32, len(column) + 1, 4 * column.offset)


def _body_digests(batch: pa.RecordBatch) -> bytes:
    column = batch.column(_COLUMN)
    data, offsets = column.buffers()[2], _offsets(column)
    if data is None or offsets[-1] - offsets[0] <= _COPIED * batch.num_rows:
        return b"".join(map(_digest, column.to_pylist()))
    size = int(offsets[1]) - int(offsets[0])
    same = np.count_nonzero(offsets[1:] - offsets[:-1] == size) == batch.num_rows
    if same and 0 <= offsets[0] <= offsets[-1] <= data.size:
        # Bodies of one length are the rows of an array: a third faster than slices of a view.
        rows = np.frombuffer(data, np.uint8, batch.num_rows * size, int(offsets[0])).reshape(batch.num_rows, size)
        return b"".join(map(_digest, rows))
    view = memoryview(data)
    return b"".join([_digest(view[start:end]) for start, end in pairwise(offsets.tolist())])
