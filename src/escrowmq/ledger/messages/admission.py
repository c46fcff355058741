"""Validates plain and half messages: limits, topic, session, queue. One code per row, all in columns.

A row that is refused does not hold up its neighbours: the accepted ones become one event. The first check that a row
fails gives its code.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from escrowmq.ledger.columns import codes as code
from escrowmq.ledger.columns.arrays import Int64s, UInt8s, all_equal, all_true
from escrowmq.ledger.commands import Rules
from escrowmq.ledger.queues.topics import Topics
from escrowmq.message.hashes import hash_keys
from escrowmq.message.limits import common_text, refusals
from escrowmq.message.names import is_name


def check_limits(batch: pa.RecordBatch, topics: Topics, rules: Rules) -> UInt8s:
    """Each message's own limits, and the shard's of distinct tags, for a batch of schema OUTGOING: one code per row."""
    codes = refusals(batch, rules)
    tag = batch.column("tag")
    if tag.null_count < len(tag):
        codes[_excess_tags(tag, topics, rules) & (codes == code.OK)] = code.TOO_MANY
    return codes


def _excess_tags(tags: pa.Array, topics: Topics, rules: Rules) -> npt.NDArray[np.bool_]:
    """Return rows whose tag would be one too many for the shard."""
    excess = np.zeros(len(tags), np.bool_)
    encoded = tags.dictionary_encode()
    names = encoded.dictionary.to_pylist()
    if topics.tag_count + len(names) <= rules.max_tags:
        return excess
    fresh = [number for number, name in enumerate(names) if topics.tag_number(name) is None]
    over = fresh[max(rules.max_tags - topics.tag_count, 0) :]
    return np.isin(encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False), over)


@dataclass(frozen=True, slots=True)
class TopicNames:
    """The topics of a batch: the distinct names, the name of each row (index into them), and each row's topic number.
    Names that are no topic yet have numbers that no topic has."""

    names: list[str]
    of_row: npt.NDArray[np.int32]
    numbers: npt.NDArray[np.int32]


def topics_of(batch: pa.RecordBatch, topics: Topics) -> TopicNames:
    """Return the topics that a batch of schema OUTGOING names."""
    column, size = batch.column("topic"), batch.num_rows
    if (only := common_text(column)) is not None:
        topic = topics.by_name.get(only)
        number = topics.made if topic is None else topic.number
        return TopicNames([only], np.zeros(size, np.int32), np.full(size, number, np.int32))
    encoded = column.dictionary_encode()
    names, of_row = encoded.dictionary.to_pylist(), encoded.indices.to_numpy()
    numbers = np.arange(topics.made, topics.made + len(names), dtype=np.int32)
    for index, name in enumerate(names):
        if (topic := topics.by_name.get(name)) is not None:
            numbers[index] = topic.number
    return TopicNames(names, of_row, numbers[of_row])


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the rows of a batch belong. ``queues`` and ``queue_ids`` are -1 for refused rows."""

    queues: npt.NDArray[np.int32]
    queue_ids: npt.NDArray[np.int32]
    made: list[tuple[str, int]]  # topics to create first: name and queues


def place(batch: pa.RecordBatch, named: TopicNames, codes: UInt8s, topics: Topics, rules: Rules) -> Placement:
    """Find each row's topic and queue; rows without get a code. The rules may create missing topics."""
    size = batch.num_rows
    queues, queue_ids = np.full(size, -1, np.int32), np.full(size, -1, np.int32)
    names, of_row = named.names, named.of_row
    made: list[tuple[str, int]] = []
    next_id = len(topics.queues)
    fit = not np.count_nonzero(codes)
    for number, name in enumerate(names):
        if len(names) > 1:
            rows = np.flatnonzero((of_row == number) & (codes == code.OK))
        else:
            rows = np.arange(size) if fit else np.flatnonzero(codes == code.OK)
        if not len(rows):
            continue
        topic = topics.by_name.get(name)
        if topic is not None:
            ids, turn = np.array(topic.queue_ids, np.int32), topic.turn
        elif (refusal := _refuse_topic(name, topics, len(made), rules)) != code.OK:
            codes[rows] = refusal
            continue
        else:
            ids, turn = np.arange(next_id, next_id + rules.default_queues, dtype=np.int32), 0
        chosen = _choose(batch, rows, len(ids), turn)
        if not isinstance(chosen, int):
            wrong = (chosen < 0) | (chosen >= len(ids))
            codes[rows[wrong]] = code.BAD_QUEUE
            rows, chosen = rows[~wrong], chosen[~wrong]
        if topic is None and len(rows):
            made.append((name, rules.default_queues))
            next_id += rules.default_queues
        queues[rows], queue_ids[rows] = chosen, ids[chosen]
    return Placement(queues, queue_ids, made)


def _refuse_topic(name: str, topics: Topics, making: int, rules: Rules) -> int:
    if not is_name(name):
        return code.BAD_TOPIC_NAME
    if not rules.auto_create_topics or not topics.may_be_made(name):
        return code.UNKNOWN_TOPIC
    return code.TOO_MANY if len(topics.by_name) + making >= rules.max_topics else code.OK


def _choose(batch: pa.RecordBatch, rows: Int64s, queues: int, turn: int) -> Int64s | int:
    """Queue numbers: the one named, else by key, else all keyless rows together on the queue whose turn it is; that one
    alone when no row has a key or names a queue."""
    whole = len(rows) == batch.num_rows
    numbers = batch.column("queue").to_numpy()
    free = (numbers if whole else numbers[rows]) == -1
    keys, keyless = batch.column("key"), turn % queues
    if keys.null_count == len(keys) and all_true(free):
        return keyless
    named: Int64s = (numbers if whole else numbers[rows]).astype(np.int64)
    if not free.any():
        return named
    if keys.null_count == len(keys):
        return np.where(free, keyless, named)
    mine = keys if whole else keys.take(pa.array(rows))
    by_key = (hash_keys(mine) % np.uint64(queues)).astype(np.int64)
    if mine.null_count:
        by_key = np.where(pc.is_null(mine).to_numpy(zero_copy_only=False), keyless, by_key)
    return np.where(free, by_key, named)


def group_by_queue(queue_ids: npt.NDArray[np.int32]) -> list[tuple[int, slice | Int64s]]:
    """Each queue id with the rows that go to it, rows in order."""
    if not len(queue_ids):
        return []
    if all_equal(queue_ids):
        return [(int(queue_ids[0]), slice(None))]
    narrow = queue_ids.astype(np.uint16) if queue_ids.max() < 1 << 16 else queue_ids  # 16 bits: a radix sort
    order = np.argsort(narrow, kind="stable")
    ordered = queue_ids[order]
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    return [(int(ordered[s]), rows) for s, rows in zip(starts, np.split(order, starts[1:]), strict=True)]
