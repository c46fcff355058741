"""The transport: one connection of a Celery application to EscrowMQ."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from functools import cached_property
from queue import Empty
from typing import Any

from kombu.transport import virtual
from kombu.utils.json import dumps

import escrowmq
from escrowmq.celery.channel import IDENTITY, Channel
from escrowmq.celery.leases import Leases
from escrowmq.celery.sources import Broadcast, Feed, Payload, Work
from escrowmq.client.admin import Admin
from escrowmq.client.bus import Bus
from escrowmq.client.producing.producer import Producer
from escrowmq.connecting import connect
from escrowmq.errors import Code, Denied, EscrowError, Misuse, Overloaded, Rejected, Unknown
from escrowmq.model import Message
from escrowmq.platform.listening import shown_address

LEASE_SECONDS = 60.0
GROUP = "celery"
_CONNECTING = ("tls", "certificate", "token", "token_file")
_SCHEMES = ("escrow", "escrows")

store: ContextVar[Callable[[Message], object] | None] = ContextVar("store", default=None)
"""Stores a message in place of sending it: set within :func:`escrowmq.celery.atomic`."""


class Transport(virtual.Transport):
    """EscrowMQ as Celery's broker.

    ``broker_transport_options``:

    - ``tls``, ``certificate``, ``token``, ``token_file``: as of :func:`escrowmq.connect`;
    - ``lease``: seconds after which the messages of a worker that is gone go to others (60);
    - ``extend_every``: seconds between two extensions of the leases of a worker that lives (a third of ``lease``);
    - ``requeue_delay``: seconds until a message that was rejected with ``requeue=True`` comes again (None: the group's
      back-off);
    - ``producer_group``: the producer group (``celery``).
    """

    Channel = Channel
    can_parse_url = True
    default_port = 7700
    polling_interval = None
    driver_type = "escrow"
    driver_name = "escrowmq"
    implements = virtual.Transport.implements.extend(exchange_type=frozenset({"direct", "topic", "fanout"}))
    connection_errors = (*virtual.Transport.connection_errors, Unknown, Overloaded)
    channel_errors = (*virtual.Transport.channel_errors, Rejected)
    recoverable_connection_errors = connection_errors
    recoverable_channel_errors = virtual.Transport.channel_errors

    def __init__(self, client: Any, **more: Any) -> None:
        super().__init__(client, **more)
        self.declared: dict[str, bool] = {}  # whether a queue is temporary
        self.broadcasts: dict[str, Broadcast] = {}
        self.stopping: list[Feed] = []
        self._work: dict[str, Work] = {}
        self._problem: EscrowError | None = None
        self._arrived = threading.Event()
        self._process = os.getpid()

    # The connection

    @cached_property
    def bus(self) -> Bus:
        """The connection; nothing is sent before its first use."""
        if self.client.ssl:
            raise Misuse(Code.BAD_ARGUMENT, "broker_use_ssl", "write escrows:// in place of escrow://")
        given = self.client.transport_options
        return connect(self._url(), **{name: given[name] for name in _CONNECTING if name in given})

    def _url(self) -> str:
        host, scheme = self.client.hostname or "127.0.0.1", self.client.transport_cls
        if host.startswith("unix://"):  # kombu cuts the scheme at its plus sign
            return f"escrow+{host}"
        if "://" in host:
            return str(host)
        return f"{scheme if scheme in _SCHEMES else 'escrow'}://{host}:{self.client.port or self.default_port}"

    def establish_connection(self) -> Transport:
        """Connect. Raises Unknown or Overloaded if no broker answers, Denied. Within ``atomic`` the broker may be away,
        and nothing is sent to it."""
        if not self.in_transaction:
            Admin(self.bus.router, self.client.connect_timeout or 5.0).hello()
        super().establish_connection()
        return self

    def close_connection(self, connection: Any) -> None:
        """Return what is not acknowledged, send the pending acknowledgements, and disconnect."""
        if self._process != os.getpid():
            return  # a forked child has no part in it
        super().close_connection(connection)
        for feed in self.stopping:
            feed.join()
        self.leases.close()
        for broadcast in self.broadcasts.values():
            broadcast.close()
        if "bus" in self.__dict__:
            self.bus.close(0)
            del self.bus

    def as_uri(self, uri: str, include_password: bool = False, mask: str = "**") -> str:
        """Return the URL for display."""
        return uri if include_password else shown_address(uri)

    def driver_version(self) -> str:
        return escrowmq.__version__

    # Publishing

    @property
    def in_transaction(self) -> bool:
        """Return whether messages go to the outbox."""
        return store.get() is not None

    @cached_property
    def _producer(self) -> Producer:
        group = self.client.transport_options.get("producer_group", GROUP)
        return self.bus.producer(group, qos=2, timeout=self.client.connect_timeout or 5.0)

    def send(self, topic: str, payload: Payload, *, delay: float = 0.0, tag: str | None = None) -> None:
        """Send a message, or store it within ``atomic``. It is durable on return.

        Its properties ``task`` and ``id`` are those of the task. kombu's retry sends it again under the same message
        id, which makes no copy.
        """
        own = {name: value for name, value in payload["properties"].items() if name not in ("delivery_tag", IDENTITY)}
        headers = payload.get("headers") or {}
        shown = {name: headers[name] for name in ("task", "id") if isinstance(headers.get(name), str)}
        body = dumps({**payload, "properties": own}).encode()
        identity = bytes.fromhex(payload["properties"][IDENTITY])
        message = Message(topic, body, tag=tag, properties=shown, delay=delay, message_id=identity)
        if (put := store.get()) is not None:
            put(message)
        else:
            self._producer.send(message)

    # Queues

    @cached_property
    def leases(self) -> Leases:
        lease, every = self._lease, self.client.transport_options.get("extend_every")
        return Leases(lease, float(every or lease / 3))

    @property
    def _lease(self) -> float:
        return float(self.client.transport_options.get("lease", LEASE_SECONDS))

    def work(self, topic: str) -> Work:
        """Return the work queue of a topic, whose consumer group has the same name."""
        if topic not in self._work:
            self._work[topic] = Work(self.bus.consumer(topic, topic, lease=self._lease), self.leases)
        return self._work[topic]

    def listen(self, queue: str, topic: str, wants: Callable[[str], bool]) -> None:
        """Let a queue receive what is published to a broadcast topic from now on."""
        try:
            self.make_topic(topic)
        except Denied:  # without the right to make topics, only a message makes one
            self._producer.send(topic, b"")
        self.broadcasts.setdefault(queue, Broadcast()).listen(self.bus.reader(topic, start="latest"), wants)

    def make_topic(self, topic: str) -> None:
        """Make a topic of one queue, which keeps the order of its messages, unless it exists."""
        if not self.has_topic(topic):
            self.bus.admin.create_topic(topic, 1, may_exist=True)

    def has_topic(self, topic: str) -> bool:
        try:
            self.bus.admin.offsets(topic)
        except Rejected as problem:
            if problem.code is not Code.UNKNOWN_TOPIC:
                raise
            return False
        return True

    def count_waiting(self, topic: str) -> int:
        """Return how many messages of a work queue wait for a worker."""
        groups = [group for group in self.bus.admin.groups() if group["name"] == topic]
        if groups:
            return sum(queue["waiting"] + queue["retrying"] for group in groups for queue in group["queues"])
        queues = self.bus.admin.offsets(topic) if self.has_topic(topic) else ()
        return sum(queue["end"] - queue["head"] for queue in queues)

    # Receiving

    def drain_events(self, connection: Any, timeout: float | None = None) -> None:
        """Deliver one message. Raises socket.timeout if none comes within ``timeout`` seconds, or a feed's error."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            self._arrived.clear()
            if self._problem is not None:
                raise self._problem
            try:
                self.cycle.get(self._deliver, timeout=timeout)
                return
            except Empty:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError from None
                self._arrived.wait(left)

    def wake(self) -> None:
        """Let :meth:`drain_events` look again."""
        self._arrived.set()

    def fail(self, problem: EscrowError) -> None:
        """Raise an error of a feed in :meth:`drain_events`."""
        self._problem = problem
        self.wake()
