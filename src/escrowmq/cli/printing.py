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


WHOLE = 64
"""Maximum width of a word that a table never breaks: ids, places and digests, which users copy."""
PIPED = 1 << 20
"""Line width if standard output is not a terminal: no line is broken."""


def _longest_word(texts: Iterable[Text]) -> int:
    return max((cell_len(word) for text in texts for word in text.plain.split()), default=1)


def _share(least: Sequence[int], whole: Sequence[int], width: int) -> list[int]:
    """Distribute ``width`` columns over fields: each gets its least width, then those that lack the fewest the rest."""
    widths, room = list(least), width - sum(least)
    for number in sorted(range(len(least)), key=lambda number: whole[number] - least[number]):
        widths[number] += min(whole[number] - least[number], room)
        room = width - sum(widths)
    return widths


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
    heads = [column.removeprefix(">") for column in columns]
    shown = [[cell(value) for value in row] for row in rows]
    out = console()
    if not shown:
        return notice(empty)
    every = [[Text(head), *(row[number] for row in shown)] for number, head in enumerate(heads)]
    least = [min(_longest_word(texts), WHOLE) for texts in every]
    width = out.width if out.is_terminal else PIPED
    width -= 2 * len(columns)  # the frame: a blank and a divider for each
    if sum(least) > width:
        for row in shown:
            out.print()
            print_facts(dict(zip(heads, row, strict=True)))
        return None
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    widths = _share(least, [max(map(cell_len, map(str, texts))) for texts in every], width)
    for column, head, wide in zip(columns, heads, widths, strict=True):
        table.add_column(head, justify="right" if column.startswith(">") else "left", overflow="fold", width=wide)
    for row in shown:
        table.add_row(*row)
    out.width = PIPED
    out.print(table, soft_wrap=True)


def print_rows(rows: Sequence[Mapping[str, Any]], json: bool, columns: Columns, empty: str) -> None:
    """Print rows as one JSON document, or as a table of these columns."""
    if json:
        return print_json(rows)
    shown = [[row.get(of) if isinstance(of, str) else of(row) for of in columns.values()] for row in rows]
    print_table(list(columns), shown, empty)


def print_facts(facts: Mapping[str, Any]) -> None:
    """Print names and values, one pair per line. On a terminal long values continue below; no word is broken."""
    out = console()
    left = max(map(cell_len, facts), default=0) + 2
    for name, value in facts.items():
        shown = cell(value)
        room = max(out.width - left, _longest_word([shown])) if out.is_terminal else PIPED
        for number, part in enumerate(shown.wrap(out, room) or [Text()]):
            line = Text("" if number else name, "bold")
            line.pad_right(left - line.cell_len)
            line += part
            line.rstrip()
            out.print(line, soft_wrap=True)


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
