"""Copies a topic of a RocketMQ server into Parquet files, for a comparison with a topic of the broker.

It is an ordinary RocketMQ client (gRPC) with a consumer group of its own. A message is acknowledged for this group when
it is in a file that is synced; no other group is affected. A copy that was killed is resumed with the same folder and
group: unacknowledged messages are delivered again, with a higher delivery attempt.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import json
import os
import time
import uuid
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from queue import Queue
from threading import Event, Timer
from typing import Any

import grpc
import pyarrow as pa
from pyarrow import parquet

from escrowmq.errors import Code, Misuse, error
from escrowmq.gateway.rocketmq.access_keys import ALGORITHM
from escrowmq.gateway.rocketmq.protocol import definition, service, service_grpc
from escrowmq.gateway.rocketmq.statuses import Status

SCHEMA = pa.schema(
    {
        "key": pa.string(),
        "message_id": pa.string(),
        "stored": pa.timestamp("us", "UTC"),
        "digest": pa.string(),  # SHA-256 of the body, hex
        "broker": pa.string(),
        "queue": pa.int32(),
        "offset": pa.int64(),
        "attempt": pa.int32(),
    }
)
BATCH = 32
INVISIBLE_SECONDS = 30.0
"""A message whose acknowledgement is lost is delivered again after this time."""
QUIET_SECONDS = 45.0
"""Longer than :data:`INVISIBLE_SECONDS`: what a killed copy had received is delivered again before this one ends."""
POLL_SECONDS = 5.0
"""The shortest wait of RocketMQ's server for messages."""
CALL_SECONDS = 30.0
FILE_SECONDS = 5.0
FILE_ROWS = 20_000


@dataclass(frozen=True, slots=True)
class RocketmqTopic:
    """A topic of a RocketMQ server, and the consumer group that reads it. ``address``: HOST:PORT of a proxy.
    ``access_key`` and ``secret_key``: as RocketMQ's clients have them; empty without access control."""

    address: str
    topic: str
    group: str
    access_key: str = ""
    secret_key: str = field(default="", repr=False)

    @classmethod
    def parse(cls, text: str, group: str, access_key: str = "", secret_key: str = "") -> RocketmqTopic:
        """Parse HOST:PORT/TOPIC. Raises Misuse(BAD_ARGUMENT)."""
        address, slash, topic = text.partition("/")
        if not (slash and topic and address.rpartition(":")[2].isdecimal()):
            raise error(Code.BAD_ARGUMENT, f"no RocketMQ topic: {text!r:.200}", "HOST:PORT/TOPIC")
        return cls(address, topic, group, access_key, secret_key)


def copy_topic(
    source: RocketmqTopic,
    folder: Path,
    *,
    quiet_seconds: float = QUIET_SECONDS,
    progress: Callable[[int], None] = lambda _: None,
) -> int:
    """Copy all messages that are stored now, and return how many were received. ``progress`` is called with the number
    received so far. It ends when for ``quiet_seconds`` no message came that was stored before the call. Raises
    Misuse(BAD_ARGUMENT) for a folder of another topic or group and for a call that RocketMQ rejects, and
    Overloaded(BROKER_AWAY) if it does not respond."""
    _claim(folder, source)
    began, count, stop = time.time(), itertools.count(1), Event()
    with ThreadPoolExecutor(16) as threads:
        with _Client(source.address, source) as client:
            brokers = client.brokers()

        def copy(broker: Any) -> int:
            with _Client(_address_of(broker), source) as one:
                return _Copy(one, broker, folder).run(began, quiet_seconds, stop, lambda: progress(next(count)))

        try:
            return sum(threads.map(copy, brokers))
        finally:
            stop.set()


def _claim(folder: Path, source: RocketmqTopic) -> None:
    """Bind a new folder to the topic and the group. Raises Misuse(BAD_ARGUMENT) for a folder of others."""
    mine = {name: value for name, value in asdict(source).items() if name in ("topic", "group")}
    marker = folder / "source.json"
    folder.mkdir(parents=True, exist_ok=True)
    if not marker.exists():
        if any(one.suffix != ".new" for one in folder.iterdir()):
            raise error(Code.BAD_ARGUMENT, f"{folder} is not empty", "a new folder, or that of an earlier copy")
        new = marker.with_suffix(".new")
        new.write_text(json.dumps(mine))
        _sync(new)
        new.rename(marker)
    elif (found := json.loads(marker.read_text())) != mine:
        raise error(Code.BAD_ARGUMENT, f"{folder} has a copy of {found}", "one folder for each topic and group")


