"""Kafka as a target, by ``confluent-kafka`` (the extra ``kafka``).

Everything is sent at once: an idempotent producer stores what it sends to a partition in order and without gaps, and a
refusal in the middle stops it (``enable.gapless.guarantee``). So of the rows of one key, which share a partition, the
stored ones are always the first ones. A stopped producer is replaced by a new one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from functools import partial
from typing import Any
from urllib.parse import parse_qsl

import numpy as np
from confluent_kafka import KafkaError, KafkaException, Message, Producer
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic  # type: ignore[attr-defined]

from escrowmq.errors import Code, Misuse
from escrowmq.outbox.targets.rows import Int64s, Rows, behind_failures, hold_back
from escrowmq.outbox.targets.seam import Codes, Promise
from escrowmq.platform.properties import read_properties

log = logging.getLogger(__name__)

OURS: Mapping[str, Any] = {
    "acks": "all",
    "enable.idempotence": True,
    "enable.gapless.guarantee": True,
    # Kafka accepts any sequence number of a producer that is new to a partition: where the first request failed,
    # because a new topic has no leader yet, a second one in flight would be stored before it.
    "max.in.flight.requests.per.connection": 1,
    "message.timeout.ms": 0,  # a timeout of a single message would leave a gap; ours is of a whole call
    "message.max.bytes": 1_000_000_000,  # the topic's own limit counts, see _limits()
}
"""Settings that the promise requires; they cannot be changed."""

Reports = dict[int, KafkaError | None]
LATE = KafkaError(KafkaError._MSG_TIMED_OUT)
PENDING = 255
NOT_STORED = (Code.BODY_TOO_LARGE, Code.QUEUE_FULL)
LAST_REPORTS_SECONDS = 1.0
"""Time to wait for the last reports of a stopped producer, which does not report all messages."""
SPREAD_SECONDS = 5.0
"""Time to ask again for the settings of a new topic, which not every broker knows at once."""
OVERHEAD = 128
"""Upper bound of the bytes that Kafka's framing adds to a batch of one message."""
LARGEST_BATCH = 1_000_000

_K = KafkaError
_DENIALS = (_K.TOPIC_AUTHORIZATION_FAILED, _K.CLUSTER_AUTHORIZATION_FAILED, _K.SASL_AUTHENTICATION_FAILED)
_TIMEOUTS = (_K._PURGE_INFLIGHT, _K._MSG_TIMED_OUT, _K._TIMED_OUT, _K.REQUEST_TIMED_OUT)
CODES: Mapping[int, Code] = {
    _K.TOPIC_EXCEPTION: Code.BAD_TOPIC_NAME,
    _K._UNKNOWN_PARTITION: Code.BAD_QUEUE,
    **dict.fromkeys((_K.MSG_SIZE_TOO_LARGE, _K.RECORD_LIST_TOO_LARGE), Code.BODY_TOO_LARGE),
    **dict.fromkeys((_K.UNKNOWN_TOPIC_OR_PART, _K._UNKNOWN_TOPIC), Code.UNKNOWN_TOPIC),
    **dict.fromkeys((_K.INVALID_RECORD, _K.INVALID_TIMESTAMP, _K.POLICY_VIOLATION), Code.BAD_REQUEST),
    **dict.fromkeys((*_DENIALS, _K._AUTHENTICATION), Code.DENIED),
    **dict.fromkeys((_K._QUEUE_FULL, _K._PURGE_QUEUE), Code.QUEUE_FULL),
    **dict.fromkeys((_K.NOT_ENOUGH_REPLICAS, _K.THROTTLING_QUOTA_EXCEEDED), Code.QUEUE_FULL),
    **dict.fromkeys((*_TIMEOUTS, _K.NOT_ENOUGH_REPLICAS_AFTER_APPEND), Code.TIMED_OUT),
}
"""The codes of Kafka's errors; any other is DISCONNECTED: the result is unknown."""


