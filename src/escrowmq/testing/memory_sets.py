"""A set store in memory: the contract of ``compensation/sets/seam.py`` in plain Python, for tests of its users."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from escrowmq.compensation.sets.checks import CheckedSets
from escrowmq.compensation.sets.seam import Run, Sizes


class MemorySets(CheckedSets):
    """One pair of sets, for the object's lifetime. Thread-safe; tests may read its attributes, and set ``fail``."""

    def __init__(self, name: str, *, now_us: Callable[[], int] = lambda: time.time_ns() // 1000) -> None:
        """Create empty sets. ``now_us``: the clock of leases, microseconds since 1970."""
        super().__init__(name)
        self._now_us = now_us
        self._lock = threading.RLock()
        self._token = secrets.token_hex(8)
        self.half: dict[bytes, int] = {}
        self.commits: dict[bytes, int] = {}
        self.runs: dict[str, dict[bytes, int]] = {}
        self.leases: dict[str, int] = {}
        self.fail: Exception | None = None
        """Exception raised by every call, if set: an unreachable store."""

    def lose(self) -> None:
        """Delete everything, like a restart of a server without persistence."""
        with self._lock:
            self._token = secrets.token_hex(8)
            for held in (self.half, self.commits, self.runs, self.leases):
                held.clear()

    def epoch(self) -> str:
        with self._use():
            return self._token

    def _add_halves(self, earliest: dict[bytes, int]) -> None:
        with self._use():
            for identity, us in earliest.items():
                self.half[identity] = min(us, self.half.get(identity, us))

    def _add_commits(self, ids: Sequence[bytes], now_us: int) -> None:
        with self._use():
            for identity in ids:
                self.commits.setdefault(identity, now_us)

    def _take(self, run: str, before_us: int, most: int, duration_us: int) -> tuple[int, list[bytes]]:
        with self._use():
            held = {identity for ids in self.runs.values() for identity in ids}
            early = _in_order({identity: us for identity, us in self.half.items() if us < before_us})[:most]
            kept: dict[bytes, int] = {}
            for identity in early:
                us = self.half.pop(identity)
                if self.commits.pop(identity, None) is None and identity not in held:
                    kept[identity] = us
            if kept:
                self.runs.setdefault(run, {}).update(kept)
                self.leases[run] = self._now_us() + duration_us
            return len(early), list(kept)

    def _drop(self, run: str) -> None: ...

    def _adopt(self, duration_us: int, limit: int) -> Run | None:
        with self._use():
            now_us = self._now_us()
            for run, until_us in sorted(self.leases.items(), key=lambda item: item[1]):
                if until_us <= now_us:
                    self.leases[run] = now_us + duration_us
                    return Run(run, self.left(run, limit))
            return None

    def _left(self, run: str, limit: int) -> tuple[bytes, ...]:
        with self._use():
            return tuple(_in_order(self.runs.get(run, {}))[:limit])

    def _renew(self, run: str, duration_us: int) -> bool:
        with self._use():
            if run in self.leases:
                self.leases[run] = self._now_us() + duration_us
            return run in self.leases

    def _settle(self, run: str, ids: Sequence[bytes]) -> None:
        with self._use():
            held = self.runs.get(run, {})
            for identity in ids:
                held.pop(identity, None)
            if not held:
                self.runs.pop(run, None)
                self.leases.pop(run, None)

    def _forget_commits(self, before_us: int) -> int:
        with self._use():
            old = [i for i, us in self.commits.items() if us < before_us and i not in self.half]
            for identity in old:
                del self.commits[identity]
            return len(old)

    def sizes(self) -> Sizes:
        with self._use():
            return count_sizes(self.half, self.commits, self.runs)

    @contextmanager
    def _use(self) -> Iterator[None]:
        with self._lock:
            self._check_open()
            if self.fail is not None:
                raise self.fail
            yield


def count_sizes(half: dict[bytes, int], commits: dict[bytes, int], runs: dict[str, dict[bytes, int]]) -> Sizes:
    """Return the sizes of a store with these entries."""
    times = [*half.values(), *(us for ids in runs.values() for us in ids.values())]
    return Sizes(len(half), len(commits), sum(map(len, runs.values())), len(runs), min(times, default=None))


def _in_order(times: dict[bytes, int]) -> list[bytes]:
    return sorted(times, key=lambda identity: (times[identity], identity))
