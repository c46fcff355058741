"""The steps of a program under test, and its death before one of them.

A step is a request that changes something: a send, a prepare, a decision, an acknowledgement, an action of the admin
API, a statement that writes, a COMMIT, and what the program itself marks by :meth:`World.step`. To be killed before
step *k* is the same as to be killed after step *k - 1*, which took effect although its answer was lost. So a process is
only killed before steps.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from escrowmq.errors import Code, Unknown
from escrowmq.model import Act, DecidedBy, Outcome
from escrowmq.testing.buses import MemoryLink
from escrowmq.wire import Exchange
from escrowmq.wire.actions.table import ACTIONS

_SILENT = frozenset({"session.open", "groups.subscribe", "groups.join", "stats"})
"""Actions that are no steps: every process begins with them, and a repeat changes nothing."""


class ProcessKilled(SystemExit):
    """The end of a killed process. Not an Exception, so that no handler of the program survives it."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a process."""

    process: str
    text: str

    def __str__(self) -> str:
        return f"{self.process}: {self.text}"


@dataclass(frozen=True, slots=True)
class Kill:
    """The end of a process: after ``after`` steps of the run, before ``before``, which it did not reach."""

    after: int
    before: Step


class Timeline:
    """The steps of all processes of one run, in their order. ``kills``: the numbers of steps, from 1 and ascending,
    before which a process is killed. A number may be there twice: what is restarted is killed at once."""

    def __init__(self, kills: Sequence[int] = ()) -> None:
        self.steps: list[Step] = []
        self.killed: list[Kill] = []
        self._left = deque(kills)
        self._lock = threading.Lock()

    @property
    def is_complete(self) -> bool:
        """Return whether all kills have happened."""
        return not self._left

    def reach(self, process: Process, text: str) -> bool:
        """Record a step of a living process. Returns whether it is killed now instead."""
        step = Step(process.name, text)
        with self._lock:
            if process.is_dead:
                return False
            if self._left and len(self.steps) + 1 == self._left[0]:
                self._left.popleft()
                self.killed.append(Kill(len(self.steps), step))
                process.is_dead = True
            else:
                self.steps.append(step)
            return process.is_dead

    def describe(self) -> str:
        """Say between which steps processes were killed."""
        return ", then ".join(map(self._describe, self.killed))

    def _describe(self, kill: Kill) -> str:
        after = ""
        if kill.after:
            last = self.steps[kill.after - 1]
            after = f"after {last.text if last.process == kill.before.process else last} and "
        return f"{kill.before.process} was killed {after}before {kill.before.text}"

    def lines(self) -> list[str]:
        """Return all steps and kills, a line each."""
        ends = [f"   X {kill.before}, not reached" for kill in self.killed]
        lines = [f"{number:4} {step}" for number, step in enumerate(self.steps, 1)]
        for kill, line in zip(reversed(self.killed), reversed(ends), strict=True):
            lines.insert(kill.after, line)
        return lines


class Process:
    """One start of a program: an observer of its links (:class:`escrowmq.testing.buses.Observer`).

    ``thread`` runs the program and gets :class:`ProcessKilled`; calls of other threads get an error, because a thread
    that a library has started must not end by an exception. On an event loop, ``on_death`` cancels the program.
    """

    def __init__(self, name: str, timeline: Timeline) -> None:
        self.name = name
        self.timeline = timeline
        self.is_dead = False
        self.thread: int | None = threading.get_ident()
        self.links: list[MemoryLink] = []
        self.on_death: Callable[[], object] = lambda: None

    def step(self, text: str) -> None:
        """Reach a step, unless the process is dead or killed now; then raise."""
        if self.timeline.reach(self, text):
            for link in self.links:
                link.close()
        self.check_alive()

    def check_alive(self) -> None:
        """Raise if the process is dead: ProcessKilled in its own thread, else ConnectionAbortedError."""
        if self.is_dead:
            self.on_death()
            if threading.get_ident() == self.thread:
                raise ProcessKilled(f"{self.name} was killed")
            raise ConnectionAbortedError(f"{self.name} was killed")

    def before_call(self, kind: Exchange, batch: pa.RecordBatch, options: Mapping[str, Any]) -> None:
        """See :meth:`escrowmq.testing.buses.Observer.before_call`."""
        with _as_answer():
            if kind not in _TEXTS:
                self.check_alive()
                return
            by_check = options.get("by") == DecidedBy.CHECK
            self.step(f"the checker's answer {_decision(batch)}" if by_check else _TEXTS[kind](batch))

    def before_action(self, name: str) -> None:
        """See :meth:`escrowmq.testing.buses.Observer.before_action`."""
        with _as_answer():
            if ACTIONS[name].reads_only or name in _SILENT:
                self.check_alive()
            else:
                self.step(name)


@contextmanager
def _as_answer() -> Iterator[None]:
    """Context manager: make the refusal of a dead process the answer of the call."""
    try:
        yield
    except ConnectionAbortedError as problem:
        raise Unknown(Code.CLOSED, str(problem)) from None


def _messages(verb: str) -> Callable[[pa.RecordBatch], str]:
    def text(batch: pa.RecordBatch) -> str:
        topics, keys = (dict.fromkeys(batch.column(name).to_pylist()) for name in ("topic", "key"))
        shown = ", ".join(key for key in list(keys)[:_SHOWN] if key is not None)
        several = f" of {_count(batch.num_rows)}" if batch.num_rows > 1 else ""
        return f"{verb}{several} to {', '.join(topics)}" + (f" ({shown})" if shown else "")

    return text


def _decision(batch: pa.RecordBatch) -> str:
    outcomes = dict.fromkeys(Outcome(value).name for value in batch.column("outcome").to_pylist())
    return f"{', '.join(outcomes)} to the broker"


def _settling(batch: pa.RecordBatch) -> str:
    acts = dict.fromkeys(Act(value).name.lower() for value in batch.column("act").to_pylist())
    return f"{', '.join(acts)} of {_count(sum(batch.column('count').to_pylist()))}"


def _count(messages: int) -> str:
    return f"{messages} message{'s' * (messages != 1)}"


_SHOWN = 3  # keys named in one step
_TEXTS: dict[Exchange, Callable[[pa.RecordBatch], str]] = {
    Exchange.SEND: _messages("send"),
    Exchange.PREPARE: _messages("prepare"),
    Exchange.END: _decision,
    Exchange.SETTLE: _settling,
}
