"""RabbitMQ as a target, by ``aio-pika`` (the extra ``rabbitmq``): topic → durable queue of that name, or routing key of
your exchange.

A message is OK when RabbitMQ has confirmed it; a whole wave of rows is in flight at once. A queue may refuse one
message and accept the next (a length limit), so the messages of one key go one after the other, in waves.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import aio_pika
import numpy as np
from aio_pika.abc import AbstractChannel, AbstractConnection, AbstractExchange
from aiormq import exceptions as amqp

from escrowmq.errors import Code, Misuse
from escrowmq.outbox.targets.rows import Int64s, Rows, behind_failures, hold_back, waves
from escrowmq.outbox.targets.seam import Codes, Promise

log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_NAME_BYTES = 255
MAX_HEADERS_BYTES = 100_000
"""All headers of a message travel in one frame of at most 128 KiB."""
CLOSING_SECONDS = 2.0
YOUNG_SECONDS = 3.0
"""Time until a new quorum queue is used. RabbitMQ writes the directory of its quorum queues a second after a change;
killed before that, it recovers the messages (they are synced), but not the queue that they belong to."""
_DURABLE = {
    "quorum": "a majority of the queue's members has it on disk, synced (quorum queue, publisher confirm)",
    "classic": "RabbitMQ has written it, not always synced (durable classic queue, publisher confirm)",
    "yours": "every queue that it was routed to has confirmed it; durable and quorum queues are yours to choose",
}
LOST = (Code.TIMED_OUT, Code.DISCONNECTED)
FAILURES = (amqp.AMQPError, OSError, RuntimeError)
"""Of a connection that was lost, refused, or too slow (a TimeoutError is an OSError)."""
DENIALS = (amqp.AuthenticationError, amqp.ProbableAuthenticationError, amqp.ChannelAccessRefused)


class RabbitMqTarget:
    """Sends to one RabbitMQ (a node or a cluster behind one address)."""

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 30.0,
        queue_type: str = "quorum",
        declare: bool = True,
        exchange: str = "",
        pipeline_keys: bool = False,
        max_body_bytes: int = 16 << 20,
    ) -> None:
        """``timeout``: seconds of one ``send``. By default each topic is a queue that the target declares: durable, of
        ``queue_type`` (``quorum`` syncs before it confirms, ``classic`` may not). With ``declare=False``, or an
        ``exchange`` (which must exist), queues and bindings are yours; a message without a queue is refused.
        ``pipeline_keys``: do not wait between the messages of one key; for queues that never refuse a message (no
        length limit). Does not connect yet."""
        if queue_type not in ("quorum", "classic"):
            raise Misuse(Code.BAD_ARGUMENT, f"queue_type {queue_type!r}", "quorum or classic")
        self._url, self._timeout, self._max_body_bytes = url, timeout, max_body_bytes
        self._queue_type, self._exchange_name, self._pipeline_keys = queue_type, exchange, pipeline_keys
        self._declare = declare and not exchange
        self._connection: AbstractConnection | None = None
        self._channel: AbstractChannel | None = None
        self._exchange: AbstractExchange | None = None
        self._declared: set[str] = set()
        self._not_before: dict[str, float] = {}
        self._closing: asyncio.Task[None] | None = None
        self._loop: _LoopThread | None = _LoopThread()

    @property
    def promise(self) -> Promise:
        """The guarantees, which depend on the queues."""
        durable = _DURABLE[self._queue_type if self._declare else "yours"]
        return Promise("rabbitmq", durable, max_body_bytes=self._max_body_bytes)

    def send(self, batch: Any) -> Codes:
        if self._loop is None:
            raise Misuse(Code.BAD_ARGUMENT, "the target is closed")
        rows = Rows(batch)
        codes = rows.refused(max_body_bytes=self._max_body_bytes, queues=False)
        _refuse_headers(rows, codes)
        firsts = np.unique(np.array(rows.ids), return_index=True)[1]
        codes[np.setdiff1d(np.arange(rows.count), firsts)] = Code.QUEUE_FULL  # a repeated id waits
        hold_back(codes, rows.key_numbers)
        self._loop.run(self._send(rows, codes, time.monotonic() + self._timeout))
        hold_back(codes, rows.key_numbers)
        return codes

    def close(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.run(self._leave())
            loop.close()

    async def _send(self, rows: Rows, codes: Codes, deadline: float) -> None:
        if problem := await self._connect(deadline):
            codes[codes == Code.OK] = problem
            return
        wanted = np.flatnonzero(codes == Code.OK)
        await self._declare_topics(rows, wanted, codes, deadline)
        wanted = np.flatnonzero(codes == Code.OK)
        parts = [np.arange(len(wanted))] if self._pipeline_keys else list(waves(rows.key_numbers[wanted]))
        for part in parts:
            going = wanted[part][~behind_failures(codes, rows.key_numbers)[wanted[part]]]
            if self._connection is None:  # lost in the round before
                codes[going] = Code.QUEUE_FULL
                continue
            codes[going] = await asyncio.gather(*(self._publish(rows, row, deadline) for row in going.tolist()))
            if np.isin(codes[going], LOST).any():
                self._pause_silent(rows, going, codes)
                await self._drop()

    async def _publish(self, rows: Rows, row: int, deadline: float) -> Code:
        assert self._exchange is not None
        message = aio_pika.Message(
            rows.bodies[row],
            headers=dict(rows.headers(row, key=True)),
            message_id=rows.ids[row],
            delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
        )
        topic, left = rows.topics[row], deadline - time.monotonic()
        try:
            if left <= 0:
                return Code.QUEUE_FULL
            await self._exchange.publish(message, routing_key=topic, mandatory=True, timeout=left)
        except amqp.PublishError:  # no queue took it
            self._declared.discard(topic)
            return Code.QUEUE_FULL if self._declare else Code.UNKNOWN_TOPIC
        except amqp.DeliveryError:  # a queue refused it
            return Code.QUEUE_FULL
        except (*FAILURES, asyncio.CancelledError) as problem:
            return _code(problem)
        return Code.OK

    async def _connect(self, deadline: float) -> Code:
        """Open a connection with a channel unless there is one. Returns OK, or the code why that failed."""
        if self._channel is not None and not self._channel.is_closed:
            return Code.OK
        await self._drop()
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                self._connection = await aio_pika.connect(self._url)
                self._channel = await self._connection.channel(publisher_confirms=True, on_return_raises=True)
                name = self._exchange_name
                self._exchange = await self._channel.get_exchange(name) if name else self._channel.default_exchange
            return Code.OK
        except amqp.ChannelNotFoundEntity:
            code = Code.UNKNOWN_TOPIC
        except FAILURES as problem:
            code = _code(problem)
        await self._drop()
        return code

    async def _drop(self) -> None:
        connection, self._connection, self._channel, self._exchange = self._connection, None, None, None
        self._declared.clear()
        if connection is not None:  # in the background, because the peer may not answer
            self._closing = asyncio.create_task(_close(connection))

    async def _leave(self) -> None:
        await self._drop()
        if self._closing is not None:
            await self._closing

    async def _declare_topics(self, rows: Rows, wanted: Int64s, codes: Codes, deadline: float) -> None:
        """Declare the missing queues of the rows numbered ``wanted``; set the codes of rows whose queue is not ready,
        and hold back the later ones of their keys."""
        now = time.monotonic()
        topics = sorted({rows.topics[row] for row in wanted.tolist()})
        problems = {topic: Code.QUEUE_FULL for topic in topics if self._not_before.get(topic, 0.0) > now}
        new = [topic for topic in topics if self._declare and topic not in self._declared and topic not in problems]
        # one queue without a leader leaves time for the others
        seconds = max(0.0, min(deadline - now, self._timeout / 2))
        for topic, code in zip(new, await asyncio.gather(*(self._make(topic, seconds) for topic in new)), strict=True):
            if code:
                problems[topic] = code
        for row in wanted.tolist():
            codes[row] = problems.get(rows.topics[row], Code.OK)
        hold_back(codes, rows.key_numbers)

    async def _make(self, topic: str, seconds: float) -> Code:
        """Declare the queue of a topic, and return OK if it can be used, else why not. QUEUE_FULL: a new quorum queue,
        which is used after :data:`YOUNG_SECONDS`."""
        found = await self._declare_queue(topic, seconds, passive=True)
        if found not in (Code.OK, Code.NOT_FOUND):
            return found
        same = await self._declare_queue(topic, seconds, passive=False)
        if same == Code.OK and found == Code.NOT_FOUND and self._queue_type == "quorum":
            self._not_before[topic] = time.monotonic() + YOUNG_SECONDS
            return Code.QUEUE_FULL
        if same == Code.OK:
            self._declared.add(topic)
        return same

    async def _declare_queue(self, topic: str, seconds: float, *, passive: bool) -> Code:
        assert self._connection is not None
        try:
            async with asyncio.timeout(seconds):
                channel = await self._connection.channel()  # of its own: a refusal closes the channel
                kind: dict[str, Any] | None = None if passive else {"x-queue-type": self._queue_type}
                await channel.declare_queue(topic, durable=True, passive=passive, arguments=kind)
                await channel.close()
        except amqp.ChannelNotFoundEntity:
            return Code.NOT_FOUND
        except amqp.ChannelPreconditionFailed:
            log.warning("the queue %r is there, but is no durable %s queue", topic, self._queue_type)
            return Code.BAD_QUEUE
        except FAILURES as problem:
            return _code(problem)
        return Code.OK

    def _pause_silent(self, rows: Rows, sent: Int64s, codes: Codes) -> None:
        """Pause for ``timeout`` seconds the queues whose rows timed out, if another queue confirmed rows of the same
        wave: they have lost their leader."""
        silent = {rows.topics[row] for row in sent[codes[sent] == Code.TIMED_OUT].tolist()}
        alive = {rows.topics[row] for row in sent[codes[sent] == Code.OK].tolist()}
        if alive:
            self._not_before |= dict.fromkeys(silent - alive, time.monotonic() + self._timeout)


def _code(failure: BaseException) -> Code:
    if isinstance(failure, TimeoutError):
        return Code.TIMED_OUT
    return Code.DENIED if isinstance(failure, DENIALS) else Code.DISCONNECTED


async def _close(connection: AbstractConnection) -> None:
    with contextlib.suppress(Exception):
        async with asyncio.timeout(CLOSING_SECONDS):
            await connection.close()


class _LoopThread:
    """An event loop in a thread of its own, for callers without one."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._thread = threading.Thread(target=self._serve, name="rabbitmq-target", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop's thread; block the calling thread until it has a result, and return that."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        """Cancel all tasks and end the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _serve(self) -> None:
        with self._runner:  # leaving it cancels all tasks and closes the loop
            self._loop.run_forever()


def _refuse_headers(rows: Rows, codes: Codes) -> None:
    for row, properties in enumerate(rows.properties):
        sizes = [(len(name.encode()), len(value.encode())) for name, value in properties or []]
        too_long = any(name > MAX_NAME_BYTES for name, _ in sizes)
        if too_long or sum(name + value for name, value in sizes) > MAX_HEADERS_BYTES:
            codes[row] = Code.PROPERTIES_TOO_LARGE
