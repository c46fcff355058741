"""``escrowmq find``: the history of a message, over brokers and databases, and why it waits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer
from rich.text import Text
from typer import Argument, Option

from escrowmq.cli.failures import Exit
from escrowmq.cli.options import PASSWORD, Brokers, bus_at
from escrowmq.cli.printing import RUN, body_text, cell, console, moment, notice, print_json

if TYPE_CHECKING:
    from escrowmq.client.bus import Bus
    from escrowmq.client.links.presence import Missing
    from escrowmq.overview import Story


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
    def opened(self) -> Iterator[tuple[Bus, list[Any]]]:
        """Open the brokers and the databases. Raises Misuse(BAD_URL, NO_TABLES, MISSING_PACKAGE)."""
        with ExitStack() as stack:
            bus, engines = stack.enter_context(bus_at(self.url)), []
            if self.database_url:
                from escrowmq.outbox.engines import opened

                engines = [stack.enter_context(opened(url)) for url in dict.fromkeys(self.database_url)]
            yield bus, engines


def find(
    sources: Sources,
    wanted: str = Argument(
        ..., metavar="WANTED", help="A message id or its text, a key, a transaction id, or TOPIC/QUEUE/OFFSET."
    ),
    limit: int = Option(20, "--limit", "-n", min=1, max=100, help="At most this many messages."),
) -> None:
    """Show the history of a message at brokers and in databases, and why it waits. Exit code 1 if none is found."""
    from escrowmq.overview import timeline

    with sources.opened() as (bus, engines):
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