class _Copy:
    """The messages of one broker, received, written and acknowledged."""

    def __init__(self, client: _Client, broker: Any, folder: Path) -> None:
        self._client = client
        self._broker = broker
        self._folder = folder
        self._rows: list[dict[str, Any]] = []
        self._handles: list[Any] = []
        self._since = 0.0

    def run(self, began: float, quiet_seconds: float, stop: Event, on_message: Callable[[], None]) -> int:
        """Copy until no message stored before ``began`` comes any more. Returns how many were received."""
        received, last = 0, time.monotonic()
        while time.monotonic() - last < quiet_seconds and not stop.is_set():
            messages = self._client.receive(self._broker)
            for message in messages:
                row = _to_row(message, self._broker.name)
                self._add(row, message.system_properties)
                if row["stored"].timestamp() < began:
                    last = time.monotonic()
                on_message()
            received += len(messages)
            full = len(self._rows) >= FILE_ROWS or time.monotonic() - self._since > FILE_SECONDS
            if self._rows and (full or not messages):
                self._flush()
        self._flush()
        return received

    def _add(self, row: dict[str, Any], system: Any) -> None:
        if not self._rows:
            self._since = time.monotonic()
        self._rows.append(row)
        handle = system.receipt_handle
        self._handles.append(service.AckMessageEntry(message_id=system.message_id, receipt_handle=handle))

    def _flush(self) -> None:
        """Write the rows to a file, sync it, then acknowledge them."""
        if not self._rows:
            return
        path = self._folder / f"{uuid.uuid4().hex}.parquet"
        new = path.with_suffix(".new")
        parquet.write_table(pa.Table.from_pylist(self._rows, SCHEMA), new)
        _sync(new)
        new.rename(path)
        _sync(self._folder)
        for begin in range(0, len(self._handles), BATCH):
            self._client.acknowledge(self._handles[begin : begin + BATCH])
        self._rows, self._handles = [], []


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _to_row(message: Any, broker: str) -> dict[str, Any]:
    system = message.system_properties
    # the same key as the gateway gives a message, see mapping
    key = system.message_group or (system.keys[0] if system.keys else None)
    stored = system.store_timestamp if system.HasField("store_timestamp") else system.born_timestamp
    return {
        "key": key,
        "message_id": system.message_id,
        "stored": stored.ToDatetime(UTC),
        "digest": hashlib.sha256(_body(message)).hexdigest(),
        "broker": broker,
        "queue": system.queue_id,
        "offset": system.queue_offset,
        "attempt": system.delivery_attempt,
    }


def _body(message: Any) -> bytes:
    body: bytes = message.body
    if message.system_properties.body_encoding != definition.GZIP:
        return body
    try:
        return zlib.decompress(body, zlib.MAX_WBITS | 32)
    except zlib.error as problem:
        what = f"the body of {message.system_properties.message_id} cannot be decompressed: {problem}"
        raise error(Code.BAD_ARGUMENT, what) from None


