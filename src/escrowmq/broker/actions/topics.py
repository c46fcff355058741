"""Topics, their queues, and waiting for messages in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from escrowmq.broker.actions.answering import LONGEST_WAIT_MS, answers, looks, microseconds, submits
from escrowmq.broker.reads.readable import Readable
from escrowmq.broker.reads.system_views import view_beyond, view_range
from escrowmq.broker.recording import recorded
from escrowmq.broker.writer.engine import Engine
from escrowmq.ledger.commands import AlterTopic, CreateTopic, DeleteTopic, TopicRules
from escrowmq.ledger.listings import queue_offsets, queues_beyond, retention_of, topics_list
from escrowmq.wire.actions import topics

looks(topics.LIST, lambda shard, _: {"topics": topics_list(shard.ledger)})
submits(
    topics.CREATE, lambda request: CreateTopic(request["name"], request.get("queues"), request.get("may_exist", False))
)

_RULES = {"retention": "retention_us", "retention_size": "retention_bytes"}


@answers(topics.ALTER)
def _alter_topic(engine: Engine, request: topics.Alter) -> topics.Altered:
    rules = TopicRules(
        retention_us=microseconds(request.get("retention")), retention_bytes=request.get("retention_size")
    )
    reset = [_RULES[name] for name in request.get("reset", ())]
    command = AlterTopic(request["name"], request.get("queues"), rules, reset)
    with recorded(engine, topics.ALTER, request) as done:
        answer: Any = engine.submit(command).result()
        altered: Any = {"name": answer["name"], "queues": answer["queues"], **retention_of(answer["rules"])}
        done.ended = altered
    return cast(topics.Altered, altered)


@answers(topics.DELETE)
def _delete_topic(engine: Engine, request: topics.Delete) -> topics.Deleted:
    name, force = request["name"], request.get("force", False)
    if request.get("check", False):
        would: topics.Deleted = engine.submit(DeleteTopic(name, force, check=True)).result()
        return would
    with recorded(engine, topics.DELETE, request) as done:
        deleted: topics.Deleted = engine.submit(DeleteTopic(name, force)).result()
        rolled_back = deleted["rolled_back"]
        while not deleted["deleted"]:  # what is undecided is rolled back in bounded steps
            deleted = engine.submit(DeleteTopic(name, force)).result()
            rolled_back += deleted["rolled_back"]
        deleted = {**deleted, "rolled_back": rolled_back}
        done.ended = dict(deleted)
    return deleted


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
