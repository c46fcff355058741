"""The shared implementation of blocking and asyncio readers: positions per queue and fetching of batches.

Rules:

1. A *partition* is (shard, queue): what is called queue 0 at two brokers is two partitions.
2. A position is always the *next* offset. It moves when messages are handed out, never when they are merely fetched; so
   positions that are stored with the effects of a batch are those from which to continue.
3. Nothing is leased and nothing at the broker changes: whatever was lost on the way is asked for again.
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
from typing import Any

import pyarrow as pa

from escrowmq.client.consuming.options import tag_list
from escrowmq.client.lanes.returning import rest
from escrowmq.client.lanes.waiting import Waiting
from escrowmq.client.links.answers import away
from escrowmq.client.links.presence import AWAY_SECONDS, Missing
from escrowmq.client.links.router import Router
from escrowmq.errors import AWAY, Code, EscrowError, Misuse, Rejected, error
from escrowmq.message.names import check_name
from escrowmq.platform.backoff import Backoff
from escrowmq.platform.forks import tell_in_child
from escrowmq.platform.times import datetime_us
from escrowmq.wire import DAMAGED_COLUMN, VIEWS, ReadRequest, ask, read_schema
from escrowmq.wire.actions import topics

Partition = tuple[int, int]
Start = str | datetime | Mapping[Partition, int]

WAIT_SECONDS = 2.0
"""How long a broker is asked to hold an empty answer; closing takes no longer."""
LATE_SECONDS = 0.2
"""Between two looks whether a broker that was not there at the start has come."""
SHORT_SECONDS = 0.05
"""Waiting less than this is a look at every broker."""
ROTATION_ROWS = 65_536
"""Offsets read of one partition before the next partition is read."""
FIRST_BACKOFF, LAST_BACKOFF = 0.02, 2.0


_NOT_HERE = (Code.UNKNOWN_TOPIC, Code.UNKNOWN_GROUP)
"""A broker says so of a topic, or of a view's group, that another broker may have."""


@dataclass(slots=True)
class _Stream:
    """A range of one queue on its way: the batch in hand and those to come."""

    partition: Partition
    end: int
    batches: Iterator[pa.RecordBatch]
    batch: pa.RecordBatch | None = None


