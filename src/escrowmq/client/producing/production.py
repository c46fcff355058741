"""The shared implementation of blocking and asyncio producers: sessions, lanes, routing, check-back loops."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from escrowmq import schemas
from escrowmq.client.lanes.coalescer import Lane
from escrowmq.client.lanes.request import Codec
from escrowmq.client.lanes.waiting import ThreadLane, Waiting
from escrowmq.client.links.router import Router, broker_of
from escrowmq.client.producing.checker import AnyChecker, CheckLoop, takes_batches
from escrowmq.client.producing.ending import EndingCodec, first_time, outcome_column
from escrowmq.client.producing.outgoing import OutgoingCodec, as_batch, split
from escrowmq.client.producing.results import EndResults, Receipts, receipts
from escrowmq.client.producing.session import Session
from escrowmq.errors import Code, Misuse, Overloaded, error
from escrowmq.message.ids import id_bytes, id_column, shards
from escrowmq.message.limits import byte_lengths
from escrowmq.message.names import check_name
from escrowmq.message.row import ROW_OVERHEAD
from escrowmq.model import DecidedBy, Message, Outcome, Receipt, TransactionId
from escrowmq.model import message_id as message_bytes
from escrowmq.wire import Exchange

CHECKER_THREADS = 4
QOS_0_WAITING = 100_000
"""Messages that a producer with qos=0 holds back before it drops them."""

AnyTransactionId = TransactionId | str | bytes
Part = tuple[int, npt.NDArray[np.int64], pa.RecordBatch]
"""A broker's number, the rows of the whole that go there, and they."""


