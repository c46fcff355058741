"""The requests of one connection: begun in the order in which they came, as far as its bounds allow, and answered in any order.

Rules:

1. A request is begun when the connection has fewer than ``MAX_REQUESTS`` and ``PIPELINED_BYTES`` without an answer, fewer than
   ``UNREAD_BYTES`` that its client does not read, and room for its bytes among those of all clients; else it waits here, and nothing more
   is read from the connection. One that finds no room for ``PATIENCE`` is refused.
2. A content that cannot be read is refused to its number. A client that does not keep to the protocol is told so, and closed.
3. When the connection ends, receives that wait are withdrawn, and what was leased for an answer that did not leave whole is let go
   at once, its attempt not counted. All other requests take effect.
4. What the requests hold is given back with their answers, also when the connection is gone by then.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from typing import Any

import pyarrow as pa

from escrowmq.broker.calls import Dispatcher
from escrowmq.broker.failures import broker_failed, for_client
from escrowmq.broker.serving.lean.connection import Connection
from escrowmq.broker.serving.room import Allowance, Held, Room
from escrowmq.errors import Code, EscrowError, error
from escrowmq.wire import Exchange, lean
from escrowmq.wire.lean import Kind
from escrowmq.wire.lean.requests import MAX_PING_BYTES
from escrowmq.wire.lean.rows import EXCHANGE_OF
from escrowmq.wire.parcels import Answer

MAX_REQUESTS = 4096
PIPELINED_BYTES = 16 << 20
UNREAD_BYTES = 1 << 20
"""As of an exchange over Flight."""
CALL_BYTES = 1024
"""What a request under way takes beside its content."""
ROW_BYTES, PAIR_BYTES = 256, 128
"""What a row, and a property of one, become beside their content when they are read."""


_WITH_PROPERTIES = (Kind.SEND, Kind.PREPARE)
_MESSAGES = (*_WITH_PROPERTIES, Kind.BATCH)


class Requests:
    """What one client has asked and not been answered. Its methods are the loop's, but for the answers that come in."""

    def __init__(
        self, calls: Dispatcher, room: Room, connection: Connection, welcome: Callable[[], lean.Welcome]
    ) -> None:
        self._calls = calls
        self._room = room
        self._connection = connection
        self._welcome = welcome
        self._held: Held = connection.held
        self._call = ExitStack()
        self._lock = threading.Lock()
        self._begun: dict[int, Future[pa.RecordBatch] | None] = {}  # a future: a receive, which can be withdrawn
        self._open = self._unanswered = 0  # requests, and their bytes; until the answer was given to the connection
        self._waiting: deque[lean.Frame] = deque()
        self._counted = 0  # bytes of a frame that is not whole, as the room knows it
        self._ended = False
        self.welcomed = False
        """Whether the client has greeted."""
        self.count = 0
        """Requests that were begun."""
        self.paused = False
        """Whether something waits here for answers, for its client to read, or for room; then nothing more is read."""
        self.leaving = False
        """The client sends no more, or may not: what has begun is answered, then the connection closes."""
        self.frames_then, self.whole_since = 0, 0.0
        """How many frames had come whole at the last look, and since when no other has (monotonic seconds)."""
        self.no_longer = 0.0
        """When a client that was refused is closed, whatever it still says (monotonic seconds); 0: it is not refused."""

    @property
    def busy(self) -> bool:
        """Whether something has no answer yet."""
        return self._open > 0

    @property
    def done(self) -> bool:
        """Whether a client that is leaving has got everything."""
        return self.leaving and not (self._open or self._waiting or self._connection.unsent_bytes)

    def take(self, data: bytes) -> None:
        """What came. Bad bytes refuse the client; nothing is raised."""
        if self.leaving:
            return
        try:
            self._waiting.extend(self._connection.reader.feed(data))
            if not self.welcomed and self._waiting:
                self._greeted(self._waiting.popleft())
        except EscrowError as problem:
            self.refuse(problem)
            return
        if self.welcomed:
            waiting = self._connection.reader.waiting
            if waiting != self._counted:
                self._room.change(self._held, waiting - self._counted)
                self._counted = waiting
            self.go_on()

    def _greeted(self, frame: lean.Frame) -> None:
        if frame.kind != Kind.HELLO:
            raise error(Code.BAD_REQUEST, "the first frame is no greeting")
        lean.read_hello(frame.content)
        held = self._call.enter_context(self._room.call(self._connection.peer, self._held))
        self._connection.freed = lambda size: self._room.change(held, -size)
        self.welcomed = True
        welcome = self._welcome()
        self._connection.reader.most = welcome.max_request_bytes
        self._say(lean.welcome(welcome))

    def refuse(self, problem: EscrowError) -> None:
        """Say why to a client that does not keep to the protocol, and read no more of it."""
        self._say(lean.refused(0, problem))
        self.leave()
        self._connection.say_no_more()
        self.no_longer = time.monotonic() + 1.0

    def leave(self) -> None:
        """The client sends no more: what has begun is answered, but for receives, which are withdrawn."""
        self.leaving = True
        self._waiting.clear()
        self.paused = False
        self._withdraw()

    def _say(self, frame: bytes | bytearray) -> None:
        """Send what answers no request."""
        size = len(frame) if self.welcomed else 0
        self._room.change(self._held, size)
        if self._connection.send(frame):
            self._room.change(self._held, -size)

    # Beginning

    def go_on(self) -> None:
        """Begin what waits, as far as the bounds allow."""
        try:
            while self._waiting and not self.leaving:
                if self._must_wait():
                    return
                if not self._begin(self._waiting[0]):
                    self.paused = True
                    return
                if self._waiting:
                    self._waiting.popleft()
        except EscrowError as problem:
            self.refuse(problem)
        if self.leaving:
            self.paused = False
        else:
            self._must_wait()

    def _must_wait(self) -> bool:
        """Whether nothing may be begun or read until an answer has come or left. Looked at again when that has been noted: whoever
        answers calls the loop only then."""
        self.paused = False
        if not self._may_begin():
            self.paused = True
            self.paused = not self._may_begin()
        return self.paused

    def _may_begin(self) -> bool:
        return (
            self._connection.unsent_bytes < UNREAD_BYTES
            and self._open < MAX_REQUESTS
            and self._unanswered < PIPELINED_BYTES
        )

    def _begin(self, frame: lean.Frame) -> bool:
        """Begin what a frame asks; False when there is no room for it yet. EscrowError: the client is to be refused."""
        kind, number, content = frame
        if kind == Kind.PING:
            if len(content) > MAX_PING_BYTES:
                raise error(Code.BAD_REQUEST, f"a ping of {len(content)} bytes; the limit is {MAX_PING_BYTES}")
            self._say(lean.pong(bytes(content)))
        elif kind == Kind.CANCEL:
            if (receive := self._begun.get(number)) is not None:
                receive.cancel()
        elif kind == Kind.GOODBYE:
            self.leaving = True
            self._withdraw()
        elif kind in EXCHANGE_OF or kind == Kind.BATCH:
            return self._request(kind, number, content)
        else:
            unknown = error(Code.BAD_REQUEST, f"a frame of kind {kind:#04x}")
            if not number:
                raise unknown
            self._say(lean.refused(number, unknown))
        return True

    def _request(self, kind: int, number: int, content: memoryview) -> bool:
        if not number:
            raise error(Code.BAD_REQUEST, "a request with the number 0, which is that of frames that belong to none")
        if number in self._begun:
            raise error(Code.BAD_REQUEST, f"request {number} has no answer yet, and another has its number")
        size = CALL_BYTES + len(content)
        if not self._room.offer(self._held, size, messages=kind in _MESSAGES):
            return self._no_room(number)
        self.count += 1
        try:
            if kind == Kind.RECEIVE:
                options: Any = lean.read_receive(content)
                self._note(number, size)
                self._receive(number, size, options)
            elif kind == Kind.BATCH:
                asked, batch, options = lean.read_batch(content)
                self._note(number, size)
                begun = self._calls.exchange(asked, batch, options, self._held.peer)
                begun.add_done_callback(partial(self._batch_came, number, size, None))
            else:
                parcel = lean.read_parcel(kind, content)
                more = ROW_BYTES * len(parcel.rows)
                if kind in _WITH_PROPERTIES:
                    more += PAIR_BYTES * sum(len(row[4]) for row in parcel.rows if row[4])
                self._room.change(self._held, more)
                self._note(number, size + more)
                self._calls.parcel(
                    parcel, partial(self._parcel_came, number, size + more), len(content), self._held.peer
                )
        except EscrowError as problem:  # it could not be read: nothing has begun
            self._room.change(self._held, -size)
            self._say(lean.refused(number, problem))
        return True

    def _no_room(self, number: int) -> bool:
        """There is no room for a request: refuse it if that has been so for too long. Whether it was."""
        if self._room.patience(self._held) > 0.0:
            return False
        self._say(lean.refused(number, self._room.refusal()))
        return True

    def _note(self, number: int, size: int) -> None:
        self._begun[number] = None
        with self._lock:
            self._open += 1
            self._unanswered += size

    def _receive(self, number: int, size: int, options: Any) -> None:
        allowance = Allowance(self._room, self._held, self._unread, UNREAD_BYTES)
        begun = self._calls.exchange(Exchange.RECEIVE, None, options, allowance=allowance)
        self._begun[number] = begun
        group = options.get("group")
        begun.add_done_callback(lambda done: self._batch_came(number, size, group, done, allowance.size))

    def _unread(self) -> int:
        return self._connection.unsent_bytes

    # Answers, on any thread; none of these raises

    def _parcel_came(self, number: int, size: int, answer: Answer | EscrowError) -> None:
        try:
            if isinstance(answer, bytes):
                frame: bytes | bytearray = lean.codes_answered(number, answer)
            elif isinstance(answer, EscrowError):
                frame = lean.refused(number, for_client(answer))
            else:
                frame = lean.rows_answered(number, answer)
        except Exception as problem:
            frame = lean.refused(number, broker_failed("answering a parcel", problem))
        self._answered(number, size, frame)

    def _batch_came(
        self, number: int, size: int, group: str | None, done: Future[pa.RecordBatch], granted: int = 0
    ) -> None:
        """``group``: of the consumers, of a receive; ``granted``: the bytes that its answer was given room for."""
        lost = None
        try:
            if done.cancelled():
                frame: bytes | bytearray = lean.withdrawn(number)
            elif (problem := done.exception()) is not None:
                frame = lean.refused(number, for_client(broker_failed("answering", problem)))
            else:
                batch = done.result()
                frame = lean.batch_answered(number, batch)
                if group is not None and batch.num_rows:
                    lost = partial(self._calls.give_back_unseen, group, batch)
        except Exception as problem:
            frame = lean.refused(number, broker_failed("answering a batch", problem))
        self._answered(number, size, frame, lost, granted)

    def _answered(self, number: int, size: int, frame: bytes | bytearray, lost: Any = None, granted: int = 0) -> None:
        """Send an answer. What its request held is given back; what the answer holds, as soon as it has left."""
        self._begun.pop(number, None)  # before the client can use the number again
        self._room.change(self._held, len(frame) - size - granted)
        if self._connection.send(frame, lost):
            self._room.change(self._held, -len(frame))
        with self._lock:
            self._open -= 1
            self._unanswered -= size
            last = self._ended and not self._open
        if last:
            self._call.close()
        elif self.paused or self.leaving:
            self._connection.attend()

    # The end

    def _withdraw(self) -> None:
        """Withdraw waiting receives, so that nothing is leased to a client that has left."""
        for receive in list(self._begun.values()):
            if receive is not None:
                receive.cancel()

    def say_goodbye(self) -> None:
        """The broker stops, and all that had begun is answered."""
        self._say(lean.goodbye_from_broker())
        self.leave()

    def end(self) -> None:
        """The connection is closed."""
        self.leaving = True
        self._waiting.clear()
        self._withdraw()
        with self._lock:
            self._ended = True
            last = not self._open
        if last:
            self._call.close()
