"""Topics, their queues, and waiting for messages in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from escrowmq.broker.actions.answering import LONGEST_WAIT_MS, answers, looks, submits
from escrowmq.broker.reads.following import view_beyond, view_range
from escrowmq.broker.reads.readable import Readable
from escrowmq.ledger.commands import CreateTopic
from escrowmq.ledger.listings import queue_offsets, queues_beyond, topics_list
from escrowmq.wire.actions import topics

looks(topics.LIST, lambda shard, _: {"topics": topics_list(shard.ledger)})
submits(
    topics.CREATE, lambda request: CreateTopic(request["name"], request.get("queues"), request.get("may_exist", False))
)


@answers(topics.OFFSETS)
def _topic_offsets(engine: Readable, request: topics.AskOffsets) -> topics.Offsets:
    topic, queue, time_us = request["topic"], request.get("queue"), request.get("time_us")

    def look() -> list[Any]:
        if topic.startswith("%"):
            return [view_range(engine, topic, time_us)]
        return queue_offsets(engine.shard.ledger, topic, queue, time_us)

    return {"shard": engine.log.shard, "queues": engine.look(look).result()}


@answers(topics.WAIT)
def _wait_for_messages(engine: Readable, request: topics.Wait) -> topics.Ready:
    topic, after, every = request["topic"], dict(request.get("after", ())), request.get("every", False)
    wait_us = min(request.get("wait_ms", 0), LONGEST_WAIT_MS) * 1000
    look: Callable[[], Any] = lambda: queues_beyond(engine.shard.ledger, topic, after, every) or None  # noqa: E731
    if topic.startswith("%"):
        look = lambda: view_beyond(engine, topic, after.get(0, 0)) or None  # noqa: E731
    found: list[Any] = engine.wait_for(look, wait_us).result() or []
    return {"queues": found}
