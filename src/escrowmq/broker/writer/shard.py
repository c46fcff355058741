"""One shard: a commit log, the ledger computed from it, and the step that decides, appends and applies events.

Rules (no threads, no clock of its own: tests drive it with a memory log and a simulated clock):

1. State changes in one order only: decide, reserve room for all its events, append and apply them; then one sync for
   the round; then the answers; then what the log does without anybody waiting for it.
2. Nothing is answered, shown or asked before it is durable (``early`` sends, named by their caller, excepted).
3. A full disk, and a process without descriptors, are found before anything is appended, and change nothing (deciding
   is pure). Writers of messages leave ``HEADROOM`` free, so that acknowledgements, leases and decisions continue for a
   while. A round that appended nothing is answered from a ledger of which it is known that no other node has gone on
   with its log (``Proof``).
4. A failed append, sync or apply stops the shard: every answer of that round and after it is an error until it is
   opened anew, because what the disk holds is no longer known (I34).
5. Broker time never steps back, over restarts too: it starts at the time of the log's last frame.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from escrowmq.broker.failures import broker_failed
from escrowmq.broker.writer.keys import StoredKeys
from escrowmq.broker.writer.recovery import Folded, recovered, size_of
from escrowmq.broker.writer.repeats import Unchecked, judge
from escrowmq.broker.writer.rounds import AnyRequest, Look, Work, arrange
from escrowmq.broker.writer.telling import TOLD, tell_before
from escrowmq.errors import Code, EscrowError, Overloaded, error
from escrowmq.ledger.columns.codes import OK
from escrowmq.ledger.commands import (
    Command,
    Configure,
    Cut,
    Prepare,
    PrepareRows,
    Retain,
    RowsCommand,
    Rules,
    Send,
    SendRows,
)
from escrowmq.ledger.events import Decision, Event, Few
from escrowmq.log.frames import Content, can_pack, pack, size_bound
from escrowmq.log.seam import CommitLog, Snapshot
from escrowmq.platform.clock import Clock, ContinuedClock
from escrowmq.platform.failpoints import reach
from escrowmq.platform.logs import tell
from escrowmq.platform.times import to_us
from escrowmq.schemas import MESSAGES, STORED, Kind
from escrowmq.settings import BrokerSettings

HEADROOM = 4 << 20

logger = logging.getLogger(__name__)


def rules_of(settings: BrokerSettings) -> Rules:
    """Return the rules that the settings ask for: those of the same name, and times, whose names end in ``_us``."""
    values: dict[str, Any] = {"exhausted_rollback": settings.checks_exhausted == "rollback"}
    for name in (f.name for f in dataclasses.fields(Rules)):
        if hasattr(settings, name):
            values[name] = getattr(settings, name)
        elif name.endswith("_us"):
            values[name] = to_us(getattr(settings, name.removesuffix("_us")))
    return Rules(**values)


PACKED_ROWS = 256
PACKED_BYTES = 128 << 10
"""What is packed without Arrow at most. Arrow makes more rows in less time, and larger pieces of memory are mapped anew
for each copy.
"""


def _contents(decision: Decision) -> list[Content]:
    """Return the log content of each event. Raises ValueError, OverflowError or ArrowException if a value fits no
    column."""
    return [
        pack(event.kind, event.content.columns)
        if isinstance(event.content, Few) and _is_packed(event.kind, event.content)
        else event.batch
        for event in decision.events
    ]


def _is_packed(kind: Kind, few: Few) -> bool:
    if few.num_rows > PACKED_ROWS or not can_pack(kind):
        return False
    return kind not in MESSAGES or sum(map(len, few.columns[_BODY])) <= PACKED_BYTES


_BODY = STORED[Kind.PLAIN].names.index("body")


class Proof(Protocol):
    """Whether this opener of the log is the newest one: with a log of its own that is certain, with one of several
    nodes it is known as of some time."""

    def is_fresh(self) -> bool:
        """Return whether it is known well enough to answer from the ledger alone."""

    def renew(self) -> None:
        """Make sure of it, with the log's help. Overloaded(NOT_LEADER) if that cannot be done now; any other error
        stops the shard."""


class Shard:
    """A log and its ledger, which is ``folded`` from it already if its caller has done so. One caller at a time.
    ``proof``: needed where others may open the log without its opener's knowledge."""

    def __init__(
        self,
        log: CommitLog,
        clock: Clock,
        settings: BrokerSettings,
        folded: Folded | None = None,
        proof: Proof | None = None,
    ) -> None:
        self.log = log
        self.settings = settings
        self.failure: EscrowError | None = None
        self.full = False
        self.full_because = ""
        self.observers: list[Callable[[Event], None]] = []
        """Called with every event when it is applied (not during recovery), before it is durable."""
        self._dirty = False
        self._headroom = min(HEADROOM, settings.segment_bytes // 16)
        self._proof = proof
        folded = folded or recovered(log)
        self.ledger = folded.ledger
        self.ledger.ask_keys_of(StoredKeys(log))
        self._floor_us = max(log.last_time_us, folded.time_us)
        self.clock = ContinuedClock(clock, self._floor_us)
        """Broker time: the one clock of the shard, of its waiting, its listings and its metrics."""
        self._snapshot_bytes = folded.size
        self._snapshot_sequence = folded.sequence
        self._looked = log.bytes_since_snapshot(), log.bytes_written
        """Bytes since the last snapshot when they were asked for last (of every segment), and what was written until
        then."""
        self.time_us = 0
        self.begin()
        self.execute(Configure(rules_of(settings)))
        self._flushing()()
        self._settle()

    # One round

    def now_us(self) -> int:
        """Broker time, microseconds; where the clock is behind the log's last frame, it continues from that."""
        return self.clock.now_us()

    def begin(self) -> int:
        """Take the round's time, microseconds."""
        self.time_us = self._floor_us = max(self._floor_us, self.now_us())
        return self.time_us

    def execute(self, command: Command) -> Any:
        """Decide, reserve, append, apply; the answer, to be given once it is durable.

        Raises EscrowError: a refusal of the whole command (nothing changed), Overloaded(DISK_FULL, OUT_OF_RESOURCES),
        or, once the shard has stopped, Unknown(SHARD_STOPPED).
        """
        return self._decide(command).answer

    def _decide(self, command: Command) -> Decision:
        self._running()
        try:
            if isinstance(command, Prepare) and command.replace:
                command = self._mark_repeats(command)
            decision = self.ledger.decide(command, self.time_us)
            contents = _contents(decision)
        except EscrowError:
            raise
        except Exception as problem:  # a bug of ours; deciding changes nothing, so only this command is refused
            raise broker_failed(f"deciding {type(command).__name__}", problem) from problem
        self._accept(decision, contents, writes=isinstance(command, Send | Prepare))
        return decision

    def _decide_rows(self, command: RowsCommand) -> Decision | None:
        """As :meth:`_decide`, of a few rows in a plain case; None: they are to be decided as columns."""
        self._running()
        try:
            decision = self.ledger.decide_rows(command, self.time_us)
            contents = [] if decision is None else _contents(decision)
        except (ValueError, OverflowError, pa.ArrowException):
            return None  # a value that no column takes: columns say whose it is
        except Exception:  # a bug of ours; deciding changes nothing, and columns are another way to the same answer
            logger.exception("deciding %s", type(command).__name__)
            return None
        if decision is not None:
            self._accept(decision, contents, writes=isinstance(command, SendRows | PrepareRows))
        return decision

    def _accept(self, decision: Decision, contents: list[Content], *, writes: bool) -> None:
        """Reserve room for the events, append and apply them."""
        if decision.events:
            self._reserve(sum(map(size_bound, contents)), writes=writes)
        for event, content in zip(decision.events, contents, strict=True):
            self._take_in(event, content)

    def _mark_repeats(self, command: Prepare) -> Prepare:
        """Mark the rows of a replacing PREPARE that equal what is stored; they are repeats."""
        same = np.zeros(command.batch.num_rows, np.bool_)
        if (repeats := self.ledger.repeats_of(command)) is not None:
            same[repeats.rows] = judge(self.log, command.batch, repeats) == OK
        return dataclasses.replace(command, same=same)

    def _reserve(self, size: int, *, writes: bool) -> None:
        try:
            self.log.reserve(size + (self._headroom if writes else 0))
        except Overloaded as problem:
            if not self.full:
                tell(logging.WARNING, "full", f"full: {problem.message}; messages are refused", cause=problem.message)
            self.full, self.full_because = True, problem.message
            raise
        except EscrowError as problem:
            raise self.stop(problem) from problem
        if writes:
            self._has_space()

    def probe(self) -> None:
        """When the disk was full: see whether there is space again, so that no caller has to send a message to find
        out."""
        try:
            self.log.reserve(2 * self._headroom)
            self._has_space()
        except Overloaded:
            pass
        except EscrowError as problem:
            raise self.stop(problem) from problem

    def _has_space(self) -> None:
        if self.full:
            self.full = False
            tell(logging.WARNING, "space", "space: the disk takes messages again")

    def _take_in(self, event: Event, content: Content) -> None:
        try:
            position = self.log.append(event.kind, content, self.time_us)
            self._dirty = True
            if position != self.ledger.next_position:
                raise error(Code.DAMAGED, f"log at position {position}, ledger at {self.ledger.next_position}")
            if event.kind in TOLD:
                tell_before(self.ledger, event)
            self.ledger.apply(event.kind, event.content, position, self.time_us, event.rows)
            for observe in self.observers:
                observe(event)
        except Exception as problem:
            raise self.stop(problem) from problem

    def _flushing(self) -> Callable[[], None]:
        """Take what the round appended out for writing; the function returned makes it durable, on any thread."""
        self._running()
        dirty, self._dirty = self._dirty, False
        try:
            write = self.log.hand_over() if dirty else None
        except Exception as problem:
            raise self.stop(problem) from problem

        def flush() -> None:
            try:
                if write is not None:
                    write()
                elif not self.is_proved:
                    self._prove()
            except Exception as problem:
                if isinstance(problem, EscrowError) and problem.code is Code.NOT_LEADER:
                    raise
                raise self.stop(problem) from problem
            self._running()

        return flush

    def _settle(self) -> None:
        """Finish deferred log work after answering. If that fails, the shard stops."""
        try:
            self.log.settle()
        except Exception as problem:
            self.stop(problem)

    @property
    def is_proved(self) -> bool:
        """Whether what appends nothing may be answered from the ledger as it is."""
        return self._proof is None or self._proof.is_fresh()

    def _prove(self) -> None:
        assert self._proof is not None  # without one nothing is to be proved
        self._proof.renew()

    def stop(self, cause: BaseException) -> EscrowError:
        """Refuse everything from now on; the error that says so."""
        if self.failure is None:
            tell(logging.ERROR, "stopped", f"the shard stopped: {cause}", cause=str(cause))
            self.failure = error(Code.SHARD_STOPPED, f"the shard stopped: {cause}")
        return self._refusal()

    def _refusal(self) -> EscrowError:
        """Return a fresh error object for each caller: a shared one would collect tracebacks."""
        assert self.failure is not None  # only asked of a stopped shard
        return error(Code.SHARD_STOPPED, self.failure.message)

    def _make_refusal(self, problem: EscrowError) -> EscrowError:
        """Return the error that answers the requests of a round that failed with ``problem``."""
        return self._refusal() if self.failure is not None else error(problem.code, problem.message)

    def _running(self) -> None:
        if self.failure is not None:
            raise self._refusal()

    def run(self, requests: Sequence[AnyRequest]) -> list[tuple[AnyRequest, Any]]:
        """Execute requests; pairs of request and answer (or EscrowError), to be given once they are durable."""
        pairs: list[tuple[AnyRequest, Any]] = []
        looks = [r for r in requests if isinstance(r, Look)]
        for work in arrange([r for r in requests if not isinstance(r, Look)] if looks else requests):
            pairs += self._run_work(work)
        for look in looks:
            pairs.append((look, self.attempt(look.look)))
        return pairs

    def _run_work(self, work: Work) -> list[tuple[AnyRequest, Any]]:
        answer = self.attempt(lambda: self._answer_work(work))
        if isinstance(answer, EscrowError) and len(work.requests) > 1 and self.failure is None:
            # Refused as a whole: each request runs alone, so that only those at fault are refused.
            return [pair for alone in work.alone() for pair in self._run_work(alone)]
        if isinstance(answer, EscrowError):
            return [(request, answer) for request in work.requests]
        pairs = list(zip(work.requests, work.answers(answer), strict=True))
        for request, part in pairs:
            if request.early:
                request.answer(self._check(part))
        return pairs

    def _answer_work(self, work: Work) -> Any:
        """Return the answer to a work: as rows where that is a plain case, else as columns."""
        if work.few and (decision := self._decide_rows(work.rows_command)) is not None:
            return decision.answer
        return self._answer(work.command)

    def _answer(self, command: Command) -> Any:
        decision = self._decide(command)
        if decision.repeats is None:
            return decision.answer
        assert isinstance(command, Send | Prepare)  # nothing else repeats messages
        return Unchecked(decision.answer, command.batch, decision.repeats)

    def _check(self, answer: Any) -> Any:
        """Return the answer of a request as it is given, or the error that came of comparing it."""
        return self.attempt(lambda: answer.checked(self.log)) if isinstance(answer, Unchecked) else answer

    @staticmethod
    def attempt(act: Callable[[], Any]) -> Any:
        """Return the result of ``act``, or the EscrowError that it raised."""
        try:
            return act()
        except EscrowError as problem:
            return problem
        except Exception as problem:
            return broker_failed("looking at the ledger", problem)

    def finishing(self, pairs: Sequence[tuple[AnyRequest, Any]]) -> tuple[Callable[[], bool], Callable[[], bool]]:
        """Return the round is complete; of the functions returned the first syncs it, the second answers, and both say
        whether it is durable. They may be called on
        other threads while the next round is decided. Nothing is answered unless every round before it is durable
        too."""
        flush: Callable[[], None] | None = None
        durable = False
        refusal = error(Code.SHARD_STOPPED, "the round was not synced")
        with contextlib.suppress(EscrowError):
            flush = self._flushing()

        def sync() -> bool:
            nonlocal durable, refusal
            try:
                if flush is None:
                    raise self._refusal()
                reach("broker.decided")
                flush()
                reach("broker.synced")
                durable = True
            except EscrowError as problem:
                refusal = problem
            return durable

        def tell() -> bool:
            for request, answer in pairs:
                request.answer(self._check(answer) if durable else self._make_refusal(refusal))
            if durable:
                reach("broker.answered")
                self._settle()
            return durable

        return sync, tell

    # Upkeep

    def snapshot_due(self) -> bool:
        """Return whether enough was written since the last snapshot: a fixed amount, and 20 times what a snapshot
        takes; or many frames, which take as long to replay when they are small, and twice what a snapshot takes."""
        written, then = self._looked
        if not self._is_much(
            written + self.log.bytes_written - then
        ):  # at least what it is: a newer snapshot makes it less
            return False
        self._looked = self.log.bytes_since_snapshot(), self.log.bytes_written
        return self._is_much(self._looked[0])

    def _is_much(self, written: int) -> bool:
        frames = self.log.next_sequence - self._snapshot_sequence
        return written >= max(self.settings.snapshot_bytes, 20 * self._snapshot_bytes) or (
            frames >= self.settings.snapshot_frames and written >= 2 * self._snapshot_bytes
        )

    def take_snapshot(self) -> Callable[[], Snapshot]:
        """Return the state as of the last sync; call between rounds. The rest of the making, and the saving, may
        happen on another thread."""
        tables, self._snapshot_sequence = self.ledger.freeze(), self.log.next_sequence
        place = (self.log.next_sequence, self.log.next_position, self._floor_us)
        return lambda: Snapshot(*place, tables())

    def save(self, taken: Callable[[], Snapshot]) -> None:
        """Store it durably (any thread)."""
        snapshot = taken()
        self._snapshot_bytes = size_of(snapshot.tables)
        self.log.save_snapshot(snapshot.tables, snapshot.sequence, snapshot.position, snapshot.time_us)

    def cut(self) -> int:
        """Drop what is beyond the retention of its topic, within a round. Returns how many queues were cut."""
        cut: int = self.execute(Cut(to_us(self.settings.retention)))
        return cut

    def retain(self) -> int | None:
        """Let go of what is older than the retention, within a round; the position below which the log may then be
        dropped *once a newer snapshot is saved*, None when there is nothing to drop."""
        retention_us = to_us(self.settings.retention)
        visible_us = self.time_us - retention_us
        limit = early = self.log.position_before(visible_us)
        if self.ledger.topics.keep_less(self.log.first_position):
            early = self.log.position_before(self.time_us - min(retention_us, self.ledger.rules.dedup_window_us))
        if early <= self.log.first_position:
            return None
        position: int = self.execute(Retain(visible_us, limit, early))
        return position if position > self.log.first_position else None

    @property
    def status(self) -> str:
        """ok, damaged (the log, in places: the rest continues), full (writers are refused) or stopped."""
        if self.failure is not None:
            return "stopped"
        return "full" if self.full else "damaged" if self.log.is_damaged else "ok"
