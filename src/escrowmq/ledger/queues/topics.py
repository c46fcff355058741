"""Topics, their queues, and the number assigned to each tag.

Which queue a message goes to (Kafka's custom, which RocketMQ users share): the one it names; else the one its key
hashes to, so that equal keys keep their order; else, without a key, all such rows of a batch stay together and batches
take the queues in rotation.

A topic that was deleted and made again is another topic: it has another number and other queue ids. But its queues go
on behind the offsets of the old ones, with one left out, so that no pair of queue and offset ever names two messages
(I16), and a reader with an offset of the old topic gets RANGE_PURGED, instead of reading the new one.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from escrowmq.errors import Code, error
from escrowmq.ledger.columns.arrays import Columns, Int32s, Int64s, all_equal, int64s, table_of
from escrowmq.ledger.commands import AlterTopic, CreateTopic, Rules, TopicRules
from escrowmq.ledger.events import Decision, Event, event_of, event_of_rows
from escrowmq.ledger.queues.queues import NO_TAG, Place, QueueIndex
from escrowmq.message.names import is_name
from escrowmq.schemas import Kind

MAX_DELETED = 65_536
"""Deleted names remembered; beyond, the oldest is forgotten, and every name that is not remembered begins behind its
offsets.
"""
LEAST_RETENTION_US = 1_000_000
MOST = 1 << 62

# What came later than the first format is absent in older snapshots: number to retention_bytes, bytes to gone.
_TOPICS = pa.schema(
    [("name", pa.utf8()), ("turn", pa.int64()), ("number", pa.int32()), *int64s("retention_us", "retention_bytes")]
)
_TAGS = pa.schema([("tag", pa.utf8())])
_QUEUES = pa.schema(
    [
        ("topic", pa.utf8()),
        *int64s("head", "entries", "times", "bytes"),
        ("queue", pa.int32()),
        ("gone", pa.bool_()),  # its topic was deleted
    ]
)
_DELETED = pa.schema([("name", pa.utf8()), ("number", pa.int32()), ("begins", pa.list_(pa.int64()))])
_FORGOTTEN = ""  # the name of the row for those that are not remembered


@dataclass(slots=True)
class Topic:
    """A topic: its queue ids by queue number, and how many batches came (``turn``): those without keys take its queues
    in rotation. ``number`` (0, 1, ... as they were made) is never used again, so it names one for ever."""

    name: str
    number: int
    queue_ids: list[int] = field(default_factory=list)
    turn: int = 0
    rules: TopicRules = field(default_factory=TopicRules)


@dataclass(frozen=True, slots=True)
class Deleted:
    """The memory of a deleted name: the number of its last topic, and where a new one's queues begin."""

    number: int
    begins: tuple[int, ...]


