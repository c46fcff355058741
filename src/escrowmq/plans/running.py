"""One run of a plan: batch by batch in the order of the set, each recorded before it is sent and after its response.

A batch without a recorded response is first looked up in the brokers' records of acts: they show the results of an
earlier run, or of this one after a lost response; only rows that certainly were not done are done now.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Collection
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from escrowmq.errors import AWAY, Code, EscrowError, Meaning, Misuse, Unknown
from escrowmq.plans import frozen
from escrowmq.plans.frozen import FrozenSet
from escrowmq.plans.outcomes import Outcome, Outcomes, count_failures
from escrowmq.plans.plan import Plan
from escrowmq.plans.progress import Progress
from escrowmq.plans.ramp import Pace, Pacing, Ramp, StopAfter
from escrowmq.plans.subjects.seam import Subject
from escrowmq.platform.backoff import Backoff
from escrowmq.platform.disk import Disk
from escrowmq.platform.failpoints import reach

T = TypeVar("T")

PATIENCE = 30.0
"""Default time (s) to wait for an unavailable broker."""
_POLL_INTERVAL = 0.1
"""Poll interval (s) for a stop request while waiting."""
_NOT_NOW = frozenset({Code.BROKER_AWAY, Code.DISK_FULL, Code.OUT_OF_RESOURCES, Code.QUEUE_FULL})
"""Errors after which certainly nothing was done, and that may be temporary."""
_LATER = AWAY | _NOT_NOW
"""Errors of queries that may be temporary."""


@dataclass(frozen=True, slots=True)
class Report:
    """Progress of a run. ``state``: running, finished, stopped, failed; ``code``: the error that ended a failed one."""

    plan: str
    rows: int
    next: int
    """Rows processed by this run and earlier ones."""
    outcomes: dict[str, int]
    """Counts of all these rows."""
    again: int
    in_doubt: int
    state: str
    reason: str
    code: str | None
    step: int
    steps: int
    handled: int
    """Rows processed by this run."""
    seconds: float

    @property
    def failures(self) -> int:
        """Rows that were done neither by the plan nor before, plus rows that failed again after they were done."""
        return self.again + count_failures(self.outcomes)

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**asdict(self), "failures": self.failures}


class _Ended(Exception):
    """Ends the run before the end of the set."""

    def __init__(self, state: str, reason: str, code: Code | None = None) -> None:
        super().__init__(reason)
        self.state, self.reason, self.code = state, reason, code


class Run:
    """One run, by a process that holds the plan's lock."""

    def __init__(
        self,
        plan: Plan,
        rows: FrozenSet,
        disk: Disk,
        subject: Subject,
        pacing: Pacing,
        *,
        on_progress: Callable[[Report], None],
        should_stop: Callable[[], bool],
    ) -> None:
        limit, batch = pacing.get("stop_after"), pacing.get("batch", frozen.BATCH_ROWS)
        if not 1 <= batch <= frozen.BATCH_ROWS:
            raise Misuse(Code.BAD_ARGUMENT, f"{batch!r} rows per batch: allowed are 1 to {frozen.BATCH_ROWS}")
        self._plan, self._rows, self._disk, self._subject = plan, rows, disk, subject
        self._ramp, self._rate = pacing.get("ramp") or Ramp(), pacing.get("rate")
        self._pace = Pace(self._rate, self._wait)
        self._stop_after = limit if isinstance(limit, StopAfter) else StopAfter.parse(limit)
        self._batch, self._patience = min(batch, subject.most), pacing.get("patience", PATIENCE)
        self._on_progress, self._should_stop = on_progress, should_stop
        self._began = time.monotonic()
        self._ends = self._ramp.ends(plan.rows)
        self._marks: dict[str, int] = {}

    def run(self, by: str, why: str | None) -> Report:
        """Run until the set is complete, or something ends the run."""
        with closing(Progress(self._disk, self._plan.rows)) as self._progress:
            self._history = self._progress.history
            self._first, self._failed_before = self._history.next, self._history.failures
            if self._first == self._plan.rows:
                return self._report("finished", "every row was processed before")
            state, reason, code = "finished", "", None
            try:
                self._start(by, why)
                self._resolve()
                self._run_steps()
            except _Ended as ending:
                state, reason, code = ending.state, ending.reason, ending.code
            self._progress.append({"end": state, "reason": reason, "at_us": _now_us()})
            return self._report(state, reason, code)

    def _start(self, by: str, why: str | None) -> None:
        """Record the start. The marks are those of the run that left a batch in doubt, until that is resolved."""
        self._marks = self._retry(self._subject.mark)
        history = self._history
        if history.doubt is not None:
            self._marks = dict(history.runs[-1]["marks"])
        pacing = {"ramp": list(self._ramp.shares), "pause": self._ramp.pause, "rate": self._rate}
        start = {"run": len(history.runs) + 1, "at_us": _now_us(), "by": by, "why": why}
        self._progress.append({**start, **pacing, "marks": self._marks})

    # Steps

    def _run_steps(self) -> None:
        history = self._history
        for end in self._ends:
            first = history.next
            while history.next < end:
                self._apply(self._rows.batch_from(history.next, self._pace.most(min(self._batch, end - history.next))))
            if first < end < self._plan.rows:
                self._pause(first, end)

    def _pause(self, first: int, end: int) -> None:
        """Wait between steps, then check whether done rows have failed again."""
        if self._wait(self._ramp.pause):
            raise _stop_ending()
        batches = self._rows.batches(first, end)  # one after the other: a step may be half of the set
        if again := sum(self._retry(partial(self._subject.count_failed_again, batch)) for _, batch in batches):
            self._progress.append({"again": again})
            self._check_failures()

    def _apply(self, batch: pa.RecordBatch) -> None:
        """Apply the act to one batch."""
        history = self._history
        self._progress.record_begin(history.next, batch.num_rows)
        try:
            outcomes = self._retry(partial(self._subject.do, batch, self._reason()), _NOT_NOW)
        except _Ended as ending:  # certainly not applied
            self._progress.append({"undone": history.next, "reason": ending.reason})
            raise
        except EscrowError:  # unknown whether applied
            self._resolve()
        else:
            reach("plans.answered")
            self._complete(outcomes)

    def _resolve(self) -> None:
        """Resolve the batch in doubt, and apply the act to those of its rows that were not done."""
        history = self._history
        backoff = Backoff(0.1, 2.0)
        until = time.monotonic() + self._patience
        while history.doubt is not None:
            batch = self._rows.batch_from(*history.doubt)
            found = self._retry(partial(self._subject.find_outcomes, batch, self._prefix(), self._marks))
            undone = np.flatnonzero(found == Outcome.NONE)
            try:
                if len(undone):
                    now = self._retry(partial(self._subject.do, batch.take(pa.array(undone)), self._reason()), _NOT_NOW)
                    found = found.copy()
                    found[undone] = now
                    if (now == Outcome.ALREADY).any():  # possibly by a delayed request of this run
                        late = self._retry(partial(self._subject.find_outcomes, batch, self._prefix(), self._marks))
                        found[late == Outcome.DONE] = Outcome.DONE
                self._complete(found)
            except EscrowError as problem:
                if problem.meaning is not Meaning.UNKNOWN or time.monotonic() > until:
                    raise _Ended("failed", str(problem), problem.code) from problem
                if self._wait(backoff.failed()):
                    raise _stop_ending() from problem

    def _complete(self, outcomes: Outcomes) -> None:
        history = self._history
        self._progress.record_done(history.next, outcomes, _now_us())
        self._on_progress(self._report("running", ""))
        self._check_failures()
        if self._pace.wait_for(len(outcomes)) and history.next < self._plan.rows:
            raise _stop_ending()

    def _check_failures(self) -> None:
        """End the run if too many rows have failed."""
        history = self._history
        reason = self._stop_after.why(history.failures - self._failed_before, history.next - self._first)
        if reason is not None:
            raise _Ended("stopped", reason)

    def _prefix(self) -> str:
        """Return the prefix of the reasons for acts on the current batch; it identifies the act in the record."""
        first, rows = self._history.doubt or (0, 0)
        return f"plan {self._plan.id} rows {first}-{first + rows - 1} "

    def _reason(self) -> str:
        why = f": {self._plan.why}" if self._plan.why else ""
        return f"{self._prefix()}of {self._plan.rows}, digest {self._plan.digest[:16]}{why}"

    # Retries

    def _retry(self, act: Callable[[], T], later: Collection[Code] = _LATER) -> T:
        """Call ``act``, with retries of temporary errors. Raises _Ended on a timeout or a rejection, and the error
        itself if it is unknown whether something was done."""
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
                    raise _stop_ending() from problem

    def _wait(self, seconds: float) -> bool:
        """Wait. Returns True early if the run should stop."""
        until = time.monotonic() + seconds
        while not self._should_stop():
            if (left := until - time.monotonic()) <= 0:
                return False
            time.sleep(min(left, _POLL_INTERVAL))
        return True

    def _report(self, state: str, reason: str, code: Code | None = None) -> Report:
        history = self._history
        return Report(
            plan=self._plan.id,
            rows=self._plan.rows,
            next=history.next,
            outcomes=history.outcomes,
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


def _stop_ending() -> _Ended:
    return _Ended("stopped", "a stop was requested")


def _now_us() -> int:
    return time.time_ns() // 1000
