"""The admin API: topics, groups, transactions, look-ups and dead letters. With several brokers everything is asked
of all of them; each answer names its ``broker``, and ``missing`` of a listing names those that are away.

Entries of listings are dicts: the fields of :mod:`escrowmq.wire.actions` (``docs/protocol.md``) and the broker's address.
"""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Literal, Unpack, cast

import pyarrow as pa

from escrowmq.client.altering import GroupChanges, ProducersChanges, group_request, producers_request, signed
from escrowmq.client.entries import (
    Act,
    AlteredGroup,
    AlteredProducers,
    AtBroker,
    DeadLetter,
    ForgottenWriter,
    FoundMessage,
    Group,
    Health,
    Hello,
    Member,
    Producer,
    Queue,
    Topic,
    Transaction,
    TransactionDetails,
    VerifiedActs,
    Writer,
)
from escrowmq.client.links.answers import Count, Listing, away
from escrowmq.client.links.presence import Missing
from escrowmq.client.links.router import Router
from escrowmq.errors import DONE, Code, EscrowError, Misuse, Rejected, error
from escrowmq.message.ids import id_bytes
from escrowmq.message.names import check_name
from escrowmq.model import TransactionId, message_id
from escrowmq.wire import VIEWS, Call, Link, ReadRequest, ask
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
from escrowmq.wire.actions.action import Answer, Request, Results
from escrowmq.wire.actions.topics import Created
from escrowmq.wire.values import MAX_PAGE

_PAGE = 1000


