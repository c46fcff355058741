"""The admin API: topics, groups, transactions, look-ups and dead letters. With several brokers everything is asked
of all of them; each answer names its ``broker``.

Entries of listings are dicts: the fields of :mod:`escrowmq.wire.actions` (``docs/protocol.md``) and the broker's address.
"""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Literal, TypedDict, cast

import pyarrow as pa

from escrowmq.client.links.patience import patient_action
from escrowmq.client.links.router import Router
from escrowmq.errors import DONE, Code, EscrowError, Misuse, Rejected, error
from escrowmq.message.ids import id_bytes
from escrowmq.message.names import check_name
from escrowmq.model import TransactionId, message_id
from escrowmq.wire import VIEWS, Call, Link, ReadRequest, ask
from escrowmq.wire.actions import brokers, dead_letters, groups, messages, producers, topics, transactions, writers
from escrowmq.wire.actions.action import Answer, Request, Results
from escrowmq.wire.actions.topics import Created

_PAGE = 1000


class AtBroker(TypedDict):
    """Of which broker something is said."""

    broker: Annotated[str, "address of the broker"]


class Topic(topics.Topic, AtBroker):
    """One topic at one broker."""


class Queue(topics.QueueOffsets, AtBroker):
    """Where one queue of a topic begins and ends."""

    shard: Annotated[int, "number of the broker's shard"]


class Group(groups.Group, AtBroker):
    """One consumer group at one broker."""


class Member(groups.Member, AtBroker):
    """One member of a consumer group at one broker."""


class Producer(producers.Producer, AtBroker):
    """One producer group at one broker."""


class Writer(writers.WriterListed, AtBroker):
    """One writer of numbered batches at one broker."""


class ForgottenWriter(writers.Forgotten, AtBroker):
    """What one broker has forgotten."""


class Transaction(transactions.Transaction, AtBroker):
    """One transaction of a listing."""


class Message(messages.MessageFields):
    """A stored message."""

    body: bytes


class FoundMessage(Message, messages.Standing, AtBroker):
    """A message that was looked up."""


class TransactionDetails(transactions.Details):
    """One transaction in full."""

    messages: list[Message]


class DeadLetter(dead_letters.DeadLetter, AtBroker):
    """One dead letter at one broker."""


class Health(brokers.Health, AtBroker):
    """Whether one broker works."""


class Hello(brokers.Hello, AtBroker):
    """What one broker says of itself."""


