"""Deliveries: answers receives with leased messages, within a bound of bytes.

Each member has a *line*: its waiting receives in their order, and the messages that are leased for it and not yet read.
Each event of a line (a receive, a lease, a withdrawal, the end of a read) is recorded in it; then
:meth:`Deliveries._step` alone decides what to lease, read, answer and release.

1. A lease counts messages, because the ledger has no sizes. Messages beyond ``max_bytes`` go to the next receive of the
   line, before anything that was leased later. So a member gets its messages in the order of their leases (I20), and no
   receive waits while messages are ready.
2. Ready messages are kept in memory until half of their lease is over (without a deadline, until the member's next
   epoch), then released; at once when the last receive of a line is withdrawn, and when the broker stops: a message
   that never left the broker counts no attempt. A receive with an epoch from before the broker's start gets
   DISCONNECTED, so that the member joins again and names what it received. A receive with ``return_rest`` may be its
   caller's last (a gateway's client): the rest is released, so that no other member of an ordered group gets later
   messages of a key at the same time as the earlier ones.
3. A line waits for at most as many leases as it has unanswered receives. Messages that were leased for a withdrawn
   receive, or could not be read, are released: redelivered at once, without an attempt.
4. A damaged message hides no other: it becomes a dead letter, with the place of the damage as its cause and an attempt
   that is not counted. A receive that got nothing else leases again.
5. A few new messages are read by the thread that brings the lease and has synced them: they are in memory, and waking
   another thread takes longer than reading them. All others are read on threads of their own.
6. When a group is paused, reset or deleted, the ready messages of its members are released.
7. A receive with an :class:`Allowance` is read when that grants bytes, up to the grant, but at least one message; until
   then its messages stay ready. So answers are counted before they are in memory.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import pyarrow as pa

from escrowmq.broker.columns import releasing
from escrowmq.broker.failures import answer, broker_failed
from escrowmq.broker.leased import FIRST_GUESS, LeaseReader, Read, join_leased, pick
from escrowmq.broker.reads.filters import joined
from escrowmq.broker.writer.engine import Engine
from escrowmq.errors import Code, error
from escrowmq.ledger.commands import Bury, Leased, Receive, Settle, nothing_leased
from escrowmq.ledger.events import Event
from escrowmq.platform.times import to_us
from escrowmq.schemas import DELIVERY, Kind, empty
from escrowmq.wire.exchanges import ReceiveOptions

NEVER_US = 1 << 62
_STOPPING = frozenset({Kind.GROUP_PAUSED, Kind.GROUP_RESET, Kind.GROUP_DELETED})
MESSAGES = 1000  # messages per receive unless it requests another number
SWEEP_LINES = 256  # new lines between two searches for idle ones
FEW = 4  # the most messages that the thread reads which brings their lease
NEAR_ROWS = 100_000  # distance from the end of the log (rows) within which messages are in memory
WITHHELD_SECONDS = 0.05  # retry interval (s) for lines whose allowance granted nothing
LEAST_GRANT = 1 << 20  # bytes requested of an allowance, at least
MARGIN = 2  # the requested room, in multiples of the estimated size of the messages


class Allowance(Protocol):
    """The memory for the answer to a receive."""

    def grant(self, wanted: int) -> int:
        """Reserve memory for the answer to a receive. Returns how many bytes it may have, up to ``wanted``; 0: none
        now. Never waits."""


logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Receive:
    """One receive: its command, how long it may wait, and its answer."""

    command: Receive
    wait_us: int
    until_us: int
    max_bytes: int
    return_rest: bool
    answer: Future[pa.RecordBatch]
    allowance: Allowance | None
    leased: Leased = field(default_factory=nothing_leased)  # to be read for it
    granted: int = 0  # bytes of them
    kept_us: int = 0  # how long to keep those that do not fit


@dataclass(slots=True, eq=False)
class _Line:
    """One member's receives; see the rules above."""

    group: str
    member: int
    epoch: int | None
    receives: deque[_Receive] = field(default_factory=deque)
    leasings: list[Future[Leased]] = field(default_factory=list)  # requested leases, at most one for each receive
    answers: deque[tuple[Receive, Future[Leased]]] = field(default_factory=deque)  # of such requests, not handled yet
    ready: deque[tuple[Leased, int]] = field(default_factory=deque)  # leased and not read, and how long to keep it
    reading: bool = False
    stepping: bool = False

    @property
    def is_idle(self) -> bool:
        return not (self.receives or self.leasings or self.answers or self.ready or self.reading)


