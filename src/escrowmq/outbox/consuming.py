"""The loop of :func:`escrowmq.outbox.inbox.consume`, written once, as a coroutine over a *face*: :class:`Blocking` for
threads, :class:`Awaiting` for an event loop.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

from sqlalchemy.exc import DBAPIError

from escrowmq.errors import Code, EscrowError, Misuse
from escrowmq.outbox.dialects import in_a_line

Stop = threading.Event | Callable[[], bool]
logger = logging.getLogger(__name__)

STOP_SECONDS = 0.25
"""Time (s) after which an idle loop with ``stop`` checks it."""
_STOPS = frozenset({Code.NO_TABLES, Code.SCHEMA_VERSION, Code.NO_TRANSACTION})
"""Errors that no message causes: the loop cannot continue."""


def stop_check(consumer: Any, stop: Stop | None) -> Callable[[], bool]:
    """Return what tells whether the consumer or the user stops."""
    if stop is None:
        return lambda: bool(consumer.stopped)
    asked = stop.is_set if isinstance(stop, threading.Event) else stop
    return lambda: bool(consumer.stopped or asked())


class Blocking:
    """The loop over a blocking consumer and database."""

    def __init__(
        self, consumer: Any, database: Any, handler: Any, within: Any, after: Any, claim: Any, unclaim: Any
    ) -> None:
        self.consumer, self._database = consumer, database
        self._handler, self._within, self._after = handler, within, after
        self._claim, self._unclaim = claim, unclaim

    async def batches(self, max_messages: int, idle_timeout: float | None) -> AsyncGenerator[Any, None]:
        """Return the batches of the consumer."""
        for batch in self.consumer.batches(max_messages, idle_timeout=idle_timeout):
            yield batch

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[Any]:
        """Yield a transaction."""
        with self._database.begin() as session:
            yield session

    async def claim(self, session: Any, messages: Sequence[Any], group: str) -> list[bool]:
        """Claim messages; True for each that is new."""
        return list(self._claim(session, messages, group))

    async def unclaim(self, session: Any, messages: Sequence[Any], group: str) -> None:
        """Take claims of this transaction back."""
        self._unclaim(session, messages, group)

    async def handle(self, session: Any, message: Any) -> None:
        """Call the user's function."""
        self._handler(session, message)

    async def within(self, session: Any, messages: Sequence[Any]) -> None:
        """Call the user's function, if there is one."""
        if self._within is not None:
            self._within(session, messages)

    async def after(self, messages: Sequence[Any]) -> None:
        """Call the user's function, if there is one."""
        if self._after is not None:
            self._after(messages)

    async def acknowledge(self, batch: Any) -> None:
        """Acknowledge a whole batch; durable afterwards."""
        batch.ack()


class Awaiting(Blocking):
    """As :class:`Blocking`, on an event loop."""

    async def batches(self, max_messages: int, idle_timeout: float | None) -> AsyncGenerator[Any, None]:
        """See :class:`Blocking`."""
        async for batch in self.consumer.batches(max_messages, idle_timeout=idle_timeout):
            yield batch

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[Any]:
        """See :class:`Blocking`."""
        async with self._database.begin() as session:
            yield session

    async def claim(self, session: Any, messages: Sequence[Any], group: str) -> list[bool]:
        """See :class:`Blocking`."""
        return list(await self._claim(session, messages, group))

    async def unclaim(self, session: Any, messages: Sequence[Any], group: str) -> None:
        """See :class:`Blocking`."""
        await self._unclaim(session, messages, group)

    async def handle(self, session: Any, message: Any) -> None:
        """See :class:`Blocking`."""
        await self._handler(session, message)

    async def within(self, session: Any, messages: Sequence[Any]) -> None:
        """See :class:`Blocking`."""
        if self._within is not None:
            await self._within(session, messages)

    async def after(self, messages: Sequence[Any]) -> None:
        """See :class:`Blocking`."""
        if self._after is not None:
            await self._after(messages)

    async def acknowledge(self, batch: Any) -> None:
        """See :class:`Blocking`."""
        await batch.ack()


async def handle_all(
    face: Blocking,
    group: str,
    max_messages: int,
    idle_timeout: float | None,
    stopping: Callable[[], bool],
    checks: bool,
) -> int:
    """Handle batches until the consumer or the user stops. ``checks``: an idle loop must check ``stopping``."""
    effects, idle_since = 0, time.monotonic()
    while not stopping():
        patience = idle_timeout
        if checks:
            left = STOP_SECONDS if idle_timeout is None else idle_since + idle_timeout - time.monotonic()
            patience = min(STOP_SECONDS, left)
        async with aclosing(face.batches(max_messages, patience)) as batches:
            async for batch in batches:
                effects += await _handle_batch(face, group, batch, stopping)
                idle_since = time.monotonic()
                if stopping():
                    return effects
        if not checks or (idle_timeout is not None and time.monotonic() >= idle_since + idle_timeout):
            break
    return effects


async def _handle_batch(face: Blocking, group: str, batch: Any, stopping: Callable[[], bool]) -> int:
    """Handle a batch in one transaction, or if that fails one by one, and acknowledge it. Returns the number of
    effects."""
    messages = list(batch)
    done, effects, failed = 0, 0, False
    try:
        done, effects = await _take(face, group, messages, stopping)
    except Exception as problem:
        if isinstance(problem, Misuse) and problem.code in _STOPS:
            for message in messages:
                message.nack(0.0, "the consumer cannot claim")
            raise
        logger.info("a batch of %d messages failed; handling them one by one: %r", len(batch), problem)
        failed = True
    if failed:  # not within the block above: what fails again would be logged with both tracebacks
        return await _handle_apart(face, group, batch, stopping)
    if done == len(messages):
        try:
            await face.acknowledge(batch)
        except EscrowError as problem:  # the effects are committed: the next delivery finds its mark
            logger.info("a batch of %d messages was handled but not acknowledged: %s", len(batch), problem)
    else:
        for message in messages[:done]:
            message.ack()
        _release(messages[done:])
    return effects


async def _take(face: Blocking, group: str, messages: list[Any], stopping: Callable[[], bool]) -> tuple[int, int]:
    """Handle messages in one transaction. Returns how many were handled before a stop, and how many of them had an
    effect."""
    async with face.begin() as session:
        first = await face.claim(session, messages, group)
        done = 0
        for message, new in zip(messages, first, strict=True):
            if done and stopping():
                break
            if new:
                await face.handle(session, message)
            done += 1
        if rest := [message for message, new in zip(messages[done:], first[done:], strict=True) if new]:
            await face.unclaim(session, rest, group)
        await face.within(session, messages[:done])
    await face.after(messages[:done])
    return done, sum(first[:done])


async def _handle_apart(face: Blocking, group: str, batch: Any, stopping: Callable[[], bool]) -> int:
    """Handle each message in a transaction of its own; those that fail are delivered again. Returns the number of
    effects."""
    effects = 0
    for message in batch:  # in an ordered group, without those that a failure has withdrawn meanwhile
        if stopping():
            message.release()
            continue
        try:
            effects += (await _take(face, group, [message], stopping))[1]
        except Exception as problem:
            known = isinstance(problem, DBAPIError)  # locked, away, a deadlock: a line says it all
            reason = in_a_line(problem) if known else type(problem).__name__
            logger.warning("%r failed, attempt %d: %s", message, message.attempt, reason, exc_info=not known)
            message.nack(cause=f"{type(problem).__name__}: {problem}"[:500])
        else:
            message.ack()
    return effects


def _release(messages: Sequence[Any]) -> None:
    """Give back what was not started."""
    for message in messages:
        message.release()
