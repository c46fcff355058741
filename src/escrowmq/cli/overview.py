"""``escrowmq find`` and ``escrowmq status``: the history of a message, the state of everything, and pending work."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer
from rich.text import Text
from typer import Argument, Option

from escrowmq import outbox
from escrowmq.cli.failures import Exit
from escrowmq.cli.options import PASSWORD, Brokers, bus_at
from escrowmq.cli.printing import (
    RUN,
    Columns,
    age,
    body_text,
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
    from escrowmq.client.bus import Bus
    from escrowmq.client.links.presence import Missing
    from escrowmq.overview import Status, Story


@dataclass
class Sources(Brokers):
    """Brokers and databases that are searched."""

    database_url: list[str] | None = Option(
        None,
        "--database-url",
        "-d",
        envvar="ESCROWMQ_DATABASE_URL",
        help="A database with tables of EscrowMQ: sqlite:///shop.db, postgresql://user@host/shop; may be given again."
        + PASSWORD,
    )

    @contextmanager
    def open(self) -> Iterator[tuple[Bus, list[Any]]]:
        """Open the brokers and the databases. Raises Misuse(BAD_URL, NO_TABLES, MISSING_PACKAGE)."""
        with ExitStack() as stack:
            bus, engines = stack.enter_context(bus_at(self.url)), []
            if self.database_url:
                urls = dict.fromkeys(self.database_url)
                engines = [stack.enter_context(outbox.engines.opened(url)) for url in urls]
            yield bus, engines


def find(
    sources: Sources,
    wanted: str = Argument(..., metavar="WANTED", help="A message id, a key, a transaction id, or TOPIC/QUEUE/OFFSET."),
    limit: int = Option(20, "--limit", "-n", min=1, max=100, help="At most this many messages."),
) -> None:
    """Show the history of a message at brokers and in databases, and why it waits. Exit code 1 if none is found."""
    from escrowmq.overview import timeline

    with sources.open() as (bus, engines):
        found = timeline(bus, wanted, engines, limit=limit)
        brokers = [link.address for link in bus.router.links]
    if sources.json:
        print_json(found.to_json())
    else:
        for story in found.stories:
            _print_story(story)
        for note in found.notes:
            notice(f"note: {note}")
        if found.more:
            notice(f"there are more than these {len(found.stories)}; --limit shows up to 100")
        if not found.stories:
            notice(f"no message is found for {cell(wanted).plain}")
    stop_if_away(found.missing, brokers)
    if not found.stories:
        raise typer.Exit(Exit.FINDING)


def stop_if_away(missing: Sequence[Missing], brokers: Sequence[str]) -> None:
    """Record unreachable brokers (exit code 9 at the end of the command); exit with code 5 at once if all are."""
    RUN.missing += missing
    if {*brokers} <= {one["broker"] for one in missing}:
        raise typer.Exit(Exit.OVERLOADED)


def _print_story(story: Story) -> None:
    """Print one message: its fields, why it waits, and its events, a line each."""
    out = console()
    head = Text.assemble((cell(story.title).plain, "bold"))
    for name, value in (("key", story.key), ("tag", story.tag), ("transaction", story.transaction)):
        if value is not None:
            head.append(f"  {name}=").append(cell(value).plain, "cyan")
    out.print(head, soft_wrap=True)
    if story.body is not None:
        out.print(Text("  ").append(cell(body_text(story.body.encode(), 200)).plain, "dim"), soft_wrap=True)
    out.print(Text("  ").append(cell(story.why).plain, "bold yellow" if story.waits else "green"), soft_wrap=True)
    shown = _shorten([event.where for event in story.events])
    width = max(map(len, shown.values()), default=0)
    for event in story.events:
        line = Text("  ").append((moment(event.time_us) or "(time unknown)").ljust(24), "dim")
        if len(shown) > 1:
            line.append(shown[event.where].ljust(width), "dim").append("  ")
        out.print(line.append(cell(event.sentence).plain), soft_wrap=True)
    for note in story.notes:
        out.print(Text("  note: ", "dim").append(cell(note).plain, "dim"), soft_wrap=True)
    if acts := dict.fromkeys(offer.act for offer in story.offers):
        out.print(Text(f"  operations: {', '.join(acts)}", "dim"), soft_wrap=True)
    out.print()


def _shorten(wheres: Sequence[str]) -> dict[str, str]:
    """Shorten brokers and databases to the last part of their names, unless that is ambiguous."""
    names = {where: cell(where.rstrip("/").rpartition("/")[2] or where).plain for where in wheres}
    alike = len(set(names.values())) < len(names)
    return {where: cell(where).plain for where in names} if alike else names


# Status

MOST_ROWS = 30
"""Maximum rows of one table; further rows are counted."""
_STYLES = {"ok": "green", "damaged": "yellow", "incomplete": "yellow"}


def status(
    sources: Sources,
    watch: bool = Option(False, "--watch", "-w", help="Repeat it until Ctrl-C."),
    every: float = Option(2.0, min=0.1, max=3600.0, help="With --watch: seconds between two."),
    times: int | None = Option(None, min=1, help="With --watch: stop after so many."),
) -> None:
    """Show brokers, topics, groups and outboxes, and pending work. Exit code 1 if an operator is needed."""
    from escrowmq import overview

    with sources.open() as (bus, engines):
        brokers = [link.address for link in bus.router.links]
        now = overview.status(bus, engines)
        _show(now, sources.json, repeated=watch)
        shown = 1
        while watch and shown != times:
            time.sleep(every)
            now = overview.status(bus, engines, before=now)
            _show(now, sources.json, repeated=True)
            shown += 1
    stop_if_away(now.missing, brokers)
    if now.needs_person:
        raise typer.Exit(Exit.FINDING)


def _size(count: float | None) -> str | None:
    return None if count is None else size(int(count))


def _rate(value: float | None) -> str | None:
    return None if value is None else f"{value:,.1f}"


def _highlight(count: int) -> Text | int:
    return Text(cell(count).plain, "bold magenta") if count else 0


_BROKERS: Columns = {
    "broker": "broker",
    "status": lambda one: Text(one.status, _STYLES.get(one.status, "bold red")),
    ">log": lambda one: _size(one.log_bytes),
    ">free": lambda one: _size(one.free_bytes),
    ">log/s": lambda one: _size(one.log_bytes_per_second),
    ">checks/s": lambda one: _rate(one.asked_per_second),
    "reason": lambda one: one.reason or None,
}
_TOPICS: Columns = {"topic": "topic", ">stored": "stored", ">per second": lambda one: _rate(one.per_second)}
_GROUPS: Columns = {
    **{"consumer group": "group", "topic": "topic", ">lag": "lag"},
    ">behind": lambda one: duration(one.lag_seconds) if one.lag else None,
    **{">leased": "leased", ">retrying": "retrying"},
    ">dead": lambda one: _highlight(one.dead),
    ">receives": "receiving",
    "": lambda one: Text("paused", "yellow") if one.paused else "limited" if one.limited else "",
}
_READERS: Columns = {"streaming query": "reader", "topic": "topic", ">lag": "lag"}
_PRODUCERS: Columns = {
    **{"producer group": "group", ">open": "open"},
    ">oldest": lambda one: duration(one.oldest_seconds) if one.open else None,
    ">parked": lambda one: _highlight(one.parked),
    ">connected": "connected",
}
_OUTBOXES: Columns = {
    **{"outbox": "database", ">pending": "pending", ">retrying": "retrying", ">held": "held"},
    ">for an operator": lambda one: _highlight(one.waiting),
    ">oldest": lambda one: duration(one.lag_seconds) if one.lag_seconds else None,
    ">relays": "relays",
}


def _show(now: Status, json: bool, *, repeated: bool) -> None:
    if json:
        value = now.to_json() | {"needs_person": now.needs_person}
        return print_json_line(value) if repeated else print_json(value)
    out = console()
    if repeated and out.is_terminal:
        out.clear()
    _print_limited(_BROKERS, now.brokers, "no brokers")
    rights = {one.broker: one.rights or "none" for one in now.brokers if one.shard is not None}
    if len(set(rights.values())) > 1:
        files = ", ".join(f"{broker} {digest}" for broker, digest in rights.items())
        notice(f"the brokers have different rights files: {files}")
    _print_limited(_TOPICS, now.topics)
    _print_limited(_GROUPS, sorted(now.groups, key=lambda one: -one.lag))
    readers = _READERS | {">last read": lambda one: age(one.read_us, now.now_us)}
    _print_limited(readers, sorted(now.readers, key=lambda one: -one.lag))
    _print_limited(_PRODUCERS, sorted(now.producers, key=lambda one: (-one.parked, -one.open)))
    _print_limited(_OUTBOXES, now.databases)
    causes: Columns = {
        "needs": lambda one: Text("an operator", "bold magenta") if one.needs_person else "no operator",
        ">count": lambda one: f"{one.count:,}{'+' if one.at_least else ''}",
        ">oldest": lambda one: age(one.oldest_us, now.now_us),
        "pending work, and why": "sentence",
    }
    if len({cause.where for cause in now.waiting}) > 1:
        causes["where"] = "where"
    _print_limited(causes, now.waiting)
    notice(f"{moment(now.now_us)}: {_verdict(now)}")


def _verdict(now: Status) -> str:
    if count := sum(cause.needs_person for cause in now.waiting):
        return f"{count} {'cause needs' if count == 1 else 'causes need'} an operator"
    return "work is pending, and nothing needs an operator" if now.waiting else "no work is pending"


def _print_limited(columns: Columns, rows: Sequence[Any], empty: str = "") -> None:
    if not rows and not empty:
        return
    shown = [[getattr(row, of) if isinstance(of, str) else of(row) for of in columns.values()] for row in rows]
    print_table(list(columns), shown[:MOST_ROWS], empty)
    if len(rows) > MOST_ROWS:
        console().print(Text(f"and {len(rows) - MOST_ROWS:,} more (--json shows all)", "dim"))
