"""Effects in the Redis of the sets itself: effect, mark and commit-set entry in one ``MULTI``.

The mark is a separate key in that Redis, watched before it is read. If two processes handle a message at once, the step
of one is rejected and its retry finds the mark. Redis does not undo a step when one of its commands fails while running
(a value of another type): then the mark is removed, the error raised, and the other commands run again with the next
try. So queue only commands that cannot fail or that may be repeated.

A recovery reads only the marks of the business database, so after a recovery the scheduler also looks up messages that
were handled here, and finds their marks here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import redis
from redis.exceptions import ExecAbortError, ResponseError, WatchError

from escrowmq.compensation.remedies import apply_in_steps
from escrowmq.compensation.sets.redis import RedisSets
from escrowmq.errors import EscrowError
from escrowmq.platform.clock import now_us
from escrowmq.platform.failpoints import reach

if TYPE_CHECKING:
    from escrowmq.client.consuming.consumer import Consumer

logger = logging.getLogger(__name__)

TOGETHER = 100
"""Messages per step: Redis serves no other client meanwhile."""

Queue = Callable[[Any, Any], object]
"""``queue(pipeline, message)``: queue the commands of the effect; their results are not available."""


class RedisEffects:
    """Effects of one consumer group, for its consumers (:meth:`consume`) and, as ``effects``, for the scheduler.
    ``client`` uses the same server and database as ``sets``. ``keep``: seconds until a mark expires (None: never). A
    message that is redelivered later has its effect twice, so it must exceed the longest possible redelivery and
    recovery. Thread-safe."""

    def __init__(
        self, client: redis.Redis, sets: RedisSets, queue: Queue, *, group: str | None = None, keep: float | None = None
    ) -> None:
        self._client = client
        self._sets = sets
        self._queue = queue
        self._prefix = f"escrowmq:seen:{{{sets.name}}}:{sets.name if group is None else group}:"
        self._keep_ms = None if keep is None else max(round(keep * 1e3), 1)

    def consume(self, consumer: Consumer, *, max_messages: int = TOGETHER, idle_timeout: float | None = None) -> int:
        """Consume until ``consumer`` is closed, or no message arrived for ``idle_timeout`` seconds; failed messages are
        nacked. Returns the number of messages that had their effect."""
        effects = 0
        for batch in consumer.batches(min(max_messages, TOGETHER), idle_timeout=idle_timeout):
            messages = list(batch)
            for message, result in zip(messages, self.apply(messages), strict=True):
                if isinstance(result, Exception):
                    logger.warning("%r failed, attempt %d: %s", message, message.attempt, result)
                    message.nack(cause=f"{type(result).__name__}: {result}"[:500])
                else:
                    effects += result
                    message.ack()
        try:
            consumer.flush()
        except EscrowError as problem:  # a redelivered message finds its mark
            logger.info("messages were handled and may be redelivered: %s", problem)
        return effects

    def apply(self, messages: Sequence[Any]) -> list[bool | Exception]:
        """See :class:`escrowmq.compensation.remedies.Effects`."""
        return apply_in_steps(messages, self._apply_step, TOGETHER)

    def _apply_step(self, messages: Sequence[Any]) -> list[bool]:
        marks = [f"{self._prefix}{message.message_id.hex()}:{message.topic}" for message in messages]
        time_us = now_us()
        with self._client.pipeline(transaction=True) as pipeline:
            while True:
                pipeline.watch(*marks)  # type: ignore[no-untyped-call]
                known: list[Any] = pipeline.mget(marks)
                pipeline.multi()
                first: list[bool] = []
                fresh: list[str] = []
                for message, mark, stored in zip(messages, marks, known, strict=True):
                    first.append(stored is None and mark not in fresh)
                    if first[-1]:
                        fresh.append(mark)
                        self._queue(pipeline, message)
                        pipeline.set(mark, time_us, px=self._keep_ms)
                self._sets.add_commits_tx(pipeline, [message.message_id for message in messages], time_us)
                try:
                    pipeline.execute()
                except WatchError:  # another process has handled one of them meanwhile
                    continue
                except ExecAbortError:  # nothing was applied
                    raise
                except ResponseError:
                    if fresh:
                        self._client.delete(*fresh)
                    raise
                reach("compensation.effect-committed")
                return first