class Deliveries:
    """Receives of one engine, answered with batches of schema DELIVERY. Thread-safe."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._reader = LeaseReader(engine.log)
        self._readers = ThreadPoolExecutor(2, "escrowmq-reader")
        self._lock = threading.RLock()
        self._lines: dict[tuple[str, int], _Line] = {}  # by group and member
        self._born = engine.log.next_position
        self._has_alarm = False  # for ready messages
        self._withheld: list[_Line] = []  # lines whose allowance granted nothing; while there are any, a timer runs
        engine.shard.observers.append(self._on_event)

    def receive(
        self, options: ReceiveOptions, wait_us: int, allowance: Allowance | None, client: Any = None
    ) -> Future[pa.RecordBatch]:
        """Lease messages for a member and read them. Returns a future of a batch of DELIVERY, empty after ``wait_us``
        without a message. Cancelling it withdraws the receive. ``allowance``: the memory for the answer (rule 7).
        ``client``: the connection; None in this process."""
        settings, lease_ms = self._engine.settings, options.get("lease_ms")
        command = Receive(
            group=options["group"],
            member=options["member"],
            max_messages=min(options.get("max_messages", MESSAGES), settings.max_receive_rows),
            lease_us=to_us(settings.lease_seconds) if lease_ms is None else lease_ms * 1000,
            epoch=options.get("epoch"),
            one_by_one=options.get("one_by_one", False),
        )
        max_bytes = min(options.get("max_bytes", settings.max_batch_bytes), settings.max_batch_bytes)
        now_us, return_rest = self._engine.clock.now_us(), options.get("return_rest", False)
        receive = _Receive(command, wait_us, now_us + wait_us, max_bytes, return_rest, Future(), allowance)
        if command.epoch is not None and command.epoch < self._born:
            problem = error(Code.DISCONNECTED, "the broker restarted since this member joined", "join again, to resume")
            return answer(receive.answer, problem)
        self._engine.consumers.note(command.group, command.member, client, receive.answer, now_us)
        with self._lock:
            line = self._line_of(command)
            line.receives.append(receive)
        self._run(line)
        # a weak reference: an answer that its own callback held would stay in memory until the next collection
        waiting = weakref.ref(receive)
        receive.answer.add_done_callback(lambda done: self._on_withdrawn(line, waiting()) if done.cancelled() else None)
        return receive.answer

    def give_back(self) -> None:
        """Release all messages that are leased and not yet read, because the broker is about to stop."""
        with self._lock:
            for line in self._lines.values():
                self._release_ready(line)

    def close(self) -> None:
        """Wait for reads in progress, and end the threads that read."""
        self._readers.shutdown(wait=True)

    # One line, step by step

    def _run(self, line: _Line) -> None:
        """Advance a member's line of receives as far as possible: read messages that are in memory on this thread,
        others on another one."""
        while (receive := self._step(line)) is not None:
            near, positions = self._engine.log.next_position - NEAR_ROWS, receive.leased.positions
            if len(positions) > FEW or min(positions.tolist()) < near:  # rule 5
                self._read_later(line, receive)
                return
            self._read(line, receive)

    def _step(self, line: _Line) -> _Receive | None:
        """Handle answers to requests for leases, and match leased messages to the line's receives. Returns the receive
        whose messages to read next, None if there is none."""
        with self._lock:
            if line.stepping:  # called by the engine within _match_leases: the loop below handles it
                return None
            line.stepping = True
            try:
                receive = None
                while True:
                    while line.answers:
                        self._handle(line, *line.answers.popleft())
                    self._drop_late(line)
                    receive = receive or self._next_to_read(line)
                    self._match_leases(line)
                    if not line.answers:
                        break
            finally:
                line.stepping = False
            if line.ready:
                self._set_alarm()
            self._remove_if_idle(line)
            return receive

    def _remove_if_idle(self, line: _Line) -> None:
        if line.is_idle and self._lines.get((line.group, line.member)) is line:
            del self._lines[line.group, line.member]

    def _handle(self, line: _Line, command: Receive, done: Future[Leased]) -> None:
        """Handle the answer to a line's request for a lease: keep the messages until they are read, release them if no
        receive waits, or answer the first receive with an error or nothing."""
        if done.cancelled():
            return
        if (problem := done.exception()) is not None:
            self._answer_first(line, problem)
        elif not len(done.result().leases):
            if not line.ready:
                self._answer_first(line, empty(DELIVERY))
        elif line.receives or line.ready or line.reading:
            half_us = self._engine.clock.now_us() + command.lease_us // 2
            line.ready.append((done.result(), half_us if command.epoch is None else NEVER_US))
        else:
            self._release(line, done.result())

    def _next_to_read(self, line: _Line) -> _Receive | None:
        """Take the line's first receive and its leased messages, if there are any and its answer has room. Returns it,
        else None."""
        if not line.receives or not line.ready or line.reading or not (granted := self._grant(line)):
            return None
        line.reading = True
        receive = line.receives.popleft()
        receive.granted, (receive.leased, receive.kept_us) = granted, self._take_ready(line, receive)
        return receive

    def _match_leases(self, line: _Line) -> None:
        """Cancel a line's requests for leases that no receive needs; request one for each receive while no leased
        messages are ready."""
        for leasing in line.leasings[len(line.receives) :]:
            leasing.cancel()
        while not line.ready and not line.answers and len(line.leasings) < len(line.receives):
            receive = line.receives[len(line.leasings)]
            leasing = self._engine.receive(receive.command, receive.wait_us)
            line.leasings.append(leasing)
            # not the receive: the round keeps its requests, and would keep the answer with it
            leasing.add_done_callback(partial(self._on_leased, line, receive.command))

    def _on_leased(self, line: _Line, command: Receive, done: Future[Leased]) -> None:
        with self._lock:
            line.leasings.remove(done)
            line.answers.append((command, done))
        self._run(line)

    def _on_withdrawn(self, line: _Line, receive: _Receive | None) -> None:
        with self._lock:
            if receive is None or receive not in line.receives:
                return
            line.receives.remove(receive)
            self._release_if_last(line)
        self._run(line)

    # Reading

    def _read_later(self, line: _Line, receive: _Receive) -> None:
        """Read a receive's messages, answer it, and advance its line, on another thread. After :meth:`close`, release
        them and answer CLOSED."""
        try:
            self._readers.submit(self._read_and_step, line, receive)
        except RuntimeError:  # closing
            with self._lock:
                line.reading = False
            self._release(line, receive.leased)
            if receive.answer.set_running_or_notify_cancel():
                answer(receive.answer, error(Code.CLOSED))

    def _read_and_step(self, line: _Line, receive: _Receive | None) -> None:
        while receive is not None:
            self._read(line, receive)
            receive = self._step(line)

    def _read(self, line: _Line, receive: _Receive) -> None:
        """Read a receive's leased messages and answer it. Damaged ones become dead letters; a receive that got nothing
        else waits again, as the first of its line (rule 4)."""
        failure = None
        try:
            found = self._reader.read(receive.leased, receive.granted)
        except Exception as problem:
            failure = broker_failed("reading leased messages", problem)
            found = Read([], nothing_leased(), [])
            self._release(line, receive.leased)
        if found.damaged:  # dead letters from now on: before the line leases again
            for _, offset, cause in found.damaged:
                logger.error("the message at offset %d is a dead letter of %s: %s", offset, line.group, cause)
            self._engine.submit(Bury(line.group, found.damaged))
        with self._lock:
            line.reading = False
            if found.damaged and not found.parts and not receive.answer.cancelled():
                receive.wait_us = max(receive.until_us - self._engine.clock.now_us(), 0)
                line.receives.appendleft(receive)
                if len(found.rest.leases):
                    line.ready.appendleft((found.rest, receive.kept_us))
                return
            waits = receive.answer.set_running_or_notify_cancel()
            is_released = failure is not None
            self._keep(line, receive, found.rest if waits or is_released else receive.leased, receive.kept_us)
            if not waits:  # it was withdrawn while it was read
                self._release_if_last(line)
        if waits:
            batch = found.parts[0] if len(found.parts) == 1 else joined(found.parts or [empty(DELIVERY)])
            answer(receive.answer, batch if failure is None else failure)

    @staticmethod
    def _answer_first(line: _Line, outcome: pa.RecordBatch | BaseException) -> None:
        while line.receives:
            first = line.receives.popleft().answer
            if first.set_running_or_notify_cancel():
                answer(first, outcome)
                return

    # Room for answers

    def _grant(self, line: _Line) -> int:
        """Reserve memory for the answer to the line's first receive, whose messages are leased and ready. Returns how
        many bytes they may have: ``max_bytes`` without an allowance; 0 if the allowance grants none now, and the line
        runs again after ``WITHHELD_SECONDS``."""
        receive = line.receives[0]
        if receive.allowance is None:
            return receive.max_bytes
        rows = min(sum(len(leased.leases) for leased, _ in line.ready), receive.command.max_messages)
        wanted, row_bytes = receive.max_bytes, self._reader.row_bytes
        if row_bytes != FIRST_GUESS:  # an estimate from messages
            wanted = min(max(int(MARGIN * rows * row_bytes), LEAST_GRANT), wanted)
        granted = receive.allowance.grant(wanted)
        if not granted and line not in self._withheld:
            if not self._withheld:
                timer = threading.Timer(WITHHELD_SECONDS, self._retry_withheld)
                timer.daemon = True
                timer.start()
            self._withheld.append(line)
        return granted

    def _retry_withheld(self) -> None:
        with self._lock:
            lines, self._withheld = self._withheld, []
        for line in lines:
            self._run(line)

    # Ready messages

    def _take_ready(self, line: _Line, receive: _Receive) -> tuple[Leased, int]:
        """Take up to ``max_messages`` of a receive from its line's leased, unread messages. Returns them, and until
        when they may be kept (microseconds)."""
        taken: list[Leased] = []
        until_us, most = NEVER_US, receive.command.max_messages
        while line.ready and most > 0:
            leased, until = line.ready.popleft()
            if len(leased.leases) > most:
                self._keep(line, receive, pick(leased, slice(most, None)), until)
                leased = pick(leased, slice(most))
            taken.append(leased)
            most, until_us = most - len(leased.leases), min(until_us, until)
        return join_leased(taken), until_us

    def _keep(self, line: _Line, receive: _Receive, rest: Leased, until_us: int) -> None:
        """Put the messages that did not fit into an answer back, for the member's next receive; release them if this
        receive has ``return_rest``."""
        if len(rest.leases) and receive.return_rest:
            self._release(line, rest)
        elif len(rest.leases):
            line.ready.appendleft((rest, until_us))

    def _release(self, line: _Line, leased: Leased) -> None:
        self._engine.submit(Settle(line.group, releasing(leased)))

    def _release_ready(self, line: _Line) -> None:
        while line.ready:
            self._release(line, line.ready.popleft()[0])

    def _release_if_last(self, line: _Line) -> None:
        """Release a line's leased, unread messages if no receive is left (rule 2). Members with an epoch keep them."""
        if not line.receives and line.epoch is None:
            self._release_ready(line)

    def _drop_late(self, line: _Line) -> None:
        """Release the messages of a line that were leased and unread for too long."""
        if line.ready:
            now, ready = self._engine.clock.now_us(), line.ready
            line.ready = deque(entry for entry in ready if entry[1] > now)
            for leased, until_us in ready:
                if until_us <= now:
                    self._release(line, leased)

    def _line_of(self, command: Receive) -> _Line:
        """Return the line of a command's member, a new one if the member's epoch changed. From time to time, remove
        idle lines."""
        line = self._lines.get((command.group, command.member))
        if line is None or line.epoch != command.epoch:
            if len(self._lines) % SWEEP_LINES == SWEEP_LINES - 1:
                for old in list(self._lines.values()):
                    self._drop_late(old)
                    self._remove_if_idle(old)
            line = _Line(command.group, command.member, command.epoch)
            self._lines[command.group, command.member] = line
        return line

    def _on_event(self, event: Event) -> None:
        """Release the unread messages of a group when an event pauses, resets or deletes it (rule 6)."""
        if event.kind in _STOPPING:
            names = self._engine.shard.ledger.groups.names()
            stopped = {names[number] for number in event.batch.column("group").to_pylist()}
            with self._lock:
                for line in self._lines.values():
                    if line.group in stopped:
                        self._release_ready(line)

    def _set_alarm(self) -> None:
        """Schedule a run of all lines for the time at which the first unread messages must be released, unless one is
        scheduled."""
        if self._has_alarm:
            return
        times = [until_us for line in self._lines.values() for _, until_us in line.ready if until_us < NEVER_US]
        if times:
            self._has_alarm = True
            wait_us = max(min(times) - self._engine.clock.now_us(), 0) + 1
            self._engine.wait_for(lambda: None, wait_us).add_done_callback(self._on_alarm)

    def _on_alarm(self, done: Future[None]) -> None:
        with self._lock:
            self._has_alarm = False
            if done.cancelled() or done.exception() is not None:  # the engine has stopped
                return
            lines = list(self._lines.values())
        for line in lines:
            self._run(line)
        with self._lock:
            self._set_alarm()
