"""A partition of a real Kafka, through ``confluent-kafka`` (the extra ``kafka``)."""

from __future__ import annotations

import logging
import math
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from typing import Any, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic, OffsetSpec  # type: ignore[attr-defined]

from escrowmq.errors import Code, EscrowError, Misuse, error
from escrowmq.log.kafka.cluster import answers
from escrowmq.log.kafka.cluster.address import REPLICAS, KafkaAddress
from escrowmq.log.kafka.cluster.answers import DENIED, SLICE, UNKNOWN_TOPIC, response_error, retry_until, timeout_error
from escrowmq.log.kafka.cluster.topic import refuse_wrong, settings_for
from escrowmq.log.kafka.partition import END, UNKNOWN_OFFSET
from escrowmq.platform.logs import tell

log = logging.getLogger(__name__)
_T = TypeVar("_T")

CLIENT: Mapping[str, Any] = {
    "client.id": "escrowmq",
    "socket.nagle.disable": True,  # rounds and requests are sent at once
    "socket.timeout.ms": 5000,  # timeout for the connection of a dead node
    "reconnect.backoff.ms": 20,
    "reconnect.backoff.max.ms": 500,
    "topic.metadata.refresh.fast.interval.ms": 50,
}
"""Defaults that an address may override."""
PRODUCER: Mapping[str, Any] = {
    "acks": "all",
    "enable.idempotence": True,  # each record once, in order
    "enable.gapless.guarantee": True,  # or an error, never a gap
    "max.in.flight.requests.per.connection": 5,
    "message.timeout.ms": 0,  # an abandoned record would be a gap: the channel's patience applies
    "message.max.bytes": 1_000_000,
    "linger.ms": 0,  # a round is sent at once
    "request.timeout.ms": 4000,
    "retry.backoff.ms": 20,
    "compression.type": "none",
    "queue.buffering.max.messages": 1_000_000,
    "queue.buffering.max.kbytes": 1 << 19,
}
CONSUMER: Mapping[str, Any] = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "auto.offset.reset": "error",  # never a silent jump
    "isolation.level": "read_uncommitted",  # never blocked by another program's open transaction
    "check.crcs": True,
    "fetch.wait.max.ms": 100,  # a read at another offset waits this long for the fetch in progress
    "fetch.error.backoff.ms": 20,
    "fetch.queue.backoff.ms": 5,  # 1 s by default, which would stall catching up repeatedly
    "queued.max.messages.kbytes": 1 << 15,
    "allow.auto.create.topics": False,
}
_PAGE_BYTES = 8 << 20  # maximum bytes of records returned by one ``read``, except for a single larger one
_ANSWER_SECONDS = 10.0
_FULL_SECONDS = 30.0
_JUMPS = {KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE, KafkaError._LOG_TRUNCATION}
"""The consumer's errors for: no record at this offset."""


