"""A consumer that browses a system view. Nothing is leased and no group is made, so it cannot settle a message
(DENIED). A thread of its own reads ahead."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn

import pyarrow as pa

from escrowmq.client.consuming.consumption import Consumption
from escrowmq.client.consuming.delivery import Rows
from escrowmq.client.consuming.fetching import Fetcher
from escrowmq.client.consuming.options import DEFAULT_BATCH, ConsumerOptions
from escrowmq.client.links.presence import Missing
from escrowmq.client.reading.reading import WAIT_SECONDS, Reading
from escrowmq.client.reading.views import messages_of
from escrowmq.errors import Code, EscrowError, Misuse, error
from escrowmq.model import Act

AHEAD = 2
"""Batches that are buffered."""
_OF_GROUPS = ["ordered", "lease", "max_attempts", "retry_backoff", "retry_backoff_max", "redelivery"]
_OF_GROUPS += ["qos", "seen", "instance", "in_doubt"]


def view_among(topics: Any) -> str | None:
    """Return the system view that a consumer browses, None if ``topics`` are topics. Raises Misuse(BAD_ARGUMENT) for a
    view together with anything else."""
    names = [topics] if isinstance(topics, str) else list(topics)
    views = [name for name in names if isinstance(name, str) and name.startswith("%")]
    if views and len(names) > 1:
        raise Misuse(Code.BAD_ARGUMENT, f"{views[0]} and something else", "a consumer browses one system view alone")
    return views[0] if views else None


def check_browsing(view: str, options: ConsumerOptions) -> None:
    """Raise Misuse(BAD_ARGUMENT) for an option that a consumer of a system view cannot have, because it is one of
    groups."""
    default = ConsumerOptions()
    if given := [name for name in _OF_GROUPS if getattr(options, name) != getattr(default, name)]:
        hint = "there are tags, start, prefetch, timeout"
        raise Misuse(Code.BAD_ARGUMENT, f"{view} is for reading only: no {', '.join(given)}", hint)


class _Ahead(Fetcher):
    """Reads rows of a view ahead."""

    def __init__(self, reading: Reading, arrived: Callable[[], None]) -> None:
        self._reading = reading
        self._arrived = arrived
        self._changed = threading.Condition()
        self._batches: deque[pa.RecordBatch] = deque()
        self._problem: EscrowError | None = None
        self._reader: threading.Thread | None = None

    def start(self, max_messages: int, one_by_one: bool = False) -> None:
        with self._changed:
            if self._reader is None and not self._reading.closed.is_set():
                self._reader = threading.Thread(target=self._read, name="escrowmq-browse", daemon=True)
                self._reader.start()

    def _read(self) -> None:
        reading = self._reading
        while not reading.closed.is_set():
            try:
                found = reading.fill(WAIT_SECONDS)
            except EscrowError as problem:
                with self._changed:
                    self._problem, self._reader = problem, None  # the next call starts another thread
                    self._changed.notify_all()
                self._arrived()
                return
            if not found or (taken := reading.take(DEFAULT_BATCH)) is None:
                continue
            with self._changed:
                self._batches.append(messages_of(reading.topic, taken[1]))
                self._changed.notify_all()
            self._arrived()
            with self._changed:
                while len(self._batches) >= AHEAD and not reading.closed.is_set():
                    self._changed.wait()

    def take(self) -> tuple[int, pa.RecordBatch] | None:
        with self._changed:
            if self._batches:
                self._changed.notify_all()
                return 0, self._batches.popleft()
            problem, self._problem = self._problem, None
        if problem is not None:
            raise problem
        return None

    def put_back(self, number: int, batch: pa.RecordBatch) -> None:
        with self._changed:
            self._batches.appendleft(batch)

    def has_something(self) -> bool:
        return bool(self._batches) or self._problem is not None

    def wait(self, seconds: float) -> None:
        """Wait until a batch or an error can be taken, or the reader is closed, at most ``seconds``."""
        with self._changed:
            self._changed.wait_for(lambda: self.has_something() or self._reading.closed.is_set(), seconds)

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()


class Browsing(Consumption):
    """The shared state of a consumer of a system view, over that of a reader."""

    def __init__(self, group: str, reading: Reading) -> None:
        self.group = group
        self._set_up(reading.router, reading.waiting, ConsumerOptions(timeout=reading.timeout))
        self._reading = reading
        self._ahead = self.fetcher = _Ahead(reading, self.arrival.set)

    @property
    def refused(self) -> int:
        return 0  # settlements are refused at once

    def act(self, rows: Rows, row: int, act: Act, delay_us: int, cause: str | None, waiter: Any = None) -> NoReturn:
        view, word = self._reading.topic, act.name.lower()
        raise error(Code.DENIED, f"{view} is for reading only: there is nothing to {word}", "its rows are not leased")

    async def extend(self, rows: Rows, row: int, delay_us: int) -> None:
        self.act(rows, row, Act.EXTEND, delay_us, None)

    async def act_on_all(self, rows: Rows, act: Act, delay_us: int, cause: str | None, wait: bool) -> None:
        self.act(rows, 0, act, delay_us, cause)

    async def receive_once(self, max_messages: int, wait: float) -> list[tuple[int, pa.RecordBatch]]:
        self._ahead.start(max_messages)
        await self.waiting.away(self._ahead.wait, wait)
        if (taken := self._ahead.take()) is None:
            return []
        if taken[1].num_rows > max_messages:
            self._ahead.put_back(0, taken[1].slice(max_messages))
        return [(0, taken[1].slice(0, max_messages))]

    def missing(self) -> list[Missing]:
        return self._reading.missing()

    def give_back(self, number: int, batch: pa.RecordBatch) -> None: ...

    def stop(self) -> None:
        self.stopped = True
        self.arrival.set()

    def drain(self) -> None: ...

    def close(self) -> None:
        self.stopped = True
        self._reading.close()
        self._ahead.wake()
