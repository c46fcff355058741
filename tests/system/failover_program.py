"""The application of failover.py, which only knows the URL of a shard, and the account of every id in the end."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import escrowmq as mq
from escrowmq.errors import EscrowError

PATIENCE = 180.0
"""For what has to happen, on a machine that may have much else to do."""
WRITERS = 4
PAUSE = 0.02
"""Of a writer between two transactions: the load is there to be struck, and leaves the machine's two cores to those who
take over.
"""
ROLLED_BACK = 7
"""Every so many transactions of a writer one rolls back."""
TOPIC = "orders"

Place = tuple[int, int]
"""A queue and an offset in it."""


def eventually(what: Callable[[], bool], why: str | Callable[[], str], every: float = 0.05) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + PATIENCE
    while not what():
        if time.monotonic() > deadline:
            raise AssertionError(why() if callable(why) else why)
        time.sleep(every)


@dataclass(frozen=True)
class Account:
    """What became of the ids: how many were lost, repeated and leaked."""

    lost: int
    repeated: int
    leaked: int

    @property
    def bad(self) -> int:
        return self.lost + self.repeated + self.leaked


def account(
    committed: set[str],
    rolled_back: set[str],
    consumed: Mapping[str, set[Place]],
    stored: Mapping[str, set[Place]],
    *,
    kept: bool = True,
) -> Account:
    """Look at every id. ``kept``: the log deletes nothing, so what was committed is not only consumed but stored, too.

    A message that is delivered again comes from the place at which it is; an id that was seen at two places was
    repeated.
    """
    found = {key: consumed.get(key, set()) | stored.get(key, set()) for key in {*consumed, *stored}}
    there = set(consumed) & set(stored) if kept else set(consumed)
    return Account(
        lost=len(committed - there),
        repeated=sum(len(places) > 1 for places in found.values()),
        leaked=len(rolled_back & set(found)),
    )


def stored(url: str) -> dict[str, set[Place]]:
    """Where each key stands in the topic."""
    with mq.connect(url) as bus:
        columns = bus.admin.read(TOPIC, columns=["key", "queue", "offset"]).read_all().to_pydict()
    found: dict[str, set[Place]] = {}
    for key, queue, offset in zip(columns["key"], columns["queue"], columns["offset"], strict=True):
        found.setdefault(key, set()).add((queue, offset))
    return found


class Watch:
    """Waits for the first answer of a transaction that is begun from now on."""

    def __init__(self) -> None:
        self.since = time.monotonic()
        self._at: float | None = None
        self._seen = threading.Event()

    def see(self, begun: float, answered: float) -> None:
        """A transaction was answered."""
        if begun >= self.since and not self._seen.is_set():
            self._at = answered
            self._seen.set()

    def seconds(self, why: Callable[[], str]) -> float:
        """From the beginning to that answer."""
        if not self._seen.wait(PATIENCE):
            raise AssertionError(f"no answer: {why()}")
        assert self._at is not None
        return self._at - self.since


@dataclass
class Program:
    """The application: transactions and a consumer, over one URL. ``committed``, ``rolled_back``: what its database
    says."""

    url: str
    committed: set[str] = field(default_factory=set)
    rolled_back: set[str] = field(default_factory=set)
    answered: list[tuple[float, float]] = field(default_factory=list)
    """When each transaction was begun, and when its commit was answered."""
    problems: list[str] = field(default_factory=list)
    consumed: dict[str, set[Place]] = field(default_factory=dict)

    def __enter__(self) -> Program:
        self._end, self._read = threading.Event(), threading.Event()
        self._watch: Watch | None = None
        self._bus = mq.connect(self.url)
        self._producer = self._bus.producer("shop", timeout=PATIENCE, checker=self._check)
        self._writers = [threading.Thread(target=self._write, args=(n,), daemon=True) for n in range(WRITERS)]
        self._reader = threading.Thread(target=self._consume, daemon=True)
        for thread in (*self._writers, self._reader):
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._read.set()
        for thread in (*self._writers, self._reader):
            thread.join(PATIENCE)
        self._bus.close()

    def _check(self, asked: mq.Check) -> mq.Outcome:
        key = asked.messages[0].key or ""
        return mq.COMMIT if key in self.committed else mq.ROLLBACK if key in self.rolled_back else mq.UNKNOWN

    def _write(self, writer: int) -> None:
        for number in itertools.count():
            if self._end.wait(PAUSE):
                return
            key, begun = f"{writer}-{number}", time.monotonic()
            try:
                with self._producer.transaction() as txn:
                    txn.send(TOPIC, key.encode() * 500, key=key)
                    if number % ROLLED_BACK == 0:
                        self.rolled_back.add(key)
                        raise _Undone
                    self.committed.add(key)  # the local commit
                self.answered.append((begun, time.monotonic()))
                if self._watch is not None:
                    self._watch.see(*self.answered[-1])
            except _Undone:
                pass
            except EscrowError as problem:
                if key not in self.committed:
                    self.rolled_back.add(key)
                self.problems.append(f"{key}: {problem}")

    def _consume(self) -> None:
        with self._bus.consumer("cart", [TOPIC], timeout=PATIENCE) as consumer:
            while not self._read.is_set():
                try:
                    for message in consumer.messages(idle_timeout=0.5):
                        self.consumed.setdefault(message.key or "", set()).add((message.queue, message.offset))
                        message.ack()
                except EscrowError as problem:
                    self.problems.append(f"consumer: {problem}")

    def watch(self) -> Watch:
        """From now on; one at a time."""
        self._watch = Watch()
        return self._watch

    def works(self, count: int = 20) -> None:
        """Wait until so many more transactions are answered."""
        goal = len(self.answered) + count
        eventually(lambda: len(self.answered) >= goal, lambda: f"nothing is answered: {self.problems[-3:]}")

    def pause(self, since: float) -> float:
        """The longest time without an answer from ``since`` on, in seconds. At ``since`` there were answers, and there
        are again."""
        answers = [since, *sorted(answer for _, answer in list(self.answered) if answer > since)]
        return max(later - earlier for earlier, later in itertools.pairwise(answers))

    def between(self, since: float, until: float) -> int:
        """How many transactions were begun and answered in this time."""
        return sum(begun >= since and answer <= until for begun, answer in list(self.answered))

    def account(self, *, kept: bool = True) -> Account:
        """Begin no more, consume what was committed for as long as something comes, and look at every id."""
        self._end.set()
        for thread in self._writers:
            thread.join(PATIENCE)
        missing = len(self.committed)
        while missing:
            watched, deadline = missing, time.monotonic() + PATIENCE / 3
            while missing == watched and missing and time.monotonic() < deadline:
                time.sleep(0.1)
                missing = len(self.committed - set(self.consumed))
            if missing == watched:
                break  # nothing came for a minute: it is lost
        self._read.set()
        self._reader.join(PATIENCE)
        return account(self.committed, self.rolled_back, self.consumed, stored(self.url), kept=kept)


class _Undone(Exception):
    """The local transaction rolls back."""


def said(link: Any, action: str, timeout: float = 2.0) -> dict[str, Any]:
    """What a broker answers; empty if it does not."""
    try:
        return dict(link.action(action, {}, timeout))
    except EscrowError:
        return {}
