"""Retention of the log and of topics, and what goes when a topic is deleted.

Rules:

1. The log is dropped from its beginning only, and not past what a topic keeps, a delayed message, or a transaction that
   is undecided for less than the broker's retention. Older undecided ones are EXPIRED first. A transaction is dropped
   as a whole, so the outcome of each message that is kept is known.
2. Where topics keep less than the broker's retention, or were deleted, the log may be dropped before that time: as far
   as ``early_position`` of the command, which keeps the ids that identify repeats.
3. A topic with its own retention keeps a message until that time has passed since it became visible, and at most so
   many bytes of each queue (Kafka's ``retention.ms`` and ``retention.bytes``), but always the newest message. If only
   one of the two is set, the broker's time, or no limit of bytes, applies.
4. A topic without one keeps what the log keeps. When another topic makes the log keep more than the broker's retention,
   it is cut at the broker's, so that no topic makes another one's messages stay.
5. A cut is an event, a row for each queue: its new first offset. Unfinished messages of groups below it are EXPIRED. A
   message that is not visible yet is in no queue: no retention of a topic applies to it.
6. A deleted topic loses its queues and delayed messages, and groups lose its leases and dead letters. Its undecided
   transactions were rolled back before, as an operator's decision.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from escrowmq.errors import Code, error
from escrowmq.ledger.commands import AlterTopic, Cut, DeleteTopic, Retain, Rules, TopicRules
from escrowmq.ledger.events import Decision, Event, event_of, event_of_rows
from escrowmq.ledger.groups import reports
from escrowmq.ledger.groups.groups import Groups
from escrowmq.ledger.queues.delays import Delays
from escrowmq.ledger.queues.topics import Topic, Topics
from escrowmq.ledger.transactions.ending import Ending
from escrowmq.ledger.transactions.sessions import OPERATOR
from escrowmq.ledger.transactions.table import ROLLED_BACK, TransactionTable, decided
from escrowmq.model import DecidedBy
from escrowmq.schemas import Kind

NAMED = 5  # groups that a rejection names


@dataclass(frozen=True, slots=True)
class Keeping:
    """Decides and applies retention. It has no state of its own."""

    topics: Topics
    delays: Delays
    transactions: TransactionTable
    groups: Groups
    ending: Ending

    def decide_retain(self, command: Retain, trimmed_position: int) -> Decision:
        """Decide how far the log may be dropped from its beginning. Answer: the position below which it may, at least
        ``trimmed_position`` (the last one). Events: undecided transactions below it that expire, and TRIMMED."""
        topics, limit = self.topics, command.limit_position
        if topics.any_own:
            limit = max(limit, command.early_position)
        else:  # as far as a deleted topic may have had messages
            limit = max(limit, min(command.early_position, topics.deleted_position))
        stops = [self.delays.lowest_position()]
        for topic in topics.by_name.values():
            for queue in (topics.queues[id] for id in topic.queue_ids):
                kept = queue.head if topic.rules.is_own else queue.offset_at(command.visible_us)
                stops.append(queue.lowest_position(kept))
        limit = min([limit, *(stop for stop in stops if stop is not None)])
        limit, events = self.ending.decide_expire(command.visible_us, self.transactions.whole_below(limit))
        if limit <= trimmed_position:
            return Decision((), trimmed_position)
        return Decision((*events, event_of(Kind.TRIMMED, [limit], [command.visible_us])), limit)

    def decide_cut(self, command: Cut, now_us: int) -> Decision:
        """Decide which queues drop messages beyond their topic's retention. Answer: the number of these queues."""
        retention_us, topics = command.retention_us, self.topics.by_name.values()
        longer = any((topic.rules.retention_us or 0) > retention_us for topic in topics)
        chosen = [topic for topic in topics if longer or topic.rules.is_own]
        rows = [row for topic in chosen for row in self._find_beyond(topic, topic.rules, now_us, retention_us)]
        return Decision(_cut(rows), len(rows))

    def _find_beyond(
        self, topic: Topic, rules: TopicRules, now_us: int, retention_us: int | None
    ) -> Iterable[tuple[int, int]]:
        """Yield (queue id, new first offset) for each queue of a topic that has messages beyond ``rules``.
        ``retention_us``: the time if ``rules`` has none; None: no limit."""
        kept_us = retention_us if rules.retention_us is None else rules.retention_us
        for id in topic.queue_ids:
            queue = self.topics.queues[id]
            head = queue.head if kept_us is None else queue.offset_at(now_us - kept_us)
            if rules.retention_bytes is not None:
                head = max(head, queue.offset_within(rules.retention_bytes))
            if head > queue.head:
                yield id, head

    def decide_alter(self, command: AlterTopic, rules: Rules, now_us: int) -> Decision:
        """Decide an :class:`~escrowmq.ledger.commands.AlterTopic`, which may drop messages at once. Raises
        UNKNOWN_TOPIC, BAD_QUEUE, BAD_REQUEST."""
        events, own, queues = self.topics.decide_alter(command, rules)
        cut = _cut([*self._find_beyond(self.topics.by_name[command.name], own, now_us, None)])
        return Decision((*events, *cut), {"name": command.name, "queues": queues, "rules": own})

    def decide_delete(self, command: DeleteTopic) -> Decision:
        """Decide a :class:`~escrowmq.ledger.commands.DeleteTopic`. Raises UNKNOWN_TOPIC; CONFLICT if the topic is in
        use and ``force`` is not set."""
        ids = self.topics.queue_ids(command.name)
        undecided, halves = self.transactions.undecided_in(ids)
        consuming = reports.consuming(self.groups.groups.values(), command.name, ids)
        if not command.force:
            _check_unused(command.name, halves, consuming)
        queues = [self.topics.queues[id] for id in ids]
        answer: dict[str, Any] = {
            "name": command.name,
            "deleted": not command.check and len(undecided) <= command.limit,
            "queues": len(ids),
            "messages": sum(queue.end - queue.head for queue in queues),
            "delayed": self.delays.count(ids),
            "rolled_back": min(len(undecided), command.limit),
            "groups": consuming,
            "dead_letters": reports.dead_in(self.groups.groups.values(), ids),
        }
        events = []
        if len(undecided) and not command.check:
            first = self.transactions.column("first", undecided[: command.limit])
            events.append(decided(first, ROLLED_BACK, DecidedBy.OPERATOR, OPERATOR))
        if answer["deleted"]:
            events.append(event_of(Kind.TOPIC_DELETED, [command.name]))
        return Decision(tuple(events), answer)

    def apply_trimmed(self, position: int) -> None:
        """Apply Kind.TRIMMED: queues, transactions and groups drop what is below log ``position``."""
        for queue in self.topics.queues:
            queue.trim_below(position)
        self.transactions.trim(position)
        self.groups.apply_trim(self.topics, position)

    def apply_cut(self, batch: pa.RecordBatch) -> None:
        """Apply Kind.CUT: queues drop messages below new heads; in groups unfinished ones become EXPIRED."""
        heads = dict(zip(*(column.to_pylist() for column in batch.columns), strict=True))
        for id, head in heads.items():
            self.topics.queues[id].trim(head)
        self.groups.apply_heads(self.topics, set(heads))

    def apply_topic(self, batch: pa.RecordBatch) -> None:
        """Apply Kind.TOPIC: create topics and queues. Groups of the topic start at the first offset of a new queue."""
        for queue_id in self.topics.apply_topic(batch):
            queue = self.topics.queues[queue_id]
            if queue.head:  # of a name that was deleted: groups begin where it begins
                self.groups.meet_at(queue.place.topic, queue_id, queue.head)

    def apply_deleted(self, batch: pa.RecordBatch, position: int) -> None:
        """Apply Kind.TOPIC_DELETED: drop the topic with its delayed messages, and remove it from all groups."""
        for name, queue_ids in self.topics.apply_deleted(batch, position):
            self.delays.drop(queue_ids)
            self.groups.remove_topic(name, queue_ids)


def _cut(rows: Sequence[tuple[int, int]]) -> tuple[Event, ...]:
    return (event_of_rows(Kind.CUT, rows),) if rows else ()


def _check_unused(name: str, halves: int, consuming: Sequence[str]) -> None:
    if halves:
        hint = "decide them (`escrowmq transactions list`), or force it: then their transactions are rolled back"
        raise error(Code.CONFLICT, f"{name!r} has undecided half messages: {halves:,}", hint)
    if consuming:
        more = f" and {len(consuming) - NAMED:,} more" if len(consuming) > NAMED else ""
        hint = "give them other topics (`escrowmq groups alter`), or force it: then they lose this one"
        raise error(Code.CONFLICT, f"{name!r} is consumed by {', '.join(consuming[:NAMED])}{more}", hint)
