"""The Flight service: the broker's end of the protocol over Arrow Flight, which :mod:`escrowmq.wire.packing` describes."""

from __future__ import annotations

import json
import logging
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from urllib.parse import unquote

import pyarrow as pa
from pyarrow import flight

from escrowmq.broker.calls import Dispatcher
from escrowmq.broker.failures import answer as failed
from escrowmq.broker.failures import broker_failed, for_client
from escrowmq.broker.reads.chunks import BYTES
from escrowmq.broker.requests import check_schema, checked
from escrowmq.broker.serving.connections import Guard, close_connections
from escrowmq.broker.serving.room import Allowance, Held, Room
from escrowmq.errors import Code, EscrowError, error
from escrowmq.platform.listening import check_address, shown
from escrowmq.schemas import CHECKS
from escrowmq.wire import (
    ANSWER,
    LAST,
    PROTOCOL_VERSION,
    Exchange,
    Json,
    pack_error,
    pack_metadata,
    unpack_metadata,
    unpack_request,
)
from escrowmq.wire.exchanges import CHECKS_EXCHANGE, Begin
from escrowmq.wire.packing import LONGEST_MESSAGE, MAX_REQUEST_BYTES

MAX_PIPELINED = 4096
"""Requests of one exchange that may be unanswered; more are not read from the connection until some are."""
PIPELINED_BYTES = 16 << 20
"""Bytes of requests of one exchange that may be unanswered: some hundredths of a second of the writer's work, so that those who send
much at a time do not keep others waiting."""
UNREAD_BYTES = 1 << 20
"""Answers of one exchange that may wait while its client does not read; it is not read from, either, until it does."""
CALL_BYTES = 4096
"""What a request under way takes beside its content."""
ROW_BYTES = 64
"""A row of an answer but that of a receive."""
FIRST_READ_BYTES, READ_BYTES = BYTES, 2 * BYTES
"""What a read is thought to need for its first batches, and at most for a later one: twice the one before."""
JSON_COST = 16
"""Bytes of memory that a byte of JSON may become."""

_CARRIER_FAILED = (pa.ArrowException, OSError, ValueError)
"""What Flight raises when a connection is gone, or what came over it cannot be read."""

logger = logging.getLogger(__name__)

_Answers = queue.SimpleQueue[tuple[int, "Future[pa.RecordBatch]", int] | None]


@contextmanager
def _flight_errors() -> Iterator[None]:
    """Around a call: turns an EscrowError into a Flight error that carries it."""
    try:
        yield
    except EscrowError as problem:
        content = json.dumps(pack_error(for_client(problem))).encode()
        raise flight.FlightServerError(str(problem)[:LONGEST_MESSAGE], extra_info=content) from None


class Service(flight.FlightServerBase):  # type: ignore[misc]  # pyarrow has no types
    """The calls of one broker on a port."""

    def __init__(self, calls: Dispatcher, host: str, port: int, *, insecure: bool = False) -> None:
        check_address(host, insecure)
        self._calls = calls
        settings = calls.settings
        self.room = Room(settings.max_held_bytes, settings.max_calls, lambda peer: self.guard.shut(peer), calls.refused)
        super().__init__(f"grpc+tcp://{shown(host)}:{port}")
        self.guard = Guard(self.port, settings.max_connections, self.room, 2 * settings.max_batch_bytes + BYTES)
        self.guard.start()

    def stop(self, grace: float = 0.25) -> None:
        """Take no more calls, let answers go out for ``grace`` seconds, then close the connections that are left.

        Stop the engine first: then every call is answered.
        """
        ending = threading.Thread(target=self.shutdown, name="escrowmq-shutdown", daemon=True)
        ending.start()
        ending.join(grace)
        while ending.is_alive():
            close_connections(self.port)
            ending.join(0.1)
        self.guard.close()

    def do_exchange(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.MetadataRecordBatchWriter,
    ) -> None:
        """One exchange, from its begin to its end; runs on a thread of Flight's."""
        with _flight_errors():
            options = unpack_request(descriptor.command or b"")
            kind = _kind(options)
            with self.room.call(_peer(context)) as held:
                if kind == CHECKS_EXCHANGE:
                    _serve_checks(self._calls, options, reader, writer, held)
                else:
                    _BatchExchange(self._calls, Exchange(kind), options, writer, self.room, held).serve(reader)

    def do_action(self, context: flight.ServerCallContext, action: flight.Action) -> list[flight.Result]:
        """One action."""
        with _flight_errors():
            body = action.body.to_pybytes() if action.body is not None else b""
            with self.room.call(_peer(context)) as held:
                self.room.take(held, JSON_COST * len(body))
                request = unpack_request(body, MAX_REQUEST_BYTES) if body else {}
                answer = self._calls.action(action.type, request)
        return [flight.Result(pa.py_buffer(json.dumps(answer).encode()))]

    def do_get(self, context: flight.ServerCallContext, ticket: flight.Ticket) -> flight.FlightDataStream:
        """One read."""
        with _flight_errors():
            reader = self._calls.read(unpack_request(ticket.ticket))
        return flight.GeneratorStream(reader.schema, self._batches(reader, _peer(context)))

    def _batches(self, reader: pa.RecordBatchReader, peer: str) -> Iterator[pa.RecordBatch]:
        """The batches of a read, each held from before it is made until the client has taken it."""
        with _flight_errors(), self.room.call(peer) as held:
            expected = FIRST_READ_BYTES
            while True:
                self.room.take(held, expected, reads=True)
                batch = next(reader, None)
                if batch is None:
                    return
                self.room.change(held, batch.nbytes + CALL_BYTES - held.size)
                expected = min(max(2 * batch.nbytes, FIRST_READ_BYTES), READ_BYTES)
                with held.writing():
                    yield batch
                self.room.change(held, -held.size)


