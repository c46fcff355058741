"""Topics, their queues and their messages."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Sequence
from datetime import datetime
from typing import Unpack

from escrowmq.client.admin.asking import Asking, given, microseconds, with_body
from escrowmq.client.altering import TopicChanges, signed, topic_request
from escrowmq.client.entries import AlteredTopic, DeletedTopic, FoundMessage, Queue, Topic
from escrowmq.client.links.answers import Listing, away
from escrowmq.errors import Code, Misuse, Rejected
from escrowmq.message.names import check_name
from escrowmq.model import message_id as id_of
from escrowmq.wire import VIEWS, BatchStream, Link, ReadRequest
from escrowmq.wire.actions import messages, topics
from escrowmq.wire.actions.topics import Created


class TopicsAdmin(Asking):
    """Topics, their queues and their messages. See :class:`escrowmq.client.admin.Admin`."""

    def topics(self) -> Listing[Topic]:
        """Return all topics with their queues."""
        return self._rows(topics.LIST({}), "topics")

    def create_topic(self, name: str, queues: int | None = None, *, may_exist: bool = False) -> Listing[Created]:
        """Create a topic at every broker, or give an existing one more queues. Raises ALREADY_EXISTS for a topic that
        has these queues already, unless ``may_exist``; BAD_QUEUE for fewer than it has."""
        check_name(name, Code.BAD_TOPIC_NAME)
        request = given(topics.Create, name=name, may_exist=may_exist, queues=queues)
        found, missing = self._each(topics.CREATE(request))
        return Listing((made for _, made in found), missing)

    def alter_topic(
        self, name: str, *, why: str | None = None, **changes: Unpack[TopicChanges]
    ) -> Listing[AlteredTopic]:
        """Give a topic more ``queues``, or a retention of its own, at every broker; the rest stays as it is.

        ``retention``: seconds that messages stay after they became visible. ``retention_size``: bytes that each queue
        keeps at most, as of Kafka's partitions. ``"broker"``: the broker's setting. Messages beyond it are removed at
        once. Raises UNKNOWN_TOPIC, BAD_QUEUE for fewer queues than there are, BAD_REQUEST.
        """
        return self._rows(topics.ALTER(signed(topic_request(name, changes), why)), None, Code.UNKNOWN_TOPIC)

    def delete_topic(
        self, name: str, *, force: bool = False, check: bool = False, why: str | None = None
    ) -> Listing[DeletedTopic]:
        """Delete a topic with its content at every broker. Returns what is lost; ``check``: without deleting it.

        Raises UNKNOWN_TOPIC; CONFLICT if it has undecided half messages, or a consumer group has it, at any broker that
        answers. With ``force`` those transactions are rolled back, and the groups lose the topic with its leases and
        dead letters.

        Sending or subscribing does not make the topic again, only :meth:`create_topic`. Then it is another topic, whose
        offsets continue behind those of the old one.
        """
        request = topics.Delete(name=name, force=force)
        # first a check at all brokers: nothing is deleted if one of them refuses
        preview = self._rows(topics.DELETE({**request, "check": True}), None, Code.UNKNOWN_TOPIC)
        return preview if check else self._rows(topics.DELETE(signed(request, why)), None, Code.UNKNOWN_TOPIC)

    def offsets(self, topic: str, queue: int | None = None, *, time: datetime | None = None) -> Listing[Queue]:
        """Return the first and the next offset of each queue of a topic; with ``time`` also the first offset that
        became visible then or later. Leaves out brokers without the topic; raises UNKNOWN_TOPIC if none has it."""
        call = topics.OFFSETS(given(topics.AskOffsets, topic=topic, queue=queue, time_us=microseconds(time)))
        found, missing = self._each(call, Code.UNKNOWN_TOPIC)
        lines = ((at, answer["shard"], line) for at, answer in found for line in answer["queues"])
        return Listing(({**line, "shard": shard, **at} for at, shard, line in lines), missing)

    def lookup(
        self,
        *,
        message_id: str | bytes | uuid.UUID | None = None,
        key: str | None = None,
        topic: str | None = None,
        limit: int | None = None,
    ) -> Listing[FoundMessage]:
        """Return the messages with an id or with a key, half messages included, each with its state and ``body``
        (bytes): newest first, at most ``limit`` per broker. Raises Misuse(BAD_ARGUMENT) unless exactly one is
        given."""
        if (message_id is None) == (key is None):
            raise Misuse(Code.BAD_ARGUMENT, "look up by message_id or by key")
        identity = None if message_id is None else id_of(message_id).hex()
        request = given(messages.Lookup, message_id=identity, key=key, topic=topic, limit=limit)
        found = self._rows(messages.LOOKUP(request), "messages")
        return Listing(map(with_body, found), found.missing)

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
        before another; of ``%acks`` those of consumer group ``group``. Raises Overloaded(BROKER_AWAY) if a broker is
        missing, because a read is never incomplete.
        """
        names = None if tags is None else list(tags)
        rows = given(ReadRequest, source=source, start=start, end=end, max_rows=max_rows, columns=columns)
        times = {"stored_from_us": microseconds(stored_from), "stored_until_us": microseconds(stored_until)}
        request = rows | given(ReadRequest, tags=names, key=key, group=group, **times)
        answers = self._router.every(lambda number: self._queues(number, source, queue), self._timeout)
        if answers.missing:
            raise away(answers.missing, f"{source} can only be read in part")
        wanted: list[tuple[Link, ReadRequest]] = [
            (self._router.links[at], {**request, "queue": number}) for at, found in answers.found for number in found
        ]
        if not wanted:
            raise Rejected(Code.UNKNOWN_TOPIC, f"no topic {source!r}")
        first = wanted[0][0].read(wanted[0][1])
        others = (batch for link, one in wanted[1:] for batch in link.read(one))
        return BatchStream(first.schema, itertools.chain(first, others))

    def _queues(self, number: int, source: str, queue: int | None) -> list[int]:
        if source in VIEWS:
            return [0]
        if queue is not None or source.startswith("%"):
            return [queue or 0]
        listed = self._ask(number, topics.LIST({}))["topics"]
        return [entry["queue"] for topic in listed if topic["name"] == source for entry in topic["queues"]]
