"""The shared implementation of blocking and asyncio readers: positions per queue and fetching of batches.

Rules:

1. A *partition* is (shard, queue): queue 0 of two brokers is two partitions.
2. A position is always the *next* offset. It moves when messages are handed out, never when they are merely fetched; so
   positions that are stored with the effects of a batch are those from which to continue.
3. Nothing is leased and nothing at the broker changes: lost answers are simply requested again.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pyarrow as pa

from escrowmq.client.consuming.fetching import missing_brokers
from escrowmq.client.consuming.options import tag_list
from escrowmq.client.lanes.returning import rest
from escrowmq.client.lanes.waiting import Waiting
from escrowmq.client.links.presence import AWAY_SECONDS, Missing
from escrowmq.client.links.router import Router
from escrowmq.client.reading.viewing import call_each
from escrowmq.errors import AWAY, Code, EscrowError, Misuse, error
from escrowmq.message.names import check_name
from escrowmq.platform.backoff import Backoff
from escrowmq.platform.forks import tell_in_child
from escrowmq.platform.times import datetime_us
from escrowmq.wire import DAMAGED_COLUMN, VIEWS, ReadRequest, ask, read_schema
from escrowmq.wire.actions import topics

Partition = tuple[int, int]
Start = str | datetime | Mapping[Partition, int]

WAIT_SECONDS = 2.0
"""How long a broker may hold an empty answer; closing takes no longer."""
LATE_SECONDS = 0.2
"""Poll interval for a broker that did not answer at the start."""
SHORT_SECONDS = 0.05
"""A wait shorter than this polls every broker once."""
ROTATION_ROWS = 65_536
"""Offsets read of one partition before the next partition is read."""
FIRST_BACKOFF, LAST_BACKOFF = 0.02, 2.0

_NOT_HERE = (Code.UNKNOWN_TOPIC, Code.UNKNOWN_GROUP)
"""Codes of a broker that does not have a topic, or a view's group, which another broker may have."""


@dataclass(slots=True)
class _Stream:
    """A range of one queue that is being read: the current batch and the next ones."""

    partition: Partition
    end: int
    batches: Iterator[pa.RecordBatch]
    batch: pa.RecordBatch | None = None


