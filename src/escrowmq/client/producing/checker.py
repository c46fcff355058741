"""The producer's half of check-back: receive the broker's checks, run the checker, answer in batches.

A checker is a function of one check, or an object that takes a whole batch at once.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import time
from asyncio import AbstractEventLoop
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from escrowmq import schemas
from escrowmq.client.lanes.coalescer import Lane
from escrowmq.client.lanes.returning import rest
from escrowmq.client.producing.ending import outcome_column
from escrowmq.client.producing.judging import Judge, name_of
from escrowmq.client.producing.session import Session
from escrowmq.errors import AWAY, Code, EscrowError, Misuse
from escrowmq.message.ids import records
from escrowmq.model import Check, CheckedMessage, Outcome, TransactionId

_log = logging.getLogger(__name__)
WATCH_SECONDS = 0.2
"""Interval of checks of a subscription, and the pause before it is opened again."""
LASTING_SECONDS = 10.0
"""A broker that is away for longer is no change of leader."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_CHECKED = ("topic", "body", "key", "tag", "properties", "message_id", "born_us")
_OnAnswer = Callable[[Any, Callable[[], Any]], None]
"""Called with the question, and with the function that returns the checker's answer or raises its exception."""

Decide = Callable[[Check], Outcome | Awaitable[Outcome]]
"""A function of one check."""


class BatchChecker(Protocol):
    """An object that answers a whole batch of checks in one call: as many outcomes, in the same order."""

    def decide_batch(self, checks: Sequence[Check], /) -> Sequence[Outcome] | Awaitable[Sequence[Outcome]]: ...


class IdChecker(Protocol):
    """An object that needs only the ids, as columns: no Python object is made for a check.

    It is preferred to ``decide_batch`` if an object has both. ``decide_ids`` returns a uint8 array of
    :class:`~escrowmq.model.Outcome` for as many transaction ids (each once, 16 bytes, no nulls), or an awaitable of it.
    """

    def decide_ids(self, ids: pa.FixedSizeBinaryArray, /) -> Any: ...


AnyChecker = Decide | BatchChecker | IdChecker
"""The checker of a producer."""


def takes_batches(checker: AnyChecker) -> bool:
    """Return whether a checker takes whole batches. Raises Misuse(BAD_ARGUMENT) for an object that is no checker."""
    if callable(getattr(checker, "decide_ids", None)) or callable(getattr(checker, "decide_batch", None)):
        return True
    if not callable(checker):
        hint = "a checker is a function, or an object with decide_batch(checks) or decide_ids(ids)"
        raise Misuse(Code.BAD_ARGUMENT, f"{type(checker).__name__} is not a checker", hint)
    return False


def validate_checker(checker: AnyChecker, loop: AbstractEventLoop | None) -> None:
    """Raise Misuse(BAD_ARGUMENT) for an object that is no checker, and for a coroutine function without an event
    loop."""
    if is_coroutine_function(checker) and loop is None:
        hint = "use a plain function, or a bus of escrowmq.aconnect"
        text = f"the checker {name_of(checker)} is to be awaited, and nothing awaits here"
        raise Misuse(Code.BAD_ARGUMENT, text, hint)


def is_coroutine_function(checker: AnyChecker) -> bool:
    """Return whether calling the checker gives an awaitable, as far as that can be known without calling it."""
    if takes_batches(checker):
        checker = getattr(checker, "decide_ids", None) or getattr(checker, "decide_batch")  # noqa: B009
    return inspect.iscoroutinefunction(checker) or inspect.iscoroutinefunction(getattr(checker, "__call__", None))  # noqa: B004


def distinct_ids(batch: pa.RecordBatch) -> pa.FixedSizeBinaryArray:
    """Return the transaction ids in a CHECKS batch, each once. Requires that the rows of a transaction are adjacent."""
    ids = batch.column("transaction")
    raw = records(ids, np.dtype((np.uint64, 2)))
    first = np.flatnonzero(np.concatenate([[True], (raw[1:] != raw[:-1]).any(axis=1)])[: len(ids)])
    return ids if len(first) == len(ids) else ids.take(pa.array(first))


