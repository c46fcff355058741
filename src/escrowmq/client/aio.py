"""The same names to await: :class:`AsyncBus` and what comes from it, over the same core as the blocking faces.

Everything belongs to the event loop on which :func:`escrowmq.aconnect` was awaited. Calls of many tasks share batches;
an answer wakes the loop once for all of them.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa

from escrowmq.client.admin import Admin
from escrowmq.client.alarm import Alarm
from escrowmq.client.checker import Decide
from escrowmq.client.coalescer import Codec, LoopLane, Sender
from escrowmq.client.consumption import (
    DEFAULT_BATCH,
    Consumption,
    check_options,
    delay_us,
    subscription,
)
from escrowmq.client.delivery import Content, Rows
from escrowmq.client.ending import id_bytes
from escrowmq.client.outgoing import ROW_OVERHEAD
from escrowmq.client.producer import require, unfolded
from escrowmq.client.production import Production
from escrowmq.client.results import EndResults, Receipts
from escrowmq.client.router import Router
from escrowmq.client.transaction import Phase, note
from escrowmq.errors import Code, EscrowError, Misuse, Overloaded, Unknown, error
from escrowmq.model import (
    COMMIT,
    ROLLBACK,
    Act,
    Message,
    Outcome,
    Receipt,
    TransactionId,
    TransactionResult,
)
from escrowmq.wire import Exchange, Link

LocalTransaction = Callable[[Message, Any], Awaitable[Outcome | None]]


class AsyncProducer:
    """As :class:`~escrowmq.client.producer.Producer`, to await. Checkers may be coroutine functions or plain ones."""

    def __init__(self, production: Production[LoopLane]) -> None:
        self._production = production

    async def __aenter__(self) -> AsyncProducer:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def group(self) -> str:
        """The producer group."""
        return self._production.group

    @property
    def instance(self) -> str:
        """The name under which a newer producer would fence this one."""
        return self._production.instance

    @property
    def dropped(self) -> int:
        """Messages dropped with qos=0."""
        return self._production.dropped

    async def send(
        self,
        topic: str | Message,
        body: bytes | None = None,
        *,
        key: str | None = None,
        tag: str | None = None,
        properties: Mapping[str, str] | None = None,
        delay: float = 0.0,
        queue: int | None = None,
        message_id: str | bytes | uuid.UUID | None = None,
    ) -> Receipt:
        """As :meth:`Producer.send`."""
        given = (key, tag, properties, delay, queue, message_id, None)
        name, content, given = unfolded(topic, body, given)
        number = self._production.number(Exchange.SEND, given[0])
        session = self._production.sessions[number]
        if not session.ready(False):
            await asyncio.to_thread(session.open, self._production.has_checker)
        row = session.checker.row(name, content, *given, None)
        lane = self._production.lane(Exchange.SEND, number)
        if self._production.qos == 0:
            try:
                lane.add(row, None, len(row[1]) + ROW_OVERHEAD)
            except Overloaded:
                self._production.dropped += 1
            return Receipt(row[5] or b"", row[0], row[6], -1)
        return await lane.call(row, len(row[1]) + ROW_OVERHEAD)  # type: ignore[no-any-return]

    async def send_batch(self, messages: Any) -> Receipts:
        """As :meth:`Producer.send_batch`."""
        return await self._batch(Exchange.SEND, messages)

    def checker(self, decide: Decide) -> Decide:
        """As :meth:`Producer.checker`; not to be awaited."""
        self._production.set_checker(decide)
        return decide

    async def wait_until_listening(self, timeout: float = 10.0) -> bool:
        """As :meth:`Producer.wait_until_listening`."""
        return await asyncio.to_thread(self._production.listening, timeout)

    def transaction(self) -> AsyncTransaction:
        """As :meth:`Producer.transaction`, for ``async with``."""
        self._production.need_checker()
        return AsyncTransaction(self)

    async def send_in_transaction(
        self, message: Message, local_transaction: LocalTransaction, arg: Any = None
    ) -> TransactionResult:
        """As :meth:`Producer.send_in_transaction`; the local transaction is awaited."""
        receipt = await self.prepare(message)
        assert receipt.transaction_id is not None  # a half message's receipt always has one
        outcome: Outcome | None = None
        problem: Exception | None = None
        try:
            outcome = await local_transaction(message, arg)
        except Exception as raised:
            problem = raised
        if not isinstance(outcome, Outcome):
            outcome = Outcome.UNKNOWN
        try:
            status = await self.end(receipt.transaction_id, outcome)
        except EscrowError as refused:
            status = refused.code
        return TransactionResult(receipt, outcome, status, problem)

    async def prepare(
        self,
        topic: str | Message,
        body: bytes | None = None,
        *,
        key: str | None = None,
        tag: str | None = None,
        properties: Mapping[str, str] | None = None,
        delay: float = 0.0,
        check_immunity: float | None = None,
        queue: int | None = None,
        message_id: str | bytes | uuid.UUID | None = None,
        transaction_id: TransactionId | None = None,
    ) -> Receipt:
        """As :meth:`Producer.prepare`."""
        production = self._production
        production.need_checker()
        given = (key, tag, properties, delay, queue, message_id, check_immunity)
        name, content, given = unfolded(topic, body, given)
        if transaction_id is None:
            number, join = production.number(Exchange.PREPARE, given[0]), None
        else:
            number, join = await self._broker(transaction_id.shard), bytes(transaction_id)
        session = production.sessions[number]
        if not session.ready(True):
            await asyncio.to_thread(session.open, True)
        row = session.checker.row(name, content, *given, join)
        receipt: Receipt = await production.lane(Exchange.PREPARE, number).call(row, len(row[1]) + ROW_OVERHEAD)
        if receipt.transaction_id is not None:
            production.router.learn_shard(receipt.transaction_id.shard, number)
        return receipt

    async def prepare_batch(self, messages: Any) -> Receipts:
        """As :meth:`Producer.prepare_batch`."""
        self._production.need_checker()
        return await self._batch(Exchange.PREPARE, messages)

    async def commit(self, transaction_id: TransactionId | str | bytes) -> Code:
        """As :meth:`Producer.commit`."""
        return require(await self.end(transaction_id, COMMIT), Code.COMMITTED, Code.ALREADY_COMMITTED)

    async def rollback(self, transaction_id: TransactionId | str | bytes) -> Code:
        """As :meth:`Producer.rollback`."""
        return require(await self.end(transaction_id, ROLLBACK), Code.ROLLED_BACK, Code.ALREADY_ROLLED_BACK)

    async def end(self, transaction_id: TransactionId | str | bytes, outcome: Outcome) -> Code:
        """As :meth:`Producer.end`."""
        raw = id_bytes(transaction_id)
        if not isinstance(outcome, Outcome):
            raise Misuse(Code.BAD_ARGUMENT, f"{outcome!r} is not COMMIT, ROLLBACK or UNKNOWN")
        number = await self._broker(int.from_bytes(raw[:4], "big"))
        session = self._production.sessions[number]
        if not session.ready(True):
            await asyncio.to_thread(session.open, True)
        return await self._production.lane(Exchange.END, number).call((raw, int(outcome)), 32)  # type: ignore[no-any-return]

    async def end_batch(self, transaction_ids: Any, outcomes: Any) -> EndResults:
        """As :meth:`Producer.end_batch`."""
        production = self._production
        ids, column = production.end_columns(transaction_ids, outcomes)

        def parts() -> list[Any]:
            of_shard = production.router.of_shard
            found = list(production.end_parts(ids, column, lambda shard: of_shard(shard, production.timeout)))
            for number in {number for number, _, _ in found}:
                production.sessions[number].open(True)
            return found

        cut = await asyncio.to_thread(parts)
        calls = [production.lane(Exchange.END, number).call_batch(piece) for number, _, piece in cut]
        return production.end_results(len(ids), cut, list(await asyncio.gather(*calls)))

    async def flush(self, timeout: float | None = None) -> bool:
        """As :meth:`Producer.flush`."""
        patience = self._production.timeout if timeout is None else timeout
        return await asyncio.to_thread(self._production.drain, patience)

    async def close(self) -> None:
        """As :meth:`Producer.close`."""
        await asyncio.to_thread(self._production.close)

    async def _batch(self, kind: Exchange, messages: Any) -> Receipts:
        production = self._production
        half = kind is Exchange.PREPARE

        def cut() -> Any:
            for session in production.sessions:
                session.open(half or production.has_checker)
            return production.parts(kind, messages)

        batch, parts = await asyncio.to_thread(cut)
        calls = [production.lane(kind, number).call_batch(piece) for number, _, piece in parts]
        answers: list[pa.RecordBatch] = [answer for answer, _ in await asyncio.gather(*calls)]
        return production.receipts(batch, parts, answers)

    async def _broker(self, shard: int) -> int:
        known = self._production.router.known_shard(shard)
        if known is None:
            known = await asyncio.to_thread(self._production.router.of_shard, shard, self._production.timeout)
        return known


class AsyncTransaction:
    """As :class:`~escrowmq.client.transaction.Transaction`, for ``async with``."""

    __slots__ = ("_phase", "_producer", "id")

    def __init__(self, producer: AsyncProducer) -> None:
        self._producer = producer
        self._phase = Phase.ACTIVE
        self.id: TransactionId | None = None

    async def send(
        self,
        topic: str | Message,
        body: bytes | None = None,
        **given: Any,
    ) -> Receipt:
        """As :meth:`Transaction.send`: key, tag, properties, delay, check_immunity, queue, message_id."""
        self._need_active()
        receipt = await self._producer.prepare(topic, body, transaction_id=self.id, **given)
        if self.id is None:
            self.id = receipt.transaction_id
        return receipt

    async def commit(self) -> Code:
        """As :meth:`Transaction.commit`."""
        return await self._end(COMMIT)

    async def rollback(self) -> Code:
        """As :meth:`Transaction.rollback`."""
        return await self._end(ROLLBACK)

    def leave_undecided(self) -> None:
        """As :meth:`Transaction.leave_undecided`."""
        self._need_active()
        self._phase = Phase.LEFT

    async def _end(self, outcome: Outcome) -> Code:
        self._need_active()
        self._phase = Phase.ENDED
        if self.id is None:
            return Code.OK
        return await (self._producer.commit(self.id) if outcome is COMMIT else self._producer.rollback(self.id))

    def _need_active(self) -> None:
        if self._phase is not Phase.ACTIVE:
            raise Misuse(Code.BAD_ARGUMENT, f"this transaction is {self._phase.value}", "begin a new transaction")

    async def __aenter__(self) -> AsyncTransaction:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._phase is not Phase.ACTIVE:
            return
        if raised is None:
            await self.commit()
            return
        try:
            await self.rollback()
        except EscrowError as problem:  # the caller's own exception matters more
            note(raised, problem)


class AsyncReceived(Content):
    """As :class:`~escrowmq.client.consumer.Received`, to await."""

    __slots__ = ("_consumption",)

    def __init__(self, rows: Rows, row: int, consumption: Consumption[LoopLane]) -> None:
        super().__init__(rows, row)
        self._consumption = consumption

    async def ack(self) -> None:
        """As :meth:`Received.ack`: sent in the background; :meth:`AsyncConsumer.flush` waits."""
        self._consumption.act(self._rows, self._row, Act.ACK, 0, None, None)

    async def nack(self, delay: float | None = None, cause: str | None = None) -> None:
        """As :meth:`Received.nack`."""
        self._consumption.act(self._rows, self._row, Act.NACK, delay_us(delay), cause, None)

    async def extend(self, seconds: float) -> None:
        """As :meth:`Received.extend`."""
        future = asyncio.get_running_loop().create_future()
        self._consumption.act(self._rows, self._row, Act.EXTEND, delay_us(seconds), None, future)
        await future


class AsyncReceivedBatch:
    """As :class:`~escrowmq.client.consumer.ReceivedBatch`, to await."""

    __slots__ = ("_consumption", "_rows")

    def __init__(self, rows: Rows, consumption: Consumption[LoopLane]) -> None:
        self._rows = rows
        self._consumption = consumption

    @property
    def arrow(self) -> pa.RecordBatch:
        """The columns."""
        return self._rows.batch

    def __len__(self) -> int:
        return int(self._rows.batch.num_rows)

    def __iter__(self) -> Iterator[AsyncReceived]:
        return (AsyncReceived(self._rows, row, self._consumption) for row in range(len(self)))

    def __getitem__(self, row: int) -> AsyncReceived:
        return AsyncReceived(self._rows, range(len(self))[row], self._consumption)

    async def ack(self, *, wait: bool = True) -> None:
        """As :meth:`ReceivedBatch.ack`."""
        await self._act(Act.ACK, 0, None, wait)

    async def nack(self, delay: float | None = None, cause: str | None = None, *, wait: bool = True) -> None:
        """As :meth:`ReceivedBatch.nack`."""
        await self._act(Act.NACK, delay_us(delay), cause, wait)

    async def extend(self, seconds: float) -> None:
        """As :meth:`ReceivedBatch.extend`."""
        await self._act(Act.EXTEND, delay_us(seconds), None, True)

    async def _act(self, act: Act, delay: int, cause: str | None, wait: bool) -> None:
        if not len(self):
            return
        future = asyncio.get_running_loop().create_future() if wait else None
        self._consumption.act_on_all(self._rows, act, delay, cause, future)
        if future is not None:
            answer, resent = await future
            if (code := self._consumption.first_refusal(answer, resent)) is not None:
                raise error(code)


class AsyncConsumer:
    """As :class:`~escrowmq.client.consumer.Consumer`: ``async for message in consumer``, ``async for batch in
    consumer.batches()``. Several tasks may iterate one consumer."""

    def __init__(self, consumption: Consumption[LoopLane], arrival: asyncio.Event) -> None:
        self._consumption = consumption
        self._arrival = arrival
        self._current: tuple[Rows, int] | None = None

    async def __aenter__(self) -> AsyncConsumer:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def group(self) -> str:
        """The consumer group."""
        return self._consumption.group

    @property
    def refused(self) -> int:
        """Acknowledgements that came too late; those messages are delivered again."""
        return self._consumption.refused

    def __aiter__(self) -> AsyncIterator[AsyncReceived]:
        return self.messages()

    async def messages(self, *, idle_timeout: float | None = None) -> AsyncIterator[AsyncReceived]:
        """As :meth:`Consumer.messages`."""
        while True:
            if self._current is None:
                fresh = await self._next_rows(DEFAULT_BATCH, idle_timeout)
                if fresh is None:
                    return
                if self._current is not None:
                    self._consumption.fetcher.put_back(fresh.number, fresh.batch)
                else:
                    self._current = (fresh, 0)
            if self._consumption.closed:
                return
            rows, row = self._current
            self._current = None if row + 1 >= rows.batch.num_rows else (rows, row + 1)
            yield AsyncReceived(rows, row, self._consumption)

    async def batches(
        self, max_messages: int = DEFAULT_BATCH, *, idle_timeout: float | None = None
    ) -> AsyncIterator[AsyncReceivedBatch]:
        """As :meth:`Consumer.batches`."""
        while (rows := await self._next_rows(max_messages, idle_timeout)) is not None:
            yield AsyncReceivedBatch(rows, self._consumption)

    async def receive(self, max_messages: int = 1, wait: float = 0.0) -> list[AsyncReceived]:
        """As :meth:`Consumer.receive`."""
        consumption = self._consumption
        found: list[AsyncReceived] = []
        if (taken := await self._take(max_messages)) is not None:
            found.extend(AsyncReceivedBatch(taken, consumption))
            return found
        for number, future in await asyncio.to_thread(consumption.receive_now, max_messages, wait):
            batch = await asyncio.wait_for(asyncio.wrap_future(future), wait + consumption.timeout)
            if (rows := await self._screened(Rows(number, batch))) is not None:
                found.extend(AsyncReceivedBatch(rows, consumption))
        return found

    async def flush(self, timeout: float | None = None) -> int:
        """As :meth:`Consumer.flush`."""
        patience = self._consumption.timeout if timeout is None else timeout
        for lane in self._consumption.lanes:
            if not await asyncio.to_thread(lane.drain, patience):
                raise error(Code.TIMED_OUT, "acknowledgements are still on their way")
        return self.refused

    async def close(self) -> None:
        """As :meth:`Consumer.close`."""
        current, self._current = self._current, None
        if current is not None:
            rows, row = current
            self._consumption.give_back(rows.number, rows.batch.slice(row))
        await asyncio.to_thread(self._consumption.close)
        self._arrival.set()

    async def _next_rows(self, max_messages: int, idle_timeout: float | None) -> Rows | None:
        deadline = None if idle_timeout is None else time.monotonic() + idle_timeout
        if not self._consumption.closed:
            self._consumption.fetcher.start(max_messages)
        while not self._consumption.closed:
            self._arrival.clear()
            if (rows := await self._take(max_messages)) is not None:
                return rows
            if self._consumption.fetcher.has_something():
                continue
            left = None if deadline is None else deadline - time.monotonic()
            try:
                await asyncio.wait_for(self._arrival.wait(), left)
            except TimeoutError:
                return None
        self._arrival.set()  # for the other tasks that iterate
        return None

    async def _take(self, max_messages: int) -> Rows | None:
        taken = self._consumption.fetcher.take()
        if taken is None:
            return None
        number, batch = taken
        if batch.num_rows > max_messages:
            self._consumption.fetcher.put_back(number, batch.slice(max_messages))
            batch = batch.slice(0, max_messages)
        return await self._screened(Rows(number, batch))

    async def _screened(self, rows: Rows) -> Rows | None:
        consumption = self._consumption
        if not rows.batch.num_rows:
            return None
        if consumption.qos == 0:
            try:
                await AsyncReceivedBatch(rows, consumption).ack()
            except EscrowError as problem:
                if problem.code is not Code.LEASE_LOST:
                    raise
                return None  # another consumer has them: at most once
        elif consumption.qos == 2:
            make = lambda rows, row: AsyncReceived(rows, row, consumption)  # noqa: E731
            unseen = await asyncio.to_thread(consumption.unseen, rows, make)
            for row in np.flatnonzero(~unseen).tolist():
                consumption.act(rows, row, Act.ACK, 0, None, None)
            if not unseen.all():
                rows = Rows(rows.number, rows.batch.filter(pa.array(unseen)))
        return rows if rows.batch.num_rows else None


class AsyncAdmin:
    """The methods of :class:`~escrowmq.client.admin.Admin`, to await; each runs on a thread."""

    def __init__(self, admin: Admin) -> None:
        self._admin = admin

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        method = getattr(self._admin, name)

        def call(*args: Any, **given: Any) -> Awaitable[Any]:
            return asyncio.to_thread(method, *args, **given)

        return call


class AsyncBus:
    """Made by :func:`escrowmq.aconnect`, on the event loop to which it belongs from then on. ``async with`` closes it."""

    def __init__(self, links: Sequence[Link]) -> None:
        self.router = Router(links)
        self.admin = AsyncAdmin(Admin(self.router))
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._alarm = Alarm()
        self._senders: dict[Link, Sender] = {link: Sender() for link in links}
        self._parts: list[AsyncProducer | AsyncConsumer] = []
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
        checker: Decide | None = None,
    ) -> AsyncProducer:
        """As :meth:`Bus.producer`; not to be awaited."""
        self._need_open()
        production = Production(self.router, self._alarm, self._lane, group, instance, qos, timeout, self._loop)
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
    ) -> AsyncConsumer:
        """As :meth:`Bus.consumer`. ``seen`` is a plain function; it runs on a thread."""
        self._need_open()
        request = subscription(group, topics, tags, ordered, start, max_attempts, retry_backoff, retry_backoff_max)
        check_options(qos, seen, prefetch, lease)
        arrival = asyncio.Event()

        def arrived() -> None:
            try:
                self._loop.call_soon_threadsafe(arrival.set)
            except RuntimeError:
                pass  # the loop is closed: nobody waits any more

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
            spawn=next(iter(self._senders.values())).put,
        )
        await asyncio.to_thread(consumption.subscribe)
        consumer = AsyncConsumer(consumption, arrival)
        self._parts.append(consumer)
        return consumer

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

    def _lane(
        self, link: Link, kind: Exchange, codec: Codec, options: Callable[[], dict[str, Any]], more: dict[str, Any]
    ) -> LoopLane:
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
