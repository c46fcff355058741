"""Runs several processes of one command: restarts those that end, stops all on a signal, reloads on changed files."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from escrowmq.cli.failures import Exit
from escrowmq.platform.backoff import Backoff
from escrowmq.platform.signals import Signals, stop_signals

WORKER = "ESCROWMQ_WORKER"
"""Set in the environment of a process that stops when its standard input ends, as it does with its parent."""
POLL_SECONDS = 0.25
FRESH_SECONDS = 15.0
"""Age (s) of its health file at which a process is unhealthy: it is touched each second."""
FIRST_PAUSE, LAST_PAUSE = 0.5, 10.0
_SKIPPED = {"__pycache__", "node_modules", "site-packages"}

log = logging.getLogger("escrowmq.handlers")


class _Process:
    """One process, and when it may start again."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], health: Path) -> None:
        self._command = [*command, "--health", str(health)]
        self._environment, self.health = environment, health
        self._backoff = Backoff(FIRST_PAUSE, LAST_PAUSE)
        self.start()

    def start(self) -> None:
        self.health.unlink(missing_ok=True)
        self._was_healthy = False
        self._running: subprocess.Popen[bytes] | None = subprocess.Popen(
            self._command,
            env=self._environment,
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches the parent alone
        )

    def check(self) -> int | None:
        """Start a process again that has ended. Returns its exit code if that cannot help."""
        if self._running is None:
            if not self._backoff.left():
                self.start()
            return None
        status = self._running.poll()
        if status is None:
            if self.is_healthy:
                self._was_healthy = True
                self._backoff.worked()
            return None
        if status == Exit.USAGE and not self._was_healthy:
            return status  # another one would end in the same way
        pause = self._backoff.failed()
        log.warning("process %d ended with %d; another starts in %.1f s", self._running.pid, status, pause)
        self._close()
        return None

    @property
    def is_healthy(self) -> bool:
        try:
            return time.time() < self.health.stat().st_mtime + FRESH_SECONDS
        except OSError:
            return False

    def signal(self, number: signal.Signals) -> None:
        if self._running is not None:
            self._running.send_signal(number)

    def wait(self) -> None:
        if self._running is not None:
            self._running.wait()
            self._close()

    def _close(self) -> None:
        if self._running is not None and self._running.stdin is not None:
            self._running.stdin.close()
        self._running = None


class Processes:
    """``count`` processes of ``command``. ``folder`` holds their health files; ``watched`` is the folder whose Python
    files restart them when they change, None: no files."""

    def __init__(
        self, command: Sequence[str], count: int, folder: Path, watched: Path | None, environment: Mapping[str, str]
    ) -> None:
        self._command, self._count, self._folder, self._watched = command, count, folder, watched
        self._environment = {**os.environ, **environment, WORKER: "1"}
        self._processes: list[_Process] = []
        self._is_stopping = False

    def run(self) -> int:
        """Run until a signal; returns the exit code. A second signal kills what still runs."""
        seen = self._changes()
        with stop_signals(Signals(self._on_signal, self._kill)):
            self._start()
            while not self._is_stopping:
                time.sleep(POLL_SECONDS)
                statuses = [status for process in self._processes if (status := process.check()) is not None]
                if statuses and self._watched is None:
                    self._stop()
                    return statuses[0]
                if (now := self._changes()) != seen:
                    log.info("files changed: the processes start again")
                    seen = now
                    self._stop()
                    self._start()
            self._stop()
        return 0

    def health(self) -> dict[str, str]:
        """Return the status of all processes together."""
        sick = [number for number, process in enumerate(self._processes, 1) if not process.is_healthy]
        if self._processes and not sick:
            return {"status": "ok"}
        return {"status": "stopped", "reason": f"process {', '.join(map(str, sick))} of {self._count} is not healthy"}

    def _start(self) -> None:
        places = [self._folder / f"health-{number}" for number in range(self._count)]
        self._processes = [_Process(self._command, self._environment, place) for place in places]

    def _stop(self) -> None:
        for process in self._processes:
            process.signal(signal.SIGTERM)
        for process in self._processes:
            process.wait()

    def _on_signal(self) -> None:
        self._is_stopping = True

    def _kill(self) -> None:
        for process in self._processes:
            process.signal(signal.SIGKILL)

    def _changes(self) -> dict[str, int]:
        return {} if self._watched is None else dict(_python_files(self._watched))


def _python_files(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield the Python files below a folder with their times of change; not those of environments and caches."""
    for place, folders, files in os.walk(folder):
        own = [name for name in folders if name not in _SKIPPED and not name.startswith(".")]
        folders[:] = [name for name in own if not Path(place, name, "pyvenv.cfg").exists()]
        for name in files:
            if name.endswith(".py"):
                path = os.path.join(place, name)
                try:
                    yield path, os.stat(path).st_mtime_ns
                except OSError:
                    continue


def stop_with_parent(stop: threading.Event) -> None:
    """In a process of :class:`Processes`: set ``stop`` when the parent has ended, however it did."""
    if os.environ.get(WORKER) is None:
        return

    def wait() -> None:
        while os.read(0, 1024):
            pass
        stop.set()

    threading.Thread(target=wait, name="escrowmq-parent", daemon=True).start()