class Admin:
    """Topics, groups, transactions, look-ups, dead letters, and settling by hand. ``timeout`` is seconds per call."""

    def __init__(self, router: Router, timeout: float = 30.0) -> None:
        self._router = router
        self._timeout = timeout

    # Topics and groups

    def topics(self) -> list[Topic]:
        """All topics with their queues."""
        return [{**topic, **at} for at, answer in self._each(topics.LIST({})) for topic in answer["topics"]]

    def create_topic(self, name: str, queues: int | None = None, *, may_exist: bool = False) -> list[Created]:
        """Make a topic at every broker, or give it more queues. Raises ALREADY_EXISTS unless ``may_exist``."""
        check_name(name, Code.BAD_TOPIC_NAME)
        request: topics.Create = {"name": name, "may_exist": may_exist}
        if queues is not None:
            request["queues"] = queues
        return [made for _, made in self._each(topics.CREATE(request))]

    def offsets(self, topic: str, queue: int | None = None, *, time: datetime | None = None) -> list[Queue]:
        """Where each queue of a topic begins and ends; with ``time`` also the first offset that became visible then or later.

        Brokers that do not have the topic are left out; UNKNOWN_TOPIC if none has it.
        """
        call = topics.OFFSETS(_given(topics.AskOffsets, topic=topic, queue=queue, time_us=_microseconds(time)))
        found = self._each(call, Code.UNKNOWN_TOPIC)
        return [{**line, "shard": answer["shard"], **at} for at, answer in found for line in answer["queues"]]

    def groups(self) -> list[Group]:
        """All consumer groups, with where they stand in each queue."""
        return [{**group, **at} for at, answer in self._each(groups.LIST({})) for group in answer["groups"]]

    def members(self, group: str) -> list[Member]:
        """Which member of a consumer group holds what, in doubt or not. Raises UNKNOWN_GROUP."""
        found = self._each(groups.MEMBERS({"group": group}), Code.UNKNOWN_GROUP)
        return [{**member, **at} for at, answer in found for member in answer["members"]]

    def fence(self, group: str, instance: str) -> int:
        """Give what a silent named member holds back to its group, and shut its process out; how many messages.

        Do it when the process is surely dead, or cannot harm any more: what it did is not undone, and its messages are
        delivered to others. Raises UNKNOWN_GROUP, NOT_FOUND without such a member.
        """
        call = groups.FENCE({"group": group, "instance": instance})
        found = self._each(call, Code.UNKNOWN_GROUP, Code.NOT_FOUND)
        return sum(answer["messages"] for _, answer in found)

    def producers(self) -> list[Producer]:
        """All producer groups, with what they have undecided."""
        return [{**entry, **at} for at, answer in self._each(producers.LIST({})) for entry in answer["producers"]]

    def writers(self, limit: int | None = None) -> list[Writer]:
        """Writers of numbered batches (Spark queries, batch writes under a ``write_id``); at most ``limit`` per broker."""
        return self._pages(writers.LIST({}), "writers", limit)

    def forget_writer(self, writer: str) -> list[ForgottenWriter]:
        """Forget a writer (as listed, or its query id or ``write_id``) and its producer group at every broker. Should it write
        again, its next batch counts whatever its number is.

        Raises NOT_FOUND, CONFLICT while it has undecided transactions.
        """
        found = self._each(writers.FORGET({"writer": writer}), Code.NOT_FOUND)
        return [{**answer, **at} for at, answer in found]

    # Transactions

    def transactions(
        self,
        state: str | None = None,
        group: str | None = None,
        older_than: float | None = None,
        limit: int | None = None,
    ) -> list[Transaction]:
        """Transactions by state ("open", "parked", ...), producer group and age in seconds; at most ``limit`` per broker."""
        request = _given(transactions.List, state=state, group=group, older_than=older_than)
        return self._pages(transactions.LIST(request), "transactions", limit)

    def transaction(self, transaction_id: TransactionId | str | bytes) -> TransactionDetails:
        """One transaction, its messages (with ``body``) and its timeline. Raises UNKNOWN_TRANSACTION or WRONG_SHARD."""
        identity, link = self._home(transaction_id)
        answer: Any = self._ask(link, transactions.SHOW({"id": str(identity)}))
        found: TransactionDetails = answer | {"messages": [_with_body(message) for message in answer["messages"]]}
        return found

    def commit(self, transaction_id: TransactionId | str | bytes) -> Code:
        """Commit by an operator. Raises CONFLICT if it was rolled back."""
        return self._settle(transaction_id, "commit")

    def rollback(self, transaction_id: TransactionId | str | bytes) -> Code:
        """Roll back by an operator. Raises CONFLICT if it was committed."""
        return self._settle(transaction_id, "rollback")

    def recheck(self, transaction_id: TransactionId | str | bytes) -> Code:
        """Open a parked transaction again and ask about it anew. Raises TRANSACTION_DECIDED and so on."""
        identity, link = self._home(transaction_id)
        return _single(self._ask(link, transactions.RECHECK({"ids": [str(identity)]})))

    # Dead letters

    def dead_letters(self, group: str, limit: int | None = None) -> list[DeadLetter]:
        """The dead letters of a consumer group; at most ``limit`` per broker."""
        return self._pages(dead_letters.LIST({"group": group}), "dead_letters", limit)

    def retry_dead_letters(self, group: str, items: Iterable[Mapping[str, Any]] | None = None) -> int:
        """Deliver dead letters again, attempts counted anew: all, or ``items`` of :meth:`dead_letters`. How many."""
        return self._settle_dead(group, items, "retry")

    def discard_dead_letters(self, group: str, items: Iterable[Mapping[str, Any]] | None = None) -> int:
        """Settle dead letters for good: all, or ``items`` of :meth:`dead_letters`. How many."""
        return self._settle_dead(group, items, "discard")

    # Looking things up

    def lookup(
        self,
        *,
        message_id: str | bytes | uuid.UUID | None = None,
        key: str | None = None,
        topic: str | None = None,
        limit: int | None = None,
    ) -> list[FoundMessage]:
        """Messages by id or by key, half messages included, with their state and ``body`` (bytes)."""
        if (message_id is None) == (key is None):
            raise Misuse(Code.BAD_ARGUMENT, "look up by message_id or by key")
        identity = None if message_id is None else _printed(message_id)
        request = _given(messages.Lookup, message_id=identity, key=key, topic=topic, limit=limit)
        found = self._each(messages.LOOKUP(request))
        return [_with_body({**message, **at}) for at, answer in found for message in answer["messages"]]

    def read(
        self,
        source: str,
        queue: int | None = None,
        start: int = 0,
        end: int | None = None,
        columns: list[str] | None = None,
        max_rows: int | None = None,
        *,
        tags: Sequence[str] | None = None,
        key: str | None = None,
        stored_from: datetime | None = None,
        stored_until: datetime | None = None,
        group: str | None = None,
    ) -> pa.RecordBatchReader:
        """Browse a topic (all queues, or one from offset ``start`` to before ``end``), a system view (``%half``, ``%op``,
        ``%acks``; from log position ``start`` to before ``end``), or a group's dead letters (``%dead-letters.GROUP``).

        Nothing is leased or changed. Batches stream; ``.read_all()`` makes a table. ``max_rows`` counts per queue. The
        broker sends only rows with one of ``tags``, with ``key``, stored (decided, acknowledged) from one time to before
        another; of ``%acks`` those of consumer group ``group``.
        """
        request = _given(
            ReadRequest,
            source=source,
            start=start,
            end=end,
            max_rows=max_rows,
            columns=columns,
            tags=None if tags is None else list(tags),
            key=key,
            group=group,
            stored_from_us=_microseconds(stored_from),
            stored_until_us=_microseconds(stored_until),
        )
        wanted: list[tuple[Link, ReadRequest]] = [
            (link, {**request, "queue": number})
            for link in self._router.links
            for number in self._queues(link, source, queue)
        ]
        if not wanted:
            raise Rejected(Code.UNKNOWN_TOPIC, f"no topic {source!r}")
        first = wanted[0][0].read(wanted[0][1])

        def chain() -> Iterator[pa.RecordBatch]:
            yield from first
            for link, one in wanted[1:]:
                yield from link.read(one)

        return pa.RecordBatchReader.from_batches(first.schema, chain())

    # Health

    def health(self) -> list[Health]:
        """Of each broker: status ("ok", "full", "stopped", "stopping", or "unreachable") and reason."""
        answers: list[Health] = []
        for link in self._router.links:
            try:
                answers.append({**ask(link, brokers.HEALTH({}), self._timeout), "broker": link.address})
            except EscrowError as problem:
                answers.append({"status": "unreachable", "reason": str(problem), "broker": link.address})
        return answers

    def stats(self) -> list[dict[str, float | str]]:
        """The numbers of each broker, one per metric, and ``broker``."""
        return [{**numbers, "broker": at["broker"]} for at, numbers in self._each(brokers.STATS({}))]

    def hello(self) -> list[Hello]:
        """What each broker says of itself: versions, shard, epoch, limits."""
        return [{**answer, **at} for at, answer in self._each(brokers.HELLO({}))]

    # Asking

    def _ask(self, link: Link, call: Call[Answer]) -> Answer:
        return patient_action(link, call, time.monotonic() + self._timeout)

    def _each(self, call: Call[Answer], *unknown: Code) -> list[tuple[AtBroker, Answer]]:
        """The answers of all brokers, without those that refuse with a code of ``unknown``; an error if all of them do."""
        found: list[tuple[AtBroker, Answer]] = []
        missing: Rejected | None = None
        for link in self._router.links:
            try:
                found.append(({"broker": link.address}, self._ask(link, call)))
            except Rejected as problem:
                if problem.code not in unknown:
                    raise
                missing = problem
        if not found and missing is not None:
            raise missing
        return found

    def _pages(self, call: Call[Any], what: str, limit: int | None) -> list[Any]:
        """Entries ``what`` of all brokers, page after page, at most ``limit`` per broker."""
        listed: list[Any] = []
        for link in self._router.links:
            found: list[Any] = []
            after: Any = None
            while limit is None or len(found) < limit:
                page = _PAGE if limit is None else min(_PAGE, limit - len(found))
                answer: Any = self._ask(
                    link, Call(call.name, {**call.request, **_given(dict, limit=page, after=after)})
                )
                found.extend({**item, "broker": link.address} for item in answer[what])
                after = answer.get("next")
                if after is None:
                    break
            listed.extend(found)
        return listed

    def _home(self, transaction_id: TransactionId | str | bytes) -> tuple[TransactionId, Link]:
        """A transaction's id, and the broker that has it."""
        identity = TransactionId.from_bytes(id_bytes(transaction_id))
        return identity, self._router.links[self._router.of_shard(identity.shard, self._timeout)]

    def _settle(self, transaction_id: TransactionId | str | bytes, outcome: Literal["commit", "rollback"]) -> Code:
        identity, link = self._home(transaction_id)
        return _single(self._ask(link, transactions.SETTLE({"ids": [str(identity)], "outcome": outcome})))

    def _settle_dead(
        self, group: str, items: Iterable[Mapping[str, Any]] | None, act: Literal["retry", "discard"]
    ) -> int:
        chosen = None if items is None else list(items)
        done = 0
        for link in self._router.links:
            request: dead_letters.Settle = {"group": group, "act": act}
            if chosen is None:
                request["all"] = True
            else:
                mine = [item for item in chosen if item.get("broker", link.address) == link.address]
                if not mine:
                    continue
                request["items"] = [
                    {"topic": item["topic"], "queue": item["queue"], "offset": item["offset"]} for item in mine
                ]
            done += self._ask(link, dead_letters.SETTLE(request))["codes"].count(Code.OK.name)
        return done

    def _queues(self, link: Link, source: str, queue: int | None) -> list[int]:
        if source in VIEWS:
            return [0]
        if queue is not None or source.startswith("%"):
            return [queue or 0]
        listed = self._ask(link, topics.LIST({}))["topics"]
        return [entry["queue"] for topic in listed if topic["name"] == source for entry in topic["queues"]]


def _given(shape: type[Request], **values: Any) -> Request:
    """The fields of a request that are not None."""
    return cast(Request, {name: value for name, value in values.items() if value is not None})


def _microseconds(time: datetime | None) -> int | None:
    return None if time is None else round(time.timestamp() * 1e6)


def _printed(identity: str | bytes | uuid.UUID) -> str:
    return message_id(identity).hex()


def _with_body(message: Any) -> Any:
    """A message with its body as bytes."""
    message["body"] = base64.b64decode(message.pop("body_base64"))
    return message


def _single(answer: Results) -> Code:
    """The one result of a call about one id; raises unless it is done."""
    code = Code[answer["codes"][0]]
    if code not in DONE:
        raise error(code)
    return code
