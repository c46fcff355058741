"""The output of commands: tables that fit the terminal, JSON with stable keys, readable times and durations."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from escrowmq.platform.times import duration as duration
from escrowmq.platform.times import moment as moment

if TYPE_CHECKING:
    from escrowmq.client.links.presence import Missing

_STATE_STYLES = {
    "open": "yellow",
    "parked": "bold magenta",
    "committed": "green",
    "rolled_back": "cyan",
    "expired": "red",
}


@dataclass(slots=True)
class Run:
    """State of the running command, for its end."""

    missing: list[Missing] = field(default_factory=list)
    """Unreachable brokers, if others were reachable."""
    json: bool = False
    """Whether the command printed JSON."""


RUN = Run()
"""The running command; there is one per process."""

Columns = dict[str, str | Callable[[Any], Any]]
"""Columns of a table: a heading, and the name of a field or a function of a row."""


def console() -> Console:
    """Return standard output, as wide as the terminal; created at each call to follow redirection."""
    return Console(highlight=False)


WHOLE = 40
"""Maximum width of a word that a table never breaks: ids, which users copy."""
PIPED = 1 << 20
"""Line width if standard output is not a terminal: no line is broken."""


def _least_width(out: Console, table: Table) -> int:
    """Return the width (columns) that a table needs without breaking ids."""
    return Measurement.get(out, out.options.update_width(PIPED), table).minimum


def _print_whole(table: Table) -> None:
    """Print a table without breaking ids: a narrow terminal wraps whole lines, a pipe never breaks them."""
    out = console()
    out.width = max(out.width, _least_width(out, table)) if out.is_terminal else PIPED
    out.print(table, soft_wrap=True)


def _longest_word(texts: Iterable[Text]) -> int:
    return min(max((cell_len(word) for text in texts for word in text.plain.split()), default=1), WHOLE)


def notice(text: str) -> None:
    """Print a line for users on stderr; standard output is for scripts."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(Text(text))


def show_missing() -> None:
    """Print the unreachable brokers on stderr: a line each, or one JSON object."""
    if RUN.json and RUN.missing:
        print(json.dumps({"missing": RUN.missing}, ensure_ascii=False), file=sys.stderr)
        return
    for one in RUN.missing:
        notice(f"missing: {one['broker']}: {one['reason']}")


def print_json(value: Any) -> None:
    """Print one JSON document, indented on a terminal, else on one line."""
    RUN.json = True
    print(json.dumps(value, ensure_ascii=False, indent=2 if sys.stdout.isatty() else None))


def print_json_line(value: Mapping[str, Any]) -> None:
    """Print one JSON object on one line, flushed, for streams."""
    RUN.json = True
    print(json.dumps(value, ensure_ascii=False), flush=True)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], empty: str) -> None:
    """Print a table, or the notice ``empty`` if there are no rows. A column ``">name"`` is right-aligned. On a terminal
    that is too narrow each row is a block of names and values, as with psql's automatic expanded display."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    shown = [[cell(value) for value in row] for row in rows]
    for number, column in enumerate(columns):
        head, side = column.removeprefix(">"), "right" if column.startswith(">") else "left"
        least = _longest_word([Text(head), *(row[number] for row in shown)])
        table.add_column(head, justify=side, overflow="fold", min_width=least)  # type: ignore[arg-type]
    for row in shown:
        table.add_row(*row)
    out = console()
    if not shown:
        notice(empty)
    elif out.is_terminal and _least_width(out, table) > out.width:
        for row in shown:
            print_facts(dict(zip((column.removeprefix(">") for column in columns), row, strict=True)))
            out.print()
    else:
        _print_whole(table)


def print_rows(rows: Sequence[Mapping[str, Any]], json: bool, columns: Columns, empty: str) -> None:
    """Print rows as one JSON document, or as a table of these columns."""
    if json:
        return print_json(rows)
    shown = [[row.get(of) if isinstance(of, str) else of(row) for of in columns.values()] for row in rows]
    print_table(list(columns), shown, empty)


def print_facts(facts: Mapping[str, Any]) -> None:
    """Print names and values, one pair per line."""
    table = Table(box=None, show_header=False, pad_edge=False)
    shown = {name: cell(value) for name, value in facts.items()}
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold", min_width=_longest_word(shown.values()))
    for name, value in shown.items():
        table.add_row(name, value)
    _print_whole(table)


def cell(value: Any) -> Text:
    """Convert a value for a table: never parsed as markup, with control characters escaped."""
    if isinstance(value, Text):
        return value
    if value is None:
        return Text("-", "dim")
    text = value if isinstance(value, str) else f"{value:,}" if type(value) is int else str(value)
    return Text("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text))


def state(name: str) -> Text:
    """Format a transaction's state in its colour."""
    return Text(name, _STATE_STYLES.get(name, ""))


def age(time_us: int | None, now_us: int) -> str | None:
    """Format the age of a time (microseconds since 1970) by the clock of ``now_us``; None for 0, which means none."""
    return duration(max(now_us - time_us, 0) / 1e6) if time_us else None


def ago(time_us: int | None, now_us: int) -> str | None:
    """Format :func:`age` as ``2 h ago``."""
    return None if (text := age(time_us, now_us)) is None else f"{text} ago"


def size(count: int) -> str:
    """Format ``4194304`` as ``4 MiB``: with the largest unit that gives a short number."""
    for power, name in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 1 << power:
            return f"{count / (1 << power):.4g} {name}"
    return f"{count} B"


def body_text(body: bytes, most: int = 200) -> str:
    r"""Decode a body as one line of text, cut at ``most`` characters; bytes that are not UTF-8 become ``\\xNN``."""
    text = body[: 4 * most].decode("utf-8", "backslashreplace")
    return text if len(text) <= most and len(body) <= 4 * most else text[: most - 1] + "…"
