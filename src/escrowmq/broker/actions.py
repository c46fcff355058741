"""The actions of :mod:`escrowmq.wire.actions`, one function each, over one engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from escrowmq.broker.reads.lookups import find_messages, show_transaction
from escrowmq.broker.reads.readable import HoldsLedger, Readable
from escrowmq.broker.requests import MAX_IDS, checked, transaction_id
from escrowmq.broker.writer.engine import Engine
from escrowmq.errors import Code, error
from escrowmq.ledger.commands import (
    Command,
    CommitBatch,
    CreateTopic,
    End,
    Fence,
    ForgetWriter,
    Join,
    OpenSession,
    Recheck,
    SettleDead,
    Subscribe,
    Subscription,
)
from escrowmq.ledger.listings import producers_list, queue_offsets, queues_beyond, topics_list, writers_list
from escrowmq.ledger.listings import transactions as transactions_list
from escrowmq.model import DecidedBy, Outcome, message_id
from escrowmq.schemas import ENDING, ID
from escrowmq.settings import nearest
from escrowmq.wire import PROTOCOL_VERSION, VIEWS, Action, Json
from escrowmq.wire.actions import brokers, dead_letters, groups, messages, producers, topics, transactions, writers
from escrowmq.wire.actions.action import Answer, Nothing, Request, Results
from escrowmq.wire.actions.table import ACTIONS

AnyEngine = TypeVar("AnyEngine", Engine, Readable)

LONGEST_WAIT_MS = 60_000
"""No call waits longer, whatever it asks for; the client asks again."""
PAGE = 1000
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
        "version": version("escrowmq"),
        "shard": engine.log.shard,
        "epoch": engine.log.epoch,
        "limits": {name: settings[name] for name in settings if name.startswith("max_") or name == "half_retention"},
    }


@_answers(brokers.HEALTH)
def _health(engine: Readable, _: Nothing) -> brokers.Health:
    failure = engine.shard.failure
    reason = failure.message if failure else "the disk is full: messages are refused" if engine.shard.full else ""
    return {"status": engine.status, "reason": reason}


@_answers(brokers.STATS)
def _stats(engine: Engine, _: Nothing) -> dict[str, float]:
    """The names are those of ``serving/metrics.py``."""
    numbers: dict[str, float] = engine.look(lambda: engine.shard.ledger.stats(engine.clock.now_us())).result()
    requests, size = engine.waiting
    return {
        **numbers,
        "checks_unanswered": engine.listeners.unanswered,
        "waiting_requests": requests,
        "waiting_bytes": size,
        "parked_receives": engine.waiting_receives,
        "rounds_total": engine.rounds,
        "log_bytes_total": engine.log.bytes_written,
        "log_position": engine.log.next_position,
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
        if topic in VIEWS:
            return [{"queue": 0, "head": engine.log.first_position, "end": engine.log.next_position}]
        return queue_offsets(engine.shard.ledger, topic, queue, time_us)

    return {"shard": engine.log.shard, "queues": engine.look(look).result()}


@_answers(topics.WAIT)
def _wait_for_messages(engine: Readable, request: topics.Wait) -> topics.Ready:
    topic, after, every = request["topic"], dict(request.get("after", ())), request.get("every", False)
    wait_us = min(request.get("wait_ms", 0), LONGEST_WAIT_MS) * 1000
    ready = engine.wait_for(lambda: queues_beyond(engine.shard.ledger, topic, after, every) or None, wait_us)
    found: list[Any] = ready.result() or []
    return {"queues": found}


# Producers and their sessions


_submits(
    producers.OPEN_SESSION,
    lambda request: OpenSession(
        request["group"], request["instance"], request.get("transactional", False), request.get("resume")
    ),
    lambda session: {"session": session},
)


@_answers(producers.LIST)
def _list_producers(engine: Readable, _: Nothing) -> producers.Producers:
    listed: list[Any] = engine.look(lambda: producers_list(engine.shard.ledger)).result()
    return {"producers": [group | {"members": engine.listeners.count(group["group"])} for group in listed]}


# Consumer groups


def _subscription(request: groups.Subscribe) -> Subscribe:
    start = request.get("start", "earliest")
    if start not in ("earliest", "latest") and not (start.isascii() and start.isdigit() and len(start) < 19):
        raise error(Code.BAD_REQUEST, "'start' must be earliest, latest or microseconds since 1970")
    subscription = Subscription(
        topics=tuple(request["topics"]),
        tags=tuple(request.get("tags", ())),
        ordered=request.get("ordered", False),
        start=start,
        max_attempts=request.get("max_attempts"),
        retry_backoff_us=_microseconds(request.get("retry_backoff")),
        retry_backoff_max_us=_microseconds(request.get("retry_backoff_max")),
        in_doubt=request.get("in_doubt", "redeliver"),
    )
    return Subscribe(request["group"], subscription)


def _microseconds(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1e6)


_submits(groups.SUBSCRIBE, _subscription)
_submits(
    groups.JOIN,
    lambda request: Join(
        request["group"], request["instance"], request["process"], request.get("resume", False), request.get("keep", [])
    ),
)
_submits(groups.FENCE, lambda request: Fence(request["group"], request["instance"]))
_looks(
    groups.MEMBERS,
    lambda shard, request: {"members": shard.ledger.groups.members(request["group"], shard.ledger.topics)},
)
_looks(groups.LIST, lambda shard, _: {"groups": shard.ledger.groups.describe(shard.ledger.topics, shard.time_us)})


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


_submits(transactions.SETTLE, _by_operator, lambda ended: _results(ended.column("code").to_numpy()))
_submits(transactions.RECHECK, lambda request: Recheck(_ids(request["ids"])), _results)


# Writers of numbered batches


_submits(
    writers.COMMIT,
    lambda request: CommitBatch(
        message_id(request["writer"]), request["batch"], _ids(request["transactions"]), request["session"]
    ),
)
_submits(writers.FORGET, lambda request: ForgetWriter(message_id(request["writer"])))
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
        stored = engine.log.read(np.array([letter["position"] for letter in letters], np.int64))
        columns = [stored.column(name).to_pylist() for name in ("key", "tag", "message_id")]
        for letter, key, tag, identity in zip(letters, *columns, strict=True):
            letter |= {"key": key, "tag": tag, "message_id": identity.hex()}
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
    return _results(engine.submit(SettleDead(request["group"], chosen[:, 0], chosen[:, 1], retry)).result())


# Messages


@_answers(messages.LOOKUP)
def _lookup(engine: Readable, request: messages.Lookup) -> messages.Found:
    text, key = request.get("message_id"), request.get("key")
    if text is None and key is None:
        raise error(Code.BAD_REQUEST, "'message_id' or 'key' is missing")
    identity = None if text is None else message_id(text)
    return {"messages": find_messages(engine, identity, key, request.get("topic"), request.get("limit", FOUND))}
