"""The channel: AMQP's calls on an EscrowMQ broker.

- A *work queue* is a topic, and the consumer group of the same name. The broker leases a message to one worker; ack,
  reject and requeue go to the broker.
- A *broadcast* is an exchange of type ``fanout``, or one that is not durable: a topic of the exchange's name, from
  which each queue that is bound to it reads what is published from then on. Remote control, its replies and events are
  broadcasts. Nothing of a broadcast is leased or acknowledged.
- Bindings of work queues are known only to the process that declared them, as in kombu's other virtual transports.
"""

from __future__ import annotations

import re
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from queue import Empty
from typing import Any, cast
from uuid import uuid4

from kombu.transport import virtual

from escrowmq.celery.sources import Broadcast, Feed, Payload, Source
from escrowmq.client.consuming.received import Received
from escrowmq.errors import Denied, EscrowError
from escrowmq.message.limits import Limits

BULK = 100
"""Messages that a channel without a prefetch limit holds before the program takes them."""
PURGED_AT_ONCE = 1000
IDENTITY = "escrowmq_id"
"""Property of a message while it is published: its message id, which a retry keeps."""
REJECTED = "rejected by the worker"
_LONGEST_DELAY = Limits().max_delay_us / 1e6


def topic_of(name: str) -> str:
    """Return the topic of a queue or exchange; a character that a topic cannot have becomes ``_HEX_``."""
    return re.sub(r"[^A-Za-z0-9._-]", lambda found: f"_{ord(found[0]):x}_", name)


def delay_of(message: Payload) -> float:
    """Return the seconds until the ETA of a task, at most the broker's longest delay: the worker holds it for the rest
    of the time."""
    try:
        eta = datetime.fromisoformat(message["headers"]["eta"])
    except (KeyError, TypeError, ValueError):
        return 0.0
    left = (eta if eta.tzinfo else eta.replace(tzinfo=UTC)) - datetime.now(UTC)
    return min(max(left.total_seconds(), 0.0), _LONGEST_DELAY)


class QoS(virtual.QoS):
    """The prefetch limit of a channel; acknowledgements go to the broker."""

    channel: Channel

    def ack(self, delivery_tag: str) -> None:
        self.channel.settle(delivery_tag, Received.ack)
        self._forget(delivery_tag)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        if requeue:
            delay = self.channel.connection.client.transport_options.get("requeue_delay")
            self.channel.settle(delivery_tag, Received.nack, delay, REJECTED)
        else:
            self.channel.settle(delivery_tag, Received.reject, REJECTED)
        self._forget(delivery_tag)

    def _forget(self, delivery_tag: str) -> None:
        self._quick_ack(delivery_tag)
        self.channel.notify()


