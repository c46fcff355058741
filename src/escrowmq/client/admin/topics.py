"""Topics and their queues."""

from __future__ import annotations

from datetime import datetime

from escrowmq.client.admin.asking import Asking, given, microseconds
from escrowmq.client.entries import Queue, Topic
from escrowmq.client.links.answers import Listing
from escrowmq.errors import Code
from escrowmq.message.names import check_name
from escrowmq.wire.actions import topics
from escrowmq.wire.actions.topics import Created


class TopicsAdmin(Asking):
    """Topics and their queues. See :class:`escrowmq.client.admin.Admin`."""

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
        call = topics.OFFSETS(given(topics.AskOffsets, topic=topic, queue=queue, time_us=microseconds(time)))
        lines = lambda answer: ({**line, "shard": answer["shard"]} for line in answer["queues"])  # noqa: E731
        return self._rows(call, lines, Code.UNKNOWN_TOPIC)
