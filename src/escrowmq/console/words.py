"""Formatting of numbers, times, sizes and foreign texts for pages."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from markupsafe import Markup

NONE = "–"
_LINES = re.compile(r"\r\n|\n|\r")
_FIRST_US, _LAST_US = 0, 253_402_300_799_000_000
"""1970 to the year 9999: the range of the calendar."""


def number(value: float | None) -> str:
    """Format ``1234567`` as ``1,234,567``; a fraction keeps three digits."""
    if value is None:
        return NONE
    if isinstance(value, float) and not value.is_integer():
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{int(value):,}"


def moment(time_us: int | None) -> str | Markup:
    """Format a time with its zone; ``datetime`` holds it for programs."""
    if not time_us or not _FIRST_US < time_us <= _LAST_US:
        return NONE
    at = datetime.fromtimestamp(time_us / 1e6, UTC)
    here = at.astimezone()
    return Markup('<time datetime="{}" title="{} UTC">{}</time>').format(
        at.isoformat(), at.strftime("%Y-%m-%d %H:%M:%S.%f"), here.strftime("%Y-%m-%d %H:%M:%S %Z")
    )


def duration(seconds: float | None) -> str:
    """Format the two largest units: ``0.25`` as ``250 ms``, ``90`` as ``1 min 30 s``."""
    if seconds is None:
        return NONE
    if seconds < 1:
        return f"{max(seconds, 0) * 1000:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    whole, parts = int(seconds), []
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        count, whole = divmod(whole, unit)
        if count:
            parts.append(f"{count:,} {name}")
    return " ".join(parts[:2])


def age(time_us: int | None, now_us: int) -> str:
    """Format the age of a time."""
    return duration(max(now_us - time_us, 0) / 1e6) if time_us else NONE


def ago(time_us: int | None, now_us: int) -> str | Markup:
    """Format a time by its distance, ``3 min ago`` or ``in 3 min``, with the exact time as the title."""
    if not time_us or not _FIRST_US < time_us <= _LAST_US:
        return NONE
    at, seconds = datetime.fromtimestamp(time_us / 1e6, UTC), abs(now_us - time_us) / 1e6
    largest = " ".join(duration(float(int(seconds))).split(" ")[:2])
    text = "now" if seconds < 1 else f"{largest} ago" if time_us < now_us else f"in {largest}"
    exact = f"{at.astimezone():%Y-%m-%d %H:%M:%S.%f %Z}"
    return Markup('<time datetime="{}" title="{}">{}</time>').format(at.isoformat(), exact, text)


def size(count: float | None) -> str:
    """Format ``4194304`` as ``4 MiB``."""
    if count is None:
        return NONE
    for power, name in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 1 << power:
            return f"{count / (1 << power):.4g} {name}"
    return f"{count:.0f} B"


def visible(text: Any, most: int = 2000) -> str:
    """Escape control and direction characters of a foreign text, and cut a long one."""
    if text is None:
        return NONE
    whole = str(text)
    cut = whole if len(whole) <= most else whole[: most - 1] + "…"
    if cut.isprintable():
        return cut
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in cut)


def listed(values: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """Convert a mapping to names and texts, in its order."""
    return [(visible(name), visible(value)) for name, value in (values or {}).items()]


def plural(count: int, one: str, many: str | None = None) -> str:
    """Format a count: ``1 message``, ``2 messages``."""
    return f"{number(count)} {one if count == 1 else many or one + 's'}"


def preview(body: bytes, most: int = 160) -> str:
    r"""Decode the beginning of a body on one line; bytes that are not text become ``\\xNN``."""
    text = body[: 4 * most].decode("utf-8", "backslashreplace")
    return visible(text if len(text) <= most and len(body) <= 4 * most else text[: most - 1] + "…")


def lines(text: str) -> str:
    """Escape a foreign text of several lines; line ends and tabs are kept."""
    return "\n".join(
        "\t".join(visible(part, len(part) + 1) for part in line.split("\t")) for line in _LINES.split(text)
    )


def as_json(value: Any) -> str:
    """Encode a plain value as JSON, for an address."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=dict)


FILTERS = {
    "number": number,
    "moment": moment,
    "duration": duration,
    "age": age,
    "ago": ago,
    "size": size,
    "visible": visible,
    "listed": listed,
    "plural": plural,
    "preview": preview,
    "lines": lines,
    "tojson_text": as_json,
}
"""The filter names in templates."""
