"""From leases to batches: reading what was leased, on threads that are not the writer's, within a bound of bytes.

A lease counts messages, because the ledger knows no sizes. What of it does not fit into ``max_bytes`` is not given back
(that would cost an attempt): it is kept for the next receive of the same member, as long as half of its time is left.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from escrowmq.broker.columns import delivery, owners_of
from escrowmq.broker.engine import Engine
from escrowmq.errors import Code, EscrowError, error
from escrowmq.ledger.commands import Leased, Receive
from escrowmq.schemas import DELIVERY, empty

Int64s = npt.NDArray[np.int64]

MAX_REMAINDERS = 10_000
_FIRST_GUESS = 64 << 10  # bytes of one message, before any was seen


@dataclass(frozen=True, slots=True)
class _Remainder:
    leased: Leased
    until_us: int


class Deliveries:
    """Receives of one engine, as batches of schema DELIVERY."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._readers = ThreadPoolExecutor(2, "escrowmq-reader")
        self._lock = threading.Lock()
        self._remainders: dict[tuple[str, int], _Remainder] = {}
        self._row_bytes: float = _FIRST_GUESS

    def receive(self, command: Receive, wait_us: int, max_bytes: int) -> Future[pa.RecordBatch]:
        """Lease and read. Cancelling the future before it is answered withdraws it."""
        answer: Future[pa.RecordBatch] = Future()
        until_us = self._engine.clock.now_us() + command.lease_us // 2
        remainder = self._take_remainder(command)
        if remainder is not None:
            self._read_later(command, remainder.leased, max_bytes, remainder.until_us, answer)
            return answer
        leasing = self._engine.receive(command, wait_us)

        def leased(done: Future[Leased]) -> None:
            if done.cancelled():
                answer.cancel()
            elif (problem := done.exception()) is not None:
                _settle(answer, lambda: answer.set_exception(problem))
            elif not len(done.result().leases):
                _settle(answer, lambda: answer.set_result(empty(DELIVERY)))
            else:
                wait = self._engine.clock.now_us() + command.lease_us // 2
                self._read_later(command, done.result(), max_bytes, max(wait, until_us), answer)

        leasing.add_done_callback(leased)
        answer.add_done_callback(lambda done: leasing.cancel() if done.cancelled() else None)
        return answer

    def close(self) -> None:
        """Finish what is being read."""
        self._readers.shutdown(wait=True)

    def _take_remainder(self, command: Receive) -> _Remainder | None:
        if not self._remainders:
            return None
        now = self._engine.clock.now_us()
        with self._lock:
            for key in [key for key, kept in self._remainders.items() if kept.until_us <= now]:
                del self._remainders[key]
            kept = self._remainders.pop((command.group, command.member), None)
            if kept is not None and len(kept.leased.leases) > command.max_messages:
                rest = _part(kept.leased, command.max_messages, None)
                self._remainders[(command.group, command.member)] = _Remainder(rest, kept.until_us)
                kept = _Remainder(_part(kept.leased, 0, command.max_messages), kept.until_us)
            return kept

    def _keep(self, command: Receive, leased: Leased, until_us: int) -> None:
        """Put what did not fit before what may be kept already."""
        key = (command.group, command.member)
        with self._lock:
            kept = self._remainders.get(key)
            if kept is not None:
                leased = Leased(
                    *(np.concatenate(pair) for pair in zip(_arrays(leased), _arrays(kept.leased), strict=True))
                )
                until_us = min(until_us, kept.until_us)
            if kept is not None or len(self._remainders) < MAX_REMAINDERS:
                self._remainders[key] = _Remainder(leased, until_us)

    def _read_later(
        self, command: Receive, leased: Leased, max_bytes: int, until_us: int, answer: Future[pa.RecordBatch]
    ) -> None:
        def work() -> None:
            try:
                batch = self._read(command, leased, max_bytes, until_us)
            except EscrowError as problem:
                _settle(answer, lambda failed=problem: answer.set_exception(failed))  # type: ignore[misc]
            except Exception as problem:
                failure = error(Code.BAD_REQUEST, f"the broker failed on this request: {problem!r}")
                _settle(answer, lambda: answer.set_exception(failure))
            else:
                _settle(answer, lambda: answer.set_result(batch))

        try:
            self._readers.submit(work)
        except RuntimeError:  # closing: the lease ends by itself
            _settle(answer, lambda: answer.set_exception(error(Code.CLOSED)))

    def _read(self, command: Receive, leased: Leased, max_bytes: int, until_us: int) -> pa.RecordBatch:
        log, taken, start = self._engine.log, 0, 0
        parts: list[pa.RecordBatch] = []
        leased = self._still_stored(leased)
        size = len(leased.leases)
        while start < size and (taken < max_bytes or not parts):
            count = int(np.clip((max_bytes - taken) / self._row_bytes, 1, size - start))
            part = _part(leased, start, start + count)
            stored = log.read(part.positions)
            fitting = _fitting(stored, max_bytes - taken, at_least=0 if parts else 1)
            if fitting < count:
                stored, part = stored.slice(0, fitting), _part(part, 0, fitting)
            if fitting:
                taken += int(stored.nbytes)
                self._row_bytes = max(0.75 * self._row_bytes + 0.25 * stored.nbytes / fitting, 1.0)
                transactions = owners_of(stored, part.positions, log.shard, log.read)
                parts.append(delivery(stored, transactions, part.positions, part.offsets, part.leases, part.attempts))
            start += fitting
            if fitting < count:
                break
        if start < size:
            self._keep(command, _part(leased, start, None), until_us)
        return empty(DELIVERY) if not parts else parts[0] if len(parts) == 1 else pa.concat_batches(parts)

    def _still_stored(self, leased: Leased) -> Leased:
        """Without what retention has dropped since it was leased."""
        gone = leased.positions < self._engine.log.first_position
        return _pick(leased, np.flatnonzero(~gone)) if gone.any() else leased


def _arrays(leased: Leased) -> tuple[Int64s, ...]:
    return (leased.leases, leased.queue_ids, leased.offsets, leased.attempts, leased.positions)


def _pick(leased: Leased, rows: Int64s) -> Leased:
    return Leased(*(column[rows] for column in _arrays(leased)))


def _part(leased: Leased, start: int, end: int | None) -> Leased:
    return Leased(*(column[start:end] for column in _arrays(leased)))


def _fitting(stored: pa.RecordBatch, room: int, at_least: int) -> int:
    """How many of the first rows take at most ``room`` bytes."""
    if stored.nbytes <= room:
        return int(stored.num_rows)
    body = stored.column("body")
    offsets = np.frombuffer(body.buffers()[1], np.int32, len(body) + 1, body.offset * 4).astype(np.int64)
    other = max(int(stored.nbytes) - int(offsets[-1] - offsets[0]), 0) / max(stored.num_rows, 1)
    ends = offsets[1:] - offsets[0] + other * np.arange(1, len(body) + 1)
    return max(int(np.searchsorted(ends, room, side="right")), at_least)


def _settle(answer: Future[pa.RecordBatch], act: Callable[[], None]) -> None:
    """Answer unless the caller has left."""
    if answer.set_running_or_notify_cancel():
        act()
