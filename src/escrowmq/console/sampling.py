"""Sampling of the brokers' numbers every few seconds, kept for a quarter of an hour, for the charts of the overview."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from escrowmq.client.links.router import Router
from escrowmq.errors import Denied, EscrowError
from escrowmq.wire.actions import brokers, standing

logger = logging.getLogger(__name__)

SLOW_EVERY = 5
"""Group progress costs a broker more than its counters: it is read with every fifth sample."""


MOST_GROUPS = 1_000
"""Consumer groups whose numbers are kept."""


@dataclass(slots=True)
class Group:
    """Numbers of one consumer group over all brokers. ``acked``: None from brokers that do not report it."""

    lag: int = 0
    lag_seconds: float = 0.0
    dead: int = 0
    acked: int | None = 0


@dataclass(frozen=True, slots=True)
class Groups:
    """One slow sample: the consumer groups by name, and the number of undecided transactions."""

    at: float = 0.0
    """Monotonic time (s)."""
    by_name: Mapping[str, Group] = field(default_factory=dict)
    lag: int = 0
    dead: int = 0
    undecided: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample: the numbers of each broker that responded, by address, and its response time to a small request."""

    at: float
    """Monotonic time (s)."""
    numbers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    answered: Mapping[str, float] = field(default_factory=dict)
    skew_us: int = 0
    """The broker's clock minus this machine's."""
    groups: Groups | None = None
    """The newest slow sample."""
    problem: str = ""
    """The reason why no broker responded."""

    def total(self, name: str) -> float | None:
        """Sum a number over all brokers; None if none reported it."""
        found = [numbers[name] for numbers in self.numbers.values() if name in numbers]
        return sum(found) if found else None

    def largest(self, name: str) -> float | None:
        """Return the maximum of a number; None if no broker reported it."""
        return max((numbers[name] for numbers in self.numbers.values() if name in numbers), default=None)


class Sampler:
    """A thread that samples until it is closed. ``every``: interval in seconds; ``keep``: number of samples kept.
    ``is_active`` pauses it, for callers without the right to see the numbers; the first refusal does so, too."""

    is_active = True

    def __init__(self, router: Router, every: float, keep: int, timeout: float) -> None:
        self._router = router
        self._every = every
        self._timeout = timeout
        self._samples: deque[Sample] = deque(maxlen=keep)
        self._closed = threading.Event()
        self._taken = 0
        self._groups: Groups | None = None
        self._thread = threading.Thread(target=self._work, name="escrowmq-console-samples", daemon=True)
        self._changed = threading.Condition()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop after the current sample."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()

    def samples(self) -> list[Sample]:
        """Return the samples, oldest first."""
        with self._changed:
            return list(self._samples)

    def last(self) -> Sample | None:
        """Return the newest sample; None before the first is complete."""
        with self._changed:
            return self._samples[-1] if self._samples else None

    def wait(self, ready: Callable[[list[Sample]], bool], timeout: float) -> bool:
        """Wait until the samples satisfy ``ready``."""
        with self._changed:
            return self._changed.wait_for(lambda: ready(list(self._samples)), timeout)

    def _work(self) -> None:
        while not self._closed.is_set():
            if self.is_active:
                self._take()
            self._closed.wait(self._every)

    def _take(self) -> None:
        try:
            sample = self.look()
        except Denied as problem:
            self.is_active = False  # each further try would be recorded as a denied call
            sample = Sample(time.monotonic(), problem=str(problem))
        except EscrowError as problem:
            sample = Sample(time.monotonic(), problem=str(problem))
        except Exception as problem:  # the next sample may succeed; the times on the page show that it is stale
            logger.error("a look at the brokers failed", exc_info=problem)
            sample = Sample(time.monotonic(), problem=f"{type(problem).__name__}: {problem}")
        with self._changed:
            self._samples.append(sample)
            self._changed.notify_all()

    def look(self) -> Sample:
        """Take one sample. Raises EscrowError if no broker responds."""

        def ask(number: int) -> tuple[float, int, dict[str, float]]:
            deadline = time.monotonic() + self._timeout
            started = time.perf_counter()
            hello = self._router.ask(number, brokers.HELLO({}), deadline, longest=self._timeout)
            took = time.perf_counter() - started
            skew = hello["time_us"] - time.time_ns() // 1000 if "time_us" in hello else 0
            stats = self._router.ask(number, brokers.STATS({}), deadline, longest=self._timeout)
            return took, skew, stats

        answers = self._router.every(ask, self._timeout + 1.0)
        addresses = {number: self._router.links[number].address for number, _ in answers.found}
        if self._taken % SLOW_EVERY == 0:
            self._groups = self._read_groups()
        self._taken += 1
        return Sample(
            time.monotonic(),
            {addresses[number]: stats for number, (_, _, stats) in answers.found},
            {addresses[number]: took for number, (took, _, _) in answers.found},
            min((skew for _, (_, skew, _) in answers.found), key=abs, default=0),
            self._groups,
        )

    def _read_groups(self) -> Groups:
        """Read the consumer groups, and the undecided transactions, of all brokers."""

        def ask(number: int) -> standing.Standings:
            deadline = time.monotonic() + self._timeout
            return self._router.ask(number, standing.ALL({}), deadline, longest=self._timeout)

        found: dict[str, Group] = {}
        answers = self._router.every(ask, self._timeout + 1.0).values
        for row in (row for answer in answers for row in answer["consumers"]):
            one = found.setdefault(row["group"], Group())
            one.lag += row["lag"]
            one.lag_seconds = max(one.lag_seconds, row["lag_seconds"])
            one.dead += row["dead"]
            one.acked = None if one.acked is None or "acked" not in row else one.acked + row["acked"]
        undecided = sum(row["open"] + row["parked"] for answer in answers for row in answer["producers"])
        lag, dead = sum(one.lag for one in found.values()), sum(one.dead for one in found.values())
        kept = dict(list(found.items())[:MOST_GROUPS])
        return Groups(time.monotonic(), kept, lag, dead, undecided)