class Reading:
    """The shared state of a :class:`Reader` or :class:`AsyncReader`.

    Thread-safe: several threads or tasks may share its batches. Only :meth:`fill` waits. Raises BAD_TOPIC_NAME, Misuse.
    """

    def __init__(
        self,
        router: Router,
        waiting: Waiting,
        topic: str,
        queues: Sequence[int | Partition] | None,
        start: Start,
        tags: str | Sequence[str] | None,
        columns: Sequence[str] | None,
        timeout: float,
        key: str | None = None,
        of_group: str | None = None,
    ) -> None:
        if not topic.startswith("%"):
            check_name(topic, Code.BAD_TOPIC_NAME)
        self.counter = counter(topic)
        self._schema = chosen(topic, columns)
        self._request: ReadRequest = {"source": topic, "columns": [*self._schema.names, DAMAGED_COLUMN]}
        if wanted := tag_list(tags):
            self._request["tags"] = wanted
        if key is not None:
            self._request["key"] = key
        if of_group is not None:
            self._request["group"] = of_group
        self._start = start
        self._late: set[int] = set()  # brokers that did not answer at the start
        self._came: set[int] = set()  # those of them that are reachable now
        self.router, self.waiting, self.topic, self.timeout = router, waiting, topic, timeout
        self.positions: dict[Partition, int] = {}
        self.closed = threading.Event()
        self._queues = queues
        self._ready: deque[tuple[Partition, int]] = deque()
        self._stream: _Stream | None = None
        self._filling = threading.Lock()
        self._taking = threading.Lock()  # held for moments only
        self._polls: dict[int, tuple[float, Future[list[tuple[Partition, int]]]]] = {}  # when they began
        self._threads = ThreadPoolExecutor(2 * len(router), "escrowmq-reader-wait") if len(router) > 1 else None
        self._backoff = [Backoff(FIRST_BACKOFF, LAST_BACKOFF) for _ in range(len(router))]
        tell_in_child(self)

    def on_fork(self) -> None:
        self.closed, self._filling, self._threads = threading.Event(), threading.Lock(), None
        self.closed.set()

    # Where to read

    def assign(self) -> None:
        """Find the queues to read at all brokers, and set where each begins. Raises UNKNOWN_TOPIC, BAD_QUEUE,
        BAD_ARGUMENT, Unknown(TIMED_OUT)."""
        self._since = datetime.now(UTC)
        answers, _ = call_each(self.router, partial(self._offsets, start=self._start), self.timeout, *_NOT_HERE)
        found = {partition: bounds for answer in answers.values() if answer for partition, bounds in answer.items()}
        self._late = set(range(len(self.router))) - answers.keys()
        chosen = self._choose(list(found))
        self._move({partition: found[partition] for partition in chosen}, self._start, unnamed="head")

    def missing(self) -> list[Missing]:
        reasons = dict.fromkeys(self._late.copy(), "it did not answer when this reader was made")
        return missing_brokers(self.router, reasons)

    def _join_late(self, number: int) -> None:
        """Begin to read at broker ``number``, which has become reachable: at ``start``, as of the time when this reader
        was made."""
        start = self._since if self._start == "latest" else self._start
        found = self._offsets(number, start)
        chosen = set(self._choose([*self.positions, *found])) & set(found)
        if isinstance(start, Mapping):
            start = {p: at for p, at in start.items() if self.partition(p) in found}
        stream, ready = self._stream, self._ready.copy()
        self._move({partition: found[partition] for partition in chosen}, start, unnamed="head")
        self._stream = stream
        self._ready.extendleft(ready)
        self._late.discard(number)

    def seek(self, start: Start) -> None:
        """Continue at ``start``; partitions that a mapping does not name stay where they are."""
        with self._filling:
            found: dict[Partition, topics.QueueOffsets] = {}
            for number in sorted({self._number(partition) for partition in self.positions}):
                try:
                    found |= self._offsets(number, start)
                except EscrowError as problem:
                    if len(self.router) == 1 or problem.code not in AWAY or not isinstance(start, Mapping):
                        raise
            there = {partition: found[partition] for partition in self.positions if partition in found}
            if isinstance(start, Mapping):  # offsets at a broker that is away cannot be checked, and need not be
                given = {self.partition(partition): offset for partition, offset in start.items()}
                away = {p: offset for p, offset in given.items() if p in self.positions and p not in there}
                start = {p: offset for p, offset in given.items() if p not in away}
                self.positions.update(away)
            self._move(there, start, unnamed=None)

    def _offsets(self, number: int, start: Start) -> dict[Partition, topics.QueueOffsets]:
        """Return the partitions of the topic at broker ``number``, each with its bounds: first and next offset, and the
        offset at ``start`` if that is a time."""
        request: topics.AskOffsets = {"topic": self.topic}
        if isinstance(start, datetime):
            request["time_us"] = datetime_us(start)
        answer = self.router.ask(number, topics.OFFSETS(request), time.monotonic() + self.timeout)
        self.router.learn_shard(number, answer["shard"])
        return {(answer["shard"], line["queue"]): line for line in answer["queues"]}

    def _number(self, partition: Partition) -> int:
        return self.router.of_shard(partition[0], self.timeout)  # known since assign()

    def _choose(self, partitions: list[Partition]) -> list[Partition]:
        if self._queues is None:
            return partitions
        chosen: list[Partition] = []
        for wanted in self._queues:
            named = [p for p in partitions if p[1] == wanted] if isinstance(wanted, int) else [self.partition(wanted)]
            if not named or not set(named) <= set(partitions):
                if self._late:
                    continue  # a broker that did not answer yet may have it
                raise error(Code.BAD_QUEUE, f"topic {self.topic!r} has no queue {wanted!r}")
            chosen += named
        if not chosen and not self._late:
            raise Misuse(Code.BAD_ARGUMENT, "a reader needs a queue", "queues=None takes all of the topic's")
        return list(dict.fromkeys(chosen))

    def partition(self, given: Any) -> Partition:
        """Convert (shard or number of the broker, queue) to (shard, queue). Raises Misuse(BAD_ARGUMENT) for anything
        else."""
        if isinstance(given, tuple) and len(given) == 2 and all(type(part) is int for part in given):
            broker, queue = given
            if self.router.known_shard(broker) is not None:
                return broker, queue
            if 0 <= broker < len(self.router) and broker not in self._late:
                return self.router.shard_of(broker, self.timeout), queue
            if self._late:
                return broker, queue
        raise Misuse(Code.BAD_ARGUMENT, f"{given!r} is no partition", "(shard or number of the broker, queue)")

    def _move(self, found: Mapping[Partition, Mapping[str, Any]], start: Start, unnamed: str | None) -> None:
        """Set the positions of the partitions in ``found`` (their bounds) to ``start``. ``unnamed``: the bound at which
        partitions begin that a mapping does not name; None: they keep their positions."""
        if isinstance(start, Mapping):
            given = {self.partition(partition): offset for partition, offset in start.items()}
            if self._late:  # the others are checked when their brokers answer
                given = {partition: offset for partition, offset in given.items() if partition in found}
            for partition, offset in given.items():
                _check_offset(partition, offset, found, bounded=self.counter is not None)
            others = {p: self.positions[p] if unnamed is None else bounds[unnamed] for p, bounds in found.items()}
            fresh = {**others, **given}
        elif isinstance(start, datetime) or start in ("earliest", "latest"):
            name = "offset_at" if isinstance(start, datetime) else {"earliest": "head", "latest": "end"}[start]
            fresh = {partition: bounds[name] for partition, bounds in found.items()}
        else:
            hint = '"earliest", "latest", a datetime, or {(shard or number of the broker, queue): offset}'
            raise Misuse(Code.BAD_ARGUMENT, f"start = {start!r}", hint)
        with self._taking:
            self._stream = None
            self.positions.update(fresh)
        self._ready = deque((p, bounds["end"]) for p, bounds in found.items() if bounds["end"] > fresh[p])

    # Reading

    def fill(self, seconds: float) -> bool:
        """Fetch messages for :meth:`take`, waiting up to about ``seconds``, at most WAIT_SECONDS. Returns whether some
        can be taken. Raises RANGE_PURGED."""
        with self._filling:
            deadline = time.monotonic() + min(max(seconds, 0.0), WAIT_SECONDS)
            while not self.closed.is_set():
                if self._next_batch():
                    return True
                if self._open_next():
                    continue
                left = deadline - time.monotonic()
                self._wait(max(left, 0.0))
                if left <= 0 and not self._ready:
                    return False
            return False

    def take(self, most: int) -> tuple[Partition, pa.RecordBatch, int] | None:
        """Take up to ``most`` of the messages that :meth:`fill` fetched, and move the position behind them. Returns
        their partition, the batch and the new position; None if another thread took them."""
        with self._taking:
            stream = self._stream
            if stream is None or stream.batch is None:
                return None
            batch, rest = stream.batch.slice(0, most), stream.batch.slice(most)
            stream.batch = rest if rest.num_rows else None
            batch = plain(batch, self._schema)
            if self.counter is not None:
                self.positions[stream.partition] = batch.column(self.counter)[batch.num_rows - 1].as_py() + 1
            return stream.partition, batch, self.positions[stream.partition]

    def close(self) -> None:
        self.closed.set()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _next_batch(self) -> bool:
        stream = self._stream
        if stream is None:
            return False
        if stream.batch is not None:
            return True
        number = self._number(stream.partition)
        try:
            stream.batch = next((batch for batch in stream.batches if batch.num_rows), None)
        except EscrowError as problem:
            self._stream = None
            self._pause_or_raise(number, problem)
            return False
        if stream.batch is None:  # no other message has the tags and the key
            self.positions[stream.partition] = max(self.positions[stream.partition], stream.end)
            self._stream = None
            return False
        self._backoff[number].worked()
        return True

    def _open_next(self) -> bool:
        self._collect()
        for number in self._came & self._late:
            self._came.discard(number)
            try:
                self._join_late(number)
            except EscrowError as problem:
                if problem.code not in _NOT_HERE:
                    self._pause_or_raise(number, problem)
                else:
                    self._late.discard(number)
        while self._ready:
            partition, end = self._ready.popleft()
            start = self.positions[partition]
            if start >= end:
                continue
            stop = end if self.counter is None else min(end, start + ROTATION_ROWS)
            if stop < end:
                self._ready.append((partition, end))
            number = self._number(partition)
            request: ReadRequest = {**self._request, "queue": partition[1], "start": start, "end": stop}
            try:
                self._stream = _Stream(partition, stop, iter(self.router.links[number].read(request)))
                return True
            except EscrowError as problem:
                self._pause_or_raise(number, problem)
        return False

    # Waiting

    def _wait(self, seconds: float) -> None:
        """Wait until one of the brokers has messages, or for ``seconds``."""
        if self._threads is None:
            self._add(self._poll(0, seconds))
        elif seconds < SHORT_SECONDS:
            with suppress(RuntimeError):  # closed meanwhile
                self._poll_all(self._threads)
        else:
            with suppress(RuntimeError):  # closed meanwhile
                for number in set(range(len(self.router))) - self._polls.keys():
                    self._polls[number] = time.monotonic(), self._threads.submit(self._poll, number, WAIT_SECONDS)
            wait([poll for _, poll in self._polls.values()], seconds, FIRST_COMPLETED)
            self._collect()
            for number, (began, _) in self._polls.items():
                if time.monotonic() - began > WAIT_SECONDS + AWAY_SECONDS:
                    self.router.presence.suspect(number)

    def _poll_all(self, threads: ThreadPoolExecutor) -> None:
        """Poll every broker once, without waiting for one that is away, and queue the partitions with messages."""
        presence, began = self.router.presence, time.monotonic()
        numbers = [number for number in range(len(self.router)) if not presence.quiet(number)]
        polls = {threads.submit(self._poll, number, 0.0): number for number in numbers}
        left = set(polls)
        while left and time.monotonic() - began < self.timeout and not self.closed.is_set():
            _, left = wait(left, LATE_SECONDS)
            if time.monotonic() - began > AWAY_SECONDS:
                for poll in left:
                    presence.suspect(polls[poll])
            left = {poll for poll in left if not presence.quiet(polls[poll])}
        for poll in polls:
            if poll.done() and not poll.cancelled():
                self._add(poll.result())

    def _collect(self) -> None:
        for number, (_, poll) in list(self._polls.items()):
            if poll.done():
                del self._polls[number]
                if not poll.cancelled():
                    self._add(poll.result())

    def _add(self, ready: list[tuple[Partition, int]]) -> None:
        for partition, end in ready:
            self.positions.setdefault(partition, 0)  # a queue that is newer than this reader
            if end > self.positions[partition]:
                self._ready.append((partition, end))

    def _poll(self, number: int, seconds: float) -> list[tuple[Partition, int]]:
        """Wait until partitions of broker ``number`` have messages. Returns each with its end offset; none after
        ``seconds``. Retries while the broker is away."""
        deadline = time.monotonic() + seconds
        if number in self._late:
            presence = self.router.presence
            if not presence.there(number):
                presence.suspect(number)
                self.closed.wait(min(seconds, LATE_SECONDS))
            if presence.there(number):
                self._came.add(number)
            return []
        shard = self.router.shard_of(number, self.timeout)
        while not self.closed.is_set():
            left = max(deadline - time.monotonic(), 0.0)
            after = [(queue, offset) for (of, queue), offset in list(self.positions.items()) if of == shard]
            every = self._queues is None
            if after or every:
                request = topics.Wait(topic=self.topic, after=after, every=every, wait_ms=round(left * 1000))
                try:
                    found = ask(self.router.links[number], topics.WAIT(request), left + self.timeout)["queues"]
                    self._backoff[number].worked()
                    if found:
                        return [((shard, line["queue"]), line["end"]) for line in found]
                except EscrowError as problem:
                    self._pause_or_raise(number, problem)
            left = deadline - time.monotonic()
            if left <= 0:
                break
            # It answered early: it is away, or it is a folder that nobody writes to.
            pause = self._backoff[number].left()
            rest(self.router.links[number], min(pause if pause > 0 else left, left), self.closed)
        return []

    def _pause_or_raise(self, number: int, problem: EscrowError) -> None:
        """Back off from broker ``number`` if ``problem`` shows that it is away; raise every other error."""
        if self.closed.is_set():
            return
        if problem.code not in AWAY:
            raise problem
        if (attended := self.router.attendances[number]) is not None:
            attended.suspect()
        self._backoff[number].failed()


