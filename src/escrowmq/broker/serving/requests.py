"""The requests of one connection: started in the order of arrival, within limits, and answered in any order.

Rules:

1. A request starts if the connection has fewer than ``MAX_REQUESTS`` and ``PIPELINED_BYTES`` without an answer, fewer
   than ``UNREAD_BYTES`` that its client does not read, and room for its bytes among those of all clients. Otherwise it
   waits, and nothing more is read from the connection. A request without room for ``PATIENCE`` is rejected. A large
   request allocates no memory before it has room.
2. Unreadable content is rejected under its request's number. A client that breaks the protocol gets the reason, and is
   disconnected.
3. When the connection ends, waiting receives are withdrawn, reads and watches end, and leases of an answer that was not
   sent completely are released at once without counting the attempt. All other requests take effect.
4. The memory of a request is released with its answer, also if the connection has ended before.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import pyarrow as pa

from escrowmq.broker.calls import Dispatcher
from escrowmq.broker.failures import broker_failed, for_client
from escrowmq.broker.guarded import GuardedCalls
from escrowmq.broker.serving.connection import Connection
from escrowmq.broker.serving.room import Allowance, Held, Room
from escrowmq.broker.serving.streams import Place, Read, Stream, Watch, Workers
from escrowmq.errors import Code, EscrowError, error
from escrowmq.rights import Caller, Guard
from escrowmq.wire import Exchange, Json, frames
from escrowmq.wire.frames import EXCHANGE_OF, MAX_PING_BYTES, Frame, Kind, Pieces
from escrowmq.wire.parcels import Answer

MAX_REQUESTS = 4096
PIPELINED_BYTES = 16 << 20
UNREAD_BYTES = 1 << 20
CALL_BYTES = 1024
"""Memory of a pending request besides its content."""
ROW_BYTES, PAIR_BYTES = 256, 128
"""Memory of a decoded row, and of a property, besides their content."""
JSON_COST = 16
"""Maximum bytes of memory per byte of JSON."""

_WITH_PROPERTIES = (Kind.SEND, Kind.PREPARE)
_MESSAGES = (*_WITH_PROPERTIES, Kind.COLUMNS)
_CALLS = (Kind.ACTION, Kind.READ, Kind.WATCH)

Welcoming = Callable[[], tuple[frames.Welcome, Json]]
"""Returns the broker's limits, and its answer to ``hello``. Raises EscrowError if it has none yet."""


