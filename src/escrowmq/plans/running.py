"""One run of a plan: batch after batch in the order of the set, each noted before it is asked for and after it was
answered.

A batch that was begun and not noted as answered is looked up in the brokers' records of acts before anything else is
done: what a run before (or this one, when an answer was lost) did is read from there, and only what surely was not done
is done now.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from escrowmq.errors import AWAY, Code, EscrowError, Meaning, Unknown
from escrowmq.plans.frozen import FrozenSet
from escrowmq.plans.outcomes import Outcome, Outcomes
from escrowmq.plans.plan import Plan
from escrowmq.plans.progress import Progress
from escrowmq.plans.ramp import Pace, Ramp, StopAfter, boundaries
from escrowmq.plans.subjects.seam import Subject
from escrowmq.platform.backoff import Backoff
from escrowmq.platform.disk import Disk
from escrowmq.platform.failpoints import reach

T = TypeVar("T")

_LOOK = 0.1
"""Seconds between looks whether the run is to stop, while it waits."""
_NOT_NOW = frozenset({Code.BROKER_AWAY, Code.DISK_FULL, Code.OUT_OF_RESOURCES, Code.QUEUE_FULL})
"""Surely nothing was done, and it may be over in a moment."""
_LATER = AWAY | _NOT_NOW
"""What may be over in a moment, of a question."""


@dataclass(frozen=True, slots=True)
class Report:
    """How far a run came. ``state``: running, finished, stopped, failed; ``code``: of the error that ended a failed
    one."""

    plan: str
    rows: int
    next: int
    """Rows that are done with, by this run and those before it."""
    outcomes: dict[str, int]
    """Of all of these."""
    again: int
    in_doubt: int
    state: str
    reason: str
    code: str | None
    step: int
    steps: int
    handled: int
    """Rows that this run dealt with."""
    seconds: float

    @property
    def failures(self) -> int:
        """Rows that were neither done by the plan nor before, and rows that failed anew after they were done."""
        return self.again + sum(count for name, count in self.outcomes.items() if Outcome[name.upper()].is_failure)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {**asdict(self), "failures": self.failures}


class _Ended(Exception):
    """The run is over before the set is."""

    def __init__(self, state: str, reason: str, code: Code | None = None) -> None:
        super().__init__(reason)
        self.state, self.reason, self.code = state, reason, code


class Run:
    """One run, by a process that holds the plan."""

    def __init__(
        self,
        plan: Plan,
        rows: FrozenSet,
        disk: Disk,
        subject: Subject,
        *,
        ramp: Ramp,
        rate: float | None,
        stop_after: StopAfter,
        batch: int,
        patience: float,
        progress: Callable[[Report], None],
        should_stop: Callable[[], bool],
    ) -> None:
        self._plan, self._rows, self._disk, self._subject = plan, rows, disk, subject
        self._ramp, self._rate, self._pace = ramp, rate, Pace(rate, self._wait)
        self._stop_after, self._batch, self._patience = stop_after, min(batch, subject.most), patience
        self._tell, self._should_stop = progress, should_stop
        self._began = time.monotonic()
        self._ends = ramp.ends(plan.rows)
        self._first = 0
        self._failed_before = 0
        self._marks: dict[str, int] = {}
        self._progress: Progress

    def run(self, by: str, why: str | None) -> Report:
        """Go on until the set is done, or something ends the run."""
        self._progress = Progress(self._disk, self._plan.rows)
        try:
            return self._run(by, why)
        finally:
            self._progress.close()

    def _run(self, by: str, why: str | None) -> Report:
        history = self._progress.history
        self._first, self._failed_before = history.next, history.failures
        if history.next == self._plan.rows:
            return self._report("finished", "every row was done with before")
        state, reason, code = "finished", "", None
        try:
            self._marks = self._patiently(self._subject.mark)
            marks = dict(history.runs[-1]["marks"]) if history.doubt is not None else self._marks
            self._progress.started(
                at_us=_now_us(),
                by=by,
                why=why,
                ramp=list(self._ramp.shares),
                pause=self._ramp.pause,
                rate=self._rate,
                marks=marks,
            )
            self._marks = marks  # of the run that left something in doubt, as long as it is
            self._resolve()
            self._steps()
        except _Ended as ending:
            state, reason, code = ending.state, ending.reason, ending.code
        self._progress.ended(state, reason, _now_us())
        return self._report(state, reason, code)

    # Steps

    def _steps(self) -> None:
        history = self._progress.history
        for end in boundaries(history.next, self._ends):
            first = history.next
            while history.next < end:
                self._do(self._rows.batch_from(history.next, self._pace.most(min(self._batch, end - history.next))))
            if end < self._plan.rows:
                self._pause(first, end)

    def _pause(self, first: int, end: int) -> None:
        """Between steps: wait, then see whether what was done has failed anew."""
        if self._wait(self._ramp.pause):
            raise _make_stopped()
        batches = self._rows.batches(first, end)  # one after the other: a step may be half of the set
        if again := sum(self._patiently(partial(self._subject.failed_again, batch)) for _, batch in batches):
            self._progress.again(again)
            self._judge()

    def _do(self, batch: pa.RecordBatch) -> None:
        """One batch."""
        history = self._progress.history
        self._progress.begin(history.next, batch.num_rows)
        try:
            outcomes = self._patiently(partial(self._subject.do, batch, self._why()), _NOT_NOW)
        except _Ended as ending:  # surely not applied
            self._progress.undone(history.next, ending.reason)
            raise
        except EscrowError:  # nobody knows
            self._resolve()
        else:
            reach("plans.answered")
            self._took(outcomes)

    def _resolve(self) -> None:
        """Find out what became of the batch that is in doubt, and do what was not done of it."""
        history = self._progress.history
        backoff = Backoff(0.1, 2.0)
        until = time.monotonic() + self._patience
        while history.doubt is not None:
            batch = self._rows.batch_from(*history.doubt)
            found = self._patiently(partial(self._subject.became, batch, self._token(), self._marks))
            left = np.flatnonzero(found == Outcome.NONE)
            try:
                if len(left):
                    now = self._patiently(partial(self._subject.do, batch.take(pa.array(left)), self._why()), _NOT_NOW)
                    found = found.copy()
                    found[left] = now
                    if (now == Outcome.ALREADY).any():  # by a call of ours that was late?
                        late = self._patiently(partial(self._subject.became, batch, self._token(), self._marks))
                        found[late == Outcome.DONE] = Outcome.DONE
                self._took(found)
            except EscrowError as problem:
                if problem.meaning is not Meaning.UNKNOWN or time.monotonic() > until:
                    raise _Ended("failed", str(problem), problem.code) from problem
                if self._wait(backoff.failed()):
                    raise _make_stopped() from problem

    def _took(self, outcomes: Outcomes) -> None:
        history = self._progress.history
        self._progress.done(history.next, outcomes, _now_us())
        self._tell(self._report("running", ""))
        self._judge()
        if self._pace.took(len(outcomes)) and history.next < self._plan.rows:
            raise _make_stopped()

    def _judge(self) -> None:
        """End the run if too much has failed in it."""
        history = self._progress.history
        reason = self._stop_after.why(history.failures - self._failed_before, history.next - self._first)
        if reason is not None:
            raise _Ended("stopped", reason)

    def _token(self) -> str:
        """Return how the reason of each operation on the current batch begins: the record is searched for it."""
        first, rows = self._progress.history.doubt or (0, 0)
        return f"plan {self._plan.id} rows {first}-{first + rows - 1} "

    def _why(self) -> str:
        why = f": {self._plan.why}" if self._plan.why else ""
        return f"{self._token()}of {self._plan.rows}, digest {self._plan.digest[:16]}{why}"

    # Patience

    def _patiently(self, act: Callable[[], T], later: Collection[Code] = _LATER) -> T:
        """Return the result of ``act``; retry while the failure may be temporary. Raises _Ended when that takes too
        long or is
        refused, and the error if nobody knows whether something was done."""
        until, backoff = time.monotonic() + self._patience, Backoff(0.1, 2.0)
        while True:
            try:
                return act()
            except EscrowError as problem:
                unsent = isinstance(problem, Unknown) and not problem.left
                if problem.meaning is Meaning.UNKNOWN and later is _NOT_NOW and not unsent:
                    raise
                if not (unsent or problem.code in later) or time.monotonic() >= until:
                    raise _Ended("failed", str(problem), problem.code) from problem
                if self._wait(max(backoff.failed(), getattr(problem, "retry_after", 0.0))):
                    raise _make_stopped() from problem

    def _wait(self, seconds: float) -> bool:
        """Wait; whether the run is to stop, which ends the waiting."""
        until = time.monotonic() + seconds
        while not self._should_stop():
            if (left := until - time.monotonic()) <= 0:
                return False
            time.sleep(min(left, _LOOK))
        return True

    def _report(self, state: str, reason: str, code: Code | None = None) -> Report:
        history = self._progress.history
        return Report(
            plan=self._plan.id,
            rows=self._plan.rows,
            next=history.next,
            outcomes=history.tally.by_outcome,
            again=history.again,
            in_doubt=0 if history.doubt is None else history.doubt[1],
            state=state,
            reason=reason,
            code=None if code is None else code.name,
            step=min(bisect_right(self._ends, history.next) + 1, len(self._ends)),
            steps=len(self._ends),
            handled=history.next - self._first,
            seconds=time.monotonic() - self._began,
        )


def _make_stopped() -> _Ended:
    return _Ended("stopped", "it was asked to stop")


def _now_us() -> int:
    return time.time_ns() // 1000
