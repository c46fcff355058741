"""Builds acknowledgement batches: consecutive offsets of one lease are combined into one row."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from escrowmq import schemas
from escrowmq.client.lanes.request import NO_ID, FirstId, LaneRows
from escrowmq.errors import Code, EscrowError, error
from escrowmq.model import Act
from escrowmq.wire.parcels import Row

Ints = npt.NDArray[np.int64]
Codes = list[Code | EscrowError]


def settling_batch(leases: Ints, starts: Ints, counts: Ints, acts: Any, delays: Any, causes: Any) -> pa.RecordBatch:
    """Return a SETTLING batch, a row for each run of offsets; acts, delays and causes may be one value for all."""
    n = len(leases)
    numbers = np.broadcast_to(np.asarray(acts, np.uint8), n), np.broadcast_to(np.asarray(delays, np.int64), n)
    texts = pa.array(causes if isinstance(causes, list) else [causes] * n, pa.utf8())
    arrays = [*map(pa.array, (leases, starts, counts, *numbers)), texts]
    return pa.RecordBatch.from_arrays(arrays, schema=schemas.SETTLING)


def lease_runs(delivery: pa.RecordBatch, apart: bool = False) -> tuple[Any, Any, Any]:
    """Return leases, first offsets and counts that cover the rows of a DELIVERY batch: one run per unbroken range of
    one lease. A run may span offsets that are not in the lease (of other tags), which the broker skips; but not if the
    rows are ``apart``, as in an ordered group, where withdrawn messages may lie between."""
    leases = delivery.column("lease").to_numpy()
    offsets = delivery.column("offset").to_numpy()
    if not len(leases):
        return leases, offsets, offsets
    new = np.ones(len(leases), np.bool_)
    new[1:] = (leases[1:] != leases[:-1]) | (offsets[1:] <= offsets[:-1])
    if apart:
        new[1:] |= offsets[1:] != offsets[:-1] + 1
    first = np.flatnonzero(new)
    last = np.append(first[1:], len(leases)) - 1
    return leases[first], offsets[first], offsets[last] - offsets[first] + 1


_NOT_REFUSED = (Code.OK, Code.DISCONNECTED)
_LOST = (Code.LEASE_LOST, Code.DISCONNECTED)


class SettlingCodec:
    """Rows (lease, offset, offset delivered before it in the lease or -2, act, delay_us, cause) to SETTLING batches.

    Acks that follow each other in their lease become one run. ``refused`` counts settlements that came too late, so
    that the messages are redelivered.
    """

    def __init__(self, on_refused: Callable[[int, int], None] | None = None) -> None:
        self.refused = 0
        self._on_refused = on_refused  # called with lease and offset
        self._lock = threading.Lock()

    def parcel(self, rows: LaneRows) -> tuple[LaneRows, FirstId, list[int]]:
        """Combine settlements of single messages into rows of SETTLING: acks that follow each other in a lease become
        one. Returns these, and for each given row the index of its SETTLING row."""
        runs: list[Row] = []
        which: list[int] = []
        last: Row | None = None  # the row before, if that is an ack
        for row in rows:
            lease, offset, before, act, delay_us, cause = row
            if last is not None and act == Act.ACK and lease == last[0] and before == last[1]:
                start = runs[-1][1]
                runs[-1] = (lease, start, offset - start + 1, *runs[-1][3:])
            else:
                runs.append((lease, offset, 1, int(act), delay_us, cause))
            which.append(len(runs) - 1)
            last = row if act == Act.ACK else None
        return runs, NO_ID, which

    def receive(self, rows: LaneRows, first_id: FirstId, memo: list[int], answer: Any, resent: bool) -> Codes:
        codes = [answer[run] for run in memo]
        if resent and Code.LEASE_LOST in codes:
            codes = [Code.DISCONNECTED if code == Code.LEASE_LOST else code for code in codes]
        return self._read_results(rows, codes)

    def encode(self, rows: LaneRows) -> tuple[pa.RecordBatch, Ints]:
        """Return settlements of single messages as a SETTLING batch, and for each the index of its row there. Acks that
        follow each other in a lease become one row."""
        leases, offsets, before, acts, delays, causes = zip(*rows, strict=True)
        lease, offset, previous = (np.array(column, np.int64) for column in (leases, offsets, before))
        act = np.array(acts, np.uint8)
        new = np.ones(len(rows), np.bool_)
        new[1:] = (
            (lease[1:] != lease[:-1]) | (previous[1:] != offset[:-1]) | (act[1:] != Act.ACK) | (act[:-1] != Act.ACK)
        )
        first = np.flatnonzero(new)
        last = np.append(first[1:], len(rows)) - 1
        starts, counts = offset[first], offset[last] - offset[first] + 1
        some = [causes[row] for row in first.tolist()]
        batch = settling_batch(lease[first], starts, counts, act[first], np.array(delays, np.int64)[first], some)
        return batch, np.cumsum(new) - 1

    def decode(self, rows: LaneRows, memo: Any, answer: pa.RecordBatch, resent: bool) -> Codes:
        return self._read_results(rows, self.codes(answer, resent)[memo].tolist())

    def _read_results(self, rows: LaneRows, codes: Sequence[int]) -> Codes:
        if not any(codes):
            return [Code.OK] * len(codes)
        refused = sum(code not in _NOT_REFUSED for code in codes)
        if refused:
            with self._lock:
                self.refused += refused
        if self._on_refused is not None and any(code in _LOST for code in codes):
            for row, code in zip(rows, codes, strict=True):
                if code in _LOST:
                    self._on_refused(row[0], row[1])
        return [Code.OK if code == 0 else error(Code(code)) for code in codes]

    @staticmethod
    def codes(answer: pa.RecordBatch, resent: bool) -> npt.NDArray[np.uint8]:
        """Return the result codes in an answer. In the answer to a resend LEASE_LOST becomes DISCONNECTED, because the
        first send may have been applied."""
        codes: npt.NDArray[np.uint8] = answer.column(0).to_numpy()
        return np.where(codes == Code.LEASE_LOST, np.uint8(Code.DISCONNECTED), codes) if resent else codes
