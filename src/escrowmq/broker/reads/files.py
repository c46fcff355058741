"""Streams the bytes of the log's own files for a backup: a piece at a time, read from the disk and not mapped.

A backup reads cold data. If the disk fails, a read reports it; a mapped page would end the process.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from escrowmq.broker.reads.readable import Readable
from escrowmq.errors import Code, error
from escrowmq.schemas import FILE_PIECE
from escrowmq.wire import FILE_PREFIX, BatchStream, ReadRequest

PIECE_BYTES = 1 << 20
MOST_BYTES = 64 << 20  # of one read: a backup requests more when these are written, so a stopping broker waits for none
_TAKEN = frozenset({"source", "start", "end"})


def open_file(engine: Readable, request: ReadRequest) -> BatchStream:
    """Return the bytes of ``%file.NAME`` from ``start`` to before ``end``. Rejected(BAD_REQUEST, NOT_FOUND,
    RANGE_PURGED)."""
    if others := sorted(set(request) - _TAKEN):
        raise error(Code.BAD_REQUEST, f"a file is read whole: no {others[0]!r}")
    start, end = request.get("start") or 0, request.get("end")
    if end is None or not 0 <= end - start <= MOST_BYTES:
        raise error(Code.BAD_REQUEST, f"'end' must be 'start' to 'start' + {MOST_BYTES}")
    name = request["source"].removeprefix(FILE_PREFIX)
    first = engine.log.read_file(name, start, min(PIECE_BYTES, end - start))  # now, so that errors come at once
    return BatchStream(FILE_PIECE, _pieces(engine, name, start, end, first))


def _pieces(engine: Readable, name: str, start: int, end: int, piece: bytes) -> Iterator[pa.RecordBatch]:
    while piece:
        yield pa.RecordBatch.from_arrays([pa.array([start]), pa.array([piece], pa.binary())], schema=FILE_PIECE)
        start += len(piece)
        piece = engine.log.read_file(name, start, min(PIECE_BYTES, end - start)) if start < end else b""
