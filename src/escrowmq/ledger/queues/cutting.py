"""Offsets beyond the retention of their topic.

Rules:

1. A topic with a retention of its own keeps a message until that time has passed since it became visible, and of each
   queue not more than so many bytes (Kafka's ``retention.ms`` and ``retention.bytes``), but what came last in any case.
   A topic that has only one of the two has the broker's time, or no bound of bytes.
2. A topic without one keeps what the log keeps. When another topic makes the log keep more than the broker's retention,
   it is cut at the broker's, so that no topic makes another one's messages stay.
3. A cut is an event, a row for each queue: its new first offset. What groups had not done below it is EXPIRED for them.
4. A message that is not visible yet (undecided, or waiting for its time) is in no queue: no retention of a topic counts
   for it.
"""

from __future__ import annotations

from collections.abc import Iterable

from escrowmq.ledger.columns.arrays import Int64s
from escrowmq.ledger.commands import TopicRules
from escrowmq.ledger.events import Event, event_of
from escrowmq.ledger.queues.queues import QueueIndex
from escrowmq.ledger.queues.topics import Topic, Topics
from escrowmq.schemas import Kind


def decide_cut(topics: Topics, now_us: int, retention_us: int) -> list[Event]:
    """Decide what to drop beyond each topic's retention, ``retention_us`` being the broker's, as an event."""
    all_topics = topics.by_name.values()
    longer = any((topic.rules.retention_us or 0) > retention_us for topic in all_topics)
    chosen = [topic for topic in all_topics if longer or topic.rules.is_own]
    return _cut(row for topic in chosen for row in _beyond(topics, topic, topic.rules, now_us, retention_us))


def decide_cut_of(topics: Topics, topic: Topic, rules: TopicRules, now_us: int) -> list[Event]:
    """Decide what to drop of one topic beyond the given retention."""
    return _cut(_beyond(topics, topic, rules, now_us, None))


def _cut(rows: Iterable[tuple[int, int]]) -> list[Event]:
    found = list(rows)
    return [event_of(Kind.CUT, *zip(*found, strict=True))] if found else []


def _beyond(
    topics: Topics, topic: Topic, rules: TopicRules, now_us: int, retention_us: int | None
) -> Iterable[tuple[int, int]]:
    """Queue ids, and the first offset that stays, where that is not the first one now."""
    kept_us = retention_us if rules.retention_us is None else rules.retention_us
    for id in topic.queue_ids:
        queue = topics.queues[id]
        head = queue.head if kept_us is None else queue.offset_at(now_us - kept_us)
        if rules.retention_bytes is not None:
            head = max(head, queue.offset_within(rules.retention_bytes))
        if head > queue.head:
            yield id, head


def apply_cut(topics: Topics, queue_ids: Int64s, heads: Int64s) -> None:
    """Kind.CUT."""
    for id, head in zip(queue_ids.tolist(), heads.tolist(), strict=True):
        topics.queues[id].trim(head)


def keeps_from(queue: QueueIndex, rules: TopicRules, visible_us: int) -> int | None:
    """Return the lowest log position that a queue keeps, ``visible_us`` being the broker's bound; None: none. Of a
    topic with a
    retention of its own, all that was not cut."""
    return queue.lowest_position(queue.head if rules.is_own else queue.offset_at(visible_us))
