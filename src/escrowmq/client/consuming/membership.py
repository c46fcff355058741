"""A named member of a group with ``in_doubt="hold"``: its epoch at each broker and the leases it received.

After the loss of an answer to a receive, the process joins again and names the leases that it has. The broker then
sends the others again (``ledger/groups/members.py`` has the rules).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import pyarrow as pa

from escrowmq.client.links.answers import patient_action
from escrowmq.client.links.presence import Attendance
from escrowmq.platform.numbers import own_number
from escrowmq.wire import Link
from escrowmq.wire.actions.groups import JOIN, Join, Joined

REMEMBERED = 4096
"""Leases to remember of each broker after all their messages were settled, because the settlements may be in flight."""


class _Received:
    """Leases received from one broker."""

    def __init__(self) -> None:
        self.ends: dict[int, int] = {}  # lease → offset behind the last message that came
        self.open: dict[int, int] = {}  # lease → messages not settled yet
        self.done: deque[int] = deque()
        self.lost = False
        self.joined: Joined  # set by the first join, which comes before any receive


class Membership:
    """One process's membership at all brokers. Thread-safe."""

    def __init__(
        self, links: Sequence[Link], group: str, instance: str, timeout: float, attendances: Sequence[Attendance | None]
    ) -> None:
        self._links, self._attendances, self._timeout = links, attendances, timeout
        self._request = Join(group=group, instance=instance, process=own_number(), resume=False, keep=[])
        self._lock = threading.Lock()
        self._brokers = [_Received() for _ in links]

    def join(self, number: int, *, resume: bool) -> None:
        """Become the named member at broker ``number``, and fence the process that was it before. Raises
        Unknown(TIMED_OUT).

        ``resume``: after a lost answer, report the leases that arrived, so that the broker sends the others again;
        raises Fenced if another process is the member.
        """
        broker = self._brokers[number]
        with self._lock:
            request: Join = {**self._request, "resume": resume, "keep": list(broker.ends.items())}
        deadline = time.monotonic() + self._timeout
        answer = patient_action(self._links[number], JOIN(request), deadline, self._attendances[number])
        with self._lock:
            broker.joined, broker.lost = answer, False

    def options(self, number: int) -> Joined:
        return self._brokers[number].joined

    def lose(self, number: int) -> None:
        self._brokers[number].lost = True

    def has_lost(self, number: int) -> bool:
        """Return whether an answer of broker ``number`` was lost, so that the next receive requires a :meth:`join` with
        ``resume``."""
        return self._brokers[number].lost

    def on_messages(self, number: int, batch: pa.RecordBatch) -> None:
        broker = self._brokers[number]
        with self._lock:
            for lease, count, end in _runs(batch):
                broker.ends[lease] = max(end, broker.ends.get(lease, 0))
                broker.open[lease] = broker.open.get(lease, 0) + count

    def on_response(self, number: int, done: Future[pa.RecordBatch]) -> None:
        if done.cancelled() or done.exception() is not None:
            self.lose(number)
        else:
            self.on_messages(number, done.result())

    def settle(self, number: int, lease: int, count: int = 1) -> None:
        """Count ``count`` messages of a lease as settled. The latest settled leases are still remembered for
        :meth:`join`."""
        broker = self._brokers[number]
        with self._lock:
            left = broker.open.get(lease, 0) - count
            if left > 0:
                broker.open[lease] = left
            elif broker.open.pop(lease, None) is not None:
                broker.done.append(lease)
                if len(broker.done) > REMEMBERED and (oldest := broker.done.popleft()) not in broker.open:
                    broker.ends.pop(oldest, None)

    def settle_all(self, number: int, batch: pa.RecordBatch) -> None:
        for lease, count, _ in _runs(batch):
            self.settle(number, lease, count)


def _runs(batch: pa.RecordBatch) -> list[tuple[int, int, int]]:
    """Return for each lease in a DELIVERY batch: its id, the number of its messages, and the offset behind the last of
    them."""
    if not batch.num_rows:
        return []
    leases, offsets = batch.column("lease").to_numpy(), batch.column("offset").to_numpy()
    order = np.argsort(leases, kind="stable")
    found, firsts, counts = np.unique(leases[order], return_index=True, return_counts=True)
    ends = np.maximum.reduceat(offsets[order], firsts) + 1
    return list(zip(found.tolist(), counts.tolist(), ends.tolist(), strict=True))
