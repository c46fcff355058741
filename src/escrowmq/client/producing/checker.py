"""The producer's half of check-back: listen for the broker's questions, run the checker, answer in batches.

A checker is a function of one question, or an object that takes a whole batch at once.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
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
"""How often a broken subscription is noticed; then also the pause before it is opened anew."""
LASTING_SECONDS = 10.0
"""A broker that is away for longer is no change of leader."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

Decide = Callable[[Check], Outcome | Awaitable[Outcome]]
"""A function of one question."""


class BatchChecker(Protocol):
    """An object that answers a whole batch of questions in one call: as many outcomes, in the same order."""

    def decide_batch(self, checks: Sequence[Check], /) -> Sequence[Outcome] | Awaitable[Sequence[Outcome]]:
        """One outcome per question, or what gives them when awaited."""
        ...


class IdChecker(Protocol):
    """An object that needs nothing but the ids, as columns: no Python object is made for a question.

    It is preferred to ``decide_batch`` where an object has both.
    """

    def decide_ids(self, ids: pa.FixedSizeBinaryArray, /) -> Any:
        """Return a uint8 array of :class:`~escrowmq.model.Outcome` for as many transaction ids (each once, 16
        bytes, no nulls), or what gives one when awaited."""
        ...


AnyChecker = Decide | BatchChecker | IdChecker
"""What a producer takes as its checker."""


