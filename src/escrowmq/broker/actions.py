"""The actions of :mod:`escrowmq.wire.actions`, one function each, over one engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any, TypeVar, cast

import numpy as np
import pyarrow as pa

from escrowmq.broker import recording
from escrowmq.broker.reads.following import view_beyond, view_range
from escrowmq.broker.reads.lookups import damaged_places, find_messages, show_transaction, view_message
from escrowmq.broker.reads.readable import HoldsLedger, Readable
from escrowmq.broker.recording import ending, named, recorded
from escrowmq.broker.requests import MAX_IDS, checked, transaction_id
from escrowmq.broker.writer.engine import Engine
from escrowmq.broker.writer.shard import rules_of
from escrowmq.errors import Code, error
from escrowmq.ledger.commands import (
    AlterGroup,
    AlterProducers,
    Command,
    CommitBatch,
    CreateTopic,
    End,
    Fence,
    ForgetWriter,
    Join,
    OpenSession,
    ProducerRules,
    Recheck,
    SettleDead,
    Subscribe,
    Subscription,
)
from escrowmq.ledger.groups.reports import described
from escrowmq.ledger.listings import producers_list, queue_offsets, queues_beyond, topics_list, writers_list
from escrowmq.ledger.listings import transactions as transactions_list
from escrowmq.ledger.transactions import policies
from escrowmq.model import DecidedBy, Outcome, message_id
from escrowmq.schemas import ENDING, ID
from escrowmq.settings import nearest
from escrowmq.wire import PROTOCOL_VERSION, Action, Json
from escrowmq.wire.actions import (
    acts,
    brokers,
    dead_letters,
    groups,
    messages,
    producers,
    topics,
    transactions,
    writers,
)
from escrowmq.wire.actions.action import Answer, Nothing, Request, Results
from escrowmq.wire.actions.table import ACTIONS

AnyEngine = TypeVar("AnyEngine", Engine, Readable)

_VERSION = version("escrowmq")  # read once: it lies in a file, and there may be no descriptor left for it

LONGEST_WAIT_MS = 60_000
"""No call waits longer, whatever it asks for; the client asks again."""
PAGE = 1000
SHOWN_PLACES = 3
"""Places of damage that ``health`` names."""
FOUND = 100
"""Messages that a look-up gives unless it asks for more."""

HANDLERS: dict[str, Callable[[Any, Any], Any]] = {}
"""The function of each action, by the action's name. It takes an Engine, or a Readable if the action only reads."""


def act(engine: Readable, name: str, request: Mapping[str, Any]) -> Json:
    """Check a request and answer it. Rejected(BAD_REQUEST) for an unknown action, or a request not of its type."""
    handler = HANDLERS.get(name)
    if handler is None:
        raise error(Code.BAD_REQUEST, f"no action {name!r:.100}", nearest(name[:100], list(HANDLERS)))
    answer: Json = handler(engine, checked(ACTIONS[name].request, request))
    return answer


def _answers(
    action: Action[Request, Answer],
) -> Callable[[Callable[[AnyEngine, Request], Answer]], Callable[[AnyEngine, Request], Answer]]:
    """Make a function the handler of ``action``."""

    def register(function: Callable[[AnyEngine, Request], Answer]) -> Callable[[AnyEngine, Request], Answer]:
        HANDLERS[action.name] = function
        return function

    return register


def _submits(
    action: Action[Request, Answer],
    command: Callable[[Request], Command],
    shown: Callable[[Any], Any] = lambda answer: answer,
) -> None:
    """Answer ``action`` by the result of the command that a request makes; ``shown`` brings it into its form for JSON."""

    @_answers(action)
    def _(engine: Engine, request: Request) -> Answer:
        answer: Answer = shown(engine.submit(command(request)).result())
        return answer


def _does(
    action: Action[Request, Answer],
    command: Callable[[Request], Command],
    shown: Callable[[Any], Any] = lambda answer: answer,
) -> None:
    """As :func:`_submits`, of an operator's act: it is recorded before it is done."""

    @_answers(action)
    def _(engine: Engine, request: Request) -> Answer:
        made = command(request)
        with recorded(engine, action, request) as done:
            answer: Answer = shown(engine.submit(made).result())
            done.ended = ending(answer)
        return answer


def _looks(action: Action[Request, Answer], look: Callable[[HoldsLedger, Request], Any]) -> None:
    """Answer ``action`` by what ``look`` sees in the ledger."""

    @_answers(action)
    def _(engine: Readable, request: Request) -> Answer:
        answer: Answer = engine.look(lambda: look(engine.shard, request)).result()
        return answer