class Admin:
    """Topics, groups, transactions, look-ups, dead letters, and settling by hand. ``timeout`` is seconds per call.

    What changes something that others have done is recorded by the broker before it is done, with the user and the host as the operating
    system names them, and ``why``; what cannot be recorded is not done. See :meth:`acts`.
    """

    def __init__(self, router: Router, timeout: float = 30.0) -> None:
        self._router = router
        self._timeout = timeout

    # Topics and groups

    def topics(self) -> Listing[Topic]:
        """All topics with their queues."""
        return self._rows(topics.LIST({}), lambda answer: answer["topics"])

    def create_topic(self, name: str, queues: int | None = None, *, may_exist: bool = False) -> Listing[Created]:
        """Make a topic at every broker, or give it more queues. Raises ALREADY_EXISTS unless ``may_exist``."""
        check_name(name, Code.BAD_TOPIC_NAME)
        request: topics.Create = {"name": name, "may_exist": may_exist}
        if queues is not None:
            request["queues"] = queues
        found, missing = self._each(topics.CREATE(request))
        return Listing((made for _, made in found), missing)

    def offsets(self, topic: str, queue: int | None = None, *, time: datetime | None = None) -> Listing[Queue]:
        """Where each queue of a topic begins and ends; with ``time`` also the first offset that became visible then or later.

        Brokers that do not have the topic are left out; UNKNOWN_TOPIC if none has it.
        """
        call = topics.OFFSETS(_given(topics.AskOffsets, topic=topic, queue=queue, time_us=_microseconds(time)))
        lines = lambda answer: ({**line, "shard": answer["shard"]} for line in answer["queues"])  # noqa: E731
        return self._rows(call, lines, Code.UNKNOWN_TOPIC)

    def groups(self) -> Listing[Group]:
        """All consumer groups, with where they stand in each queue."""
        return self._rows(groups.LIST({}), lambda answer: answer["groups"])

    def alter_group(
        self, group: str, *, why: str | None = None, **changes: Unpack[GroupChanges]
    ) -> Listing[AlteredGroup]:
        """Give a consumer group another subscription, at every broker; what is not given stays as it is. What it is now.

        ``tags="*"`` is all; they choose among what the group has not passed over yet. It begins at ``start`` (``"earliest"``) in
        topics that are new to it; in one that it had before it goes on where it was. What it holds of a topic that
        it leaves can be settled. ``redelivery`` as for a consumer, or ``"broker"``: the broker's settings. Consumers that run get
        what the new subscription chooses; those that start must name it.

        Raises UNKNOWN_GROUP, UNKNOWN_TOPIC, BAD_REQUEST; CONFLICT for ``ordered`` or ``in_doubt`` while something is leased.
        """
        request = signed(group_request(group, changes), why)
        return self._rows(groups.ALTER(request), lambda altered: [altered], Code.UNKNOWN_GROUP)

    def members(self, group: str) -> Listing[Member]:
        """Which member of a consumer group holds what, in doubt or not. Raises UNKNOWN_GROUP."""
        return self._rows(groups.MEMBERS({"group": group}), lambda answer: answer["members"], Code.UNKNOWN_GROUP)

    def fence(self, group: str, instance: str, *, why: str | None = None) -> Count:
        """Give what a silent named member holds back to its group, and shut its process out; how many messages.

        Do it when the process is surely dead, or cannot harm any more: what it did is not undone, and its messages are
        delivered to others. Raises UNKNOWN_GROUP, NOT_FOUND without such a member.
        """
        call = groups.FENCE(signed(groups.FenceMember(group=group, instance=instance), why))
        found, missing = self._each(call, Code.UNKNOWN_GROUP, Code.NOT_FOUND)
        return Count(sum(answer["messages"] for _, answer in found), missing)

    def producers(self) -> Listing[Producer]:
        """All producer groups, with what they have undecided."""
        return self._rows(producers.LIST({}), lambda answer: answer["producers"])

    def alter_producers(
        self, group: str, *, why: str | None = None, **changes: Unpack[ProducersChanges]
    ) -> Listing[AlteredProducers]:
        """Give a producer group rules of its own, at every broker; it is made if it does not exist. What is not given stays as it
        is, what ``reset`` names goes back to the broker's. They hold for all that is undecided from now on.

        ``kind="plain"`` puts a group right that somebody prepared under by mistake. Raises BAD_GROUP_NAME, BAD_REQUEST,
        BAD_DELAY for a time over ``half_retention``. The rules that the group has of its own now.
        """
        check_name(group, Code.BAD_GROUP_NAME)
        request = signed(producers_request(group, changes), why)
        return self._rows(producers.ALTER(request), lambda made: [made])

    def writers(self, limit: int | None = None) -> Listing[Writer]:
        """Writers of numbered batches (Spark queries, batch writes under a ``write_id``); at most ``limit`` per broker."""
        return self._pages(writers.LIST({}), "writers", limit)

    def forget_writer(self, writer: str, *, why: str | None = None) -> Listing[ForgottenWriter]:
        """Forget a writer (as listed, or its query id or ``write_id``) and its producer group at every broker. Should it write
        again, its next batch counts whatever its number is.

        Raises NOT_FOUND, CONFLICT while it has undecided transactions.
        """
        call = writers.FORGET(signed(writers.Forget(writer=writer), why))
        return self._rows(call, lambda answer: [answer], Code.NOT_FOUND)

    # Transactions

    def transactions(
        self,
        state: str | None = None,
        group: str | None = None,
        older_than: float | None = None,
        limit: int | None = None,
    ) -> Listing[Transaction]:
        """Transactions by state ("open", "parked", ...), producer group and age in seconds; at most ``limit`` per broker."""
        request = _given(transactions.List, state=state, group=group, older_than=older_than)
        return self._pages(transactions.LIST(request), "transactions", limit)

    def transaction(self, transaction_id: TransactionId | str | bytes) -> TransactionDetails:
        """One transaction, its messages (with ``body``) and its timeline. Raises UNKNOWN_TRANSACTION or WRONG_SHARD."""
        identity, number = self._home(transaction_id)
        answer: Any = self._ask(number, transactions.SHOW({"id": str(identity)}))
        found: TransactionDetails = answer | {"messages": [_with_body(message) for message in answer["messages"]]}
        return found

    def commit(self, transaction_id: TransactionId | str | bytes, *, why: str | None = None) -> Code:
        """Commit by an operator. Raises CONFLICT if it was rolled back."""
        return self._settle(transaction_id, "commit", why)

    def rollback(self, transaction_id: TransactionId | str | bytes, *, why: str | None = None) -> Code:
        """Roll back by an operator. Raises CONFLICT if it was committed."""
        return self._settle(transaction_id, "rollback", why)

    def recheck(self, transaction_id: TransactionId | str | bytes, *, why: str | None = None) -> Code:
        """Open a parked transaction again and ask about it anew. Raises TRANSACTION_DECIDED and so on."""
        identity, number = self._home(transaction_id)
        return _single(self._ask(number, transactions.RECHECK(signed(transactions.Recheck(ids=[str(identity)]), why))))

    # Dead letters

    def dead_letters(self, group: str, limit: int | None = None) -> Listing[DeadLetter]:
        """The dead letters of a consumer group; at most ``limit`` per broker."""
        return self._pages(dead_letters.LIST({"group": group}), "dead_letters", limit)

    def retry_dead_letters(
        self, group: str, items: Iterable[Mapping[str, Any]] | None = None, *, why: str | None = None
    ) -> Count:
        """Deliver dead letters again, attempts counted anew: all, or ``items`` of :meth:`dead_letters`. How many."""
        return self._settle_dead(group, items, "retry", why)

    def discard_dead_letters(
        self, group: str, items: Iterable[Mapping[str, Any]] | None = None, *, why: str | None = None
    ) -> Count:
        """Settle dead letters for good: all, or ``items`` of :meth:`dead_letters`. How many."""
        return self._settle_dead(group, items, "discard", why)

    # The record of acts

    def acts(self, limit: int | None = None, *, after: int = 0, newest: bool = False) -> Listing[Act]:
        """What operators did, oldest first: who (unverified), when, what, why, and what came of it; at most ``limit`` per broker of those
        numbered above ``after``, or the ``newest`` (at most 10,000)."""
        if newest:
            call = acts.LIST({"limit": min(limit or MAX_PAGE, MAX_PAGE), "after": after, "newest": True})
            return self._rows(call, lambda answer: answer["acts"])
        found = self._pages(acts.LIST({"after": after}), "acts", limit)
        return cast(Listing[Act], found)

    def verify_acts(self) -> Listing[VerifiedActs]:
        """Whether anybody changed, removed or moved a record: of each broker how many records, the last one's hash, and the places."""
        return self._rows(acts.VERIFY({}), lambda answer: [answer])

    # Looking things up

    def lookup(
        self,
        *,
        message_id: str | bytes | uuid.UUID | None = None,
        key: str | None = None,
        topic: str | None = None,
        limit: int | None = None,
    ) -> Listing[FoundMessage]:
        """Messages by id or by key, half messages included, with their state and ``body`` (bytes)."""
        if (message_id is None) == (key is None):
            raise Misuse(Code.BAD_ARGUMENT, "look up by message_id or by key")
        identity = None if message_id is None else _printed(message_id)
        request = _given(messages.Lookup, message_id=identity, key=key, topic=topic, limit=limit)
        return self._rows(messages.LOOKUP(request), lambda answer: map(_with_body, answer["messages"]))

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

        All brokers must be there: Overloaded(BROKER_AWAY) names the one that is not, because a read never gives fewer rows.
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
        answers = self._router.every(lambda number: self._queues(number, source, queue), self._timeout)
        if answers.missing:
            raise away(answers.missing, f"{source} can only be read in part")
        wanted: list[tuple[Link, ReadRequest]] = [
            (self._router.links[at], {**request, "queue": number}) for at, found in answers.found for number in found
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

    def health(self) -> Listing[Health]:
        """Of each broker: status ("ok", "damaged", "full", "stopped", "stopping", or "unreachable") and reason."""
        links, timeout = self._router.links, self._timeout
        answers = self._router.every(lambda number: _health_of(links[number], timeout), timeout + 1.0)
        rows, silent = dict(answers.found), {one["broker"]: one["reason"] for one in answers.missing}
        for number, link in enumerate(links):
            if link.address in silent:
                rows[number] = {"status": "unreachable", "reason": silent[link.address], "broker": link.address}
        listed = [rows[number] for number in sorted(rows)]
        unreachable: list[Missing] = [
            {"broker": row["broker"], "reason": row["reason"]} for row in listed if row["status"] == "unreachable"
        ]
        return Listing(listed, unreachable)

    def stats(self) -> Listing[dict[str, float | str]]:
        """The numbers of each broker, one per metric, and ``broker``."""
        return self._rows(brokers.STATS({}), lambda numbers: [numbers])

    def hello(self) -> Listing[Hello]:
        """What each broker says of itself: versions, shard, epoch, limits."""
        return self._rows(brokers.HELLO({}), lambda answer: [answer])

    # Asking

    def _ask(self, number: int, call: Call[Answer]) -> Answer:
        return self._router.ask(number, call, time.monotonic() + self._timeout, longest=self._timeout)

    def _each(self, call: Call[Answer], *unknown: Code) -> tuple[list[tuple[AtBroker, Answer]], list[Missing]]:
        """The answers of all brokers that are there, without those that refuse with a code of ``unknown`` (an error if all of them
        do), and who is missing."""

        def ask(number: int) -> Answer | Rejected:
            try:
                return self._ask(number, call)
            except Rejected as problem:
                if problem.code not in unknown:
                    raise
                return problem

        answers = self._router.every(ask, self._timeout)
        found: list[tuple[AtBroker, Answer]] = []
        nothing: Rejected | None = None
        for number, answer in answers.found:
            if isinstance(answer, Rejected):
                nothing = answer
            else:
                found.append(({"broker": self._router.links[number].address}, answer))
        if not found and nothing is not None:
            if answers.missing:  # it may be there
                raise away(answers.missing, nothing.message)
            raise nothing
        return found, answers.missing

    def _rows(self, call: Call[Answer], rows: Callable[[Answer], Iterable[Any]], *unknown: Code) -> Listing[Any]:
        """A row's fields and its ``broker``, for all ``rows`` of each answer of :meth:`_each`."""
        found, missing = self._each(call, *unknown)
        return Listing(({**row, **at} for at, answer in found for row in rows(answer)), missing)

    def _pages(self, call: Call[Any], what: str, limit: int | None) -> Listing[Any]:
        """Entries ``what`` of all brokers, page after page, at most ``limit`` per broker."""

        def ask(number: int) -> list[Any]:
            found: list[Any] = []
            after: Any = call.request.get("after")
            while limit is None or len(found) < limit:
                page = _PAGE if limit is None else min(_PAGE, limit - len(found))
                request = {**call.request, **_given(dict, limit=page, after=after)}
                answer: Any = self._ask(number, replace(call, request=request))
                found.extend({**item, "broker": self._router.links[number].address} for item in answer[what])
                after = answer.get("next")
                if after is None:
                    break
            return found

        answers = self._router.every(ask, self._timeout)
        return Listing((item for found in answers.values for item in found), answers.missing)

    def _home(self, transaction_id: TransactionId | str | bytes) -> tuple[TransactionId, int]:
        """A transaction's id, and the number of the broker that has it."""
        identity = TransactionId.from_bytes(id_bytes(transaction_id))
        return identity, self._router.of_shard(identity.shard, self._timeout)

    def _settle(
        self, transaction_id: TransactionId | str | bytes, outcome: Literal["commit", "rollback"], why: str | None
    ) -> Code:
        identity, number = self._home(transaction_id)
        request = transactions.Settle(ids=[str(identity)], outcome=outcome)
        return _single(self._ask(number, transactions.SETTLE(signed(request, why))))

    def _settle_dead(
        self, group: str, items: Iterable[Mapping[str, Any]] | None, act: Literal["retry", "discard"], why: str | None
    ) -> Count:
        chosen = None if items is None else list(items)
        if chosen and len(self._router.links) > 1 and any("broker" not in item for item in chosen):
            hint = "give it as dead_letters() lists it, or connect to that broker alone: each has another message at this place"
            raise Misuse(Code.BAD_ARGUMENT, "of several brokers, which one has this dead letter? It names none", hint)

        def settle(number: int) -> int:
            address = self._router.links[number].address
            request = signed(dead_letters.Settle(group=group, act=act), why)
            if chosen is None:
                request["all"] = True
            else:
                mine = [item for item in chosen if item.get("broker", address) == address]
                if not mine:
                    return 0
                request["items"] = [
                    {"topic": item["topic"], "queue": item["queue"], "offset": item["offset"]} for item in mine
                ]
            return self._ask(number, dead_letters.SETTLE(request))["codes"].count(Code.OK.name)

        answers = self._router.every(settle, self._timeout)
        return Count(sum(answers.values), answers.missing)

    def _queues(self, number: int, source: str, queue: int | None) -> list[int]:
        if source in VIEWS:
            return [0]
        if queue is not None or source.startswith("%"):
            return [queue or 0]
        listed = self._ask(number, topics.LIST({}))["topics"]
        return [entry["queue"] for topic in listed if topic["name"] == source for entry in topic["queues"]]


def _health_of(link: Link, timeout: float) -> Health:
    try:
        return {**ask(link, brokers.HEALTH({}), timeout), "broker": link.address}
    except EscrowError as problem:
        return {"status": "unreachable", "reason": str(problem), "broker": link.address}


def _given(shape: type[Request], **values: Any) -> Request:
    """The fields of a request that are not None."""
    return cast(Request, {name: value for name, value in values.items() if value is not None})


def _microseconds(time: datetime | None) -> int | None:
    return None if time is None else round(time.timestamp() * 1e6)


def _printed(identity: str | bytes | uuid.UUID) -> str:
    return message_id(identity).hex()


def _with_body(message: Any) -> Any:
    """A message with its body as bytes."""
    body = message.pop("body_base64")
    message["body"] = None if body is None else base64.b64decode(body)
    return message


def _single(answer: Results) -> Code:
    """The one result of a call about one id; raises unless it is done."""
    code = Code[answer["codes"][0]]
    if code not in DONE:
        raise error(code)
    return code