class Whole:
    """A batch or id checker as one call: a CHECKS batch in, an ENDING batch out."""

    def __init__(self, checker: AnyChecker, judge: Judge) -> None:
        self._by_id = getattr(checker, "decide_ids", None)
        self._by_batch = getattr(checker, "decide_batch", None)
        self._judge = judge

    def ask(self, batch: pa.RecordBatch) -> Any:
        """Return the checker's answer as it gives it; for an async one, what is to be awaited."""
        if self._by_id is not None:
            return self._by_id(distinct_ids(batch))
        assert self._by_batch is not None  # see takes_batches
        return self._by_batch(list(checks_of(batch)))

    def answers(self, batch: pa.RecordBatch, given: Any) -> pa.RecordBatch:
        """Return the answers to a batch as decisions; what is no outcome is UNKNOWN. Raises Misuse(BAD_ARGUMENT) if
        ``given`` is not one per question, or a column of anything but outcomes."""
        ids = distinct_ids(batch)
        if not isinstance(given, np.ndarray | pa.Array | pa.ChunkedArray):
            given = self._judge.each(given if isinstance(given, Iterable) else [given])
        outcomes = pa.array(outcome_column(given, len(ids)))
        return pa.RecordBatch.from_arrays([ids, outcomes], schema=schemas.ENDING)

    def unknown(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """UNKNOWN to every question of a batch: the broker asks again."""
        return self.answers(batch, np.zeros(len(distinct_ids(batch)), np.uint8))


def takes_batches(checker: AnyChecker) -> bool:
    """Return whether it is an object for whole batches. Raises Misuse(BAD_ARGUMENT) for what is no checker at all."""
    if callable(getattr(checker, "decide_ids", None)) or callable(getattr(checker, "decide_batch", None)):
        return True
    if not callable(checker):
        hint = "a checker is a function, or an object with decide_batch(checks) or decide_ids(ids)"
        raise Misuse(Code.BAD_ARGUMENT, f"{type(checker).__name__} is not a checker", hint)
    return False


def need_checker_of(checker: AnyChecker, loop: asyncio.AbstractEventLoop | None) -> None:
    """Raise Misuse(BAD_ARGUMENT) for anything that is no checker, and for a coroutine function without an event
    loop."""
    takes_batches(checker)
    if loop is None and is_coroutine_function(checker):
        hint = "use a plain function, or a bus of escrowmq.aconnect"
        raise Misuse(
            Code.BAD_ARGUMENT, f"the checker {name_of(checker)} is to be awaited, and nothing awaits here", hint
        )


def is_coroutine_function(checker: AnyChecker) -> bool:
    """Return whether calling it gives what is to be awaited, as far as that can be known without calling it."""
    if takes_batches(checker):
        checker = getattr(checker, "decide_ids", None) or getattr(checker, "decide_batch")  # noqa: B009
    return inspect.iscoroutinefunction(checker) or inspect.iscoroutinefunction(getattr(checker, "__call__", None))  # noqa: B004


def distinct_ids(batch: pa.RecordBatch) -> pa.FixedSizeBinaryArray:
    """Return the transactions of a CHECKS batch, each once: the rows of one stand next to each other."""
    ids = batch.column("transaction")
    raw = records(ids, np.dtype((np.uint64, 2)))
    first = np.flatnonzero(np.concatenate([[True], (raw[1:] != raw[:-1]).any(axis=1)])[: len(ids)])
    return ids if len(first) == len(ids) else ids.take(pa.array(first))


def checks_of(batch: pa.RecordBatch) -> Iterator[Check]:
    """Yield the questions of a CHECKS batch, as objects."""
    columns = {name: batch.column(name).to_pylist() for name in batch.schema.names}
    ids = columns["transaction"]
    start = 0
    for row in range(1, len(ids) + 1):
        if row == len(ids) or ids[row] != ids[start]:
            messages = tuple(_message(columns, at) for at in range(start, row))
            yield Check(TransactionId.from_bytes(ids[start]), columns["attempt"][start], messages)
            start = row


def _message(columns: dict[str, list[Any]], row: int) -> CheckedMessage:
    return CheckedMessage(
        columns["topic"][row],
        columns["body"][row],
        columns["key"][row],
        columns["tag"][row],
        dict(columns["properties"][row] or ()),
        columns["message_id"][row],
        _EPOCH + timedelta(microseconds=columns["born_us"][row]),
    )


class Absence:
    """What is said of a broker at which one cannot listen: pure, its caller tells the time. A change of leader is over
    in some seconds and is to be expected, so what is lost is a detail first, and a warning once it has lasted for
    ``LASTING_SECONDS``; a refusal is one at once. Each once, not at every try."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._said: set[tuple[Code, int]] = set()

    def failed(self, code: Code, now: float) -> int | None:
        """Note one more failure. Returns the level of the line to log, or None."""
        since = self._since = now if self._since is None else self._since
        lost = code in AWAY or code is Code.TIMED_OUT
        level = logging.INFO if lost and now - since < LASTING_SECONDS else logging.WARNING
        if (code, level) in self._said:
            return None
        self._said.add((code, level))
        return level


class CheckLoop:
    """Answers the questions of one broker with one checker, until closed.

    A function is called once per question, a batch checker once per batch (and its answers leave as one request); on
    ``pool``, or as a task of ``loop`` if it is a coroutine function. An exception, or anything that is not an Outcome,
    is UNKNOWN: the broker asks again, and ``judge`` says so. Answers go into ``answers``, a lane of END by CHECK. When
    a newer process has taken over the producer's name, ``fenced`` is set and nothing is listened for any more.
    """

    def __init__(
        self,
        session: Session,
        checker: AnyChecker,
        pool: ThreadPoolExecutor,
        answers: Lane,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._session = session
        self.judge = Judge(checker, _log)
        self._whole = Whole(checker, self.judge) if takes_batches(checker) else None
        self._decide: Decide = checker  # type: ignore[assignment]  # a function, where it is used
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
        """Leave the list of producers to ask for a while, or come back to it: without one no attempt is counted."""
        (self._present.set if present else self._present.clear)()

    def close(self) -> None:
        """Stop listening. Questions that are being answered are left; the broker asks another."""
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
                if self._closing.is_set() or problem.code is Code.CLOSED or self._is_fenced(problem):
                    return
                if (level := absence.failed(problem.code, time.monotonic())) is not None:
                    _log.log(level, "cannot listen for checks at %s: %s", self._session.link.address, problem)
                if self._is_fenced(self._renew_if_forgotten(number, problem)):
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
            if self._is_fenced(broke) or self._is_fenced(self._renew_if_forgotten(number, broke)):
                return

    def _is_fenced(self, problem: EscrowError | None) -> bool:
        """Return whether this is the end: a newer process has the name, and is asked from now on."""
        if problem is None or problem.code is not Code.FENCED:
            return False
        self.fenced = problem
        _log.warning("no longer asked at %s: %s", self._session.link.address, problem)
        self.listening.set()  # wake whoever waits for it
        return True

    def _renew_if_forgotten(self, number: int, problem: EscrowError | None) -> EscrowError | None:
        """Renew the subscription if the broker has forgotten it. Returns the error of renewing, if any."""
        if problem is None or problem.code is not Code.UNKNOWN_SESSION:
            return None
        try:
            self._session.renew(number)
        except EscrowError as refused:
            if refused.code is not Code.FENCED:
                _log.warning("cannot renew the session at %s: %s", self._session.link.address, refused)
            return refused
        return None

    def _on_check(self, batch: pa.RecordBatch) -> None:
        with suppress(RuntimeError):  # closing: another member will be asked
            if self._whole is not None:
                self._begin(self._whole.ask, batch, self._answer_whole)
            else:
                for check in checks_of(batch):
                    self._begin(self._decide, check, self._answer)

    def _begin(self, ask: Callable[[Any], Any], question: Any, answer: Callable[[Any, Any], None]) -> None:
        """Ask on the event loop, or on a thread of the pool."""
        if self._to_await:
            self._start_task(ask(question), question, answer)
        else:
            self._pool.submit(self._ask, ask, question, answer)

    def _ask(self, ask: Callable[[Any], Any], question: Any, answer: Callable[[Any, Any], None]) -> None:
        try:
            given = ask(question)
        except Exception as problem:
            given = _Raised(problem)
        if self._loop is not None and inspect.isawaitable(given):  # a plain function that returns a coroutine
            with suppress(RuntimeError):  # the loop is closed
                self._start_task(given, question, answer)
        else:
            answer(question, given)

    def _start_task(self, awaited: Awaitable[Any], question: Any, answer: Callable[[Any, Any], None]) -> None:
        assert self._loop is not None

        async def work() -> None:
            try:
                given = await awaited
            except Exception as problem:
                given = _Raised(problem)
            answer(question, given)

        def start() -> None:
            task = asyncio.ensure_future(work())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        self._loop.call_soon_threadsafe(start)

    def _answer_whole(self, batch: pa.RecordBatch, given: Any) -> None:
        assert self._whole is not None
        try:
            if isinstance(given, _Raised):
                raise given.problem
            answers = self._whole.answers(batch, given)
        except Exception as problem:
            self.judge.blame(problem, len(distinct_ids(batch)), trace=not isinstance(problem, Misuse))
            answers = self._whole.unknown(batch)
        step = self._session.checker.limits.max_batch_rows
        with suppress(EscrowError):  # closing: another member will be asked
            for start in range(0, answers.num_rows, step):
                self._answers.add_batch(answers.slice(start, step), None)

    def _answer(self, check: Check, given: Any) -> None:
        if isinstance(given, _Raised):
            self.judge.blame(given.problem, 1, trace=not isinstance(given.problem, Misuse))
            outcome = Outcome.UNKNOWN
        else:
            outcome = self.judge.one(given)
        with suppress(EscrowError):  # closing: another member will be asked
            self._answers.add((bytes(check.transaction_id), int(outcome)), None, 32)


class _Raised:
    """That a checker raised, and what."""

    def __init__(self, problem: Exception) -> None:
        self.problem = problem
