"""The actions of ``wire.py``, one function each: JSON in, JSON out, over one engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np
import pyarrow as pa

from escrowmq.broker.reads.lookups import find_messages, show_transaction
from escrowmq.broker.reads.readable import Readable
from escrowmq.broker.requests import MAX_IDS, Fields, transaction_id
from escrowmq.broker.writer.engine import Engine
from escrowmq.errors import Code, error
from escrowmq.ledger.commands import (
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
from escrowmq.ledger.groups.subscriptions import IN_DOUBT
from escrowmq.ledger.listings import (
    producers_list,
    queue_offsets,
    queues_beyond,
    topics_list,
    transactions,
    writers_list,
)
from escrowmq.model import DecidedBy, Outcome, message_id
from escrowmq.schemas import ENDING, ID
from escrowmq.wire import PROTOCOL_VERSION, VIEWS

Json = dict[str, Any]

LONGEST_WAIT_MS = 60_000
"""Nobody is kept waiting longer, whatever is asked for; the client asks again."""
PAGE = 1000
MAX_PAGE = 10_000


def hello(engine: Readable, _: Fields) -> Json:
    """Who this broker is and what its limits are."""
    limits = {f.name: getattr(engine.settings, f.name) for f in dataclasses.fields(engine.settings)}
    return {
        "protocol": PROTOCOL_VERSION,
        "version": version("escrowmq"),
        "shard": engine.log.shard,
        "epoch": engine.log.epoch,
        "limits": {name: value for name, value in limits.items() if name.startswith("max_")},
    }


def health(engine: Engine, _: Fields) -> Json:
    """Whether it works; answered even when it does not."""
    failure = engine.shard.failure
    reason = failure.message if failure else "the disk is full: messages are refused" if engine.shard.full else ""
    return {"status": engine.status, "reason": reason}


def stats(engine: Engine, _: Fields) -> Json:
    """One number a metric; the names are those of ``metrics.py``."""
    clock = engine.clock
    numbers: Json = engine.look(lambda: engine.shard.ledger.stats(clock.now_us())).result()
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


def open_session(engine: Engine, fields: Fields) -> Json:
    """Begin a producer session."""
    resume = fields.integer("resume", None, most=(1 << 32) - 1)
    command = OpenSession(fields.text("group"), fields.text("instance"), fields.flag("transactional"), resume)
    return {"session": engine.submit(command).result()}


def list_topics(engine: Readable, _: Fields) -> Json:
    """All topics."""
    return {"topics": engine.look(lambda: topics_list(engine.shard.ledger)).result()}


def topic_offsets(engine: Readable, fields: Fields) -> Json:
    """Where the queues of a topic begin and end, and what became visible when; of a system view, its log positions."""
    topic, queue = fields.text("topic"), fields.integer("queue", None, most=(1 << 31) - 1)
    time_us = fields.integer("time_us", None)
    if topic in VIEWS:
        head, end = engine.look(lambda: (engine.log.first_position, engine.log.next_position)).result()
        return {"shard": engine.log.shard, "queues": [{"queue": 0, "head": head, "end": end}]}
    found = engine.look(lambda: queue_offsets(engine.shard.ledger, topic, queue, time_us)).result()
    return {"shard": engine.log.shard, "queues": found}


def wait_for_messages(engine: Readable, fields: Fields) -> Json:
    """Wait until a topic has messages at given offsets or later; empty when the time is over."""
    topic, every = fields.text("topic"), fields.flag("every")
    pairs = fields.list("after", list, ())
    if not all(len(pair) == 2 and all(type(n) is int and 0 <= n < 1 << 63 for n in pair) for pair in pairs):
        raise error(Code.BAD_REQUEST, "'after' must be a list of [queue, offset]")
    after = {pair[0]: pair[1] for pair in pairs}
    wait_us = min(fields.integer("wait_ms", 0), LONGEST_WAIT_MS) * 1000
    ready = engine.wait_for(lambda: queues_beyond(engine.shard.ledger, topic, after, every) or None, wait_us)
    return {"queues": ready.result() or []}


def create_topic(engine: Engine, fields: Fields) -> Json:
    """Make a topic, or give it more queues."""
    queues = fields.integer("queues", None, least=1, most=(1 << 31) - 1)
    answer: Json = engine.submit(CreateTopic(fields.text("name"), queues, fields.flag("may_exist"))).result()
    return answer


def list_producers(engine: Readable, _: Fields) -> Json:
    """All producer groups, with how many of each are connected."""
    groups = engine.look(lambda: producers_list(engine.shard.ledger)).result()
    return {"producers": [{**group, "members": engine.listeners.count(group["group"])} for group in groups]}


def subscribe(engine: Engine, fields: Fields) -> Json:
    """Make a consumer group, or join it."""
    first, most = fields.seconds("retry_backoff", None), fields.seconds("retry_backoff_max", None)
    subscription = Subscription(
        topics=tuple(fields.list("topics", str)),
        tags=tuple(fields.list("tags", str, ())),
        ordered=fields.flag("ordered"),
        start=_start(fields),
        max_attempts=fields.integer("max_attempts", None, least=1, most=1 << 30),
        retry_backoff_us=None if first is None else round(first * 1e6),
        retry_backoff_max_us=None if most is None else round(most * 1e6),
        in_doubt=fields.choice("in_doubt", IN_DOUBT, IN_DOUBT[0]),
    )
    answer: Json = engine.submit(Subscribe(fields.text("group"), subscription)).result()
    return answer


def _start(fields: Fields) -> str:
    """``earliest``, ``latest`` or microseconds since 1970."""
    start: str = fields.text("start", "earliest")
    if start not in ("earliest", "latest") and not (start.isascii() and start.isdigit() and len(start) < 19):
        raise error(Code.BAD_REQUEST, "'start' must be earliest, latest or microseconds since 1970")
    return start


def join_group(engine: Engine, fields: Fields) -> Json:
    """Be a named member of a consumer group."""
    keep = fields.list("keep", list, ())
    if not all(len(pair) == 2 and all(type(n) is int and 0 <= n < 1 << 63 for n in pair) for pair in keep):
        raise error(Code.BAD_REQUEST, "'keep' must be a list of [lease, end]")
    pairs = [(pair[0], pair[1]) for pair in keep]
    process, resume = fields.integer("process"), fields.flag("resume")
    answer: Json = engine.submit(Join(fields.text("group"), fields.text("instance"), process, resume, pairs)).result()
    return answer


def list_members(engine: Readable, fields: Fields) -> Json:
    """Who holds what of a consumer group."""
    group = fields.text("group")
    members = engine.look(lambda: engine.shard.ledger.groups.members(group, engine.shard.ledger.topics)).result()
    return {"members": members}


def fence_member(engine: Engine, fields: Fields) -> Json:
    """Give back to a consumer group what a silent member holds."""
    answer: Json = engine.submit(Fence(fields.text("group"), fields.text("instance"))).result()
    return answer


def list_groups(engine: Readable, _: Fields) -> Json:
    """All consumer groups, with where they stand."""

    def look() -> list[Json]:
        ledger = engine.shard.ledger
        return ledger.groups.describe(ledger.topics, engine.shard.time_us)

    return {"groups": engine.look(look).result()}


def list_transactions(engine: Readable, fields: Fields) -> Json:
    """Transactions in the order of their prepare, a page at a time."""
    limit = fields.integer("limit", PAGE, least=1, most=MAX_PAGE)
    state, group = fields.text("state", None), fields.text("group", None)
    after = fields.integer("after", -1, least=-1)
    older = fields.seconds("older_than", None)
    before_us = None if older is None else engine.clock.now_us() - round(older * 1e6)

    def look() -> list[Json]:
        ledger = engine.shard.ledger
        return transactions(ledger, state=state, group=group, before_us=before_us, limit=limit, after=after)

    found = engine.look(look).result()
    return {"transactions": found, **({"next": found[-1]["position"]} if len(found) == limit else {})}


def show(engine: Readable, fields: Fields) -> Json:
    """One transaction with its messages and its timeline."""
    return show_transaction(engine, transaction_id(fields.text("id")))


def settle_transactions(engine: Engine, fields: Fields) -> Json:
    """Decide transactions by an operator's hand."""
    outcome = Outcome[fields.choice("outcome", ("commit", "rollback")).upper()]
    ids = _ids(fields)
    batch = pa.RecordBatch.from_arrays([ids, pa.array(np.full(len(ids), outcome, np.uint8))], schema=ENDING)
    answer = engine.submit(End(batch, np.zeros(len(ids), np.int64), DecidedBy.OPERATOR)).result()
    return _codes(answer.column("code").to_numpy())


