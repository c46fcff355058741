"""Deliveries: reads leased messages from the log into batches, on threads of its own, within a bound of bytes.

Each member has a *line*: its receives in the order in which they were asked, and what was leased for it and not yet read.

1. A lease counts messages, because the ledger knows no sizes. What of it does not fit into ``max_bytes`` is not given back:
   it goes to the next receive of the line, before anything that was leased later. So a member sees its messages in the
   order in which they were leased (I20), and no receive waits while messages lie ready.
2. What lies ready is kept as long as half of its lease is left, then it is released; leases that do not end by time keep it until
   the member's next epoch. When the last receive of a line is withdrawn, and when the broker stops, what lies ready is released at
   once: a message that never left the broker was handed to nobody, so no attempt may count. It lies in memory: receives with an epoch from before the broker's start get DISCONNECTED, so that the
   member joins again and says what reached it.
   A receive with ``return_rest`` is for someone who may never ask again (a gateway's client): there the rest is released, so
   that in an ordered group nobody else gets the later messages of a key beside the earlier ones.
3. A line waits for at most as many leases as it has unanswered receives. What was leased for a receive that
   was withdrawn meanwhile is released: it comes again at once, its attempt not counted; and so is what could not be read.
4. A message that is damaged is not handed out and takes no other along: it becomes a dead letter of the group, with the place of the
   damage as its cause and an attempt that is not counted. A receive that got nothing else leases again.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from escrowmq.broker.columns import delivered, owners_of, releasing
from escrowmq.broker.failures import answer, broker_failed
from escrowmq.broker.reads.filters import joined
from escrowmq.broker.writer.engine import Engine
from escrowmq.errors import Code, EscrowError, error
from escrowmq.ledger.columns.arrays import Int64s
from escrowmq.ledger.commands import Bury, Leased, Receive, Settle, nothing_leased
from escrowmq.schemas import DELIVERY, empty

NEVER_US = 1 << 62
SWEEP_LINES = 256
"""Lines after which those of members that are gone are looked for."""
_FIRST_GUESS = 64 << 10  # bytes of one message, before any was seen


logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Ask:
    """One receive: what it asks for, how long it still waits, until when at most, and where its answer goes."""

    command: Receive
    wait_us: int
    max_bytes: int
    return_rest: bool
    answer: Future[pa.RecordBatch]
    until_us: int


@dataclass(slots=True, eq=False)
class _Line:
    """One member's receives; see the rules above."""

    epoch: int | None
    asks: deque[_Ask] = field(default_factory=deque)
    leasings: list[Future[Leased]] = field(default_factory=list)
    ready: deque[tuple[Leased, int]] = field(default_factory=deque)
    """Leased and not yet read, each with the time until which it is kept."""
    reading: bool = False

    @property
    def idle(self) -> bool:
        return not (self.asks or self.leasings or self.ready or self.reading)


