"""Entering of messages that were decided as rows: as applying their event as columns (``ledger.py``), row by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from escrowmq.ledger.commands import Rules
from escrowmq.ledger.messages.dedup import Dedup, Run
from escrowmq.ledger.queues.delays import Delays
from escrowmq.ledger.queues.queues import NO_TAG
from escrowmq.ledger.queues.topics import Topic, Topics
from escrowmq.ledger.transactions.checkback import CheckBack
from escrowmq.ledger.transactions.halves import Halves
from escrowmq.ledger.transactions.sessions import Sessions
from escrowmq.ledger.transactions.table import TransactionTable


@dataclass(frozen=True, slots=True)
class Entering:
    """Changes of messages that were decided as rows, when they are applied; a list has one item for each of them."""

    sessions: Sequence[int]
    """Each once, without 0."""
    topics: Sequence[Topic]
    runs: Sequence[Run]
    tags: Sequence[str | None] | None
    """None: no message has one."""
    queue_ids: Sequence[int]
    sizes: Sequence[int]
    """Of the bodies."""
    visible_us: Sequence[int] | None
    """Not before this; 0: at once. None: all at once."""
    halves: Halves | None = None
    """Of half messages: their transactions."""


class EnteringRows:
    """Applies what was decided as rows. It has no state of its own; ``counters`` are the ledger's."""

    def __init__(
        self,
        topics: Topics,
        sessions: Sessions,
        dedup: Dedup,
        delays: Delays,
        transactions: TransactionTable,
        checkback: CheckBack,
        counters: dict[str, int],
    ) -> None:
        self._topics = topics
        self._sessions = sessions
        self._dedup = dedup
        self._delays = delays
        self._transactions = transactions
        self._checkback = checkback
        self._counters = counters

    def apply(self, entering: Entering, position: int, time_us: int, rules: Rules) -> None:
        """Kind.PLAIN or Kind.HALF."""
        halves, queue_ids, visible = entering.halves, entering.queue_ids, entering.visible_us
        sizes = entering.sizes
        plain = halves is None
        for epoch in entering.sessions:
            self._sessions.note_one(epoch, time_us, sent=plain)
        self._dedup.add_runs(entering.runs, position, time_us, rules, half=not plain)
        for topic in entering.topics:
            topic.turn += 1
        self._counters["messages_total" if plain else "half_messages_total"] += len(queue_ids)
        tags: Sequence[int] | int = NO_TAG
        if entering.tags is not None:
            number = self._topics.number_tag
            tags = [NO_TAG if tag is None else number(tag) for tag in entering.tags]
        if halves is None:
            self.place(range(position, position + len(queue_ids)), queue_ids, tags, sizes, visible, time_us)
            return
        if visible is not None:
            late = [(at, visible_us) for at, visible_us in enumerate(visible, position) if visible_us]
            self._transactions.hold_back(*zip(*late, strict=True))
        begun = self._transactions.enter_rows(halves, queue_ids, tags, sizes, position, time_us)
        self._checkback.begin_rows(begun, halves, time_us)

    def place(
        self,
        positions: Sequence[int],
        queue_ids: Sequence[int],
        tags: Sequence[int] | int,
        sizes: Sequence[int],
        visible: Sequence[int] | None,
        time_us: int,
    ) -> None:
        """Put a few messages at the end of their queues; those with a time still to come wait for it. ``tags``: one for
        all, or one each; ``visible`` None: all at once."""
        if visible is None and queue_ids.count(queue_ids[0]) == len(queue_ids):
            self._topics.queues[queue_ids[0]].append(positions, tags, time_us, sum(sizes))
            return
        numbers = [tags] * len(positions) if isinstance(tags, int) else tags
        times = [0] * len(positions) if visible is None else visible
        by_queue: dict[int, tuple[list[int], list[int], list[int]]] = {}
        for position, queue_id, tag, size, visible_us in zip(positions, queue_ids, numbers, sizes, times, strict=True):
            if visible_us > time_us:
                self._delays.add_one(position, queue_id, tag, visible_us, size)
                continue
            places, their_tags, their_sizes = by_queue.setdefault(queue_id, ([], [], []))
            places.append(position)
            their_tags.append(tag)
            their_sizes.append(size)
        for queue_id, (places, their_tags, their_sizes) in by_queue.items():
            self._topics.queues[queue_id].append(places, their_tags, time_us, sum(their_sizes))