class Reading:
    """One reader's machinery; :class:`Reader` and :class:`AsyncReader` are its two faces.

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
        self._request: ReadRequest = {"source": topic}  # the part of a read that never changes
        if wanted := tag_list(tags):
            self._request["tags"] = wanted
        if key is not None:
            self._request["key"] = key
        if of_group is not None:
            self._request["group"] = of_group
        self.counter = counter(topic)
        self._schema = chosen(topic, columns)
        self._request["columns"] = [*self._schema.names, DAMAGED_COLUMN]
        self._start = start
        self._late: set[int] = set()  # numbers of the brokers that were not there at the start
        self._asked: dict[int, float] = {}  # when each broker was asked to wait
        self._came: set[int] = set()  # those of them that are there now
        self.router = router
        self.waiting = waiting
        self.topic = topic
        self.timeout = timeout
        self.positions: dict[Partition, int] = {}
        self.closed = threading.Event()
        self._every = queues is None
        self._queues = queues
        self._ready: deque[tuple[Partition, int]] = deque()
        self._stream: _Stream | None = None
        self._filling = threading.Lock()
        self._taking = threading.Lock()  # never held while anybody waits
        self._waits: dict[int, Future[list[tuple[Partition, int]]]] = {}
        self._threads = ThreadPoolExecutor(2 * len(router), "escrowmq-reader-wait") if len(router) > 1 else None
        self._backoff = [Backoff(FIRST_BACKOFF, LAST_BACKOFF) for _ in range(len(router))]

        tell_in_child(self)

    def on_fork(self) -> None:
        """In a forked child: closed."""
        self.closed, self._filling, self._threads = threading.Event(), threading.Lock(), None
        self.closed.set()

    # Where to read

    def assign(self) -> None:
        """Find the queues and where to begin. Raises UNKNOWN_TOPIC, BAD_QUEUE, BAD_ARGUMENT, Unknown(TIMED_OUT)."""
        self._since = datetime.now(UTC)
        answers = self.router.every(self._list_partitions, self.timeout)
        found: dict[Partition, topics.QueueOffsets] = {}
        unknown: EscrowError | None = None
        for _, answer in answers.found:
            if isinstance(answer, Rejected):
                unknown = answer
            else:
                found |= answer
        there = {number for number, _ in answers.found}
        self._late = set(range(len(self.router))) - there
        if not found and unknown is not None:
            if answers.missing:  # it may be there
                raise away(answers.missing, unknown.message)
            raise unknown
        chosen = self._choose(list(found))
        self._move({partition: found[partition] for partition in chosen}, self._start, unnamed="head")

    def _list_partitions(self, number: int) -> dict[Partition, topics.QueueOffsets] | Rejected:
        """Return the partitions at one broker, or that the topic is not there."""
        try:
            return self._offsets(number, self._start)
        except Rejected as problem:
            if problem.code not in _NOT_HERE:
                raise
            return problem

    def missing(self) -> list[Missing]:
        """Return the brokers from which nothing is read now."""
        away = {one["broker"]: one for one in self.router.presence.missing()}
        for number in list(self._late):
            address = self.router.links[number].address
            away.setdefault(address, {"broker": address, "reason": "it did not answer when this reader was made"})
        return [away[link.address] for link in self.router.links if link.address in away]

    def _join_late(self, number: int) -> None:
        """Begin to read at a new broker: at ``start``, as of the time at which this reader was made."""
        start = self._since if self._start == "latest" else self._start
        found = self._offsets(number, start)
        positions = self.positions.copy()
        ready = self._ready.copy()
        chosen = set(self._choose([*positions, *found])) & set(found)
        given = start
        if isinstance(start, Mapping):
            given = {p: at for p, at in start.items() if self.partition(p) in found}
        stream = self._stream
        self._move({partition: found[partition] for partition in chosen}, given, unnamed="head")
        self._stream = stream
        self._ready.extendleft(ready)
        self._late.discard(number)

    def seek(self, start: Start) -> None:
        """Go on from ``start``; of a mapping, the partitions not named stay where they are."""
        with self._filling:
            found: dict[Partition, topics.QueueOffsets] = {}
            for number in sorted({self._number(partition) for partition in self.positions}):
                try:
                    found |= self._offsets(number, start)
                except EscrowError as problem:
                    if len(self.router) == 1 or problem.code not in AWAY or not isinstance(start, Mapping):
                        raise
            there = {partition: found[partition] for partition in self.positions if partition in found}
            if isinstance(start, Mapping):  # at a broker that is away nothing can be looked at, and need not
                given = {self.partition(partition): offset for partition, offset in start.items()}
                away = {p: offset for p, offset in given.items() if p in self.positions and p not in there}
                start = {p: offset for p, offset in given.items() if p not in away}
                self.positions.update(away)
            self._move(there, start, unnamed=None)

    def _offsets(self, number: int, start: Start) -> dict[Partition, topics.QueueOffsets]:
        request: topics.AskOffsets = {"topic": self.topic}
        if isinstance(start, datetime):
            request["time_us"] = datetime_us(start)
        answer = self.router.ask(number, topics.OFFSETS(request), time.monotonic() + self.timeout)
        self.router.learn_shard(number, answer["shard"])
        return {(answer["shard"], line["queue"]): line for line in answer["queues"]}

    def _number(self, partition: Partition) -> int:
        """Return the number of its broker, known since :meth:`assign`."""
        return self.router.of_shard(partition[0], self.timeout)

    def _choose(self, partitions: list[Partition]) -> list[Partition]:
        if self._queues is None:
            return partitions
        chosen: list[Partition] = []
        for wanted in self._queues:
            named = [p for p in partitions if p[1] == wanted] if isinstance(wanted, int) else [self.partition(wanted)]
            if not named or not set(named) <= set(partitions):
                if self._late:
                    continue  # it may be at a broker that is still to come
                raise error(Code.BAD_QUEUE, f"topic {self.topic!r} has no queue {wanted!r}")
            chosen += named
        if not chosen and not self._late:
            raise Misuse(Code.BAD_ARGUMENT, "a reader needs a queue", "queues=None takes all of the topic's")
        return list(dict.fromkeys(chosen))

    def partition(self, given: Any) -> Partition:
        """(shard, queue) of (shard or number of the broker, queue); Misuse(BAD_ARGUMENT)."""
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
        """Set new positions from what the brokers report of each partition."""
        if isinstance(start, Mapping):
            given = {self.partition(partition): offset for partition, offset in start.items()}
            if self._late:  # the others are looked at when their brokers come
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

    # What comes next

    def fill(self, seconds: float) -> bool:
        """Have something to :meth:`take`, waiting up to about ``seconds``; whether there is. Raises RANGE_PURGED."""
        with self._filling:
            deadline = time.monotonic() + seconds
            while not self.closed.is_set():
                if self._next_batch():
                    return True
                if self._open_next():
                    continue
                left = deadline - time.monotonic()
                self._wait(min(max(left, 0), WAIT_SECONDS))
                if left <= 0 and not self._ready:
                    return False
            return False

    def take(self, most: int) -> tuple[Partition, pa.RecordBatch, int] | None:
        """Return up to ``most`` messages of what :meth:`fill` found, and where to continue; this is what moves the
        position. None if another thread took them."""
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
        """Fetch no more."""
        self.closed.set()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _next_batch(self) -> bool:
        """Return the next batch of the open stream."""
        stream = self._stream
        if stream is None:
            return False
        if stream.batch is not None:
            return True
        number = self._number(stream.partition)
        try:
            stream.batch = next(batch for batch in stream.batches if batch.num_rows)
        except StopIteration:
            # the rest was not wanted
            self.positions[stream.partition] = max(self.positions[stream.partition], stream.end)
            self._stream = None
            return False
        except EscrowError as problem:
            self._stream = None
            self._rest_or_raise(number, problem)
            return False
        self._backoff[number].worked()
        return True

    def _open_next(self) -> bool:
        """Begin to read the next partition that has something."""
        self._collect()
        for number in self._came & self._late:
            self._came.discard(number)
            try:
                self._join_late(number)
            except EscrowError as problem:
                if problem.code not in _NOT_HERE:  # it has not got it, or not yet
                    self._rest_or_raise(number, problem)
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
            except EscrowError as problem:
                self._rest_or_raise(number, problem)
                continue
            return True
        return False

    # Waiting

    def _wait(self, seconds: float) -> None:
        """Until something came at one of the brokers, or for ``seconds``."""
        if self._threads is None:
            self._add(self._ask(0, seconds))
        elif seconds < SHORT_SECONDS:
            with suppress(RuntimeError):  # closed meanwhile
                self._look(self._threads)
        else:
            with suppress(RuntimeError):  # closed meanwhile
                for number in set(range(len(self.router))) - self._waits.keys():
                    self._waits[number] = self._threads.submit(self._ask, number, WAIT_SECONDS)
                    self._asked[number] = time.monotonic()
            wait(self._waits.values(), seconds, FIRST_COMPLETED)
            self._collect()
            for number in self._waits:
                if time.monotonic() - self._asked[number] > WAIT_SECONDS + AWAY_SECONDS:
                    self.router.presence.suspect(number)

    def _look(self, threads: ThreadPoolExecutor) -> None:
        """Collect what every broker has now, without waiting for one that is away."""
        presence, began = self.router.presence, time.monotonic()
        numbers = [number for number in range(len(self.router)) if not presence.quiet(number)]
        looks = {threads.submit(self._ask, number, 0.0): number for number in numbers}
        left = set(looks)
        while left and time.monotonic() - began < self.timeout and not self.closed.is_set():
            _, left = wait(left, LATE_SECONDS)
            if time.monotonic() - began > AWAY_SECONDS:
                for look in left:
                    presence.suspect(looks[look])
            left = {look for look in left if not presence.quiet(looks[look])}
        for look in looks:
            if look.done() and not look.cancelled():
                self._add(look.result())

    def _collect(self) -> None:
        """Take in the answers of brokers that were asked on threads."""
        for number, asked in list(self._waits.items()):
            if asked.done():
                del self._waits[number]
                if not asked.cancelled():
                    self._add(asked.result())

    def _add(self, ready: list[tuple[Partition, int]]) -> None:
        for partition, end in ready:
            self.positions.setdefault(partition, 0)  # a queue that is newer than this reader
            if end > self.positions[partition]:
                self._ready.append((partition, end))

    def _ask(self, number: int, seconds: float) -> list[tuple[Partition, int]]:
        """Return which partitions of a broker have something; none after ``seconds``. A broker that is away is
        asked again."""
        deadline = time.monotonic() + seconds
        if number in self._late:
            return self._ask_late(number, seconds)
        shard = self.router.shard_of(number, self.timeout)
        while not self.closed.is_set():
            left = max(deadline - time.monotonic(), 0.0)
            after = [(queue, offset) for (of, queue), offset in list(self.positions.items()) if of == shard]
            if after or self._every:
                try:
                    found = self._ask_once(number, after, left)
                    self._backoff[number].worked()
                    if found:
                        return [((shard, line["queue"]), line["end"]) for line in found]
                except EscrowError as problem:
                    self._rest_or_raise(number, problem)
            left = deadline - time.monotonic()
            if left <= 0:
                break
            # It answered before its time: it is away, or a folder to which nothing comes.
            pause = self._backoff[number].left()
            rest(self.router.links[number], min(pause if pause > 0 else left, left), self.closed)
        return []

    def _ask_late(self, number: int, seconds: float) -> list[tuple[Partition, int]]:
        """Return whether a broker that was not there has come; waits up to ``seconds`` for it."""
        if not self.router.presence.there(number):
            self.router.presence.suspect(number)
            self.closed.wait(min(seconds, LATE_SECONDS))
        if self.router.presence.there(number):
            self._came.add(number)
        return []

    def _ask_once(self, number: int, after: list[tuple[int, int]], seconds: float) -> list[topics.QueueRange]:
        wait_ms = round(seconds * 1000)
        call = topics.WAIT({"topic": self.topic, "after": after, "every": self._every, "wait_ms": wait_ms})
        return ask(self.router.links[number], call, seconds + self.timeout)["queues"]

    def _rest_or_raise(self, number: int, problem: EscrowError) -> None:
        """Pause a broker that is away; raise everything else."""
        if self.closed.is_set():
            return
        if problem.code not in AWAY:
            raise problem
        if (attended := self.router.attendances[number]) is not None:
            attended.suspect()
        self._backoff[number].failed()


def counter(source: str) -> str | None:
    """Return the column that rises from row to row, by which a reader counts; None of dead letters, which are
    counted by the time at which they died, and all of a range together."""
    if source in VIEWS:
        return "position"
    return None if source.startswith("%") else "offset"


def chosen(source: str, columns: Sequence[str] | None) -> pa.Schema:
    """Return the columns that a reader hands out: all of the source, or these and the one that it counts by.
    Misuse(BAD_ARGUMENT) for one that is not there."""
    schema = read_schema(source, damaged=False)
    number = counter(source) or "offset"
    names = schema.names if columns is None else list(dict.fromkeys([*columns, number]))
    names = [name for name in names if name != DAMAGED_COLUMN]
    if unknown := [name for name in names if name not in schema.names]:
        raise Misuse(Code.BAD_ARGUMENT, f"no columns {unknown}", f"there are {', '.join(schema.names)}")
    return pa.schema([schema.field(name) for name in names])


def plain(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return a batch as it was sent, if nothing in it is damaged; else with the column ``damaged``, and null where
    content is lost."""
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
