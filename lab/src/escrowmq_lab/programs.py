"""Programs that examples and tests start, read and kill: each prints its progress in lines."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

STOP_SECONDS = 30.0


class Program:
    """A running program. Its standard error goes to the file ``log``; it ends when its standard input is closed."""

    def __init__(
        self, name: str, command: Sequence[str | Path], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self._lines: list[str] = []
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env={**os.environ, **(environment or {})},
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    @property
    def running(self) -> bool:
        """Return whether it is still running."""
        return self._process.poll() is None

    def heard(self, word: str) -> str | None:
        """Return the rest of the last line that begins with ``word``; None if there is none."""
        return next((line[len(word) + 1 :] for line in reversed(self._lines) if line.split()[0] == word), None)

    def say(self, line: str) -> None:
        """Write a line to its input; ignored if it has died."""
        with contextlib.suppress(BrokenPipeError):
            self._input.write(line + "\n")
            self._input.flush()

    def kill(self) -> None:
        """Send SIGKILL: no cleanup, no flush."""
        self._process.kill()
        self._reap()

    def stop(self) -> None:
        """Request it to end; kill it after :data:`STOP_SECONDS`."""
        self._close_input()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._reap()

    def _reap(self) -> None:
        self._process.wait()
        self._close_input()
        self._listener.join()
        self._output.close()

    def _close_input(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._input.close()

    def _listen(self) -> None:
        for line in self._output:
            if line.strip():
                self._lines.append(line.strip())
