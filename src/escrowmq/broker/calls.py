"""Every call of ``wire.py`` as a function on an engine: what embedded and served brokers share."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from escrowmq.broker.actions import ACTIONS, LONGEST_WAIT_MS
from escrowmq.broker.reads.deliveries import Deliveries
from escrowmq.broker.reads.views import open_view
from escrowmq.broker.requests import Fields, check_batch
from escrowmq.broker.writer.checkback import ANSWERED, Listener
from escrowmq.broker.writer.engine import Engine
from escrowmq.broker.writer.shard import microseconds
from escrowmq.errors import Code, EscrowError, error
from escrowmq.ledger.commands import End, Prepare, Receive, Send, Settle
from escrowmq.model import DecidedBy
from escrowmq.schemas import PRODUCED, TRANSACTION_ID_DTYPE, empty
from escrowmq.settings import nearest
from escrowmq.wire import ANSWER, Exchange

T = TypeVar("T")

MAX_EPOCH = (1 << 32) - 1

logger = logging.getLogger(__name__)


class Calls:
    """The calls of one engine; from any thread. Everything that is wrong with a request is an EscrowError."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._deliveries = Deliveries(engine)
        self._largest_rows = engine.settings.max_receive_rows

    def exchange(self, kind: Exchange, batch: pa.RecordBatch | None, options: dict[str, Any]) -> Future[pa.RecordBatch]:
        """Start one exchange; the future's answer has schema ``ANSWER[kind]``. Cancelling withdraws a receive."""
        try:
            fields = Fields(options)
            if kind == Exchange.RECEIVE:
                return self._receive(fields)
            if batch is None:
                raise error(Code.BAD_BATCH, "a batch is missing")
            check_batch(kind, batch, self.engine.settings)
            if not batch.num_rows:
                return _done(empty(ANSWER[kind]))
            return self._changes[kind](self, batch, fields)
        except EscrowError as problem:
            failed: Future[pa.RecordBatch] = Future()
            failed.set_exception(problem)
            return failed

    def _send(self, batch: pa.RecordBatch, fields: Fields) -> Future[pa.RecordBatch]:
        early = fields.choice("flush", ("sync", "async"), "sync") == "async"
        answer = self.engine.submit(Send(batch, self._sessions(batch, fields)), early=early)
        return _chained(answer, _without_places) if early else answer

    def _prepare(self, batch: pa.RecordBatch, fields: Fields) -> Future[pa.RecordBatch]:
        return self.engine.submit(Prepare(batch, self._sessions(batch, fields)))

    def _end(self, batch: pa.RecordBatch, fields: Fields) -> Future[pa.RecordBatch]:
        by = DecidedBy(fields.integer("by", int(DecidedBy.PRODUCER), most=int(DecidedBy.CHECK)))
        sessions = self._sessions(batch, fields)
        if not sessions[0]:
            raise error(
                Code.UNKNOWN_SESSION, "decisions come from a producer session", "transactions.settle is for operators"
            )
        answer = self.engine.submit(End(batch, sessions, by))
        if by == DecidedBy.CHECK:
            answer.add_done_callback(lambda done: self._answered(batch, done))
        return answer

    def _answered(self, batch: pa.RecordBatch, done: Future[pa.RecordBatch]) -> None:
        """Close the questions that these answers were to, undecided ones too."""
        if done.cancelled() or done.exception() is not None:
            return
        answered = np.isin(done.result().column("code").to_numpy(), ANSWERED)
        ids = batch.column("transaction")
        raw = np.frombuffer(ids.buffers()[1], TRANSACTION_ID_DTYPE)[ids.offset : ids.offset + len(ids)]
        self.engine.listeners.settled(raw["position"][answered].astype(np.int64))
        self.engine.poke()

    def _settle(self, batch: pa.RecordBatch, fields: Fields) -> Future[pa.RecordBatch]:
        return self.engine.submit(Settle(fields.text("group"), batch))

    _changes: dict[Exchange, Callable[[Calls, pa.RecordBatch, Fields], Future[pa.RecordBatch]]] = {  # noqa: RUF012
        Exchange.SEND: _send,
        Exchange.PREPARE: _prepare,
        Exchange.END: _end,
        Exchange.SETTLE: _settle,
    }

    def _receive(self, fields: Fields) -> Future[pa.RecordBatch]:
        settings = self.engine.settings
        lease_ms = fields.integer("lease_ms", None, least=1, most=1 << 40)
        command = Receive(
            group=fields.text("group"),
            member=fields.integer("member"),
            max_messages=min(fields.integer("max_messages", 1000, least=1), self._largest_rows),
            lease_us=microseconds(settings.lease_seconds) if lease_ms is None else lease_ms * 1000,
            epoch=fields.integer("epoch", None),
        )
        max_bytes = min(fields.integer("max_bytes", settings.max_batch_bytes, least=1), settings.max_batch_bytes)
        wait_us = min(fields.integer("wait_ms", 0), LONGEST_WAIT_MS) * 1000
        return self._deliveries.receive(command, wait_us, max_bytes)

    @staticmethod
    def _sessions(batch: pa.RecordBatch, fields: Fields) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.full(batch.num_rows, fields.integer("session", 0, most=MAX_EPOCH), np.int64)

    def action(self, name: str, request: dict[str, Any]) -> dict[str, Any]:
        """One JSON question."""
        act = ACTIONS.get(name)
        if act is None:
            raise error(Code.BAD_REQUEST, f"no action {name!r:.100}", nearest(name[:100], list(ACTIONS)))
        return _guarded(lambda: act(self.engine, Fields(request)))

    def read(self, request: dict[str, Any]) -> pa.RecordBatchReader:
        """Browse a topic or a system view."""
        return _guarded(lambda: open_view(self.engine, request))

    def watch(self, session: int) -> Listener:
        """Make a session a member to ask; its carrier takes ``batches()`` and says when it leaves."""
        return self.engine.join(Fields({"session": session}).integer("session", least=1, most=MAX_EPOCH))

    def leave(self, member: Listener) -> None:
        """A member's carrier is gone."""
        self.engine.listeners.leave(member)

    def close(self) -> None:
        """Finish reads that have begun."""
        self._deliveries.close()


def _guarded(act: Callable[[], T]) -> T:
    """Only EscrowErrors leave the broker; whatever else went wrong is told as one."""
    try:
        return act()
    except EscrowError:
        raise
    except Exception as problem:
        logger.exception("a call failed")
        raise error(Code.BAD_REQUEST, f"the broker failed on this request: {problem!r}") from problem


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


def _without_places(produced: pa.RecordBatch) -> pa.RecordBatch:
    """An early answer names no place: a crash before the sync may give it to another message."""
    none = pa.array(np.full(produced.num_rows, -1))
    arrays = {"position": none, "offset": none}
    return pa.RecordBatch.from_arrays([arrays.get(f.name, produced.column(f.name)) for f in PRODUCED], schema=PRODUCED)
