"""Runs one handler: takes messages from its consumers, calls the function, settles each message by its outcome.

Theory of operation.

1. Each worker, a thread or a task, takes the next message of its consumer, handles it and settles it: no message
   changes threads. Receives and acknowledgements are batches of the consumer's.
2. Workers share one consumer. In an ordered group each has a consumer of its own: the broker leases a queue to one
   consumer at a time, so messages of one key never run side by side.
3. A receive gets about ``AHEAD_SECONDS`` of work, by the time that messages took so far, so that slow handlers do not
   keep messages from idle processes. Messages that wait here for two thirds of a lease go back unhandled.
4. A timer extends the leases of messages that are being handled, six times per lease.
5. A database of ``once=`` that cannot begin a transaction is no message's fault: the message goes back without an
   attempt, and the worker pauses.
6. A worker ends when its consumer stops, or with an error that no retry mends, which is reported.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from escrowmq import hooks
from escrowmq.client.consuming.consumer import ConsumerBase
from escrowmq.client.consuming.options import DEFAULT_BATCH, delay_us
from escrowmq.errors import Code, EscrowError, Fenced
from escrowmq.handlers.handler import Handler
from escrowmq.handlers.outcomes import Discard, Handled, Outcome, Retry, Unavailable, cause_of, reason_of
from escrowmq.model import Act
from escrowmq.platform.backoff import Backoff

log = logging.getLogger("escrowmq.handlers")

AHEAD_SECONDS = 1.0
"""Work that one receive may bring (s)."""
FIRST_RECEIVE = 10
"""Messages of the first receive, before anything is known."""
EXTENSIONS = 6
"""Extensions of a lease in the time that it lasts."""
FIRST_PAUSE, LAST_PAUSE = 0.1, 5.0
"""Pause (s) of a worker after a failed receive or without its database."""
TURN = 32
"""Messages after which a task lets others run, should its handler never wait."""
_WEIGHT = 0.1  # of the latest message in the mean time of messages
_MEANINGS = {Act.ACK: "acked", Act.NACK: "retried", Act.REJECT: "dead", Act.RELEASE: "released"}

Report = Callable[[Handled], None]
Received = Any
"""A received message, or a received batch."""


@dataclass(slots=True)
class Worker:
    """A thread or task. ``received`` is what it handles now."""

    consumer: ConsumerBase[Any, Any]
    received: Received = None
    ended: bool = False


class Work:
    """The workers of a handler. ``report`` is called with each result; ``on_end`` with the error that ended one."""

    def __init__(
        self,
        handler: Handler,
        consumers: list[Any],
        report: Report | None = None,
        on_end: Callable[[BaseException], None] = lambda problem: None,
    ) -> None:
        self.handler, self.consumers, self._report, self._on_end = handler, consumers, report, on_end
        choices = handler.choices
        several = len(consumers) > 1
        self.workers = [Worker(consumers[number if several else 0]) for number in range(choices.concurrency)]
        self._sharing = 1 if several else choices.concurrency
        self._mean = 0.0
        self._receive = max(FIRST_RECEIVE, self._sharing)
        self._backoff = Backoff(FIRST_PAUSE, LAST_PAUSE)
        self._is_closed = False
        self._extend_later()

    def stop(self) -> None:
        """Receive nothing more. Never waits; messages that were not started go back at once."""
        for consumer in self.consumers:
            consumer._stop()

    def close(self) -> None:
        """Extend no lease any more."""
        self._is_closed = True

    @property
    def is_idle(self) -> bool:
        """Return whether a worker waits for a message."""
        return any(worker.received is None and not worker.ended for worker in self.workers)

    async def run(self, worker: Worker) -> None:
        """Handle messages until the consumer stops. Ends with an error only if no retry could help."""
        iterations = worker.consumer._consumption.iterations
        runner, is_task, count = iterations.begin(), worker.consumer._consumption.waiting.loop is not None, 0
        try:
            while True:
                count += 1
                if is_task and count % TURN == 0:
                    await asyncio.sleep(0)
                try:
                    received = await self._next(worker.consumer)
                except EscrowError as problem:
                    if isinstance(problem, Fenced) or problem.code is Code.CLOSED:
                        raise
                    log.warning("%s receives nothing: %s", self.handler.name, problem)
                    await self._pause(worker)
                    continue
                if received is None:
                    return
                worker.received = received
                outcome = await self.handle(received)
                worker.received = None
                if outcome == "released":
                    await self._pause(worker)
        except Exception as problem:
            self._on_end(problem)
        finally:
            worker.received, worker.ended = None, True
            await worker.consumer._end_loop(runner)

    async def _next(self, consumer: Any) -> Received | None:
        """Return what to handle next; None if there is nothing more."""
        if not self.handler.choices.batch:
            return await consumer._next_message(None, self._receive)
        rows = await consumer._next_rows(self.handler.choices.receive, None)
        return None if rows is None else consumer._batch(rows)

    async def _pause(self, worker: Worker) -> None:
        consumption = worker.consumer._consumption
        await consumption.arrival.wait(lambda: consumption.stopped, self._backoff.failed())

    async def handle(self, received: Received) -> Outcome:
        """Handle a message or batch and settle it. Raises nothing but a cancellation of this task."""
        begun = time.perf_counter()
        problem: BaseException | None = None
        act, delay, cause = Act.ACK, None, None
        try:
            if hooks.installed:
                with self._hooked(received):
                    await self.handler.call(received)
            else:
                await self.handler.call(received)
        except asyncio.CancelledError as cancelled:
            act, cause = Act.NACK, "the process stopped before the handler ended"
            problem = cancelled
        except Retry as retry:
            problem, act, delay, cause = retry, Act.NACK, retry.after, reason_of(retry)
        except Discard as discard:
            problem, act, cause = discard, Act.REJECT, reason_of(discard)
        except Unavailable as unavailable:
            problem, act = unavailable, Act.RELEASE
        except (Exception, SystemExit) as failure:
            problem, act, cause = failure, Act.NACK, cause_of(failure)
        seconds = time.perf_counter() - begun
        if act is not Act.RELEASE:
            self._learn(seconds)
        await self._settle(received, act, delay, cause)
        outcome: Outcome = "acked" if act is Act.ACK else _outcome(act, received)
        if self._report is not None:
            self._report(Handled(self.handler.name, received, outcome, seconds, problem))
        if isinstance(problem, asyncio.CancelledError) and _is_cancelled():
            raise problem
        return outcome

    def _hooked(self, received: Received) -> AbstractContextManager[Any]:
        if not self.handler.choices.batch:
            return hooks.around(hooks.Call("handle", received.topic, 1, (received,)))
        return hooks.around(hooks.Call("handle", None, len(received), received, received.arrow))

    def _learn(self, seconds: float) -> None:
        """Set the size of the next receive by how long messages take."""
        if self._backoff.failing:
            self._backoff.worked()
        mean = self._mean
        self._mean = mean = mean + _WEIGHT * (seconds - mean) if mean else seconds
        most = int(self._sharing * AHEAD_SECONDS / mean) if mean else DEFAULT_BATCH
        self._receive = min(max(most, self._sharing), DEFAULT_BATCH)

    async def _settle(self, received: Received, act: Act, delay: float | None, cause: str | None) -> None:
        try:
            if self.handler.choices.batch:
                consumption, rows = received._rows.consumption, received._rows
                await consumption.act_on_all(rows, act, delay_us(delay), cause, False)
            elif act is Act.ACK:
                received._ack()
            elif act is Act.NACK:
                received._nack(delay, cause)
            elif act is Act.REJECT:
                received._reject(cause)
            else:
                received._release()
        except EscrowError as problem:  # closed meanwhile: it comes again after its lease
            log.warning("%s: %r was handled and not settled: %s", self.handler.name, received, problem)

    # Leases

    def _extend_later(self) -> None:
        consumptions = [consumer._consumption for consumer in self.consumers]
        leases = [consumption.lease for consumption in consumptions if consumption.lease is not None]
        if leases and not self._is_closed:
            timer = consumptions[0].waiting.timer
            timer.after(min(leases) / EXTENSIONS, self._extend_all)

    def _extend_all(self) -> None:
        """Extend the leases of what is being handled; give back what has waited too long."""
        try:
            for worker in self.workers:
                if (received := worker.received) is not None:
                    self._extend(worker, received)
            for consumer in self.consumers:
                consumer._return_late()
        finally:
            self._extend_later()

    def _extend(self, worker: Worker, received: Received) -> None:
        rows = received._rows
        consumption = rows.consumption
        if consumption.lease is None:
            return

        def on_lost() -> None:
            if worker.received is received:
                log.warning("%s: the lease of %r ended while it is handled", self.handler.name, received)

        one_of_each = [received._row] if not self.handler.choices.batch else _first_of_each_lease(rows)
        for row in one_of_each:
            consumption.extend_soon(rows, row, consumption.lease, on_lost)


def _first_of_each_lease(rows: Any) -> list[int]:
    found: list[int] = np.unique(rows.batch.column("lease").to_numpy(), return_index=True)[1].tolist()
    return found


def _outcome(act: Act, received: Received) -> Outcome:
    outcome: Any = _MEANINGS[act]
    if act is Act.NACK:
        most = received._rows.consumption.max_attempts
        attempts = received._rows.list("attempt")
        if most is not None and attempts and getattr(received, "attempt", max(attempts)) >= most:
            return "dead"
    return outcome  # type: ignore[no-any-return]


def _is_cancelled() -> bool:
    """Return whether the running task is being cancelled, not only something within it."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop in this thread
        return False
    return task is not None and task.cancelling() > 0


def log_line(handled: Handled) -> None:
    """Log one line for a message or batch: what became of it, and how long it took."""
    level = logging.INFO if handled.error is None else logging.WARNING
    if not log.isEnabledFor(level):
        return
    received = handled.message
    is_batch = hasattr(received, "arrow")
    what = f"{len(received)} messages" if is_batch else f"{received.topic}/{received.queue}@{received.offset}"
    facts: dict[str, Any] = {"event": "handled", "handler": handled.handler, "outcome": handled.outcome}
    facts |= {"messages": len(received)} if is_batch else {"id": received.message_id.hex(), "attempt": received.attempt}
    facts["seconds"] = round(handled.seconds, 6)
    again = "" if is_batch or received.attempt < 2 else f", attempt {received.attempt}"
    text = f"{handled.handler} {what}{again}: {handled.outcome} in {handled.seconds:.3f} s"
    traced = handled.error if not isinstance(handled.error, Retry | Discard | Unavailable) else None
    if handled.error is not None and traced is None:
        text += f": {reason_of(handled.error)}"
    log.log(level, text, exc_info=traced, extra={"facts": facts})
