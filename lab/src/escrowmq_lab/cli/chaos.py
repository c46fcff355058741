"""``escrowmq-lab chaos``: brokers, producers and consumers as real processes with random faults; docs/chaos.md."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from escrowmq.cli.failures import Exit
from escrowmq.cli.options import Json
from escrowmq.cli.printing import notice, print_facts, print_json, print_table

if TYPE_CHECKING:
    from escrowmq_lab.chaos.report import Record

SHOWN = 5
"""Printed findings per kind and mode."""


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
    rate: Annotated[float, typer.Option(min=1.0, help="Messages a second that are placed, at most.")] = 3000.0,
    patience: Annotated[
        float, typer.Option(min=1.0, help="Seconds without any progress at the end until the run is called stuck.")
    ] = 120.0,
    database_url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="A PostgreSQL server for the nodes' databases, instead of SQLite files."),
    ] = None,
    folder: Annotated[Path | None, typer.Option(help="Keep everything here; else only what failed is kept.")] = None,
    report: Annotated[
        Path | None,
        typer.Option(help="A folder for chaos.html, the run on one page, and chaos.json; else that of --folder."),
    ] = None,
    json: Json = False,
) -> None:
    """Kill, pause, cut off and fill up producers, brokers and consumers at random, then check every id.

    Exit code 1 when a promise was broken: a message lost, repeated, leaked, altered, never sent, or never delivered, or
    a node that failed; the findings are printed, with the command that repeats the run.
    """
    from escrowmq_lab.chaos.options import Options
    from escrowmq_lab.chaos.progress import Progress
    from escrowmq_lab.chaos.report import Record, write_report
    from escrowmq_lab.chaos.run import run

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
        outcome = run(options, folder, progress.update)
    record = Record.of(outcome)
    kept = report or folder or (None if record.findings.ok else outcome.folder)
    page = None if kept is None else write_report(kept, record)
    facts = {**_facts(record), "report": None if page is None else str(page)}
    if json:
        print_json({**facts, **record.findings.to_json(), "replay": record.command})
    else:
        print_facts(facts)
        tallies = record.findings.tallies
        heads = ["intended", "business", "confirmed", "effects", "recovered", "repeats"]
        rows = [[name, *(getattr(tally, head) for head in heads)] for name, tally in tallies.items()]
        print_table(["mode", *(f">{head}" for head in heads)], rows, "")
        _show(record, outcome.folder)
    if not record.findings.ok:
        raise typer.Exit(Exit.FINDING)


def _show(record: Record, folder: Path) -> None:
    """Print the findings: the number of each kind, and some of each."""
    findings = record.findings
    for (what, mode), number in sorted(findings.numbers.items()):
        notice(f"{what} {mode}: {number}")
        for one in [one for one in findings.broken if (one.what, one.mode) == (what, mode)][:SHOWN]:
            notice(f"    {one.subject}: {one.detail}")
    if not findings.ok:
        notice(f"everything is in {folder}; run it again: {record.command}")


def _facts(record: Record) -> dict[str, Any]:
    from escrowmq_lab.chaos.plan import Blow

    return {
        **{name: record.total(name) for name in ("intended", "business", "confirmed", "effects", "recovered")},
        "kills": record.kills,
        **{blow.value: sum(one.blow is blow for one in record.happenings) for blow in Blow if blow is not Blow.KILL},
        "nodes_struck_in_a_round": sorted(record.struck),
        "nodes_down_at_once": record.most_at_once,
        "seconds_of_faults": round(record.fault_seconds, 1),
        "confirmed_per_second": round(record.rate("confirmed")),
        "effects_per_second": round(record.rate("effects")),
        "seconds_to_settle": round(record.settle_seconds, 1),
        "broken": sum(record.findings.numbers.values()),
    }
