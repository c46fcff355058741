"""Messages looked up, and topics browsed."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from datetime import datetime

import pyarrow as pa

from escrowmq.client.admin.asking import Asking, given, microseconds, with_body
from escrowmq.client.entries import FoundMessage
from escrowmq.client.links.answers import Listing, away
from escrowmq.errors import Code, Misuse, Rejected
from escrowmq.model import message_id
from escrowmq.wire import VIEWS, BatchStream, Link, ReadRequest
from escrowmq.wire.actions import messages, topics


class MessagesAdmin(Asking):
    """Messages looked up, and topics browsed. See :class:`escrowmq.client.admin.Admin`."""

    def lookup(
        self,
        *,
        message_id: str | bytes | uuid.UUID | None = None,
        key: str | None = None,
        topic: str | None = None,
        limit: int | None = None,
    ) -> Listing[FoundMessage]:
        """Return messages by id or by key, half messages included, with their state and ``body`` (bytes)."""
        if (message_id is None) == (key is None):
            raise Misuse(Code.BAD_ARGUMENT, "look up by message_id or by key")
        identity = None if message_id is None else _printed(message_id)
        request = given(messages.Lookup, message_id=identity, key=key, topic=topic, limit=limit)
        return self._rows(messages.LOOKUP(request), lambda answer: map(with_body, answer["messages"]))

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
    ) -> BatchStream:
        """Browse a topic (all queues, or one from offset ``start`` to before ``end``), a system view (``%half``,
        ``%op``, ``%acks``; from log position ``start`` to before ``end``), or a group's dead letters
        (``%dead-letters.GROUP``).

        Nothing is leased or changed. ``max_rows`` counts per queue. Iterate the result, or call ``.read_all()``. The
        broker sends only rows with one of ``tags``, with ``key``, stored (decided, acknowledged) from one time to
        before another; of ``%acks`` those of consumer group ``group``.

        All brokers must be there: Overloaded(BROKER_AWAY) names the one that is not, because a read never gives fewer
        rows.
        """
        request = given(
            ReadRequest,
            source=source,
            start=start,
            end=end,
            max_rows=max_rows,
            columns=columns,
            tags=None if tags is None else list(tags),
            key=key,
            group=group,
            stored_from_us=microseconds(stored_from),
            stored_until_us=microseconds(stored_until),
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

        return BatchStream(first.schema, chain())

    def _queues(self, number: int, source: str, queue: int | None) -> list[int]:
        if source in VIEWS:
            return [0]
        if queue is not None or source.startswith("%"):
            return [queue or 0]
        listed = self._ask(number, topics.LIST({}))["topics"]
        return [entry["queue"] for topic in listed if topic["name"] == source for entry in topic["queues"]]


def _printed(identity: str | bytes | uuid.UUID) -> str:
    return message_id(identity).hex()