def _page(what: str, entries: list[Any], limit: int, after: Callable[[Any], object]) -> Any:
    """One page of a listing of ``what``. A full one has ``next``: where its last entry is."""
    return {what: entries, "next": after(entries[-1])} if len(entries) == limit else {what: entries}


# The broker


@_answers(brokers.HELLO)
def _hello(engine: Readable, _: Nothing) -> brokers.Hello:
    settings = dataclasses.asdict(engine.settings)
    return {
        "protocol": PROTOCOL_VERSION,
        "version": _VERSION,
        "shard": engine.log.shard,
        "epoch": engine.log.epoch,
        "time_us": engine.clock.now_us(),
        "limits": {name: settings[name] for name in settings if name.startswith("max_") or name == "half_retention"},
    }


@_answers(brokers.HEALTH)
def _health(engine: Readable, _: Nothing) -> brokers.Health:
    failure = engine.shard.failure
    shard, places = engine.shard, engine.log.damages()
    reason = failure.message if failure else f"{shard.full_because}: messages are refused" if shard.full else ""
    if engine.status != "damaged":
        return {"status": engine.status, "reason": reason}
    more = f"; and {len(places) - SHOWN_PLACES:,} more frames" if len(places) > SHOWN_PLACES else ""
    return {"status": "damaged", "reason": "; ".join(map(str, places[:SHOWN_PLACES])) + more}


@_answers(brokers.STATS)
def _stats(engine: Engine, _: Nothing) -> dict[str, float]:
    """The names are those of ``serving/metrics.py``."""
    numbers: dict[str, float] = engine.look(lambda: engine.shard.ledger.stats(engine.clock.now_us())).result()
    requests, size = engine.waiting
    return {
        **numbers,
        "checks_unanswered": engine.listeners.unanswered,
        "checks_answered_unknown_total": engine.listeners.answered_unknown,
        "waiting_requests": requests,
        "waiting_bytes": size,
        "parked_receives": engine.waiting_receives,
        "rounds_total": engine.rounds,
        "log_bytes_total": engine.log.bytes_written,
        "log_stored_bytes": engine.log.stored_bytes(),
        "disk_free_bytes": engine.log.free_bytes(),
        "log_position": engine.log.next_position,
        "log_damaged_frames": len(engine.log.damages()),
    }


# Topics


_looks(topics.LIST, lambda shard, _: {"topics": topics_list(shard.ledger)})
_submits(
    topics.CREATE, lambda request: CreateTopic(request["name"], request.get("queues"), request.get("may_exist", False))
)


@_answers(topics.OFFSETS)
def _topic_offsets(engine: Readable, request: topics.AskOffsets) -> topics.Offsets:
    topic, queue, time_us = request["topic"], request.get("queue"), request.get("time_us")

    def look() -> list[Any]:
        if topic.startswith("%"):
            return [view_range(engine, topic, time_us)]
        return queue_offsets(engine.shard.ledger, topic, queue, time_us)

    return {"shard": engine.log.shard, "queues": engine.look(look).result()}


@_answers(topics.WAIT)
def _wait_for_messages(engine: Readable, request: topics.Wait) -> topics.Ready:
    topic, after, every = request["topic"], dict(request.get("after", ())), request.get("every", False)
    wait_us = min(request.get("wait_ms", 0), LONGEST_WAIT_MS) * 1000
    look: Callable[[], Any] = lambda: queues_beyond(engine.shard.ledger, topic, after, every) or None  # noqa: E731
    if topic.startswith("%"):
        look = lambda: view_beyond(engine, topic, after.get(0, 0)) or None  # noqa: E731
    found: list[Any] = engine.wait_for(look, wait_us).result() or []
    return {"queues": found}


# Producers and their sessions


def _rules(request: producers.CheckRules, kind: str | None = None) -> ProducerRules:
    exhausted = request.get("checks_exhausted")
    return ProducerRules(
        kind=kind,
        transaction_timeout_us=_microseconds(request.get("transaction_timeout")),
        check_interval_us=_microseconds(request.get("check_interval")),
        check_max=request.get("check_max"),
        exhausted_rollback=None if exhausted is None else exhausted == "rollback",
    )


