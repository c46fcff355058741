"""Times and durations in readable form."""

from __future__ import annotations

from datetime import UTC, datetime


def moment(time_us: int | None) -> str | None:
    """Convert microseconds since 1970 to local date and time with milliseconds; None for 0, which means "none"."""
    if not time_us:
        return None
    return datetime.fromtimestamp(time_us / 1e6, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


def duration(seconds: float) -> str:
    """Format ``0.25`` as ``250 ms``, ``90`` as ``1 min 30 s``, ``7200`` as ``2 h``: the two largest units."""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    whole = int(seconds)
    parts = []
    for size, name in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        count, whole = divmod(whole, size)
        if count:
            parts.append(f"{count} {name}")
    if seconds < 60 and seconds != int(seconds):
        return f"{seconds:.3g} s"
    return " ".join(parts[:2])
