"""``escrowmq status``: the state of everything on one screen, and pending work."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from escrowmq.cli.failures import Exit
from escrowmq.cli.find import Databases, engines_at, stop_if_away
from escrowmq.cli.options import DEFAULT_URL, Json, Url, bus_at
from escrowmq.cli.printing import (
    age,
    cell,
    console,
    duration,
    moment,
    notice,
    print_json,
    print_json_line,
    print_table,
    size,
)

if TYPE_CHECKING:
    from escrowmq.overview import Cause, Status

MOST_ROWS = 30
"""Maximum rows of one table; further rows are counted."""
_STYLES = {"ok": "green", "damaged": "yellow", "incomplete": "yellow"}


def status(
    url: Url = DEFAULT_URL,
    database_url: Databases = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show it again and again, until Ctrl-C.")] = False,
    every: Annotated[
        float, typer.Option("--every", min=0.1, max=3600.0, help="With --watch: seconds between two.")
    ] = 2.0,
    times: Annotated[
        int | None,
        typer.Option("--times", min=1, help="With --watch: so often, and no more.", show_default=False),
    ] = None,
    json: Json = False,
) -> None:
    """Show brokers, topics, groups and outboxes, and pending work. Exit code 1 if an operator is needed."""
    from escrowmq import overview

    with ExitStack() as stack:
        bus = stack.enter_context(bus_at(url))
        engines = stack.enter_context(engines_at(database_url))
        brokers = [link.address for link in bus.router.links]
        now = overview.status(bus, engines)
        shown = 1
        while watch:
            _show(now, json, clear=True)
            if shown == times:
                break
            time.sleep(every)
            now = overview.status(bus, engines, before=now)
            shown += 1
        if not watch:
            _show(now, json, clear=False)
    stop_if_away(now.missing, brokers)
    if now.needs_person:
        raise typer.Exit(Exit.FINDING)


def _show(now: Status, json: bool, *, clear: bool) -> None:
    if json:
        value = now.to_json() | {"needs_person": now.needs_person}
        return print_json_line(value) if clear else print_json(value)
    out = console()
    if clear and out.is_terminal:
        out.clear()
    print_table(
        ("broker", "status", ">log", ">free", ">log/s", ">asked/s", "reason"),
        [
            (one.broker, Text(one.status, _STYLES.get(one.status, "bold red")), _size(one.log_bytes),
             _size(one.free_bytes), _size(one.log_bytes_per_second), _rate(one.asked_per_second), one.reason or None)
            for one in now.brokers
        ],
        "no brokers",
    )  # fmt: skip
    _print_limited(
        ("topic", ">stored", ">per second"), [(one.topic, one.stored, _rate(one.per_second)) for one in now.topics]
    )
    _print_limited(
        ("consumer group", "topic", ">lag", ">behind", ">leased", ">retrying", ">dead", ">asking", ""),
        [
            (one.group, one.topic, one.lag, duration(one.lag_seconds) if one.lag else None, one.leased, one.retrying,
             _highlight(one.dead), one.receiving, Text("paused", "yellow") if one.paused else "")
            for one in sorted(now.groups, key=lambda one: -one.lag)
        ],
    )  # fmt: skip
    _print_limited(
        ("producer group", ">open", ">oldest", ">parked", ">connected"),
        [
            (
                one.group,
                one.open,
                duration(one.oldest_seconds) if one.open else None,
                _highlight(one.parked),
                one.connected,
            )
            for one in sorted(now.producers, key=lambda one: (-one.parked, -one.open))
        ],
    )
    _print_limited(
        ("outbox", ">pending", ">retrying", ">held", ">for a person", ">oldest", ">relays"),
        [
            (
                one.database,
                one.pending,
                one.retrying,
                one.held,
                _highlight(one.waiting),
                duration(one.lag_seconds) if one.lag_seconds else None,
                one.relays,
            )
            for one in now.databases
        ],
    )
    _print_causes(now)
    notice(f"{moment(now.now_us)}: {_verdict(now)}")


def _print_causes(now: Status) -> None:
    several = len({cause.where for cause in now.waiting}) > 1
    heads = ("waits for", ">how many", ">oldest", "what, and why", *(["where"] if several else []))
    _print_limited(
        heads,
        [
            (Text("a person", "bold magenta") if cause.needs_person else "others",
             f"{cause.count:,}{'+' if cause.at_least else ''}",
             age(cause.oldest_us, now.now_us), cause.sentence, *([cause.where] if several else []))
            for cause in now.waiting
        ],
    )  # fmt: skip


def _verdict(now: Status) -> str:
    persons: list[Cause] = [cause for cause in now.waiting if cause.needs_person]
    if persons:
        return f"{len(persons)} {'cause needs' if len(persons) == 1 else 'causes need'} a person"
    return "something waits, and nothing needs a person" if now.waiting else "nothing waits"


def _print_limited(heads: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
    if not rows:
        return
    print_table(heads, rows[:MOST_ROWS], "")
    if len(rows) > MOST_ROWS:
        console().print(Text(f"and {len(rows) - MOST_ROWS:,} more (--json shows all)", "dim"))


def _size(count: float | None) -> str | None:
    return None if count is None else size(int(count))


def _rate(value: float | None) -> str | None:
    return None if value is None else f"{value:,.1f}"


def _highlight(count: int) -> Text | int:
    return Text(cell(count).plain, "bold magenta") if count else 0
