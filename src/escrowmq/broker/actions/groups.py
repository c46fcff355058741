"""Consumer groups and their members."""

from __future__ import annotations

from typing import cast

from escrowmq.broker.actions.answering import answers, does, looks, microseconds, submits
from escrowmq.broker.recording import recorded
from escrowmq.broker.writer.engine import Engine
from escrowmq.broker.writer.shard import rules_of
from escrowmq.errors import Code, error
from escrowmq.ledger.commands import AlterGroup, Fence, Join, Subscribe, Subscription
from escrowmq.ledger.groups.reports import described
from escrowmq.wire.actions import groups


def _subscription(request: groups.Subscribe) -> Subscribe:
    subscription = Subscription(
        topics=tuple(request["topics"]),
        tags=tuple(request.get("tags", ())),
        ordered=request.get("ordered", False),
        start=_start(request),
        max_attempts=request.get("max_attempts"),
        retry_backoff_us=microseconds(request.get("retry_backoff")),
        retry_backoff_max_us=microseconds(request.get("retry_backoff_max")),
        in_doubt=request.get("in_doubt", "redeliver"),
        retry_delays_us=_delays_us(request) or (),
    )
    return Subscribe(request["group"], subscription)


def _start(request: groups.Subscribe | groups.Alter) -> str:
    start = request.get("start", "earliest")
    if start not in ("earliest", "latest") and not (start.isascii() and start.isdigit() and len(start) < 19):
        raise error(Code.BAD_REQUEST, "'start' must be earliest, latest or microseconds since 1970")
    return start


def _delays_us(request: groups.Subscribe | groups.Alter) -> tuple[int, ...] | None:
    return tuple(round(delay * 1e6) for delay in request["retry_delays"]) if "retry_delays" in request else None


def _alteration(request: groups.Alter) -> AlterGroup:
    return AlterGroup(
        group=request["group"],
        topics=tuple(request["topics"]) if "topics" in request else None,
        tags=tuple(request["tags"]) if "tags" in request else None,
        ordered=request.get("ordered"),
        in_doubt=request.get("in_doubt"),
        start=_start(request),
        max_attempts=request.get("max_attempts"),
        retry_backoff_us=microseconds(request.get("retry_backoff")),
        retry_backoff_max_us=microseconds(request.get("retry_backoff_max")),
        retry_delays_us=_delays_us(request),
        default_redelivery=request.get("default_redelivery", False),
    )


@answers(groups.ALTER)
def _alter_group(engine: Engine, request: groups.Alter) -> groups.Subscription:
    command = _alteration(request)
    with recorded(engine, groups.ALTER, request) as done:
        done.ended = described(engine.submit(command).result(), rules_of(engine.settings))
    return cast(groups.Subscription, done.ended)


@answers(groups.SUBSCRIBE)
def _subscribe(engine: Engine, request: groups.Subscribe) -> groups.Subscribed:
    answer: groups.Subscribed = engine.submit(_subscription(request)).result()
    return {**answer, "lease_seconds": engine.settings.lease_seconds}


submits(
    groups.JOIN,
    lambda request: Join(
        request["group"], request["instance"], request["process"], request.get("resume", False), request.get("keep", [])
    ),
)
does(groups.FENCE, lambda request: Fence(request["group"], request["instance"]))
looks(
    groups.MEMBERS,
    lambda shard, request: {"members": shard.ledger.groups.members(request["group"], shard.ledger.topics)},
)
looks(groups.LIST, lambda shard, _: {"groups": shard.ledger.groups.describe(shard.ledger.topics, shard.ledger.rules)})