class KafkaTarget:
    """Sends to the topics of one Kafka cluster: key → partition, as Java's clients do it (murmur2)."""

    def __init__(
        self,
        servers: str,
        *,
        timeout: float = 30.0,
        create_topics: bool = True,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """``servers``: ``[kafka://]HOST:PORT[,HOST:PORT...][?SETTING=VALUE&...]``. ``timeout``: seconds of one
        ``send``. ``create_topics``: create missing topics with the cluster's defaults; else their messages are refused.
        ``config`` and the part after ``?``: more settings of librdkafka (``security.protocol=SASL_SSL`` and so on);
        ``?config=FILE`` names a file of ``NAME=VALUE`` lines, for passwords. Raises Misuse(BAD_SETTING) for a setting
        that the promise requires, or that librdkafka does not know. Does not connect yet."""
        servers, _, query = servers.removeprefix("kafka://").partition("?")
        given = dict(parse_qsl(query))
        file = given.pop("config", None)
        config = {**(read_properties(file) if file is not None else {}), **given, **(config or {})}
        if taken := sorted(set(config) & set(OURS)):
            raise Misuse(Code.BAD_SETTING, f"{taken[0]} is set by the target", "leave it out")
        if not servers.strip("/"):
            raise Misuse(Code.BAD_URL, "a Kafka URL names no broker", "kafka://HOST:PORT[,HOST:PORT...]")
        client = {
            "bootstrap.servers": servers.rstrip("/"),
            "logger": _Quietly(),
            # without it, errors of the connection would be raised by unrelated calls
            "error_cb": lambda problem: log.debug("Kafka: %s", problem.str()),
            "reconnect.backoff.max.ms": 1000,
            "socket.timeout.ms": max(1000, int(timeout * 1000)),
            **config,
        }
        self._config = {"partitioner": "murmur2_random", "linger.ms": 1, **client, **OURS}
        self._timeout = timeout
        self._producer: Producer | None = None
        self._batch_bytes = LARGEST_BATCH
        self._create_topics = create_topics
        self._known: dict[str, int] = {}  # the largest message of each topic
        self._closed = False
        try:
            self._admin = AdminClient(client)
            self._open()
        except KafkaException as problem:
            raise Misuse(Code.BAD_SETTING, str(problem.args[0].str())) from None

    @property
    def promise(self) -> Promise:
        """The guarantees: ordered by key, at least once (Kafka ignores the message id)."""
        durable = "every in-sync replica has it (acks=all); Kafka leaves syncing to disk to the number of replicas"
        return Promise("kafka", f"{durable}, so keep at least two in sync (min.insync.replicas)")

    def send(self, batch: Any) -> Codes:
        if self._closed:
            raise Misuse(Code.BAD_ARGUMENT, "the target is closed")
        rows = Rows(batch)
        deadline = time.monotonic() + self._timeout
        codes = rows.refused(max_body_bytes=None, queues=True)
        self._check_topics(rows, codes, deadline)
        hold_back(codes, rows.key_numbers)
        wanted = np.flatnonzero(codes == Code.OK)
        self._produce(rows, wanted, codes, deadline)
        if (codes[wanted] == Code.BODY_TOO_LARGE).any():
            self._single_out(rows, wanted[np.isin(codes[wanted], NOT_STORED)], codes, deadline)
        hold_back(codes, rows.key_numbers)
        return codes

    def close(self) -> None:
        self._closed = True
        self._producer = None

    def _open(self) -> Producer:
        if self._producer is None:
            self._producer = Producer({**self._config, "batch.size": self._batch_bytes})
        return self._producer

    def _check_topics(self, rows: Rows, codes: Codes, deadline: float) -> None:
        """Set the codes of rows that are refused before sending: their topic cannot be used, or they are larger than it
        accepts. Lowers the producer's batch size to the smallest limit."""
        limits = self._limits(sorted(set(rows.topics)), deadline)
        for row in np.flatnonzero(codes == Code.OK).tolist():
            limit = limits[rows.topics[row]]
            if isinstance(limit, Code):
                codes[row] = limit
            elif limit and _size(rows, row) > limit:
                codes[row] = Code.BODY_TOO_LARGE
        smallest = min((limit for limit in limits.values() if limit and not isinstance(limit, Code)), default=None)
        if smallest is not None and smallest < self._batch_bytes:  # a batch may be no larger than a message
            self._producer = None
            self._batch_bytes = smallest

    def _produce(self, rows: Rows, wanted: Int64s, codes: Codes, deadline: float) -> None:
        """Send the rows numbered ``wanted`` all at once, wait for their reports until ``deadline``, and set their
        ``codes``. TIMED_OUT without a report: the result is unknown. A producer that failed is dropped."""
        producer = self._open()
        stopped: set[int] = set()
        reports: Reports = {}
        for row in wanted.tolist():
            key_number = int(rows.key_numbers[row])
            if key_number in stopped:
                codes[row] = Code.QUEUE_FULL
                continue
            codes[row] = self._enqueue(producer, rows, row, reports, deadline)
            if codes[row] != PENDING:
                stopped.add(key_number)
        if not _flush(producer, reports, deadline):
            self._producer = None  # with what it still holds; the next call makes a new one
        for row in np.flatnonzero(codes == PENDING).tolist():
            problem = reports.get(row, LATE)
            codes[row] = Code.OK if problem is None else _code(problem)
        for row in wanted[codes[wanted] != Code.OK].tolist():
            self._known.pop(rows.topics[row], None)  # it may have changed

    def _enqueue(self, producer: Producer, rows: Rows, row: int, reports: Reports, deadline: float) -> int:
        key, queue = rows.keys[row], rows.queues[row]
        while True:
            try:
                producer.produce(
                    rows.topics[row],
                    rows.bodies[row],
                    None if key is None else key.encode(),
                    headers=[(name, value.encode()) for name, value in rows.headers(row, key=False)],
                    partition=queue,  # -1: by the key
                    on_delivery=partial(_note, reports, row),
                )
                return PENDING
            except BufferError:  # the producer's memory is full: let it send
                if time.monotonic() > deadline:
                    return Code.QUEUE_FULL
                _poll(producer, 0.1)
            except KafkaException as problem:
                return _code(problem.args[0])

    def _single_out(self, rows: Rows, refused: Int64s, codes: Codes, deadline: float) -> None:
        """Send ``refused`` rows again, each alone, and set their ``codes``: Kafka refused whole batches without naming
        the message that is too large, and the producer stopped."""
        for row in refused.tolist():
            codes[row] = Code.OK
            if behind_failures(codes, rows.key_numbers)[row] or time.monotonic() > deadline:
                codes[row] = Code.QUEUE_FULL
            else:
                self._produce(rows, np.array([row]), codes, deadline)

    def _limits(self, topics: list[str], deadline: float) -> dict[str, int | Code]:
        """Return for each topic its largest message in bytes (0: unknown), or the error why it cannot be used. Looks up
        new topics only; creates missing ones if the target may."""
        new = [topic for topic in topics if topic not in self._known]
        problems: dict[str, Code] = {}
        if new:
            try:
                problems = self._look_up(new, max(0.1, deadline - time.monotonic()))
            except KafkaException as problem:
                problems = dict.fromkeys(new, _code(problem.args[0]))
        return {topic: problems.get(topic, self._known.get(topic, Code.DISCONNECTED)) for topic in topics}

    def _look_up(self, topics: list[str], seconds: float) -> dict[str, Code]:
        there = self._admin.list_topics(timeout=seconds).topics
        problems = {topic: Code.UNKNOWN_TOPIC for topic in topics if topic not in there}
        if problems and self._create_topics:
            made = self._admin.create_topics([NewTopic(t, -1, -1) for t in problems], operation_timeout=seconds)
            problems = {topic: code for topic, future in made.items() if (code := _outcome(future, seconds))}
        found = [topic for topic in topics if topic not in problems]
        if found:
            self._known |= self._describe(found, seconds)
        return problems

    def _describe(self, topics: list[str], seconds: float) -> dict[str, int]:
        """Return the largest message of each topic in bytes; 0: unknown, and Kafka will refuse what is too large."""
        limits = {}
        until = time.monotonic() + min(seconds, SPREAD_SECONDS)
        while topics:
            resources = [ConfigResource(ConfigResource.Type.TOPIC, topic) for topic in topics]
            topics = []
            for resource, future in self._admin.describe_configs(resources, request_timeout=seconds).items():
                limits[resource.name] = 0
                try:
                    limits[resource.name] = int(future.result(seconds)["max.message.bytes"].value)
                except KafkaException as problem:  # no rights to read it, or the topic is new
                    if problem.args[0].code() == _K.UNKNOWN_TOPIC_OR_PART and time.monotonic() < until:
                        topics.append(resource.name)
                except (KeyError, ValueError):
                    pass
            if topics:
                time.sleep(0.02)
        return limits


def _outcome(made: Any, seconds: float) -> Code | None:
    try:
        made.result(seconds)
    except KafkaException as problem:
        known = problem.args[0]
        return None if known.code() == KafkaError.TOPIC_ALREADY_EXISTS else _code(known)
    return None


def _flush(producer: Producer, reports: Reports, deadline: float) -> bool:
    """Wait for the reports of all messages until ``deadline``, or shorter after a fatal error. Returns whether the
    producer is reusable: nothing failed, and nothing is in flight."""
    sound = True
    while len(producer) and (left := deadline - time.monotonic()) > 0:
        if not _poll(producer, min(0.1, left)) and sound:
            sound = False
            deadline = min(deadline, time.monotonic() + LAST_REPORTS_SECONDS)
    return sound and not len(producer) and not any(reports.values())


def _poll(producer: Producer, seconds: float) -> bool:
    """Receive reports, waiting at most ``seconds``. Returns False after a fatal error, when queued messages are purged:
    the producer is not reusable."""
    try:
        producer.poll(seconds)
    except (KafkaException, SystemError):
        # A fatal error is raised here, sometimes through a report's callback. Queued messages will never be sent, and
        # only purging reports them; messages in flight are still reported.
        producer.purge(in_queue=True, in_flight=False)
        return False
    return True


def _note(reports: Reports, row: int, problem: KafkaError | None, _message: Message) -> None:
    reports[row] = problem  # nothing more, because a fatal error may be raised through this callback


class _Quietly:
    """A logger that logs librdkafka's lines as details, because each row has its result."""

    def log(self, _level: int, *lines: Any) -> None:
        log.debug(*lines)


def _code(problem: KafkaError) -> Code:
    return CODES.get(problem.code(), Code.DISCONNECTED)


def _size(rows: Rows, row: int) -> int:
    key = rows.keys[row]
    headers = sum(len(name.encode()) + len(value.encode()) + 10 for name, value in rows.headers(row, key=False))
    return len(rows.bodies[row]) + (0 if key is None else len(key.encode())) + headers + OVERHEAD