@_answers(producers.ALTER)
def _alter_producers(engine: Engine, request: producers.Alter) -> producers.Altered:
    fields = [policies.FIELDS[name] for name in request.get("reset", [])]
    command = AlterProducers(request["group"], _rules(request, request.get("kind")), fields)
    with recorded(engine, producers.ALTER, request) as done:
        has = policies.described_values(engine.submit(command).result())
        done.ended = {"group": request["group"]} | {k: v for k, v in has.items() if v is not None}
    return cast(producers.Altered, done.ended)


_submits(
    producers.OPEN_SESSION,
    lambda request: OpenSession(
        request["group"],
        request["instance"],
        request.get("transactional", False),
        request.get("resume"),
        _rules(request["rules"]) if "rules" in request else None,
        request.get("process"),
    ),
    lambda session: {"session": session},
)


@_answers(producers.LIST)
def _list_producers(engine: Readable, _: Nothing) -> producers.Producers:
    listed: list[Any] = engine.look(lambda: producers_list(engine.shard.ledger)).result()
    return {"producers": [group | {"members": engine.listeners.count(group["group"])} for group in listed]}


# Consumer groups


def _subscription(request: groups.Subscribe) -> Subscribe:
    subscription = Subscription(
        topics=tuple(request["topics"]),
        tags=tuple(request.get("tags", ())),
        ordered=request.get("ordered", False),
        start=_start(request),
        max_attempts=request.get("max_attempts"),
        retry_backoff_us=_microseconds(request.get("retry_backoff")),
        retry_backoff_max_us=_microseconds(request.get("retry_backoff_max")),
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
        retry_backoff_us=_microseconds(request.get("retry_backoff")),
        retry_backoff_max_us=_microseconds(request.get("retry_backoff_max")),
        retry_delays_us=_delays_us(request),
        default_redelivery=request.get("default_redelivery", False),
    )


@_answers(groups.ALTER)
def _alter_group(engine: Engine, request: groups.Alter) -> groups.Subscription:
    command = _alteration(request)
    with recorded(engine, groups.ALTER, request) as done:
        done.ended = described(engine.submit(command).result(), rules_of(engine.settings))
    return cast(groups.Subscription, done.ended)


def _microseconds(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1e6)


@_answers(groups.SUBSCRIBE)
def _subscribe(engine: Engine, request: groups.Subscribe) -> groups.Subscribed:
    answer: groups.Subscribed = engine.submit(_subscription(request)).result()
    return {**answer, "lease_seconds": engine.settings.lease_seconds}


_submits(
    groups.JOIN,
    lambda request: Join(
        request["group"], request["instance"], request["process"], request.get("resume", False), request.get("keep", [])
    ),
)
_does(groups.FENCE, lambda request: Fence(request["group"], request["instance"]))
_looks(
    groups.MEMBERS,
    lambda shard, request: {"members": shard.ledger.groups.members(request["group"], shard.ledger.topics)},
)
_looks(groups.LIST, lambda shard, _: {"groups": shard.ledger.groups.describe(shard.ledger.topics, shard.ledger.rules)})


# Transactions


@_answers(transactions.LIST)
def _list_transactions(engine: Readable, request: transactions.List) -> transactions.Page:
    limit, older_us = request.get("limit", PAGE), _microseconds(request.get("older_than"))
    before_us = None if older_us is None else engine.clock.now_us() - older_us

    def look() -> list[Any]:
        return transactions_list(
            engine.shard.ledger,
            state=request.get("state"),
            group=request.get("group"),
            before_us=before_us,
            limit=limit,
            after=request.get("after", -1),
        )

    page: transactions.Page = _page("transactions", engine.look(look).result(), limit, lambda last: last["position"])
    return page


@_answers(transactions.SHOW)
def _show_transaction(engine: Readable, request: transactions.Show) -> transactions.Shown:
    return show_transaction(engine, transaction_id(request["id"]))


def _by_operator(request: transactions.Settle) -> End:
    outcome, ids = Outcome[request["outcome"].upper()], _ids(request["ids"])
    batch = pa.RecordBatch.from_arrays([ids, pa.array(np.full(len(ids), outcome, np.uint8))], schema=ENDING)
    return End(batch, np.zeros(len(ids), np.int64), DecidedBy.OPERATOR)


def _ids(printed: list[str]) -> pa.Array:
    return pa.array([bytes(transaction_id(text)) for text in printed], ID)


def _results(codes: Any) -> Results:
    return {"codes": [Code(code).name for code in codes.tolist()]}


