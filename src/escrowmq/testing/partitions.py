"""A Kafka in memory for tests: two partitions shared by several openers, with fault injection. :class:`MemoryPartition`
can do what a real one can do to an opener: acknowledge late, in another order, without an offset or never; keep records
in flight and store them much later, after others have written; end its producer; not respond; lose stored records."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from escrowmq.errors import Code, error
from escrowmq.log.kafka.partition import END, UNKNOWN_OFFSET


@dataclass(eq=False)
class MemoryTopic:
    """The records of one partition. ``first``: the offset of the first record kept."""

    name: str
    first: int = 0
    records: list[bytes] = field(default_factory=list)

    @property
    def next(self) -> int:
        """Offset of the next record."""
        return self.first + len(self.records)

    def __getitem__(self, offset: int) -> bytes:
        if not self.first <= offset < self.next:
            raise IndexError(offset)
        return self.records[offset - self.first]


class MemoryKafka:
    """State that survives its openers: the records. Thread-safe."""

    def __init__(self, name: str = "memory/0") -> None:
        self.changed = threading.Condition(threading.RLock())
        self.log = MemoryTopic(name)
        self.base = MemoryTopic(f"{name}.base")
        self.refusal: Exception | None = None
        """Exception raised by :meth:`MemoryPartitions.check`."""
        self.cluster = "memory"  # cluster id returned by MemoryPartitions.check
        self.hosts = ""  # prefix of MemoryPartitions.name
        self.away = False
        """Whether all nodes are unreachable: no responses, and nothing is stored."""

    def partitions(self) -> MemoryPartitions:
        """Return the partitions for one more process."""
        return MemoryPartitions(self)

    def opener(self) -> MemoryPartition:
        """Return one more opener of the log's partition."""
        return MemoryPartition(self, self.log)

    @contextmanager
    def change(self) -> Iterator[None]:
        """Context manager: change the state under its lock, and wake waiters."""
        with self.changed:
            yield
            self.changed.notify_all()

    def set_away(self, away: bool) -> None:
        """Make all nodes unreachable, or reachable."""
        with self.change():
            self.away = away

    def write(self, *records: bytes) -> None:
        """Store records unchanged, as if another process sent them."""
        with self.change():
            self.log.records += records

    def lose(self, count: int) -> None:
        """Lose the last ``count`` records of the log, like an unclean election."""
        with self.change():
            del self.log.records[len(self.log.records) - count :]


class MemoryPartitions:
    """Implements :class:`escrowmq.log.kafka.partition.Partitions`. ``opened``: its partitions, newest last."""

    def __init__(self, kafka: MemoryKafka) -> None:
        self._kafka = kafka
        self._closed = False
        self.opened: list[MemoryPartition] = []

    @property
    def name(self) -> str:
        return f"{self._kafka.hosts}{self._kafka.log.name}"

    def check(self, timeout: float = 30.0) -> str:
        with self._kafka.changed:
            self._kafka.changed.wait_for(lambda: self._closed or not self._kafka.away, timeout)
        if self._closed:
            raise error(Code.CLOSED, f"{self.name} was closed")
        if self._kafka.away:
            raise error(Code.TIMED_OUT, f"{self.name} does not answer")
        if self._kafka.refusal is not None:
            raise self._kafka.refusal
        return self._kafka.cluster

    def close(self) -> None:
        with self._kafka.change():
            self._closed = True
        for partition in self.opened:
            partition.close()

    def log(self) -> MemoryPartition:
        return self._open(self._kafka.log)

    def base(self) -> MemoryPartition:
        return self._open(self._kafka.base)

    def _open(self, topic: MemoryTopic) -> MemoryPartition:
        self.opened.append(MemoryPartition(self._kafka, topic))
        return self.opened[-1]


