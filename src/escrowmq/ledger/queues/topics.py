"""Topics, their queues, and the number assigned to each tag.

Which queue a message goes to (Kafka's custom, which RocketMQ users share): the one it names; else the one its key
hashes to, so that equal keys keep their order; else, without a key, all such rows of a batch stay together and batches
take the queues in rotation.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from escrowmq.errors import Code, error
from escrowmq.ledger.columns.arrays import Columns, Int32s, Int64s, all_equal, int64s, table_of
from escrowmq.ledger.commands import CreateTopic, Rules
from escrowmq.ledger.events import Decision, Event, event_of_rows
from escrowmq.ledger.queues.queues import NO_TAG, Place, QueueIndex
from escrowmq.message.names import is_name
from escrowmq.schemas import Kind

_TOPICS = pa.schema([("name", pa.utf8()), ("turn", pa.int64())])
_TAGS = pa.schema([("tag", pa.utf8())])
_QUEUES = pa.schema([("topic", pa.utf8()), *int64s("head", "entries", "times")])


@dataclass(slots=True)
class Topic:
    """A topic: its queue ids by queue number, and how many batches came (``turn``): those without keys take its queues in rotation.
    Topics are never taken away, so ``number`` (0, 1, ... as they were made) names one for ever."""

    name: str
    number: int
    queue_ids: list[int] = field(default_factory=list)
    turn: int = 0


class Topics:
    """The directory of a shard."""

    def __init__(self) -> None:
        self.queues: list[QueueIndex] = []
        self.by_name: dict[str, Topic] = {}
        self._tags: dict[str, int] = {}
        self._topic_of = Columns({"topic": np.int32})  # by queue id

    def has(self, name: str) -> bool:
        return name in self.by_name

    def queue_ids(self, name: str) -> list[int]:
        """Queue ids of a topic by queue number; Rejected(UNKNOWN_TOPIC) if it does not exist."""
        topic = self.by_name.get(name)
        if topic is None:
            raise error(Code.UNKNOWN_TOPIC, f"no topic {name!r}")
        return topic.queue_ids

    def queue_id(self, name: str, queue: int) -> int:
        """The id of one queue; Rejected(UNKNOWN_TOPIC or BAD_QUEUE)."""
        ids = self.queue_ids(name)
        if not 0 <= queue < len(ids):
            raise error(Code.BAD_QUEUE, f"{name!r} has queues 0 to {len(ids) - 1}, not {queue}")
        return ids[queue]

    def numbers_of_queues(self, queue_ids: Int32s) -> Int32s | int:
        """The topic number of each queue id; one for all where they are of one topic."""
        numbers: Int32s = self._topic_of["topic"][queue_ids]
        return int(numbers[0]) if len(numbers) and all_equal(numbers) else numbers

    def find(self, name: str, positions: Int64s) -> tuple[Int64s, Int64s]:
        """Queue and offset of each log position in a topic; -1 for those that stand in none of its queues. For repeats."""
        queues, offsets = np.full(len(positions), -1, np.int64), np.full(len(positions), -1, np.int64)
        topic = self.by_name.get(name)
        for queue, queue_id in enumerate(topic.queue_ids if topic else ()):
            found = self.queues[queue_id].offsets_of(positions)
            here = found >= 0
            queues[here], offsets[here] = queue, found[here]
        return queues, offsets

    def numbers_of(self, queue_ids: Int64s) -> Int64s:
        """The number within its topic of each queue id; -1 for -1."""
        return np.array([self.queues[i].place.queue if i >= 0 else -1 for i in queue_ids.tolist()], np.int64)

    # Tags

    def tag_number(self, tag: str) -> int | None:
        """The number of a tag; None while no stored message has it."""
        return self._tags.get(tag)

    @property
    def tag_count(self) -> int:
        """How many distinct tags there are."""
        return len(self._tags)

    def number_tags(self, tags: pa.Array) -> Int32s:
        """The number of each row's tag, new tags numbered in order of appearance (only ``apply`` calls this)."""
        if tags.null_count == len(tags):
            return np.full(len(tags), NO_TAG, np.int32)
        encoded = tags.dictionary_encode()
        numbers = [self._tags.setdefault(tag, len(self._tags) + 1) for tag in encoded.dictionary.to_pylist()]
        codes: Int64s = encoded.indices.fill_null(len(numbers)).to_numpy(zero_copy_only=False)
        by_code: Int32s = np.array([*numbers, NO_TAG], np.int32)
        return by_code[codes]

    def number_tag(self, tag: str) -> int:
        """As :meth:`number_tags`, of one row with a tag."""
        return self._tags.setdefault(tag, len(self._tags) + 1)

    # Making topics

    def decide_create(self, command: CreateTopic, rules: Rules) -> Decision:
        """A topic, or more queues for it; fewer than it has is refused."""
        queues = rules.default_queues if command.queues is None else command.queues
        if not is_name(command.name):
            raise error(Code.BAD_TOPIC_NAME, f"{command.name!r} is not a topic name")
        if not 1 <= queues <= rules.max_queues:
            raise error(Code.BAD_QUEUE, f"a topic has 1 to {rules.max_queues} queues, not {queues}")
        present = self.by_name.get(command.name)
        if present is None:
            if len(self.by_name) >= rules.max_topics:
                raise error(Code.TOO_MANY, f"there are {len(self.by_name)} topics", "max_topics")
            event = self.creation([(command.name, queues)])
            return Decision((event,), {"name": command.name, "queues": queues})
        has = len(present.queue_ids)
        if command.queues is None or queues == has:
            if not command.may_exist:
                raise error(Code.ALREADY_EXISTS, f"the topic {command.name!r} exists")
            return Decision((), {"name": command.name, "queues": has})
        if queues < has:
            raise error(Code.BAD_QUEUE, f"{command.name!r} has {has} queues; queues cannot be taken away")
        return Decision((self.creation([(command.name, queues)]),), {"name": command.name, "queues": queues})

    def creation(self, wanted: list[tuple[str, int]]) -> Event:
        """The event that makes topics, or grows them, to these numbers of queues."""
        rows, next_id = [], len(self.queues)
        for name, queues in wanted:
            rows.append((name, queues, next_id))
            present = self.by_name.get(name)
            next_id += queues - (len(present.queue_ids) if present else 0)
        return event_of_rows(Kind.TOPIC, rows)

    def with_created(self, creation: Event) -> Topics:
        """A directory as it will be after :meth:`creation`; the queues that exist are shared, not copied."""
        planned = Topics()
        planned.queues = list(self.queues)
        planned.by_name = {
            topic.name: Topic(topic.name, topic.number, list(topic.queue_ids), topic.turn)
            for topic in self.by_name.values()
        }
        planned._tags = self._tags
        planned.apply_topic(creation.batch)
        return planned

    def apply_topic(self, batch: pa.RecordBatch) -> None:
        for row in batch.to_pylist():
            topic = self.by_name.setdefault(row["name"], Topic(row["name"], len(self.by_name)))
            while len(topic.queue_ids) < row["queues"]:
                self._add(topic, QueueIndex(Place(topic.name, len(topic.queue_ids))))

    def _add(self, topic: Topic, queue: QueueIndex) -> None:
        topic.queue_ids.append(len(self.queues))
        self.queues.append(queue)
        self._topic_of.extend(1, topic=topic.number)

    # Snapshots

    def snapshot(self) -> dict[str, pa.Table]:
        entries, times, heads = [], [], []
        for queue in self.queues:
            entry, time = queue.to_tables()
            entries.append(entry.replace_schema_metadata())
            times.append(time.replace_schema_metadata())
            heads.append((queue.place.topic, queue.head, entry.num_rows, time.num_rows))
        topics = [(topic.name, topic.turn) for topic in self.by_name.values()]
        tables = {
            "topics": table_of(_TOPICS, topics),
            "tags": table_of(_TAGS, [(tag,) for tag in self._tags]),
            "queues": table_of(_QUEUES, heads),
        }
        if self.queues:
            tables["queue_entries"] = pa.concat_tables(entries)
            tables["queue_times"] = pa.concat_tables(times)
        return tables

    def restore(self, tables: dict[str, pa.Table]) -> None:
        for row in tables["topics"].to_pylist():
            self.by_name[row["name"]] = Topic(row["name"], len(self.by_name), turn=row["turn"])
        self._tags = {tag: number for number, tag in enumerate(tables["tags"]["tag"].to_pylist(), 1)}
        entry_at = time_at = 0
        for row in tables["queues"].to_pylist():
            topic = self.by_name[row["topic"]]
            queue = QueueIndex(Place(topic.name, len(topic.queue_ids)))
            queue.load(
                row["head"],
                tables["queue_entries"].slice(entry_at, row["entries"]),
                tables["queue_times"].slice(time_at, row["times"]),
            )
            entry_at, time_at = entry_at + row["entries"], time_at + row["times"]
            self._add(topic, queue)
