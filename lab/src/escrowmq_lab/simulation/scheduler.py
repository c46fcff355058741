"""A scheduler that runs the product's threads as tasks of one thread: one at a time, in an order drawn from a seed, in
virtual time.

Rules:

1. A task runs until it waits: for a lock, a condition, a time, bytes. Then the scheduler draws the next runnable task.
2. Time passes only when no task can run: then it jumps to the next due event. Each turn of a task takes a little time
   too, so that polling until a deadline reaches the deadline.
3. A task belongs to a node. When its node dies, it never runs again: nothing is finished or cleaned up, as after ``kill
   -9``.
4. All choices come from one generator, so a run with the same seed is the same run.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from random import Random
from typing import Any

import greenlet

TURN_NS = 1_000
"""Duration of one turn of a task."""


class Stuck(Exception):
    """A run took more turns than allowed: something never ends."""


class Node:
    """A unit that dies as a whole: a broker's process, or a client's."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.dead = False


class Task:
    """One thread of the product. ``problem``: the exception that ended it."""

    __slots__ = ("done", "greenlet", "ident", "name", "node", "parked", "problem", "thread", "token", "woken")

    def __init__(self, ident: int, name: str, node: Node) -> None:
        self.ident = ident
        self.name = name
        self.node = node
        self.parked = False
        self.woken = False
        self.token = 0
        self.done = False
        self.problem: BaseException | None = None
        self.thread: Any = None
        self.greenlet: Any = None  # set when it is created


class Scheduler:
    """One run of at most ``most_turns``. ``preemption``: probability that a task loses its turn at a lock."""

    def __init__(self, random: Random, *, preemption: float = 0.0, most_turns: int = 3_000_000) -> None:
        self.random = random
        self.now_ns = 0
        self.turns = 0
        self.current: Task | None = None
        self.over = False
        self.died: Callable[[Task], None] = lambda task: None
        """Called with a task that ended by an exception."""
        self._preemption = preemption
        self._most_turns = most_turns
        self._ready: list[Task] = []
        self._due: list[tuple[int, int, Task | None, int, Callable[[], None] | None]] = []
        self._order = 0
        self._tasks: dict[int, Task] = {}
        self._hub = greenlet.getcurrent()

    # Called by tasks

    @property
    def seconds(self) -> float:
        """Virtual time since the start."""
        return self.now_ns / 1e9

    def spawn(self, node: Node, call: Callable[[], None], name: str) -> Task:
        """Create a runnable task."""
        self._order += 1
        task = Task(self._order, name, node)

        def run() -> None:
            try:
                call()
            except greenlet.GreenletExit:
                raise
            except BaseException as problem:
                task.problem = problem
                if not self.over:
                    self.died(task)
            finally:
                task.done = True
                self._tasks.pop(task.ident, None)

        task.greenlet = greenlet.greenlet(run, self._hub)
        self._tasks[task.ident] = task
        self._ready.append(task)
        return task

    def park(self, seconds: float | None = None) -> bool:
        """Wait until another task wakes this one, or for ``seconds``. Returns whether it was woken."""
        task = self.current
        if task is None or self.over:
            raise greenlet.GreenletExit
        task.token += 1
        task.parked, task.woken = True, False
        if seconds is not None:
            self._order += 1
            due = self.now_ns + max(round(seconds * 1e9), 0)
            heapq.heappush(self._due, (due, self._order, task, task.token, None))
        self._hub.switch()
        if self.over:
            raise greenlet.GreenletExit
        return task.woken

    def wake(self, task: Task) -> None:
        """Resume a parked task."""
        if task.parked:
            task.parked, task.woken = False, True
            self._ready.append(task)

    def give_way(self) -> None:
        """Let other tasks run first, with the probability of preemption."""
        if self._preemption and self.current is not None and self._ready and self.random.random() < self._preemption:
            self._ready.append(self.current)
            self._hub.switch()
            if self.over:
                raise greenlet.GreenletExit

    def die(self) -> None:
        """End the current task, whose node has died in the middle of its work."""
        while True:
            self._hub.switch()
            raise greenlet.GreenletExit

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call a function later that neither waits nor raises."""
        self._order += 1
        heapq.heappush(self._due, (self.now_ns + max(round(seconds * 1e9), 0), self._order, None, 0, call))

    # The hub

    def run(self, until: Callable[[], bool], limit: float | None = None) -> bool:
        """Run until the condition holds, checked whenever no task can run. Returns False if no work remains, or the
        virtual time ``limit`` is over. Raises Stuck."""
        limit_ns = None if limit is None else round(limit * 1e9)
        while True:
            while self._ready:
                self._turn()
            if until():
                return True
            if not self._advance(limit_ns):
                return False

    def _turn(self) -> None:
        ready = self._ready
        at = self.random.randrange(len(ready)) if len(ready) > 1 else 0
        task, ready[at] = ready[at], ready[-1]
        ready.pop()
        if task.node.dead or task.done:
            return
        self.turns += 1
        if self.turns > self._most_turns:
            raise Stuck(f"{self.turns} turns, {self.seconds:.1f} s: the last was of {task.name} at {task.node.name}")
        self.now_ns += TURN_NS
        self.current = task
        task.greenlet.switch()
        self.current = None

    def _advance(self, limit_ns: int | None) -> bool:
        """Advance to the next due event."""
        due = self._due
        while due:
            at, _, task, token, call = due[0]
            if task is not None and (not task.parked or task.token != token or task.node.dead):
                heapq.heappop(due)
                continue
            if limit_ns is not None and at > limit_ns:
                self.now_ns = max(self.now_ns, limit_ns)
                return False
            heapq.heappop(due)
            self.now_ns = max(self.now_ns, at)
            if task is not None:
                task.parked = False
                self._ready.append(task)
            elif call is not None:
                call()
            return True
        return False

    def where(self) -> list[str]:
        """Return the stack of each task, innermost first, to diagnose a run without progress."""
        lines = []
        for task in self._tasks.values():
            frame = task.greenlet.gr_frame
            places: list[str] = []
            while frame is not None and len(places) < 8:
                file = frame.f_code.co_filename.rpartition("escrowmq/")[2]
                if not file.startswith("simulation/"):
                    places.append(f"{file}:{frame.f_lineno}")
                frame = frame.f_back
            if not task.node.dead:
                lines.append(f"{task.node.name} {task.name}: {' < '.join(places)}")
        return lines

    def end(self) -> None:
        """End all remaining tasks."""
        self.over = True
        self._due.clear()
        self._ready.clear()
        for task in list(self._tasks.values()):
            for _ in range(100):  # a task may wait again during its cleanup
                if task.done:
                    break
                task.greenlet.throw(greenlet.GreenletExit)
        self._tasks.clear()
