"""Formats of times, durations and counts in sentences."""

from __future__ import annotations

from datetime import UTC, datetime

from escrowmq.platform.times import duration

LONGEST = 300
"""Characters of a cause or an error within a sentence."""


def at(time_us: int, now_us: int) -> str:
    """Format a local time: ``at 10:42:10``, with the date if it is another day."""
    moment, now = _local(time_us), _local(now_us)
    return f"at {moment:%H:%M:%S}" if moment.date() == now.date() else f"at {moment:%Y-%m-%d %H:%M:%S}"


def since(time_us: int, now_us: int) -> str:
    """Format the time since an event: ``for 5 min 3 s``."""
    return f"for {span(time_us, now_us)}"


def span(time_us: int, now_us: int) -> str:
    """Format the time between now and an event, before or after it: ``5 min 3 s``."""
    seconds = abs(now_us - time_us) / 1e6
    return duration(seconds if seconds < 1 else float(int(seconds)))


def many(count: int, thing: str, things: str | None = None) -> str:
    """Format a count: ``1 message``, ``2,000 messages``."""
    return f"{count:,} {thing if count == 1 else things or thing + 's'}"


def quote(text: str | None) -> str:
    """Return the first line of a text, shortened and without control characters. An empty text gets a placeholder."""
    if not text or not text.strip():
        return "no reason was given"
    line = text.strip().splitlines()[0]
    shown = (
        line
        if line.isprintable()
        else "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    )
    return shown if len(shown) <= LONGEST else shown[: LONGEST - 1] + "…"


def _local(time_us: int) -> datetime:
    return datetime.fromtimestamp(time_us / 1e6, UTC).astimezone()