def counter(source: str) -> str | None:
    """Return the column of a source that rises from row to row, by which a reader counts: ``offset`` or, of a view,
    ``position``. None for dead letters, which are counted by their time of death, and read in one range."""
    if source in VIEWS:
        return "position"
    return None if source.startswith("%") else "offset"


def chosen(source: str, columns: Sequence[str] | None) -> pa.Schema:
    """Return the schema of what a reader hands out: all columns of the source, or these and its :func:`counter`. Raises
    Misuse(BAD_ARGUMENT) for unknown ones."""
    schema = read_schema(source, damaged=False)
    names = schema.names if columns is None else list(dict.fromkeys([*columns, counter(source) or "offset"]))
    names = [name for name in names if name != DAMAGED_COLUMN]
    if unknown := [name for name in names if name not in schema.names]:
        raise Misuse(Code.BAD_ARGUMENT, f"no columns {unknown}", f"there are {', '.join(schema.names)}")
    return pa.schema([schema.field(name) for name in names])


def plain(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return a batch with the columns of ``schema``, without ``damaged``, if none of its rows is damaged; else the
    batch."""
    if batch.column(DAMAGED_COLUMN).null_count < batch.num_rows:
        return batch
    return pa.RecordBatch.from_arrays([batch.column(name) for name in schema.names], schema=schema)


def _check_offset(
    partition: Partition, offset: Any, found: Mapping[Partition, Mapping[str, Any]], *, bounded: bool
) -> None:
    if partition not in found:
        raise Misuse(Code.BAD_ARGUMENT, f"{partition} is not a partition of this reader")
    if isinstance(offset, bool) or not isinstance(offset, int) or offset < 0:
        raise Misuse(Code.BAD_ARGUMENT, f"offset {offset!r} of {partition}")
    if bounded and offset > found[partition]["end"]:
        hint = "positions of another topic or of another broker's folder?"
        raise Misuse(Code.BAD_ARGUMENT, f"offset {offset} of {partition}: the next is {found[partition]['end']}", hint)