def _peer(context: flight.ServerCallContext) -> str:
    """Whose call it is, as the guard names connections: gRPC escapes the brackets of IPv6."""
    return unquote(context.peer())


def _kind(options: Json) -> str:
    begin = checked(Begin, options)
    if begin["protocol"] != PROTOCOL_VERSION:
        raise error(Code.BAD_REQUEST, f"protocol {begin['protocol']}; this broker speaks {PROTOCOL_VERSION}")
    return begin["exchange"]


class _BatchExchange:
    """Requests are read on Flight's thread, answers written on another as they come."""

    def __init__(
        self,
        calls: Dispatcher,
        kind: Exchange,
        options: Json,
        writer: flight.MetadataRecordBatchWriter,
        room: Room,
        held: Held,
    ) -> None:
        self._room = room
        self._held = held
        self._calls = calls
        self._kind = kind
        self._options = options
        self._writer = writer
        self._answers: _Answers = queue.SimpleQueue()
        self._lock = threading.Condition()
        self._unanswered = self._unread = 0  # bytes
        self._begun: set[Future[pa.RecordBatch]] = set()
        self._broken = False

    def serve(self, reader: flight.MetadataRecordBatchReader) -> None:
        """Until the client is done or gone. Raises EscrowError for what cannot be read."""
        check_schema(self._kind, _schema(reader))
        self._writer.begin(ANSWER[self._kind])
        sender = threading.Thread(target=self._send, name=f"escrowmq-{self._kind}", daemon=True)
        sender.start()
        try:
            while (chunk := _chunk(reader)) is not None and not self._broken:
                request_id, options = unpack_metadata(chunk[1])
                if options == LAST:
                    break
                with self._lock:
                    self._lock.wait_for(self._may_begin)
                self._begin(request_id, chunk[0], options)
        finally:
            self._withdraw()
            self._answers.put(None)
            sender.join()

    def _begin(self, request_id: int, batch: pa.RecordBatch | None, options: Json) -> None:
        answer: Future[pa.RecordBatch]
        self._room.arrived(self._held.peer)
        size = CALL_BYTES + (batch.get_total_buffer_size() if batch is not None else 0)
        allowance = None
        try:
            self._room.take(self._held, size, messages=self._kind in (Exchange.SEND, Exchange.PREPARE))
        except EscrowError as problem:
            size, answer = 0, failed(Future(), problem)
        else:
            allowance = Allowance(self._room, self._held, lambda: self._unread, UNREAD_BYTES)
            answer = self._calls.exchange(self._kind, batch, {**self._options, **options}, self._held.peer, allowance)
        del batch
        with self._lock:
            self._begun.add(answer)
            self._unanswered += size
        answer.add_done_callback(lambda done: self._came(request_id, done, size, allowance.size if allowance else 0))

    def _came(self, request_id: int, done: Future[pa.RecordBatch], size: int, granted: int) -> None:
        """An answer is there: it is held now, and its request, and the room that was granted for it, no more."""
        given = CALL_BYTES
        if not done.cancelled() and done.exception() is None:
            rows = (
                done.result()
            )  # rows of fixed width may be a slice of a round's answer, and counting takes Arrow its time
            given += rows.nbytes if self._kind == Exchange.RECEIVE else ROW_BYTES * rows.num_rows
        self._room.change(self._held, given - size - granted)
        with self._lock:
            self._unanswered -= size
            self._unread += given
            self._lock.notify()
        self._answers.put((request_id, done, given))

    def _may_begin(self) -> bool:
        """Whether the next request is taken; with the lock held. Those of a client that does not read wait on its side."""
        if self._broken:
            return True
        reads = self._held.stuck_since is None or self._unread < UNREAD_BYTES
        return reads and len(self._begun) < MAX_PIPELINED and self._unanswered < PIPELINED_BYTES

    def _withdraw(self) -> None:
        """Withdraw waiting receives, so that nothing is leased to a client that has left. All other answers still come."""
        if self._kind == Exchange.RECEIVE:
            with self._lock:
                begun = list(self._begun)
            for answer in begun:
                answer.cancel()

    def _send(self) -> None:
        """Until no request will come any more, and each that came has its answer."""
        more = True
        while more or self._begun:
            item = self._answers.get()
            if item is None:
                more = False
                continue
            request_id, answer, size = item
            try:
                if not (self._broken or answer.cancelled()):
                    with self._held.writing():
                        self._write(request_id, answer)
            except _CARRIER_FAILED as problem:
                logger.debug("a client left before its answer: %s", problem)
                self._broken = True
            self._room.change(self._held, -size)
            with self._lock:
                self._begun.discard(answer)
                self._unread -= size
                self._lock.notify()
            del item, answer

    def _write(self, request_id: int, answer: Future[pa.RecordBatch]) -> None:
        if (problem := answer.exception()) is None:
            self._writer.write_with_metadata(answer.result(), pack_metadata(request_id))
        else:
            reason = for_client(broker_failed("answering", problem))
            self._writer.write_metadata(pack_metadata(request_id, {"error": pack_error(reason)}))


