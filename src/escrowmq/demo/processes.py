"""The processes of the demo: starts them, reads their events, stops them. Only those started here."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from escrowmq.platform.clock import now_us

STOP_SECONDS = 20.0
"""Time (s) for a process to stop on request before it is killed."""


@dataclass(frozen=True, slots=True)
class ChildEvent:
    """One event of a process; the last one is of the kind "ended", with the exit ``code``."""

    child: Child
    at_us: int
    kind: str
    details: dict[str, Any]


class Child:
    """One process. Its events go to the queue ``events``, its log to ``nodes/NAME.log`` of the run folder."""

    def __init__(
        self, name: str, role: str, config: dict[str, Any], folder: Path, events: SimpleQueue[ChildEvent]
    ) -> None:
        self.name = name
        self._events = events
        path = folder / "nodes" / f"{name}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(config))
        with (folder / "nodes" / f"{name}.log").open("ab") as log:
            command = [sys.executable, "-m", "escrowmq.demo.node", role, str(path)]
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True)
        self._listener = threading.Thread(target=self._listen, name=f"events-{name}", daemon=True)
        self._listener.start()

    def kill(self) -> None:
        """Kill it with ``kill -9``, and wait for its end."""
        self._process.kill()
        self._reap()

    def stop(self) -> None:
        """Request it to stop, by closing its input; kill it if it does not."""
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

    def _close_input(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                try:
                    details = json.loads(line)
                except ValueError:  # the last line of a killed process may be incomplete
                    continue
                self._events.put(ChildEvent(self, now_us(), details.pop("event"), details))
        self._events.put(ChildEvent(self, now_us(), "ended", {"code": self._process.wait()}))


class Diary:
    """The file ``events.jsonl`` of the run folder."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def note(self, event: str, who: str, at_us: int | None = None, **details: Any) -> None:
        """Write one event."""
        line = {"at_us": at_us or now_us(), "event": event, "who": who, **details}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()
