"""The shared implementation of blocking and asyncio readers: positions per queue and fetching of batches.

Rules:

1. A *partition* is (shard, queue): what is called queue 0 at two brokers is two partitions.
2. A position is always the *next* offset. It moves when messages are handed out, never when they are merely fetched; so
   positions that are stored with the effects of a batch are those from which to go on.
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
from datetime import datetime
from typing import Any

import pyarrow as pa

from escrowmq.client.consuming.options import tag_list
from escrowmq.client.lanes.waiting import Waiting
from escrowmq.client.links.patience import patient_action
from escrowmq.client.links.router import Router
from escrowmq.errors import AWAY, Code, EscrowError, Misuse, Rejected, error
from escrowmq.message.names import check_name
from escrowmq.platform.backoff import Backoff
from escrowmq.wire import ReadRequest, ask
from escrowmq.wire.actions import topics

Partition = tuple[int, int]
Start = str | datetime | Mapping[Partition, int]

WAIT_SECONDS = 2.0
"""How long a broker is asked to hold an empty answer; closing takes no longer."""
SHORT_SECONDS = 0.05
"""Waiting less than this is a look at every broker, one after the other."""
ROTATION_ROWS = 65_536
"""Offsets read of one partition before the next partition is read."""
FIRST_BACKOFF, LAST_BACKOFF = 0.02, 2.0


@dataclass(slots=True)
class _Stream:
    """A range of one queue on its way: the batch in hand and those to come."""

    partition: Partition
    end: int
    batches: Iterator[pa.RecordBatch]
    batch: pa.RecordBatch | None = None


class Reading:
    """One reader's machinery; :class:`Reader` and :class:`AsyncReader` are its two faces.

    :meth:`fill` from one thread at a time; the others are quick. Raises BAD_TOPIC_NAME, Misuse.
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
    ) -> None:
        check_name(topic, Code.BAD_TOPIC_NAME)
        self._request: ReadRequest = {"source": topic}  # the part of a read that never changes
        if wanted := tag_list(tags):
            self._request["tags"] = wanted
        if columns is not None:
            self._request["columns"] = list(dict.fromkeys([*columns, "offset"]))
        self._start = start
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
        self._waits: dict[int, Future[list[tuple[Partition, int]]]] = {}
        self._threads = ThreadPoolExecutor(len(router), "escrowmq-reader-wait") if len(router) > 1 else None
        self._backoff = [Backoff(FIRST_BACKOFF, LAST_BACKOFF) for _ in range(len(router))]

    # Where to read

    def assign(self) -> None:
        """Find the queues and where to begin. Raises UNKNOWN_TOPIC, BAD_QUEUE, BAD_ARGUMENT, Unknown(TIMED_OUT)."""
        found: dict[Partition, topics.QueueOffsets] = {}
        missing: EscrowError | None = None
        for number in range(len(self.router)):
            try:
                found |= self._offsets(number, self._start)
            except Rejected as problem:
                if problem.code is not Code.UNKNOWN_TOPIC:
                    raise
                missing = problem
        if not found and missing is not None:
            raise missing
        chosen = self._chosen(list(found))
        self._move({partition: found[partition] for partition in chosen}, self._start, unnamed="head")

    def seek(self, start: Start) -> None:
        """Go on from ``start``; of a mapping, the partitions not named stay where they are."""
        with self._filling:
            found: dict[Partition, topics.QueueOffsets] = {}
            for number in sorted({self._number(partition) for partition in self.positions}):
                found |= self._offsets(number, start)
            self._move({partition: found[partition] for partition in self.positions}, start, unnamed=None)

    def _offsets(self, number: int, start: Start) -> dict[Partition, topics.QueueOffsets]:
        request: topics.AskOffsets = {"topic": self.topic}
        if isinstance(start, datetime):
            request["time_us"] = round(start.timestamp() * 1e6)
        self.router.shard_of(number, self.timeout, patient=True)
        deadline = time.monotonic() + self.timeout
        answer = patient_action(self.router.links[number], topics.OFFSETS(request), deadline)
        return {(answer["shard"], line["queue"]): line for line in answer["queues"]}

    def _number(self, partition: Partition) -> int:
        """The number of its broker, known since :meth:`assign`."""
        return self.router.of_shard(partition[0], self.timeout)

    def _chosen(self, partitions: list[Partition]) -> list[Partition]:
        if self._queues is None:
            return partitions
        chosen: list[Partition] = []
        for wanted in self._queues:
            named = [p for p in partitions if p[1] == wanted] if isinstance(wanted, int) else [self.partition(wanted)]
            if not named or not set(named) <= set(partitions):
                raise error(Code.BAD_QUEUE, f"topic {self.topic!r} has no queue {wanted!r}")
            chosen += named
        if not chosen:
            raise Misuse(Code.BAD_ARGUMENT, "a reader needs a queue", "queues=None takes all of the topic's")
        return list(dict.fromkeys(chosen))

    def partition(self, given: Any) -> Partition:
        """(shard, queue) of (shard or number of the broker, queue); Misuse(BAD_ARGUMENT)."""
        if isinstance(given, tuple) and len(given) == 2 and all(type(part) is int for part in given):
            broker, queue = given
            if self.router.known_shard(broker) is not None:
                return broker, queue
            if 0 <= broker < len(self.router):
                return self.router.shard_of(broker, self.timeout), queue
        raise Misuse(Code.BAD_ARGUMENT, f"{given!r} is no partition", "(shard or number of the broker, queue)")

    def _move(self, found: Mapping[Partition, Mapping[str, Any]], start: Start, unnamed: str | None) -> None:
        """New positions, from what the brokers said of each partition."""
        if isinstance(start, Mapping):
            given = {self.partition(partition): offset for partition, offset in start.items()}
            for partition, offset in given.items():
                _check_offset(partition, offset, found)
            others = {p: self.positions[p] if unnamed is None else bounds[unnamed] for p, bounds in found.items()}
            fresh = {**others, **given}
        elif isinstance(start, datetime) or start in ("earliest", "latest"):
            name = "offset_at" if isinstance(start, datetime) else {"earliest": "head", "latest": "end"}[start]
            fresh = {partition: bounds[name] for partition, bounds in found.items()}
        else:
            hint = '"earliest", "latest", a datetime, or {(shard or number of the broker, queue): offset}'
            raise Misuse(Code.BAD_ARGUMENT, f"start = {start!r}", hint)
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

    def take(self, most: int) -> tuple[Partition, pa.RecordBatch]:
        """Up to ``most`` messages of what :meth:`fill` found; this is what moves the position."""
        stream = self._stream
        assert stream is not None
        assert stream.batch is not None  # fill() said so
        batch, rest = stream.batch.slice(0, most), stream.batch.slice(most)
        stream.batch = rest if rest.num_rows else None
        self.positions[stream.partition] = batch.column("offset")[batch.num_rows - 1].as_py() + 1
        return stream.partition, batch

    def close(self) -> None:
        """Fetch no more."""
        self.closed.set()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _next_batch(self) -> bool:
        """The next batch of the open stream."""
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
        while self._ready:
            partition, end = self._ready.popleft()
            start = self.positions[partition]
            if start >= end:
                continue
            stop = min(end, start + ROTATION_ROWS)
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
        if self._threads is None or seconds < SHORT_SECONDS:
            for number in range(len(self.router)):
                self._add(self._ask(number, seconds if self._threads is None else 0.0))
        else:
            with suppress(RuntimeError):  # closed meanwhile
                for number in set(range(len(self.router))) - self._waits.keys():
                    self._waits[number] = self._threads.submit(self._ask, number, WAIT_SECONDS)
            wait(self._waits.values(), seconds, FIRST_COMPLETED)
            self._collect()

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
        """Which partitions of a broker have something; none after ``seconds``. A broker that is away is asked again."""
        deadline = time.monotonic() + seconds
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
            self.closed.wait(min(pause if pause > 0 else left, left))
        return []

    def _ask_once(self, number: int, after: list[tuple[int, int]], seconds: float) -> list[topics.QueueRange]:
        wait_ms = round(seconds * 1000)
        call = topics.WAIT({"topic": self.topic, "after": after, "every": self._every, "wait_ms": wait_ms})
        return ask(self.router.links[number], call, seconds + self.timeout)["queues"]

    def _rest_or_raise(self, number: int, problem: EscrowError) -> None:
        """A broker that is away is asked again after a pause; everything else is the caller's."""
        if self.closed.is_set():
            return
        if problem.code not in AWAY:
            raise problem
        self._backoff[number].failed()


def _check_offset(partition: Partition, offset: Any, found: Mapping[Partition, Mapping[str, Any]]) -> None:
    if partition not in found:
        raise Misuse(Code.BAD_ARGUMENT, f"{partition} is not a partition of this reader")
    if isinstance(offset, bool) or not isinstance(offset, int) or offset < 0:
        raise Misuse(Code.BAD_ARGUMENT, f"offset {offset!r} of {partition}")
    if offset > found[partition]["end"]:
        hint = "positions of another topic or of another broker's folder?"
        raise Misuse(Code.BAD_ARGUMENT, f"offset {offset} of {partition}: the next is {found[partition]['end']}", hint)
