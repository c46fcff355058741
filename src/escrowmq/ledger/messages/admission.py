"""Validates plain and half messages: limits, topic, session, queue. One code per row, all in columns.

A rejected row does not affect its neighbours: the accepted ones become one event. A row's code is that of the first
check it fails.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from escrowmq.ledger.columns import codes as code
from escrowmq.ledger.columns.arrays import Bools, Int32s, Int64s, UInt8s, all_equal, all_true
from escrowmq.ledger.commands import Rules
from escrowmq.ledger.queues.topics import Topics
from escrowmq.message.hashes import hash_keys
from escrowmq.message.limits import common_text, refusals
from escrowmq.message.names import is_name


def check_limits(batch: pa.RecordBatch, topics: Topics, rules: Rules) -> UInt8s:
    """Return a code for each row of schema OUTGOING: OK, or the first limit that the message exceeds; TOO_MANY for a
    tag beyond the number of distinct tags that the shard allows."""
    codes = refusals(batch, rules)
    tag = batch.column("tag")
    if tag.null_count < len(tag):
        codes[_excess_tags(tag, topics, rules) & (codes == code.OK)] = code.TOO_MANY
    return codes


def _excess_tags(tags: pa.Array, topics: Topics, rules: Rules) -> Bools:
    """Return which rows have a new tag beyond the number of distinct tags that the shard allows."""
    encoded = tags.dictionary_encode()
    fresh = [number for number, name in enumerate(encoded.dictionary.to_pylist()) if topics.tag_number(name) is None]
    over = fresh[max(rules.max_tags - topics.tag_count, 0) :]
    return np.isin(encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False), over)


@dataclass(frozen=True, slots=True)
class TopicNames:
    """The topics of a batch. Names that are no topic yet have numbers that no topic has."""

    names: list[str]  # distinct
    of_row: Int32s  # the name of each row: its index
    numbers: Int32s  # the topic number of each row


def topics_of(batch: pa.RecordBatch, topics: Topics) -> TopicNames:
    """Return the topics that the rows of a batch of schema OUTGOING name, existing or not."""
    column, size = batch.column("topic"), batch.num_rows
    if (only := common_text(column)) is not None:
        names, of_row = [only], np.zeros(size, np.int32)
    else:
        encoded = column.dictionary_encode()
        names, of_row = encoded.dictionary.to_pylist(), encoded.indices.to_numpy()
    known = [topics.by_name.get(name) for name in names]
    numbers = [new if topic is None else topic.number for new, topic in enumerate(known, topics.made)]
    return TopicNames(names, of_row, np.array(numbers, np.int32)[of_row])


@dataclass(frozen=True, slots=True)
class Placement:
    """The queues of the rows of a batch; -1 for rejected rows."""

    queues: Int32s
    queue_ids: Int32s
    made: list[tuple[str, int]]  # topics to create first: name and queues


def place(batch: pa.RecordBatch, named: TopicNames, codes: UInt8s, topics: Topics, rules: Rules) -> Placement:
    """Choose topic and queue of each row whose code is OK, or set its code to the error. Missing topics are planned, if
    the rules allow it."""
    size = batch.num_rows
    queues, queue_ids = np.full(size, -1, np.int32), np.full(size, -1, np.int32)
    made: list[tuple[str, int]] = []
    next_id = len(topics.queues)
    for number, name in enumerate(named.names):
        rows = np.flatnonzero((named.of_row == number) & (codes == code.OK))
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
    """Return the queue number of each of ``rows``: the one it names, else by key, else by rotation (``turn``). Returns
    one number if all are by rotation. ``queues``: how many the topic has."""
    whole = len(rows) == batch.num_rows
    numbers, keys, keyless = batch.column("queue").to_numpy(), batch.column("key"), turn % queues
    if not whole:
        numbers = numbers[rows]
    free, no_key = numbers == -1, keys.null_count == len(keys)
    if no_key and all_true(free):
        return keyless
    named: Int64s = numbers.astype(np.int64)
    if no_key or not free.any():
        return np.where(free, keyless, named)
    mine = keys if whole else keys.take(pa.array(rows))
    by_key = (hash_keys(mine) % np.uint64(queues)).astype(np.int64)
    if mine.null_count:
        by_key = np.where(pc.is_null(mine).to_numpy(zero_copy_only=False), keyless, by_key)
    return np.where(free, by_key, named)


def group_by_queue(queue_ids: Int32s) -> list[tuple[int, slice | Int64s]]:
    """Return each queue id with the indexes of its rows (or a slice), in order."""
    if not len(queue_ids):
        return []
    if all_equal(queue_ids):
        return [(int(queue_ids[0]), slice(None))]
    narrow = queue_ids.astype(np.uint16) if queue_ids.max() < 1 << 16 else queue_ids  # 16 bits: a radix sort
    order = np.argsort(narrow, kind="stable")
    ordered = queue_ids[order]
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    return [(int(ordered[s]), rows) for s, rows in zip(starts, np.split(order, starts[1:]), strict=True)]
