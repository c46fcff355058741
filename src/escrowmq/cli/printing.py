"""What commands print: tables that fit the screen, JSON with stable keys, times and durations that people read."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

_STATE_STYLES = {
    "open": "yellow",
    "parked": "bold magenta",
    "committed": "green",
    "rolled_back": "cyan",
    "expired": "red",
}


Columns = dict[str, str | Callable[[Any], Any]]
"""The columns of a table of rows: a head, and the name of a field or a function of a row."""


def console() -> Console:
    """Standard output, as wide as the screen; made at each call so that a redirection is seen."""
    return Console(highlight=False)


def notice(text: str) -> None:
    """Print a line for a person, on stderr: standard output is for scripts."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(Text(text))


def print_json(value: Any) -> None:
    """Print one JSON document, indented on a screen, on one line otherwise."""
    print(json.dumps(value, ensure_ascii=False, indent=2 if sys.stdout.isatty() else None))


def print_json_line(value: Mapping[str, Any]) -> None:
    """Print one JSON object on one line, flushed, for streams."""
    print(json.dumps(value, ensure_ascii=False), flush=True)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], empty: str) -> None:
    """Print a table, or the notice ``empty`` if there are no rows. A column ``">name"`` is aligned to the right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=False)
    for column in columns:
        table.add_column(
            column.removeprefix(">"), justify="right" if column.startswith(">") else "left", overflow="fold"
        )
    for row in rows:
        table.add_row(*(cell(value) for value in row))
    if table.row_count:
        console().print(table)
    else:
        notice(empty)


def print_rows(rows: Sequence[Mapping[str, Any]], json: bool, columns: Columns, empty: str) -> None:
    """Print rows as one JSON document, or as a table of these columns."""
    if json:
        return print_json(rows)
    shown = [[row.get(of) if isinstance(of, str) else of(row) for of in columns.values()] for row in rows]
    print_table(list(columns), shown, empty)


def print_facts(facts: Mapping[str, Any]) -> None:
    """Print names and values, one pair per line."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, cell(value))
    console().print(table)


def cell(value: Any) -> Text:
    """A value as a table shows it: never read as markup, control characters made visible."""
    if isinstance(value, Text):
        return value
    if value is None:
        return Text("-", "dim")
    text = value if isinstance(value, str) else f"{value:,}" if type(value) is int else str(value)
    return Text("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text))


def state(name: str) -> Text:
    """A transaction's state in its colour."""
    return Text(name, _STATE_STYLES.get(name, ""))


def moment(time_us: int | None) -> str | None:
    """Microseconds since 1970 → local date and time to the millisecond; None for 0, which stands for none."""
    if not time_us:
        return None
    return datetime.fromtimestamp(time_us / 1e6, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


def age(time_us: int | None) -> str | None:
    """How long ago microseconds since 1970 were, by this machine's clock; None for 0, which stands for none."""
    return duration(max(time.time() - time_us / 1e6, 0)) if time_us else None


def ago(time_us: int | None) -> str | None:
    """:func:`age` as ``2 h ago``."""
    return None if (text := age(time_us)) is None else f"{text} ago"


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


def size(count: int) -> str:
    """``4194304`` → ``4 MiB``: the largest unit that leaves a short number."""
    for power, name in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 1 << power:
            return f"{count / (1 << power):.4g} {name}"
    return f"{count} B"


def body_text(body: bytes, most: int = 200) -> str:
    """A body as one line of text, cut at ``most`` characters; bytes that are not UTF-8 as ``\\xNN``."""
    text = body[: 4 * most].decode("utf-8", "backslashreplace")
    return text if len(text) <= most and len(body) <= 4 * most else text[: most - 1] + "…"
