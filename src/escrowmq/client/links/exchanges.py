"""Pending exchanges of a connection: requests, actions, reads and watches, each with its frames."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, Protocol

import pyarrow as pa

from escrowmq.errors import Code, EscrowError, Unknown, error
from escrowmq.schemas import CHECKS
from escrowmq.wire import ANSWER, Exchange, ExchangeOptions, Json, Parcel, ReadRequest, frames
from escrowmq.wire.frames import NUMBER_OF, READ_CREDIT, Frame, Kind, Pieces

STALL_SECONDS = 15.0
"""A request unanswered this long (past its own waiting time) makes the link give its connection up and connect anew."""
NOTHING = pa.RecordBatch.from_pylist([], schema=ANSWER[Exchange.RECEIVE])

_ROWS = frozenset({Exchange.SEND, Exchange.PREPARE})


class NotLeading(Unknown):
    """DISCONNECTED from a broker that answers, and does not lead its shard any more, or has stopped: to be sent to the
    one that leads."""

    leader: str | None = None
    """Who does, as it says."""


def perhaps_healing(problem: EscrowError) -> EscrowError:
    """Convert an error in a broker's answer for the caller. SHARD_STOPPED and NOT_LEADER become :class:`NotLeading`, a
    lost connection, because the broker restarts or another one leads; other errors stay."""
    if problem.code not in (Code.SHARD_STOPPED, Code.NOT_LEADER):
        return problem
    lost = NotLeading(Code.DISCONNECTED, problem.message, problem.hint)
    if problem.code is Code.NOT_LEADER:  # surely not applied
        lost.left, lost.leader = False, problem.hint
    return lost


def failed_future(problem: EscrowError) -> Future[pa.RecordBatch]:
    """Return a future that has failed with ``problem``."""
    future: Future[pa.RecordBatch] = Future()
    future.set_exception(problem)
    return future


def _refuse_unexpected(frame: Frame, what: object) -> EscrowError:
    return Unknown(Code.DISCONNECTED, f"a frame of kind {frame.kind:#04x} is no answer to {what}")


class Carrier(Protocol):
    """The connection that carries a read, a watch or a receive, as these steer it."""

    def cancel(self, number: int) -> None:
        """Withdraw the receive, or end the watch, with this number."""

    def cancel_later(self, number: int) -> None:
        """End the read with this number soon; for finalizers."""

    def add_credit(self, number: int, size: int) -> None:
        """Let the broker send ``size`` bytes more of the read with this number."""


class Waiting(ABC):
    """A request with a number, under which it is answered."""

    __slots__ = ("expiry", "number")

    def __init__(self) -> None:
        self.number = 0
        """By which the broker knows it, over one connection."""
        self.expiry = 0.0
        """When its answer is overdue (monotonic seconds); 0: never."""

    @property
    def is_owed(self) -> bool:
        """Return whether an answer is due at any moment, so that silence means that the broker is lost."""
        return True

    @abstractmethod
    def encode(self, number: int, most: int) -> Pieces:
        """Return the request as a frame with this number, of at most ``most`` bytes. Raises
        Rejected(BATCH_TOO_LARGE)."""

    @abstractmethod
    def decode(self, frame: Frame, body: memoryview | None) -> Any:
        """Decode a frame that answers the request; ``body`` is its complete body. Returns the answer, or the error that
        the broker reports. Raises EscrowError for a frame that is no answer to it."""

    @abstractmethod
    def finish(self, answer: Any) -> None:
        """Pass a decoded answer, or the error by which none will come, to the caller."""


def _check_size(pieces: Pieces, most: int) -> Pieces:
    if (size := frames.size_of(pieces)) > most:
        raise error(Code.BATCH_TOO_LARGE, f"a request of {size} bytes; the limit is {most}", "send less at a time")
    return pieces


class Request(Waiting):
    """A parcel, a batch or a receive. ``done`` is called with what came of it: the answer, or an EscrowError.
    ``answered`` is called before, with the request and the answer."""

    __slots__ = (
        "answered",
        "batch",
        "connection",
        "done",
        "kind",
        "options",
        "over",
        "parcel",
        "withdrawn",
    )

    def __init__(
        self,
        kind: Exchange,
        parcel: Parcel | None,
        batch: pa.RecordBatch | None,
        options: ExchangeOptions,
        done: Callable[[Any], None],
        answered: Callable[[Request, Any], None],
    ) -> None:
        super().__init__()
        self.kind = kind
        self.parcel = parcel
        self.batch = batch
        self.options = options
        self.done = done
        self.answered = answered
        self.connection: Carrier | None = None
        self.withdrawn = False
        self.over = False

    def encode(self, number: int, most: int) -> Pieces:
        """See :class:`Waiting`. The content of a parcel is encoded once, however often it is sent."""
        if self.kind is Exchange.RECEIVE:
            return [frames.receive_request(number, self.options)]
        if self.parcel is None:
            assert self.batch is not None
            return _check_size(frames.columns_request(number, self.kind, self.batch, self.options), most)
        before = self.parcel.memo
        if isinstance(before, bytearray):  # which may still wait in a connection that is no more
            made = frames.finish_frame(bytearray(before), NUMBER_OF[self.kind], number)
        else:
            self.parcel.memo = made = frames.parcel_request(number, self.parcel)
        return _check_size([made], most)

    def decode(self, frame: Frame, body: memoryview | None) -> Any:
        """See :class:`Waiting`."""
        kind = frame.kind
        if kind == Kind.ERROR:
            return perhaps_healing(frames.read_refusal(frame))
        if self.parcel is not None:
            if kind == (Kind.ROWS if self.kind in _ROWS else Kind.CODES):
                return frames.read_rows(frame)
        elif kind == Kind.WITHDRAWN and self.kind is Exchange.RECEIVE:
            return NOTHING
        elif kind == Kind.BATCH and body is not None:
            return frames.decode_batch(body, ANSWER[self.kind])
        raise _refuse_unexpected(frame, self.kind)

    def finish(self, answer: Any) -> None:
        """See :class:`Waiting`."""
        self.answered(self, answer)


class Pending(Future[pa.RecordBatch]):
    """The future of an exchange. Cancelling withdraws a receive, which is then answered, or fails; nothing else can be
    taken back."""

    withdraw: Callable[[], None] | None = None

    def cancel(self) -> bool:
        """Withdraw a receive; other exchanges continue. Returns False, because messages that the broker leased
        meanwhile must still arrive."""
        if self.withdraw is not None and not self.done():
            self.withdraw()
        return False

    def finish(self, answer: pa.RecordBatch | EscrowError) -> None:
        """Set the future's result, or its exception if ``answer`` is an error."""
        if isinstance(answer, EscrowError):
            self.set_exception(answer)
        else:
            self.set_result(answer)


