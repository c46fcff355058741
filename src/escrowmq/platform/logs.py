"""The log of a process on standard error: lines for people, or one JSON object a line for machines."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

LEVELS = ("debug", "info", "warning", "error")

EVENTS = "escrowmq.events"
"""The logger of events for operators: each record has its facts as fields, one of which is ``event``."""


def tell(level: int, what: str, sentence: str, /, **facts: Any) -> None:
    """One line for operators: ``what`` happened is its field ``event``."""
    logging.getLogger(EVENTS).log(level, sentence, extra={"facts": {"event": what, **facts}})


class JsonLines(logging.Formatter):
    """One object a line: ``time`` (UTC), ``level``, ``logger``, ``message``, the line's facts, ``exception``."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as JSON in ASCII, so that nothing that a client sent can begin a line of its own."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        facts = getattr(record, "facts", {})
        line |= {name: value for name, value in facts.items() if name not in line}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class PlainLines(logging.Formatter):
    """Time, level and message; what a client sent cannot begin a line of its own, nor move the cursor."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatException(self, ei: Any) -> str:
        """Return the traceback, each line moved in, so that none of them looks like a line of the log."""
        return "\n".join(f"    {_visible(line)}" for line in super().formatException(ei).splitlines())

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line without its exception, control characters escaped."""
        return _visible(super().formatMessage(record))


def _visible(line: str) -> str:
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in line)


def log_to_stderr(level: str, *, as_json: bool) -> None:
    """Have everything from ``level`` (one of :data:`LEVELS`) on written to standard error, unless the program around
    has said already where its log goes."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if as_json else PlainLines())
    handler.setLevel(level.upper())  # also of loggers that listen to more, for others than this log
    logging.basicConfig(level=level.upper(), handlers=[handler])