def recheck(engine: Engine, fields: Fields) -> Json:
    """Have producers asked anew."""
    return _codes(engine.submit(Recheck(_ids(fields))).result())


def _ids(fields: Fields, name: str = "ids") -> pa.Array:
    return pa.array([bytes(transaction_id(text)) for text in fields.list(name, str)], ID)


def _codes(codes: Any) -> Json:
    return {"codes": [Code(code).name for code in codes.tolist()]}


def commit_batch(engine: Engine, fields: Fields) -> Json:
    """Commit the transactions of one batch of a writer, once."""
    command = CommitBatch(
        message_id(fields.text("writer")),
        fields.integer("batch"),
        _ids(fields, "transactions"),
        fields.integer("session", least=1, most=(1 << 32) - 1),
    )
    answer: Json = engine.submit(command).result()
    return answer


def show_writer(engine: Readable, fields: Fields) -> Json:
    """The last decided batch of a writer."""
    writer = message_id(fields.text("writer"))
    return {"batch": engine.look(lambda: engine.shard.ledger.writers.last(writer)).result()}


def list_writers(engine: Readable, fields: Fields) -> Json:
    """Writers with their last batch, a page at a time."""
    limit, after = fields.integer("limit", PAGE, least=1, most=MAX_PAGE), fields.text("after", "")
    start = message_id(after) if after else b""
    found = engine.look(lambda: writers_list(engine.shard.ledger, start, limit)).result()
    listed = [{**writer, "members": engine.listeners.count(writer["group"])} for writer in found]
    return {"writers": listed, **({"next": found[-1]["writer"]} if len(found) == limit else {})}