class Deliveries:
    """Receives of one engine, as batches of schema DELIVERY."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._readers = ThreadPoolExecutor(2, "escrowmq-reader")
        self._lock = threading.RLock()
        self._lines: dict[tuple[str, int], _Line] = {}
        self._row_bytes: float = _FIRST_GUESS
        self._born = engine.log.next_position
        self._watching = False  # an alarm for what lies ready is set

    def receive(
        self, command: Receive, wait_us: int, max_bytes: int, return_rest: bool = False
    ) -> Future[pa.RecordBatch]:
        """Lease and read. Cancelling the future before it is answered withdraws it."""
        ask = _Ask(command, wait_us, max_bytes, return_rest, Future(), self._engine.clock.now_us() + wait_us)
        if command.epoch is not None and command.epoch < self._born:
            problem = error(Code.DISCONNECTED, "the broker restarted since this member joined", "join again, to resume")
            return answer(ask.answer, problem)
        key = (command.group, command.member)
        with self._lock:
            line = self._lines.get(key)
            if line is None or line.epoch != command.epoch:
                self._sweep()
                line = self._lines[key] = _Line(command.epoch)
            line.asks.append(ask)
            self._advance(key, line)
        ask.answer.add_done_callback(lambda done: self._withdrawn(key, line, ask) if done.cancelled() else None)
        return ask.answer

    def give_back(self) -> None:
        """The broker is about to stop: release what lies ready."""
        with self._lock:
            for (group, _), line in self._lines.items():
                self._release(group, line)

    def close(self) -> None:
        """Finish what is being read."""
        self._readers.shutdown(wait=True)

    def _advance(self, key: tuple[str, int], line: _Line) -> None:
        """Read what lies ready for the receive that came first, and lease for the others. With the lock held."""
        self._drop_late(key[0], line)
        if line.asks and line.ready and not line.reading:
            ask = line.asks.popleft()
            leased, until_us = self._take_ready(line, ask)
            self._read_later(key, line, ask, leased, until_us)
        for leasing in line.leasings[len(line.asks) :]:
            leasing.cancel()
        while not line.ready and len(line.leasings) < len(line.asks):
            self._lease(key, line, line.asks[len(line.leasings)])
        if line.idle and self._lines.get(key) is line:
            del self._lines[key]

    def _sweep(self) -> None:
        """Now and then: lines of members that left while something lay ready for them."""
        if len(self._lines) % SWEEP_LINES == SWEEP_LINES - 1:
            for key, line in list(self._lines.items()):
                self._drop_late(key[0], line)
                if line.idle:
                    del self._lines[key]

    def _drop_late(self, group: str, line: _Line) -> None:
        """Release what was ready for too long."""
        if line.ready:
            now = self._engine.clock.now_us()
            late = [leased for leased, until_us in line.ready if until_us <= now]
            line.ready = deque(entry for entry in line.ready if entry[1] > now)
            for leased in late:
                self._engine.submit(Settle(group, releasing(leased)))

    def _release(self, group: str, line: _Line) -> None:
        """Release all that lies ready."""
        while line.ready:
            self._engine.submit(Settle(group, releasing(line.ready.popleft()[0])))

    def _watch(self) -> None:
        """Look again when something that lies ready has been kept for long enough. With the lock held."""
        times = [until_us for line in self._lines.values() for _, until_us in line.ready if until_us < NEVER_US]
        if times and not self._watching:
            self._watching = True
            wait_us = max(min(times) - self._engine.clock.now_us(), 0) + 1
            self._engine.wait_for(lambda: None, wait_us).add_done_callback(self._alarmed)

    def _alarmed(self, done: Future[None]) -> None:
        with self._lock:
            self._watching = False
            if done.cancelled() or done.exception() is not None:  # the engine has stopped
                return
            for key, line in list(self._lines.items()):
                self._advance(key, line)
            self._watch()

    def _take_ready(self, line: _Line, ask: _Ask) -> tuple[Leased, int]:
        """As many messages as were asked for of what lies ready, and until when they may be kept."""
        taken: list[Leased] = []
        until_us, most = NEVER_US, ask.command.max_messages
        while line.ready and most > 0:
            leased, until = line.ready.popleft()
            if len(leased.leases) > most:
                self._keep(line, ask, _pick(leased, slice(most, None)), until)
                leased = _pick(leased, slice(most))
            taken.append(leased)
            most, until_us = most - len(leased.leases), min(until_us, until)
        if len(taken) == 1:
            return taken[0], until_us
        return Leased(*map(np.concatenate, zip(*map(_arrays, taken), strict=True))), until_us

    def _lease(self, key: tuple[str, int], line: _Line, ask: _Ask) -> None:
        leasing = self._engine.receive(ask.command, ask.wait_us)
        line.leasings.append(leasing)
        leasing.add_done_callback(lambda done: self._leased(key, line, ask.command, done))

    def _leased(self, key: tuple[str, int], line: _Line, command: Receive, done: Future[Leased]) -> None:
        with self._lock:
            line.leasings.remove(done)
            if not done.cancelled():
                if (problem := done.exception()) is not None:
                    self._answer_first(line, problem)
                elif len(done.result().leases):
                    self._put(line, command, done.result())
                elif not line.ready:
                    self._answer_first(line, empty(DELIVERY))
            self._advance(key, line)

    def _put(self, line: _Line, command: Receive, leased: Leased) -> None:
        if not line.asks and not line.ready and not line.reading:
            self._engine.submit(Settle(command.group, releasing(leased)))
            return
        half = self._engine.clock.now_us() + command.lease_us // 2
        line.ready.append((leased, half if command.epoch is None else NEVER_US))
        self._watch()

    def _keep(self, line: _Line, ask: _Ask, rest: Leased, until_us: int) -> None:
        """What was leased and did not go into the answer to ``ask``: the member's next receive gets it, or it is released."""
        if not len(rest.leases):
            return
        if ask.return_rest:
            self._engine.submit(Settle(ask.command.group, releasing(rest)))
        else:
            line.ready.appendleft((rest, until_us))
            self._watch()

    @staticmethod
    def _answer_first(line: _Line, outcome: pa.RecordBatch | BaseException) -> None:
        while line.asks:
            first = line.asks.popleft().answer
            if first.set_running_or_notify_cancel():
                answer(first, outcome)
                return

    def _withdrawn(self, key: tuple[str, int], line: _Line, ask: _Ask) -> None:
        with self._lock:
            if ask in line.asks:
                line.asks.remove(ask)
                if not line.asks and line.epoch is None:
                    self._release(key[0], line)
                self._advance(key, line)

    # Reading

    def _read_later(self, key: tuple[str, int], line: _Line, ask: _Ask, leased: Leased, until_us: int) -> None:
        line.reading = True
        try:
            self._readers.submit(self._read_for, key, line, ask, leased, until_us)
        except RuntimeError:  # closing
            line.reading = False
            self._engine.submit(Settle(ask.command.group, releasing(leased)))
            if ask.answer.set_running_or_notify_cancel():
                answer(ask.answer, error(Code.CLOSED))

    def _read_for(self, key: tuple[str, int], line: _Line, ask: _Ask, leased: Leased, until_us: int) -> None:
        outcome: pa.RecordBatch | EscrowError
        damaged: list[tuple[int, int, str]] = []
        nothing = False
        try:
            outcome, rest, damaged = self._read(leased, ask.max_bytes)
            nothing = bool(damaged) and not outcome.num_rows
        except Exception as problem:
            outcome, rest = broker_failed("reading leased messages", problem), nothing_leased()
            self._engine.submit(Settle(ask.command.group, releasing(leased)))
        self._bury(ask.command.group, damaged)
        with self._lock:
            line.reading = False
            if nothing and not ask.answer.cancelled():
                ask.wait_us = max(ask.until_us - self._engine.clock.now_us(), 0)
                line.asks.appendleft(ask)
                if len(rest.leases):
                    line.ready.appendleft((rest, until_us))
                self._advance(key, line)
                return
            waits = ask.answer.set_running_or_notify_cancel()
            self._keep(line, ask, rest if waits else leased, until_us)
        if waits:
            answer(ask.answer, outcome)
        with self._lock:
            self._advance(key, line)

    def _bury(self, group: str, damaged: list[tuple[int, int, str]]) -> None:
        """Make dead letters of what cannot be handed out: before the same lines lease again."""
        if damaged:
            for _, offset, cause in damaged:
                logger.error("the message at offset %d is a dead letter of %s: %s", offset, group, cause)
            self._engine.submit(Bury(group, damaged))

    def _read(self, leased: Leased, max_bytes: int) -> tuple[pa.RecordBatch, Leased, list[tuple[int, int, str]]]:
        """As many messages as fit into ``max_bytes``, at least one; what is left; and those that are damaged: lease, offset
        and cause."""
        log, taken, start = self._engine.log, 0, 0
        parts: list[pa.RecordBatch] = []
        buried: list[tuple[int, int, str]] = []
        leased = self._still_stored(leased)
        size = len(leased.leases)
        while start < size and (taken < max_bytes or not parts):
            count = int(np.clip((max_bytes - taken) / self._row_bytes, 1, size - start))
            part = _pick(leased, slice(start, start + count))
            stored, damaged = log.salvage(part.positions)
            fitting = _fitting(stored, max_bytes - taken, at_least=0 if parts else 1)
            if fitting < count:
                stored, part = stored.slice(0, fitting), _pick(part, slice(fitting))
            start += fitting
            if lost := sorted(row for row in damaged if row < fitting):
                buried += [(int(part.leases[r]), int(part.offsets[r]), f"DAMAGED: {damaged[r]}") for r in lost]
                good = np.delete(np.arange(fitting), lost)
                stored, part = stored.take(pa.array(good)), _pick(part, good)
            if stored.num_rows:
                taken += int(stored.nbytes)
                self._row_bytes = max(0.75 * self._row_bytes + 0.25 * stored.nbytes / stored.num_rows, 1.0)
                transactions = owners_of(stored, part.positions, log)
                parts.append(delivered(stored, transactions, part.positions, part.offsets, part.leases, part.attempts))
            if fitting < count:
                break
        return joined(parts or [empty(DELIVERY)]), _pick(leased, slice(start, None)), buried

    def _still_stored(self, leased: Leased) -> Leased:
        """Without what retention has dropped since it was leased."""
        gone = leased.positions < self._engine.log.first_position
        return _pick(leased, np.flatnonzero(~gone)) if gone.any() else leased


def _arrays(leased: Leased) -> tuple[Int64s, ...]:
    return (leased.leases, leased.queue_ids, leased.offsets, leased.attempts, leased.positions)


def _pick(leased: Leased, rows: Int64s | slice) -> Leased:
    return Leased(*(column[rows] for column in _arrays(leased)))


def _fitting(stored: pa.RecordBatch, room: int, at_least: int) -> int:
    """How many of the first rows take at most ``room`` bytes."""
    if stored.nbytes <= room:
        return int(stored.num_rows)
    body = stored.column("body")
    offsets = np.frombuffer(body.buffers()[1], np.int32, len(body) + 1, body.offset * 4).astype(np.int64)
    other = max(int(stored.nbytes) - int(offsets[-1] - offsets[0]), 0) / max(stored.num_rows, 1)
    ends = offsets[1:] - offsets[0] + other * np.arange(1, len(body) + 1)
    return max(int(np.searchsorted(ends, room, side="right")), at_least)
