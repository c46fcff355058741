"""What the sync and the async producer share: sessions, lanes, routing, the check loops, whole batches."""

from __future__ import annotations

import asyncio
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from escrowmq import schemas
from escrowmq.client.lanes.alarm import Alarm
from escrowmq.client.lanes.coalescer import Lane
from escrowmq.client.lanes.lanes import ThreadLane
from escrowmq.client.lanes.parcel import Codec
from escrowmq.client.links.router import Router, broker_of
from escrowmq.client.producing.checker import CheckLoop
from escrowmq.client.producing.deciding import AnyChecker, takes_batches
from escrowmq.client.producing.ending import EndingCodec, first_time, id_column, outcome_column, shards
from escrowmq.client.producing.outgoing import OutgoingCodec, as_batch, check_name, oversized, split
from escrowmq.client.producing.results import EndResults, Receipts, gather
from escrowmq.client.producing.session import Session
from escrowmq.errors import Code, Misuse
from escrowmq.model import DecidedBy, message_id
from escrowmq.wire import Exchange, ExchangeOptions, Link

LaneT = TypeVar("LaneT", bound=Lane)
MakeLane = Callable[..., LaneT]
CHECKER_THREADS = 4
QOS_0_WAITING = 100_000
"""Messages that a producer with qos=0 holds back before it drops them."""

Part = tuple[int, npt.NDArray[np.int64], pa.RecordBatch]
"""A broker's number, the rows of the whole that go there, and they."""