_does(transactions.SETTLE, _by_operator, lambda ended: _results(ended.column("code").to_numpy()))
_does(transactions.RECHECK, lambda request: Recheck(_ids(request["ids"])), _results)


# Writers of numbered batches


_submits(
    writers.COMMIT,
    lambda request: CommitBatch(
        message_id(request["writer"]), request["batch"], _ids(request["transactions"]), request["session"]
    ),
)
_does(writers.FORGET, lambda request: ForgetWriter(message_id(request["writer"])))
_looks(writers.SHOW, lambda shard, request: {"batch": shard.ledger.writers.last(message_id(request["writer"]))})


@_answers(writers.LIST)
def _list_writers(engine: Readable, request: writers.List) -> writers.Page:
    limit, after = request.get("limit", PAGE), request.get("after", "")
    start = message_id(after) if after else b""
    found: list[Any] = engine.look(lambda: writers_list(engine.shard.ledger, start, limit)).result()
    listed = [writer | {"members": engine.listeners.count(writer["group"])} for writer in found]
    page: writers.Page = _page("writers", listed, limit, lambda last: last["writer"])
    return page


# Dead letters


@_answers(dead_letters.LIST)
def _list_dead_letters(engine: Readable, request: dead_letters.List) -> dead_letters.Page:
    limit, after = request.get("limit", PAGE), request.get("after")
    if after is not None and len(after) != 2:
        raise error(Code.BAD_REQUEST, "'after' must be the 'next' of the page before")

    def look() -> list[Any]:
        ledger = engine.shard.ledger
        return ledger.groups.dead_letters(request["group"], ledger.topics, limit, after)

    letters = engine.look(look).result()
    if letters:
        positions = np.array([letter["position"] for letter in letters], np.int64)
        stored, damaged = engine.log.salvage(positions, ["key", "tag", "message_id"])
        for row, (letter, content) in enumerate(zip(letters, stored.to_pylist(), strict=True)):
            damage = damaged.get(row)
            known = damage is None or damage.body_only
            identity = content["message_id"].hex() if known else None
            letter |= {"key": content["key"], "tag": content["tag"], "message_id": identity}
            letter["damaged"] = None if damage is None else str(damage)
    page: dead_letters.Page = _page("dead_letters", letters, limit, lambda last: [last["queue_id"], last["offset"]])
    return page


@_answers(dead_letters.SETTLE)
def _settle_dead_letters(engine: Engine, request: dead_letters.Settle) -> Results:
    def look() -> list[tuple[int, int]]:
        ledger = engine.shard.ledger
        if not request.get("all", False):
            items = request.get("items", [])
            return [(ledger.queue_id(item["topic"], item["queue"]), item["offset"]) for item in items]
        letters = ledger.groups.dead_letters(request["group"], ledger.topics, MAX_IDS)
        return [(letter["queue_id"], letter["offset"]) for letter in letters]

    chosen = np.array(engine.look(look).result(), np.int64).reshape(-1, 2)
    retry = request["act"] == "retry"
    damaged = damaged_places(engine, chosen) if retry else np.zeros(len(chosen), bool)
    codes = np.full(len(chosen), Code.DAMAGED, np.uint8)
    good = chosen[~damaged]
    with recorded(engine, dead_letters.SETTLE, request, items=named(engine, chosen)) as done:
        codes[~damaged] = engine.submit(SettleDead(request["group"], good[:, 0], good[:, 1], retry)).result()
        answer = _results(codes)
        done.ended = ending(answer)
    return answer


# Messages


@_answers(messages.LOOKUP)
def _lookup(engine: Readable, request: messages.Lookup) -> messages.Found:
    text, key = request.get("message_id"), request.get("key")
    if text is None and key is None:
        raise error(Code.BAD_REQUEST, "'message_id' or 'key' is missing")
    identity = None if text is None else message_id(text)
    return find_messages(engine, identity, key, request.get("topic"), request.get("limit", FOUND))


@_answers(messages.VIEW)
def _view(engine: Readable, request: messages.View) -> messages.Viewed:
    topic, text = request["topic"], request["id_or_key"]
    return {"message": view_message(engine, topic, message_id(text), text)}


# The record of acts


@_answers(acts.LIST)
def _list_acts(engine: Readable, request: acts.List) -> acts.Page:
    return recording.page(engine, request, PAGE)


@_answers(acts.VERIFY)
def _verify_acts(engine: Readable, _: Nothing) -> acts.Verified:
    return recording.verified(engine)