class _Client:
    """A simple consumer of one group, at one address. Context manager: greets the server, and leaves the group."""

    def __init__(self, address: str, source: RocketmqTopic) -> None:
        self._source = source
        self._address = address
        self._topic = definition.Resource(name=source.topic)
        self._group = definition.Resource(name=source.group)
        self._id = f"escrowmq-reconcile@{uuid.uuid4().hex}"
        self._channel = grpc.insecure_channel(address, options=[("grpc.max_receive_message_length", -1)])
        self._stub = service_grpc.MessagingServiceStub(self._channel)
        self._sending: Queue[Any] = Queue()
        self._beat = 0.0

    def __enter__(self) -> _Client:
        entry = definition.SubscriptionEntry(topic=self._topic, expression=_EVERYTHING)
        subscription = definition.Subscription(group=self._group, subscriptions=[entry])
        settings = definition.Settings(client_type=definition.SIMPLE_CONSUMER, subscription=subscription)
        settings.request_timeout.FromSeconds(int(CALL_SECONDS))
        try:
            self._sending.put(service.TelemetryCommand(settings=settings))
            with self._failures():
                self._await_settings()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(grpc.RpcError):
            request = service.NotifyClientTerminationRequest(group=self._group)
            self._stub.NotifyClientTermination(request, metadata=self._headers(), timeout=CALL_SECONDS)
        self.close()

    def _await_settings(self) -> None:
        """Open the stream, which stays open because the server forgets a client without one, and wait for settings."""
        self._answers = self._stub.Telemetry(iter(self._sending.get, None), metadata=self._headers())
        late = Timer(CALL_SECONDS, self._answers.cancel)
        late.start()
        try:
            for answer in self._answers:
                if answer.HasField("settings"):
                    return
                _check("Telemetry", answer.status)
            raise error(Code.BROKER_AWAY, f"RocketMQ at {self._address} ends the stream without settings")
        finally:
            late.cancel()

    def close(self) -> None:
        """Close the stream and the connection."""
        self._sending.put(None)
        self._channel.close()

    def brokers(self) -> list[Any]:
        """Return the brokers that have queues of the topic."""
        request = service.QueryRouteRequest(topic=self._topic, endpoints=_endpoints_of(self._address))
        answer = self._call("QueryRoute", request)
        return list({queue.broker.name: queue.broker for queue in answer.message_queues}.values())

    def receive(self, broker: Any) -> list[Any]:
        """Receive up to :data:`BATCH` messages; waits for the first one at most :data:`POLL_SECONDS`."""
        if time.monotonic() - self._beat > 10:
            beat = service.HeartbeatRequest(group=self._group, client_type=definition.SIMPLE_CONSUMER)
            self._call("Heartbeat", beat)
            self._beat = time.monotonic()
        queue = definition.MessageQueue(topic=self._topic, broker=broker)
        request = service.ReceiveMessageRequest(group=self._group, message_queue=queue, batch_size=BATCH)
        request.filter_expression.CopyFrom(_EVERYTHING)
        request.invisible_duration.FromMilliseconds(round(INVISIBLE_SECONDS * 1000))
        request.long_polling_timeout.FromMilliseconds(round(POLL_SECONDS * 1000))
        messages = []
        with self._failures():
            for answer in self._stub.ReceiveMessage(request, metadata=self._headers(), timeout=CALL_SECONDS):
                if answer.HasField("message"):
                    messages.append(answer.message)
                elif answer.HasField("status") and answer.status.code != Status.MESSAGE_NOT_FOUND:
                    _check("ReceiveMessage", answer.status)
        return messages

    def acknowledge(self, entries: list[Any]) -> None:
        """Acknowledge messages for this group. One that fails is delivered again, which does no harm."""
        request = service.AckMessageRequest(group=self._group, topic=self._topic, entries=entries)
        with self._failures():
            self._stub.AckMessage(request, metadata=self._headers(), timeout=CALL_SECONDS)

    def _call(self, name: str, request: Any) -> Any:
        with self._failures():
            answer = getattr(self._stub, name)(request, metadata=self._headers(), timeout=CALL_SECONDS)
        _check(name, answer.status)
        return answer

    def _headers(self) -> tuple[tuple[str, str], ...]:
        now = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        headers = [
            ("x-mq-client-id", self._id),
            ("x-mq-language", "PYTHON"),
            ("x-mq-protocol", "GRPC_V2"),
            ("x-mq-client-version", "5.1.2"),
            ("x-mq-request-id", uuid.uuid4().hex),
            ("x-mq-date-time", now),
        ]
        if self._source.access_key:
            signature = hmac.new(self._source.secret_key.encode(), now.encode(), hashlib.sha1).hexdigest().upper()
            credential = f"Credential={self._source.access_key}, SignedHeaders=x-mq-date-time, Signature={signature}"
            headers.append(("authorization", f"{ALGORITHM} {credential}"))
        return tuple(headers)

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Convert errors of gRPC."""
        try:
            yield
        except grpc.RpcError as problem:
            code, details = problem.code(), problem.details()
            what = f"RocketMQ at {self._address}: {code.name} {details}"
            if code in _AWAY:
                raise error(Code.BROKER_AWAY, what, "the address of its gRPC proxy, usually port 8081") from None
            raise error(
                Code.BAD_ARGUMENT, what, f"create the group: mqadmin updateSubGroup -g {self._source.group} ..."
            ) from None


_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
_EVERYTHING = definition.FilterExpression(type=definition.TAG, expression="*")


def _check(name: str, status: Any) -> None:
    if status.code != Status.OK:
        what = f"RocketMQ rejects {name}: {definition.Code.Name(status.code)} {status.message:.300}"
        raise Misuse(Code.BAD_ARGUMENT, what)


def _endpoints_of(address: str) -> Any:
    host, _, port = address.rpartition(":")
    endpoints = definition.Endpoints(scheme=definition.DOMAIN_NAME)
    endpoints.addresses.add(host=host, port=int(port))
    return endpoints


def _address_of(broker: Any) -> str:
    first = broker.endpoints.addresses[0]
    return f"[{first.host}]:{first.port}" if ":" in first.host else f"{first.host}:{first.port}"
