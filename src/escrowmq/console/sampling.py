"""Looks at the brokers' numbers every few seconds and keeps the last quarter of an hour of them, for the pictures of
the overview.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from escrowmq.client.links.router import Router
from escrowmq.errors import EscrowError
from escrowmq.wire.actions import brokers, groups

logger = logging.getLogger(__name__)

SLOW_EVERY = 5
"""Where groups stand costs a broker more than its counters: it is asked at every fifth look."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One look: the numbers of each broker that answered, by its address, and how long it took to answer a small
    question."""

    at: float
    """Monotonic seconds."""
    numbers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    answered: Mapping[str, float] = field(default_factory=dict)
    skew_us: int = 0
    """The broker's clock minus this machine's."""
    lag: float | None = None
    """Messages that consumer groups have yet to do, over all groups."""
    dead: float | None = None
    problem: str = ""
    """Why nobody answered."""

    def total(self, name: str) -> float | None:
        """Return a number over all brokers; None if none said it."""
        found = [numbers[name] for numbers in self.numbers.values() if name in numbers]
        return sum(found) if found else None

    def largest(self, name: str) -> float | None:
        """Return the largest of a number; None if no broker said it."""
        return max((numbers[name] for numbers in self.numbers.values() if name in numbers), default=None)


class Sampler:
    """A thread that samples until it is closed. ``every`` is seconds; ``keep`` how many looks are kept."""

    def __init__(self, router: Router, every: float, keep: int, timeout: float) -> None:
        self._router = router
        self._every = every
        self._timeout = timeout
        self._samples: deque[Sample] = deque(maxlen=keep)
        self._closed = threading.Event()
        self._looks = 0
        self._standing: tuple[float | None, float | None] = (None, None)
        self._thread = threading.Thread(target=self._work, name="escrowmq-console-samples", daemon=True)
        self._news = threading.Condition()

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """End after the look that is under way."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()

    def samples(self) -> list[Sample]:
        """Return the kept samples, oldest first."""
        with self._news:
            return list(self._samples)

    def last(self) -> Sample | None:
        """Return the newest look; None before the first has come to its end."""
        with self._news:
            return self._samples[-1] if self._samples else None

    def wait(self, ready: Callable[[list[Sample]], bool], timeout: float) -> bool:
        """Until the samples are as wanted."""
        with self._news:
            return self._news.wait_for(lambda: ready(list(self._samples)), timeout)

    def _work(self) -> None:
        while not self._closed.is_set():
            try:
                sample = self.look()
            except EscrowError as problem:
                sample = Sample(time.monotonic(), problem=str(problem))
            except Exception as problem:  # the next look may be better; a page that stands still says so by its times
                logger.error("a look at the brokers failed", exc_info=problem)
                sample = Sample(time.monotonic(), problem=f"{type(problem).__name__}: {problem}")
            with self._news:
                self._samples.append(sample)
                self._news.notify_all()
            self._closed.wait(self._every)

    def look(self) -> Sample:
        """One look. Raises EscrowError if no broker answers."""

        def ask(number: int) -> tuple[float, int, dict[str, float]]:
            deadline = time.monotonic() + self._timeout
            begun = time.perf_counter()
            hello = self._router.ask(number, brokers.HELLO({}), deadline, longest=self._timeout)
            took = time.perf_counter() - begun
            skew = hello["time_us"] - time.time_ns() // 1000 if "time_us" in hello else 0
            stats = self._router.ask(number, brokers.STATS({}), deadline, longest=self._timeout)
            return took, skew, stats

        answers = self._router.every(ask, self._timeout + 1.0)
        addresses = {number: self._router.links[number].address for number, _ in answers.found}
        if self._looks % SLOW_EVERY == 0:
            self._standing = self._stand()
        self._looks += 1
        lag, dead = self._standing
        return Sample(
            time.monotonic(),
            {addresses[number]: stats for number, (_, _, stats) in answers.found},
            {addresses[number]: took for number, (took, _, _) in answers.found},
            min((skew for _, (_, skew, _) in answers.found), key=abs, default=0),
            lag,
            dead,
        )

    def _stand(self) -> tuple[float, float]:
        """Over all groups: messages to be done, and dead letters."""

        def ask(number: int) -> tuple[int, int]:
            deadline = time.monotonic() + self._timeout
            found = self._router.ask(number, groups.LIST({}), deadline, longest=self._timeout)["groups"]
            lag = sum(q["waiting"] + q["leased"] + q["retrying"] for group in found for q in group["queues"])
            return lag, sum(group["dead_letters"] for group in found)

        answers = self._router.every(ask, self._timeout + 1.0).values
        return sum(lag for lag, _ in answers), sum(dead for _, dead in answers)
