"""``events.jsonl``: the events of a run, one JSON object per line, written by the program that drove it.

Every event has ``at_us`` (microseconds since 1970) and ``event``:

========  ================================================================
killed    ``who`` was ended with SIGKILL; ``where`` describes the moment
started   ``who`` was started (again)
asked     ``who`` received a check-back; ``answer`` is its answer
leads     ``who`` leads the shard from now on; ``epoch``, and ``seconds`` since the last leader was killed
answered  the first order that began after that kill is placed; ``seconds`` since it
progress  ``who`` has processed ``number`` of its units so far
========  ================================================================

Other events are ignored.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from escrowmq.errors import Code, Misuse


@dataclass(frozen=True, slots=True)
class Events:
    """A run's events, in the order of their times."""

    every: tuple[dict[str, Any], ...] = ()

    @classmethod
    def read(cls, path: Path | None) -> Events:
        """Read a file. Returns no events if there is no file. A truncated last line is skipped; all others must be
        JSON."""
        if path is None or not path.exists():
            return cls()
        lines = path.read_text().split("\n")
        try:
            events = [json.loads(line) for line in lines[:-1] if line]
        except ValueError as problem:
            raise Misuse(Code.BAD_ARGUMENT, f"{path} is not made of JSON lines: {problem}") from problem
        return cls(tuple(sorted(events, key=lambda event: int(event["at_us"]))))

    def of(self, name: str) -> list[dict[str, Any]]:
        """Return the events with this name."""
        return [event for event in self.every if event["event"] == name]

    @property
    def kills(self) -> list[dict[str, Any]]:
        """The events of killed processes."""
        return self.of("killed")
