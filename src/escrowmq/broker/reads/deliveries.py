"""Deliveries: reads leased messages from the log into batches, within a bound of bytes.

Each member has a *line*: its receives in the order in which they were asked, and what was leased for it and not yet
read.

1. A lease counts messages, because the ledger knows no sizes. What of it does not fit into ``max_bytes`` is not given
   back: it goes to the next receive of the line, before anything that was leased later. So a member sees its messages
   in the order in which they were leased (I20), and no receive waits while messages lie ready.
2. What lies ready is kept as long as half of its lease is left, then it is released; leases that do not end by time
   keep it until the member's next epoch. When the last receive of a line is withdrawn, and when the broker stops, what
   lies ready is released at once: a message that never left the broker was handed to nobody, so no attempt may count.
   It lies in memory: receives with an epoch from before the broker's start get DISCONNECTED, so that the member joins
   again and says what reached it. A receive with ``return_rest`` is for someone who may never ask again (a gateway's
   client): there the rest is released, so that in an ordered group nobody else gets the later messages of a key beside
   the earlier ones.
3. A line waits for at most as many leases as it has unanswered receives. What was leased for a receive that was
   withdrawn meanwhile is released: it comes again at once, its attempt not counted; and so is what could not be read.
4. A message that is damaged is not handed out and takes no other along: it becomes a dead letter of the group, with the
   place of the damage as its cause and an attempt that is not counted. A receive that got nothing else leases again.
5. A few messages that were stored just now are read by the thread that brings the lease, which has synced them: they
   are in memory, and waking another thread takes longer than reading them. All others are read on threads of their own.
6. When a group is paused, reset or deleted, what lies ready for its members is released: nothing of it is handed out
   any more.
7. A receive that brings an :class:`Allowance` is read when that grants bytes, and no more than it grants, but one
   message in any case; until then what was leased lies ready. So answers are counted before they are in memory.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import pyarrow as pa

from escrowmq.broker.columns import delivered, owners_of, releasing
from escrowmq.broker.failures import answer, broker_failed
from escrowmq.broker.reads.filters import joined
from escrowmq.broker.writer.engine import Engine
from escrowmq.errors import Code, EscrowError, error
from escrowmq.ledger.columns.arrays import Int64s
from escrowmq.ledger.commands import Bury, Leased, Receive, Settle, nothing_leased
from escrowmq.ledger.events import Event
from escrowmq.schemas import DELIVERY, Kind, empty

NEVER_US = 1 << 62
_STOPPING = frozenset({Kind.GROUP_PAUSED, Kind.GROUP_RESET, Kind.GROUP_DELETED})
SWEEP_LINES = 256
"""Lines after which those of members that are gone are looked for."""
FEW = 4
"""Messages that the thread reads which brings their lease."""
NEAR_ROWS = 100_000
"""If they stand among the last rows of the log."""
_FIRST_GUESS = 64 << 10  # bytes of one message, before any was seen
_OVERHEAD = 256  # bytes of a message beside its body, for a guess
WITHHELD_SECONDS = 0.05
"""When those that were granted nothing ask again."""
LEAST_ASKED = 1 << 20
MARGIN = 2
"""An answer is given room for so many times what its messages are thought to take."""


class Allowance(Protocol):
    """Where the answer to a receive has its room."""

    def grant(self, wanted: int) -> int:
        """Bytes that the answer may have, up to ``wanted``; 0: none now. Never waits."""


logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Ask:
    """One receive: what it asks for, how long it still waits, until when at most, and where its answer goes."""

    command: Receive
    wait_us: int
    max_bytes: int
    return_rest: bool
    answer: Future[pa.RecordBatch]
    until_us: int
    allowance: Allowance | None = None


@dataclass(slots=True, eq=False)
class _Reading:
    """What is to be read for the first receive of a line."""

    key: tuple[str, int]
    line: _Line
    ask: _Ask
    max_bytes: int
    leased: Leased
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
        self._withheld: set[tuple[str, int]] = (
            set()
        )  # lines that were granted nothing; while there are any, a timer runs
        engine.shard.observers.append(self._on_event)

    def receive(
        self,
        command: Receive,
        wait_us: int,
        max_bytes: int,
        return_rest: bool = False,
        allowance: Allowance | None = None,
    ) -> Future[pa.RecordBatch]:
        """Lease and read. Cancelling the future before it is answered withdraws it. ``allowance``: see rule 7."""
        until_us = self._engine.clock.now_us() + wait_us
        ask = _Ask(command, wait_us, max_bytes, return_rest, Future(), until_us, allowance)
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
        self._go_on(key, line)
        waiting = weakref.ref(
            ask
        )  # an answer that its own callback held would stay in memory until cycles are looked for
        ask.answer.add_done_callback(lambda done: self._withdrawn(key, line, waiting()) if done.cancelled() else None)
        return ask.answer

    def give_back(self) -> None:
        """Release all messages that are ready, because the broker is about to stop."""
        with self._lock:
            for (group, _), line in self._lines.items():
                self._release(group, line)

    def close(self) -> None:
        """Finish what is being read."""
        self._readers.shutdown(wait=True)

    def _go_on(self, key: tuple[str, int], line: _Line) -> None:
        """Take the next steps of a line. Without the lock."""
        with self._lock:
            reading = self._advance(key, line)
        while reading is not None:
            if not self._is_near(reading.leased):
                self._read_later(reading)
                return
            reading = self._read_for(reading)

    def _is_near(self, leased: Leased) -> bool:
        """Whether these are few, and in memory (rule 5)."""
        near = self._engine.log.next_position - NEAR_ROWS
        return len(leased.leases) <= FEW and all(position >= near for position in leased.positions.tolist())

    def _advance(self, key: tuple[str, int], line: _Line) -> _Reading | None:
        """Lease for the receives of a line. What is to be read for the one that came first, of what lies ready. With
        the lock held."""
        reading = None
        self._drop_late(key[0], line)
        if line.asks and line.ready and not line.reading and (max_bytes := self._granted(key, line)):
            ask = line.asks.popleft()
            reading = _Reading(key, line, ask, max_bytes, *self._take_ready(line, ask))
            line.reading = True
        for leasing in line.leasings[len(line.asks) :]:
            leasing.cancel()
        while not line.ready and len(line.leasings) < len(line.asks):
            self._lease(key, line, line.asks[len(line.leasings)])
        if line.ready:
            self._watch()
        if line.idle and self._lines.get(key) is line:
            del self._lines[key]
        return reading

    def _granted(self, key: tuple[str, int], line: _Line) -> int:
        """How many bytes the first receive of a line may have of what lies ready; 0: none now, and it is looked at
        again soon. With the lock held."""
        ask = line.asks[0]
        if ask.allowance is None:
            return ask.max_bytes
        rows = min(sum(len(leased.leases) for leased, _ in line.ready), ask.command.max_messages)
        wanted = ask.max_bytes
        if self._row_bytes != _FIRST_GUESS:  # else none was seen yet
            wanted = min(max(int(MARGIN * rows * self._row_bytes), LEAST_ASKED), wanted)
        granted = ask.allowance.grant(wanted)
        if not granted:
            if not self._withheld:
                again = threading.Timer(WITHHELD_SECONDS, self._ask_again)
                again.daemon = True
                again.start()
            self._withheld.add(key)
        return granted

    def _ask_again(self) -> None:
        with self._lock:
            lines = [(key, self._lines[key]) for key in self._withheld if key in self._lines]
            self._withheld.clear()
        for key, line in lines:
            self._go_on(key, line)

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

    def _on_event(self, event: Event) -> None:
        """Rule 6."""
        if event.kind not in _STOPPING:
            return
        names = self._engine.shard.ledger.groups.names()
        stopped = {names[number] for number in event.batch.column("group").to_pylist()}
        with self._lock:
            for (group, _), line in self._lines.items():
                if group in stopped:
                    self._release(group, line)

    def _release(self, group: str, line: _Line) -> None:
        """Release all that lies ready."""
        while line.ready:
            self._engine.submit(Settle(group, releasing(line.ready.popleft()[0])))

    def _watch(self) -> None:
        """Look again when something that lies ready has been kept for long enough. With the lock held."""
        if self._watching:
            return
        times = [until_us for line in self._lines.values() for _, until_us in line.ready if until_us < NEVER_US]
        if times:
            self._watching = True
            wait_us = max(min(times) - self._engine.clock.now_us(), 0) + 1
            self._engine.wait_for(lambda: None, wait_us).add_done_callback(self._alarmed)

    def _alarmed(self, done: Future[None]) -> None:
        with self._lock:
            self._watching = False
            if done.cancelled() or done.exception() is not None:  # the engine has stopped
                return
            lines = list(self._lines.items())
        for key, line in lines:
            self._go_on(key, line)
        with self._lock:
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
        command = (
            ask.command
        )  # and not the receive: the round holds what it has done until the next one, and with it, its answer
        leasing = self._engine.receive(command, ask.wait_us)
        line.leasings.append(leasing)
        leasing.add_done_callback(lambda done: self._leased(key, line, command, done))

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
        self._go_on(key, line)

    def _put(self, line: _Line, command: Receive, leased: Leased) -> None:
        if not line.asks and not line.ready and not line.reading:
            self._engine.submit(Settle(command.group, releasing(leased)))
            return
        half = self._engine.clock.now_us() + command.lease_us // 2
        line.ready.append((leased, half if command.epoch is None else NEVER_US))

    def _keep(self, line: _Line, ask: _Ask, rest: Leased, until_us: int) -> None:
        """Keep leased messages that did not fit into the answer to ``ask`` for the member's next receive, or
        release them."""
        if not len(rest.leases):
            return
        if ask.return_rest:
            self._engine.submit(Settle(ask.command.group, releasing(rest)))
        else:
            line.ready.appendleft((rest, until_us))

    @staticmethod
    def _answer_first(line: _Line, outcome: pa.RecordBatch | BaseException) -> None:
        while line.asks:
            first = line.asks.popleft().answer
            if first.set_running_or_notify_cancel():
                answer(first, outcome)
                return

    def _withdrawn(self, key: tuple[str, int], line: _Line, ask: _Ask | None) -> None:
        with self._lock:
            if ask is None or ask not in line.asks:
                return
            line.asks.remove(ask)
            self._release_if_last(key[0], line)
        self._go_on(key, line)

    def _release_if_last(self, group: str, line: _Line) -> None:
        """Release what lies ready after a receive was withdrawn, if it was the line's last one (rule 2). With the lock
        held."""
        if not line.asks and line.epoch is None:
            self._release(group, line)

    # Reading

    def _read_later(self, reading: _Reading) -> None:
        """Read on another thread."""
        try:
            self._readers.submit(self._read_on, reading)
        except RuntimeError:  # closing
            with self._lock:
                reading.line.reading = False
            self._engine.submit(Settle(reading.ask.command.group, releasing(reading.leased)))
            if reading.ask.answer.set_running_or_notify_cancel():
                answer(reading.ask.answer, error(Code.CLOSED))

    def _read_on(self, reading: _Reading) -> None:
        """Read, and what comes next in the line."""
        following: _Reading | None = reading
        while following is not None:
            following = self._read_for(following)

    def _read_for(self, reading: _Reading) -> _Reading | None:
        """Read and answer; what is to be read next."""
        key, line, ask, leased = reading.key, reading.line, reading.ask, reading.leased
        outcome: pa.RecordBatch | EscrowError
        damaged: list[tuple[int, int, str]] = []
        nothing = False
        try:
            outcome, rest, damaged = self._read(leased, reading.max_bytes)
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
                    line.ready.appendleft((rest, reading.until_us))
                return self._advance(key, line)
            waits = ask.answer.set_running_or_notify_cancel()
            self._keep(line, ask, rest if waits else leased, reading.until_us)
            if not waits:  # it was withdrawn while it was read
                self._release_if_last(key[0], line)
        if waits:
            answer(ask.answer, outcome)
        with self._lock:
            return self._advance(key, line)

    def _bury(self, group: str, damaged: list[tuple[int, int, str]]) -> None:
        """Make dead letters of what cannot be handed out: before the same lines lease again."""
        if damaged:
            for _, offset, cause in damaged:
                logger.error("the message at offset %d is a dead letter of %s: %s", offset, group, cause)
            self._engine.submit(Bury(group, damaged))

    def _read(self, leased: Leased, max_bytes: int) -> tuple[pa.RecordBatch, Leased, list[tuple[int, int, str]]]:
        """As many messages as fit into ``max_bytes``, at least one; what is left; and those that are damaged: lease,
        offset and cause."""
        log, taken, start = self._engine.log, 0, 0
        parts: list[pa.RecordBatch] = []
        buried: list[tuple[int, int, str]] = []
        leased = self._still_stored(leased)
        size = len(leased.leases)
        while start < size and (taken < max_bytes or not parts):
            count = int(np.clip((max_bytes - taken) / self._row_bytes, 1, size - start))
            part = leased if count == size else _pick(leased, slice(start, start + count))
            stored, damaged = log.salvage(part.positions)
            bytes_ = int(stored.nbytes) if size > 1 else _guess(stored)  # one is taken in any case
            fitting = count if size == 1 else _fitting(stored, bytes_, max_bytes - taken, at_least=0 if parts else 1)
            if fitting < count:
                stored, part = stored.slice(0, fitting), _pick(part, slice(fitting))
                bytes_ = int(stored.nbytes)
            start += fitting
            if lost := sorted(row for row in damaged if row < fitting):
                buried += [(int(part.leases[r]), int(part.offsets[r]), f"DAMAGED: {damaged[r]}") for r in lost]
                good = np.delete(np.arange(fitting), lost)
                stored, part = stored.take(pa.array(good)), _pick(part, good)
            if stored.num_rows:
                taken += bytes_
                self._row_bytes = max(0.75 * self._row_bytes + 0.25 * bytes_ / stored.num_rows, 1.0)
                transactions = owners_of(stored, part.positions, log)
                parts.append(delivered(stored, transactions, part.positions, part.offsets, part.leases, part.attempts))
            if fitting < count:
                break
        rest = nothing_leased() if start == size else _pick(leased, slice(start, None))
        return parts[0] if len(parts) == 1 else joined(parts or [empty(DELIVERY)]), rest, buried

    def _still_stored(self, leased: Leased) -> Leased:
        """Without what retention has dropped since it was leased."""
        gone = leased.positions < self._engine.log.first_position
        return _pick(leased, np.flatnonzero(~gone)) if gone.any() else leased


def _arrays(leased: Leased) -> tuple[Int64s, ...]:
    return (leased.leases, leased.queue_ids, leased.offsets, leased.attempts, leased.positions)


def _pick(leased: Leased, rows: Int64s | slice) -> Leased:
    return Leased(*(column[rows] for column in _arrays(leased)))


def _guess(stored: pa.RecordBatch) -> int:
    """About how many bytes one row takes: Arrow walks every buffer to tell."""
    return len(stored.column("body")[0].as_buffer()) + _OVERHEAD


def _fitting(stored: pa.RecordBatch, bytes_: int, room: int, at_least: int) -> int:
    """How many of the first rows, of ``bytes_`` together, take at most ``room`` bytes."""
    if bytes_ <= room:
        return int(stored.num_rows)
    body = stored.column("body")
    offsets = np.frombuffer(body.buffers()[1], np.int32, len(body) + 1, body.offset * 4).astype(np.int64)
    other = max(bytes_ - int(offsets[-1] - offsets[0]), 0) / max(stored.num_rows, 1)
    ends = offsets[1:] - offsets[0] + other * np.arange(1, len(body) + 1)
    return max(int(np.searchsorted(ends, room, side="right")), at_least)
