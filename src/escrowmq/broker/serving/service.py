"""The Flight service: the broker's end of the protocol over Arrow Flight, which :mod:`escrowmq.wire.packing` describes."""

from __future__ import annotations

import json
import logging
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager

import pyarrow as pa
from pyarrow import flight

from escrowmq.broker.calls import Calls
from escrowmq.broker.failures import broker_failed
from escrowmq.broker.requests import check_schema, checked
from escrowmq.broker.serving.connections import close_connections
from escrowmq.errors import Code, EscrowError, error
from escrowmq.platform.listening import check_address, shown
from escrowmq.schemas import CHECKS
from escrowmq.wire import (
    ANSWER,
    PROTOCOL_VERSION,
    Exchange,
    Json,
    pack_error,
    pack_metadata,
    unpack_json,
    unpack_metadata,
)
from escrowmq.wire.exchanges import CHECKS_EXCHANGE, Begin

MAX_PIPELINED = 4096
"""Requests of one exchange that may be unanswered; more are not read from the connection until some are."""

_CARRIER_FAILED = (pa.ArrowException, OSError, ValueError)
"""What Flight raises when a connection is gone, or what came over it cannot be read."""

logger = logging.getLogger(__name__)

_Answers = queue.SimpleQueue[tuple[int, "Future[pa.RecordBatch]"] | None]


@contextmanager
def _flight_errors() -> Iterator[None]:
    """Around a call: turns an EscrowError into a Flight error that carries it."""
    try:
        yield
    except EscrowError as problem:
        content = json.dumps(pack_error(_for_client(problem))).encode()
        raise flight.FlightServerError(str(problem), extra_info=content) from None


def _for_client(problem: EscrowError) -> EscrowError:
    """The error as a client sees it. CLOSED means here that the broker stopped while it worked on the request."""
    if problem.code is not Code.CLOSED:
        return problem
    return error(Code.SHARD_STOPPED, f"the broker is stopping: {problem.message}")


class Service(flight.FlightServerBase):  # type: ignore[misc]  # pyarrow has no types
    """The calls of one engine on a port."""

    def __init__(self, calls: Calls, host: str, port: int, *, insecure: bool = False) -> None:
        check_address(host, insecure)
        self._calls = calls
        super().__init__(f"grpc+tcp://{shown(host)}:{port}")

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

    def do_exchange(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.MetadataRecordBatchWriter,
    ) -> None:
        """One exchange, from its begin to its end; runs on a thread of Flight's."""
        with _flight_errors():
            options = unpack_json(descriptor.command or b"")
            kind = _kind(options)
            if kind == CHECKS_EXCHANGE:
                _serve_checks(self._calls, options, reader, writer)
            else:
                _BatchExchange(self._calls, Exchange(kind), options, writer).serve(reader)

    def do_action(self, context: flight.ServerCallContext, action: flight.Action) -> list[flight.Result]:
        """One action."""
        with _flight_errors():
            body = action.body.to_pybytes() if action.body is not None else b""
            answer = self._calls.action(action.type, unpack_json(body) if body else {})
        return [flight.Result(pa.py_buffer(json.dumps(answer).encode()))]

    def do_get(self, context: flight.ServerCallContext, ticket: flight.Ticket) -> flight.FlightDataStream:
        """One read."""
        with _flight_errors():
            reader = self._calls.read(unpack_json(ticket.ticket))
        return flight.GeneratorStream(reader.schema, _batches(reader))


def _kind(options: Json) -> str:
    begin = checked(Begin, options)
    if begin["protocol"] != PROTOCOL_VERSION:
        raise error(Code.BAD_REQUEST, f"protocol {begin['protocol']}; this broker speaks {PROTOCOL_VERSION}")
    return begin["exchange"]


def _batches(reader: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
    with _flight_errors():
        yield from reader


class _BatchExchange:
    """Requests are read on Flight's thread, answers written on another as they come."""

    def __init__(self, calls: Calls, kind: Exchange, options: Json, writer: flight.MetadataRecordBatchWriter) -> None:
        self._calls = calls
        self._kind = kind
        self._options = options
        self._writer = writer
        self._answers: _Answers = queue.SimpleQueue()
        self._slots = threading.BoundedSemaphore(MAX_PIPELINED)
        self._lock = threading.Lock()
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
                self._slots.acquire()
                self._begin(*chunk)
        finally:
            self._withdraw()
            self._answers.put(None)
            sender.join()

    def _begin(self, batch: pa.RecordBatch | None, metadata: bytes) -> None:
        request_id, options = unpack_metadata(metadata)
        answer = self._calls.exchange(self._kind, batch, {**self._options, **options})
        with self._lock:
            self._begun.add(answer)
        answer.add_done_callback(lambda done: self._answers.put((request_id, done)))

    def _withdraw(self) -> None:
        """Withdraw waiting receives, so that nothing is leased to a client that has left. Wait for the other answers."""
        with self._lock:
            begun = list(self._begun)
        for answer in begun:
            if self._kind == Exchange.RECEIVE:
                answer.cancel()
            elif not self._broken:
                wait([answer])

    def _send(self) -> None:
        while (item := self._answers.get()) is not None:
            request_id, answer = item
            with self._lock:
                self._begun.discard(answer)
            self._slots.release()
            if self._broken or answer.cancelled():
                continue
            try:
                self._write(request_id, answer)
            except _CARRIER_FAILED as problem:
                logger.debug("a client left before its answer: %s", problem)
                self._broken = True

    def _write(self, request_id: int, answer: Future[pa.RecordBatch]) -> None:
        if (problem := answer.exception()) is None:
            self._writer.write_with_metadata(answer.result(), pack_metadata(request_id))
        else:
            reason = _for_client(broker_failed("answering", problem))
            self._writer.write_metadata(pack_metadata(request_id, {"error": pack_error(reason)}))


def _serve_checks(
    calls: Calls, options: Json, reader: flight.MetadataRecordBatchReader, writer: flight.MetadataRecordBatchWriter
) -> None:
    """Write questions on a thread of their own, until the client is done or gone, or the broker stops."""
    member = calls.watch(options.get("session"))

    def send() -> None:
        try:
            for batch in member.batches():
                writer.write_with_metadata(batch, pack_metadata(0))
        except _CARRIER_FAILED as problem:
            logger.debug("a producer left: %s", problem)
        finally:
            calls.leave(member)

    sender = threading.Thread(target=send, name="escrowmq-checks", daemon=True)
    try:
        _schema(reader)
        writer.begin(CHECKS)
        sender.start()
        while _chunk(reader) is not None:
            pass
    finally:
        calls.leave(member)
        if sender.ident is not None:  # it was started
            sender.join()


def _schema(reader: flight.MetadataRecordBatchReader) -> pa.Schema:
    try:
        return reader.schema
    except _CARRIER_FAILED as problem:
        raise error(Code.BAD_BATCH, f"the exchange does not begin with a schema: {problem}") from None


def _chunk(reader: flight.MetadataRecordBatchReader) -> tuple[pa.RecordBatch | None, bytes] | None:
    """The next chunk; None when the client is done or gone. Rejected(BAD_BATCH) for garbage."""
    try:
        chunk = reader.read_chunk()
    except (StopIteration, flight.FlightCancelledError):
        return None
    except _CARRIER_FAILED as problem:
        raise error(Code.BAD_BATCH, f"a chunk cannot be read: {problem}") from None
    return chunk.data, chunk.app_metadata.to_pybytes() if chunk.app_metadata is not None else b""
