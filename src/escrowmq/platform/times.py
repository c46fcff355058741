"""Times: microseconds since 1970, as everything that is stored and sent has them, and as people read them."""

from __future__ import annotations

from datetime import UTC, datetime


def to_us(seconds: float) -> int:
    """Return whole microseconds."""
    return round(seconds * 1e6)


def datetime_us(time: datetime) -> int:
    """Return a time as microseconds since 1970."""
    return round(time.timestamp() * 1e6)


def moment(time_us: int | None) -> str | None:
    """Return microseconds since 1970 → local date and time to the millisecond; None for 0, which stands for none."""
    if not time_us:
        return None
    return datetime.fromtimestamp(time_us / 1e6, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


def duration(seconds: float) -> str:
    """``0.25`` → ``250 ms``, ``90`` → ``1 min 30 s``, ``7200`` → ``2 h``; the two largest units."""
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
