"""Effects that are in the Redis of the sets itself: effect, mark and entry of the commit set in one ``MULTI``.

The mark is a key of its own in that Redis, watched from before it is looked for until the step, so of two who handle a
message at once one has its step refused and then finds the mark. Redis undoes nothing when a command of a step fails
while it runs (a value of another kind): the mark is then taken away again, the error raised, and what the other
commands did stands, and is done again with the next try. So queue commands that cannot fail, or commands that may be
repeated.

A recovery reads marks of the business database only, so after one the scheduler looks up what these had handled, too,
and finds their marks here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import redis
from redis.exceptions import ExecAbortError, ResponseError, WatchError

from escrowmq.compensation.sets.redis import RedisSets
from escrowmq.errors import EscrowError
from escrowmq.platform.failpoints import reach

if TYPE_CHECKING:
    from escrowmq.client.consuming.consumer import Consumer

logger = logging.getLogger(__name__)

TOGETHER = 100
"""Messages of one step: Redis serves no other client meanwhile."""

Queue = Callable[[Any, Any], object]
"""``queue(pipeline, message)``: queue the commands of the effect; their answers are not returned."""


class RedisEffects:
    """The effects of one consumer group, for its consumers (:meth:`consume`) and, as ``effects``, for the scheduler.

    ``client`` is of the same server and database as ``sets``. ``keep``: seconds that a mark is kept (None: for ever); a
    message that is redelivered after that has its effect twice, so it must be longer than any redelivery and any
    recovery can take. Thread-safe.
    """

    def __init__(
        self,
        client: redis.Redis,
        sets: RedisSets,
        queue: Queue,
        *,
        group: str | None = None,
        keep: float | None = None,
    ) -> None:
        self._client = client
        self._sets = sets
        self._queue = queue
        self._prefix = f"escrowmq:seen:{{{sets.name}}}:{sets.name if group is None else group}:"
        self._keep_ms = None if keep is None else max(round(keep * 1e3), 1)

    def consume(self, consumer: Consumer, *, max_messages: int = TOGETHER, idle_timeout: float | None = None) -> int:
        """Consume until ``consumer`` is closed, or nothing came for ``idle_timeout`` seconds; how many messages had
        their effect. What fails goes back (``nack``)."""
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
        _flush(consumer)
        return effects

    def apply(self, messages: Sequence[Any]) -> list[bool | Exception]:
        """See :class:`escrowmq.compensation.effects.Effects`: of each message whether it has its effect now, had it
        before, or why not."""
        results: list[bool | Exception] = []
        for at in range(0, len(messages), TOGETHER):
            part = messages[at : at + TOGETHER]
            try:
                results += self._step(part)
            except Exception as problem:
                if len(part) == 1:
                    results.append(problem)
                    continue
                logger.info("%d messages failed together; doing them one by one: %r", len(part), problem)
                for message in part:
                    try:
                        results += self._step([message])
                    except Exception as own:
                        results.append(own)
        return results

    def _step(self, messages: Sequence[Any]) -> list[bool]:
        marks = [f"{self._prefix}{message.message_id.hex()}:{message.topic}" for message in messages]
        now_us = time.time_ns() // 1000
        with self._client.pipeline(transaction=True) as pipeline:
            while True:
                pipeline.watch(*marks)  # type: ignore[no-untyped-call]
                known: list[Any] = pipeline.mget(marks)
                pipeline.multi()
                first: list[bool] = []
                fresh: list[str] = []
                for message, mark, there in zip(messages, marks, known, strict=True):
                    first.append(there is None and mark not in fresh)
                    if first[-1]:
                        fresh.append(mark)
                        self._queue(pipeline, message)
                        pipeline.set(mark, now_us, px=self._keep_ms)
                self._sets.add_commits_tx(pipeline, [message.message_id for message in messages], now_us)
                try:
                    pipeline.execute()
                except WatchError:  # another has handled one of them meanwhile
                    continue
                except ExecAbortError:  # nothing was done
                    raise
                except ResponseError:
                    if fresh:
                        self._client.delete(*fresh)
                    raise
                reach("compensation.effect-committed")
                return first


def _flush(consumer: Consumer) -> None:
    """Wait for the acknowledgements; one that comes too late only means that its message comes again and finds its
    mark."""
    try:
        consumer.flush()
    except EscrowError as problem:
        logger.info("messages were handled, and may come again: %s", problem)