def _serve_checks(
    calls: Dispatcher,
    options: Json,
    reader: flight.MetadataRecordBatchReader,
    writer: flight.MetadataRecordBatchWriter,
    held: Held,
) -> None:
    """Write questions on a thread of their own, until the client is done or gone, or the broker stops."""
    member = calls.watch(options.get("session"))

    def send() -> None:
        try:
            for batch in member.batches():
                with held.writing():
                    writer.write_with_metadata(batch, pack_metadata(0))
            if member.problem is not None:
                writer.write_metadata(pack_metadata(0, {"error": pack_error(member.problem)}))
        except _CARRIER_FAILED as problem:
            logger.debug("a producer left: %s", problem)
        finally:
            calls.leave(member)

    sender = threading.Thread(target=send, name="escrowmq-checks", daemon=True)
    try:
        _schema(reader)
        writer.begin(CHECKS)
        sender.start()
        while (chunk := _chunk(reader)) is not None and not _is_last(chunk[1]):
            pass
    finally:
        calls.leave(member)
        if sender.ident is not None:  # it was started
            sender.join()


def _is_last(metadata: bytes) -> bool:
    return bool(metadata) and unpack_metadata(metadata)[1] == LAST


def _schema(reader: flight.MetadataRecordBatchReader) -> pa.Schema:
    try:
        return reader.schema
    except _CARRIER_FAILED as problem:
        if isinstance(problem, MemoryError):
            raise error(Code.OUT_OF_RESOURCES, f"the schema does not fit into memory: {problem}") from None
        raise error(Code.BAD_BATCH, f"the exchange does not begin with a schema: {problem}") from None


def _chunk(reader: flight.MetadataRecordBatchReader) -> tuple[pa.RecordBatch | None, bytes] | None:
    """The next chunk; None when the client is done or gone. Rejected(BAD_BATCH) for garbage."""
    try:
        chunk = reader.read_chunk()
    except (StopIteration, flight.FlightCancelledError):
        return None
    except MemoryError as problem:  # Arrow's is one
        raise error(
            Code.OUT_OF_RESOURCES, f"a chunk does not fit into the memory that requests may take: {problem}"
        ) from None
    except _CARRIER_FAILED as problem:
        raise error(Code.BAD_BATCH, f"a chunk cannot be read: {problem}") from None
    return chunk.data, chunk.app_metadata.to_pybytes() if chunk.app_metadata is not None else b""
