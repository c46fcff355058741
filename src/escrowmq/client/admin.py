"""What operators ask and do. With several brokers everything is asked of all of them; each answer names its ``broker``."""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any

import pyarrow as pa

from escrowmq.client.links.patience import patient_action
from escrowmq.client.links.router import Router
from escrowmq.errors import DONE, Code, EscrowError, Misuse, Rejected, error
from escrowmq.message.ids import id_bytes
from escrowmq.message.names import check_name
from escrowmq.model import TransactionId, message_id
from escrowmq.wire import VIEWS, Link

Json = dict[str, Any]
_PAGE = 1000


class Admin:
    """Topics, groups, transactions, look-ups, dead letters, and settling by hand. ``timeout`` is seconds a call."""

    def __init__(self, router: Router, timeout: float = 30.0) -> None:
        self._router = router
        self._timeout = timeout

    # Topics and groups

    def topics(self) -> list[Json]:
        """All topics: name, queues [{queue, queue_id, head, end}], broker."""
        return self._collect("topics.list", {}, "topics")

    def create_topic(self, name: str, queues: int | None = None, *, may_exist: bool = False) -> list[Json]:
        """Make a topic at every broker, or give it more queues. Raises ALREADY_EXISTS unless ``may_exist``."""
        check_name(name, Code.BAD_TOPIC_NAME)
        request: Json = {"name": name, "may_exist": may_exist}
        if queues is not None:
            request["queues"] = queues
        return [self._ask(link, "topics.create", request) for link in self._router.links]

    def offsets(self, topic: str, queue: int | None = None, *, time: datetime | None = None) -> list[Json]:
        """Where each queue of a topic begins and ends: queue, head (the first offset stored), end (the next to come),
        shard, broker; with ``time`` also offset_at, the first offset that became visible then or later (``end`` if none).

        Brokers that do not have the topic are left out; UNKNOWN_TOPIC if none has it.
        """
        request = _given(topic=topic, queue=queue, time_us=_microseconds(time))
        found = self._where_known("topics.offsets", request, {Code.UNKNOWN_TOPIC})
        return [
            {**line, "shard": answer["shard"], "broker": link.address}
            for link, answer in found
            for line in answer["queues"]
        ]

    def groups(self) -> list[Json]:
        """All consumer groups: name, topics, tags, ordered, dead_letters, queues [...], broker."""
        return self._collect("groups.list", {}, "groups")

    def members(self, group: str) -> list[Json]:
        """Who holds what of a consumer group: member, instance (None: unnamed), epoch, fenced, joined_us, leases, messages,
        in_doubt (messages), held [{topic, queue, first, last, messages, in_doubt, attempt, deadline_us}], broker."""
        found = self._where_known("groups.members", {"group": group}, {Code.UNKNOWN_GROUP})
        return [{**member, "broker": link.address} for link, answer in found for member in answer["members"]]

    def fence(self, group: str, instance: str) -> int:
        """Give what a silent named member holds back to its group, and shut its process out; how many messages.

        Do it when the process is surely dead, or cannot harm any more: what it did is not undone, and its messages are
        delivered to others. Raises UNKNOWN_GROUP, NOT_FOUND without such a member.
        """
        unknown = {Code.UNKNOWN_GROUP, Code.NOT_FOUND}
        found = self._where_known("groups.fence", {"group": group, "instance": instance}, unknown)
        return sum(int(answer["messages"]) for _, answer in found)

    def _where_known(self, name: str, request: Json, unknown: set[Code]) -> list[tuple[Link, Json]]:
        """The answers of the brokers that know what is asked about; an error if none does."""
        found: list[tuple[Link, Json]] = []
        missing: Rejected | None = None
        for link in self._router.links:
            try:
                found.append((link, self._ask(link, name, request)))
            except Rejected as problem:
                if problem.code not in unknown:
                    raise
                missing = problem
        if not found and missing is not None:
            raise missing
        return found

    def producers(self) -> list[Json]:
        """All producer groups: group, transactional, members, open, parked, oldest_us, broker."""
        return self._collect("producers.list", {}, "producers")

    def writers(self, limit: int | None = None) -> list[Json]:
        """Writers of numbered batches (Spark queries, batch writes under a ``write_id``): writer (32 hex digits), group, batch
        (the last one), decided_us (when), used_us (when its producer group did anything), open, parked (transactions),
        members (connected), broker; at most ``limit`` a broker."""
        found: list[Json] = []
        for link in self._router.links:
            found.extend(self._pages(link, "writers.list", {}, "writers", limit))
        return found

    def forget_writer(self, writer: str) -> list[Json]:
        """Forget a writer (as listed, or its query id or ``write_id``) and its producer group at every broker: group,
        sessions (how many were forgotten), broker. Should it write again, its next batch counts whatever its number is.

        Raises NOT_FOUND, CONFLICT while it has undecided transactions.
        """
        found = self._where_known("writers.forget", {"writer": writer}, {Code.NOT_FOUND})
        return [{**answer, "broker": link.address} for link, answer in found]

    # Transactions

    def transactions(
        self,
        state: str | None = None,
        group: str | None = None,
        older_than: float | None = None,
        limit: int | None = None,
    ) -> list[Json]:
        """Transactions by state ("open", "parked", ...), producer group and age in seconds; at most ``limit`` a broker.

        ``group`` and ``instance`` are None of those whose producers are forgotten (all of them decided).
        """
        request = _given(state=state, group=group, older_than=older_than)
        found: list[Json] = []
        for link in self._router.links:
            found.extend(self._pages(link, "transactions.list", request, "transactions", limit))
        return found

    def transaction(self, transaction_id: TransactionId | str | bytes) -> Json:
        """One transaction, its messages (with ``body``) and its timeline. Raises UNKNOWN_TRANSACTION or WRONG_SHARD."""
        identity, link = self._place(transaction_id)
        answer = self._ask(link, "transactions.show", {"id": str(identity)})
        answer["messages"] = [_with_body(message) for message in answer.get("messages", ())]
        return answer

    def commit(self, transaction_id: TransactionId | str | bytes) -> Code:
        """Commit by an operator. Raises CONFLICT if it was rolled back."""
        return self._settle(transaction_id, "commit")

    def rollback(self, transaction_id: TransactionId | str | bytes) -> Code:
        """Roll back by an operator. Raises CONFLICT if it was committed."""
        return self._settle(transaction_id, "rollback")

    def recheck(self, transaction_id: TransactionId | str | bytes) -> Code:
        """Open a parked transaction again and ask about it anew. Raises TRANSACTION_DECIDED and so on."""
        identity, link = self._place(transaction_id)
        return _one(self._ask(link, "transactions.recheck", {"ids": [str(identity)]}))

    # Dead letters

    def dead_letters(self, group: str, limit: int | None = None) -> list[Json]:
        """The dead letters of a consumer group: topic, queue, offset, attempts, cause, dead_us, key, tag, message_id, broker."""
        found: list[Json] = []
        for link in self._router.links:
            found.extend(self._pages(link, "dead_letters.list", {"group": group}, "dead_letters", limit))
        return found

    def retry_dead_letters(self, group: str, items: Iterable[Json] | None = None) -> int:
        """Deliver dead letters again, attempts counted anew: all, or ``items`` of :meth:`dead_letters`. How many."""
        return self._settle_dead(group, items, "retry")

    def discard_dead_letters(self, group: str, items: Iterable[Json] | None = None) -> int:
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
    ) -> list[Json]:
        """Messages by id or by key, half messages included: all columns, ``state`` and ``body`` (bytes)."""
        if (message_id is None) == (key is None):
            raise Misuse(Code.BAD_ARGUMENT, "look up by message_id or by key")
        identity = None if message_id is None else _printed(message_id)
        request = _given(message_id=identity, key=key, topic=topic, limit=limit)
        return [_with_body(message) for message in self._collect("lookup", request, "messages")]

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
        request: Json = {"source": source, "start": start, "end": end, "max_rows": max_rows, "columns": columns}
        request |= _given(tags=None if tags is None else list(tags), key=key, group=group)
        request |= _given(stored_from_us=_microseconds(stored_from), stored_until_us=_microseconds(stored_until))
        wanted = [
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

    def health(self) -> list[Json]:
        """Of each broker: status ("ok", "full", "stopped", "stopping", or "unreachable"), reason, broker."""
        answers = []
        for link in self._router.links:
            try:
                answers.append({**link.action("health", {}, self._timeout), "broker": link.address})
            except EscrowError as problem:
                answers.append({"status": "unreachable", "reason": str(problem), "broker": link.address})
        return answers

    def stats(self) -> list[Json]:
        """The numbers of each broker, one a metric, and ``broker``."""
        return [{**self._ask(link, "stats", {}), "broker": link.address} for link in self._router.links]

    def hello(self) -> list[Json]:
        """What each broker says of itself: protocol, version, shard, epoch, limits, and ``broker``."""
        return [{**self._ask(link, "hello", {}), "broker": link.address} for link in self._router.links]

    # Helpers

    def _ask(self, link: Link, name: str, request: Json) -> Json:
        return patient_action(link, name, request, time.monotonic() + self._timeout)

    def _collect(self, name: str, request: Json, what: str) -> list[Json]:
        found: list[Json] = []
        for link in self._router.links:
            found.extend({**item, "broker": link.address} for item in self._ask(link, name, request).get(what, ()))
        return found

    def _pages(self, link: Link, name: str, request: Json, what: str, limit: int | None) -> list[Json]:
        found: list[Json] = []
        after: Any = None
        while limit is None or len(found) < limit:
            page = _PAGE if limit is None else min(_PAGE, limit - len(found))
            answer = self._ask(link, name, {**request, **_given(limit=page, after=after)})
            found.extend({**item, "broker": link.address} for item in answer.get(what, ()))
            after = answer.get("next")
            if after is None:
                break
        return found

    def _place(self, transaction_id: TransactionId | str | bytes) -> tuple[TransactionId, Link]:
        identity = TransactionId.from_bytes(id_bytes(transaction_id))
        return identity, self._router.links[self._router.of_shard(identity.shard, self._timeout)]

    def _settle(self, transaction_id: TransactionId | str | bytes, outcome: str) -> Code:
        identity, link = self._place(transaction_id)
        return _one(self._ask(link, "transactions.settle", {"ids": [str(identity)], "outcome": outcome}))

    def _settle_dead(self, group: str, items: Iterable[Json] | None, act: str) -> int:
        chosen = None if items is None else list(items)
        done = 0
        for link in self._router.links:
            request: Json = {"group": group, "act": act}
            if chosen is None:
                request["all"] = True
            else:
                mine = [item for item in chosen if item.get("broker", link.address) == link.address]
                if not mine:
                    continue
                request["items"] = [{name: item[name] for name in ("topic", "queue", "offset")} for item in mine]
            codes = self._ask(link, "dead_letters.settle", request).get("codes", [])
            done += codes.count(Code.OK.name)
        return done

    def _queues(self, link: Link, source: str, queue: int | None) -> list[int]:
        if source in VIEWS:
            return [0]
        if queue is not None or source.startswith("%"):
            return [queue or 0]
        topics = self._ask(link, "topics.list", {}).get("topics", [])
        return [entry["queue"] for topic in topics if topic["name"] == source for entry in topic["queues"]]


def _given(**values: Any) -> Json:
    return {name: value for name, value in values.items() if value is not None}


def _microseconds(time: datetime | None) -> int | None:
    return None if time is None else round(time.timestamp() * 1e6)


def _printed(identity: str | bytes | uuid.UUID) -> str:
    return message_id(identity).hex()


def _with_body(message: Json) -> Json:
    if (encoded := message.pop("body_base64", None)) is not None:
        message["body"] = base64.b64decode(encoded)
    return message


def _one(answer: Json) -> Code:
    code = Code[answer["codes"][0]]
    if code not in DONE:
        raise error(code)
    return code
