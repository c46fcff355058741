"""Implements the calls of :class:`escrowmq.wire.Link` on an engine, for embedded brokers and server processes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from escrowmq.broker.actions import LONGEST_WAIT_MS, act
from escrowmq.broker.columns import releasing
from escrowmq.broker.failures import answer, broker_failed
from escrowmq.broker.reads.deliveries import Allowance, Deliveries
from escrowmq.broker.reads.views import open_view
from escrowmq.broker.requests import check_batch, check_parcel, checked
from escrowmq.broker.writer.checkback import ANSWERED, Listener
from escrowmq.broker.writer.engine import Engine
from escrowmq.broker.writer.rounds import ParcelRequest, Terms
from escrowmq.errors import Code, EscrowError, error
from escrowmq.ledger.columns.arrays import Int64s, UInt8s
from escrowmq.ledger.commands import End, Leased, Prepare, Receive, Send, Settle
from escrowmq.message.ids import records
from escrowmq.model import DecidedBy
from escrowmq.platform.times import to_us
from escrowmq.schemas import TRANSACTION_ID_DTYPE, empty
from escrowmq.settings import BrokerSettings
from escrowmq.wire import ANSWER, OPTIONS, BatchStream, Exchange, Json, Parcel
from escrowmq.wire.actions.producers import Opened
from escrowmq.wire.exchanges import EndOptions, ReceiveOptions
from escrowmq.wire.parcels import Answer, Done

MESSAGES = 1000  # messages per receive unless it requests another number
_PARCELS = (Exchange.SEND, Exchange.PREPARE, Exchange.END, Exchange.SETTLE)
_CHECK_ANSWERS = Terms.of(Exchange.END, {"by": DecidedBy.CHECK}).lane


class Dispatcher(Protocol):
    """The receiver of calls from a server: :class:`Calls` of one engine, or the door of a replica, which has an engine
    only while it leads (``replicas/door.py``)."""

    settings: BrokerSettings
    beside: dict[str, Callable[[], Mapping[str, Any]]]

    @property
    def engine(self) -> Engine | None:
        """The engine; None on a replica that does not lead."""

    @property
    def identity(self) -> tuple[int, int]: ...

    def refused(self, code: Code) -> None:
        """Count a call that the server refused with this code."""

    def exchange(
        self,
        kind: Exchange,
        batch: pa.RecordBatch | None,
        options: Mapping[str, Any],
        source: Hashable = None,
        allowance: Allowance | None = None,
    ) -> Future[pa.RecordBatch]: ...

    def parcel(self, parcel: Parcel, done: Done, sound_bytes: int | None = None, source: Hashable = None) -> None: ...

    def action(self, name: str, request: Mapping[str, object]) -> Json: ...

    def read(self, request: Mapping[str, object]) -> BatchStream: ...

    def watch(self, session: object) -> Listener: ...

    def leave(self, listener: Listener) -> None: ...

    def give_back_unseen(self, group: str, delivery: pa.RecordBatch) -> None: ...

    def run_rounds_here(self) -> None:
        """See :meth:`escrowmq.broker.writer.engine.Engine.run_rounds_here`."""

    def run(self) -> None:
        """See :meth:`escrowmq.broker.writer.engine.Engine.run`."""


class Calls:
    """The calls of one engine, from any thread. Each error of a request is an EscrowError."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.settings = engine.settings
        self.run_rounds_here = engine.run_rounds_here
        self.run = engine.run
        self.refused = engine.refusals.count
        self.leave = engine.listeners.leave
        self._deliveries = Deliveries(engine)
        self.give_back = self._deliveries.give_back
        self.close = self._deliveries.close
        self.beside: dict[str, Callable[[], Mapping[str, Any]]] = {}
        """What the server adds to the answers of actions, by the action's name."""

    @property
    def identity(self) -> tuple[int, int]:
        """Number of the shard, and how often its log was opened."""
        return self.engine.log.shard, self.engine.log.epoch

    def exchange(
        self,
        kind: Exchange,
        batch: pa.RecordBatch | None,
        options: Mapping[str, Any],
        source: Hashable = None,
        allowance: Allowance | None = None,
    ) -> Future[pa.RecordBatch]:
        """Start one exchange; the future's answer has schema ``ANSWER[kind]``. Cancelling withdraws a receive.
        ``source``: its connection; messages of several connections take turns. ``allowance``: the memory for the answer
        to a receive."""
        try:
            if kind == Exchange.RECEIVE:
                return self._receive(checked(ReceiveOptions, options), allowance)
            if batch is None:
                raise error(Code.BAD_BATCH, "a batch is missing")
            check_batch(kind, batch, self.engine.settings)
            if not batch.num_rows:
                return answer(Future(), empty(ANSWER[kind]))
            return self._change(kind, batch, checked(OPTIONS[kind], options), source)
        except Exception as problem:
            return answer(Future(), broker_failed("an exchange", problem))

    def _change(self, kind: Exchange, batch: pa.RecordBatch, options: Any, source: Hashable) -> Future[pa.RecordBatch]:
        if kind == Exchange.SETTLE:
            return self.engine.submit(Settle(options["group"], batch))
        sessions = np.full(batch.num_rows, options.get("session", 0), np.int64)
        if kind == Exchange.PREPARE:
            prepare = Prepare(batch, sessions, replace=options.get("replace", False))
            return self.engine.submit(prepare, source=source)
        if kind == Exchange.SEND:
            early = options.get("flush") == "async"
            return self.engine.submit(Send(batch, sessions), early=early, source=source)
        return self._end(batch, sessions, options)

    def parcel(self, parcel: Parcel, done: Done, sound_bytes: int | None = None, source: Hashable = None) -> None:
        """Start a request of a few rows; ``done`` is called once, on any thread, and neither blocks nor raises.
        ``sound_bytes``: the size of the rows, if the caller has checked their types. ``source``: see
        :meth:`exchange`."""
        try:
            given = parcel.kind, tuple(parcel.options.items()), tuple(map(type, parcel.options.values()))
            try:
                terms = _terms(*given)
            except TypeError:  # a value that cannot be hashed is refused here
                terms = _terms.__wrapped__(*given)
            size = check_parcel(parcel, self.engine.settings, sound_bytes)
            if terms.lane == _CHECK_ANSWERS:
                done = self._closing_questions(parcel.rows, done)
        except Exception as problem:
            done(broker_failed("a parcel", problem))
            return
        if parcel.rows:
            self.engine.submit_parcel(ParcelRequest(parcel, terms, size, done, source))
        else:
            done(b"" if parcel.kind in (Exchange.END, Exchange.SETTLE) else [])

    def _closing_questions(self, rows: Sequence[tuple[Any, ...]], done: Done) -> Done:
        """Return a callback that closes the questions of these check answers, undecided ones too, before ``done``."""

        def close(answer: Answer | EscrowError) -> None:
            if isinstance(answer, bytes):
                self._close_questions(b"".join(row[0] for row in rows), np.frombuffer(answer, np.uint8))
            done(answer)

        return close

    def _end(self, batch: pa.RecordBatch, sessions: Int64s, options: EndOptions) -> Future[pa.RecordBatch]:
        by = DecidedBy(options.get("by", DecidedBy.PRODUCER))
        if not options.get("session"):
            raise _no_session()
        ended = self.engine.submit(End(batch, sessions, by))
        if by == DecidedBy.CHECK:
            ended.add_done_callback(lambda done: self._on_answer(batch, done))
        return ended

    def _on_answer(self, batch: pa.RecordBatch, done: Future[pa.RecordBatch]) -> None:
        if not done.cancelled() and done.exception() is None:
            transactions = records(batch.column("transaction")).tobytes()
            self._close_questions(transactions, done.result().column("code").to_numpy())

    def _close_questions(self, transactions: bytes, codes: UInt8s) -> None:
        positions = np.frombuffer(transactions, TRANSACTION_ID_DTYPE)["position"].astype(np.int64)
        self.engine.listeners.note_unknown(positions[codes == Code.NOTED], self.engine.clock.now_us())
        self.engine.listeners.settled(positions[ANSWERED[codes]])
        self.engine.poke()

    def _receive(self, options: ReceiveOptions, allowance: Allowance | None) -> Future[pa.RecordBatch]:
        settings, lease_ms = self.engine.settings, options.get("lease_ms")
        command = Receive(
            group=options["group"],
            member=options["member"],
            max_messages=min(options.get("max_messages", MESSAGES), settings.max_receive_rows),
            lease_us=to_us(settings.lease_seconds) if lease_ms is None else lease_ms * 1000,
            epoch=options.get("epoch"),
            one_by_one=options.get("one_by_one", False),
        )
        max_bytes = min(options.get("max_bytes", settings.max_batch_bytes), settings.max_batch_bytes)
        wait_us = min(options.get("wait_ms", 0), LONGEST_WAIT_MS) * 1000
        return self._deliveries.receive(command, wait_us, max_bytes, options.get("return_rest", False), allowance)

    def action(self, name: str, request: Mapping[str, object]) -> Json:
        """Run an action."""
        with _guard():
            answer = act(self.engine, name, request)
            more = self.beside.get(name)
            return {**answer, **more()} if more is not None else answer

    def read(self, request: Mapping[str, object]) -> BatchStream:
        """Read a topic or a view."""
        with _guard():
            return open_view(self.engine, request)

    def watch(self, session: object) -> Listener:
        """Subscribe a session to check-backs; the caller takes ``batches()`` and calls :meth:`leave` at the end."""
        return self.engine.join(checked(Opened, {"session": session})["session"])

    def give_back_unseen(self, group: str, delivery: pa.RecordBatch) -> None:
        """Release the messages of an answer that did not reach its consumer: redelivered at once, not counted."""
        leases, offsets = (delivery.column(name).to_numpy() for name in ("lease", "offset"))
        none = np.zeros(len(leases), np.int64)
        self.engine.submit(Settle(group, releasing(Leased(leases, none, offsets, none, none))))


@contextmanager
def _guard() -> Iterator[None]:
    """Context manager: turns any exception within a call into an EscrowError."""
    try:
        yield
    except EscrowError:
        raise
    except Exception as problem:
        raise broker_failed("a call", problem) from problem


@lru_cache(4096)
def _terms(kind: Exchange, options: tuple[tuple[str, Any], ...], types: tuple[type, ...]) -> Terms:
    """Return the checked options of a parcel. Most parcels have the same ones. ``types``: True equals 1 as a key."""
    if kind not in _PARCELS:
        raise error(Code.BAD_REQUEST, f"no parcels of {kind!r:.100}")
    given: Any = checked(OPTIONS[kind], dict(options))
    if kind is Exchange.END and not given.get("session"):
        raise _no_session()
    return Terms.of(kind, given)


def _no_session() -> EscrowError:
    return error(Code.UNKNOWN_SESSION, "decisions come from a producer session", "transactions.settle is for operators")
