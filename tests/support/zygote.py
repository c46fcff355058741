"""A process that has imported everything and forks children in milliseconds: real processes, really killed, many in a
test run. To start Python and import the product takes each of them half a second of processor time instead.

``main`` runs in the zygote; :class:`Zygote` is the test's end of it. Commands and answers are JSON lines.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PATIENCE = 180.0


class Zygote:
    """Starts children that run a role: a function of the module in the file ``roles``. From any thread."""

    def __init__(self, roles: Path) -> None:
        paths = [str(Path(__file__).parent), str(roles.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
        environment.pop("ESCROWMQ_FAILPOINT", None)
        command = [sys.executable, "-c", f"import zygote; zygote.main({roles.stem!r})"]
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def _ask(self, **command: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())

    def start(self, role: str, failpoint: str | None = None, *, log: Path | None = None, **args: Any) -> int:
        """The pid of a child that runs ``role(**args)``. What it prints goes to the end of the file ``log``."""
        return int(self._ask(role=role, failpoint=failpoint, log=None if log is None else str(log), args=args))

    def poll(self, pid: int) -> int | None:
        """The end of a child: its exit code, or minus the signal that killed it; None while it runs. To be asked no
        more once it has ended."""
        code: int | None = self._ask(wait=pid)
        return code

    def wait(self, pid: int, patience: float = PATIENCE) -> int:
        """The same, when it has ended."""
        deadline = time.monotonic() + patience
        while (code := self.poll(pid)) is None:
            assert time.monotonic() < deadline, "a child does not end"
            time.sleep(0.005)
        return code

    def run(self, role: str, failpoint: str | None = None, **args: Any) -> int:
        """Start and wait."""
        return self.wait(self.start(role, failpoint, **args))

    def kill(self, pid: int) -> None:
        """Kill a child and wait until it is gone."""
        os.kill(pid, signal.SIGKILL)
        self.wait(pid)

    def close(self) -> None:
        """End the zygote (children that still run are killed)."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE)
        self._process.stdout.close()


def main(roles: str) -> None:
    """Read commands until the input ends."""
    module = importlib.import_module(roles)
    alive: set[int] = set()
    for line in sys.stdin:
        command = json.loads(line)
        if "wait" in command:
            pid, status = os.waitpid(command["wait"], os.WNOHANG)
            alive.discard(pid)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if not answer:
                _child(getattr(module, command["role"]), command)
            alive.add(answer)
        print(json.dumps(answer), flush=True)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _child(role: Callable[..., None], command: dict[str, Any]) -> None:
    from escrowmq.platform import failpoints

    code = 1
    try:
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        if command["log"] is not None:
            os.dup2(os.open(command["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), 2)
        os.dup2(2, 1)  # what a child prints is not an answer of ours
        if command["failpoint"]:
            os.environ[failpoints.VARIABLE] = command["failpoint"]
            failpoints.arm(failpoints.parse(os.environ[failpoints.VARIABLE]))  # as at import, which was before the fork
        role(**command["args"])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
