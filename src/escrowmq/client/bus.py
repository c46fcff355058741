"""The bus: one connection to one or several brokers, from which producers, consumers and the admin come. Blocking face."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from escrowmq.client.admin import Admin
from escrowmq.client.consuming.consumer import Consumer, Received
from escrowmq.client.consuming.consumption import Consumption, check_options, subscription
from escrowmq.client.lanes.alarm import Alarm
from escrowmq.client.lanes.lanes import ThreadLane
from escrowmq.client.lanes.parcel import Codec
from escrowmq.client.links.router import Router
from escrowmq.client.producing.deciding import AnyChecker
from escrowmq.client.producing.producer import Producer
from escrowmq.client.producing.production import Production
from escrowmq.client.reading.reader import Reader
from escrowmq.client.reading.reading import Place, Reading, Start, read_request
from escrowmq.errors import Code, Misuse, Unknown
from escrowmq.wire import Exchange, ExchangeOptions, Link


class Bus:
    """Made by :func:`escrowmq.connect`. A context manager; closing it closes all that came from it. Thread-safe."""

    def __init__(self, links: Sequence[Link]) -> None:
        if not links:
            raise Misuse(Code.BAD_ARGUMENT, "a bus needs a broker")
        self.router = Router(links)
        self.admin = Admin(self.router)
        self._alarm = Alarm()
        self._parts: list[Producer | Consumer | Reader] = []
        self._lock = threading.Lock()
        self._closed = False

    def __enter__(self) -> Bus:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def producer(
        self,
        group: str,
        *,
        instance: str | None = None,
        qos: int = 1,
        timeout: float = 30.0,
        checker: AnyChecker | None = None,
    ) -> Producer:
        """A producer of producer group ``group``; see :class:`Producer` for ``qos`` and :meth:`Producer.checker`.

        ``instance`` names this process within the group: a newer producer of the same name fences this one (its calls
        then raise Fenced). ``timeout`` is seconds a call.
        """
        production = Production(self.router, self._alarm, self._lane, group, instance, qos, timeout)
        producer = Producer(production)
        self._keep(producer)
        if checker is not None:
            producer.checker(checker)
        return producer

    def consumer(
        self,
        group: str,
        topics: str | Sequence[str],
        *,
        tags: str | Sequence[str] | None = None,
        ordered: bool = False,
        start: str | datetime = "earliest",
        lease: float | None = None,
        max_attempts: int | None = None,
        retry_backoff: float | None = None,
        retry_backoff_max: float | None = None,
        prefetch: int = 2,
        max_bytes: int = 16 << 20,
        qos: int = 1,
        seen: Callable[[Received], bool] | None = None,
        timeout: float = 30.0,
        instance: str | None = None,
        in_doubt: str = "redeliver",
    ) -> Consumer:
        """A consumer of consumer group ``group``, which is made if it does not exist.

        All consumers of a group have the same topics, tags and order. ``tags`` is ``"a||b"`` or a list; ``start`` (of a
        new group) ``"earliest"``, ``"latest"`` or a datetime; ``lease`` seconds until what is not acknowledged comes back
        (None: the broker's), ``retry_backoff`` seconds before the second delivery; ``prefetch`` receives ahead, of up to
        ``max_bytes`` each; ``qos`` and ``seen`` as in :mod:`escrowmq.client.consuming.consumer`.

        With ``in_doubt="hold"`` (a choice of the group) leases do not end by time: what a silent consumer was handed is
        given to nobody else until the next process of its ``instance`` name gets it again, or :meth:`Admin.fence` gives it
        back to the group. The process that was replaced or fenced gets Fenced from its next receive, its late
        acknowledgements LEASE_LOST.
        """
        check_options(qos, seen, prefetch, lease, instance, in_doubt)
        request = subscription(
            group, topics, tags, ordered, start, max_attempts, retry_backoff, retry_backoff_max, in_doubt
        )
        arrival = threading.Condition()

        def arrived() -> None:
            with arrival:
                arrival.notify_all()

        consumption = Consumption(
            self.router,
            self._alarm,
            self._lane,
            group,
            request,
            lease=lease,
            prefetch=prefetch,
            max_bytes=max_bytes,
            qos=qos,
            seen=seen,
            timeout=timeout,
            arrived=arrived,
            instance=instance,
        )
        consumption.subscribe()
        consumer = Consumer(consumption, arrival)
        self._keep(consumer)
        return consumer

    def reader(
        self,
        topic: str,
        *,
        queues: Sequence[int | Place] | None = None,
        start: Start = "earliest",
        tags: str | Sequence[str] | None = None,
        columns: Sequence[str] | None = None,
        timeout: float = 30.0,
    ) -> Reader:
        """Read queues of a topic from given offsets, without a group: nothing is leased, the caller keeps the offsets.

        ``queues``: numbers (at every broker), or (shard or number of the broker, queue); None: all, those made later too.
        ``start``: ``"earliest"``, ``"latest"``, a datetime (the first that became visible then), or the *next* offset of
        each place, ``{(shard or number of the broker, queue): offset}``, as :meth:`Reader.positions` gives it; places that
        it does not name begin with their first message. ``tags`` as for a consumer; ``columns`` of DELIVERY (None: all).

        Raises UNKNOWN_TOPIC, BAD_QUEUE, Misuse(BAD_ARGUMENT), Unknown(TIMED_OUT) if a broker does not answer.
        """
        reading = Reading(self.router, topic, queues, read_request(topic, tags, columns), timeout)
        reading.assign(start)
        reader = Reader(reading)
        self._keep(reader)
        return reader

    def close(self) -> None:
        """Close consumers and readers, then producers (letting what is on its way finish), then the connections."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            parts = self._parts
        for part in sorted(parts, key=lambda part: isinstance(part, Producer)):
            part.close()
        self._alarm.close()
        for link in self.router.links:
            link.close()

    def _keep(self, part: Producer | Consumer | Reader) -> None:
        with self._lock:
            if self._closed:
                raise Unknown(Code.CLOSED, "the bus is closed")
            self._parts.append(part)

    def _lane(
        self, link: Link, kind: Exchange, codec: Codec, options: Callable[[], ExchangeOptions], more: dict[str, Any]
    ) -> ThreadLane:
        return ThreadLane(link, kind, codec, options, self._alarm, **more)
