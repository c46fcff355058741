"""The waiting rows of a lane: the open request, to which rows are added, and the sealed ones that wait to leave."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import pyarrow as pa

from escrowmq.client.lanes.request import Request
from escrowmq.wire.parcels import Row

MAX_ROWS, MAX_BYTES = 4096, 16 << 20
"""Of one request of several callers; a caller's own batch may be larger."""
JOINED_WITHIN = 0.1
"""Batches join one that began to wait at most this part of the timeout ago, because they get its deadline."""


class Filling:
    """The part of a lane that callers fill, under the lane's lock. ``timeout``: seconds from the sealing of a request
    to its deadline."""

    def __init__(self, timeout: float, max_rows: int, max_bytes: int) -> None:
        self._timeout = timeout
        self._max_rows = min(max_rows, MAX_ROWS)  # what the broker takes, if that is less
        self._max_bytes = min(max_bytes, MAX_BYTES)
        self._empty()

    def _empty(self) -> None:
        self._open: list[Row] = []
        self._open_waiters: list[Any] = []
        self._open_bytes = 0
        self._sealed: deque[Request] = deque()
        self.waiting = 0
        """Rows that wait to be sent."""

    def _seal(self) -> None:
        """Close the open request and queue it for sending; its deadline counts from now. Rows that are added later form
        another one."""
        if self._open:
            deadline = time.monotonic() + self._timeout
            self._sealed.append(Request(self._open, self._open_waiters, deadline, self._open_bytes))
            self._open, self._open_waiters, self._open_bytes = [], [], 0

    def _seal_batch(self, batch: pa.RecordBatch, waiter: Any) -> None:
        """Queue a caller's whole batch behind the waiting rows: in a request of its own, or in the last waiting one."""
        self._seal()
        size = int(pa.ipc.get_record_batch_size(batch))  # cheaper than ``nbytes``
        request = Request(None, [waiter], time.monotonic() + self._timeout, size, [batch])
        if self._joins(request):
            self._sealed[-1].join(request)
        else:
            self._sealed.append(request)
        self.waiting += len(request)

    def _joins(self, request: Request) -> bool:
        """Return whether a new request's batch fits into the last waiting request, so that they are sent together."""
        last = self._sealed[-1] if self._sealed else None
        return (
            last is not None
            and last.rows is None
            and len(last) + len(request) <= self._max_rows
            and last.size + request.size <= self._max_bytes
            and request.deadline - last.deadline <= JOINED_WITHIN * self._timeout
        )
