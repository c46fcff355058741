"""The example's hold on its processes: starts them, hears them, kills them, starts them again."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).with_name("compensated_process.py")
PATIENCE = 180.0
ROLES = ("shop", "relay", "cart-1", "cart-2", "keys", "scheduler-1", "scheduler-2")


class Process:
    """One process; what it logs goes into ``FOLDER/NAME.log``. It ends when its standard input does."""

    def __init__(self, name: str, config: dict[str, Any], folder: Path) -> None:
        self.name = name
        self._said: list[str] = []
        with (folder / f"{name}.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, PROGRAM, name, json.dumps(config)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
        self._ears = threading.Thread(target=self._listen, daemon=True)
        self._ears.start()

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def heard(self, word: str) -> str | None:
        """The rest of the last line that begins with ``word``; None if there is none."""
        return next((line[len(word) + 1 :] for line in reversed(self._said) if line.split()[0] == word), None)

    def say(self, line: str) -> None:
        """Tell it something; one that has died will be told again after its restart."""
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass

    def kill(self) -> None:
        """SIGKILL: no cleanup, no flush."""
        self._process.kill()
        self._end()

    def stop(self) -> None:
        """Let it end by itself; kill it if it does not."""
        self._hang_up()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._end()

    def _end(self) -> None:
        self._process.wait()
        self._hang_up()
        self._ears.join()
        self._process.stdout.close()

    def _hang_up(self) -> None:
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass

    def _listen(self) -> None:
        for line in self._process.stdout:
            if line.strip():
                self._said.append(line.strip())


class Staff:
    """All processes of one run but the servers. A context manager: leaving stops those that still run."""

    def __init__(self, config: dict[str, Any], folder: Path) -> None:
        self.killed: list[str] = []
        self._config = config
        self._folder = folder
        self._processes: dict[str, Process] = {}
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
        """Raises TimeoutError that says what is ``missing`` after a while, RuntimeError if a process has ended by itself."""
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
        self._processes[name] = Process(name, self._config, self._folder)