class ConfluentPartitions:
    """Implementation of :class:`escrowmq.log.kafka.partition.Partitions`. Created by ``opening.py``."""

    def __init__(self, address: KafkaAddress) -> None:
        self._address = address
        given = dict(address.settings)
        if taken := sorted({*PRODUCER, *CONSUMER, "group.id", "transactional.id"} & set(given)):
            raise Misuse(Code.BAD_SETTING, f"{taken[0]} is set by the log", "leave it out")
        self._client = {"bootstrap.servers": ",".join(address.servers), **CLIENT, **given}
        self._opened: list[ConfluentPartition] = []  # may include closed ones
        self._opening = threading.Lock()
        self._closed = False
        self._admin = _admin_client(self._client)  # raises for an unknown setting

    @property
    def name(self) -> str:
        return str(self._address)

    def log(self) -> ConfluentPartition:
        made = self._open(self._address.topic)
        made.begin()
        return made

    def base(self) -> ConfluentPartition:
        return self._open(self._address.base_topic)

    def _open(self, topic: str) -> ConfluentPartition:
        made = ConfluentPartition(self._client, self._admin, topic, self._address.partition)
        with self._opening:
            if not self._closed:
                self._opened = [one for one in self._opened if not one.closed] + [made]
                return made
        made.close()
        raise error(Code.CLOSED, f"{self.name} was closed")

    def close(self) -> None:
        with self._opening:
            self._closed = True
        for partition in self._opened:
            partition.close()

    def check(self, timeout: float = 30.0) -> str:
        requests, retry = self._requests(timeout)
        for topic in (self._address.topic, self._address.base_topic):
            replicas, found = retry(partial(requests.replicas, topic)), retry(partial(requests.settings, topic))
            refuse_wrong(self._address, topic, found, replicas)
        if self._address.replicas < REPLICAS:
            few = f"{self.name} has {self._address.replicas} of {REPLICAS} replicas by its URL: failures may lose data"
            tell(logging.WARNING, "few_replicas", few, log=self.name, replicas=self._address.replicas)
        return str(retry(requests.cluster))

    def _requests(self, timeout: float) -> tuple[_TopicRequests, Callable[[Callable[[float], Any]], Any]]:
        """Return an object for requests about topics, and a function that repeats one until ``timeout`` (s)."""
        requests = _TopicRequests(self.name, self._client, lambda: self._closed)
        return requests, partial(retry_until, time.monotonic() + timeout, self.name, errors=requests.errors)

    def create(self, partitions: int, timeout: float) -> list[str]:
        """Create missing topics; return their names. See :func:`escrowmq.log.kafka.cluster.opening.create_topics`."""
        deadline, (requests, retry) = time.monotonic() + timeout, self._requests(timeout)
        retry(requests.cluster)  # raises the reason if Kafka rejects us
        there = retry_until(deadline, self.name, lambda left: set(self._admin.list_topics(timeout=left).topics))
        names = [t for t in (self._address.topic, self._address.base_topic) if t not in there]
        settings = settings_for(self._address)
        new = [NewTopic(name, partitions, self._address.replicas, config=settings) for name in names]
        for name, future in self._admin.create_topics(new, operation_timeout=timeout).items() if new else ():
            try:
                future.result(timeout)
            except KafkaException as problem:
                _refuse_creation(name, problem.args[0], self._address)
            except FutureTimeout:
                raise timeout_error(self.name) from None
        while True:  # it takes a moment until every node knows a new topic
            try:
                self.check(max(deadline - time.monotonic(), SLICE))
                return names
            except EscrowError as problem:
                if problem.code is not Code.UNKNOWN_TOPIC or not names or time.monotonic() > deadline:
                    raise
                time.sleep(0.05)


def _admin_client(client: Mapping[str, Any], **callbacks: Any) -> AdminClient:
    # this client is never polled, so its log would pile up
    return _make(AdminClient, {**client, **callbacks, "log_level": 0})


def _make(type: Callable[[dict[str, Any]], _T], settings: dict[str, Any]) -> _T:
    try:
        return type(settings)
    except KafkaException as problem:
        raise Misuse(Code.BAD_SETTING, str(problem.args[0].str())) from None


class _TopicRequests:
    """Requests by a separate client, polled while they wait to report why a response is late. ``closed``: give up."""

    def __init__(self, name: str, client: Mapping[str, Any], closed: Callable[[], bool]) -> None:
        self._name, self._closed = name, closed
        self.errors = answers.ConnectionErrors()
        self._admin = _admin_client(client, error_cb=self.errors.note)

    def replicas(self, topic: str, timeout: float) -> dict[int, int]:
        """Return the replica count of each partition. Unlike a metadata request, this never creates the topic."""
        (future,) = self._admin.describe_topics(TopicCollection([topic]), request_timeout=max(timeout, 1.0)).values()
        return {partition.id: len(partition.replicas) for partition in self._await(future, timeout).partitions}

    def settings(self, topic: str, timeout: float) -> dict[str, str | None]:
        resource = ConfigResource(ConfigResource.Type.TOPIC, topic)
        (future,) = self._admin.describe_configs([resource], request_timeout=max(timeout, 1.0)).values()
        return {name: entry.value for name, entry in self._await(future, timeout).items()}

    def cluster(self, timeout: float) -> str:
        return str(self._await(self._admin.describe_cluster(request_timeout=max(timeout, 1.0)), timeout).cluster_id)

    def _await(self, future: Any, timeout: float) -> Any:
        """Wait for a response. Raises KafkaException, TimeoutError; :meth:`ConnectionErrors.timeout_error` after a
        rejection with no other response for a while; Unknown(CLOSED)."""
        began = time.monotonic()
        while True:
            try:
                return future.result(SLICE / 2)
            except FutureTimeout:
                waited = time.monotonic() - began
                if self._closed():
                    raise error(Code.CLOSED, f"{self._name} was closed") from None
                if waited >= timeout:
                    raise
                self._admin.poll(SLICE / 2)  # the client reports connection errors
                if self.errors.refusal is not None and waited > answers.SURE_SECONDS:
                    raise self.errors.timeout_error(self._name) from None


