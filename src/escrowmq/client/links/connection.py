"""One connection of the lean carrier: what leaves, what comes back, and how it ends. ``docs/lean.md`` has the bytes.

One class, two ways of reading. Without an event loop a thread reads and calls back; with one the loop itself reads, and there is
no thread. Writing is the same on both: whoever sends writes at once, and what the socket does not take is kept, in order:
a thread waits for the socket with it, for a bounded time; on the loop, and on the thread that reads, nobody waits for it, and it
leaves when the socket takes it. So the reader never stops reading because the broker does not.

The reader alone ends a connection: it notices the end, fails what is unanswered, oldest first, and closes the socket. Others
cut it off (``cut``), which the reader notices.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from escrowmq.client.links.streams import STALL_SECONDS, perhaps_healing
from escrowmq.client.links.ways import Request
from escrowmq.errors import Code, EscrowError, Unknown, unsent
from escrowmq.platform.forks import FORKED
from escrowmq.wire import ANSWER, Exchange, Json, lean
from escrowmq.wire.lean.frames import Frame, Kind, finished
from escrowmq.wire.lean.rows import NUMBER_OF

READ_BYTES = 1 << 16
UNSENT_BYTES = 16 << 20
"""What may wait because the socket is full, before a request is refused as not sent."""
WRITE_SECONDS = STALL_SECONDS
"""A socket that takes nothing for this long is given up."""
TICK_SECONDS = 1.0
SILENT_TICKS, GONE_TICKS = 3, 12
"""Ticks of silence, while something is unanswered, after which one asks whether the broker is there, and after which it is not."""
NOTHING = pa.RecordBatch.from_pylist([], schema=ANSWER[Exchange.RECEIVE])

_log = logging.getLogger(__name__)
_ROWS = frozenset({Exchange.SEND, Exchange.PREPARE})


def encoded(request: Request) -> bytearray:
    """The frame of a request, but for its number; of a parcel the same content whenever it is sent."""
    if request.kind is Exchange.RECEIVE:
        return bytearray(lean.receive_request(0, request.options))
    if request.parcel is None:
        assert request.batch is not None
        return lean.batch_request(0, request.kind, request.batch, request.options)
    before = request.parcel.memo
    if isinstance(before, bytearray):  # which may still wait in a connection that is no more
        return bytearray(before)
    request.parcel.memo = made = lean.parcel_request(0, request.parcel)
    return made


class LeanConnection:
    """A socket whose broker has welcomed us. ``answered(request, answer)`` is called once for each request that was taken,
    ``ended(connection)`` once, after the last of them; on the thread that reads, or on the loop.

    ``loop``: the event loop that reads; None: a thread does. ``patience``: ticks of silence, while something is unanswered, after which it asks whether the
    broker is there; fewer where another broker may lead by now.
    """

    def __init__(
        self,
        broker: socket.socket,
        welcome: lean.Welcome,
        reader: lean.Reader,
        answered: Callable[[Request, Any], None],
        ended: Callable[[LeanConnection], None],
        loop: asyncio.AbstractEventLoop | None = None,
        *,
        greeting: Json | None = None,
        patience: int = SILENT_TICKS,
    ) -> None:
        self._patience = patience
        self.greeting = greeting
        """What the broker had said over Flight when this was made."""
        self.most = welcome.max_request_bytes
        broker.setblocking(loop is None)
        self._socket = broker
        self._frames = reader
        self._answered, self._ended = answered, ended
        self._ids = itertools.count(1)
        self._pending: dict[int, Request] = {}
        self._lock = threading.RLock()  # guards what leaves, and orders the last request before the end
        self._out: deque[memoryview] = deque()  # what the socket did not take
        self._accepted = self._left = 0  # bytes, ever
        self._reason: EscrowError | None = None  # why it ends, or takes no more
        self._dead = False
        self._over = threading.Event()
        self._quiet = threading.Event()  # nothing is unanswered, and nothing more is taken
        self.answers = 0
        self._silent = 0  # ticks since something came
        self._ticking = False
        self._loop, self._reader = loop, 0
        self._watching = False  # the loop waits until the socket takes more
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Begin to read; without a thread to be had, or when the loop is closed, it ends instead."""
        try:
            if self._loop is None:
                self._thread = threading.Thread(target=self._run, name="escrowmq-lean", daemon=True)
                self._thread.start()
            else:
                self._loop.call_soon_threadsafe(self._begin_on_loop, self._loop)
        except RuntimeError as problem:
            self._thread = None
            self.give_up(Unknown(Code.DISCONNECTED, f"nobody can read the connection: {problem}"))

    def reading(self) -> bool:
        """Whether this is the thread that reads, or the loop."""
        if self._loop is None:
            return threading.get_ident() == self._reader
        try:
            return asyncio.get_running_loop() is self._loop
        except RuntimeError:
            return False

    @property
    def usable(self) -> bool:
        """Whether it takes requests."""
        return self._reason is None

    @property
    def doubtful(self) -> bool:
        """Whether something is unanswered, and the broker did not even say that it is there when it was asked."""
        return self._silent > self._patience and bool(self._pending)

    # What callers do

    def send(self, request: Request) -> None:
        """Send a request whose frame is made. Raises ``unsent(...)`` if it was not taken; then nothing of it left."""
        frame = request.frame
        assert frame is not None
        number = request.number = next(self._ids)
        receive = request.kind is Exchange.RECEIVE
        finished(frame, Kind.BATCH if request.parcel is None and not receive else NUMBER_OF[request.kind], number)
        with self._lock:
            if self._reason is not None:
                closed = self._reason.code is Code.CLOSED
                raise Unknown(Code.CLOSED, self._reason.message) if closed else unsent(self._reason.message)
            if self._accepted - self._left > UNSENT_BYTES:
                raise unsent("the connection is full")
            self._pending[number] = request
            mark = self._put(frame)
        if mark:
            self._see_it_leave(mark)

    def withdraw(self, request: Request) -> None:
        """Take a receive back: it is answered, or fails. Returns at once."""
        with self._lock:
            if self._reason is None and request.number in self._pending:
                mark = self._put(lean.cancel(request.number))
                if mark and self._loop is not None:
                    self._watch_later()

    def tick(self) -> bool:
        """Every ``TICK_SECONDS``, while something is unanswered: see whether the broker is there. False when nothing is."""
        if self._loop is None:
            self._look(time.monotonic())
        elif not self._ticking:  # a loop that is held up is no silent broker
            self._ticking = True
            try:
                self._loop.call_soon_threadsafe(self._tick_on_loop)
            except RuntimeError:
                self.give_up(Unknown(Code.DISCONNECTED, "the event loop is closed"))
        return bool(self._pending)

    def retire(self, reason: EscrowError) -> None:
        """Take no more; withdraw the receives that wait. What was begun is still answered."""
        with self._lock:
            if self._reason is None:
                self._reason = reason
                receives = [n for n, request in list(self._pending.items()) if request.kind is Exchange.RECEIVE]
                for number in receives:
                    self._put(lean.cancel(number))
                mark = self._put(lean.goodbye())
                if mark and self._loop is not None:
                    self._watch_later()
            if not self._pending:
                self._quiet.set()

    def end(self, deadline: float) -> None:
        """After :meth:`retire`: wait for what is unanswered until ``deadline`` (monotonic seconds), then cut it off and wait for its end,
        shortly. Waits for nothing on the thread or the loop that reads."""
        reading = self.reading()
        if not reading and not self._dead:
            self._quiet.wait(max(deadline - time.monotonic(), 0.0))
        self.cut(self._reason or Unknown(Code.CLOSED))
        if reading:
            if self._loop is not None:
                self.give_up(self._reason or Unknown(Code.CLOSED))
            return
        if not self._over.wait(1.0) and self._loop is not None:  # nobody runs that loop any more
            self.give_up(self._reason or Unknown(Code.CLOSED))
        if self._thread is not None and self._over.is_set():
            self._thread.join(1.0)

    def cut(self, reason: EscrowError) -> None:
        """Give it up, from any thread: the reader notices."""
        with self._lock:
            self._cut(reason)

    def ends_by(self, deadline: float) -> None:
        """Wait for the thread that reads until ``deadline`` (monotonic seconds)."""
        if self._thread is not None and not self.reading():
            self._thread.join(max(deadline - time.monotonic(), 0.0))

    def forked(self) -> None:
        """In a forked child: the socket is the parent's, so only its descriptor is closed; nothing is told to anybody."""
        self._lock = threading.RLock()
        self._reason, self._dead = Unknown(Code.CLOSED, FORKED), True
        self._pending, self._out = {}, deque()
        self._socket.close()

    # What leaves

    def _put(self, data: bytes | bytearray) -> int:
        """Send, or keep what the socket does not take; then the mark at which it has left, else 0. With the lock held."""
        self._accepted += len(data)
        rest = memoryview(data)
        if not self._out:
            rest = rest[self._push(rest) :]
        if not rest or self._dead:
            return 0
        self._out.append(rest)
        return self._accepted

    def _push(self, data: memoryview) -> int:
        """How much of it the socket took. With the lock held."""
        try:
            took = self._socket.send(data, socket.MSG_DONTWAIT)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as problem:
            self._cut(Unknown(Code.DISCONNECTED, f"the connection broke: {problem}"))
            return 0
        except BaseException:  # an interrupt: nobody knows how much of the frame left
            self._cut(Unknown(Code.DISCONNECTED, "interrupted"))
            raise
        self._left += took
        return took

    def _flush(self) -> None:
        """Send what was kept, as far as the socket takes it. With the lock held."""
        while self._out and not self._dead:
            first = self._out[0]
            took = self._push(first)
            if took < len(first):
                self._out[0] = first[took:]
                return
            self._out.popleft()

    def _see_it_leave(self, mark: int) -> None:
        """Wait until what was accepted up to ``mark`` left, or the socket took nothing for long; not where one must not wait."""
        if self._loop is not None:
            self._watch_later()
            return
        if self.reading():
            return
        left, since = self._left, time.monotonic()
        poll = select.poll()
        while True:
            with self._lock:
                self._flush()
                if self._dead or self._left >= mark:
                    return
                poll.register(self._socket, select.POLLOUT)
                if self._left > left:
                    left, since = self._left, time.monotonic()
                elif time.monotonic() - since > WRITE_SECONDS:
                    self._cut(Unknown(Code.DISCONNECTED, "the broker takes nothing more"))
                    return
            poll.poll(1000)

    def _cut(self, reason: EscrowError) -> None:
        """With the lock held."""
        if self._reason is None:
            self._reason = reason
        if not self._dead:
            try:
                self._socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it is gone already: the reader reads its end

    # What comes back

    def _run(self) -> None:
        """The thread that reads, when there is no loop."""
        self._reader = threading.get_ident()
        problem: EscrowError
        try:
            while True:
                if self._out:
                    self._flush_while_waiting()
                data = self._socket.recv(READ_BYTES)
                if not data:
                    problem = Unknown(Code.DISCONNECTED, "the broker closed the connection")
                    break
                self._take(data)
        except EscrowError as raised:
            problem = raised
        except OSError as raised:
            problem = Unknown(Code.DISCONNECTED, f"the connection broke: {raised}")
        except Exception as raised:
            _log.exception("an answer could not be taken in")
            problem = Unknown(Code.DISCONNECTED, f"an answer could not be taken in: {raised!r}")
        self.give_up(problem)

    def _flush_while_waiting(self) -> None:
        """What this thread could not send leaves beside its reading."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN | select.POLLOUT)
        while self._out:
            if any(event & ~select.POLLOUT for _, event in poll.poll(1000)):
                return
            with self._lock:
                self._flush()

    def _take(self, data: bytes) -> None:
        """Take in what came. Raises EscrowError for what cannot be read: the connection is of no use then."""
        self._silent = 0
        for frame in self._frames.feed(data):
            if frame.number == 0:
                self._told(frame)
                continue
            request = self._pending.pop(frame.number, None)
            if request is None:
                raise Unknown(Code.DISCONNECTED, "an answer that nobody asked for")
            try:
                answer = _answer(frame, request)
            except EscrowError as problem:
                garbage = Unknown(Code.DISCONNECTED, f"an answer cannot be read: {problem.message}")
                self.cut(garbage)  # first: nothing more is to be sent here
                self._answered(request, garbage)
                raise garbage from None
            self.answers += 1
            self._answered(request, answer)
        if self._reason is not None and not self._pending:
            self._quiet.set()

    def _told(self, frame: Frame) -> None:
        """What the broker says of the connection itself."""
        said = lean.read_answer(frame)
        if isinstance(said, EscrowError):
            raise Unknown(Code.DISCONNECTED, f"the broker ends the connection: {said.message}", said.hint)
        if frame.kind == Kind.GONE:
            with self._lock:
                if self._reason is None:
                    self._reason = Unknown(Code.DISCONNECTED, "the broker is stopping")
        elif frame.kind != Kind.PONG:
            raise Unknown(Code.DISCONNECTED, f"a frame of kind {frame.kind:#04x} that belongs to no request")

    def _look(self, now: float) -> None:
        """Whether an answer is overdue, or the broker silent."""
        pending = list(self._pending.values())
        if not pending:
            self._silent = 0
            return
        self._silent += 1
        if self._out and self._loop is None:
            with self._lock:
                self._flush()
        if any(request.expiry < now for request in pending):
            self.cut(Unknown(Code.DISCONNECTED, "an answer is overdue"))
        elif self._silent >= GONE_TICKS:
            self.cut(Unknown(Code.DISCONNECTED, "the broker is silent"))
        elif self._silent == self._patience:
            with self._lock:
                if not self._dead and not self._out:
                    self._put(lean.ping())
                    if self._out and self._loop is not None:
                        self._watch_later()

    def give_up(self, problem: EscrowError) -> None:
        """Nothing more is read: fail what is unanswered, oldest first."""
        with self._lock:
            if self._dead:
                return
            self._dead = True
            self._reason = problem = self._reason or problem
            self._out.clear()
            left, self._pending = self._pending, {}
        self._close_socket()
        if problem.code is not Code.CLOSED:
            problem = Unknown(Code.DISCONNECTED, problem.message, problem.hint)
        for number in sorted(left):
            self._answered(left[number], Unknown(problem.code, problem.message, problem.hint))
        self._quiet.set()
        self._ended(self)
        self._over.set()

    def _close_socket(self) -> None:
        loop = self._loop
        if loop is not None and not loop.is_closed() and loop.is_running() and not self.reading():
            try:
                loop.call_soon_threadsafe(self._close_socket)
                return
            except RuntimeError:
                pass  # closed by now
        with self._lock:
            if loop is not None and not loop.is_closed() and self._socket.fileno() >= 0:
                loop.remove_reader(self._socket)
                loop.remove_writer(self._socket)
            self._socket.close()

    # On an event loop

    def _begin_on_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._dead:
            loop.add_reader(self._socket, self._readable)

    def _readable(self) -> None:
        if self._dead:
            return
        try:
            data = self._socket.recv(READ_BYTES)
            if not data:
                raise Unknown(Code.DISCONNECTED, "the broker closed the connection")
            self._take(data)
        except (BlockingIOError, InterruptedError):
            pass
        except EscrowError as problem:
            self.give_up(problem)
        except OSError as problem:
            self.give_up(Unknown(Code.DISCONNECTED, f"the connection broke: {problem}"))
        except Exception as problem:
            _log.exception("an answer could not be taken in")
            self.give_up(Unknown(Code.DISCONNECTED, f"an answer could not be taken in: {problem!r}"))

    def _watch_later(self) -> None:
        """Have the loop send the rest when the socket takes it."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._watch_on_loop, self._loop)
        except RuntimeError:
            pass  # the loop is closed: the next tick ends the connection

    def _watch_on_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._out and not self._watching and not self._dead:
            self._watching = True
            loop.add_writer(self._socket, self._writable)

    def _writable(self) -> None:
        with self._lock:
            self._flush()
            if self._out or self._dead:
                return
            self._watching = False
        assert self._loop is not None
        self._loop.remove_writer(self._socket)

    def _tick_on_loop(self) -> None:
        self._ticking = False
        self._readable()  # what came while the loop was busy
        if not self._dead:
            self._look(time.monotonic())


def _answer(frame: Frame, request: Request) -> Any:
    """What a frame says to a request. Raises EscrowError for what is no answer to it."""
    answer = lean.read_answer(frame, request.kind)
    if isinstance(answer, EscrowError):
        return perhaps_healing(answer)
    if frame.kind == Kind.WITHDRAWN and request.kind is Exchange.RECEIVE:
        return NOTHING
    wanted: type = pa.RecordBatch
    if request.parcel is not None:
        wanted = list if request.kind in _ROWS else bytes
    if frame.kind not in (Kind.ANSWERED, Kind.ROWS, Kind.CODES) or not isinstance(answer, wanted):
        raise Unknown(Code.DISCONNECTED, f"a frame of kind {frame.kind:#04x} is no answer to {request.kind}")
    return answer
