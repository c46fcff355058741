"""The connected RocketMQ clients: their settings streams, the topics they declared, and check-backs to them.

Theory of operation. A client has one telemetry stream, on which it sends its settings and gets commands. A producer
names its topics in its settings (or is counted for a topic once it sends a half message there). For each such topic the
gateway is a member of the producer group ``rocketmq.TOPIC``, while a client of the topic has a stream: a due check then
comes to :meth:`Clients.decide`, which asks the client that sent the half message, else another one of the topic.
Without a stream the gateway is absent from the group, and the check waits without counting as an attempt.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, ref

from escrowmq.client.producing.producer import AsyncProducer
from escrowmq.gateway.core import Gateway
from escrowmq.gateway.rocketmq import mapping
from escrowmq.gateway.rocketmq.mapping import CLIENT, PLAIN_PRODUCERS, producer_group
from escrowmq.gateway.rocketmq.protocol import definition, service
from escrowmq.gateway.rocketmq.statuses import OK, Refusal, Status
from escrowmq.model import Check, Outcome

_log = logging.getLogger(__name__)

ANSWER_SECONDS = 10.0
"""Time (s) for a client to answer a check-back; then the broker asks again after ``check_interval``."""
SETTINGS_AGAIN = (0.5, 2.0)
"""Times (s) after which the settings are sent again: the Node client can miss the first ones and then waits forever."""
MAX_TOPICS = 4096
"""Topics that one client may declare."""
MAX_COMMANDS, MAX_COMMAND_BYTES = 1000, 8 << 20
"""Commands that wait for one client, and their bytes: two check-backs about the largest messages. A check-back above
waits for room."""
MAX_HELD_BYTES = 64 << 20
"""Bytes of the check-backs that wait for room in one stream. A check-back above is answered "unknown"."""


@dataclass(eq=False)
class Stream:
    """One telemetry stream of a client."""

    client: str
    gateway: Gateway
    topics: set[str] = field(default_factory=set)
    is_silent: bool = False
    """Whether the client has not answered its last check-back."""
    timers: list[asyncio.TimerHandle] = field(default_factory=list)
    """Send the settings again."""
    _commands: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)
    _bytes: int = 0
    _held_bytes: int = 0
    _room: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def waiting(self) -> int:
        """Return the number of commands that wait."""
        return self._commands.qsize()

    def put(self, **command: Any) -> bool:
        """Queue a command for the client. Returns False if too many wait."""
        return self._put(service.TelemetryCommand(status=OK, **command))

    async def put_later(self, **command: Any) -> bool:
        """Queue a command for the client when there is room. Returns False if too many wait for that."""
        made = service.TelemetryCommand(status=OK, **command)
        if self._held_bytes + made.ByteSize() > MAX_HELD_BYTES:
            return False
        self._held_bytes += made.ByteSize()
        try:
            async with self._room:
                return await self._room.wait_for(lambda: self._put(made))
        finally:
            self._held_bytes -= made.ByteSize()

    def _put(self, made: Any) -> bool:
        if self.waiting >= MAX_COMMANDS or self._bytes + made.ByteSize() > MAX_COMMAND_BYTES:
            return False
        self._bytes += made.ByteSize()
        self._commands.put_nowait(made)
        return True

    async def take(self) -> Any:
        """Wait for the next command. Returns None at the end of the stream."""
        command = await self._commands.get()
        self._bytes -= 0 if command is None else command.ByteSize()
        async with self._room:
            self._room.notify()
        return command

    def stop_timers(self) -> None:
        """Forget the settings that would be sent again."""
        for timer in self.timers:
            timer.cancel()

    def end(self) -> None:
        """End the stream after the command that is being sent."""
        while self.waiting:
            self._commands.get_nowait()
        self._commands.put_nowait(None)


class Clients:
    """The telemetry streams of one server, and the producers of the topics of their clients."""

    def __init__(self, timeout: float, settings_of: Callable[[Any], Any]) -> None:
        self._timeout = timeout
        self._settings_of = settings_of
        self._streams: dict[Gateway, list[Stream]] = {}
        # Connections of tokens that are idle are closed, and their producers with them.
        self._producers: WeakKeyDictionary[Gateway, dict[str, AsyncProducer]] = WeakKeyDictionary()
        self._pending: dict[str, list[tuple[Gateway, asyncio.Future[Outcome]]]] = {}
        """The check-backs that wait for an answer, by transaction: the broker may ask again before the first timed
        out."""

    def enter(self, gateway: Gateway, client: str) -> Stream:
        """Add a client's stream; :meth:`leave` must follow."""
        stream = Stream(client, gateway)
        self._streams.setdefault(gateway, []).append(stream)
        return stream

    def leave(self, stream: Stream) -> None:
        """Remove a stream. Topics without another one are left: their checks wait."""
        stream.stop_timers()
        streams = self._streams[stream.gateway]
        streams.remove(stream)
        if not streams:
            del self._streams[stream.gateway]
        for topic in stream.topics:
            if not any(topic in other.topics for other in streams):
                self._producers[stream.gateway][topic].attend(False)

    def close(self) -> None:
        """End all streams, so that their clients connect again."""
        for streams in self._streams.values():
            for stream in streams:
                stream.end()

    def learn(self, stream: Stream, settings: Any) -> None:
        """Take a client's settings: declare its topics, and answer with complete settings, now and a little later.
        Raises Refusal if too many answers wait for it."""
        if settings.HasField("publishing"):
            for resource in settings.publishing.topics[:MAX_TOPICS]:
                self.declare(stream, mapping.name_of(resource, Status.ILLEGAL_TOPIC))
        answer = self._settings_of(settings)
        if not stream.put(settings=answer):
            raise Refusal(Status.TOO_MANY_REQUESTS, f"client {stream.client:.80} does not read what it is sent")
        loop = asyncio.get_running_loop()
        stream.stop_timers()
        stream.timers = [loop.call_later(seconds, lambda: stream.put(settings=answer)) for seconds in SETTINGS_AGAIN]

    def declare(self, stream: Stream, topic: str) -> None:
        """Count a client as a producer of a topic: check-backs of the topic may go to it."""
        if topic in stream.topics:
            return
        if len(stream.topics) >= MAX_TOPICS:
            raise Refusal(
                Status.TOO_MANY_REQUESTS, f"client {stream.client:.80} declares more than {MAX_TOPICS} topics"
            )
        producer = self.transactional(stream.gateway, topic)
        stream.topics.add(topic)
        producer.attend(True)

    def declare_sender(self, gateway: Gateway, client: str, topic: str) -> None:
        """Count the sender of a half message as a producer of its topic, if it has a stream."""
        for stream in self._streams.get(gateway, ()):
            if stream.client == client:
                self.declare(stream, topic)

    def plain(self, gateway: Gateway) -> AsyncProducer:
        """Return the producer of messages without a transaction."""
        producers = self._producers.setdefault(gateway, {})
        producer = producers.get("")
        if producer is None:
            producer = producers[""] = gateway.bus.producer(PLAIN_PRODUCERS, qos=2, timeout=self._timeout)
        return producer

    def transactional(self, gateway: Gateway, topic: str) -> AsyncProducer:
        """Return the producer of the transactions of a topic. It answers checks while a client of the topic can."""
        producers = self._producers.setdefault(gateway, {})
        producer = producers.get(topic)
        if producer is None:
            if len(producers) >= gateway.settings.max_groups:
                raise Refusal(Status.TOO_MANY_REQUESTS, f"transactions of {len(producers)} topics; more need a gateway")

            found = ref(gateway)  # its producers must not keep a closed gateway in memory

            async def decide(check: Check) -> Outcome:
                known = found()
                return Outcome.UNKNOWN if known is None else await self.decide(known, check)

            producer = gateway.bus.producer(producer_group(topic), qos=2, timeout=self._timeout, checker=decide)
            producer.attend(any(topic in stream.topics for stream in self._streams.get(gateway, ())))
            producers[topic] = producer
        return producer

    async def decide(self, gateway: Gateway, check: Check) -> Outcome:
        """Ask a client for the outcome of a transaction: the sender, else another client of the topic. Clients that did
        not answer their last check-back come last. Returns UNKNOWN without an answer within ANSWER_SECONDS."""
        message = check.messages[0]
        fitting = [one for one in self._streams.get(gateway, ()) if message.topic in one.topics]
        sender = message.properties.get(CLIENT)
        fitting.sort(key=lambda one: (one.is_silent, one.client != sender, one.waiting))
        transaction = str(check.transaction_id)
        command = service.RecoverOrphanedTransactionCommand(
            message=mapping.to_orphan(message), transaction_id=transaction
        )
        if not fitting:
            return Outcome.UNKNOWN
        answer: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._pending.setdefault(transaction, []).append((gateway, answer))
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                if not await fitting[0].put_later(recover_orphaned_transaction_command=command):
                    return Outcome.UNKNOWN
                outcome = await answer
                fitting[0].is_silent = False
                return outcome
        except TimeoutError:
            fitting[0].is_silent = True
            _log.info("no answer from client %.80s about %s", fitting[0].client, transaction)
            return Outcome.UNKNOWN
        finally:
            self._pending[transaction].remove((gateway, answer))
            if not self._pending[transaction]:
                del self._pending[transaction]

    def on_answer(self, gateway: Gateway, transaction: str, outcome: Outcome) -> None:
        """Pass a client's answer about a transaction to the check-backs that wait for it. UNKNOWN, which the broker
        does not check, counts only with the credential that the check-back was sent to."""
        for asked, answer in self._pending.get(transaction, ()):
            if not answer.done() and (outcome is not Outcome.UNKNOWN or asked is gateway):
                answer.set_result(outcome)


def complete_settings(given: Any, fifo: bool) -> Any:
    """Return a client's settings with everything that some client needs: back-off, limits, the polling time."""
    answer = definition.Settings()
    answer.CopyFrom(given)
    backoff = definition.ExponentialBackoff(multiplier=2.0)
    if given.client_type == definition.PRODUCER:
        backoff.initial.FromMilliseconds(10)
        backoff.max.FromSeconds(1)
        answer.backoff_policy.CopyFrom(definition.RetryPolicy(max_attempts=3, exponential_backoff=backoff))
    else:
        backoff.initial.FromSeconds(1)
        backoff.max.FromSeconds(60)
        answer.backoff_policy.CopyFrom(definition.RetryPolicy(max_attempts=17, exponential_backoff=backoff))
    answer.metric.on = False
    if given.HasField("publishing") or given.client_type == definition.PRODUCER:
        answer.publishing.max_body_size = mapping.MAX_BODY
        answer.publishing.validate_message_type = True
    if given.HasField("subscription"):
        answer.subscription.fifo = fifo
        answer.subscription.receive_batch_size = 32
        if not answer.subscription.HasField("long_polling_timeout"):
            answer.subscription.long_polling_timeout.FromSeconds(20)
    return answer