class Requests:
    """The pending requests of one client. The loop calls its methods; answers arrive on any thread."""

    __slots__ = (
        "_begun",
        "_caller",
        "_calls",
        "_claimed",
        "_connection",
        "_counted",
        "_ended",
        "_entered",
        "_guard",
        "_held",
        "_lock",
        "_open",
        "_postponed",
        "_room",
        "_source",
        "_unanswered",
        "_waiting",
        "_welcome",
        "_workers",
        "count",
        "frames_then",
        "leaving",
        "no_longer",
        "paused",
        "welcomed",
        "whole_since",
    )

    def __init__(
        self,
        calls: Dispatcher,
        room: Room,
        connection: Connection,
        workers: Workers,
        welcome: Welcoming,
        guard: Guard | None = None,
        source: str = "",
    ) -> None:
        self._calls = calls
        self._guard = guard
        self._source = source  # the client's address, without its port
        self._caller: Caller | None = None
        self._postponed: tuple[EscrowError, float] | None = None  # a refusal, and when it is sent
        self._room = room
        self._connection = connection
        self._workers = workers
        self._welcome = welcome
        self._held: Held = connection.held
        self._lock = threading.Lock()
        self._begun: dict[int, Future[pa.RecordBatch] | Stream | None] | None = None
        self._open = self._unanswered = 0  # requests and their bytes, until the connection has the answer
        self._waiting: deque[Frame] | None = None
        self._counted = 0  # bytes of an incomplete small frame, as counted in the room
        self._claimed = 0  # bytes of room for an incomplete large frame
        self._entered = self._ended = False
        self.welcomed = False
        """Whether the client has greeted."""
        self.count = 0
        """Started requests."""
        self.paused = False
        """Whether a request waits for answers, for its client to read, or for room; then nothing more is read."""
        self.leaving = False
        """Whether no more requests are accepted: pending ones are answered, then the connection closes."""
        self.frames_then, self.whole_since = 0, 0.0
        """Completed frames at the last check, and since when there is no further one (monotonic seconds)."""
        self.no_longer = 0.0
        """Deadline (monotonic seconds) to close a rejected client; 0: it is not rejected."""

    @property
    def busy(self) -> bool:
        """Return whether the client waits for an answer, or for room for its request."""
        return self._open > 0 or self.paused or self._connection.owes

    @property
    def done(self) -> bool:
        """Return whether a leaving client has received all answers."""
        return self.leaving and not (self._open or self._waiting or self._connection.owes)

    def take(self, came: list[Frame]) -> None:
        """Process received frames: first the greeting, then requests. A frame that breaks the protocol rejects the
        client; nothing is raised."""
        if self.leaving:
            return
        try:
            if not self.welcomed and came:
                self._greet(came.pop(0))
        except EscrowError as problem:
            delay = self._guard.failures.delay(self._source) if self._guard is not None else 0.0
            if delay and problem.code is Code.UNAUTHENTICATED:
                self._postpone(problem, time.monotonic() + delay)
            else:
                self.refuse(problem)
            return
        if came:
            if self._waiting is None:
                self._waiting = deque()
            self._waiting.extend(came)
        if self.welcomed:
            small = self._connection.assembler.small
            if small != self._counted:
                self._room.change(self._held, small - self._counted)
                self._counted = small
            self.go_on()

    def _greet(self, frame: Frame) -> None:
        if frame.kind != Kind.HELLO:
            raise error(Code.BAD_REQUEST, "the first frame is no greeting")
        greeting = frames.read_hello(frame)
        if self._guard is not None:
            names = self._connection.certificate_names()
            self._caller = self._guard.enter(greeting.credential, names, self._source, self._connection.give_up)
            self._calls = GuardedCalls(self._calls, self._guard, self._caller)
        welcome, hello = self._welcome()
        self._room.enter(self._held)
        self._entered = True
        self._connection.freed = self._on_freed
        self.welcomed = True
        self._begun = {}
        self._connection.assembler.most = welcome.max_request_bytes
        self._connection.assembler.may_take = self._may_take
        self._send(frames.welcome(welcome, hello))

    def _on_freed(self, size: int) -> None:
        self._room.change(self._held, -size)

    def _may_take(self, size: int) -> bool:
        """Reserve room for a large incoming frame of ``size`` bytes. Returns whether there was room."""
        if not self._room.offer(self._held, size, messages=True):
            return False
        self._claimed = size
        return True

    def _postpone(self, problem: EscrowError, at: float) -> None:
        """Accept nothing more from a client, and send its refusal at ``at`` (monotonic s): who guesses tokens must
        wait."""
        self.leave()
        self._postponed, self.no_longer = (problem, at), at + 1.0

    def refuse_postponed(self, now: float) -> None:
        """Refuse a client whose refusal was postponed, if it is time."""
        if self._postponed is not None and now >= self._postponed[1]:
            problem, self._postponed = self._postponed[0], None
            self.refuse(problem)

    def refuse(self, problem: EscrowError) -> None:
        """Send the reason to a client that breaks the protocol, accept nothing more, and close soon."""
        self._send(frames.refused(0, problem))
        self.leave()
        self._connection.end_sending()
        self.no_longer = time.monotonic() + 1.0

    def leave(self) -> None:
        """Accept no more requests, drop unstarted ones, withdraw receives, end reads and watches; answer the others."""
        self.leaving = True
        self._waiting = None
        self.paused = False
        self._withdraw()

    def _send(self, frame: bytes | bytearray) -> None:
        """Send a frame that belongs to no request's answer. Its bytes are counted in the room until they are sent."""
        size = len(frame) if self.welcomed else 0
        self._room.change(self._held, size)
        if self._connection.send([[frame]]) and size:
            self._room.change(self._held, -size)

    # Starting

    def go_on(self) -> None:
        """Start waiting requests in their order, as far as the limits allow. Sets ``paused`` if one must wait."""
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
        elif not self._must_wait():
            self._waiting = None
            self.paused = self._lacks_room()

    def _lacks_room(self) -> bool:
        """Return whether a large frame waits for room. Reject one that has waited too long, and drop its bytes."""
        assembler = self._connection.assembler
        if not assembler.lacks_memory or assembler.target():
            return False
        if self._room.patience(self._held) > 0.0:
            return True
        number = assembler.refused.number
        assembler.skip()
        self._send(frames.refused(number, self._room.refusal()))
        return False

    def _must_wait(self) -> bool:
        """Return whether nothing may start or be read until an answer has arrived or was sent. Checked again after
        ``paused`` is set, because threads that answer wake the loop only then."""
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

    def _begin(self, frame: Frame) -> bool:
        """Start the request of a frame; return False if it has no room yet. Raises EscrowError to reject the client."""
        kind, number = frame.kind, frame.number
        if kind == Kind.PING:
            if len(frame.body) > MAX_PING_BYTES:
                raise error(Code.BAD_REQUEST, f"a ping of {len(frame.body)} bytes; the limit is {MAX_PING_BYTES}")
            self._send(frames.pong(bytes(frame.body)))
        elif kind in (Kind.CANCEL, Kind.CREDIT):
            self._steer(frame)
        elif kind == Kind.GOODBYE:
            self.leaving = True
            self._withdraw()
        elif kind in EXCHANGE_OF or kind == Kind.COLUMNS or kind in _CALLS:
            return self._request(frame)
        else:
            unknown = error(Code.BAD_REQUEST, f"a frame of kind {kind:#04x}")
            if not number:
                raise unknown
            self._send(frames.refused(number, unknown))
        return True

    def _steer(self, frame: Frame) -> None:
        """Withdraw a receive, end a read or a watch, or add credit to a read."""
        assert self._begun is not None
        begun = self._begun.get(frame.number)
        if frame.kind == Kind.CANCEL:
            if begun is not None:
                begun.cancel()
        elif isinstance(begun, Read):
            begun.add_credit(frames.read_credit(frame))

    def _request(self, frame: Frame) -> bool:
        assert self._begun is not None
        kind, number, content = frame.kind, frame.number, len(frame.head) + len(frame.body)
        if not number:
            raise error(Code.BAD_REQUEST, "a request with the number 0, which is that of frames that belong to none")
        if number in self._begun:
            raise error(Code.BAD_REQUEST, f"request {number} has no answer yet, and another has its number")
        size = CALL_BYTES + (JSON_COST * content if kind in _CALLS else content)
        if frames.is_large(frame):  # it had room before its memory was allocated
            self._room.change(self._held, size - self._claimed)
            self._claimed = 0
        elif not self._room.offer(self._held, size, messages=kind in _MESSAGES):
            return self._refuse_late(number)
        self.count += 1
        try:
            if kind in _CALLS:
                self._call(frame, size)
            elif kind == Kind.RECEIVE:
                options: Any = frames.read_receive(frame)
                self._note(number, size)
                self._receive(number, size, options)
            elif kind == Kind.COLUMNS:
                asked, batch, options = frames.read_columns(frame)
                self._note(number, size)
                begun = self._calls.exchange(asked, batch, options, self._held.peer)
                begun.add_done_callback(partial(self._on_batch, number, size, None))
            else:
                parcel = frames.read_parcel(frame)
                more = ROW_BYTES * len(parcel.rows)
                if kind in _WITH_PROPERTIES:
                    more += PAIR_BYTES * sum(len(row[4]) for row in parcel.rows if row[4])
                self._room.change(self._held, more)
                self._note(number, size + more)
                self._calls.parcel(parcel, partial(self._on_parcel, number, size + more), content, self._held.peer)
        except EscrowError as problem:  # unreadable: nothing has started
            self._room.change(self._held, -size)
            self._send(frames.refused(number, problem))
        return True

    def _refuse_late(self, number: int) -> bool:
        """Reject a request that has waited for room for too long. Returns whether it was rejected."""
        if self._room.patience(self._held) > 0.0:
            return False
        self._send(frames.refused(number, self._room.refusal()))
        return True

    def _note(self, number: int, size: int, begun: Future[pa.RecordBatch] | Stream | None = None) -> None:
        assert self._begun is not None
        self._begun[number] = begun
        with self._lock:
            self._open += 1
            self._unanswered += size

    def _receive(self, number: int, size: int, options: Any) -> None:
        assert self._begun is not None
        allowance = Allowance(self._room, self._held, self._unread, UNREAD_BYTES)
        begun = self._calls.exchange(Exchange.RECEIVE, None, options, self._connection, allowance)
        self._begun[number] = begun
        group = options.get("group")
        begun.add_done_callback(lambda done: self._on_batch(number, size, group, done, allowance.size))

    def _unread(self) -> int:
        return self._connection.unsent_bytes

    def _call(self, frame: Frame, size: int) -> None:
        """Start an action, a read or a watch on a thread of the workers. Raises EscrowError if nothing has started."""
        number = frame.number
        self._room.begin_call(self._held)
        end = partial(self._on_call_end, number, size)
        if frame.kind == Kind.ACTION:
            self._note(number, size)
            self._workers.act(self._held, partial(self._act, frame, size), frames.action_name(frame))
            return
        stream: Stream
        try:
            place = Place(number, self._calls, self._room, self._connection, self._workers, end)
            if frame.kind == Kind.READ:
                stream = Read(place, *frames.read_read(frame))
            else:
                stream = Watch(place, frames.read_watch(frame))
        except EscrowError:
            self._room.end_call(self._held)
            raise
        self._note(number, size, stream)
        stream.wake()

    def _act(self, frame: Frame, size: int) -> None:
        """Run an action and answer it. Runs on a thread of the workers."""
        number = frame.number
        try:
            name, request = frames.read_action(frame)
            answer: Pieces = [frames.result(number, self._calls.action(name, request))]
        except Exception as problem:
            answer = [frames.refused(number, for_client(broker_failed("an action", problem)))]
        self._room.end_call(self._held)
        self._answer(number, size, [answer], large=frames.size_of(answer) > frames.PART_BYTES)

    # Answers, on any thread; none of these raises

    def _on_parcel(self, number: int, size: int, answer: Answer | EscrowError) -> None:
        try:
            if isinstance(answer, bytes):
                frame: bytes | bytearray = frames.codes_answer(number, answer)
            elif isinstance(answer, EscrowError):
                frame = frames.refused(number, for_client(answer))
            else:
                frame = frames.rows_answer(number, answer)
        except Exception as problem:
            frame = frames.refused(number, broker_failed("answering a parcel", problem))
        self._answer(number, size, [[frame]])

    def _on_batch(
        self, number: int, size: int, group: str | None, done: Future[pa.RecordBatch], granted: int = 0
    ) -> None:
        """Answer with a batch or error. ``group``: of a receive; ``granted``: room (bytes) reserved for its answer."""
        lost = None
        try:
            if done.cancelled():
                answer: list[Pieces] = [[frames.withdrawn(number)]]
            elif (problem := done.exception()) is not None:
                answer = [[frames.refused(number, for_client(broker_failed("answering", problem)))]]
            else:
                batch = done.result()
                answer = frames.batch_answer(number, batch)
                if group is not None and batch.num_rows:
                    lost = partial(self._calls.give_back_unseen, group, batch)
        except Exception as problem:
            answer = [[frames.refused(number, broker_failed("answering a batch", problem))]]
        self._answer(number, size, answer, lost, granted)

    def _answer(
        self,
        number: int,
        size: int,
        answer: list[Pieces],
        lost: Callable[[], None] | None = None,
        granted: int = 0,
        *,
        large: bool = False,
    ) -> None:
        """Send an answer. Releases the memory of its request at once, that of the answer when it is sent."""
        assert self._begun is not None
        self._begun.pop(number, None)  # before the client can use the number again
        given = sum(map(frames.size_of, answer))
        self._room.change(self._held, given - size - granted)
        if gone := self._connection.send(answer, lost, large=large):
            self._room.change(self._held, -gone)
        self._close_request(size)

    def _on_call_end(self, number: int, size: int) -> None:
        """Release the memory of a read or a watch that has sent its last frame."""
        assert self._begun is not None
        self._begun.pop(number, None)
        self._room.end_call(self._held)
        self._room.change(self._held, -size)
        self._close_request(size)

    def _close_request(self, size: int) -> None:
        with self._lock:
            self._open -= 1
            self._unanswered -= size
            last = self._ended and not self._open
        if last:
            self._room.leave(self._held)
        elif self.paused or self.leaving:
            self._connection.attend()

    # The end

    def _withdraw(self) -> None:
        """Withdraw waiting receives, so that a client that has left gets no leases, and end reads and watches."""
        for begun in list((self._begun or {}).values()):
            if isinstance(begun, Stream):
                begun.break_off()
            elif begun is not None:
                begun.cancel()

    def send_gone(self) -> None:
        """Send GONE, because the broker stops; accept no more requests, and answer pending ones."""
        self._send(frames.gone())
        self.leave()

    def end(self) -> None:
        """Withdraw receives and end streams, because the connection is closed."""
        if self._guard is not None and self._caller is not None:
            self._guard.leave(self._caller)
        self.leaving = True
        self._waiting = None
        self._withdraw()
        if self._claimed:
            self._room.change(self._held, -self._claimed)
            self._claimed = 0
        with self._lock:
            self._ended = True
            last = self._entered and not self._open
        if last:
            self._room.leave(self._held)
