"""The floors' load programs: what each work makes a client do, and nothing that could be left out. See
``peers/loads/_load.py``.

An address names the kind: ``hand:`` threads that hand over to one other and wait, ``bare:PORT`` round trips of bytes,
``frames:PORT`` round trips of frames, ``batches:PORT`` whole batches in frames.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

sys.path.append(str(Path(__file__).parents[1] / "peers" / "loads"))
from _load import Arguments, arguments, begin, end, in_threads
from server import BARE_ANSWER, END, ENDED, ENDING, OUTGOING, PREPARE, PREPARED, READ_BYTES

from escrowmq.wire import PARCEL_ROWS, Exchange, Parcel, frames
from escrowmq.wire.channel import MAX_PIECES
from escrowmq.wire.frames import Assembler, Gatherer

OPTIONS: Any = {"session": 1}
TOPIC = "bench"
HEAD_BYTES = 64
"""What a half message has beside its body on the way, about; and a whole end."""


def row(body: bytes) -> tuple[Any, ...]:
    """An outgoing row without anything special."""
    return TOPIC, body, None, None, None, None, -1, time.time_ns() // 1000, 0, 0, None


def connected(port: str) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", int(port)))
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


# Threads that hand over


class Caller:
    """A blocked caller, and the one that it wakes (see decision 0030)."""

    __slots__ = ("lock", "next")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.lock.acquire()
        self.next: Caller | None = None


def hand(given: Arguments) -> None:
    waiting: deque[Caller] = deque()
    wake = threading.Lock()
    wake.acquire()

    def answer() -> None:
        while wake.acquire():
            first: Caller | None = None
            while waiting:
                one = waiting.pop()
                one.next, first = first, one
            if first is not None:
                first.lock.release()

    threading.Thread(target=answer, daemon=True).start()

    def caller(_: int) -> Callable[[], int]:
        def step() -> int:
            for _ in (PREPARE, END):
                me = Caller()
                waiting.append(me)
                if wake.locked():
                    try:
                        wake.release()
                    except RuntimeError:  # another was quicker
                        pass
                me.lock.acquire()
                if me.next is not None:
                    me.next.lock.release()
            return 1

        return step

    in_threads(given, caller)


# Round trips, each caller on a socket of its own


def bare(given: Arguments, port: str) -> None:
    def caller(_: int) -> Callable[[], int]:
        broker, ending = connected(port), b"e" * HEAD_BYTES
        prepare = b"p" * HEAD_BYTES + given.body

        def step() -> int:
            for request in (prepare, ending):
                broker.sendall(request)
                assert broker.recv(READ_BYTES) == BARE_ANSWER
            return 1

        return step

    in_threads(given, caller)


def framed(given: Arguments, port: str) -> None:
    def caller(_: int) -> Callable[[], int]:
        broker, assembler = connected(port), Assembler(1 << 24)

        def ask(parcel: Parcel) -> Any:
            broker.sendall(frames.parcel_request(1, parcel))
            while not (came := assembler.filled(broker.recv_into(assembler.target()))):
                pass
            return frames.read_rows(came[0])

        def step() -> int:
            [prepared] = ask(Parcel(Exchange.PREPARE, [row(given.body)], OPTIONS, (1, 1)))
            assert ask(Parcel(Exchange.END, [(prepared[4], 1)], OPTIONS)) == b"\1"
            return 1

        return step

    in_threads(given, caller)


# Tasks of an event loop


class Tasks:
    """Futures and frames: a row joins what leaves at the end of this turn of the loop, an answer resolves its
    futures."""

    def __init__(self, loop: asyncio.AbstractEventLoop, broker: socket.socket) -> None:
        self._loop, self._broker = loop, broker
        self._assembler = Assembler(1 << 24)
        self._open: dict[Exchange, tuple[list[Any], list[asyncio.Future[Any]]]] = {}
        self._pending: dict[int, tuple[Exchange, list[asyncio.Future[Any]]]] = {}
        self._number = 0
        self._unsent = b""
        broker.setblocking(False)
        loop.add_reader(broker, self._readable)

    def ask(self, kind: Exchange, row: Any) -> asyncio.Future[Any]:
        if not self._open:
            self._loop.call_soon(self._leave)
        future = self._loop.create_future()
        rows, futures = self._open.setdefault(kind, ([], []))
        rows.append(row)
        futures.append(future)
        return future

    def _leave(self) -> None:
        left, self._open = self._open, {}
        requests = [self._unsent]
        for kind, (rows, futures) in left.items():
            for at in range(0, len(rows), PARCEL_ROWS):
                self._number += 1
                some = slice(at, at + PARCEL_ROWS)
                self._pending[self._number] = futures[some]
                requests.append(frames.parcel_request(self._number, Parcel(kind, rows[some], OPTIONS, (1, 1))))
        self._write(b"".join(requests))

    def _write(self, data: bytes) -> None:
        try:
            sent = self._broker.send(data)
        except BlockingIOError:
            sent = 0
        if self._unsent and sent == len(data):
            self._loop.remove_writer(self._broker)
        self._unsent = data[sent:]
        if self._unsent:
            self._loop.add_writer(self._broker, lambda: self._write(self._unsent))

    def _readable(self) -> None:
        for frame in self._assembler.filled(self._broker.recv_into(self._assembler.target())):
            futures = self._pending.pop(frame.number)
            for future, result in zip(futures, frames.read_rows(frame), strict=True):
                future.set_result(result)


def tasks(given: Arguments, port: str) -> None:
    async def main() -> None:
        asked, done = Tasks(asyncio.get_running_loop(), connected(port)), 0

        async def caller(until: float) -> None:
            nonlocal done
            while time.perf_counter() < until:
                prepared = await asked.ask(Exchange.PREPARE, row(given.body))
                await asked.ask(Exchange.END, (prepared[4], 1))
                done += 1

        async def all_callers(seconds: float) -> None:
            until = time.perf_counter() + seconds
            await asyncio.gather(*(caller(until) for _ in range(given.callers)))

        await all_callers(given.warm)
        begun, done = begin(), 0
        await all_callers(given.seconds)
        end(begun, done, [])

    asyncio.run(main())


# Whole batches


class Stream:
    """One connection; the batches of callers that wait leave as one. Two may be under way."""

    def __init__(self, port: str, command: bytes, answers: pa.Schema) -> None:
        self._broker, self._answers, self._number = connected(port), answers, 0
        self._broker.sendall(frames.ping(command))
        self._lock = threading.Lock()
        self._waiting: list[tuple[pa.RecordBatch, list[Any], threading.Lock]] = []
        self._under_way: deque[list[tuple[pa.RecordBatch, list[Any], threading.Lock]]] = deque()
        threading.Thread(target=self._read, daemon=True).start()

    def ask(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        answer: list[Any] = []
        mine = threading.Lock()
        mine.acquire()
        with self._lock:
            self._waiting.append((batch, answer, mine))
            self._leave()
        mine.acquire()
        return answer[0]

    def _leave(self) -> None:
        """With the lock held."""
        while self._waiting and len(self._under_way) < 2:
            taken, self._waiting = self._waiting, []
            self._under_way.append(taken)
            batches = [batch for batch, _, _ in taken]
            self._number += 1
            whole = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
            pieces = frames.columns_request(self._number, Exchange.PREPARE, whole, {})
            while pieces:
                pieces = frames.drop_bytes(pieces, self._broker.sendmsg(pieces[:MAX_PIECES]))

    def _read(self) -> None:
        gatherer = Gatherer(1 << 26)
        assembler = Assembler(1 << 26, place=gatherer.place)
        while count := self._broker.recv_into(assembler.target()):
            for frame in assembler.filled(count):
                if (body := gatherer.add(frame)) is not None:
                    self._take(frames.decode_batch(body, self._answers))

    def _take(self, whole: pa.RecordBatch) -> None:
        with self._lock:
            answered = self._under_way.popleft()
            self._leave()
        at = 0
        for batch, answer, caller in answered:
            answer.append(whole.slice(at, batch.num_rows))
            at += batch.num_rows
            caller.release()


def batches(given: Arguments, port: str) -> None:
    prepare, ending = Stream(port, PREPARE, PREPARED), Stream(port, END, ENDED)
    topics, bodies = pa.array([TOPIC] * given.rows), pa.array([given.body] * given.rows)
    outcomes = pa.array(np.ones(given.rows, np.uint8))

    def caller(_: int) -> Callable[[], int]:
        def step() -> int:
            ids = np.zeros((given.rows, 2), np.uint64)
            ids[:, 1] = np.arange(given.rows)
            named = pa.Array.from_buffers(pa.binary(16), given.rows, [None, pa.py_buffer(ids)])
            prepared = prepare.ask(pa.RecordBatch.from_arrays([topics, bodies, named], schema=OUTGOING))
            ended = ending.ask(pa.RecordBatch.from_arrays([prepared.column(1), outcomes], schema=ENDING))
            return int(ended.num_rows)

        return step

    in_threads(given, caller)


def main() -> None:
    given = arguments()
    kind, _, port = given.address.partition(":")
    if kind == "hand":
        hand(given)
    elif kind == "bare":
        bare(given, port)
    elif kind == "batches":
        batches(given, port)
    elif given.work == "flight":
        tasks(given, port)
    else:
        framed(given, port)


if __name__ == "__main__":
    main()
