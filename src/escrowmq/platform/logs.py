"""The log of a process on standard error: lines of text, or one JSON object per line."""

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
    """Log one line for operators; ``what`` is its field ``event``."""
    logging.getLogger(EVENTS).log(level, sentence, extra={"facts": {"event": what, **facts}})


class JsonLines(logging.Formatter):
    """One object per line: ``time`` (UTC), ``level``, ``logger``, ``message``, facts, and ``exception``."""

    def format(self, record: logging.LogRecord) -> str:
        """Format the record as ASCII JSON, so that no data from a client can start a new line."""
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
    """Time, level and message; data from a client can neither start a new line nor move the cursor."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatException(self, ei: Any) -> str:
        """Format the traceback with indented lines, so that none looks like a line of the log."""
        return "\n".join(f"    {_escape_controls(line)}" for line in super().formatException(ei).splitlines())

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Format the line without its exception, with control characters escaped."""
        return _escape_controls(super().formatMessage(record))


def _escape_controls(line: str) -> str:
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in line)


def log_to_stderr(level: str, *, as_json: bool) -> None:
    """Write records from ``level`` (see :data:`LEVELS`) to standard error, unless the program configured logging."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if as_json else PlainLines())
    handler.setLevel(level.upper())  # also for loggers with a lower level, for other handlers
    logging.basicConfig(level=level.upper(), handlers=[handler])
