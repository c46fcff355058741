"""Reads leased messages from the log as columns, within a bound of bytes, and finds damaged ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from escrowmq.broker.columns import delivered, owners_of
from escrowmq.ledger.columns.arrays import Int64s
from escrowmq.ledger.commands import Leased, nothing_leased
from escrowmq.log.seam import StoredLog

FIRST_GUESS = 64 << 10  # bytes of one message, before any was seen
_OVERHEAD = 256  # bytes of a message beside its body, for a guess


@dataclass(frozen=True, slots=True)
class Read:
    """The result of reading a lease."""

    parts: list[pa.RecordBatch]  # schema DELIVERY; at least one message unless the first ones are damaged
    rest: Leased  # what did not fit
    damaged: list[tuple[int, int, str]]  # lease, offset and cause of messages that cannot be handed out


class LeaseReader:
    """Reads leased messages of one log, and estimates the size of a message. Thread-safe."""

    def __init__(self, log: StoredLog) -> None:
        self._log = log
        self.row_bytes: float = FIRST_GUESS

    def read(self, leased: Leased, max_bytes: int) -> Read:
        """Read leased messages from the log, in order, as many as fit into ``max_bytes``, at least one. Messages that
        retention has removed are left out. ``rest`` of the result: those that did not fit."""
        taken = start = 0
        parts: list[pa.RecordBatch] = []
        buried: list[tuple[int, int, str]] = []
        purged = leased.positions < self._log.first_position
        leased = pick(leased, np.flatnonzero(~purged)) if purged.any() else leased
        size = len(leased.leases)
        while start < size and (taken < max_bytes or not parts):
            count = int(np.clip((max_bytes - taken) / self.row_bytes, 1, size - start))
            part = leased if count == size else pick(leased, slice(start, start + count))
            stored, damaged = self._log.salvage(part.positions)
            # nbytes walks every buffer: of a single message, which is taken in any case, a guess is enough
            bytes_ = int(stored.nbytes) if size > 1 else len(stored.column("body")[0].as_buffer()) + _OVERHEAD
            fitting = count if size == 1 else _count_fitting(stored, bytes_, max_bytes - taken, 0 if parts else 1)
            if fitting < count:
                stored, part = stored.slice(0, fitting), pick(part, slice(fitting))
                bytes_ = int(stored.nbytes)
            start += fitting
            if lost := sorted(row for row in damaged if row < fitting):
                buried += [(int(part.leases[r]), int(part.offsets[r]), f"DAMAGED: {damaged[r]}") for r in lost]
                good = np.delete(np.arange(fitting), lost)
                stored, part = stored.take(pa.array(good)), pick(part, good)
            if stored.num_rows:
                taken += bytes_
                self.row_bytes = max(0.75 * self.row_bytes + 0.25 * bytes_ / stored.num_rows, 1.0)
                owners = owners_of(stored, part.positions, self._log)
                parts.append(delivered(stored, owners, part.positions, part.offsets, part.leases, part.attempts))
            if fitting < count:
                break
        rest = nothing_leased() if start == size else pick(leased, slice(start, None))
        return Read(parts, rest, buried)


def join_leased(parts: list[Leased]) -> Leased:
    """Concatenate several sets of leased messages, in order."""
    return parts[0] if len(parts) == 1 else Leased(*map(np.concatenate, zip(*map(_columns, parts), strict=True)))


def pick(leased: Leased, rows: Int64s | slice) -> Leased:
    """Return the leased messages with these indices (or in this slice)."""
    return Leased(*(column[rows] for column in _columns(leased)))


def _columns(leased: Leased) -> tuple[Int64s, ...]:
    return (leased.leases, leased.queue_ids, leased.offsets, leased.attempts, leased.positions)


def _count_fitting(stored: pa.RecordBatch, bytes_: int, room: int, at_least: int) -> int:
    """Return how many of the first ``stored`` rows take at most ``room`` bytes, but at least ``at_least``. ``bytes_``:
    the size of all. Sizes are estimated from the bodies."""
    if bytes_ <= room:
        return int(stored.num_rows)
    body = stored.column("body")
    offsets = np.frombuffer(body.buffers()[1], np.int32, len(body) + 1, body.offset * 4).astype(np.int64)
    other = max(bytes_ - int(offsets[-1] - offsets[0]), 0) / max(stored.num_rows, 1)
    ends = offsets[1:] - offsets[0] + other * np.arange(1, len(body) + 1)
    return max(int(np.searchsorted(ends, room, side="right")), at_least)
