"""Topics, their queues, and the number assigned to each tag.

The queue of a message (as in Kafka and RocketMQ): the one it names; else by its key, so that equal keys keep their
order; else all such rows of a batch stay together, and batches take the queues in rotation.

A topic that was deleted and created again is another topic, with another number and other queue ids. But its queues
continue behind the offsets of the old ones, with one left out, so that no pair of queue and offset ever names two
messages (I16), and a reader with an offset of the old topic gets RANGE_PURGED.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from escrowmq.errors import Code, error
from escrowmq.ledger.columns.arrays import Columns, Int32s, Int64s, all_equal, int64s, table_of
from escrowmq.ledger.commands import AlterTopic, CreateTopic, Rules, TopicRules
from escrowmq.ledger.events import Decision, Event, event_of, event_of_rows, rows_of
from escrowmq.ledger.queues.queues import NO_TAG, Place, QueueIndex
from escrowmq.message.names import is_name
from escrowmq.schemas import Kind

MAX_DELETED = 65_536
"""Deleted names remembered; beyond, the oldest is forgotten, and queues of any name begin behind its offsets."""
LEAST_RETENTION_US = 1_000_000
MOST = 1 << 62

# What came later than the first format is absent in older snapshots: number to retention_bytes, bytes to gone.
_TOPICS = pa.schema(
    [("name", pa.utf8()), ("turn", pa.int64()), ("number", pa.int32()), *int64s("retention_us", "retention_bytes")]
)
_TAGS = pa.schema([("tag", pa.utf8())])
_QUEUES = pa.schema(  # gone: its topic was deleted
    [("topic", pa.utf8()), *int64s("head", "entries", "times", "bytes"), ("queue", pa.int32()), ("gone", pa.bool_())]
)
_DELETED = pa.schema([("name", pa.utf8()), ("number", pa.int32()), ("begins", pa.list_(pa.int64()))])
_FORGOTTEN = ""  # the name of the row for those that are not remembered


@dataclass(slots=True)
class Topic:
    """A topic: its queue ids by queue number, and the number of its batches (``turn``) for the rotation of queues.
    ``number`` (0, 1, ... in order of creation) is never reused."""

    name: str
    number: int
    queue_ids: list[int] = field(default_factory=list)
    turn: int = 0
    rules: TopicRules = field(default_factory=TopicRules)


@dataclass(frozen=True, slots=True)
class Deleted:
    """A deleted name: the number of its last topic, and where the queues of a new one begin."""

    number: int
    begins: tuple[int, ...]


class Topics:
    """The directory of a shard."""

    def __init__(self) -> None:
        self.queues: list[QueueIndex] = []
        self.by_name: dict[str, Topic] = {}
        self.deleted: dict[str, Deleted] = {}  # by name, in order of deletion; also of names that exist again
        self.made = 0  # topics ever created: the number of the next one
        self.deleted_position = 0  # of the last deletion: all messages of deleted topics are below
        self.altered = 0  # deletions and changes of retention since this object was made; a change counter, no state
        self.first_begin = 0
        """The first offset of queues of a name that is not remembered: 0 until too many were deleted."""
        self._tags: dict[str, int] = {}
        self._topic_of = Columns({"topic": np.int32})  # by queue id

    def may_be_made(self, name: str) -> bool:
        """Return whether a topic may be created by its first use: not if an operator deleted one of this name."""
        return name not in self.deleted

    def has(self, name: str) -> bool:
        return name in self.by_name

    def queue_ids(self, name: str) -> list[int]:
        """Return the queue ids of a topic by queue number; Rejected(UNKNOWN_TOPIC) if it does not exist."""
        if (topic := self.by_name.get(name)) is None:
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
        """Return queue number and offset of the message at each log position in a topic; both -1 for those in none of
        its queues. It scans: for repeats only."""
        queues, offsets = np.full((2, len(positions)), -1, np.int64)
        topic = self.by_name.get(name)
        for queue, queue_id in enumerate(topic.queue_ids if topic else ()):
            found = self.queues[queue_id].offsets_of(positions)
            here = found >= 0
            queues[here], offsets[here] = queue, found[here]
        return queues, offsets

    def numbers_of(self, queue_ids: Int64s) -> Int64s:
        """Return the number within its topic for each queue id; -1 for the id -1."""
        return np.array([self.queues[i].place.queue if i >= 0 else -1 for i in queue_ids.tolist()], np.int64)

    @property
    def any_own(self) -> bool:
        """Return whether a topic has a retention of its own."""
        return any(topic.rules.is_own for topic in self.by_name.values())

    def is_gone(self, queue_id: int) -> bool:
        """Return whether a queue's topic was deleted."""
        place = self.queues[queue_id].place
        topic = self.by_name.get(place.topic)
        return topic is None or place.queue >= len(topic.queue_ids) or topic.queue_ids[place.queue] != queue_id

    def can_remove_early(self, position: int) -> bool:
        """Return whether messages from ``position`` on may be removed before the broker's retention, because a topic
        was deleted or has a retention of its own."""
        return self.deleted_position > position or self.any_own

    def tag_number(self, tag: str) -> int | None:
        """Return the number of a tag; None while no stored message has it."""
        return self._tags.get(tag)

    @property
    def tag_count(self) -> int:
        """The number of distinct tags of the shard."""
        return len(self._tags)

    def number_tags(self, tags: pa.Array) -> Int32s:
        """Return the number of each row's tag (NO_TAG: none), and assign the next numbers to new tags. Called only when
        an event is applied."""
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

    def decide_create(self, command: CreateTopic, rules: Rules) -> Decision:
        """Decide that a topic is created, or gets more queues. Answer: {"name", "queues"}. Raises BAD_TOPIC_NAME,
        TOO_MANY, ALREADY_EXISTS, BAD_QUEUE (also for fewer queues than it has)."""
        queues = rules.default_queues if command.queues is None else command.queues
        present = self.by_name.get(command.name)
        has = 0 if present is None else len(present.queue_ids)
        if not is_name(command.name):
            raise error(Code.BAD_TOPIC_NAME, f"{command.name!r} is not a topic name")
        if not 1 <= queues <= rules.max_queues:
            raise error(Code.BAD_QUEUE, f"a topic has 1 to {rules.max_queues} queues, not {queues}")
        if present is None and len(self.by_name) >= rules.max_topics:
            raise error(Code.TOO_MANY, f"there are {len(self.by_name)} topics", "max_topics")
        if present is not None and command.queues in (None, has):
            if not command.may_exist:
                raise error(Code.ALREADY_EXISTS, f"the topic {command.name!r} exists")
            return Decision((), {"name": command.name, "queues": has})
        if queues < has:
            raise error(Code.BAD_QUEUE, f"{command.name!r} has {has} queues; queues cannot be taken away")
        return Decision((self.creation([(command.name, queues)]),), {"name": command.name, "queues": queues})

    def creation(self, wanted: list[tuple[str, int]]) -> Event:
        """Return the event that creates the topics ``wanted`` (name, number of queues), or grows them to that."""
        rows, next_id = [], len(self.queues)
        for name, queues in wanted:
            rows.append((name, queues, next_id))
            present = self.by_name.get(name)
            next_id += queues - (len(present.queue_ids) if present else 0)
        return event_of_rows(Kind.TOPIC, rows)

    def with_created(self, creation: Event) -> Topics:
        """Return a directory as it will be after :meth:`creation`; existing queues are shared, not copied."""
        planned = Topics()
        planned.queues = list(self.queues)
        copies = (dataclasses.replace(topic, queue_ids=list(topic.queue_ids)) for topic in self.by_name.values())
        planned.by_name = {topic.name: topic for topic in copies}
        planned.deleted, planned.made, planned.first_begin = self.deleted, self.made, self.first_begin
        planned._tags = self._tags
        planned.apply_topic(creation.batch)
        return planned

    def apply_topic(self, batch: pa.RecordBatch) -> list[int]:
        """Apply Kind.TOPIC: create topics and queues. Returns the ids of new queues of topics that existed."""
        grown: list[int] = []
        for name, queues, _ in rows_of(batch):
            topic = self.by_name.get(name)
            if topic is not None:
                grown += range(len(self.queues), len(self.queues) + queues - len(topic.queue_ids))
            else:
                topic = self.by_name[name] = Topic(name, self.made)
                self.made += 1
            deleted = self.deleted.get(name)
            begins = () if deleted is None else deleted.begins
            for number in range(len(topic.queue_ids), queues):
                begin = begins[number] if number < len(begins) else self.first_begin
                self._add(topic, QueueIndex(Place(name, number), begin))
        return grown

    def _add(self, topic: Topic, queue: QueueIndex) -> None:
        topic.queue_ids.append(len(self.queues))
        self.queues.append(queue)
        self._topic_of.extend(1, topic=topic.number)

    def decide_alter(self, command: AlterTopic, rules: Rules) -> tuple[list[Event], TopicRules, int]:
        """Decide that a topic gets queues or another retention. Returns the events, its new rules and number of queues.
        Raises UNKNOWN_TOPIC, BAD_QUEUE, BAD_REQUEST."""
        has, had = len(self.queue_ids(command.name)), self.by_name[command.name].rules
        own, events = _alter(had, command), list[Event]()
        if command.queues not in (None, has):
            events += self.decide_create(CreateTopic(command.name, command.queues, may_exist=True), rules).events
        if own != had:
            columns = ([-1 if value is None else value] for value in (own.retention_us, own.retention_bytes))
            events.append(event_of(Kind.TOPIC_ALTERED, [command.name], *columns))
        return events, own, has if command.queues is None else command.queues

    def apply_altered(self, batch: pa.RecordBatch) -> None:
        """Apply Kind.TOPIC_ALTERED: set the topics' own retention."""
        self.altered += 1
        for name, *values in rows_of(batch):
            own = (None if value < 0 else value for value in values)
            self.by_name[name].rules = TopicRules(**dict(zip(("retention_us", "retention_bytes"), own, strict=True)))

    def apply_deleted(self, batch: pa.RecordBatch, position: int) -> list[tuple[str, list[int]]]:
        """Apply Kind.TOPIC_DELETED: remove topics, and empty their queues. Returns each name with its former queue ids,
        which are of no topic now."""
        found: list[tuple[str, list[int]]] = []
        for name in batch.column("name").to_pylist():
            topic = self.by_name.pop(name)
            before = self.deleted.pop(name, None)
            begins = [queue.end + 1 for queue in (self.queues[id] for id in topic.queue_ids)]
            begins += before.begins[len(begins) :] if before is not None else ()
            self.deleted[name] = Deleted(topic.number, tuple(begins))
            for id in topic.queue_ids:
                queue = self.queues[id]
                queue.trim(queue.end)  # a reader that still holds it finds nothing
                self.queues[id] = QueueIndex(queue.place, queue.end)
            found.append((name, topic.queue_ids))
            if len(self.deleted) > MAX_DELETED:
                oldest = self.deleted.pop(next(iter(self.deleted)))
                self.first_begin = max(self.first_begin, *oldest.begins)
        self.deleted_position = position
        self.altered += 1
        return found

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
        forgotten = (_FORGOTTEN, self.made - 1, (self.first_begin, self.deleted_position))
        deleted = [forgotten, *((name, one.number, one.begins) for name, one in self.deleted.items())]
        tables = {
            "topics": table_of(_TOPICS, topics),
            "tags": table_of(_TAGS, [(tag,) for tag in self._tags]),
            "queues": table_of(_QUEUES, heads),
            "topics_deleted": table_of(_DELETED, deleted),
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
            entries = tables["queue_entries"].slice(entry_at, row["entries"])
            times = tables["queue_times"].slice(time_at, row["times"])
            queue.load(row["head"], entries, times, row.get("bytes", 0))
            entry_at, time_at = entry_at + row["entries"], time_at + row["times"]
            self._add(topic, queue)


def _alter(had: TopicRules, command: AlterTopic) -> TopicRules:
    """Return the rules of a topic after an operator's action. Raises BAD_REQUEST for invalid values."""
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