class Action(Waiting):
    """A question or an act in JSON. ``answer`` has what came of it."""

    __slots__ = ("_name", "_request", "answer")

    def __init__(self, name: str, request: Mapping[str, object]) -> None:
        super().__init__()
        self._name, self._request = name, request
        self.answer: Future[Json] = Future()

    def encode(self, number: int, most: int) -> Pieces:
        """See :class:`Waiting`."""
        return _check_size([frames.action_request(number, self._name, self._request)], most)

    def decode(self, frame: Frame, body: memoryview | None) -> Any:
        """See :class:`Waiting`."""
        if frame.kind == Kind.ERROR:
            return perhaps_healing(frames.read_refusal(frame))
        if frame.kind == Kind.RESULT:
            return frames.read_result(frame)
        raise _refuse_unexpected(frame, "an action")

    def finish(self, answer: Any) -> None:
        """See :class:`Waiting`."""
        if isinstance(answer, EscrowError):
            self.answer.set_exception(answer)
        else:
            self.answer.set_result(answer)


class Read(Waiting):
    """A read: its batches as they are asked for. ``connection`` carries it."""

    def __init__(self, request: ReadRequest, connection: Carrier) -> None:
        super().__init__()
        self._request = request
        self.connection = connection
        self._news = threading.Condition()
        self._schema: pa.Schema | None = None
        self._came: deque[memoryview] = deque()
        self._problem: EscrowError | None = None
        self._over = False
        self._awaited = True
        self._consumed = 0  # bytes for which no credit was given back

    @property
    def is_owed(self) -> bool:
        """See :class:`Waiting`."""
        return self._awaited

    def encode(self, number: int, most: int) -> Pieces:
        """See :class:`Waiting`."""
        return _check_size([frames.read_request(number, self._request)], most)

    def decode(self, frame: Frame, body: memoryview | None) -> Any:
        """See :class:`Waiting`."""
        if frame.kind == Kind.ERROR:
            return perhaps_healing(frames.read_refusal(frame))
        if frame.kind == Kind.SCHEMA:
            return frames.read_schema(frame)
        if frame.kind == Kind.PART:
            return body
        if frame.kind == Kind.DONE:
            return None
        raise _refuse_unexpected(frame, "a read")

    def finish(self, answer: Any) -> None:
        """See :class:`Waiting`."""
        with self._news:
            if isinstance(answer, EscrowError):
                self._problem, self._over = answer, True
            elif answer is None:
                self._over = True
            elif isinstance(answer, pa.Schema):
                self._schema = answer
            else:
                self._came.append(answer)
            self._news.notify_all()

    def schema(self) -> pa.Schema:
        """Return the schema of the batches; waits for the broker. Raises EscrowError."""
        with self._news:
            self._news.wait_for(lambda: self._schema is not None or self._over)
            self._awaited = False
            if self._schema is None:
                raise self._failure()
            return self._schema

    def next_batch(self, schema: pa.Schema) -> pa.RecordBatch | None:
        """Wait for the next batch and return it; None at the end of the read. Raises EscrowError."""
        message = self._next()
        if message is None:
            return None
        self._consume(len(message))
        return frames.decode_batch(message, schema)

    def give_up(self) -> None:
        """Cancel the rest of the read soon, unless it has ended; also called from a finalizer."""
        if not self._over:
            self.connection.cancel_later(self.number)

    def _next(self) -> memoryview | None:
        with self._news:
            self._awaited = True
            self._news.wait_for(lambda: self._came or self._over)
            self._awaited = False
            if self._came:
                return self._came.popleft()
            if self._problem is not None:
                raise self._failure()
            return None

    def _consume(self, size: int) -> None:
        """Count ``size`` bytes as consumed. Whenever half of the credit is consumed, let the broker send as much
        again."""
        self._consumed += size
        if self._consumed >= READ_CREDIT // 2:
            size, self._consumed = self._consumed, 0
            self.connection.add_credit(self.number, size)

    def _failure(self) -> EscrowError:
        return self._problem or Unknown(Code.DISCONNECTED, "the broker ended the read before it began")


