"""``escrowmq chaos``: brokers, producers and consumers as real processes, struck at random; docs/chaos.md."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from escrowmq.cli.failures import Exit
from escrowmq.cli.options import Json
from escrowmq.cli.printing import notice, print_facts, print_json, print_table

if TYPE_CHECKING:
    from escrowmq.chaos.options import Options
    from escrowmq.chaos.run import Run

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
    json: Json = False,
) -> None:
    """Kill, pause, cut off and fill up producers, brokers and consumers at random, then check every id.

    Exit code 1 when a promise was broken: a message lost, repeated, leaked, altered, never sent, or never delivered, or a node that failed;
    what was found is named, and the command that runs it again.
    """
    from escrowmq.chaos.options import Options
    from escrowmq.chaos.progress import Progress
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
    facts = _facts(outcome)
    if json:
        print_json({**facts, **outcome.findings.to_json(), "replay": _replay(options)})
    else:
        print_facts(facts)
        tallies = outcome.findings.tallies
        heads = ["intended", "business", "confirmed", "effects", "recovered", "repeats"]
        rows = [[name, *(getattr(tally, head) for head in heads)] for name, tally in tallies.items()]
        print_table(["mode", *(f">{head}" for head in heads)], rows, "")
        _show(outcome)
    if not outcome.findings.ok:
        raise typer.Exit(Exit.FINDING)


def _show(outcome: Run) -> None:
    """What was found: how many of each kind, and some of each."""
    findings = outcome.findings
    for (what, mode), number in sorted(findings.numbers.items()):
        notice(f"{what} {mode}: {number}")
        for one in [one for one in findings.broken if (one.what, one.mode) == (what, mode)][:SHOWN]:
            notice(f"    {one.subject}: {one.detail}")
    if not findings.ok:
        notice(f"everything is in {outcome.folder}; run it again: {_replay(outcome.options)}")


def _facts(outcome: Run) -> dict[str, Any]:
    from escrowmq.chaos.plan import Blow

    tallies = outcome.findings.tallies.values()
    confirmed = sum(tally.confirmed for tally in tallies)
    struck = [len(one.strikes) for one in outcome.rounds]
    seconds = (outcome.faults_until_us - outcome.begun_us) / 1e6
    return {
        "intended": sum(tally.intended for tally in tallies),
        "confirmed": confirmed,
        "effects": sum(tally.effects for tally in tallies),
        **{
            f"{blow}s" if blow is Blow.KILL else str(blow): sum(one.blow is blow for one in outcome.happenings)
            for blow in Blow
        },
        "nodes_at_a_time": sorted(set(struck)),
        "seconds_of_faults": round(seconds, 1),
        "confirmed_per_second": round(confirmed / max(seconds, 1e-3)),
        "seconds_to_settle": round((outcome.ended_us - outcome.faults_until_us) / 1e6, 1),
        "broken": sum(outcome.findings.numbers.values()),
        "folder": str(outcome.folder),
    }


def _replay(options: Options) -> str:
    from dataclasses import fields

    from escrowmq.chaos.options import Options

    default, words = (
        Options(),
        ["escrowmq", "chaos", "--rounds", str(options.rounds), "--period", f"{options.period:g}"],
    )
    for one in fields(options):
        value = getattr(options, one.name)
        if one.name in ("rounds", "period", "database_url") or (
            value == getattr(default, one.name) and one.name != "seed"
        ):
            continue
        text = ",".join(value) if isinstance(value, tuple) else f"{value:g}"
        words += [f"--{one.name.replace('_', '-')}", text]
    return shlex.join(words)
