"""A set store in memory: the contract of ``compensation/sets/seam.py`` in plain Python, for tests of its users."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence

from escrowmq.compensation.sets.checks import (
    check_halves,
    check_ids,
    check_limit,
    check_store_name,
    check_time,
    lease_us,
)
from escrowmq.compensation.sets.seam import Run, Sizes
from escrowmq.errors import Code, Misuse


def _now_us() -> int:
    return time.time_ns() // 1000


class MemorySets:
    """One pair of sets, for the object's lifetime. Thread-safe; tests may read its attributes, and set ``fail``."""

    def __init__(self, name: str, *, now_us: Callable[[], int] = _now_us) -> None:
        """Create empty sets. ``now_us``: the clock of leases, microseconds since 1970."""
        self._name = check_store_name(name)
        self._now_us = now_us
        self._lock = threading.RLock()
        self._closed = False
        self._token = secrets.token_hex(8)
        self.half: dict[bytes, int] = {}
        self.commits: dict[bytes, int] = {}
        self.runs: dict[str, dict[bytes, int]] = {}
        self.leases: dict[str, int] = {}
        self.fail: Exception | None = None
        """Exception raised by every call, if set: an unreachable store."""

    @property
    def name(self) -> str:
        """See the contract."""
        return self._name

    def lose(self) -> None:
        """Delete everything, like a restart of a server without persistence."""
        with self._lock:
            self._token = secrets.token_hex(8)
            for held in (self.half, self.commits, self.runs, self.leases):
                held.clear()

    def epoch(self) -> str:
        """Implement the contract."""
        with self._lock:
            self._check_usable()
            return self._token

    def add_halves(self, ids: Sequence[bytes], announced_us: Sequence[int]) -> None:
        """Implement the contract."""
        earliest = check_halves(ids, announced_us)
        with self._lock:
            self._check_usable()
            for identity, us in earliest.items():
                self.half[identity] = min(us, self.half.get(identity, us))

    def add_commits(self, ids: Sequence[bytes], now_us: int) -> None:
        """Implement the contract."""
        check_ids(ids)
        check_time(now_us)
        with self._lock:
            self._check_usable()
            for identity in ids:
                self.commits.setdefault(identity, now_us)

    def take(self, before_us: int, limit: int, lease: float) -> Run | None:
        """Implement the contract."""
        check_time(before_us)
        check_limit(limit)
        lasts_us = lease_us(lease)
        with self._lock:
            self._check_usable()
            held = {identity for ids in self.runs.values() for identity in ids}
            run: dict[bytes, int] = {}
            for identity, us in sorted(self.half.items(), key=lambda item: (item[1], item[0])):
                if us >= before_us or len(run) == limit:
                    break
                del self.half[identity]
                if self.commits.pop(identity, None) is None and identity not in held:
                    run[identity] = us
            if not run:
                return None
            name = secrets.token_hex(8)
            self.runs[name], self.leases[name] = run, self._now_us() + lasts_us
            return Run(name, tuple(run))

    def adopt(self, lease: float, limit: int) -> Run | None:
        """Implement the contract."""
        check_limit(limit)
        lasts_us = lease_us(lease)
        with self._lock:
            self._check_usable()
            now_us = self._now_us()
            for run, until_us in sorted(self.leases.items(), key=lambda item: item[1]):
                if until_us <= now_us:
                    self.leases[run] = now_us + lasts_us
                    return Run(run, self.left(run, limit))
            return None

    def left(self, run: str, limit: int) -> tuple[bytes, ...]:
        """Implement the contract."""
        check_limit(limit)
        with self._lock:
            self._check_usable()
            ids = sorted(self.runs.get(run, {}).items(), key=lambda item: (item[1], item[0]))
            return tuple(identity for identity, _ in ids[:limit])

    def renew(self, run: str, lease: float) -> bool:
        """Implement the contract."""
        lasts_us = lease_us(lease)
        with self._lock:
            self._check_usable()
            if run in self.leases:
                self.leases[run] = self._now_us() + lasts_us
            return run in self.leases

    def settle(self, run: str, ids: Sequence[bytes]) -> None:
        """Implement the contract."""
        check_ids(ids)
        with self._lock:
            self._check_usable()
            held = self.runs.get(run, {})
            for identity in ids:
                held.pop(identity, None)
            if not held:
                self.runs.pop(run, None)
                self.leases.pop(run, None)

    def forget_commits(self, before_us: int) -> int:
        """Implement the contract."""
        check_time(before_us)
        with self._lock:
            self._check_usable()
            old = [i for i, us in self.commits.items() if us < before_us and i not in self.half]
            for identity in old:
                del self.commits[identity]
            return len(old)

    def sizes(self) -> Sizes:
        """Implement the contract."""
        with self._lock:
            self._check_usable()
            times = [*self.half.values(), *(us for ids in self.runs.values() for us in ids.values())]
            in_runs = sum(map(len, self.runs.values()))
            return Sizes(len(self.half), len(self.commits), in_runs, len(self.runs), min(times, default=None))

    def close(self) -> None:
        """Implement the contract."""
        self._closed = True

    def _check_usable(self) -> None:
        if self._closed:
            raise Misuse(Code.BAD_ARGUMENT, "the set store is closed")
        if self.fail is not None:
            raise self.fail