class Channel(virtual.Channel):
    """A channel of a :class:`~escrowmq.celery.transport.Transport`."""

    QoS = QoS
    supports_fanout = True

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self._changed = threading.Condition()  # guards the inbox, and is notified when there may be room
        self._inbox: defaultdict[str, deque[Payload]] = defaultdict(deque)
        self._feeds: dict[str, Feed] = {}
        self._transport = self.connection  # kombu's own reference is gone when a feed ends after the channel

    # Publishing

    def encode_body(self, body: Any, encoding: str | None = None) -> tuple[Any, str | None]:
        """Leave a text as it is, so that operators can read it."""
        return (body, None) if isinstance(body, str) else super().encode_body(body, encoding)

    def _inplace_augment_message(self, message: Payload, exchange: str, routing_key: str) -> None:
        super()._inplace_augment_message(message, exchange, routing_key)
        message["properties"].setdefault(IDENTITY, uuid4().hex)  # kombu repeats a publish with the same properties

    def basic_publish(self, message: Payload, exchange: str, routing_key: str, **more: Any) -> None:
        if not self._is_broadcast(exchange, routing_key):
            super().basic_publish(message, exchange, routing_key, **more)
            return
        self._inplace_augment_message(message, exchange, routing_key)
        self._put_fanout(exchange, message, routing_key)

    def _is_broadcast(self, exchange: str, routing_key: str) -> bool:
        known = self.state.exchanges.get(exchange)
        if known is None or known["type"] == "direct":
            return known is not None and not known["durable"]
        return known["type"] == "fanout" or not known["durable"] or not self._lookup(exchange, routing_key)

    def _put(self, queue: str, message: Payload, **_: Any) -> None:
        self.connection.send(topic_of(queue), message, delay=delay_of(message))

    def _put_fanout(self, exchange: str, message: Payload, routing_key: str, **_: Any) -> None:
        self.connection.send(topic_of(exchange), message, tag=routing_key or None)

    # Queues

    def _new_queue(self, queue: str, auto_delete: bool = False, exclusive: bool = False, **_: Any) -> None:
        self.connection.declared[queue] = temporary = auto_delete or exclusive
        if not temporary and not self.connection.in_transaction:
            with suppress(Denied):  # then its first message makes the topic, with as many queues as the broker likes
                self.connection.make_topic(topic_of(queue))

    def _has_queue(self, queue: str, **_: Any) -> bool:
        return queue in self.connection.declared or self.connection.has_topic(topic_of(queue))

    def _queue_bind(self, exchange: str, routing_key: str, pattern: str | None, queue: str) -> None:
        known = self.state.exchanges[exchange]
        kind, temporary = known["type"], self.connection.declared.get(queue, False)
        if kind == "fanout":
            self.connection.listen(queue, topic_of(exchange), lambda _: True)
        elif kind == "topic" and (temporary or not known["durable"]):
            self.connection.listen(queue, topic_of(exchange), partial(self.typeof(exchange)._match, pattern))
        elif not known["durable"]:
            self.connection.listen(queue, topic_of(exchange), routing_key.__eq__)

    def _size(self, queue: str) -> int:
        if queue in self.connection.broadcasts or self.connection.in_transaction:
            return 0
        try:
            return int(self.connection.count_waiting(topic_of(queue)))
        except Denied:  # counting needs the right to view
            return 0

    def _purge(self, queue: str) -> int:
        source, count = self._source(queue), 0
        with self._changed:
            found = list(self._inbox.pop(queue, ()))
        while found := found or source.receive(PURGED_AT_ONCE, 0.0):
            count += len(found)
            for payload in found:
                self.settle(payload["properties"]["delivery_tag"], Received.ack)
            found = []
        return count

    def _delete(self, queue: str, *given: Any, **more: Any) -> None:
        if (broadcast := self.connection.broadcasts.pop(queue, None)) is not None:
            broadcast.close()
        else:
            self._purge(queue)

    def _source(self, queue: str) -> Source:
        broadcast: Source | None = self.connection.broadcasts.get(queue)
        return broadcast or cast(Source, self.connection.work(topic_of(queue)))

    # Receiving

    def basic_consume(self, queue: str, no_ack: bool, callback: Callable[[Any], Any], *given: Any, **more: Any) -> None:
        def acknowledged(message: virtual.Message) -> Any:
            self.settle(message.delivery_tag, Received.ack)
            return callback(message)

        source = self._source(queue)  # raises before anything is changed
        super().basic_consume(queue, no_ack, acknowledged if no_ack else callback, *given, **more)
        if queue not in self._feeds:
            arrive = partial(self._arrive, queue, isinstance(source, Broadcast))
            self._feeds[queue] = Feed(source, self._room, self._changed, arrive, self.connection.fail)

    def basic_cancel(self, consumer_tag: str) -> None:
        queue = self._tag_to_queue.get(consumer_tag)
        super().basic_cancel(consumer_tag)
        if queue not in self._tag_to_queue.values() and (feed := self._feeds.pop(queue, None)) is not None:
            feed.stop()
            self.connection.stopping.append(feed)
            with self._changed:
                self._give_back(self._inbox.pop(queue, ()))

    def basic_get(self, queue: str, no_ack: bool = False, **more: Any) -> virtual.Message | None:
        message: virtual.Message | None = super().basic_get(queue, no_ack, **more)
        if message is not None and no_ack:
            self.settle(message.delivery_tag, Received.ack)
        return message

    def basic_qos(self, *given: Any, **more: Any) -> None:
        super().basic_qos(*given, **more)
        self.notify()

    def _get(self, queue: str, timeout: float | None = None) -> Payload:
        with self._changed:
            if self._inbox[queue]:
                return self._inbox[queue].popleft()
        if queue not in self._feeds and (found := self._source(queue).receive(1, 0.0)):
            return found[0]
        raise Empty

    def _arrive(self, queue: str, is_broadcast: bool, feed: Feed, found: Sequence[Payload]) -> None:
        """Take what a feed received. What is over the prefetch limit goes back: another queue was faster."""
        with self._changed:
            room = 0 if feed.stopped else len(found) if is_broadcast else max(self._room(), 0)
            self._inbox[queue].extend(found[:room])
            self._give_back(found[room:])
        self._transport.wake()

    def _room(self) -> int:
        """Return how many messages more the channel may hold."""
        most = self.qos.can_consume_max_estimate() if self.qos.prefetch_count else BULK
        return int(most) - sum(map(len, self._inbox.values()))

    # Settling

    def settle(self, delivery_tag: str, act: Callable[..., None], *given: Any) -> None:
        """Call ``act`` with the leased message of a tag, if it is still held."""
        self._transport.leases.settle(delivery_tag, act, *given)

    def notify(self) -> None:
        """Let the feeds receive again: there may be room."""
        with self._changed:
            self._changed.notify_all()

    def _give_back(self, found: Sequence[Payload] | deque[Payload]) -> None:
        for payload in found:
            self.settle(payload["properties"]["delivery_tag"], Received.release)

    def _restore(self, message: virtual.Message) -> None:
        """Return a message that was not acknowledged: redelivered at once, its attempt not counted."""
        with suppress(EscrowError):  # the connection is closed, and its lease ends by itself
            self.settle(message.delivery_tag, Received.release)
