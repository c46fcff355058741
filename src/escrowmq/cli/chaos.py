"""``escrowmq chaos``: brokers, producers and consumers as real processes, struck at random; docs/chaos.md."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from escrowmq.cli.failures import Exit
from escrowmq.cli.options import Json
from escrowmq.cli.printing import notice, print_facts, print_json, print_table

if TYPE_CHECKING:
    from escrowmq.chaos.report import Record

_PLURALS = {"pause": "pauses", "cut": "cuts", "silence": "silences", "fill": "full disks"}
SHOWN = 5
"""Findings of one kind and mode that are printed."""


def chaos(
    rounds: Annotated[int, typer.Option(min=1, help="How often the monkey strikes.")] = 100,
    period: Annotated[float, typer.Option(min=0.1, help="Seconds from one round to the next.")] = 3.0,
    down: Annotated[
        float | None,
        typer.Option(min=0.0, help="Seconds for which a struck node stays so; else drawn, up to half a period."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed strikes the same nodes in the same way.")] = 0,
    modes: Annotated[str | None, typer.Option(metavar="MODE[,MODE...]", help="Delivery modes; all of them.")] = None,
    producers: Annotated[int, typer.Option(min=1, help="Processes that place messages.")] = 4,
    brokers: Annotated[int, typer.Option(min=1, help="Brokers.")] = 2,
    consumers: Annotated[int, typer.Option(min=1, help="Processes that take messages.")] = 4,
    rate: Annotated[float, typer.Option(min=1.0, help="Messages a second that are placed, at most.")] = 1500.0,
    patience: Annotated[
        float, typer.Option(min=1.0, help="Seconds without any progress at the end until the run is called stuck.")
    ] = 120.0,
    database_url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="A PostgreSQL server for the nodes' databases, instead of SQLite files."),
    ] = None,
    folder: Annotated[Path | None, typer.Option(help="Keep everything here; else only what failed is kept.")] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the report here, too; it is in the folder anyway.")
    ] = None,
    json: Json = False,
) -> None:
    """Kill, pause, cut off and fill up producers, brokers and consumers at random, then check every id.

    Exit code 1 when a promise was broken: a message lost, repeated, leaked, altered, never sent, or never delivered, or a node that failed;
    what was found is named, and the command that runs it again.
    """
    from escrowmq.chaos.options import Options
    from escrowmq.chaos.progress import Progress
    from escrowmq.chaos.report.page import page
    from escrowmq.chaos.run import run

    more: dict[str, Any] = {} if modes is None else {"modes": tuple(modes.split(","))}
    options = Options(
        rounds=rounds,
        period=period,
        down=down,
        seed=seed,
        producers=producers,
        brokers=brokers,
        consumers=consumers,
        rate=rate,
        patience=patience,
        database_url=database_url,
        **more,
    )
    with Progress(options) as progress:
        outcome = run(options, folder, progress.told)
    record = outcome.record
    if report is not None:
        report.write_text(page(record), encoding="utf-8")
    if json:
        print_json({**record.to_json(), "folder": str(outcome.folder)})
    else:
        _show(record)
        if not outcome.ok:
            notice(f"everything is in {outcome.folder}; run it again: {record.command}")
    if not outcome.ok:
        raise typer.Exit(Exit.FINDING)


def _show(record: Record) -> None:
    """The numbers, then how many of each finding there are, and some of each."""
    from escrowmq.chaos.plan import Blow

    blows = Counter(happening.blow for happening in record.happenings)
    print_facts(
        {
            **{name: record.total(name) for name in ("intended", "business", "confirmed", "effects", "recovered")},
            "kills": blows[Blow.KILL],
            **{_PLURALS[blow]: blows[blow] for blow in Blow if blow is not Blow.KILL},
            "rounds by nodes struck": ", ".join(
                f"{count}: {rounds}" for count, rounds in sorted(record.struck.items())
            ),
            "struck at one moment": record.most_at_once,
            "seconds of faults": round(record.fault_seconds, 1),
            "confirmed a second": round(record.rate("confirmed")),
            "effects a second": round(record.rate("effects")),
            "seconds to settle": round(record.settle_seconds, 1),
            "broken promises": sum(record.findings.numbers.values()),
        }
    )
    heads = ["intended", "business", "confirmed", "effects", "recovered", "repeats"]
    rows = [[name, *(getattr(tally, head) for head in heads)] for name, tally in record.findings.tallies.items()]
    print_table(["mode", *(f">{head}" for head in heads)], rows, "")
    for (what, mode), number in sorted(record.findings.numbers.items()):
        notice(f"{what} {mode}: {number}")
        for one in [one for one in record.findings.broken if (one.what, one.mode) == (what, mode)][:SHOWN]:
            notice(f"    {one.subject}: {one.detail}")
