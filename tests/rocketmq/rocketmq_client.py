"""A running program of clients/, as a test talks to it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
from pathlib import Path
from queue import Queue
from typing import Any

PATIENCE = 120.0


class Client:
    """A program over a published client."""

    language = ""

    def __init__(self, command: list[str], home: Path, *words: str):
        environment = {"HOME": str(home), "PATH": os.environ["PATH"]}
        with (home / "stderr").open("w") as log:
            self.process = subprocess.Popen(
                [*command, *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
                cwd=home,
            )
        self._answers: Queue[dict[str, Any]] = Queue()
        self.checks: Queue[str] = Queue()
        self.pushed: Queue[dict[str, Any]] = Queue()
        threading.Thread(target=self._read, daemon=True).start()
        assert self.answer() == {"ready": True}

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if not line.startswith("{"):
                continue  # some clients log to standard output
            answer = json.loads(line)
            if "check" in answer:
                self.checks.put(answer["check"])
            elif "pushed" in answer:
                self.pushed.put(answer["pushed"])
            else:
                self._answers.put(answer)
        self._answers.put({"error": "the program ended"})

    def answer(self) -> dict[str, Any]:
        """Return the next answer, which may be an error."""
        return self._answers.get(timeout=PATIENCE)

    def request(self, do: str, **given: Any) -> None:
        """Make a request without waiting for its answer: the program works off what it has, in order."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **given}) + "\n")
        self.process.stdin.flush()

    def ask(self, do: str, **given: Any) -> dict[str, Any]:
        """Make a request. Fails the test if the client reports an error."""
        self.request(do, **given)
        answer = self.answer()
        assert "error" not in answer, answer
        return answer

    def insist(self, do: str, **given: Any) -> dict[str, Any]:
        """Repeat a request until the client has no error to report: its server is restarting."""
        while True:
            try:
                return self.ask(do, **given)
            except AssertionError:
                assert self.process.poll() is None

    def receive(self, count: int, invisible: int = 30) -> list[dict[str, Any]]:
        """Receive until ``count`` messages came, and acknowledge them."""
        found: list[dict[str, Any]] = []
        while len(found) < count:
            messages = self.insist("receive", max=16, invisible=invisible)["messages"]
            if messages:
                self.ask("ack")
            found += messages
        return found

    def is_empty(self) -> bool:
        """Return whether one receive finds nothing."""
        return not self.ask("receive", max=16, invisible=30)["messages"]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                assert pipe is not None
                pipe.close()
