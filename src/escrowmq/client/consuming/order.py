"""Messages that an ordered consumer holds and must not hand out any more: the later messages of a key that failed, and
what is left of a lost lease.

Rules:

1. A message that this consumer gave back (NACK, whether or not that reached the broker) withdraws the later messages of
   its key in the same lease: those that lie here, and those that are still on their way. The broker lets the same ones
   go; what is delivered again has a new lease.
2. An act that was refused because its lease is gone withdraws what is later in that lease, whatever its key; so does
   the end of the lease by this process's clock, counted from when its first messages came: a little late, because the
   broker's count began before. Once that was said of a lease it stays so: a broker that stood still meanwhile may still
   extend it, and what was passed over must not be acknowledged then.
3. What was handed out and is withdrawn later cannot be called back: its acknowledgement is refused here, not sent.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from escrowmq.client.consuming.delivery import Rows

REMEMBERED = 4096
"""Leases remembered: many more than can lie in a consumer's buffers, for a queue has one at a time."""
ALL = -1
"""An offset before every message."""

Lease = tuple[int, int]
"""Number of the broker, id of the lease."""
T = TypeVar("T")


class _Latest(OrderedDict[Lease, T], Generic[T]):
    """A value for each of the latest leases."""

    def note(self, lease: Lease, value: T) -> None:
        self[lease] = value
        while len(self) > REMEMBERED:
            self.popitem(last=False)


class Order:
    """Messages withdrawn from one consumer. Thread-safe. ``lease``: seconds that a lease lasts, None: for ever."""

    def __init__(self, lease: float | None) -> None:
        self.lease = lease
        self._lock = threading.Lock()
        self._failed: _Latest[dict[str | None, int]] = _Latest()  # by key, the first offset that failed
        self._lost: _Latest[int] = _Latest()  # what is later than this offset
        self._ends: _Latest[float] = _Latest()  # by this process's clock
        self.changes = 0
        """Rises when a message may be withdrawn earlier or later than :meth:`until` said."""

    def came(self, number: int, batch: pa.RecordBatch) -> None:
        """Messages came from a broker."""
        if self.lease is not None:
            end = time.monotonic() + self.lease
            with self._lock:
                for lease in np.unique(batch.column("lease").to_numpy()).tolist():
                    if (number, lease) not in self._ends:
                        self._ends.note((number, lease), end)

    def extended(self, number: int, leases: list[int], seconds: float) -> None:
        """Note that the broker keeps these leases for so many seconds from now."""
        with self._lock:
            for lease in leases:
                if self.lease is not None:
                    self._ends.note((number, lease), time.monotonic() + seconds)
            self.changes += 1

    def failed(self, number: int, lease: int, offset: int, key: str | None) -> None:
        """Note that this message is given back."""
        with self._lock:
            keys = self._failed.get((number, lease))
            if keys is None:
                self._failed.note((number, lease), keys := {})
            keys[key] = min(offset, keys.get(key, offset))
            self.changes += 1

    def failed_all(self, rows: Rows) -> None:
        """All of these are."""
        for lease, offset, key in zip(*map(rows.list, ("lease", "offset", "key")), strict=True):
            self.failed(rows.number, lease, offset, key)

    def lost(self, number: int, lease: int, offset: int) -> None:
        """Note that the lease of this message is gone, because an operation on it was refused."""
        with self._lock:
            self._lost.note((number, lease), min(offset, self._lost.get((number, lease), offset)))
            self.changes += 1

    def until(self, rows: Rows) -> float:
        """Return the time before which, as far as is known now, none of these is withdrawn."""
        leases = [(rows.number, lease) for lease in np.unique(rows.batch.column("lease").to_numpy()).tolist()]
        if any(lease in self._failed or lease in self._lost for lease in leases):
            return 0.0
        return min((self._ends.get(lease, math.inf) for lease in leases), default=math.inf)

    def withdrawn(self, rows: Rows, row: int) -> bool:
        """Return whether a message was withdrawn since it came."""
        lease = (rows.number, rows.list("lease")[row])
        if (end := self._ends.get(lease)) is not None and time.monotonic() >= end:
            if self._lost.get(lease) != ALL:
                self.lost(*lease, ALL)
            return True
        if (lost := self._lost.get(lease)) is not None and rows.list("offset")[row] > lost:
            return True
        keys = self._failed.get(lease)
        return keys is not None and rows.list("offset")[row] > keys.get(rows.list("key")[row], 1 << 63)

    def withdrawn_of(self, rows: Rows) -> npt.NDArray[np.bool_] | None:
        """Return which of them were withdrawn; None: none."""
        if time.monotonic() < self.until(rows):
            return None
        found = np.array([self.withdrawn(rows, row) for row in range(rows.count)], np.bool_)
        return found if found.any() else None
