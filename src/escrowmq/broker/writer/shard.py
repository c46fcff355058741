"""One shard: a commit log, the ledger computed from it, and the step that decides, appends and applies events.

Rules (no threads, no clock of its own: tests drive it with a memory log and a simulated clock):

1. State changes in one order only: decide, reserve room for all events, append and apply them; then one sync for the
   round; then the answers; then the log's deferred work.
2. Nothing is answered, shown or asked before it is durable, except sends with ``flush="async"`` (``early``).
3. A full disk, and a process without descriptors, are found before anything is appended, and change nothing (deciding
   is pure). Writers of messages leave ``HEADROOM`` free, so that acknowledgements, leases and decisions continue for a
   while. A round that appended nothing is answered only with a ``Proof`` that no other node has continued the log.
4. A failed append, sync or apply stops the shard: every answer of that round and after it is an error until the shard
   is opened again, because what the disk holds is no longer known (I34).
5. Broker time never steps back, also over restarts: it starts at the time of the log's last frame.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from escrowmq.broker.columns import batch_of
from escrowmq.broker.failures import broker_failed
from escrowmq.broker.writer.recovery import Folded, fold, size_of
from escrowmq.broker.writer.repeats import Unchecked, judge, stored_keys
from escrowmq.broker.writer.rounds import AnyRequest, Look, Pairs, Work, arrange
from escrowmq.broker.writer.telling import LOGGED, log_before
from escrowmq.errors import Code, EscrowError, Overloaded, error
from escrowmq.ledger.columns.codes import OK
from escrowmq.ledger.commands import (
    Command,
    Configure,
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
from escrowmq.schemas import MESSAGES, PRODUCED, STORED, Kind
from escrowmq.settings import BrokerSettings

HEADROOM = 4 << 20

logger = logging.getLogger(__name__)


def rules_of(settings: BrokerSettings) -> Rules:
    """Return the ledger's rules from the settings: those of the same name; times in seconds become microseconds (names
    with ``_us``)."""
    values: dict[str, Any] = {"exhausted_rollback": settings.checks_exhausted == "rollback"}
    for name in (f.name for f in dataclasses.fields(Rules)):
        if hasattr(settings, name):
            values[name] = getattr(settings, name)
        elif name.endswith("_us"):
            values[name] = to_us(getattr(settings, name.removesuffix("_us")))
    return Rules(**values)


PACKED_ROWS = 256
PACKED_BYTES = 128 << 10  # packed without Arrow at most: it is faster for more rows; larger copies map memory anew
_BODY = STORED[Kind.PLAIN].names.index("body")


def _content(event: Event) -> Content:
    """Return an event in the form that the log appends: packed if it has few rows, else as a batch. Raises ValueError,
    OverflowError or ArrowException if a value fits no column."""
    kind, few = event.kind, event.content
    if isinstance(few, Few) and few.num_rows <= PACKED_ROWS and can_pack(kind):  # noqa: SIM102
        if kind not in MESSAGES or sum(map(len, few.columns[_BODY])) <= PACKED_BYTES:
            return pack(kind, few.columns)
    return event.batch


def _without_positions(answer: Any) -> Any:
    """Return a copy of an answer that is given before the sync, without positions: after a crash other messages may get
    them."""
    if isinstance(answer, list):
        return [(code, -1, queue, -1, None) for code, _, queue, _, _ in answer]
    if isinstance(answer, EscrowError):
        return answer
    none = pa.array(np.full(answer.num_rows, -1))
    return batch_of(PRODUCED, {"position": none, "offset": none}, answer)


class Proof(Protocol):
    """Proof that this process is the newest opener of a log that other nodes may open, too."""

    def is_fresh(self) -> bool:
        """Return whether the last proof is recent enough to answer a request without appending to the log."""

    def renew(self) -> None:
        """Prove again that this process is the newest opener. Overloaded(NOT_LEADER) if that is impossible now; other
        errors stop the shard."""


class Shard:
    """A log and its ledger. One caller at a time. ``folded``: the ledger, if its caller has it already.
    ``proof``: required where other processes may open the log."""

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
        self.observers: list[Callable[[Event], None]] = []  # called with each applied event, before it is durable
        self._dirty = False
        self._headroom = min(HEADROOM, settings.segment_bytes // 16)
        self._proof = proof
        folded = folded or fold(log)
        self.ledger = folded.ledger
        self.ledger.ask_keys_of(partial(stored_keys, log))
        self.time_us = max(log.last_time_us, folded.time_us)
        self.clock = ContinuedClock(clock, self.time_us)
        """Broker time: the only clock of the shard. It never steps back behind the log's last frame."""
        self._snapshot_bytes = folded.size
        self._snapshot_sequence = folded.sequence
        self._counted = log.bytes_since_snapshot(), log.bytes_written  # the first is expensive: kept with the second
        self.begin()
        self.execute(Configure(rules_of(settings)))
        self._flushing()()
        self._settle()

    # One round

    def begin(self) -> int:
        """Set the time of the round, and return it (broker time, microseconds)."""
        self.time_us = max(self.time_us, self.clock.now_us())
        return self.time_us

    def execute(self, command: Command) -> Any:
        """Decide, reserve, append, apply. Returns the answer, to be given once it is durable. Raises EscrowError: a
        refusal of the whole command (nothing changed), Overloaded(DISK_FULL, OUT_OF_RESOURCES), or, once the shard has
        stopped, Unknown(SHARD_STOPPED)."""
        return self._decide(command).answer

    def _decide(self, command: Command) -> Decision:
        self._check_running()
        try:
            if isinstance(command, Prepare) and command.replace:  # its rows that equal what is stored are repeats
                same = np.zeros(command.batch.num_rows, np.bool_)
                if (repeats := self.ledger.repeats_of(command)) is not None:
                    same[repeats.rows] = judge(self.log, command.batch, repeats) == OK
                command = dataclasses.replace(command, same=same)
            decision = self.ledger.decide(command, self.time_us)
            contents = list(map(_content, decision.events))
        except EscrowError:
            raise
        except Exception as problem:  # a bug of ours; deciding changes nothing, so only this command is refused
            raise broker_failed(f"deciding {type(command).__name__}", problem) from problem
        self._accept(decision, contents, writes=isinstance(command, Send | Prepare))
        return decision

    def _decide_rows(self, command: RowsCommand) -> Decision | None:
        """As :meth:`_decide`, for a few rows in a plain case; None: decide them as columns."""
        self._check_running()
        try:
            decision = self.ledger.decide_rows(command, self.time_us)
            contents = [] if decision is None else list(map(_content, decision.events))
        except (ValueError, OverflowError, pa.ArrowException):
            return None  # a value that fits no column: deciding as columns names the request
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
            self._append(event, content)

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
        if writes and self.full:
            self.full = False
            tell(logging.WARNING, "space", "space: the disk takes messages again")

    def probe(self) -> None:
        """Test whether a full disk has space again, and end the state ``full`` if it has: no caller must send a message
        for that."""
        with suppress(Overloaded):
            self._reserve(self._headroom, writes=True)

    def _append(self, event: Event, content: Content) -> None:
        try:
            position = self.log.append(event.kind, content, self.time_us)
            self._dirty = True
            if position != self.ledger.next_position:
                raise error(Code.DAMAGED, f"log at position {position}, ledger at {self.ledger.next_position}")
            if event.kind in LOGGED:
                log_before(self.ledger, event)
            self.ledger.apply(event.kind, event.content, position, self.time_us, event.rows)
            for observe in self.observers:
                observe(event)
        except Exception as problem:
            raise self.stop(problem) from problem

    def _flushing(self) -> Callable[[], None]:
        """Take what the round appended out of the log for writing. Returns a function that makes it durable, on any
        thread. A round that appended nothing renews the proof instead, if there is one and it is old."""
        self._check_running()
        dirty, self._dirty = self._dirty, False
        try:
            write = self.log.hand_over() if dirty else None
        except Exception as problem:
            raise self.stop(problem) from problem

        def flush() -> None:
            try:
                if write is not None:
                    write()
                elif self._proof is not None and not self._proof.is_fresh():
                    self._proof.renew()
            except Exception as problem:
                if isinstance(problem, EscrowError) and problem.code is Code.NOT_LEADER:
                    raise
                raise self.stop(problem) from problem
            self._check_running()

        return flush

    def _settle(self) -> None:
        """Finish deferred log work after answering. If that fails, the shard stops."""
        try:
            self.log.settle()
        except Exception as problem:
            self.stop(problem)

    @property
    def is_proved(self) -> bool:
        """Return whether a round that appends nothing may be answered from the ledger as it is."""
        return self._proof is None or self._proof.is_fresh()

    def stop(self, cause: BaseException) -> EscrowError:
        """Refuse every command from now on, because of ``cause``. Returns the error for callers."""
        if self.failure is None:
            tell(logging.ERROR, "stopped", f"the shard stopped: {cause}", cause=str(cause))
            self.failure = error(Code.SHARD_STOPPED, f"the shard stopped: {cause}")
        return self.refusal()

    def refusal(self) -> EscrowError:
        """Return a new error of a stopped shard, one for each caller: a shared one would collect tracebacks."""
        assert self.failure is not None
        return error(Code.SHARD_STOPPED, self.failure.message)

    def _check_running(self) -> None:
        if self.failure is not None:
            raise self.refusal()

    def run(self, requests: Sequence[AnyRequest]) -> Pairs:
        """Execute the requests of a round, merged into commands. Returns them with their answers, to be given once they
        are durable; early ones are answered here."""
        return [pair for work in arrange(requests) for pair in self._run_work(work)]

    def _run_work(self, work: Work) -> Pairs:
        answer = self.attempt(lambda: self._answer_work(work))
        if isinstance(answer, EscrowError) and len(work.requests) > 1 and self.failure is None:
            # Refused as a whole: each request runs alone, so that only those at fault are refused.
            return [pair for one in work.requests for pair in self._run_work(Work([one], one.count))]
        if isinstance(answer, EscrowError):
            return [(request, answer) for request in work.requests]
        pairs = list(zip(work.requests, work.answers(answer), strict=True))
        for request, part in pairs:
            if request.early:
                request.answer(_without_positions(self._check(part)))
        return pairs

    def _answer_work(self, work: Work) -> Any:
        """Execute the command of merged requests, as rows where that is a plain case, else as columns, or run a look.
        Returns the answer for all."""
        if isinstance(look := work.requests[0], Look):
            return look.look()
        if work.few and (decided := self._decide_rows(work.rows_command)) is not None:
            return decided.answer
        command = work.command
        decision = self._decide(command)
        if decision.repeats is None:
            return decision.answer
        assert isinstance(command, Send | Prepare)  # nothing else repeats messages
        return Unchecked(decision.answer, command.batch, decision.repeats)

    def _check(self, answer: Any) -> Any:
        """Compare the repeats in an answer, if there are any, with the stored messages. Returns the final answer, or an
        error."""
        return self.attempt(lambda: answer.checked(self.log)) if isinstance(answer, Unchecked) else answer

    @staticmethod
    def attempt(act: Callable[[], Any]) -> Any:
        """Return the result of ``act``, or its exception as an EscrowError."""
        try:
            return act()
        except Exception as problem:
            return broker_failed("looking at the ledger", problem)

    def finishing(self, pairs: Pairs) -> tuple[Callable[[], bool], Callable[[], bool]]:
        """End the round. Returns a function that syncs it and one that answers it; both return whether it is durable.
        They may run on other threads while the next round is decided, in order: nothing is answered unless every
        earlier round is durable, too."""
        refusal: EscrowError | None = error(Code.SHARD_STOPPED, "the round was not synced")
        flush: Callable[[], None] = self._check_running
        with suppress(EscrowError):  # the shard has stopped: flush raises that again
            flush = self._flushing()

        def sync() -> bool:
            nonlocal refusal
            try:
                reach("broker.decided")
                flush()
                reach("broker.synced")
                refusal = None
            except EscrowError as problem:
                refusal = problem
            return refusal is None

        def tell() -> bool:
            for request, answer in pairs:
                if refusal is None:
                    request.answer(self._check(answer))
                else:
                    request.answer(self.refusal() if self.failure else error(refusal.code, refusal.message))
            if refusal is None:
                reach("broker.answered")
                self._settle()
            return refusal is None

        return sync, tell

    # Upkeep

    def snapshot_due(self) -> bool:
        """Return whether enough was written since the last snapshot: a fixed amount, and 20 times what a snapshot
        takes; or many frames, which take as long to replay when they are small, and twice what a snapshot takes."""
        since, written = self._counted
        if not self._is_much(since + self.log.bytes_written - written):  # at most: newer snapshots reduce it
            return False
        self._counted = self.log.bytes_since_snapshot(), self.log.bytes_written
        return self._is_much(self._counted[0])

    def _is_much(self, written: int) -> bool:
        frames = self.log.next_sequence - self._snapshot_sequence
        return written >= max(self.settings.snapshot_bytes, 20 * self._snapshot_bytes) or (
            frames >= self.settings.snapshot_frames and written >= 2 * self._snapshot_bytes
        )

    def take_snapshot(self) -> Callable[[], Snapshot]:
        """Freeze the ledger as of the last sync, between rounds. Returns a function that builds the snapshot, on any
        thread."""
        tables, self._snapshot_sequence = self.ledger.freeze(), self.log.next_sequence
        place = (self.log.next_sequence, self.log.next_position, self.time_us)
        return lambda: Snapshot(*place, tables())

    def save(self, taken: Callable[[], Snapshot]) -> None:
        """Build a snapshot with ``taken`` and store it durably (any thread)."""
        snapshot = taken()
        self._snapshot_bytes = size_of(snapshot.tables)
        self.log.save_snapshot(snapshot.tables, snapshot.sequence, snapshot.position, snapshot.time_us)

    def retain(self) -> int | None:
        """Release in the ledger what is older than the retention; within a round. Returns the position below which the
        log may be dropped *once a newer snapshot is saved*, None if there is nothing to drop."""
        retention_us = to_us(self.settings.retention)
        visible_us = self.time_us - retention_us
        limit = early = self.log.position_before(visible_us)
        if self.ledger.topics.can_remove_early(self.log.first_position):
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
