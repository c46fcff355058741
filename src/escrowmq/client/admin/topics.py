"""Topics and their queues."""

from __future__ import annotations

from datetime import datetime
from typing import Unpack

from escrowmq.client.admin.asking import Asking, given, microseconds
from escrowmq.client.altering import TopicChanges, signed, topic_request
from escrowmq.client.entries import AlteredTopic, DeletedTopic, Queue, Topic
from escrowmq.client.links.answers import Listing
from escrowmq.errors import Code
from escrowmq.message.names import check_name
from escrowmq.wire.actions import topics
from escrowmq.wire.actions.topics import Created


class TopicsAdmin(Asking):
    """Topics and their queues. See :class:`escrowmq.client.admin.Admin`."""

    def topics(self) -> Listing[Topic]:
        """Return all topics with their queues."""
        return self._rows(topics.LIST({}), lambda answer: answer["topics"])

    def create_topic(self, name: str, queues: int | None = None, *, may_exist: bool = False) -> Listing[Created]:
        """Make a topic at every broker, or give it more queues. Raises ALREADY_EXISTS unless ``may_exist``."""
        check_name(name, Code.BAD_TOPIC_NAME)
        request: topics.Create = {"name": name, "may_exist": may_exist}
        if queues is not None:
            request["queues"] = queues
        found, missing = self._each(topics.CREATE(request))
        return Listing((made for _, made in found), missing)

    def alter_topic(
        self, name: str, *, why: str | None = None, **changes: Unpack[TopicChanges]
    ) -> Listing[AlteredTopic]:
        """Give a topic more ``queues``, or a retention of its own, at every broker; what is not given stays as it is.

        ``retention``: seconds that messages stay after they became visible. ``retention_size``: bytes that each queue
        keeps at most, as of Kafka's partitions. ``"broker"``: as the broker's settings say. What is beyond it is
        released of at once. Raises UNKNOWN_TOPIC, BAD_QUEUE for fewer queues than there are, BAD_REQUEST.
        """
        request = signed(topic_request(name, changes), why)
        return self._rows(topics.ALTER(request), lambda altered: [altered], Code.UNKNOWN_TOPIC)

    def delete_topic(
        self, name: str, *, force: bool = False, check: bool = False, why: str | None = None
    ) -> Listing[DeletedTopic]:
        """Delete a topic with all that is in it, at every broker; what went with it. ``check``: only say what would go.

        Raises UNKNOWN_TOPIC; CONFLICT if it has undecided half messages, or a consumer group has it, at any broker that
        answers. With ``force`` those transactions are rolled back, and the groups lose the topic, with what they hold
        of it and its dead letters.

        Nobody's sending or subscribing makes the topic again, only :meth:`create_topic`. Then it is another topic,
        whose offsets continue behind those of the old one.
        """
        request = topics.Delete(name=name, force=force)
        asked = topics.DELETE({**request, "check": True})
        would = self._rows(
            asked, lambda deleted: [deleted], Code.UNKNOWN_TOPIC
        )  # nothing is done if one of them refuses
        if check:
            return would
        return self._rows(topics.DELETE(signed(request, why)), lambda deleted: [deleted], Code.UNKNOWN_TOPIC)

    def offsets(self, topic: str, queue: int | None = None, *, time: datetime | None = None) -> Listing[Queue]:
        """Return where each queue of a topic begins and ends; with ``time`` also the first offset that became visible
        then or later.

        Brokers that do not have the topic are left out; UNKNOWN_TOPIC if none has it.
        """
        call = topics.OFFSETS(given(topics.AskOffsets, topic=topic, queue=queue, time_us=microseconds(time)))
        lines = lambda answer: ({**line, "shard": answer["shard"]} for line in answer["queues"])  # noqa: E731
        return self._rows(call, lines, Code.UNKNOWN_TOPIC)