class Topics:
    """The directory of a shard."""

    def __init__(self) -> None:
        self.queues: list[QueueIndex] = []
        self.by_name: dict[str, Topic] = {}
        self.deleted: dict[str, Deleted] = {}
        """By name, those that were deleted first first. Of names that exist again, too."""
        self.made = 0
        """Topics that were ever made; no topic has this number yet."""
        self.deleted_position = 0
        """Of the last deletion: below lies what no topic has."""
        self.altered = 0
        """How often a topic was deleted, or given a retention, since this directory was made: a sign, no state."""
        self.first_begin = 0
        """The first offset of the queues of a name that is not remembered: 0, until there are too many to remember."""
        self._tags: dict[str, int] = {}
        self._topic_of = Columns({"topic": np.int32})  # by queue id

    def may_be_made(self, name: str) -> bool:
        """Return whether a topic may come into being because somebody uses it. One that a person deleted may not."""
        return name not in self.deleted

    def begin_of(self, name: str, queue: int) -> int:
        """Return the first offset of a queue to be."""
        deleted = self.deleted.get(name)
        return deleted.begins[queue] if deleted is not None and queue < len(deleted.begins) else self.first_begin

    def has(self, name: str) -> bool:
        return name in self.by_name

    def queue_ids(self, name: str) -> list[int]:
        """Queue ids of a topic by queue number; Rejected(UNKNOWN_TOPIC) if it does not exist."""
        topic = self.by_name.get(name)
        if topic is None:
            raise error(Code.UNKNOWN_TOPIC, f"no topic {name!r}")
        return topic.queue_ids

    def queue_id(self, name: str, queue: int) -> int:
        """Return the id of one queue; Rejected(UNKNOWN_TOPIC or BAD_QUEUE)."""
        ids = self.queue_ids(name)
        if not 0 <= queue < len(ids):
            raise error(Code.BAD_QUEUE, f"{name!r} has queues 0 to {len(ids) - 1}, not {queue}")
        return ids[queue]

    def numbers_of_queues(self, queue_ids: Int32s) -> Int32s | int:
        """Return the topic number of each queue id; one for all where they are of one topic."""
        numbers: Int32s = self._topic_of["topic"][queue_ids]
        return int(numbers[0]) if len(numbers) and all_equal(numbers) else numbers

    def find(self, name: str, positions: Int64s) -> tuple[Int64s, Int64s]:
        """Return queue and offset of each position in a topic; -1 for those in none of its queues. For repeats."""
        queues, offsets = np.full(len(positions), -1, np.int64), np.full(len(positions), -1, np.int64)
        topic = self.by_name.get(name)
        for queue, queue_id in enumerate(topic.queue_ids if topic else ()):
            found = self.queues[queue_id].offsets_of(positions)
            here = found >= 0
            queues[here], offsets[here] = queue, found[here]
        return queues, offsets

    def numbers_of(self, queue_ids: Int64s) -> Int64s:
        """Return the number within its topic of each queue id; -1 for -1."""
        return np.array([self.queues[i].place.queue if i >= 0 else -1 for i in queue_ids.tolist()], np.int64)

    @property
    def any_own(self) -> bool:
        """Whether a topic has a retention of its own."""
        return any(topic.rules.is_own for topic in self.by_name.values())

    def is_gone(self, queue_id: int) -> bool:
        """Return whether a queue's topic was deleted."""
        place = self.queues[queue_id].place
        topic = self.by_name.get(place.topic)
        return topic is None or place.queue >= len(topic.queue_ids) or topic.queue_ids[place.queue] != queue_id

    def keep_less(self, position: int) -> bool:
        """Return whether something behind ``position`` may be removed before the broker's retention."""
        return self.deleted_position > position or self.any_own

    # Tags

    def tag_number(self, tag: str) -> int | None:
        """Return the number of a tag; None while no stored message has it."""
        return self._tags.get(tag)

    @property
    def tag_count(self) -> int:
        """How many distinct tags there are."""
        return len(self._tags)

    def number_tags(self, tags: pa.Array) -> Int32s:
        """Return the number of each row's tag, new tags numbered in order of appearance (only ``apply`` calls this)."""
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
        """Return a topic, or more queues for it; fewer than it has is refused."""
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
        """Return the event that makes topics, or grows them, to these numbers of queues."""
        rows, next_id = [], len(self.queues)
        for name, queues in wanted:
            rows.append((name, queues, next_id))
            present = self.by_name.get(name)
            next_id += queues - (len(present.queue_ids) if present else 0)
        return event_of_rows(Kind.TOPIC, rows)

    def with_created(self, creation: Event) -> Topics:
        """Return a directory as it will be after :meth:`creation`; the queues that exist are shared, not copied."""
        planned = Topics()
        planned.queues = list(self.queues)
        planned.by_name = {
            topic.name: Topic(topic.name, topic.number, list(topic.queue_ids), topic.turn)
            for topic in self.by_name.values()
        }
        planned.deleted, planned.made, planned.first_begin = self.deleted, self.made, self.first_begin
        planned._tags = self._tags
        planned.apply_topic(creation.batch)
        return planned

    def apply_topic(self, batch: pa.RecordBatch) -> list[int]:
        """Kind.TOPIC. The ids of the queues that topics got which were there before."""
        grown: list[int] = []
        for row in batch.to_pylist():
            topic = self.by_name.get(row["name"])
            grows = topic is not None
            if topic is None:
                topic = self.by_name[row["name"]] = Topic(row["name"], self.made)
                self.made += 1
            while (number := len(topic.queue_ids)) < row["queues"]:
                if grows:
                    grown.append(len(self.queues))
                self._add(topic, QueueIndex(Place(topic.name, number), self.begin_of(topic.name, number)))
        return grown

    def _add(self, topic: Topic, queue: QueueIndex) -> None:
        topic.queue_ids.append(len(self.queues))
        self.queues.append(queue)
        self._topic_of.extend(1, topic=topic.number)

    # Altering and deleting topics

    def decide_alter(self, command: AlterTopic, rules: Rules) -> tuple[list[Event], TopicRules, int]:
        """More queues, and a retention of its own: the events, the rules and the number of queues that it then has.
        UNKNOWN_TOPIC, BAD_QUEUE, BAD_REQUEST."""
        has = len(self.queue_ids(command.name))
        own, events = _alter(self.by_name[command.name].rules, command), list[Event]()
        if command.queues is not None and command.queues != has:
            events += self.decide_create(CreateTopic(command.name, command.queues, may_exist=True), rules).events
        if own != self.by_name[command.name].rules:
            columns = ([-1 if value is None else value] for value in (own.retention_us, own.retention_bytes))
            events.append(event_of(Kind.TOPIC_ALTERED, [command.name], *columns))
        return events, own, has if command.queues is None else command.queues

    def apply_altered(self, batch: pa.RecordBatch) -> None:
        """Kind.TOPIC_ALTERED."""
        self.altered += 1
        for row in batch.to_pylist():
            self.by_name[row["name"]].rules = _rules_of(row)

    def apply_deleted(self, batch: pa.RecordBatch, position: int) -> list[tuple[str, list[int]]]:
        """Kind.TOPIC_DELETED. Each name with the queue ids that it had; those queues are empty now, and no topic's."""
        found: list[tuple[str, list[int]]] = []
        for name in batch.column("name").to_pylist():
            topic = self.by_name.pop(name)
            before = self.deleted.pop(name, None)
            begins = [queue.end + 1 for queue in (self.queues[id] for id in topic.queue_ids)]
            begins += before.begins[len(begins) :] if before is not None else ()
            self.deleted[name] = Deleted(topic.number, tuple(begins))
            for id in topic.queue_ids:
                queue = self.queues[id]
                queue.trim(queue.end)  # whoever still holds it reads nothing of it
                self.queues[id] = QueueIndex(queue.place, queue.end)
            found.append((name, topic.queue_ids))
            if len(self.deleted) > MAX_DELETED:
                oldest = self.deleted.pop(next(iter(self.deleted)))
                self.first_begin = max(self.first_begin, *oldest.begins)
        self.deleted_position = position
        self.altered += 1
        return found

    # Snapshots

    def snapshot(self) -> dict[str, pa.Table]:
        entries, times, heads = [], [], []
        own = {(topic.name, id) for topic in self.by_name.values() for id in topic.queue_ids}
        for id, queue in enumerate(self.queues):
            entry, time = queue.to_tables()
            entries.append(entry.replace_schema_metadata())
            times.append(time.replace_schema_metadata())
            place, gone = queue.place, (queue.place.topic, id) not in own
            heads.append((place.topic, queue.head, entry.num_rows, time.num_rows, queue.bytes_total, place.queue, gone))
        topics = [
            (topic.name, topic.turn, topic.number, topic.rules.retention_us, topic.rules.retention_bytes)
            for topic in self.by_name.values()
        ]
        deleted = [(name, one.number, one.begins) for name, one in self.deleted.items()]
        tables = {
            "topics": table_of(_TOPICS, topics),
            "tags": table_of(_TAGS, [(tag,) for tag in self._tags]),
            "queues": table_of(_QUEUES, heads),
            "topics_deleted": table_of(
                _DELETED, [(_FORGOTTEN, self.made - 1, (self.first_begin, self.deleted_position)), *deleted]
            ),
        }
        if self.queues:
            tables["queue_entries"] = pa.concat_tables(entries)
            tables["queue_times"] = pa.concat_tables(times)
        return tables

    def restore(self, tables: dict[str, pa.Table]) -> None:
        for number, row in enumerate(tables["topics"].to_pylist()):
            own = TopicRules(retention_us=row.get("retention_us"), retention_bytes=row.get("retention_bytes"))
            topic = Topic(row["name"], row.get("number", number), turn=row["turn"], rules=own)
            self.by_name[topic.name] = topic
        self.made = len(self.by_name)
        for row in tables["topics_deleted"].to_pylist() if "topics_deleted" in tables else ():
            if row["name"] == _FORGOTTEN:
                self.made, (self.first_begin, self.deleted_position) = row["number"] + 1, row["begins"]
            else:
                self.deleted[row["name"]] = Deleted(row["number"], tuple(row["begins"]))
        self._tags = {tag: number for number, tag in enumerate(tables["tags"]["tag"].to_pylist(), 1)}
        entry_at = time_at = 0
        for row in tables["queues"].to_pylist():
            gone = row.get("gone", False)
            topic = Topic(row["topic"], -1) if gone else self.by_name[row["topic"]]
            queue = QueueIndex(Place(topic.name, row.get("queue", len(topic.queue_ids))))
            queue.load(
                row["head"],
                tables["queue_entries"].slice(entry_at, row["entries"]),
                tables["queue_times"].slice(time_at, row["times"]),
                row.get("bytes", 0),
            )
            entry_at, time_at = entry_at + row["entries"], time_at + row["times"]
            self._add(topic, queue)