class MemoryPartition:
    """Implements :class:`escrowmq.log.kafka.partition.Partition`. The attributes below inject faults at any time;
    :meth:`change` sets them and wakes waiters."""

    def __init__(self, kafka: MemoryKafka, topic: MemoryTopic) -> None:
        self._kafka = kafka
        self._topic = topic
        self._changed = kafka.changed
        self._sending: deque[tuple[int, bytes]] = deque()
        self._reports: list[tuple[int, int]] = []
        self._closed = False
        self.cut_off = False
        """Unreachable Kafka: sent records wait, nothing is received."""
        self.slow = False
        """Sent records stay in flight until :meth:`land`."""
        self.held = False
        """Records are stored, but not acknowledged."""
        self.silent = False
        """Reads and queries get no response; sending works."""
        self.unknown: set[int] = set()
        """Numbers of records that are acknowledged without an offset."""
        self.order: Callable[[list[tuple[int, int]]], Iterable[tuple[int, int]]] = list
        """Order of acknowledgements that arrive together."""
        self.rests = 0
        """Number of calls of ``rest``: no more reading ahead."""
        self.failure: Exception | None = None
        """Error that ended the producer: raised by ``acknowledged`` and ``produce``."""

    def change(self, **faults: object) -> None:
        """Set some of the faults, and wake waiters."""
        with self._kafka.change():
            for name, value in faults.items():
                if name.startswith("_") or name not in vars(self):
                    raise AttributeError(name)
                setattr(self, name, value)
            if self.failure is not None:
                self._sending.clear()
            self._send()

    def land(self, count: int = 1 << 30) -> int:
        """Store the next ``count`` records in flight, despite faults and even after ``close``. Returns their number."""
        with self._changed:
            return self._send(count, forced=True)

    @property
    def on_the_way(self) -> int:
        """Number of records sent and not stored yet."""
        return len(self._sending)

    # The protocol

    @property
    def name(self) -> str:
        return self._topic.name

    def produce(self, number: int, record: bytes) -> None:
        with self._kafka.change():
            self._check()
            if self.failure is not None:
                raise self.failure
            self._sending.append((number, bytes(record)))
            self._send()

    def acknowledged(self, timeout: float) -> list[tuple[int, int]]:
        with self._changed:
            self._wait_for(lambda: bool(self._is_connected() and self._reports) or self.failure is not None, timeout)
            if self._is_connected() and self._reports:
                taken, self._reports = list(self.order(self._reports)), []
                return taken
            if self.failure is not None:
                raise self.failure
            return []

    def read(self, start: int, end: int = END, timeout: float = 0.0) -> list[tuple[int, bytes]]:
        with self._changed:
            self._wait_for(lambda: self._can_answer() and start != self._topic.next, timeout)
            if not self._can_answer():
                return []
            topic = self._topic
            if start < topic.first:
                raise error(Code.RANGE_PURGED, f"{self.name} begins at offset {topic.first}, not {start}")
            if start > topic.next:
                raise error(Code.DAMAGED, f"{self.name} ends at offset {topic.next}; it was read up to {start}")
            return [(offset, topic[offset]) for offset in range(start, min(end, topic.next))]

    def rest(self) -> None:
        with self._changed:
            self.rests += 1

    def ends(self, timeout: float) -> tuple[int, int]:
        with self._changed:
            self._wait_for_answer(timeout)
            return self._topic.first, self._topic.next

    def delete_before(self, offset: int, timeout: float = 30.0) -> None:
        with self._changed:
            self._wait_for_answer(timeout)
            topic = self._topic
            if offset > topic.next:
                raise error(Code.BAD_ARGUMENT, f"{self.name} ends at offset {topic.next}, before {offset}")
            del topic.records[: max(offset - topic.first, 0)]
            topic.first = max(offset, topic.first)

    def close(self) -> None:
        with self._kafka.change():
            self._closed = True

    def _can_answer(self) -> bool:
        return not (self.cut_off or self.silent or self._kafka.away)

    def _is_connected(self) -> bool:
        return not (self.cut_off or self.held or self._kafka.away)

    def _check(self) -> None:
        if self._closed:
            raise error(Code.CLOSED, f"{self.name} was closed")

    def _send(self, count: int = 1 << 30, forced: bool = False) -> int:
        landed = 0
        while self._sending and landed < count and (forced or not (self.cut_off or self.slow or self._kafka.away)):
            number, record = self._sending.popleft()
            self._reports.append((number, UNKNOWN_OFFSET if number in self.unknown else self._topic.next))
            self._topic.records.append(record)
            landed += 1
        if landed:
            self._changed.notify_all()
        return landed

    def _wait_for_answer(self, timeout: float) -> None:
        if not self._wait_for(self._can_answer, timeout):
            raise error(Code.TIMED_OUT, f"{self.name} did not answer within {timeout:g} s")

    def _wait_for(self, condition: Callable[[], bool], timeout: float) -> bool:
        """Wait until a condition holds, at most ``timeout`` seconds. Raises Unknown(CLOSED) if it is closed."""
        deadline = time.monotonic() + timeout
        while True:
            self._check()
            self._send()  # records that stayed in flight while all nodes were unreachable
            if condition():
                return True
            left = deadline - time.monotonic()
            if left <= 0 or not self._changed.wait(left):
                self._check()
                return condition()
