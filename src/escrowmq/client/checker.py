"""The producer's half of check-back: listen for the broker's questions, run the checker, answer in batches."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa

from escrowmq.client.coalescer import Lane
from escrowmq.client.session import Session
from escrowmq.errors import Code, EscrowError
from escrowmq.model import Check, CheckedMessage, Outcome, TransactionId

_log = logging.getLogger(__name__)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
WATCH_SECONDS = 0.2
"""How often a broken subscription is noticed; then also the pause before it is opened anew."""

Decide = Callable[[Check], Outcome | Awaitable[Outcome | None] | None]


class CheckLoop:
    """Answers the questions of one broker with one checker, until closed.

    ``decide`` runs on ``pool``, or as a task of ``loop`` if it is a coroutine function. An exception, or anything that is
    not an Outcome, is UNKNOWN: the broker asks again. Answers go into ``answers``, a lane of END by CHECK.
    """

    def __init__(
        self,
        session: Session,
        decide: Decide,
        pool: ThreadPoolExecutor,
        answers: Callable[[], Lane],
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._session = session
        self._decide = decide
        self._pool = pool
        self._answers = answers
        self._loop = loop if inspect.iscoroutinefunction(decide) else None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = threading.Event()
        self.listening = threading.Event()
        self._thread = threading.Thread(target=self._run, name="escrowmq-check-back", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening. Questions that are being answered are left; the broker asks another."""
        self._closing.set()
        if self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def _run(self) -> None:
        told: Code | None = None  # a broker that is away is worth one line, not one a try
        while not self._closing.is_set():
            try:
                number = self._session.open(True)
                stream = self._session.link.watch(number, self._asked)
            except EscrowError as problem:
                if self._closing.is_set() or problem.code is Code.CLOSED:
                    return
                if problem.code is not told:
                    _log.warning("cannot listen for checks at %s: %s", self._session.link.address, problem)
                    told = problem.code
                self._closing.wait(WATCH_SECONDS)
                continue
            told = None
            self.listening.set()
            while not stream.broken and not self._closing.wait(WATCH_SECONDS):
                pass
            self.listening.clear()
            stream.close()

    def _asked(self, batch: pa.RecordBatch) -> None:
        checks = list(checks_of(batch))
        try:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._start_tasks, checks)
            else:
                for check in checks:
                    self._pool.submit(self._answer, check)
        except RuntimeError:
            pass  # closing: another member will be asked

    def _answer(self, check: Check) -> None:
        try:
            outcome: Any = self._decide(check)
        except Exception:
            _log.exception("the checker failed for %s", check.transaction_id)
            outcome = None
        self._reply(check, outcome)

    def _start_tasks(self, checks: list[Check]) -> None:
        assert self._loop is not None
        for check in checks:
            task = self._loop.create_task(self._answer_async(check))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer_async(self, check: Check) -> None:
        outcome: Any = None
        try:
            outcome = await self._decide(check)  # type: ignore[misc]  # a coroutine function, as seen in __init__
        except Exception:
            _log.exception("the checker failed for %s", check.transaction_id)
        self._reply(check, outcome)

    def _reply(self, check: Check, outcome: Any) -> None:
        if not isinstance(outcome, Outcome):
            outcome = Outcome.UNKNOWN
        try:
            self._answers().add((bytes(check.transaction_id), int(outcome)), None, 32)
        except EscrowError:
            pass  # closing: another member will be asked


def checks_of(batch: pa.RecordBatch) -> Iterator[Check]:
    """The questions of a CHECKS batch: the rows of one transaction stand next to each other."""
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
