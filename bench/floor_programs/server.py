"""What cannot be left out of a broker: read, look at, write, sync, answer. No ledger, no rules, no repeats.

Called as ``server.py KIND PORT FILE``. Kinds: ``bare`` answers each piece of a stream with a few bytes, after it was
written to FILE and synced; ``frames`` reads the frames of our protocol and answers them, without a file: its callers
are bound by processors, not by a disk; ``batches`` takes whole batches in frames and writes and syncs those that wait
at once.
"""

from __future__ import annotations

import os
import selectors
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from escrowmq.wire import frames
from escrowmq.wire.frames import Assembler, Frame, Kind

READ_BYTES = 1 << 16
READS = 64
"""Of one connection before what came is written."""
PIECES = 1000
"""Of one call of the system, at most."""
ROOM = 1 << 30
"""The file's blocks exist before anything is written, as in a log that reserves its segments."""
BARE_ANSWER = b"\0" * 38
"""As long as the answer to one half message."""
PREPARE, END = b"prepare", b"end"
OUTGOING = pa.schema([("topic", pa.utf8()), ("body", pa.binary()), ("message_id", pa.binary(16))])
ENDING = pa.schema([("transaction", pa.binary(16)), ("outcome", pa.uint8())])
PREPARED = pa.schema([("code", pa.uint8()), ("transaction", pa.binary(16))])
ENDED = pa.schema([("code", pa.uint8())])


class File:
    """One file that is written from its beginning to its end, again and again."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT)
        self._at = 0
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._file, 0, ROOM)
        os.fsync(self._file)

    def write(self, pieces: list[pa.Buffer | bytes | memoryview]) -> None:
        """One write, one sync."""
        size = sum(len(memoryview(piece)) for piece in pieces)
        if self._at + size > ROOM:
            self._at = 0
        for first in range(0, len(pieces), PIECES):
            self._at += os.pwritev(self._file, pieces[first : first + PIECES], self._at)
        os.fdatasync(self._file)


def listening(port: int) -> socket.socket:
    listener = socket.create_server(("127.0.0.1", port), backlog=256)
    listener.setblocking(False)
    return listener


def received(connection: socket.socket) -> bytes:
    """What is there, up to some reads; nothing at the end of the stream."""
    pieces = [connection.recv(READ_BYTES)]
    while len(pieces[-1]) == READ_BYTES and len(pieces) < READS:
        try:
            pieces.append(connection.recv(READ_BYTES, socket.MSG_DONTWAIT))
        except BlockingIOError:
            break
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def serve(port: int, answers: Callable[[socket.socket, bytes], bytes], file: File | None) -> None:
    """One thread: read all that is there, write and sync it together if there is a file, answer."""
    listener, selector = listening(port), selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    while True:
        came: list[tuple[socket.socket, bytes]] = []
        for key, _ in selector.select():
            if key.fileobj is listener:
                accepted, _ = listener.accept()
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                selector.register(accepted, selectors.EVENT_READ)
                continue
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            if data := received(connection):
                came.append((connection, data))
            else:
                selector.unregister(connection)
                connection.close()
        if came:
            told = [(connection, answers(connection, data)) for connection, data in came]
            if file is not None:
                file.write([data for _, data in came])
            for connection, answer in told:
                if answer:
                    connection.sendall(answer)


def frames_of(assembler: Assembler, data: bytes) -> list[Frame]:
    """The frames that are whole with these bytes."""
    found: list[Frame] = []
    left = memoryview(data)
    while left:
        target = assembler.target()
        count = min(len(target), len(left))
        target[:count] = left[:count]
        found += assembler.filled(count)
        left = left[count:]
    return found


class Framed:
    """Reads the frames of each connection, and answers as a broker would that accepts everything."""

    def __init__(self) -> None:
        self._assemblers: dict[socket.socket, Assembler] = {}
        self._positions = 0

    def __call__(self, connection: socket.socket, data: bytes) -> bytes:
        assembler = self._assemblers.get(connection)
        if assembler is None:
            assembler = self._assemblers[connection] = Assembler(1 << 24)
        return b"".join(self._answer(frame) for frame in frames_of(assembler, data))

    def _answer(self, frame: Frame) -> bytes | bytearray:
        rows = frames.read_parcel(frame).rows
        if frame.kind == Kind.END:
            return frames.codes_answer(frame.number, b"\1" * len(rows))
        first, self._positions = self._positions, self._positions + len(rows)
        answer = [(0, at, 0, -1, at.to_bytes(16, "big")) for at in range(first, self._positions)]
        return frames.rows_answer(frame.number, answer)


class Batches:
    """One copy, one check, one checksum of each batch; one write and one sync of those that wait. A thread for each
    connection."""

    def __init__(self, port: int, file: File) -> None:
        self._listener = socket.create_server(("127.0.0.1", port), backlog=256)
        self._file = file
        self._changed = threading.Condition()
        self._queue: list[tuple[list[bytes | pa.Buffer], Callable[[], None]]] = []
        threading.Thread(target=self._write, daemon=True).start()

    def serve(self) -> None:
        """Accept connections, for ever."""
        while True:
            accepted, _ = self._listener.accept()
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._take, args=(accepted,), daemon=True).start()

    def _take(self, connection: socket.socket) -> None:
        """Batches until the client ends, first what they are; each answered after its sync, in order."""
        schema, answer, assembler = OUTGOING, _prepared, Assembler(1 << 26)
        while count := connection.recv_into(assembler.target()):
            for frame in assembler.filled(count):
                if frame.kind == Kind.PING:
                    if bytes(frame.body) == END:
                        schema, answer = ENDING, _ended
                    continue
                batch = frames.decode_batch(frame.body, schema)
                copied = batch.serialize()
                batch.validate(full=True)
                checksum = xxhash.xxh3_64_digest(copied)
                rows, number, make = batch.num_rows, frame.number, answer

                def done(number: int = number, rows: int = rows, make: Callable[[int], Any] = make) -> None:
                    for part in frames.batch_answer(number, make(rows)):
                        connection.sendall(b"".join(part))

                with self._changed:
                    self._queue.append(([checksum, copied], done))
                    self._changed.notify()

    def _write(self) -> None:
        while True:
            with self._changed:
                while not self._queue:
                    self._changed.wait()
                taken, self._queue = self._queue, []
            self._file.write([piece for pieces, _ in taken for piece in pieces])
            for _, done in taken:
                done()


def _prepared(rows: int) -> pa.RecordBatch:
    ids = np.zeros((rows, 2), np.uint64)
    ids[:, 1] = np.arange(rows)
    made = pa.Array.from_buffers(pa.binary(16), rows, [None, pa.py_buffer(ids)])
    return pa.RecordBatch.from_arrays([pa.array(np.zeros(rows, np.uint8)), made], schema=PREPARED)


def _ended(rows: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(np.ones(rows, np.uint8))], schema=ENDED)


def main() -> None:
    kind, port, path = sys.argv[1:]
    if kind == "batches":
        Batches(int(port), File(path)).serve()
    elif kind == "frames":
        serve(int(port), Framed(), None)
    else:
        serve(int(port), lambda _, data: BARE_ANSWER, File(path))


if __name__ == "__main__":
    main()