class Production(Generic[LaneT]):
    """One producer's machinery; :class:`Producer` and :class:`AsyncProducer` are its two faces."""

    def __init__(
        self,
        router: Router,
        alarm: Alarm,
        make_lane: Callable[[Link, Exchange, Codec, Callable[[], ExchangeOptions], dict[str, Any]], LaneT],
        group: str,
        instance: str | None,
        qos: int,
        timeout: float,
        loop: asyncio.AbstractEventLoop | None = None,
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
        named = instance is not None
        self.sessions = [Session(link, group, self.instance, self.timeout, named=named) for link in router.links]
        self.dropped = 0
        self.unasked = False
        """Whether transactions may begin without a checker."""
        self._alarm = alarm
        self._make_lane = make_lane
        self._loop = loop
        # by the broker's number; attributes and lists, because hashing an Exchange for every message would show
        self.sending: list[LaneT | None] = [None] * len(router)
        self.preparing: list[LaneT | None] = [None] * len(router)
        self.ending: list[LaneT | None] = [None] * len(router)
        self._by_kind = {Exchange.SEND: self.sending, Exchange.PREPARE: self.preparing, Exchange.END: self.ending}
        self._codecs: dict[tuple[Exchange, int], OutgoingCodec] = {}
        self._answers: dict[int, ThreadLane] = {}
        self._lock = threading.Lock()
        self._decide: AnyChecker | None = None
        self._loops: list[CheckLoop] = []
        self._pool: ThreadPoolExecutor | None = None
        self._closed = False

    # Where things go

    def number(self, kind: Exchange, key: str | None, identity: Any = None) -> int:
        """The broker that takes a message with this key, else with this id of the caller's: sent again, it must come to the
        broker that knows it."""
        if len(self.sessions) == 1:
            return 0
        if isinstance(key, str):
            return broker_of(key, len(self.sessions))
        if isinstance(identity, str | bytes | uuid.UUID):
            return broker_of(message_id(identity).hex(), len(self.sessions))
        return self.router.next_turn(lambda number: not self.broken(kind, number))

    def broken(self, kind: Exchange, number: int) -> bool:
        """Whether a broker is known to be away."""
        lane = self._by_kind[kind][number]
        return lane is not None and lane.broken

    def lane(self, kind: Exchange, number: int) -> LaneT:
        """The lane of one kind to one broker."""
        return self._by_kind[kind][number] or self._new_lane(kind, number)

    def codec(self, kind: Exchange, number: int) -> OutgoingCodec:
        """What turns messages of that lane into columns."""
        self.lane(kind, number)
        return self._codecs[kind, number]

    def _new_lane(self, kind: Exchange, number: int) -> LaneT:
        with self._lock:
            if (lane := self._by_kind[kind][number]) is not None:
                return lane
            session = self.sessions[number]
            codec: Codec = EndingCodec()
            if kind is not Exchange.END:
                codec = self._codecs[kind, number] = OutgoingCodec()
            options: Callable[[], ExchangeOptions] = session.options
            more: dict[str, Any] = {"timeout": self.timeout, "renew": session.renew}
            if kind is Exchange.SEND and self.qos == 0:
                more["max_waiting"] = QOS_0_WAITING
                options = lambda: {"session": session.number or 0, "flush": "async"}  # noqa: E731
            lane = self._make_lane(session.link, kind, codec, options, more)
            self._by_kind[kind][number] = lane
            return lane

    # Check-back

    @property
    def has_checker(self) -> bool:
        """Whether transactions may begin."""
        return self._decide is not None

    def need_checker(self) -> None:
        """Raise Misuse(NO_CHECKER) if there is none, and one is needed."""
        if self._decide is None and not self.unasked:
            raise Misuse(Code.NO_CHECKER)

    def set_checker(self, decide: AnyChecker) -> None:
        """Begin to listen for checks. Raises Misuse if there is a checker already, or this is none."""
        takes_batches(decide)
        with self._lock:
            if self._decide is not None:
                raise Misuse(Code.BAD_ARGUMENT, "this producer has a checker already")
            self._decide = decide
            self._pool = ThreadPoolExecutor(CHECKER_THREADS, thread_name_prefix="escrowmq-checker")
            for number, session in enumerate(self.sessions):
                answers = lambda number=number: self._answer_lane(number)  # noqa: E731
                self._loops.append(CheckLoop(session, decide, self._pool, answers, self._loop))

    def attend(self, present: bool) -> None:
        """Whether to be among those who are asked. Not to be called before there is a checker."""
        for loop in self._loops:
            loop.attend(present)

    def listening(self, timeout: float) -> bool:
        """Wait until every broker counts this producer among those to ask; False if not within ``timeout``."""
        return all(loop.listening.wait(timeout) for loop in self._loops)

    def _answer_lane(self, number: int) -> ThreadLane:
        with self._lock:
            if (lane := self._answers.get(number)) is None:
                session = self.sessions[number]
                lane = self._answers[number] = ThreadLane(
                    session.link,
                    Exchange.END,
                    EndingCodec(),
                    lambda: {"session": session.number or 0, "by": int(DecidedBy.CHECK)},
                    self._alarm,
                    timeout=self.timeout,
                    renew=session.renew,
                )
            return lane

    # Whole batches: split here, sent by the faces, put together here

    def place(self, keys: pa.Array) -> npt.NDArray[np.uint32]:
        """The shard that each row would go to."""
        numbers = self.router.spread(keys, lambda: self.number(Exchange.SEND, None))
        shards = np.zeros(len(self.router), np.uint32)
        for number in np.unique(numbers).tolist():
            shards[number] = self.router.shard_of(number, self.timeout)
        return np.asarray(shards[numbers])

    def parts(self, kind: Exchange, data: Any, only: int | None = None) -> tuple[pa.RecordBatch, list[Part]]:
        """A user's batch in wire form, and its parts. Rows that must not travel are in no part.

        Sessions must be open (the limits come from the broker). ``only``: the broker that all of it goes to.
        """
        number = self.number(kind, None) if only is None else only
        checker, codec = self.sessions[number].checker, self.codec(kind, number)
        batch = as_batch(data, checker, codec)
        limits = checker.limits
        keep = np.flatnonzero(~oversized(batch, limits))
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

    @staticmethod
    def receipts(batch: pa.RecordBatch, parts: list[Part], answers: list[pa.RecordBatch]) -> Receipts:
        """The answers of all parts, in the order of the batch; rows in no part are BODY_TOO_LARGE."""
        given = [(rows, answer) for (_, rows, _), answer in zip(parts, answers, strict=True)]
        sent = np.concatenate([rows for rows, _ in given]) if given else np.empty(0, np.int64)
        if len(sent) < batch.num_rows:
            missing = np.setdiff1d(np.arange(batch.num_rows), sent)
            given.append((missing, _refused(len(missing), Code.BODY_TOO_LARGE)))
        return Receipts.of(batch, gather(given, batch.num_rows))

    def end_columns(self, ids: Any, outcomes: Any) -> tuple[pa.Array, npt.NDArray[np.uint8]]:
        """Transaction ids (nulls kept) and outcomes as columns of one length."""
        column = id_column(ids)
        return column, outcome_column(outcomes, len(column))

    def end_parts(self, ids: pa.Array, outcomes: npt.NDArray[np.uint8], broker: Callable[[int], int]) -> Iterator[Part]:
        """Decisions by the broker that holds them, within the limits; rows with a null id are in no part."""
        keep = np.flatnonzero(np.asarray(ids.is_valid()))
        if not len(keep):
            return
        valid = ids if len(keep) == len(ids) else ids.take(pa.array(keep))
        where = shards(valid)
        for shard in np.unique(where).tolist():
            chosen = np.flatnonzero(where == shard)
            number = broker(shard)
            step = self.sessions[number].checker.limits.max_batch_rows
            for start in range(0, len(chosen), step):
                some = chosen[start : start + step]
                arrays = [
                    valid if len(some) == len(valid) else valid.take(pa.array(some)),
                    pa.array(outcomes[keep[some]]),
                ]
                yield number, keep[some], pa.RecordBatch.from_arrays(arrays, schema=schemas.ENDING)

    @staticmethod
    def end_results(total: int, parts: list[Part], answers: list[tuple[pa.RecordBatch, bool]]) -> EndResults:
        """The answers of all parts, in order; rows with a null id are UNKNOWN_TRANSACTION."""
        codes = np.full(total, Code.UNKNOWN_TRANSACTION, np.uint8)
        for (_, rows, _), (answer, resent) in zip(parts, answers, strict=True):
            told = answer.column(0).to_numpy()
            codes[rows] = first_time(told) if resent else told
        return EndResults(codes)

    # The end

    def drain(self, timeout: float) -> bool:
        """Wait for everything on its way; False if not within ``timeout``."""
        return all(lane.drain(timeout) for lane in self._all_lanes())

    def close(self) -> None:
        """Stop listening for checks, wait for what is on its way (at most ``timeout``), refuse what comes."""
        if self._closed:
            return
        self._closed = True
        for loop in self._loops:
            loop.close()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        self.drain(self.timeout)
        for lane in self._all_lanes():
            lane.close()

    def _all_lanes(self) -> list[Lane]:
        made = [lane for lanes in self._by_kind.values() for lane in lanes if lane is not None]
        return [*made, *self._answers.values()]


def _refused(count: int, code: Code) -> pa.RecordBatch:
    none = pa.array(np.full(count, -1, np.int64))
    arrays = [
        pa.array(np.full(count, code, np.uint8)),
        none,
        pa.array(np.full(count, -1, np.int32)),
        none,
        pa.nulls(count, schemas.ID),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schemas.PRODUCED)


Properties = Mapping[str, str]
