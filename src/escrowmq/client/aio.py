"""The same names to await: :class:`AsyncBus` and what comes from it, over the same core as the blocking faces.

Everything belongs to the event loop on which :func:`escrowmq.aconnect` was awaited. Calls of many tasks share batches;
an answer wakes the loop once for all of them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from escrowmq.client.admin import Admin
from escrowmq.client.async_admin import AsyncAdmin
from escrowmq.client.consuming.async_consumer import AsyncConsumer, AsyncReceived
from escrowmq.client.consuming.consumption import (
    Consumption,
    check_options,
    subscription,
)
from escrowmq.client.lanes.alarm import Alarm
from escrowmq.client.lanes.lanes import LoopLane, Sender
from escrowmq.client.lanes.parcel import Codec
from escrowmq.client.links.router import Router
from escrowmq.client.producing.async_producer import AsyncProducer
from escrowmq.client.producing.deciding import AnyChecker
from escrowmq.client.producing.production import Production
from escrowmq.client.reading.reader import AsyncReader
from escrowmq.client.reading.reading import Place, Reading, Start, read_request
from escrowmq.errors import Code, Unknown
from escrowmq.wire import Exchange, ExchangeOptions, Link


class AsyncBus:
    """Made by :func:`escrowmq.aconnect`, on the event loop to which it belongs from then on. ``async with`` closes it."""

    def __init__(self, links: Sequence[Link]) -> None:
        self.router = Router(links)
        self.admin = AsyncAdmin(Admin(self.router))
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._alarm = Alarm()
        self._senders: dict[Link, Sender] = {link: Sender() for link in links}
        self._parts: list[AsyncProducer | AsyncConsumer | AsyncReader] = []
        self._closed = False

    async def __aenter__(self) -> AsyncBus:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def producer(
        self,
        group: str,
        *,
        instance: str | None = None,
        qos: int = 1,
        timeout: float = 30.0,
        checker: AnyChecker | None = None,
        unasked: bool = False,
    ) -> AsyncProducer:
        """As :meth:`Bus.producer`; not to be awaited.

        ``unasked``: transactions may begin without a checker. This producer is then never asked: they wait for their end
        by id, whoever brings it, and are parked after ``half_retention``.
        """
        self._need_open()
        production = Production(self.router, self._alarm, self.lane, group, instance, qos, timeout, self._loop)
        production.unasked = unasked
        producer = AsyncProducer(production)
        self._parts.append(producer)
        if checker is not None:
            producer.checker(checker)
        return producer

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
        seen: Callable[[AsyncReceived], bool] | None = None,
        timeout: float = 30.0,
        instance: str | None = None,
        in_doubt: str = "redeliver",
    ) -> AsyncConsumer:
        """As :meth:`Bus.consumer`. ``seen`` is a plain function; it runs on a thread."""
        self._need_open()
        check_options(qos, seen, prefetch, lease, instance, in_doubt)
        request = subscription(
            group, topics, tags, ordered, start, max_attempts, retry_backoff, retry_backoff_max, in_doubt
        )
        arrival = asyncio.Event()

        def arrived() -> None:
            try:
                self._loop.call_soon_threadsafe(arrival.set)
            except RuntimeError:
                pass  # the loop is closed: nobody waits any more

        consumption = Consumption(
            self.router,
            self._alarm,
            self.lane,
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
            spawn=next(iter(self._senders.values())).put,
        )
        await asyncio.to_thread(consumption.subscribe)
        consumer = AsyncConsumer(consumption, arrival)
        self._parts.append(consumer)
        return consumer

    async def reader(
        self,
        topic: str,
        *,
        queues: Sequence[int | Place] | None = None,
        start: Start = "earliest",
        tags: str | Sequence[str] | None = None,
        columns: Sequence[str] | None = None,
        timeout: float = 30.0,
    ) -> AsyncReader:
        """As :meth:`Bus.reader`."""
        self._need_open()
        reading = Reading(self.router, topic, queues, read_request(topic, tags, columns), timeout)
        await asyncio.to_thread(reading.assign, start)
        reader = AsyncReader(reading)
        self._parts.append(reader)
        return reader

    async def close(self) -> None:
        """As :meth:`Bus.close`."""
        if self._closed:
            return
        self._closed = True
        for part in sorted(self._parts, key=lambda part: isinstance(part, AsyncProducer)):
            await part.close()
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        self._alarm.close()
        for sender in self._senders.values():
            sender.close()
        for link in self.router.links:
            link.close()

    def _need_open(self) -> None:
        if self._closed:
            raise Unknown(Code.CLOSED, "the bus is closed")

    def lane(
        self, link: Link, kind: Exchange, codec: Codec, options: Callable[[], ExchangeOptions], more: dict[str, Any]
    ) -> LoopLane:
        """A coalescing lane of this bus, for a face that sends batches itself; whoever makes it closes it."""
        return LoopLane(
            link,
            kind,
            codec,
            options,
            self._alarm,
            loop=self._loop,
            loop_thread=self._loop_thread,
            sender=self._senders[link],
            **more,
        )