def _alter(had: TopicRules, command: AlterTopic) -> TopicRules:
    """Return the rules of a topic after an operator's action. BAD_REQUEST for what makes no sense."""
    fields = [f.name for f in dataclasses.fields(TopicRules)]
    if unknown := [name for name in command.reset if name not in fields]:
        raise error(Code.BAD_REQUEST, f"a topic has no {unknown[0]!r:.100} of its own", f"one of {', '.join(fields)}")
    given = {name: value for name in fields if (value := getattr(command.rules, name)) is not None}
    if both := [name for name in command.reset if name in given]:
        raise error(Code.BAD_REQUEST, f"{both[0]} is given, and reset")
    if not LEAST_RETENTION_US <= given.get("retention_us", LEAST_RETENTION_US) < MOST:
        raise error(Code.BAD_REQUEST, "the retention of a topic is at least a second")
    if not 1 <= given.get("retention_bytes", 1) < MOST:
        raise error(Code.BAD_REQUEST, "the retention of a topic is at least one byte")
    return dataclasses.replace(had, **{**dict.fromkeys(command.reset), **given})


def _rules_of(row: dict[str, Any]) -> TopicRules:
    values = (None if row[name] < 0 else row[name] for name in ("retention_us", "retention_bytes"))
    return TopicRules(**dict(zip(("retention_us", "retention_bytes"), values, strict=True)))
