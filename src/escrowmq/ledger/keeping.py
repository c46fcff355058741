"""Retention of the log and of topics, and what goes when a topic is deleted.

Rules:

1. The log is released of from its beginning only, and not past what a topic keeps, what waits for its time, or what is
   undecided for less than the broker's retention. What is undecided for longer is EXPIRED first. A transaction is let
   go of as a whole, so that of each message that is kept it is known what became of it.
2. Where topics keep less than the broker's retention, or were deleted, the log may be removed before that time: as
   far as ``early_position`` of the command, which leaves it the ids that repeats are known by.
3. A deleted topic is gone with its queues, with what waits for its time, and out of the groups, whose leases and dead
   letters of it go, too. It has no undecided transactions then: they were rolled back before, as a person's decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from escrowmq.errors import Code, error
from escrowmq.ledger.columns.arrays import Int64s
from escrowmq.ledger.commands import AlterTopic, Cut, DeleteTopic, Retain, Rules
from escrowmq.ledger.events import Decision, event_of
from escrowmq.ledger.groups import reports
from escrowmq.ledger.groups.groups import Groups
from escrowmq.ledger.queues import cutting
from escrowmq.ledger.queues.delays import Delays
from escrowmq.ledger.queues.topics import Topics
from escrowmq.ledger.transactions.ending import Ending
from escrowmq.ledger.transactions.sessions import OPERATOR
from escrowmq.ledger.transactions.spanning import undecided_in, whole_below
from escrowmq.ledger.transactions.table import ROLLED_BACK, TransactionTable, decided
from escrowmq.model import DecidedBy
from escrowmq.schemas import Kind

NAMED = 5
"""Groups that a refusal names."""


@dataclass(frozen=True, slots=True)
class Keeping:
    """Decides and applies it. It has no state of its own."""

    topics: Topics
    delays: Delays
    transactions: TransactionTable
    groups: Groups
    ending: Ending

    # The log

    def decide_retain(self, command: Retain, trimmed_position: int) -> Decision:
        """Return how far the log may be dropped, and the events for that."""
        topics, limit = self.topics, command.limit_position
        if topics.any_own:
            limit = max(limit, command.early_position)
        elif command.early_position > limit:  # as far as a deleted topic may have had messages
            limit = max(limit, min(command.early_position, topics.deleted_position))
        stops = [self.delays.lowest_position()]
        for topic in topics.by_name.values():
            queues = (topics.queues[id] for id in topic.queue_ids)
            stops += [cutting.keeps_from(queue, topic.rules, command.visible_us) for queue in queues]
        limit = min([limit, *(stop for stop in stops if stop is not None)])
        limit, events = self.ending.decide_expire(command.visible_us, whole_below(self.transactions, limit))
        if limit <= trimmed_position:
            return Decision((), trimmed_position)
        return Decision((*events, event_of(Kind.TRIMMED, [limit], [command.visible_us])), limit)

    # Topics

    def decide_cut(self, command: Cut, now_us: int) -> Decision:
        """Decide what to drop beyond each topic's retention."""
        events = cutting.decide_cut(self.topics, now_us, command.retention_us)
        return Decision(tuple(events), sum(event.count for event in events))

    def decide_alter(self, command: AlterTopic, rules: Rules, now_us: int) -> Decision:
        """See :class:`~escrowmq.ledger.commands.AlterTopic`. UNKNOWN_TOPIC, BAD_QUEUE, BAD_REQUEST."""
        events, own, queues = self.topics.decide_alter(command, rules)
        events += cutting.decide_cut_of(self.topics, self.topics.by_name[command.name], own, now_us)
        return Decision(tuple(events), {"name": command.name, "queues": queues, "rules": own})

    def decide_delete(self, command: DeleteTopic) -> Decision:
        """See :class:`~escrowmq.ledger.commands.DeleteTopic`. UNKNOWN_TOPIC; CONFLICT."""
        ids = self.topics.queue_ids(command.name)
        undecided, halves = undecided_in(self.transactions, ids)
        consuming = reports.consuming(self.groups.groups.values(), command.name, ids)
        if not command.force:
            self._refuse(command.name, halves, consuming)
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
        if command.check:
            return Decision((), answer)
        events = []
        if len(undecided):
            first = self.transactions.column("first", undecided[: command.limit])
            events.append(decided(first, ROLLED_BACK, DecidedBy.OPERATOR, OPERATOR))
        if answer["deleted"]:
            events.append(event_of(Kind.TOPIC_DELETED, [command.name]))
        return Decision(tuple(events), answer)

    @staticmethod
    def _refuse(name: str, halves: int, consuming: Sequence[str]) -> None:
        if halves:
            raise error(
                Code.CONFLICT,
                f"{name!r} has undecided half messages: {halves:,}",
                "decide them (`escrowmq transactions list`), or force it: then their transactions are rolled back",
            )
        if consuming:
            more = f" and {len(consuming) - NAMED:,} more" if len(consuming) > NAMED else ""
            raise error(
                Code.CONFLICT,
                f"{name!r} is consumed by {', '.join(consuming[:NAMED])}{more}",
                "give them other topics (`escrowmq groups alter`), or force it: then they lose this one",
            )

    # Applying

    def apply_trimmed(self, position: int) -> None:
        """Kind.TRIMMED."""
        for queue in self.topics.queues:
            queue.trim_below(position)
        self.transactions.trim(position)
        self.groups.apply_trim(self.topics, position)

    def apply_cut(self, batch: pa.RecordBatch) -> None:
        """Kind.CUT."""
        queue_ids: Int64s = batch.column("queue_id").to_numpy().astype(np.int64)
        cutting.apply_cut(self.topics, queue_ids, batch.column("head").to_numpy())
        self.groups.apply_heads(self.topics, set(queue_ids.tolist()))

    def apply_topic(self, batch: pa.RecordBatch) -> None:
        """Kind.TOPIC."""
        for queue_id in self.topics.apply_topic(batch):
            queue = self.topics.queues[queue_id]
            if queue.head:  # of a name that was deleted: groups begin where it begins
                self.groups.meet_at(queue.place.topic, queue_id, queue.head)

    def apply_deleted(self, batch: pa.RecordBatch, position: int) -> None:
        """Kind.TOPIC_DELETED."""
        for name, queue_ids in self.topics.apply_deleted(batch, position):
            self.delays.drop(queue_ids)
            self.groups.remove_topic(name, queue_ids)
