"""Programs that examples and tests start, listen to, and kill: each says what it has done, a line at a time."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

STOP_SECONDS = 30.0


class Program:
    """A running program. What it logs on standard error is added to the file ``log``; it ends when its standard input
    does."""

    def __init__(
        self, name: str, command: Sequence[str | Path], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self._said: list[str] = []
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
        self._mouth, self._ear = self._process.stdin, self._process.stdout
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def heard(self, word: str) -> str | None:
        """Return the rest of the last line that begins with ``word``; None if there is none."""
        return next((line[len(word) + 1 :] for line in reversed(self._said) if line.split()[0] == word), None)

    def say(self, line: str) -> None:
        """Tell it something; one that has died hears nothing, and that is no error."""
        with contextlib.suppress(BrokenPipeError):
            self._mouth.write(line + "\n")
            self._mouth.flush()

    def kill(self) -> None:
        """SIGKILL: no cleanup, no flush."""
        self._process.kill()
        self._end()

    def stop(self) -> None:
        """Let it end by itself; kill it if it has not after :data:`STOP_SECONDS`."""
        self._hang_up()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._end()

    def _end(self) -> None:
        self._process.wait()
        self._hang_up()
        self._listener.join()
        self._ear.close()

    def _hang_up(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._mouth.close()

    def _listen(self) -> None:
        for line in self._ear:
            if line.strip():
                self._said.append(line.strip())