class ConfluentPartition:
    """A Partition, see ``partition.py``. Its producer starts with the first record, or with :meth:`begin`."""

    def __init__(self, client: Mapping[str, Any], admin: AdminClient, topic: str, partition: int) -> None:
        self.name = f"{topic}/{partition}"
        self._topic, self._partition, self._client, self._admin = topic, partition, client, admin
        self._reports: deque[tuple[int, int]] = deque()
        self._failure: EscrowError | None = None
        self._used = self.closed = False
        self._consuming = threading.Lock()  # held around every call of the consumer
        self._reading = threading.Lock()
        self._ahead: deque[tuple[int, bytes]] = deque()  # read ahead, not yet returned
        self._next = -1  # the consumer's next offset
        self._producer: Producer | None = None
        self._beginning = threading.Lock()
        # without error_cb, errors of the connection would be raised out of unrelated calls
        callbacks = {"logger": _DebugLogger(), "error_cb": lambda problem: log.debug("Kafka: %s", problem.str())}
        settings = {**client, **CONSUMER, **callbacks, "group.id": f"escrowmq-{uuid.uuid4()}"}
        self._consumer = _make(Consumer, settings)

    # Sending

    def begin(self) -> None:
        """Connect the producer, so that the first record need not wait for it."""
        with self._beginning:
            self._check()
            if self._producer is None:
                callbacks = {"logger": _DebugLogger(), "error_cb": self._on_error}
                self._producer = _make(Producer, {**self._client, **PRODUCER, **callbacks})

    def produce(self, number: int, record: bytes) -> None:
        deadline = time.monotonic() + _FULL_SECONDS
        while True:
            if self._failure is not None:
                raise self._failure
            self._used = True
            try:
                callback = self._delivery_callback(number)
                self._sender().produce(self._topic, record, partition=self._partition, on_delivery=callback)
                return
            except BufferError:  # the client's buffer is full of unacknowledged records
                if time.monotonic() > deadline:
                    raise self._on_end(f"its memory was full for {_FULL_SECONDS:g} s") from None
                time.sleep(SLICE / 10)
            except KafkaException as problem:
                raise self._on_end(problem.args[0].str()) from None

    def acknowledged(self, timeout: float) -> list[tuple[int, int]]:
        deadline = time.monotonic() + timeout
        while True:
            try:
                self._sender().poll(0 if self._reports else _slice(deadline))
            except (KafkaException, SystemError) as problem:  # fatal; SystemError if raised in a report's callback
                self._on_end(str(problem))
            if self._reports:
                return [self._reports.popleft() for _ in range(len(self._reports))]
            if self._failure is not None:
                raise self._failure
            if time.monotonic() >= deadline:
                return []

    def _delivery_callback(self, number: int) -> Callable[[KafkaError | None, Message], None]:
        def note(problem: KafkaError | None, message: Message) -> None:
            if problem is not None:  # do not raise: it would come out of ``poll``
                self._on_end(problem.str())
            else:
                offset = message.offset()
                self._reports.append((number, UNKNOWN_OFFSET if offset is None or offset < 0 else offset))

        return note

    def _on_error(self, problem: KafkaError) -> None:
        if problem.fatal():
            self._on_end(problem.str())
        log.debug("Kafka: %s", problem.str())

    def _on_end(self, message: str) -> EscrowError:
        """Record the first failure of the producer, after which nothing is sent: a new one would not know what this one
        has stored. Returns the error to raise."""
        if self._failure is None and not self.closed:
            self._failure = error(Code.LOG_FAILED, f"Kafka's producer for {self.name} ended: {message}")
        return self._failure or error(Code.CLOSED, f"{self.name} was closed")

    # Reading

    def read(self, start: int, end: int = END, timeout: float = 0.0) -> list[tuple[int, bytes]]:
        deadline = time.monotonic() + timeout
        found: list[tuple[int, bytes]] = []
        if not self._used and self._producer is not None:
            self._sender().poll(0)  # its log would pile up, as no caller waits for acknowledgements yet
        with self._reading:
            self._seek(start)
            while start < end and not self._ahead:
                slice = _slice(deadline)
                self._fetch(start, slice)
                if not slice:
                    break
            if self._ahead and self._ahead[0][0] > start:  # the end of another program's transaction, or compaction
                message = f"{self.name}: offset {start} cannot be read, and more records follow"
                raise error(Code.DAMAGED, message, "a topic of the log must have no other writers")
            while self._ahead and self._ahead[0][0] < end:
                found.append(self._ahead.popleft())
        return found

    def rest(self) -> None:
        with self._reading, self._consuming:
            self._ahead.clear()
            self._next = -1
            if not self.closed:
                self._consumer.unassign()

    def ends(self, timeout: float) -> tuple[int, int]:
        deadline = time.monotonic() + timeout
        return retry_until(deadline, self.name, self._ends)

    def delete_before(self, offset: int, timeout: float = 30.0) -> None:
        self._check()
        place = TopicPartition(self._topic, self._partition, offset)
        (future,) = self._admin.delete_records([place], request_timeout=timeout, operation_timeout=timeout).values()
        try:
            future.result(timeout)
        except FutureTimeout:
            raise timeout_error(self.name) from None
        except KafkaException as problem:
            raise response_error(self.name, problem.args[0]) from None

    def close(self) -> None:
        with self._consuming:
            if self.closed:
                return
            self.closed = True
            self._consumer.close()
        with self._beginning:
            producer, self._producer = self._producer, None
        if producer is not None:
            try:
                producer.purge()  # do not send abandoned records later
                producer.poll(0)
            except (KafkaException, SystemError) as problem:
                log.debug("Kafka: %s", problem)

    def _sender(self) -> Producer:
        if self._producer is None:
            self.begin()
        if (producer := self._producer) is None:  # closed meanwhile
            raise error(Code.CLOSED, f"{self.name} was closed")
        return producer

    def _seek(self, start: int) -> None:
        while self._ahead and self._ahead[0][0] < start:
            self._ahead.popleft()
        if start != (self._ahead[0][0] if self._ahead else self._next):
            self._ahead.clear()
            with self._consuming:
                self._check()
                self._consumer.assign([TopicPartition(self._topic, self._partition, start)])
            self._next = start

    def _fetch(self, start: int, timeout: float) -> None:
        """Read available records from the consumer into ``_ahead``, waiting ``timeout`` seconds only for the first."""
        size, problem = 0, None
        with self._consuming:
            self._check()
            message = self._consumer.poll(timeout)
            while message is not None:
                problem = message.error()
                if problem is not None:
                    break
                value = message.value() or b""
                self._next = (message.offset() or 0) + 1
                self._ahead.append((self._next - 1, value))
                size += len(value)
                message = self._consumer.poll(0) if size < _PAGE_BYTES else None
        if problem is not None:
            self._raise_read_error(problem, start)

    def _raise_read_error(self, problem: KafkaError, start: int) -> None:
        """Raise the error of the consumer, which read at ``start``, unless it may be temporary: RANGE_PURGED or DAMAGED
        if there is no record at this offset."""
        log.debug("Kafka, reading %s: %s", self.name, problem.str())
        if problem.code() in _JUMPS:
            self._next = -1  # the consumer has no position now
            if self._ahead:
                return
            first, following = self.ends(_ANSWER_SECONDS)
            if start < first:
                raise error(Code.RANGE_PURGED, f"{self.name} begins at offset {first}, not {start}")
            if start > following:
                message = f"{self.name} ends at offset {following}; it was read up to {start}: Kafka lost records"
                raise error(Code.DAMAGED, message, "check which node folders hold them: `escrowmq log dump --check`")
            self._seek(start)
        elif problem.fatal() or problem.code() in DENIED | UNKNOWN_TOPIC:
            raise response_error(self.name, problem)

    def _ends(self, timeout: float) -> tuple[int, int]:
        """Query the offsets of the first and the next record through a separate connection: on the consumer's, a
        request waits for a fetch."""
        self._check()
        place, timeout = TopicPartition(self._topic, self._partition), min(max(timeout, SLICE), 1.0)
        futures = [
            self._admin.list_offsets({place: spec}, request_timeout=timeout)[place]
            for spec in (OffsetSpec.earliest(), OffsetSpec.latest())  # type: ignore[no-untyped-call]
        ]
        first, following = (int(future.result(timeout).offset) for future in futures)
        return first, following

    def _check(self) -> None:
        if self.closed:
            raise error(Code.CLOSED, f"{self.name} was closed")


def _slice(deadline: float) -> float:
    """Return the timeout (s) of the client's next call, at most SLICE and in whole ms: with less than one it does not
    wait at all."""
    left = deadline - time.monotonic()
    return min(math.ceil(left * 1000) / 1000, SLICE) if left > 0 else 0.0


def _refuse_creation(topic: str, problem: KafkaError, address: KafkaAddress) -> None:
    """Raise the reason why Kafka did not create a topic, unless the topic exists."""
    if problem.code() == KafkaError.TOPIC_ALREADY_EXISTS:
        return
    if problem.code() == KafkaError.INVALID_REPLICATION_FACTOR:
        message = f"topic {topic} cannot have {address.replicas} replicas: {problem.str()}"
        raise Misuse(Code.BAD_SETTING, message, "?replication=1 in the URL accepts a single replica")
    if problem.code() in DENIED:
        raise response_error(topic, problem)
    raise Misuse(Code.BAD_SETTING, f"Kafka does not make topic {topic}: {problem.str()}")


class _DebugLogger:
    """Writes librdkafka's log at debug level."""

    def log(self, _level: int, *words: Any) -> None:
        log.debug(*words)
