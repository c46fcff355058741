"""Writers of format "escrow": tasks prepare rows as half messages, one decision of the driver makes a whole batch
visible.

*Streams*, exactly once (the mark is in the broker: the last batch of each query). Tasks prepare under the producer
group of the query; the driver's commit names the transactions of the tasks that Spark counts, as (query, batch). The
broker takes the first commit of a batch, drops its repeats, and rolls back whatever else is undecided in the group:
attempts that failed, or that ran twice. So whichever process is killed between any two steps, the topic ends as if
every batch had run once.

*Batches*: all or nothing at each broker; with option ``write_id`` a repeat of the write is recognised too.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from escrowmq.client.bus import Bus
from escrowmq.client.links.answers import patient_action
from escrowmq.client.producing.producer import Producer
from escrowmq.connecting import connect
from escrowmq.errors import Code, EscrowError, Misuse
from escrowmq.message.names import check_name
from escrowmq.model import COMMIT, ROLLBACK, TransactionId
from escrowmq.platform.failpoints import reach
from escrowmq.spark.checkback import CheckpointChecker, warn_if_unreadable
from escrowmq.spark.options import WriteOptions, write_options
from escrowmq.spark.preparing import Preparation, check_columns
from escrowmq.wire.actions.brokers import HELLO
from escrowmq.wire.actions.writers import SHOW

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType


_log = logging.getLogger(__name__)

ROLLBACK_PATIENCE = 5.0
"""Timeout of the rollback of a failed task, in seconds, unless ``timeout`` is shorter."""

MOST_PRODUCERS = 16
"""Number of producers that a process caches, because it may write under many group names in turn."""


@dataclass
class Prepared(WriterCommitMessage):
    """The result of one task: its transactions, and the number of their rows."""

    query: str
    ids: list[bytes] = field(default_factory=list)
    rows: int = 0


def stream_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> EscrowStreamWriter:
    """Return the writer of a stream. Raises Misuse for wrong options, columns, or output mode ``complete``."""
    chosen = _check_options(options, schema)
    if chosen.write_id is not None:
        raise Misuse(Code.BAD_SETTING, "'write_id' is of batches", "a stream is known by its checkpoint")
    if overwrite:
        hint = "use append (Spark offers Python sinks no update)"
        raise Misuse(Code.BAD_SETTING, "output mode 'complete' would rewrite the topic", hint)
    return EscrowStreamWriter(chosen)


def batch_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> EscrowWriter:
    """Return the writer of a batch. Raises Misuse for wrong options, columns, or mode ``overwrite``."""
    chosen = _check_options(options, schema)
    if overwrite:
        raise Misuse(Code.BAD_SETTING, "mode 'overwrite' would rewrite the topic", 'use mode("append")')
    return EscrowWriter(chosen, chosen.write_id or uuid.uuid4().hex)


def _check_options(options: Mapping[str, str], schema: StructType) -> WriteOptions:
    chosen = write_options(options)
    check_columns({one.name: one.dataType.simpleString() for one in schema.fields}, chosen.topic)
    if chosen.topic is not None:
        check_name(chosen.topic, Code.BAD_TOPIC_NAME)
    if chosen.group is not None:
        check_name(chosen.group, Code.BAD_GROUP_NAME)
    elif chosen.write_id is not None:
        check_name(f"spark.{chosen.write_id}", Code.BAD_GROUP_NAME)  # the group that it will have
    return chosen


class EscrowStreamWriter(DataSourceStreamArrowWriter):
    """The sink of one streaming query."""

    def __init__(self, options: WriteOptions) -> None:
        self.options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Prepare the rows of one task, on an executor."""
        from pyspark import TaskContext

        context = TaskContext.get()
        query = context.getLocalProperty("sql.streaming.queryId") if context is not None else None
        if query is None:
            raise Misuse(Code.BAD_ARGUMENT, "this task belongs to no streaming query")
        warn_if_unreadable(self.options.checkpoint)
        return _prepare_task(self.options, self._make_group_name(query), query, iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Commit (query, batch), on the driver. A repeat publishes nothing."""
        found = _list_prepared(messages)
        if not found:
            return
        query = found[0].query
        ids = _list_ids(found)
        producer = _get_producer(self.options, self._make_group_name(query))
        if not self.options.adopt:
            _check_sequel(self.options, query, batchId)
        _reach_if_rows("spark.before-decision", ids)
        producer.commit_batch(query, batchId, map(TransactionId.from_bytes, ids))
        _reach_if_rows("spark.after-decision", ids)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Roll back the known transactions of a failed batch. The next commit rolls back the others."""
        found = _list_prepared(messages)
        if found:
            _roll_back(self.options, self._make_group_name(found[0].query), found)

    def _make_group_name(self, query: str) -> str:
        return self.options.group or f"spark.{query}"


class EscrowWriter(DataSourceArrowWriter):
    """The sink of one batch write. ``job`` is its name."""

    def __init__(self, options: WriteOptions, job: str) -> None:
        self.options = options
        self.job = job

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Prepare the rows of one task, on an executor."""
        return _prepare_task(self.options, self._make_group_name(), self.job, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Commit, on the driver. With ``write_id`` it is batch 0 of that writer, so that a repeat publishes nothing."""
        ids = _list_ids(_list_prepared(messages))
        producer = _get_producer(self.options, self._make_group_name())
        _reach_if_rows("spark.before-decision", ids)
        if self.options.write_id is not None:
            producer.commit_batch(self.job, 0, map(TransactionId.from_bytes, ids))
        elif ids:
            producer.end_batch(ids, COMMIT).check()
        _reach_if_rows("spark.after-decision", ids)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Roll back the known transactions of a failed write."""
        _roll_back(self.options, self._make_group_name(), _list_prepared(messages))

    def _make_group_name(self) -> str:
        return self.options.group or (f"spark.{self.job}" if self.options.write_id is not None else "spark")


def _reach_if_rows(point: str, at_stake: list[Any]) -> None:
    """Reach a failpoint, but only for a batch with rows; empty batches occur at any time."""
    if at_stake:
        reach(point)


def _list_prepared(messages: list[WriterCommitMessage | None]) -> list[Prepared]:
    return [message for message in messages if isinstance(message, Prepared)]


def _list_ids(found: list[Prepared]) -> list[bytes]:
    return [raw for message in found for raw in message.ids]


def _check_sequel(options: WriteOptions, query: str, batch: int) -> None:
    """Raise Misuse(BAD_SETTING) for a batch whose predecessor is unknown to all brokers. Every batch is committed, even
    an empty one. So either the query wrote elsewhere before, and the topic would silently lack those rows, or the
    brokers have forgotten the query and could not recognise a repeat."""
    deadline = time.monotonic() + options.timeout
    links = _brokers[options.url, options.token_file].bus.router.links
    known = [patient_action(link, SHOW({"writer": query}), deadline)["batch"] for link in links]
    last = max((one for one in known if one is not None), default=-1)
    if last < batch - 1:
        shown = last if last >= 0 else "none"
        text = f"batch {batch} of query {query}: the last that was written to {options.url} is {shown}"
        hint = (
            "is the checkpoint of a query that wrote elsewhere? Then take a new one. If the broker has forgotten the "
            "query, silent for longer than producer_expiration, or the query has moved here on purpose: option 'adopt' "
            "= true"
        )
        raise Misuse(Code.BAD_SETTING, text, hint)


def _prepare_task(options: WriteOptions, group: str, query: str, iterator: Iterator[pa.RecordBatch]) -> Prepared:
    producer = _get_producer(options, group)
    brokers = _brokers[options.url, options.token_file]
    preparation = Preparation(producer, brokers.shards, options.topic, options.immunity, brokers.most)
    try:
        for batch in iterator:
            if batch.num_rows:
                reach("spark.before-prepare")
                preparation.add(batch)
                reach("spark.prepared-some")
    except BaseException:
        _roll_back(options, group, [Prepared(query, preparation.ids)])
        raise
    _reach_if_rows("spark.prepared", preparation.ids)
    return Prepared(query, preparation.ids, preparation.rows)


def _roll_back(options: WriteOptions, group: str, found: list[Prepared]) -> None:
    """Try to roll back. Transactions that stay undecided are rolled back by the next commit, or parked after
    check-backs."""
    ids = _list_ids(found)
    try:
        if ids:  # a task that fails because a broker is away need not wait for it as long again
            patience = min(options.timeout, ROLLBACK_PATIENCE)
            _get_producer(replace(options, timeout=patience), group).end_batch(ids, ROLLBACK)
    except EscrowError as problem:
        _log.warning("%d transactions are left to the next commit: %s", len(ids), problem)


# Spark reuses its Python processes for later tasks, so connections and producers are cached.


@dataclass(frozen=True)
class Brokers:
    """The brokers of a URL: their shards in the order of the URL, and the largest number of messages per transaction
    that all of them allow."""

    bus: Bus
    shards: list[int]
    most: int


_brokers: dict[tuple[str, str | None], Brokers] = {}
"""By URL and token file."""
_producers: dict[tuple[str | float | None, ...], Producer] = {}
_lock = threading.Lock()


def _get_producer(options: WriteOptions, group: str) -> Producer:
    """Return this process's producer of a group, from a cache. Waits for an unavailable broker. Raises
    Unknown(TIMED_OUT)."""
    with _lock:
        place = (options.url, options.token_file)
        name = (*place, group, options.timeout, options.checkpoint)
        known = _producers.pop(name, None)
        if known is None:
            if place not in _brokers:
                _brokers[place] = _open_brokers(options)
            bus = _brokers[place].bus
            checker = CheckpointChecker(options.checkpoint)
            known = bus.producer(group, timeout=options.timeout, checker=checker, absent="wait")
            while len(_producers) >= MOST_PRODUCERS:
                _producers.pop(next(iter(_producers))).close()
        _producers[name] = known  # the most recently used one is last
        return known


def _open_brokers(options: WriteOptions) -> Brokers:
    deadline = time.monotonic() + options.timeout
    with ExitStack() as stack:
        bus = stack.enter_context(connect(options.url, token_file=options.token_file))
        hellos = [patient_action(link, HELLO({}), deadline) for link in bus.router.links]
        stack.pop_all()
    shards = [one["shard"] for one in hellos]
    for number, shard in enumerate(shards):
        bus.router.learn_shard(number, shard)
    return Brokers(bus, shards, min(int(one["limits"]["max_transaction_messages"]) for one in hellos))
