"""The counters of a relay."""

from __future__ import annotations

import threading
import time
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Statistics:
    """Counts since the start of this relay, and how it stands now."""

    sent: int = 0
    """Messages with the target's durable OK."""
    refused: int = 0
    """Refusals, one per try."""
    waiting: int = 0
    """Messages that this relay gave up: they wait for a person."""
    repeated: int = 0
    """Messages whose OK could not be marked (lease lost, database away): they are or were sent again."""
    redelivered: int = 0
    """Messages sent again because no callback came."""
    purged: int = 0
    """Kept rows that were deleted."""
    batches: int = 0
    """Batches with at least one OK."""
    target_failures: int = 0
    """Batches that the target did not take."""
    database_failures: int = 0
    """Times the database was away."""
    lanes: int = 0
    """Lanes leased now."""
    lag: float = 0.0
    """Age in seconds of the oldest row of the table that is still to be sent, whoever has its lane, by the database's
    clock; 0: there is none. Looked at once a second; rows that wait for a person are not counted."""

    def as_dict(self) -> dict[str, Any]:
        """Return names and numbers, for JSON."""
        return asdict(self)


class Counters:
    """The numbers behind :class:`Statistics`. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._lanes: dict[int, int] = {}
        self._lag = 0.0
        self._lag_seen = 0.0

    def add(self, **counts: int) -> None:
        """Count up."""
        with self._lock:
            for name, count in counts.items():
                self._counts[name] = self._counts.get(name, 0) + count

    def leased(self, worker: int, lanes: int) -> None:
        """``worker`` has so many lanes now."""
        with self._lock:
            self._lanes[worker] = lanes

    def lagging(self, seconds: float) -> None:
        """Set the age of the oldest row that is to be sent; 0: nothing is left."""
        with self._lock:
            self._lag, self._lag_seen = seconds, time.monotonic()

    def now(self) -> Statistics:
        """Return the numbers as of now."""
        with self._lock:
            lag = (
                self._lag + (time.monotonic() - self._lag_seen) if self._lag else 0.0
            )  # it grows until it is looked at
            return Statistics(**self._counts, lanes=sum(self._lanes.values()), lag=lag)
