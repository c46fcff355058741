"""The producer and its transactions, to await."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Any

import pyarrow as pa

from escrowmq.client.lanes.lanes import LoopLane
from escrowmq.client.producing.producer import CheckerT, require, unfolded
from escrowmq.client.producing.production import Production
from escrowmq.client.producing.results import EndResults, Receipts
from escrowmq.client.producing.session import Session
from escrowmq.client.producing.transaction import Phase, agreed, contradicted, failed_ask, note, undecided
from escrowmq.errors import Code, EscrowError, Misuse, Overloaded
from escrowmq.message.ids import id_bytes
from escrowmq.message.row import ROW_OVERHEAD
from escrowmq.model import (
    COMMIT,
    ROLLBACK,
    UNKNOWN,
    Message,
    Outcome,
    Receipt,
    TransactionId,
    TransactionResult,
)
from escrowmq.platform import failpoints
from escrowmq.wire import Exchange

LocalTransaction = Callable[[Message, Any], Awaitable[Outcome | None]]


class AsyncProducer:
    """As :class:`~escrowmq.client.producing.producer.Producer`, to await. Checkers may be coroutine functions or plain ones."""

    def __init__(self, production: Production[LoopLane]) -> None:
        self._production = production
        self._opening = [asyncio.Lock() for _ in production.sessions]

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
        number = self._production.number(Exchange.SEND, given[0], given[5])
        session = self._production.sessions[number]
        if not session.ready(False):
            await self._open(session, number, self._production.has_checker)
        row = session.checker.row(name, content, *given, None)
        lane = self._production.sending[number] or self._production.lane(Exchange.SEND, number)
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

    def checker(self, decide: CheckerT) -> CheckerT:
        """As :meth:`Producer.checker`; not to be awaited."""
        self._production.set_checker(decide)
        return decide

    def attend(self, present: bool) -> None:
        """Stop being asked for a while, or be asked again, if what the checker needs is away: a question that is answered
        UNKNOWN is one of ``check_max``, one that finds nobody is none. Not to be awaited."""
        self._production.attend(present)

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
            number, join = production.number(Exchange.PREPARE, given[0], given[5]), None
        else:
            join = bytes(transaction_id)
            known = production.router.known_shard(transaction_id.shard)
            number = await self._broker(transaction_id.shard) if known is None else known
        session = production.sessions[number]
        if not session.ready(True):
            await self._open(session, number, True)
        row = session.checker.row(name, content, *given, join)
        lane = production.preparing[number] or production.lane(Exchange.PREPARE, number)
        receipt: Receipt = await lane.call(row, len(row[1]) + ROW_OVERHEAD)
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
        production = self._production
        shard = int.from_bytes(raw[:4], "big")
        number = production.router.known_shard(shard)
        if number is None:
            number = await self._broker(shard)
        session = production.sessions[number]
        if not session.ready(True):
            await self._open(session, number, True)
        lane = production.ending[number] or production.lane(Exchange.END, number)
        return await lane.call((raw, int(outcome)), 32)  # type: ignore[no-any-return]

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

    async def _open(self, session: Session, number: int, transactional: bool) -> None:
        """Open a session; calls that wait for it go on in the order in which they came."""
        async with self._opening[number]:
            if not session.ready(transactional):
                await asyncio.to_thread(session.open, transactional)

    async def _broker(self, shard: int) -> int:
        return await asyncio.to_thread(self._production.router.of_shard, shard, self._production.timeout)


class AsyncTransaction:
    """As :class:`~escrowmq.client.producing.transaction.Transaction`, for ``async with``."""

    __slots__ = ("_asks", "_phase", "_producer", "id")

    def __init__(self, producer: AsyncProducer) -> None:
        self._producer = producer
        self._phase = Phase.ACTIVE
        self._asks: list[Callable[[TransactionId], Awaitable[Outcome]]] = []
        self.id: TransactionId | None = None

    async def send(
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
    ) -> Receipt:
        """As :meth:`Transaction.send`."""
        if self._phase is not Phase.ACTIVE:
            self._need_active()
        receipt = await self._producer.prepare(
            topic,
            body,
            key=key,
            tag=tag,
            properties=properties,
            delay=delay,
            check_immunity=check_immunity,
            queue=queue,
            message_id=message_id,
            transaction_id=self.id,
        )
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

    def settle_by(self, ask: Callable[[TransactionId], Awaitable[Outcome]]) -> None:
        """As :meth:`Transaction.settle_by`; ``ask`` is awaited."""
        self._need_active()
        self._asks.append(ask)

    async def _end(self, outcome: Outcome) -> Code:
        self._need_active()
        self._phase = Phase.ENDED
        if self.id is None:
            return Code.OK
        if self._asks:
            told = agreed([await _asked(ask, self.id) for ask in self._asks])
            failpoints.reach("transaction.told")
            if told is UNKNOWN:
                self._phase = Phase.LEFT
                raise undecided()
            if told is not outcome:
                await self._producer.end(self.id, told)
                raise contradicted(told)
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
            if self._asks:
                await self.commit()
                return
            self._phase = Phase.ENDED
            if self.id is not None:
                require(await self._producer.end(self.id, COMMIT), Code.COMMITTED, Code.ALREADY_COMMITTED)
            return
        try:
            await self.rollback()
        except EscrowError as problem:  # the caller's own exception matters more
            note(raised, problem, bool(self._asks))


async def _asked(ask: Callable[[TransactionId], Awaitable[Outcome]], transaction: TransactionId) -> Outcome:
    try:
        return await ask(transaction)
    except Exception:
        return failed_ask(transaction)