def forget_writer(engine: Engine, fields: Fields) -> Json:
    """Forget a writer, with its producer group."""
    answer: Json = engine.submit(ForgetWriter(message_id(fields.text("writer")))).result()
    return answer


def list_dead_letters(engine: Readable, fields: Fields) -> Json:
    """Dead letters of a consumer group, a page at a time."""
    group, limit = fields.text("group"), fields.integer("limit", PAGE, least=1, most=MAX_PAGE)
    after = fields.list("after", int) if "after" in fields else None
    if after is not None and len(after) != 2:
        raise error(Code.BAD_REQUEST, "'after' must be the 'next' of the page before")

    def look() -> list[Json]:
        ledger = engine.shard.ledger
        return ledger.groups.dead_letters(group, ledger.topics, limit, after)

    letters = engine.look(look).result()
    if letters:
        stored = engine.log.read(np.array([letter["position"] for letter in letters], np.int64))
        columns = [stored.column(name).to_pylist() for name in ("key", "tag", "message_id")]
        for letter, key, tag, identity in zip(letters, *columns, strict=True):
            letter |= {"key": key, "tag": tag, "message_id": identity.hex()}
    last = [letters[-1]["queue_id"], letters[-1]["offset"]] if len(letters) == limit else None
    return {"dead_letters": letters, **({"next": last} if last else {})}


def settle_dead_letters(engine: Engine, fields: Fields) -> Json:
    """Deliver dead letters again, or discard them."""
    group = fields.text("group")
    retry = fields.choice("act", ("retry", "discard")) == "retry"
    items = [Fields(item) for item in fields.list("items", dict, ())]
    places = [(i.text("topic"), i.integer("queue", most=(1 << 31) - 1), i.integer("offset")) for i in items]

    def look() -> list[tuple[int, int]]:
        ledger = engine.shard.ledger
        if not fields.flag("all"):
            return [(ledger.queue_id(topic, queue), offset) for topic, queue, offset in places]
        letters = ledger.groups.dead_letters(group, ledger.topics, MAX_IDS)
        return [(letter["queue_id"], letter["offset"]) for letter in letters]

    chosen = np.array(engine.look(look).result(), np.int64).reshape(-1, 2)
    return _codes(engine.submit(SettleDead(group, chosen[:, 0], chosen[:, 1], retry)).result())


def lookup(engine: Readable, fields: Fields) -> Json:
    """Messages by id or key, half messages included."""
    text, key = fields.text("message_id", None), fields.text("key", None)
    if text is None and key is None:
        raise error(Code.BAD_REQUEST, "'message_id' or 'key' is missing")
    limit = fields.integer("limit", 100, least=1, most=PAGE)
    identity = None if text is None else message_id(text)
    return {"messages": find_messages(engine, identity, key, fields.text("topic", None), limit)}


ACTIONS: dict[str, Callable[[Engine, Fields], Json]] = {
    "hello": hello,
    "health": health,
    "stats": stats,
    "session.open": open_session,
    "topics.list": list_topics,
    "topics.create": create_topic,
    "topics.offsets": topic_offsets,
    "topics.wait": wait_for_messages,
    "producers.list": list_producers,
    "groups.subscribe": subscribe,
    "groups.list": list_groups,
    "groups.join": join_group,
    "groups.members": list_members,
    "groups.fence": fence_member,
    "transactions.list": list_transactions,
    "transactions.show": show,
    "transactions.settle": settle_transactions,
    "transactions.recheck": recheck,
    "writers.commit": commit_batch,
    "writers.show": show_writer,
    "writers.list": list_writers,
    "writers.forget": forget_writer,
    "dead_letters.list": list_dead_letters,
    "dead_letters.settle": settle_dead_letters,
    "lookup": lookup,
}
