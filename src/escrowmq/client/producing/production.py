"""The shared implementation of blocking and asyncio producers: sessions, lanes, routing, check-back loops."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Awaitable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from escrowmq import hooks
from escrowmq.client.lanes.blocking import Done
from escrowmq.client.lanes.coalescer import Lane
from escrowmq.client.lanes.request import Codec
from escrowmq.client.lanes.waiting import ThreadLane, Waiting
from escrowmq.client.links.router import Router, broker_of
from escrowmq.client.producing.checker import AnyChecker, CheckLoop, validate_checker
from escrowmq.client.producing.ending import EndingCodec, outcome_column
from escrowmq.client.producing.oneway import Confirm, Tally, is_oneway
from escrowmq.client.producing.outgoing import OutgoingCodec, Part, as_batch, cut
from escrowmq.client.producing.own_ids import AnyTransactionId, is_transaction_id, transaction_of_message
from escrowmq.client.producing.placing import PAUSE_SECONDS, BatchPlacement, Choice, Placement, end_parts
from escrowmq.client.producing.results import EndResults, Receipts, receipts
from escrowmq.client.producing.session import Session
from escrowmq.errors import Code, EscrowError, Misuse, Overloaded, error
from escrowmq.message.ids import id_bytes, id_column
from escrowmq.message.limits import byte_lengths
from escrowmq.message.names import check_name
from escrowmq.message.row import row_size
from escrowmq.model import CheckPolicy, DecidedBy, HalfMessageOptions, Message, Outcome, Receipt, TransactionId
from escrowmq.model import message_id as message_bytes
from escrowmq.platform.forks import tell_in_child
from escrowmq.wire import Exchange
from escrowmq.wire.parcels import Row

CHECKER_THREADS = 4
WAIT_STEP = 0.1
"""Interval (s) of checks whether a broker is away."""
_SENT: Awaitable[Code] = Done(Code.SENT)
QOS_0_WAITING = 100_000
"""Messages that a producer with qos=0 holds back before it drops them."""

_OPTIONS = tuple(HalfMessageOptions.__optional_keys__)


class Production:
    """The shared state of a :class:`Producer` or :class:`AsyncProducer`."""

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
        policy: CheckPolicy | None,
        replaces: bool,
        choice: Choice,
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
        self.router, self.waiting = router, waiting
        own: Any = {"named": instance is not None, "policy": policy}
        self.sessions = [Session(link, group, self.instance, self.timeout, **own) for link in router.links]
        self._several = len(router) > 1
        self.choice = choice
        self._oneway = is_oneway(choice.confirm)
        self.tally = Tally(group)
        self.dropped = 0
        self._unasked, self._replaces = unasked, replaces
        # by the broker's number, each made once the session is open; attributes and lists, because hashing an Exchange
        # for every message would be noticeable
        self._sending: list[Lane | None] = [None] * len(router)
        self._preparing: list[Lane | None] = [None] * len(router)
        self._ending: list[Lane | None] = [None] * len(router)
        # of the only broker, once a call has succeeded: a message can join it without further checks
        self._straight_sending: Lane | None = None
        self._straight_preparing: Lane | None = None
        self._by_kind = {Exchange.SEND: self._sending, Exchange.PREPARE: self._preparing, Exchange.END: self._ending}
        self._codecs: dict[tuple[Exchange, int], OutgoingCodec] = {}
        self._answers: list[Lane] = []
        self._opening = [waiting.lock() for _ in router.links]
        self._queued = [0] * len(router)  # calls that wait for each session; later ones must not overtake them
        self._lock = threading.Lock()
        self._decide: AnyChecker | None = None
        self._loops: list[CheckLoop] = []
        self._pool: ThreadPoolExecutor | None = None
        self._closed = False
        tell_in_child(self)
        if checker is not None:
            self.set_checker(checker)

    # Single messages and decisions

    def produce(
        self, kind: Exchange, topic: str | Message, body: Any = None, joined: TransactionId | None = None, **more: Any
    ) -> Awaitable[Receipt]:
        """Send a message, or prepare a half message: of a new transaction, or of the one that is ``joined``. Returns an
        awaitable: the lane's own if the message can join it at once, so that no coroutine is made."""
        if hooks.installed:
            return self._produce_with_hooks(kind, topic, body, joined, **more)
        lane = self._straight_preparing if kind is Exchange.PREPARE else self._straight_sending
        if lane is None or isinstance(topic, Message):
            return self._produce(kind, topic, body, joined, **more)
        transaction = None
        if joined is not None:
            if self.router.known_shard(joined.shard) is None:
                return self._produce(kind, topic, body, joined, **more)
            transaction = bytes(joined)
        row = self.sessions[0].checker.row(topic, body, transaction=transaction, **more)
        return lane.call(row, row_size(row))

    async def _produce_with_hooks(
        self, kind: Exchange, topic: str | Message, body: Any, joined: TransactionId | None, **options: Any
    ) -> Receipt:
        if isinstance(topic, Message) and (body is not None or options):
            return await self._produce(kind, topic, body, joined, **options)  # which refuses them
        message = topic if isinstance(topic, Message) else Message(topic, body, **options)
        properties, most = [message.properties], self.sessions[0].checker.limits.max_properties_bytes
        call = hooks.Call(
            "prepare" if kind is Exchange.PREPARE else "send", str(message.topic), 1, (message,), None, properties, most
        )
        call.transaction_id = joined
        with hooks.around(call):
            if properties[0] is not message.properties:
                message = replace(message, properties=properties[0])
            call.result = receipt = await self._produce(kind, message, None, joined)
        return receipt

    async def _produce(
        self, kind: Exchange, topic: str | Message, body: Any, joined: TransactionId | None, **options: Any
    ) -> Receipt:
        """Send or prepare one message, opening the session if necessary; with several brokers choose one, again after
        each failed try."""
        if isinstance(topic, Message):
            if body is not None:
                raise Misuse(Code.BAD_ARGUMENT, "a Message has its own body")
            options = {name: getattr(topic, name) for name in _OPTIONS}
            body, topic = topic.body, topic.topic
        half = kind is Exchange.PREPARE
        number, placement = 0, None
        if self._several:
            placement = await self._placement(kind, options.get("key"), options.get("message_id"), joined)
        elif joined is not None:
            await self.broker(joined.shard)  # raises WRONG_SHARD
        transaction = None if joined is None else bytes(joined)
        while True:
            if placement is not None:
                number = await placement.number()
            try:
                lane = (self._preparing if half else self._sending)[number]
                if lane is None or self._queued[number]:
                    lane = await self.open(kind, number, placement is not None and placement.fixed is None)
                row = self.sessions[number].checker.row(topic, body, transaction=transaction, **options)
                size = row_size(row)
                if self.qos == 0 and not half:
                    try:
                        lane.add(row, None, size)
                    except Overloaded:
                        self.dropped += 1
                    return Receipt(row[5] or b"", row[0], row[6], -1)
                receipt: Receipt = await lane.call(row, size)
            except EscrowError as problem:
                if placement is None:
                    raise
                if (identity := await placement.failed(problem)) is not None:
                    options["message_id"] = identity
                continue
            if half and receipt.transaction_id is not None:
                self.router.learn_shard(number, receipt.transaction_id.shard)
            if placement is None and half:
                self._straight_preparing = lane
            elif placement is None:
                self._straight_sending = lane
            return receipt

    def end(
        self, transaction_id: AnyTransactionId, outcome: Outcome, confirm: Confirm | None = None, hooked: bool = False
    ) -> Awaitable[Code]:
        """End a transaction by its id; see :meth:`Producer.end`. Returns an awaitable, as :meth:`produce`. ``hooked``:
        the hooks are running already."""
        if hooks.installed and not hooked:
            return self._end_with_hooks(transaction_id, outcome, confirm)
        if isinstance(transaction_id, str) and not is_transaction_id(transaction_id):
            return self._end_of_message(transaction_id, outcome, confirm)
        oneway = self._oneway if confirm is None else is_oneway(confirm)
        raw = id_bytes(transaction_id)
        if not isinstance(outcome, Outcome):
            raise Misuse(Code.BAD_ARGUMENT, f"{outcome!r} is not COMMIT, ROLLBACK or UNKNOWN")
        shard = int.from_bytes(raw[:4], "big")
        number = self.router.known_shard(shard)
        if number is not None and not self._several and (lane := self._ending[number]) is not None:
            row = (raw, int(outcome))
            if not oneway:
                return lane.call(row, 32)
            lane.add(row, partial(self.tally.on_result, row), 32)
            return _SENT
        return self._end(raw, shard, outcome, oneway)

    async def _end_with_hooks(
        self, transaction_id: AnyTransactionId, outcome: Outcome, confirm: Confirm | None
    ) -> Code:
        call = hooks.Call("end", transaction_id=transaction_id, outcome=outcome)
        with hooks.around(call):
            call.result = code = await self.end(transaction_id, outcome, confirm, hooked=True)
        return code

    async def _end_of_message(self, message_id: str, outcome: Outcome, confirm: Confirm | None) -> Code:
        find = partial(transaction_of_message, self.router, message_id, self.group, self.timeout)
        return await self.end(await self.waiting.away(find), outcome, confirm, hooked=True)

    async def _end(self, raw: bytes, shard: int, outcome: Outcome, oneway: bool) -> Code:
        number = await self.broker(shard)
        if oneway:
            return await self._send_end(number, (raw, int(outcome)))
        placement = Placement(self, Exchange.END, number) if self._several else None
        while True:
            if placement is not None:
                await placement.number()
            try:
                lane = self._ending[number] or await self.open(Exchange.END, number)
                return await lane.call((raw, int(outcome)), 32)  # type: ignore[no-any-return]
            except EscrowError as problem:
                if placement is None:
                    raise
                await placement.failed(problem)

    async def _send_end(self, number: int, row: Row) -> Code:
        """Add a oneway end to its lane, and return SENT. Waits only for the session, if there is no lane yet."""
        if self._several and self.choice.absent == "fail" and self.router.presence.away(number):
            raise self.router.presence.refusal(number)
        lane = self._ending[number] or await self.open(Exchange.END, number)
        lane.add(row, partial(self.tally.on_result, row), 32)
        return Code.SENT

    async def broker(self, shard: int) -> int:
        """Return the number of the broker that holds a shard; requests it from the brokers if it is not known yet."""
        known = self.router.known_shard(shard)
        if known is not None:
            return known
        deadline = time.monotonic() + self.timeout
        while True:
            try:
                return await self.waiting.away(self.router.of_shard, shard, self.timeout)
            except Overloaded as away:
                if self.choice.absent == "fail" or time.monotonic() >= deadline:
                    raise away
            await self.waiting.pause(PAUSE_SECONDS)

    async def open(self, kind: Exchange, number: int, free: bool = False) -> Lane:
        """Open the session with a broker if necessary, and return the lane for one kind of request to it. Calls that
        wait for the session continue in their order. ``free``: the call may go to another broker, so it does not wait
        for one that is away."""
        session, transactional = self.sessions[number], kind is not Exchange.SEND
        wanted = transactional or self._decide is not None
        if self._several:
            await self.meet()
        if not session.ready(transactional) or (self._queued[number] and not free):
            gives_up = self.router.attendances[number] if free or self.choice.absent == "fail" else None
            if free:  # not behind the calls that wait
                await self.waiting.away(partial(session.open, wanted, gives_up, patience=self.timeout / 3))
            else:
                with self._lock:
                    self._queued[number] += 1
                try:
                    async with self._opening[number]:
                        if not session.ready(transactional):
                            await self.waiting.away(session.open, wanted, gives_up)
                finally:
                    with self._lock:
                        self._queued[number] -= 1
        return self.lane(kind, number)

    async def meet(self) -> None:
        """Probe several brokers, unless that was done. Raises Overloaded(BROKER_AWAY) if none is reachable,
        Misuse(BAD_URL)."""
        if not self.router.presence.known:
            await self.waiting.away(self.router.presence.meet, self.timeout)

    # Whole batches

    async def _produce_batch_with_hooks(self, kind: Exchange, messages: Any, shard: int | None) -> Receipts:
        call = hooks.Call("prepare" if kind is Exchange.PREPARE else "send")
        if isinstance(messages, Iterable) and not isinstance(messages, str | bytes | pa.RecordBatch | pa.Table):
            call.messages = messages = list(messages)
            call.count = len(messages)
            call.properties = [one.properties if isinstance(one, Message) else None for one in messages]
            call.max_properties_bytes = self.sessions[0].checker.limits.max_properties_bytes
        else:
            call.columns, call.count = messages, getattr(messages, "num_rows", 0)
        with hooks.around(call):
            if call.properties is not None:
                messages = [
                    replace(one, properties=given) if isinstance(one, Message) and one.properties is not given else one
                    for one, given in zip(messages, call.properties, strict=True)
                ]
            call.result = found = await self.produce_batch(kind, messages, shard, hooked=True)
        return found

    async def produce_batch(self, kind: Exchange, messages: Any, shard: int | None, hooked: bool = False) -> Receipts:
        """Send or prepare many messages, to the broker of ``shard`` unless that is None. Returns their results.
        ``hooked``: the hooks are running already."""
        if hooks.installed and not hooked:
            return await self._produce_batch_with_hooks(kind, messages, shard)
        only = None if shard is None else await self.broker(shard)
        if self._several:
            await self.meet()
            return await BatchPlacement(self, kind, only).receipts(messages)
        await self.open(kind, 0)
        batch, parts = await self.waiting.away(self._parts, kind, messages)
        waits = [self.lane(kind, 0).call_batch(piece) for _, piece in parts]
        answers = await self.waiting.gather(waits)
        return receipts(batch, [rows for rows, _ in parts], [answer for answer, _ in answers])

    async def end_batch(self, transaction_ids: Any, outcomes: Any) -> EndResults:
        ids = id_column(transaction_ids)
        column = outcome_column(outcomes, len(ids))
        codes = np.full(len(ids), Code.UNKNOWN_TRANSACTION, np.uint8)  # that of rows with a null id
        await end_parts(self, ids, column, codes)
        return EndResults(codes)

    # Where things go

    def rotate(self, kind: Exchange) -> int:
        lanes = self._by_kind[kind]
        return self.router.next_in_rotation(
            lambda number: (lane := lanes[number]) is None or not (lane.broken or lane.overdue)
        )

    async def _placement(
        self, kind: Exchange, key: str | None, identity: Any, joined: TransactionId | None
    ) -> Placement:
        if joined is not None:
            return Placement(self, kind, await self.broker(joined.shard))
        await self.meet()
        name = key if isinstance(key, str) else None
        if name is None and isinstance(identity, str | bytes | uuid.UUID):  # its repeats must go to the same broker
            name = message_bytes(identity).hex()
        return Placement(self, kind, None if name is None else broker_of(name, len(self.sessions)))

    def is_there(self, shard: int) -> bool:
        number = self.router.known_shard(shard)
        return number is not None and not self.router.presence.away(number)

    def codec(self, kind: Exchange, number: int) -> OutgoingCodec:
        return self._codecs[kind, number]

    def lane(self, kind: Exchange, number: int) -> Lane:
        """Return the lane for one kind of request to a broker, made at the first call."""
        with self._lock:
            if (lane := self._by_kind[kind][number]) is not None:
                return lane
            session = self.sessions[number]
            codec: Codec = EndingCodec()
            if kind is not Exchange.END:
                codec = self._codecs[kind, number] = OutgoingCodec()
            limits = session.checker.limits
            options: Any = session.options
            more: dict[str, Any] = {"max_rows": limits.max_batch_rows, "max_bytes": limits.max_batch_bytes // 2}
            if kind is Exchange.SEND and self.qos == 0:
                options, more = partial(session.options, flush="async"), {**more, "max_waiting": QOS_0_WAITING}
            if kind is Exchange.PREPARE and self._replaces:
                options = partial(session.options, replace=True)
            if self._several:
                more |= {"attended": self.router.attendances[number], **self.choice.lane(kind)}
            more |= {"timeout": self.timeout, "renew": session.renew}
            lane = self._by_kind[kind][number] = self.waiting.lane(session.link, kind, codec, options, **more)
            return lane

    def place(self, keys: pa.Array) -> npt.NDArray[np.int64]:
        """Return for each key the broker's shard or, if it was never reached, a negative number that stands for it.
        Blocks until it is known which brokers are reachable."""
        if self._several:
            with suppress(Overloaded):  # keys have their brokers, reachable or not
                self.router.presence.meet(self.timeout)
        numbers = self.router.spread(keys, lambda: self.rotate(Exchange.SEND))
        names = np.zeros(len(self.router), np.int64)
        for number in np.unique(numbers).tolist():
            names[number] = self.router.name_of(number, self.timeout)
        return np.asarray(names[numbers])

    def _parts(self, kind: Exchange, data: Any) -> tuple[pa.RecordBatch, list[Part]]:
        """Convert a user's messages to an OUTGOING batch for the only broker, whose session is open. Returns it, and
        its parts for single requests, without the rows that are too large."""
        checker = self.sessions[0].checker
        batch = as_batch(data, checker, self._codecs[kind, 0])
        fitting = np.flatnonzero(byte_lengths(batch.column("body")) <= checker.limits.max_body_bytes)
        return batch, cut(batch, fitting, checker.limits)

    # Check-back

    def need_checker(self) -> None:
        """Raise Misuse(NO_CHECKER) if the producer has no checker, unless it was made with ``unasked``."""
        if self._decide is None and not self._unasked:
            raise Misuse(Code.NO_CHECKER)

    def set_checker(self, decide: AnyChecker) -> None:
        """Register the checker and begin to answer checks from all brokers. Raises Misuse if there is a checker
        already, or this is none."""
        validate_checker(decide, self.waiting.loop)
        with self._lock:
            if self._decide is not None:
                raise Misuse(Code.BAD_ARGUMENT, "this producer has a checker already")
            self._decide = decide
            self._pool = ThreadPoolExecutor(CHECKER_THREADS, thread_name_prefix="escrowmq-checker")
            for session, attended in zip(self.sessions, self.router.attendances, strict=True):
                more: Any = {"timeout": self.timeout, "renew": session.renew, "attended": attended}
                options: Any = partial(session.options, by=int(DecidedBy.CHECK))
                answers = ThreadLane(session.link, Exchange.END, EndingCodec(), options, self.waiting.timer, **more)
                self._answers.append(answers)
                self._loops.append(CheckLoop(session, decide, self._pool, answers, self.waiting.loop))

    def attend(self, present: bool) -> None:
        for loop in self._loops:
            loop.attend(present)

    @property
    def answers_checks(self) -> bool:
        """Return whether the producer has a checker, is open and attends: if it does not listen for checks yet, it soon
        will."""
        return not self._closed and any(loop.attends for loop in self._loops)

    def listening(self, timeout: float) -> bool:
        """Wait until every reachable broker sends checks to this producer; False if not within ``timeout`` seconds.
        Raises Fenced if a newer process has its name."""
        deadline = time.monotonic() + timeout
        listening = [self._await_listening(number, deadline) for number in range(len(self._loops))]
        for loop in self._loops:
            if loop.fenced is not None:
                raise error(loop.fenced.code, loop.fenced.message, loop.fenced.hint)
        return all(one is not False for one in listening) and any(listening)

    def _await_listening(self, number: int, deadline: float) -> bool | None:
        while not self._loops[number].listening.wait(min(WAIT_STEP, max(deadline - time.monotonic(), 0.0))):
            if self._several and self.router.presence.away(number):
                return None  # it does not count
            if time.monotonic() >= deadline:
                return False
        return True

    @property
    def unanswered(self) -> int:
        return sum(loop.judge.unanswered for loop in self._loops)

    # The end

    def on_fork(self) -> None:
        self._closed = True
        self._loops, self._pool = [], None

    def drain(self, timeout: float) -> bool:
        """Wait until all requests are answered; False if not within ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        return all(lane.drain(max(deadline - time.monotonic(), 0.0)) for lane in self._all_lanes())

    async def close(self) -> None:
        """Stop answering checks, refuse new requests, and wait for those in flight, at most ``timeout`` seconds."""
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