class Batches(Iterator[pa.RecordBatch]):
    """The batches of a read. Who lets go of it before the end gives the rest up."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self.schema = read.schema()

    def __next__(self) -> pa.RecordBatch:
        batch = self._read.next_batch(self.schema)
        if batch is None:
            raise StopIteration
        return batch

    def __del__(self) -> None:
        self._read.give_up()


class Watch(Waiting):
    """A subscription to the checks of a session, see :class:`escrowmq.wire.CheckStream`."""

    def __init__(self, session: int, on_checks: Callable[[pa.RecordBatch], None], connection: Carrier) -> None:
        super().__init__()
        self._session = session
        self._on_checks = on_checks
        self._connection = connection
        self._closed = False
        self._begun = threading.Event()  # the broker has answered for the first time
        self.over = False
        """Whether nothing more comes, for whatever reason."""
        self.problem: EscrowError | None = None

    @property
    def is_owed(self) -> bool:
        """See :class:`Waiting`: checks come when transactions are late, so silence means nothing once it has begun."""
        return not self._begun.is_set()

    @property
    def broken(self) -> bool:
        """Return whether the subscription ended without :meth:`close`."""
        return self.over and not self._closed

    def encode(self, number: int, most: int) -> Pieces:
        """See :class:`Waiting`."""
        return [frames.watch(number, self._session)]

    def decode(self, frame: Frame, body: memoryview | None) -> Any:
        """See :class:`Waiting`."""
        if frame.kind == Kind.ERROR:
            return perhaps_healing(frames.read_refusal(frame))
        if frame.kind == Kind.CHECKS and body is not None:
            return frames.decode_batch(body, CHECKS)
        if frame.kind == Kind.DONE:
            return None
        raise _refuse_unexpected(frame, "a watch")

    def finish(self, answer: Any) -> None:
        """See :class:`Waiting`."""
        if isinstance(answer, pa.RecordBatch):
            if answer.num_rows and not self._closed:
                self._on_checks(answer)
        else:
            self.problem, self.over = answer, True
        self._begun.set()

    def wait_begun(self, timeout: float) -> None:
        """Wait until the broker sends checks to this subscription. Raises the error by which it refuses, and
        Unknown(TIMED_OUT) after ``timeout`` seconds."""
        if not self._begun.wait(timeout):
            self.close()
            raise Unknown(Code.TIMED_OUT, "the broker has not begun to send checks in time")
        if self.problem is not None:
            raise self.problem

    def close(self) -> None:
        """End the subscription: the broker sends this session no more checks."""
        self._closed = True
        self._connection.cancel(self.number)


def overdue_at(options: ExchangeOptions) -> float:
    """Return when the answer to a request that is sent now is overdue (monotonic seconds), its own waiting time
    included."""
    wait_ms: Any = options.get("wait_ms", 0)
    return time.monotonic() + float(wait_ms) / 1000 + STALL_SECONDS
