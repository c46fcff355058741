"""The example's hold on its processes: starts them, hears them, kills them, starts them again."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from escrowmq_lab.programs import Program

PROGRAM = Path(__file__).with_name("compensated_process.py")
PATIENCE = 180.0
ROLES = ("shop", "relay", "cart-1", "cart-2", "keys", "scheduler-1", "scheduler-2")


class Staff:
    """All processes of one run but the servers. A context manager: leaving stops those that still run."""

    def __init__(self, config: dict[str, Any], folder: Path) -> None:
        self.killed: list[str] = []
        self._config = config
        self._folder = folder
        self._processes: dict[str, Program] = {}
        self._wanted = 0

    def __enter__(self) -> "Staff":
        try:
            for name in ROLES:
                self._start(name)
            self.wait_until(lambda: all(process.heard("ready") is not None for process in self._processes.values()))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in reversed(self._processes):
            self._processes[name].stop()

    def order(self, end: int) -> None:
        """Ask the shop for all orders below ``end`` that were not placed yet."""
        self._wanted = end
        self._processes["shop"].say(str(end))

    @property
    def placed(self) -> int:
        """Orders that the shop has dealt with."""
        return int(self._processes["shop"].heard("placed") or 0)

    def kill(self, name: str) -> None:
        """Kill one with SIGKILL; another takes its place at once."""
        self._processes[name].kill()
        self.killed.append(name)
        self._start(name)
        if name == "shop":
            self.order(self._wanted)

    def wait_until(
        self, done: Callable[[], bool], missing: Callable[[], str] = lambda: "somebody is not ready"
    ) -> None:
        """Raises TimeoutError that says what is ``missing`` after a while, RuntimeError if a process has ended by
        itself."""
        deadline = time.monotonic() + PATIENCE
        while not done():
            for process in self._processes.values():
                if not process.running:
                    end = (self._folder / f"{process.name}.log").read_text().splitlines()[-12:]
                    raise RuntimeError("\n".join([f"{process.name} ended by itself; {process.name}.log ends:", *end]))
            if time.monotonic() > deadline:
                raise TimeoutError(f"no end in {PATIENCE:.0f} s: {missing()}")
            time.sleep(0.05)

    def _start(self, name: str) -> None:
        command = [sys.executable, PROGRAM, name, json.dumps(self._config)]
        self._processes[name] = Program(name, command, self._folder / f"{name}.log")
