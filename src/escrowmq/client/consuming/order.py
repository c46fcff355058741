"""Messages that an ordered consumer has received and must not hand out any more: later messages of a failed key, and
the rest of a lost lease.

Rules:

1. A message that this consumer returned (NACK, whether or not it reached the broker) withdraws the later messages of
   its key in the same lease, whether they have arrived or not. The broker releases the same messages, and redelivers
   them under a new lease.
2. An operation that the broker rejects because the lease is lost withdraws all later messages of that lease. So does
   the end of the lease by this process's clock, counted from the arrival of its first messages, which is slightly later
   than by the broker's clock. Such a lease stays lost, even if a broker that was suspended extends it afterwards:
   messages were skipped meanwhile, and must not be acknowledged.
3. A message that was handed out before it was withdrawn cannot be recalled: its acknowledgement is not sent.
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
"""Maximum number of leases to remember: many more than a consumer can have, as a queue has one."""
ALL = -1
"""An offset before every message: withdraws a lease as a whole."""

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
    """Withdrawn messages of one consumer. Thread-safe. ``lease``: duration of a lease (s), None: unlimited."""

    def __init__(self, lease: float | None) -> None:
        self.lease = lease
        self._lock = threading.Lock()
        self._failed: _Latest[dict[str | None, int]] = _Latest()  # by key, the first failed offset
        self._lost: _Latest[int] = _Latest()  # messages after this offset are withdrawn
        self._ends: _Latest[float] = _Latest()  # by this process's clock
        self.changes = 0
        """Incremented when results of :meth:`valid_until` may have changed."""

    def add(self, number: int, batch: pa.RecordBatch) -> None:
        """Note that messages arrived from broker ``number``: the time until their new leases end starts."""
        if self.lease is not None:
            end = time.monotonic() + self.lease
            with self._lock:
                for lease in np.unique(batch.column("lease").to_numpy()).tolist():
                    if (number, lease) not in self._ends:
                        self._ends.note((number, lease), end)

    def extend(self, number: int, leases: list[int], seconds: float) -> None:
        """Note that broker ``number`` extended these leases to ``seconds`` from now."""
        with self._lock:
            for lease in leases:
                if self.lease is not None:
                    self._ends.note((number, lease), time.monotonic() + seconds)
            self.changes += 1

    def fail(self, number: int, lease: int, offset: int, key: str | None) -> None:
        """Note that this consumer returned a message unhandled: later messages of its key in the same lease are
        withdrawn."""
        with self._lock:
            keys = self._failed.get((number, lease))
            if keys is None:
                self._failed.note((number, lease), keys := {})
            keys[key] = min(offset, keys.get(key, offset))
            self.changes += 1

    def fail_all(self, rows: Rows) -> None:
        for lease, offset, key in zip(*map(rows.list, ("lease", "offset", "key")), strict=True):
            self.fail(rows.number, lease, offset, key)

    def lose(self, number: int, lease: int, offset: int) -> None:
        """Note that broker ``number`` rejected an operation on a message because its lease is lost: later messages of
        the lease are withdrawn."""
        with self._lock:
            self._lost.note((number, lease), min(offset, self._lost.get((number, lease), offset)))
            self.changes += 1

    def valid_until(self, rows: Rows) -> float:
        """Return the time (monotonic seconds) before which, as known now, none of these messages is withdrawn; 0 if
        some may be."""
        leases = [(rows.number, lease) for lease in np.unique(rows.batch.column("lease").to_numpy()).tolist()]
        if any(lease in self._failed or lease in self._lost for lease in leases):
            return 0.0
        return min((self._ends.get(lease, math.inf) for lease in leases), default=math.inf)

    def is_withdrawn(self, rows: Rows, row: int) -> bool:
        lease = (rows.number, rows.list("lease")[row])
        if (end := self._ends.get(lease)) is not None and time.monotonic() >= end:
            if self._lost.get(lease) != ALL:
                self.lose(*lease, ALL)
            return True
        if (lost := self._lost.get(lease)) is not None and rows.list("offset")[row] > lost:
            return True
        keys = self._failed.get(lease)
        return keys is not None and rows.list("offset")[row] > keys.get(rows.list("key")[row], 1 << 63)

    def find_withdrawn(self, rows: Rows) -> npt.NDArray[np.bool_] | None:
        """Return a mask of those messages that are withdrawn, or None if there are none."""
        if time.monotonic() < self.valid_until(rows):
            return None
        found = np.array([self.is_withdrawn(rows, row) for row in range(rows.count)], np.bool_)
        return found if found.any() else None
