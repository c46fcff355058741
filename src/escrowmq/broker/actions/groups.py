"""Consumer groups and their members."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from escrowmq.broker.actions.answering import answers, does, looks, microseconds, submits
from escrowmq.broker.reads.readable import Readable
from escrowmq.broker.recording import recorded
from escrowmq.broker.writer.engine import Engine
from escrowmq.broker.writer.shard import rules_of
from escrowmq.errors import Code, error
from escrowmq.ledger.commands import (
    AlterGroup,
    DeleteGroup,
    Fence,
    Join,
    LimitGroup,
    PauseGroup,
    ResetGroup,
    Subscribe,
    Subscription,
)
from escrowmq.ledger.groups.reports import described
from escrowmq.model import Limits
from escrowmq.platform.times import to_us
from escrowmq.wire.actions import groups
from escrowmq.wire.actions.action import OfGroup

RECORDED_QUEUES = 100
"""Queues of a reset that its record names."""


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


def _start(request: groups.Subscribe | groups.Alter | groups.Reset) -> str:
    start = request.get("start", "earliest")
    if start not in ("earliest", "latest") and not (start.isascii() and start.isdigit() and len(start) < 19):
        raise error(Code.BAD_REQUEST, "'start' must be earliest, latest or microseconds since 1970")
    return start


def _delays_us(request: groups.Subscribe | groups.Alter) -> tuple[int, ...] | None:
    return tuple(to_us(delay) for delay in request["retry_delays"]) if "retry_delays" in request else None


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


def _reset_command(engine: Engine, request: groups.Reset) -> ResetGroup:
    places = None
    if "places" in request:
        ledger = engine.shard.ledger
        look = lambda: [(ledger.queue_id(x["topic"], x["queue"]), x["offset"]) for x in request["places"]]  # noqa: E731
        places = engine.look(look).result()
    return ResetGroup(
        group=request["group"],
        topic=request.get("topic"),
        queue=request.get("queue"),
        start=_start(request) if "start" in request else None,
        offset=request.get("offset"),
        shift=request.get("shift"),
        places=places,
        force=request.get("force", False),
    )


@answers(groups.RESET)
def _reset_group(engine: Engine, request: groups.Reset) -> groups.Moves:
    command = _reset_command(engine, request)
    if request.get("dry_run", False):
        shard = engine.shard
        return {"queues": engine.look(lambda: shard.ledger.decide(command, shard.time_us).answer).result()}
    with recorded(engine, groups.RESET, request) as done:
        moves: list[groups.Moved] = engine.submit(command).result()
        done.ended = _summarize(moves)
    return {"queues": moves}


def _summarize(moves: list[groups.Moved]) -> dict[str, Any]:
    """Summarize a reset for the record of operator actions: sums over all queues, and old and new offset of the first
    ``RECORDED_QUEUES``."""
    sums = {name: sum(move[name] for move in moves) for name in ("again", "skipped", "leased", "dead")}
    shown = [[move["topic"], move["queue"], move["was"], move["now"]] for move in moves[:RECORDED_QUEUES]]
    return {**sums, "queues": len(moves), "moved": shown}


def _make_pause(paused: bool) -> Callable[[groups.Pause], PauseGroup]:
    return lambda request: PauseGroup(request["group"], tuple(request.get("topics", ())), paused)


does(groups.PAUSE, _make_pause(True))
does(groups.RESUME, _make_pause(False))


def _limits(request: groups.Limit) -> LimitGroup:
    rate = float(request["rate"]) if "rate" in request else None
    limits = Limits(rate, request.get("in_flight"), request.get("in_flight_per_key"))
    return LimitGroup(request["group"], limits)


does(groups.LIMIT, _limits)


@answers(groups.DELETE)
def _delete_group(engine: Engine, request: groups.Delete) -> groups.Deleted:
    force = request.get("force", False)
    with recorded(engine, groups.DELETE, request) as done:
        waiting = engine.receiving(request["group"])
        if waiting and not force:
            hint = "stop its consumers, or force it: they are refused with UNKNOWN_GROUP then"
            raise error(Code.CONFLICT, f"consumers of group {request['group']!r} wait for messages", hint)
        answer: groups.Deleted = engine.submit(DeleteGroup(request["group"], request.get("number"), force)).result()
        done.ended = dict(answer)
    return answer


submits(
    groups.JOIN,
    lambda request: Join(
        request["group"], request["instance"], request["process"], request.get("resume", False), request.get("keep", [])
    ),
)
does(groups.FENCE, lambda request: Fence(request["group"], request["instance"]))


@answers(groups.MEMBERS)
def _members(engine: Readable, request: OfGroup) -> groups.Members:
    ledger, group = engine.shard.ledger, request["group"]
    found: list[Any] = engine.look(lambda: ledger.groups.members(group, ledger.topics)).result()
    return {"members": engine.consumers.add_to(group, found, engine.clock.now_us())}


looks(groups.LIST, lambda shard, _: {"groups": shard.ledger.groups.describe(shard.ledger.topics, shard.ledger.rules)})
