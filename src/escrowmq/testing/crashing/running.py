"""One run of all programs in a world of its own, with at most one crash, until nothing is left to do."""

from __future__ import annotations

import asyncio
import inspect
import tempfile
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

from escrowmq.testing.buses import MemoryBroker, MemoryBus
from escrowmq.testing.crashing.process import Process, ProcessKilled, Timeline
from escrowmq.testing.crashing.world import World

Program = Callable[[World], object]
"""A function, or a coroutine function, that is one process from its start to its end."""

ROUNDS = 20
"""How often the programs are started again, at most, until nothing is left to do."""


class Running:
    """One start of a program, from its first step until its process ends."""

    def __init__(self, process: Process, world: World) -> None:
        self.process, self.world = process, world
        self._loop: _LoopThread | None = None

    def run(self, program: Program) -> BaseException | None:
        """Run the program until it returns or is killed. Returns the exception of a living one."""
        try:
            result = program(self.world)
            if inspect.iscoroutine(result):  # not begun yet
                self._loop = _LoopThread()
                self._loop.run(result, self.process)
            self.process.step("its end")
        except (Exception, ProcessKilled, CancelledError) as problem:
            return None if self.process.is_dead else problem
        return None

    def end(self) -> None:
        """Close what the process has open. Of a dead process, nothing takes effect."""
        self.process.thread = None  # the program is over: what is closed now gets errors, and goes on closing
        self.world._close()
        if self._loop is not None:
            self._loop.close(self.world._aclose())


class _LoopThread:
    """An event loop on a thread of its own, so that checkers answer while the test moves the clock."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="escrowmq-program", daemon=True)
        self._thread.start()

    def run(self, program: Coroutine[Any, Any, object], process: Process) -> None:
        """Run a program to its end, or until its process is killed. Raises its exception."""
        process.thread = None  # calls are made by the loop, not by the program's task
        result: Future[object] = asyncio.run_coroutine_threadsafe(program, self._loop)
        process.on_death = result.cancel
        result.result()

    def close(self, last: Coroutine[Any, Any, object]) -> None:
        """Await ``last``, and end the loop."""
        asyncio.run_coroutine_threadsafe(last, self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Trial:
    """One run of all programs. ``problem``: an exception that a living program raised, with the program's name."""

    def __init__(
        self,
        programs: Sequence[Program],
        setup: Callable[[World], object] | None,
        wait: float,
        kills: Sequence[int] = (),
    ) -> None:
        self.timeline = Timeline(kills)
        self.problem: tuple[str, BaseException] | None = None
        self._programs, self._wait = programs, wait
        self._setup = setup
        self._starts = [0] * len(programs)
        self._folder = tempfile.TemporaryDirectory(prefix="escrowmq-world-")
        self.broker = MemoryBroker()

    def __enter__(self) -> Trial:
        return self

    def __exit__(self, *_: object) -> None:
        self.broker.close()
        self._folder.cleanup()

    def ask(self, question: Callable[[World], Any]) -> Any:
        """Call a function with a world that has no process."""
        world = World(self.broker, Path(self._folder.name))
        try:
            return question(world)
        finally:
            world._close()

    def run(self) -> None:
        """Set up, and start the programs, again and again, until nothing is left to do."""
        if self._setup is not None:
            self.ask(self._setup)
        for _ in range(ROUNDS):
            before = len(self.timeline.killed)
            self._run_round()
            if self.problem or (len(self.timeline.killed) == before and self.ask(_is_quiet)):
                return

    def _run_round(self) -> None:
        """Run each program to its end, one after another; start one again that is killed. Then let time pass while all
        are there, and end them."""
        open_: list[Running] = []
        try:
            for number in range(len(self._programs)):
                while not self._start(number, open_) and self.problem is None:
                    pass
                if self.problem is not None:
                    return
            self.broker.advance(self._wait)
        finally:
            for running in open_:
                running.end()

    def _start(self, number: int, open_: list[Running]) -> bool:
        """Start a program. Returns whether it came to its end."""
        program = self._programs[number]
        name = getattr(program, "__name__", repr(program))
        self._starts[number] += 1
        process = Process(name, self.timeline)
        world = World(self.broker, Path(self._folder.name), process, self._starts[number])
        running = Running(process, world)
        open_.append(running)
        if (problem := running.run(program)) is not None:
            self.problem = name, problem
        if process.is_dead:
            open_.remove(running)
            running.end()
        return not process.is_dead


def _is_quiet(world: World) -> bool:
    """Return whether no transaction is undecided, and no message waits for a consumer group."""
    bus: MemoryBus = world.bus()
    queues = [queue for group in bus.admin.groups() for queue in group["queues"]]
    return not (
        bus.admin.transactions(state="open", limit=1)
        or any(queue["waiting"] or queue["leased"] or queue["retrying"] for queue in queues)
    )
