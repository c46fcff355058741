"""The loop of :func:`escrowmq.outbox.inbox.consume`, as a coroutine for asyncio and for blocking calls, which never
suspend it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
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


@dataclass(slots=True)
class Loop:
    """A consumer, a database, and the functions to call, which are coroutine functions if it ``awaits``."""

    consumer: Any
    database: Any
    handler: Any
    within: Any
    after: Any
    claim: Any
    unclaim: Any
    group: str | None
    stop: Stop | None
    awaits: bool

    async def run(self, max_messages: int, idle_timeout: float | None) -> int:
        """Handle batches until the consumer is stopped or closed, ``stop`` is set, or no message arrives for
        ``idle_timeout`` seconds. Returns the number of effects."""
        if self.group is None:
            self.group = self.consumer.group
        effects, idle_since = 0, time.monotonic()
        while not self._is_stopped():
            patience = idle_timeout
            if self.stop is not None:
                left = STOP_SECONDS if idle_timeout is None else idle_since + idle_timeout - time.monotonic()
                patience = min(STOP_SECONDS, left)
            async with aclosing(self._batches(max_messages, patience)) as batches:
                async for batch in batches:
                    effects += await self._handle_batch(batch)
                    idle_since = time.monotonic()
                    if self._is_stopped():
                        return effects
            if self.stop is None or (idle_timeout is not None and time.monotonic() >= idle_since + idle_timeout):
                break
        return effects

    def _is_stopped(self) -> bool:
        stop = self.stop.is_set if isinstance(self.stop, threading.Event) else self.stop
        return bool(self.consumer.stopped or (stop is not None and stop()))

    async def _batches(self, max_messages: int, idle_timeout: float | None) -> AsyncGenerator[Any, None]:
        batches = self.consumer.batches(max_messages, idle_timeout=idle_timeout)
        if self.awaits:
            async for batch in batches:
                yield batch
        else:
            for batch in batches:
                yield batch

    async def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        result = function(*args)
        return await result if self.awaits else result

    async def _handle_batch(self, batch: Any) -> int:
        """Handle a batch in one transaction, or if that fails one by one, and acknowledge it; after a stop, release the
        messages that were not handled. Returns the number of effects."""
        messages = list(batch)
        done: int | None = None
        try:
            done, effects = await self._take(messages)
        except Exception as problem:
            if isinstance(problem, Misuse) and problem.code in _STOPS:
                for message in messages:
                    message.nack(0.0, "the consumer cannot claim")
                raise
            logger.info("a batch of %d messages failed; handling them one by one: %r", len(batch), problem)
        if done is None:  # not within the block above: a second failure would be logged with both tracebacks
            return await self._handle_apart(batch)
        if done == len(messages):
            try:
                await self._call(batch.ack)
            except EscrowError as problem:  # the effects are committed: the next delivery finds its mark
                logger.info("a batch of %d messages was handled but not acknowledged: %s", len(batch), problem)
        else:
            for message in messages[:done]:
                message.ack()
            for message in messages[done:]:
                message.release()
        return effects

    async def _take(self, messages: list[Any]) -> tuple[int, int]:
        """Claim messages and call the handler with the new ones, in one transaction. Returns how many were processed
        before a stop, repeats included, and how many of them were new."""
        async with AsyncExitStack() as stack:
            begin = self.database.begin()
            session = await stack.enter_async_context(begin) if self.awaits else stack.enter_context(begin)
            first = list(await self._call(self.claim, session, messages, self.group))
            done = 0
            for message, new in zip(messages, first, strict=True):
                if done and self._is_stopped():
                    break
                if new:
                    await self._call(self.handler, session, message)
                done += 1
            if rest := [message for message, new in zip(messages[done:], first[done:], strict=True) if new]:
                await self._call(self.unclaim, session, rest, self.group)
            if self.within is not None:
                await self._call(self.within, session, messages[:done])
        if self.after is not None:
            await self._call(self.after, messages[:done])
        return done, sum(first[:done])

    async def _handle_apart(self, batch: Any) -> int:
        """Handle each message in a transaction of its own, and acknowledge it; those that fail are given back, and
        after a stop the others are released. Returns the number of effects."""
        effects = 0
        for message in batch:  # in an ordered group, without those that a failure has withdrawn meanwhile
            if self._is_stopped():
                message.release()
                continue
            try:
                effects += (await self._take([message]))[1]
            except Exception as problem:
                known = isinstance(problem, DBAPIError)  # locked, away, a deadlock: one line is enough
                reason = in_a_line(problem) if known else type(problem).__name__
                logger.warning("%r failed, attempt %d: %s", message, message.attempt, reason, exc_info=not known)
                message.nack(cause=f"{type(problem).__name__}: {problem}"[:500])
            else:
                message.ack()
        return effects
