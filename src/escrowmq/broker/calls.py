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
from escrowmq.broker.readers import Readers
from escrowmq.broker.reads.deliveries import Allowance, Deliveries
from escrowmq.broker.reads.views import open_view
from escrowmq.broker.requests import check_batch, check_parcel, checked
from escrowmq.broker.writer.checkback import ANSWERED, Listener
from escrowmq.broker.writer.engine import Engine
from escrowmq.broker.writer.rounds import CHECK_ANSWERS, ParcelRequest, Terms
from escrowmq.errors import Code, EscrowError, error
from escrowmq.ledger.columns.arrays import UInt8s
from escrowmq.ledger.commands import Leased, Settle
from escrowmq.message.ids import records
from escrowmq.schemas import TRANSACTION_ID_DTYPE, empty
from escrowmq.settings import BrokerSettings
from escrowmq.wire import ANSWER, OPTIONS, BatchStream, Exchange, Json, Parcel
from escrowmq.wire.actions import standing
from escrowmq.wire.actions.producers import Opened
from escrowmq.wire.exchanges import ReceiveOptions
from escrowmq.wire.parcels import Answer, Done

_PARCELS = (Exchange.SEND, Exchange.PREPARE, Exchange.END, Exchange.SETTLE)


class Dispatcher(Protocol):
    """The receiver of a server's calls (see :class:`Calls`): of one engine, or the door of a replica."""

    settings: BrokerSettings
    beside: dict[str, Callable[[], Mapping[str, Any]]]

    @property
    def engine(self) -> Engine | None:
        """The engine that executes the calls; None on a replica that does not lead."""

    @property
    def identity(self) -> tuple[int, int]: ...
    def refused(self, code: Code) -> None: ...
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
    def run_rounds_here(self) -> None: ...
    def run(self) -> None: ...


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
        self._readers = Readers(engine)
        self.beside: dict[str, Callable[[], Mapping[str, Any]]] = {}  # the server's additions to answers, by action

    @property
    def identity(self) -> tuple[int, int]:
        """The number of the shard, and how often its log was opened."""
        return self.engine.log.shard, self.engine.log.epoch

    def exchange(
        self,
        kind: Exchange,
        batch: pa.RecordBatch | None,
        options: Mapping[str, Any],
        source: Hashable = None,
        allowance: Allowance | None = None,
    ) -> Future[pa.RecordBatch]:
        """Start one exchange. Returns a future of the answer, with schema ``ANSWER[kind]``, or of an EscrowError;
        raises nothing. Cancelling withdraws a receive. ``source``: its connection (of a receive: a Client); messages of
        several connections take turns. ``allowance``: the memory for the answer to a receive."""
        try:
            if kind == Exchange.RECEIVE:
                given = checked(ReceiveOptions, options)
                wait_us = min(given.get("wait_ms", 0), LONGEST_WAIT_MS) * 1000
                return self._deliveries.receive(given, wait_us, allowance, source)
            if batch is None:
                raise error(Code.BAD_BATCH, "a batch is missing")
            check_batch(kind, batch, self.engine.settings)
            if not batch.num_rows:
                return answer(Future(), empty(ANSWER[kind]))
            terms = Terms.of(kind, checked(OPTIONS[kind], options))
            future = self.engine.submit(terms.command(batch), early=terms.early, source=source)
            if terms.lane == CHECK_ANSWERS:
                future.add_done_callback(lambda done: self._on_answer(batch, done))
            return future
        except Exception as problem:
            return answer(Future(), broker_failed("an exchange", problem))

    def parcel(self, parcel: Parcel, done: Done, sound_bytes: int | None = None, source: Hashable = None) -> None:
        """Start a request of a few rows, given as tuples. ``done`` is called once with the answer or the error, on any
        thread; it must not block or raise. ``sound_bytes``: the size of the rows, if the caller has checked their
        types. ``source``: see :meth:`exchange`."""
        try:
            given = parcel.kind, tuple(parcel.options.items()), tuple(map(type, parcel.options.values()))
            try:
                terms = _terms(*given)
            except TypeError:  # a value that cannot be hashed is refused here
                terms = _terms.__wrapped__(*given)
            size = check_parcel(parcel, self.engine.settings, sound_bytes)
            if terms.lane == CHECK_ANSWERS:
                done = self._closing_questions(parcel.rows, done)
        except Exception as problem:
            done(broker_failed("a parcel", problem))
            return
        if parcel.rows:
            self.engine.submit_parcel(ParcelRequest(parcel, terms, size, done, source))
        else:
            done(b"" if parcel.kind in (Exchange.END, Exchange.SETTLE) else [])

    def _closing_questions(self, rows: Sequence[tuple[Any, ...]], done: Done) -> Done:
        """Return a callback for a parcel of check answers: if it succeeded, it closes the open check-back questions
        that these rows answer, with UNKNOWN too. Then it calls ``done``."""

        def close(answer: Answer | EscrowError) -> None:
            if isinstance(answer, bytes):
                self._close_questions(b"".join(row[0] for row in rows), np.frombuffer(answer, np.uint8))
            done(answer)

        return close

    def _on_answer(self, batch: pa.RecordBatch, done: Future[pa.RecordBatch]) -> None:
        if not done.cancelled() and done.exception() is None:
            transactions = records(batch.column("transaction")).tobytes()
            self._close_questions(transactions, done.result().column("code").to_numpy())

    def _close_questions(self, transactions: bytes, codes: UInt8s) -> None:
        positions = np.frombuffer(transactions, TRANSACTION_ID_DTYPE)["position"].astype(np.int64)
        self.engine.listeners.note_unknown(positions[codes == Code.NOTED], self.engine.clock.now_us())
        self.engine.listeners.settled(positions[ANSWERED[codes]])
        self.engine.poke()

    def action(self, name: str, request: Mapping[str, object]) -> Json:
        """Run the action ``name``. Returns its answer, with what the server adds to it (``beside``). Raises
        EscrowError."""
        with _guard():
            answer = act(self.engine, name, request)
            if name == standing.ALL.name:
                answer = {**answer, **self._readers.standing()}
            more = self.beside.get(name)
            return {**answer, **more()} if more is not None else answer

    def read(self, request: Mapping[str, object]) -> BatchStream:
        """Return the stream of batches of a topic, view or file. A read that names its ``reader`` is noted for
        ``standing``. Raises EscrowError for a bad request."""
        with _guard():
            stream = open_view(self.engine, request)
            if "reader" in request:
                self._readers.note(request)
            return stream

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
    """Return the checked options of a parcel; cached, because most parcels have the same ones. ``types``: of the option
    values, so that True and 1 have different cache entries."""
    if kind not in _PARCELS:
        raise error(Code.BAD_REQUEST, f"no parcels of {kind!r:.100}")
    return Terms.of(kind, checked(OPTIONS[kind], dict(options)))