class Production:
    """One producer's machinery; :class:`Producer` and :class:`AsyncProducer` are its two faces."""

    def __init__(
        self,
        router: Router,
        waiting: Waiting,
        group: str,
        instance: str | None,
        qos: int,
        timeout: float,
        checker: AnyChecker | None,
        unasked: bool,
    ) -> None:
        check_name(group, Code.BAD_GROUP_NAME)
        if qos not in (0, 1, 2) or isinstance(qos, bool):
            raise Misuse(Code.BAD_ARGUMENT, f"qos = {qos!r}", "0 at most once, 1 at least once, 2 exactly once")
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < 1e6:
            raise Misuse(Code.BAD_ARGUMENT, f"timeout = {timeout!r}: a positive number of seconds")
        if instance is not None:
            check_name(instance, Code.BAD_GROUP_NAME)
        self.group, self.qos, self.timeout = group, qos, float(timeout)
        self.instance = instance or f"client-{os.urandom(8).hex()}"
        self.router = router
        self.waiting = waiting
        named = instance is not None
        self.sessions = [Session(link, group, self.instance, self.timeout, named=named) for link in router.links]
        self._several = len(router) > 1
        self.dropped = 0
        self._unasked = unasked
        # by the broker's number, each made once the session is open; attributes and lists, because hashing an Exchange for
        # every message would show
        self._sending: list[Lane | None] = [None] * len(router)
        self._preparing: list[Lane | None] = [None] * len(router)
        self._ending: list[Lane | None] = [None] * len(router)
        self._by_kind = {Exchange.SEND: self._sending, Exchange.PREPARE: self._preparing, Exchange.END: self._ending}
        self._codecs: dict[tuple[Exchange, int], OutgoingCodec] = {}
        self._answers: list[Lane] = []
        self._opening = [waiting.lock() for _ in router.links]
        self._lock = threading.Lock()
        self._decide: AnyChecker | None = None
        self._loops: list[CheckLoop] = []
        self._pool: ThreadPoolExecutor | None = None
        self._closed = False
        if checker is not None:
            self.set_checker(checker)

    # Single messages and decisions

    async def produce(
        self,
        kind: Exchange,
        topic: str | Message,
        body: bytes | None = None,
        joined: TransactionId | None = None,
        *,
        key: str | None = None,
        tag: str | None = None,
        properties: Mapping[str, str] | None = None,
        delay: float = 0.0,
        queue: int | None = None,
        message_id: str | bytes | uuid.UUID | None = None,
        check_immunity: float | None = None,
    ) -> Receipt:
        """Send a message, or prepare a half message: of a new transaction, or of the one that is ``joined``.

        The options are those of :class:`~escrowmq.model.HalfMessageOptions`; here are their defaults.
        """
        if isinstance(topic, Message):
            if body is not None:
                raise Misuse(Code.BAD_ARGUMENT, "a Message has its own body")
            m = topic
            topic, body, key, tag, properties, delay = m.topic, m.body, m.key, m.tag, m.properties, m.delay
            queue, message_id, check_immunity = m.queue, m.message_id, m.check_immunity
        half = kind is Exchange.PREPARE
        if joined is not None:
            number = await self.broker(joined.shard)
        else:
            number = self._number(kind, key, message_id) if self._several else 0
        lane = (self._preparing if half else self._sending)[number] or await self._open(kind, number)
        row = self.sessions[number].checker.row(
            topic,
            body,  # type: ignore[arg-type]  # None is refused
            key,
            tag,
            properties,
            delay,
            queue,
            message_id,
            check_immunity,
            None if joined is None else bytes(joined),
        )
        size = len(row.body) + ROW_OVERHEAD
        if self.qos == 0 and not half:
            try:
                lane.add(row, None, size)
            except Overloaded:
                self.dropped += 1
            return Receipt(row.message_id or b"", row.topic, row.queue, -1)
        receipt: Receipt = await lane.call(row, size)
        if half and receipt.transaction_id is not None:
            self.router.learn_shard(receipt.transaction_id.shard, number)
        return receipt

    async def end(self, transaction_id: AnyTransactionId, outcome: Outcome) -> Code:
        """End a transaction by its id; see :meth:`Producer.end`."""
        raw = id_bytes(transaction_id)
        if not isinstance(outcome, Outcome):
            raise Misuse(Code.BAD_ARGUMENT, f"{outcome!r} is not COMMIT, ROLLBACK or UNKNOWN")
        shard = int.from_bytes(raw[:4], "big")
        if (number := self.router.known_shard(shard)) is None:
            number = await self.broker(shard)
        lane = self._ending[number] or await self._open(Exchange.END, number)
        return await lane.call((raw, int(outcome)), 32)  # type: ignore[no-any-return]

    async def broker(self, shard: int) -> int:
        """The number of the broker that holds a shard; asks the brokers if it is not known yet."""
        known = self.router.known_shard(shard)
        return await self.waiting.away(self.router.of_shard, shard, self.timeout) if known is None else known

    async def _open(self, kind: Exchange, number: int) -> Lane:
        """The lane of one kind to one broker, once the session is open; calls that wait for it go on in the order in which
        they came."""
        async with self._opening[number]:
            session, transactional = self.sessions[number], kind is not Exchange.SEND
            if not session.ready(transactional):
                await self.waiting.away(session.open, transactional or self._decide is not None)
        return self.lane(kind, number)

    # Whole batches

    async def produce_batch(self, kind: Exchange, messages: Any, shard: int | None) -> Receipts:
        """Send or prepare many; to the broker of ``shard`` if that is given."""
        only = None if shard is None else await self.broker(shard)
        for number in range(len(self.sessions)) if only is None else [only]:
            if self._by_kind[kind][number] is None:
                await self._open(kind, number)
        batch, parts = await self.waiting.away(self._parts, kind, messages, only)
        waits = [self.lane(kind, number).call_batch(piece) for number, _, piece in parts]
        answers = await self.waiting.gather(waits)
        return receipts(batch, [rows for _, rows, _ in parts], [answer for answer, _ in answers])

    async def end_batch(self, transaction_ids: Any, outcomes: Any) -> EndResults:
        """End many; see :meth:`Producer.end_batch`."""
        ids = id_column(transaction_ids)
        column = outcome_column(outcomes, len(ids))
        parts = await self.waiting.away(lambda: list(self._end_parts(ids, column)))
        waits = [self.lane(Exchange.END, number).call_batch(piece) for number, _, piece in parts]
        codes = np.full(len(ids), Code.UNKNOWN_TRANSACTION, np.uint8)  # what rows with a null id get
        for (_, rows, _), (answer, resent) in zip(parts, await self.waiting.gather(waits), strict=True):
            given = answer.column(0).to_numpy()
            codes[rows] = first_time(given) if resent else given
        return EndResults(codes)

    # Where things go

    def _number(self, kind: Exchange, key: str | None, identity: Any = None) -> int:
        """The broker that takes a message with this key, else with this id of the caller's: sent again, it must come to the
        broker that knows it."""
        if isinstance(key, str):
            return broker_of(key, len(self.sessions))
        if isinstance(identity, str | bytes | uuid.UUID):
            return broker_of(message_bytes(identity).hex(), len(self.sessions))
        lanes = self._by_kind[kind]
        return self.router.next_in_rotation(lambda number: (lane := lanes[number]) is None or not lane.broken)

    def lane(self, kind: Exchange, number: int) -> Lane:
        """The lane of one kind to one broker, made when it is first asked for."""
        with self._lock:
            if (lane := self._by_kind[kind][number]) is not None:
                return lane
            session = self.sessions[number]
            codec: Codec = EndingCodec()
            if kind is not Exchange.END:
                codec = self._codecs[kind, number] = OutgoingCodec()
            options, more = session.options, {}
            if kind is Exchange.SEND and self.qos == 0:
                options, more = partial(session.options, flush="async"), {"max_waiting": QOS_0_WAITING}
            lane = self.waiting.lane(
                session.link, kind, codec, options, timeout=self.timeout, renew=session.renew, **more
            )
            self._by_kind[kind][number] = lane
            return lane

    def place(self, keys: pa.Array) -> npt.NDArray[np.uint32]:
        """The shard that each row would go to. Blocks until every broker among them has named its shard."""
        numbers = self.router.spread(keys, lambda: self._number(Exchange.SEND, None))
        shards = np.zeros(len(self.router), np.uint32)
        for number in np.unique(numbers).tolist():
            shards[number] = self.router.shard_of(number, self.timeout)
        return np.asarray(shards[numbers])

    def _parts(self, kind: Exchange, data: Any, only: int | None) -> tuple[pa.RecordBatch, list[Part]]:
        """A user's batch in wire form, and its parts. Rows that must not travel are in no part.

        Sessions must be open (the limits come from the broker). ``only``: the broker that all of it goes to.
        """
        number = self._number(kind, None) if only is None else only
        checker, codec = self.sessions[number].checker, self._codecs[kind, number]
        batch = as_batch(data, checker, codec)
        limits = checker.limits
        keep = np.flatnonzero(byte_lengths(batch.column("body")) <= limits.max_body_bytes)
        brokers = (
            self.router.spread(batch.column("key"), lambda: number)
            if only is None
            else np.full(batch.num_rows, only, np.int64)
        )
        parts: list[Part] = []
        for broker in np.unique(brokers[keep]).tolist():
            rows = keep[brokers[keep] == broker]
            whole = batch if len(rows) == batch.num_rows else batch.take(pa.array(rows))
            start = 0
            for piece in split(whole, limits):
                parts.append((broker, rows[start : start + piece.num_rows], piece))
                start += piece.num_rows
        return batch, parts

    def _end_parts(self, ids: pa.Array, outcomes: npt.NDArray[np.uint8]) -> Iterator[Part]:
        """Decisions by the broker that holds them, within the limits; rows with a null id are in no part. Blocks."""
        keep = np.flatnonzero(np.asarray(ids.is_valid()))
        valid = ids if len(keep) == len(ids) else ids.take(pa.array(keep))
        where = shards(valid)
        for shard in np.unique(where).tolist():
            chosen = np.flatnonzero(where == shard)
            number = self.router.of_shard(shard, self.timeout)
            self.sessions[number].open(True)
            step = self.sessions[number].checker.limits.max_batch_rows
            for start in range(0, len(chosen), step):
                some = chosen[start : start + step]
                part = valid if len(some) == len(valid) else valid.take(pa.array(some))
                rows = keep[some]
                yield number, rows, pa.RecordBatch.from_arrays([part, pa.array(outcomes[rows])], schema=schemas.ENDING)

    # Check-back

    def need_checker(self) -> None:
        """Raise Misuse(NO_CHECKER) if there is none, and one is needed."""
        if self._decide is None and not self._unasked:
            raise Misuse(Code.NO_CHECKER)

    def set_checker(self, decide: AnyChecker) -> None:
        """Begin to listen for checks. Raises Misuse if there is a checker already, or this is none."""
        takes_batches(decide)
        with self._lock:
            if self._decide is not None:
                raise Misuse(Code.BAD_ARGUMENT, "this producer has a checker already")
            self._decide = decide
            self._pool = ThreadPoolExecutor(CHECKER_THREADS, thread_name_prefix="escrowmq-checker")
            for session in self.sessions:
                answers = ThreadLane(
                    session.link,
                    Exchange.END,
                    EndingCodec(),
                    partial(session.options, by=int(DecidedBy.CHECK)),
                    self.waiting.timer,
                    timeout=self.timeout,
                    renew=session.renew,
                )
                self._answers.append(answers)
                self._loops.append(CheckLoop(session, decide, self._pool, answers, self.waiting.loop))

    def attend(self, present: bool) -> None:
        """Whether to be among those who are asked. Not to be called before there is a checker."""
        for loop in self._loops:
            loop.attend(present)

    def listening(self, timeout: float) -> bool:
        """Wait until every broker counts this producer among those to ask; False if not within ``timeout``."""
        return all(loop.listening.wait(timeout) for loop in self._loops)

    # The end

    def drain(self, timeout: float) -> bool:
        """Wait for everything on its way; False if not within ``timeout``."""
        return all(lane.drain(timeout) for lane in self._all_lanes())

    async def close(self) -> None:
        """Stop listening for checks, wait for what is on its way (at most ``timeout``), refuse what comes."""
        if not self._closed:
            self._closed = True
            await self.waiting.away(self._close)

    def _close(self) -> None:
        for loop in self._loops:
            loop.close()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        self.drain(self.timeout)
        for lane in self._all_lanes():
            lane.close()

    def _all_lanes(self) -> list[Lane]:
        made = [lane for lanes in self._by_kind.values() for lane in lanes if lane is not None]
        return [*made, *self._answers]


def require(outcome: Outcome, code: Code) -> Code:
    """``code`` if a transaction that ended with it stands as ``outcome``; raises CONFLICT otherwise."""
    if code not in _STANDS_AS[outcome]:
        raise error(Code.CONFLICT, f"the transaction stands as {code.name}")
    return code


_STANDS_AS = {
    Outcome.UNKNOWN: (Code.NOTED,),
    Outcome.COMMIT: (Code.COMMITTED, Code.ALREADY_COMMITTED),
    Outcome.ROLLBACK: (Code.ROLLED_BACK, Code.ALREADY_ROLLED_BACK),
}
