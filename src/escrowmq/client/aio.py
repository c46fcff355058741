"""The asyncio API of the bus: :class:`AsyncBus` and its awaitable calls.

Everything belongs to the event loop on which :func:`escrowmq.aconnect` was awaited. Calls of many tasks share batches;
an answer wakes the loop once for all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, Generic, TypeVar

from escrowmq.client.admin import Admin
from escrowmq.client.async_admin import AsyncAdmin
from escrowmq.client.consuming.consumer import AsyncConsumer, ConsumerBase
from escrowmq.client.consuming.consumption import Consumption
from escrowmq.client.consuming.options import check_options, subscription
from escrowmq.client.consuming.received import AsyncReceived, ReceivedBase
from escrowmq.client.lanes.blocking import AsyncCloses
from escrowmq.client.lanes.coalescer import Lane
from escrowmq.client.lanes.request import Codec
from escrowmq.client.lanes.waiting import Loop, Waiting
from escrowmq.client.links.router import Router
from escrowmq.client.producing.checker import AnyChecker
from escrowmq.client.producing.producer import AsyncProducer, ProducerBase
from escrowmq.client.producing.production import Production
from escrowmq.client.reading.reader import AsyncReader, ReaderBase
from escrowmq.client.reading.reading import Partition, Reading, Start
from escrowmq.errors import Code, Misuse, Unknown
from escrowmq.wire import Exchange, ExchangeOptions, Link

ProducerT = TypeVar("ProducerT", bound=ProducerBase[Any])
ConsumerT = TypeVar("ConsumerT", bound=ConsumerBase[Any, Any])
ReaderT = TypeVar("ReaderT", bound=ReaderBase)
MessageT = TypeVar("MessageT", bound=ReceivedBase)


class BusBase(Generic[ProducerT, ConsumerT, ReaderT]):
    """What both faces of a bus share: its brokers, what came from it, and everything that does not wait."""

    def __init__(
        self,
        links: Sequence[Link],
        waiting: Waiting,
        producer: Callable[[Production], ProducerT],
        consumer: Callable[[Consumption], ConsumerT],
        reader: Callable[[Reading], ReaderT],
    ) -> None:
        if not links:
            raise Misuse(Code.BAD_ARGUMENT, "a bus needs a broker")
        self.router = Router(links)
        self._waiting = waiting
        self._make_producer, self._make_consumer, self._make_reader = producer, consumer, reader
        self._parts: list[ProducerT | ConsumerT | ReaderT] = []
        self._lock = threading.Lock()
        self._closed = False

    def producer(
        self,
        group: str,
        *,
        instance: str | None = None,
        qos: int = 1,
        timeout: float = 30.0,
        checker: AnyChecker | None = None,
        unasked: bool = False,
    ) -> ProducerT:
        """A producer of producer group ``group``; see :class:`Producer` for ``qos`` and :meth:`Producer.checker` for
        ``checker``. It does not wait.

        ``instance`` names this process within the group: a newer producer of the same name fences this one (its
        calls then raise Fenced). ``timeout`` is seconds per call. ``unasked``: transactions may begin without a
        checker. This producer is then never asked: they wait for their end by id, from any process, and are parked after
        ``half_retention``.
        """
        self._need_open()
        production = Production(self.router, self._waiting, group, instance, qos, timeout, checker, unasked)
        producer = self._make_producer(production)
        self._keep(producer)
        return producer

    def lane(
        self, link: Link, kind: Exchange, codec: Codec, options: Callable[[], ExchangeOptions], **more: Any
    ) -> Lane:
        """A coalescing lane of this bus, for a face that sends batches itself; its maker closes it."""
        return self._waiting.lane(link, kind, codec, options, **more)

    async def _close(self) -> None:
        with self._lock:
            first, self._closed = not self._closed, True
        if first:
            for part in sorted(self._parts, key=lambda part: isinstance(part, ProducerBase)):
                await part._close()
            await self._waiting.away(self._end)

    def _end(self) -> None:
        self._waiting.close()
        for link in self.router.links:
            link.close()

    def _need_open(self) -> None:
        if self._closed:
            raise Unknown(Code.CLOSED, "the bus is closed")

    def _keep(self, part: ProducerT | ConsumerT | ReaderT) -> None:
        with self._lock:
            self._need_open()
            self._parts.append(part)


class BusCalls(BusBase[ProducerT, ConsumerT, ReaderT], Generic[ProducerT, ConsumerT, ReaderT, MessageT]):
    """What a bus does that waits."""

    async def consumer(
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
        seen: Callable[[MessageT], bool] | None = None,
        timeout: float = 30.0,
        instance: str | None = None,
        in_doubt: str = "redeliver",
    ) -> ConsumerT:
        """A consumer of consumer group ``group``, which is made if it does not exist.

        All consumers of a group have the same topics, ``tags`` and order. ``tags`` (None: all) is ``"a||b"`` or a list;
        ``ordered`` gives each queue in order; ``start`` (of a new group) is ``"earliest"``, ``"latest"`` or a datetime; ``lease`` seconds until what is not acknowledged comes back, ``retry_backoff`` and
        ``retry_backoff_max`` seconds before the second and before later deliveries, ``max_attempts`` deliveries until a
        message is a dead letter (None, each: the broker's); ``prefetch`` (2) receives ahead, of up to ``max_bytes``
        (16 MiB) each; ``timeout`` (30.0) seconds per call; ``qos`` (1) and ``seen`` (a plain function; on an event loop it
        runs on a thread) as in :mod:`escrowmq.client.consuming.consumer`.

        With ``in_doubt="hold"`` (a choice of the group; else ``"redeliver"``) leases do not end by time: what a silent
        consumer was handed is given to nobody else until the next process of its ``instance`` name gets it again, or
        :meth:`Admin.fence` gives it back to the group. The process that was replaced or fenced gets Fenced from its next
        receive, its late acknowledgements LEASE_LOST.
        """
        self._need_open()
        check_options(qos, seen, prefetch, lease, instance, in_doubt)
        request = subscription(
            group, topics, tags, ordered, start, max_attempts, retry_backoff, retry_backoff_max, in_doubt
        )
        consumption = Consumption(
            self.router, self._waiting, request, lease, prefetch, max_bytes, qos, seen, timeout, instance
        )
        await self._waiting.away(consumption.subscribe)
        consumer = self._make_consumer(consumption)
        self._keep(consumer)
        return consumer

    async def reader(
        self,
        topic: str,
        *,
        queues: Sequence[int | Partition] | None = None,
        start: Start = "earliest",
        tags: str | Sequence[str] | None = None,
        columns: Sequence[str] | None = None,
        timeout: float = 30.0,
    ) -> ReaderT:
        """Read queues of a topic from given offsets, without a group: nothing is leased, the caller keeps the offsets.

        ``queues``: numbers (at every broker), or (shard or number of the broker, queue); None, the default: all, those made
        later too. ``start``: ``"earliest"`` (the default), ``"latest"``, a datetime (the first that became visible then), or
        the *next* offset of each partition, ``{(shard or number of the broker, queue): offset}``, as
        :meth:`Reader.positions` gives it; partitions that it does not name begin with their first message. ``tags`` as for a
        consumer; ``columns`` of DELIVERY (None: all); ``timeout`` (30.0) seconds per call.

        Raises UNKNOWN_TOPIC, BAD_QUEUE, Misuse(BAD_ARGUMENT), Unknown(TIMED_OUT) if a broker does not answer.
        """
        self._need_open()
        reading = Reading(self.router, self._waiting, topic, queues, start, tags, columns, timeout)
        await self._waiting.away(reading.assign)
        reader = self._make_reader(reading)
        self._keep(reader)
        return reader

    async def close(self) -> None:
        """Close consumers and readers, then producers (letting what is on its way finish), then the connections."""
        await self._close()


class AsyncBus(BusCalls[AsyncProducer, AsyncConsumer, AsyncReader, AsyncReceived], AsyncCloses):
    """Made by :func:`escrowmq.aconnect`, on the event loop to which it belongs from then on. ``async with`` closes it."""

    def __init__(self, links: Sequence[Link]) -> None:
        super().__init__(links, Loop(links), AsyncProducer, AsyncConsumer, AsyncReader)
        self.admin = AsyncAdmin(Admin(self.router))
