"""Every call of :class:`escrowmq.wire.Link` as a function on an engine: what embedded and served brokers share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from escrowmq.broker.actions import LONGEST_WAIT_MS, act
from escrowmq.broker.failures import broker_failed
from escrowmq.broker.reads.deliveries import Deliveries
from escrowmq.broker.reads.views import open_view
from escrowmq.broker.requests import check_batch, checked
from escrowmq.broker.writer.checkback import ANSWERED, Listener
from escrowmq.broker.writer.engine import Engine
from escrowmq.broker.writer.shard import microseconds
from escrowmq.errors import Code, EscrowError, error
from escrowmq.ledger.commands import End, Prepare, Receive, Send, Settle
from escrowmq.message.ids import records
from escrowmq.model import DecidedBy
from escrowmq.schemas import PRODUCED, empty
from escrowmq.wire import ANSWER, OPTIONS, Exchange, Json
from escrowmq.wire.actions.producers import Opened
from escrowmq.wire.exchanges import EndOptions, PrepareOptions, ReceiveOptions, SendOptions, SettleOptions

T = TypeVar("T")

MESSAGES = 1000
"""Messages that a receive gives unless it asks for another number."""


class Calls:
    """The calls of one engine; from any thread. Everything that is wrong with a request is an EscrowError."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._deliveries = Deliveries(engine)

    def exchange(
        self, kind: Exchange, batch: pa.RecordBatch | None, options: Mapping[str, Any]
    ) -> Future[pa.RecordBatch]:
        """Start one exchange; the future's answer has schema ``ANSWER[kind]``. Cancelling withdraws a receive."""
        try:
            if kind == Exchange.RECEIVE:
                return self._receive(checked(ReceiveOptions, options))
            if batch is None:
                raise error(Code.BAD_BATCH, "a batch is missing")
            check_batch(kind, batch, self.engine.settings)
            if not batch.num_rows:
                return _done(empty(ANSWER[kind]))
            return self._changes[kind](self, batch, checked(OPTIONS[kind], options))
        except Exception as problem:
            failed: Future[pa.RecordBatch] = Future()
            failed.set_exception(problem if isinstance(problem, EscrowError) else broker_failed("an exchange", problem))
            return failed

    def _send(self, batch: pa.RecordBatch, options: SendOptions) -> Future[pa.RecordBatch]:
        early = options.get("flush") == "async"
        answer = self.engine.submit(Send(batch, _per_row(batch, options)), early=early)
        return _chained(answer, _without_positions) if early else answer

    def _prepare(self, batch: pa.RecordBatch, options: PrepareOptions) -> Future[pa.RecordBatch]:
        return self.engine.submit(Prepare(batch, _per_row(batch, options)))

    def _end(self, batch: pa.RecordBatch, options: EndOptions) -> Future[pa.RecordBatch]:
        by = DecidedBy(options.get("by", DecidedBy.PRODUCER))
        if not options.get("session"):
            raise error(
                Code.UNKNOWN_SESSION, "decisions come from a producer session", "transactions.settle is for operators"
            )
        answer = self.engine.submit(End(batch, _per_row(batch, options), by))
        if by == DecidedBy.CHECK:
            answer.add_done_callback(lambda done: self._answered(batch, done))
        return answer

    def _answered(self, batch: pa.RecordBatch, done: Future[pa.RecordBatch]) -> None:
        """Close the questions that these answers were to, undecided ones too."""
        if done.cancelled() or done.exception() is not None:
            return
        answered = ANSWERED[done.result().column("code").to_numpy()]
        positions = records(batch.column("transaction"))["position"].astype(np.int64)
        self.engine.listeners.settled(positions[answered])
        self.engine.poke()

    def _settle(self, batch: pa.RecordBatch, options: SettleOptions) -> Future[pa.RecordBatch]:
        return self.engine.submit(Settle(options["group"], batch))

    _changes: dict[Exchange, Callable[[Calls, pa.RecordBatch, Any], Future[pa.RecordBatch]]] = {  # noqa: RUF012
        Exchange.SEND: _send,
        Exchange.PREPARE: _prepare,
        Exchange.END: _end,
        Exchange.SETTLE: _settle,
    }

    def _receive(self, options: ReceiveOptions) -> Future[pa.RecordBatch]:
        settings = self.engine.settings
        lease_ms = options.get("lease_ms")
        command = Receive(
            group=options["group"],
            member=options["member"],
            max_messages=min(options.get("max_messages", MESSAGES), settings.max_receive_rows),
            lease_us=microseconds(settings.lease_seconds) if lease_ms is None else lease_ms * 1000,
            epoch=options.get("epoch"),
        )
        max_bytes = min(options.get("max_bytes", settings.max_batch_bytes), settings.max_batch_bytes)
        wait_us = min(options.get("wait_ms", 0), LONGEST_WAIT_MS) * 1000
        return self._deliveries.receive(command, wait_us, max_bytes)

    def action(self, name: str, request: Mapping[str, object]) -> Json:
        """One JSON question."""
        return _guarded(lambda: act(self.engine, name, request))

    def read(self, request: Mapping[str, object]) -> pa.RecordBatchReader:
        """Browse a topic or a system view."""
        return _guarded(lambda: open_view(self.engine, request))

    def watch(self, session: object) -> Listener:
        """Subscribe a session to check-backs; its carrier takes ``batches()`` and calls :meth:`leave` at the end."""
        return self.engine.join(checked(Opened, {"session": session})["session"])

    def leave(self, listener: Listener) -> None:
        """The carrier of a check-back subscription is gone."""
        self.engine.listeners.leave(listener)

    def close(self) -> None:
        """Finish reads that have begun."""
        self._deliveries.close()


def _per_row(
    batch: pa.RecordBatch, options: SendOptions | PrepareOptions | EndOptions
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The session of a request, once per row; 0 without one."""
    return np.full(batch.num_rows, options.get("session", 0), np.int64)


def _guarded(act: Callable[[], T]) -> T:
    """Turn whatever else goes wrong into an EscrowError: only those leave the broker."""
    try:
        return act()
    except EscrowError:
        raise
    except Exception as problem:
        raise broker_failed("a call", problem) from problem


def _done(batch: pa.RecordBatch) -> Future[pa.RecordBatch]:
    future: Future[pa.RecordBatch] = Future()
    future.set_result(batch)
    return future


def _chained(
    future: Future[pa.RecordBatch], change: Callable[[pa.RecordBatch], pa.RecordBatch]
) -> Future[pa.RecordBatch]:
    changed: Future[pa.RecordBatch] = Future()

    def settle(done: Future[pa.RecordBatch]) -> None:
        if (problem := done.exception()) is not None:
            changed.set_exception(problem)
        else:
            changed.set_result(change(done.result()))

    future.add_done_callback(settle)
    return changed


def _without_positions(produced: pa.RecordBatch) -> pa.RecordBatch:
    """An early answer names no position: a crash before the sync may give it to another message."""
    none = pa.array(np.full(produced.num_rows, -1))
    arrays = {"position": none, "offset": none}
    return pa.RecordBatch.from_arrays([arrays.get(f.name, produced.column(f.name)) for f in PRODUCED], schema=PRODUCED)