def checks_of(batch: pa.RecordBatch) -> Iterator[Check]:
    """Yield a Check for each transaction in a CHECKS batch, with its half messages."""
    columns = {name: batch.column(name).to_pylist() for name in batch.schema.names}
    ids = columns["transaction"]
    start = 0
    for row in range(1, len(ids) + 1):
        if row == len(ids) or ids[row] != ids[start]:
            messages = []
            for at in range(start, row):
                topic, body, key, tag, pairs, identity, born_us = (columns[name][at] for name in _CHECKED)
                born = _EPOCH + timedelta(microseconds=born_us)
                messages.append(CheckedMessage(topic, body, key, tag, dict(pairs or ()), identity, born))
            yield Check(TransactionId.from_bytes(ids[start]), columns["attempt"][start], tuple(messages))
            start = row


class Absence:
    """Chooses the log level of failures to listen at one broker, without a clock of its own. A change of leader takes
    some seconds and is normal, so a lost broker is INFO first, and WARNING after ``LASTING_SECONDS``; a refusal is
    WARNING at once. Each is logged once, not at every try."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._logged: set[tuple[Code, int]] = set()

    def failed(self, code: Code, now: float) -> int | None:
        """Note that listening at the broker failed with ``code``. Returns the level at which to log that, None to log
        nothing."""
        since = self._since = now if self._since is None else self._since
        lost = code in AWAY or code is Code.TIMED_OUT
        level = logging.INFO if lost and now - since < LASTING_SECONDS else logging.WARNING
        if (code, level) in self._logged:
            return None
        self._logged.add((code, level))
        return level


class CheckLoop:
    """Answers the checks of one broker with one checker, until closed.

    A function is called once per check, a batch checker once per batch (and its answers leave as one request); on
    ``pool``, or as a task of ``loop`` if it is a coroutine function. An exception, or anything that is not an Outcome,
    is logged by ``judge`` and becomes UNKNOWN, so that the broker asks again. Answers go into ``answers``, a lane of
    END by CHECK. When a newer process has taken over the producer's name, ``fenced`` is set and the loop ends.
    """

    def __init__(
        self,
        session: Session,
        checker: AnyChecker,
        pool: Executor,
        answers: Lane,
        loop: AbstractEventLoop | None,
    ) -> None:
        self._session = session
        self.judge = Judge(checker, _log)
        self._checker: Any = checker
        self._takes_batches = takes_batches(checker)
        self._pool = pool
        self._answers = answers
        self._loop = loop
        self._to_await = loop is not None and is_coroutine_function(checker)
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = threading.Event()
        self._present = threading.Event()
        self._present.set()
        self.listening = threading.Event()
        self.fenced: EscrowError | None = None
        self._thread = threading.Thread(target=self._run, name="escrowmq-check-back", daemon=True)
        self._thread.start()

    def attend(self, present: bool) -> None:
        (self._present.set if present else self._present.clear)()

    @property
    def attends(self) -> bool:
        """Return whether this loop receives checks, or will when the broker answers."""
        return self._present.is_set() and self._thread.is_alive()

    def close(self) -> None:
        """Stop listening for checks; waits up to 5 s for the thread. Checks without an answer go to another
        producer."""
        self._closing.set()
        if self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def _run(self) -> None:
        absence = Absence()
        while not self._closing.is_set():
            if not self._present.wait(WATCH_SECONDS):
                continue
            number = 0
            try:
                number = self._session.open(True)
                stream = self._session.link.watch(number, self._on_check)
            except EscrowError as problem:
                if self._closing.is_set() or problem.code is Code.CLOSED:
                    return
                is_forgotten = bool(number) and problem.code is Code.UNKNOWN_SESSION
                logged = is_forgotten or problem.code is Code.FENCED  # by _ends, if it cannot renew the session
                if not logged and (level := absence.failed(problem.code, time.monotonic())) is not None:
                    _log.log(level, "cannot listen for checks at %s: %s", self._session.link.address, problem)
                if self._ends(number, problem):
                    return
                rest(self._session.link, WATCH_SECONDS, self._closing)
                continue
            absence = Absence()
            self.listening.set()
            while self._present.is_set() and not stream.broken and not self._closing.wait(WATCH_SECONDS):
                pass
            self.listening.clear()
            broke = stream.problem if stream.broken else None
            stream.close()
            if broke is not None and self._ends(number, broke):
                return

    def _ends(self, number: int, problem: EscrowError) -> bool:
        """Handle the end of a subscription: renew the session if the broker has forgotten it. Returns True if the loop
        must end, because a newer process has this producer's name and receives the checks."""
        if problem.code is Code.UNKNOWN_SESSION:
            try:
                self._session.renew(number)
            except EscrowError as refused:
                problem = refused
                if problem.code is not Code.FENCED:
                    _log.warning("cannot renew the session at %s: %s", self._session.link.address, problem)
        if problem.code is not Code.FENCED:
            return False
        self.fenced = problem
        _log.warning("no longer asked at %s: %s", self._session.link.address, problem)
        self.listening.set()  # wakes the waiters
        return True

    def _on_check(self, batch: pa.RecordBatch) -> None:
        with suppress(RuntimeError):  # closing: the check goes to another member
            if self._takes_batches:
                self._begin(self._ask_whole, batch, self._answer_whole)
            else:
                for check in checks_of(batch):
                    self._begin(self._checker, check, self._answer)

    def _begin(self, ask: Callable[[Any], Any], question: Any, answer: _OnAnswer) -> None:
        if self._to_await:
            self._start_task(ask(question), question, answer)
        else:
            self._pool.submit(ask, question).add_done_callback(partial(self._on_done, question, answer))

    def _on_done(self, question: Any, answer: _OnAnswer, done: Future[Any] | asyncio.Task[Any]) -> None:
        if done.cancelled() or not isinstance(done.exception(), Exception | None):
            return
        if self._loop is not None and done.exception() is None and inspect.isawaitable(given := done.result()):
            with suppress(RuntimeError):  # the loop is closed
                self._start_task(given, question, answer)  # of a plain function that returns a coroutine
        else:
            answer(question, done.result)

    def _start_task(self, awaited: Awaitable[Any], question: Any, answer: _OnAnswer) -> None:
        assert self._loop is not None

        def start() -> None:
            task = asyncio.ensure_future(awaited)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(partial(self._on_done, question, answer))

        self._loop.call_soon_threadsafe(start)

    def _ask_whole(self, batch: pa.RecordBatch) -> Any:
        """Call a batch or id checker with the checks of a CHECKS batch. Returns its answer, not validated."""
        if (by_id := getattr(self._checker, "decide_ids", None)) is not None:
            return by_id(distinct_ids(batch))
        return self._checker.decide_batch(list(checks_of(batch)))

    def _answer_whole(self, batch: pa.RecordBatch, result: Callable[[], Any]) -> None:
        ids = distinct_ids(batch)
        try:
            given = result()
            if not isinstance(given, np.ndarray | pa.Array | pa.ChunkedArray):
                given = self.judge.each(given if isinstance(given, Iterable) else [given])
            outcomes = outcome_column(given, len(ids))
        except Exception as problem:
            self.judge.blame(problem, len(ids), trace=not isinstance(problem, Misuse))
            outcomes = np.full(len(ids), Outcome.UNKNOWN, np.uint8)
        answers = pa.RecordBatch.from_arrays([ids, pa.array(outcomes)], schema=schemas.ENDING)
        step = self._session.checker.limits.max_batch_rows
        with suppress(EscrowError):  # closing: the checks go to another member
            for start in range(0, answers.num_rows, step):
                self._answers.add_batch(answers.slice(start, step), None)

    def _answer(self, check: Check, result: Callable[[], Any]) -> None:
        try:
            outcome = self.judge.one(result())
        except Exception as problem:
            self.judge.blame(problem, 1, trace=not isinstance(problem, Misuse))
            outcome = Outcome.UNKNOWN
        with suppress(EscrowError):  # closing: the check goes to another member
            self._answers.add((bytes(check.transaction_id), int(outcome)), None, 32)
