"""``escrowmq plan``: bulk operations on a frozen selection: make, inspect, run in steps, stop and resume."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from escrowmq.cli.failures import Exit
from escrowmq.cli.options import DEFAULT_URL, Json, Url, Why, bus_at, seconds
from escrowmq.cli.plan_printing import (
    STATES,
    finish,
    format_outcomes,
    progress_line,
    row_columns,
    show_counts,
    show_plan,
)
from escrowmq.cli.printing import (
    RUN,
    Columns,
    moment,
    notice,
    print_json,
    print_rows,
)
from escrowmq.errors import Code, error
from escrowmq.platform.signals import stop_signals

if TYPE_CHECKING:
    from escrowmq.plans import Plan, Plans, Report
    from escrowmq.plans.subjects.opening import Where

app = typer.Typer(
    no_args_is_help=True,
    help="Bulk operations on a frozen selection: preview, dry-run, then run in resumable steps.",
)

PlansFolder = Annotated[
    Path | None,
    typer.Option(
        "--plans",
        envvar="ESCROWMQ_PLANS",
        help="The folder of the plans. [default: escrowmq/plans in the user's state directory]",
        show_default=False,
    ),
]
PlanId = Annotated[str, typer.Argument(metavar="PLAN", help="The id of a plan, or how it begins.")]
RampText = Annotated[
    str, typer.Option("--ramp", metavar="PERCENTAGES", help="The steps, in percent of the set; 100 is all at once.")
]
PauseText = Annotated[str, typer.Option("--pause", metavar="TIME", help="How long to wait after each step.")]
Rate = Annotated[float | None, typer.Option("--rate", help="At most so many rows a second.", show_default=False)]
StopAfterText = Annotated[
    str | None,
    typer.Option(
        "--stop-after",
        metavar="N|N%",
        help="Stop after so many failures, or above this share of what was done.",
        show_default=False,
    ),
]
DatabaseUrl = Annotated[
    str | None,
    typer.Option(
        "--database-url",
        "-d",
        envvar="ESCROWMQ_DATABASE_URL",
        help="The database whose rows these are, as SQLAlchemy names it. A password can stand in the environment "
        "variable instead, where ps does not show it.",
        show_default=False,
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
WithoutMissing = Annotated[
    bool, typer.Option("--without-missing", help="Leave out the rows of brokers that are away, instead of refusing.")
]

BATCH = 4096
STEPS = "1,2,5,10,25,50,100"


@app.command("make")
def make(
    act: Annotated[
        str,
        typer.Argument(
            metavar="ACT",
            help="dead_letters.retry|discard, transactions.commit|rollback|recheck; of a database "
            "outbox.retry|discard|settle,"
            " stuck.retry|commit|rollback|resend|settle, compensation.retry|settle.",
        ),
    ],
    group: Annotated[
        str | None,
        typer.Option("--group", "-g", help="Of this group: of consumers for dead letters, else of producers."),
    ] = None,
    topic: Annotated[str | None, typer.Option("--topic", "-t", help="Only of this topic.")] = None,
    cause: Annotated[
        str | None,
        typer.Option("--cause", help="Only of this cause, as the summaries group them: numbers and ids do not count."),
    ] = None,
    containing: Annotated[
        str | None, typer.Option("--containing", help="Dead letters: only with this text in their cause.")
    ] = None,
    key: Annotated[str | None, typer.Option("--key", "-k", help="Only with this key.")] = None,
    tag: Annotated[str | None, typer.Option("--tag", help="Only with this tag.")] = None,
    state: Annotated[
        str | None,
        typer.Option(
            "--state",
            "-s",
            help="Transactions: undecided, unless given, open, or parked; rows of a database: waiting, stuck ...",
        ),
    ] = None,
    older_than: Annotated[
        str | None,
        typer.Option("--older-than", metavar="TIME", help="Dead, or prepared, longer ago than 30s, 5min, 2h."),
    ] = None,
    ids: Annotated[
        str | None,
        typer.Option("--ids", metavar="FILE", help="Only those that this file names, one a line; - is standard input."),
    ] = None,
    compensation: Annotated[
        str | None, typer.Option("--compensation", help="The name of the compensation whose cases these are.")
    ] = None,
    without_missing: WithoutMissing = False,
    why: Why = None,
    plans: PlansFolder = None,
    url: Url = DEFAULT_URL,
    database_url: DatabaseUrl = None,
    json: Json = False,
) -> None:
    """Make a plan: select rows, freeze the selection, and preview it. Nothing is changed."""
    selection = {
        "group": group, "topic": topic, "cause": cause, "containing": containing, "key": key, "tag": tag,
        "state": state, "older_than": seconds(older_than, "--older-than"),
        "ids": None if ids is None else _read_lines(ids),
        "compensation": compensation,
    }  # fmt: skip
    if _is_of_database(act):
        selection["error"] = selection.pop("cause")
    with _open_source(act, url, database_url) as where:
        made = _make_plan(_plans(plans), where, act, selection, why, without_missing)
    if json:
        print_json(made.to_json())
    else:
        show_plan(made)
        notice(f"next: escrowmq plan dry-run {made.id}, then escrowmq plan run {made.id}")


@app.command("list")
def list_(plans: PlansFolder = None, json: Json = False) -> None:
    """List the plans of the folder, oldest first."""
    found = _plans(plans)
    columns: Columns = {
        "plan": "id",
        "act": "act",
        ">rows": "rows",
        "state": lambda one: Text(one["state"], STATES.get(one["state"], "")),
        ">done with": "next",
        "made": lambda one: moment(one["made_us"]),
        "by": "by",
        "why": lambda one: one["why"] or "",
    }
    print_rows([one.to_json() for one in found.list()], json, columns, f"no plans in {found.folder}")


@app.command("show")
def show(plan: PlanId, plans: PlansFolder = None, json: Json = False) -> None:
    """Show a plan: its selection, samples, and the progress of its runs."""
    folder = _plans(plans)
    found, last = folder.get(plan), folder.last_dry_run(plan)
    if json:
        return print_json({**found.to_json(), "dry_run": last})
    show_plan(found)
    if last is not None:
        notice(f"the last dry run, {moment(last['at_us'])}: {format_outcomes(last['by_outcome'])}")


@app.command("rows")
def rows(
    plan: PlanId,
    offset: Annotated[int, typer.Option("--offset", min=0, help="From this row on; the first is 0.")] = 0,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=100_000, help="At most this many.")] = 100,
    result: Annotated[
        str | None,
        typer.Option(
            "--result",
            metavar="OUTCOME",
            help="Only those that came to: done, already, changed, conflict, damaged, gone, refused, none.",
        ),
    ] = None,
    plans: PlansFolder = None,
    json: Json = False,
) -> None:
    """List the rows of a plan, each with its result."""
    found = _plans(plans).rows(plan, offset, limit, outcome=result)
    if json:
        return print_json(found)
    print_rows(found, json, row_columns(found, result=True), "no such rows")


@app.command("dry-run")
def dry_run(
    plan: PlanId,
    plans: PlansFolder = None,
    url: Url = DEFAULT_URL,
    database_url: DatabaseUrl = None,
    json: Json = False,
) -> None:
    """Dry-run a plan: check every remaining row, and print the result that it would have now. Nothing is changed.

    Exit code 1 if some would fail.
    """
    folder = _plans(plans)
    with (
        _open_source(folder.get(plan).act, url, database_url) as where,
        Console(stderr=True).status("looking") as status,
    ):
        counts = folder.dry_run(
            plan, where, progress=lambda done, of: status.update(f"looked at {done:,} of {of:,} rows")
        )
    if json:
        print_json(counts.to_json())
    else:
        show_counts(counts)
    if _failures(counts.by_outcome):
        raise typer.Exit(Exit.FINDING)


@app.command("run")
def run(
    plan: PlanId,
    ramp: RampText = STEPS,
    pause: PauseText = "5s",
    rate: Rate = None,
    stop_after: StopAfterText = None,
    batch: Annotated[int, typer.Option("--batch", min=1, max=BATCH, help="Rows of one act at most.")] = BATCH,
    digest: Annotated[
        str | None, typer.Option("--digest", help="Run only if the plan's digest begins so.", show_default=False)
    ] = None,
    yes: Yes = False,
    plans: PlansFolder = None,
    url: Url = DEFAULT_URL,
    database_url: DatabaseUrl = None,
    json: Json = False,
) -> None:
    """Run a plan in steps, for every remaining row. Run it again to resume after a stop.

    Ctrl-C stops it after the batch. Exit code 1 if rows failed or it stopped by itself.
    """
    folder = _plans(plans)
    found = folder.get(plan)
    if not yes:
        _confirm(found)
    with _open_source(found.act, url, database_url) as where:
        report = _run(folder, found, where, ramp, pause, rate, stop_after, batch, digest)
    finish(found, report, json)


@app.command("stop")
def stop(plan: PlanId, plans: PlansFolder = None) -> None:
    """Stop the run of a plan after its current batch. Exit code 1 if none is running."""
    if not _plans(plans).stop(plan):
        notice("no run of this plan is under way")
        raise typer.Exit(Exit.FINDING)
    notice("it stops after its batch")


@app.command("delete")
def delete(plan: PlanId, plans: PlansFolder = None) -> None:
    """Delete a plan and its results. The record of its operations is kept (`escrowmq acts list`)."""
    _plans(plans).delete(plan)
    notice("deleted")


def run_as_plan(
    act: str, selection: Mapping[str, Any], why: str | None, url: str, *, yes: bool, folder: Path | None, json: bool
) -> None:
    """Make a plan of the current rows, show it, confirm, and run it at once (``transactions commit --group ...``)."""
    plans = _plans(folder)
    with _open_source(act, url, None) as bus:
        made = _make_plan(plans, bus, act, selection, why, without_missing=False)
        if not yes:
            show_plan(made)
            _confirm(made)
        report = _run(plans, made, bus, "100", "0s", None, None, BATCH)
    finish(made, report, json)


def _plans(folder: Path | None) -> Plans:
    from escrowmq.plans import Plans

    return Plans(folder)


@contextmanager
def _open_source(act: str, url: str, database_url: str | None) -> Iterator[Where]:
    """Open the broker or database that contains the rows of an operation."""
    if not _is_of_database(act):
        logging.getLogger("escrowmq.client.links.presence").setLevel(
            logging.ERROR
        )  # the plan reports unreachable brokers
        with bus_at(url) as bus:
            yield bus
        return
    if database_url is None:
        raise error(Code.BAD_ARGUMENT, f"{act} acts on rows of a database", "name it with --database-url")
    from escrowmq.outbox import engines

    with engines.opened(database_url) as engine:
        yield engine


def _is_of_database(act: str) -> bool:
    from escrowmq.plans import is_of_database

    return is_of_database(act)


def _read_lines(name: str) -> list[str]:
    """Read the lines of a file."""
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text()
    except (OSError, UnicodeDecodeError) as problem:
        raise error(Code.BAD_ARGUMENT, f"--ids: {name} cannot be read: {problem}") from None
    return [line.strip() for line in text.splitlines() if line.strip()]


def _make_plan(
    plans: Plans, where: Where, act: str, selection: Mapping[str, Any], why: str | None, without_missing: bool
) -> Plan:
    with Console(stderr=True).status("choosing") as status:
        made = plans.make(
            where,
            act,
            {name: value for name, value in selection.items() if value is not None},
            why=why,
            without_missing=without_missing,
            progress=lambda rows: status.update(f"{rows:,} rows so far"),
        )
    RUN.missing += made.missing
    return made


def _run(
    plans: Plans,
    plan: Plan,
    where: Where,
    ramp: str,
    pause: str,
    rate: float | None,
    stop_after: str | None,
    batch: int,
    digest: str | None = None,
) -> Report:
    from escrowmq.plans import Ramp

    stopping = threading.Event()
    steps = Ramp.parse(ramp, seconds(pause, "--pause") or 0.0)
    with stop_signals(stopping.set), Console(stderr=True).status("running") as status:
        report = plans.run(
            plan.id,
            where,
            ramp=steps,
            rate=rate,
            stop_after=stop_after,
            batch=batch,
            digest=digest,
            progress=lambda now: status.update(progress_line(now)),
            stop=stopping,
        )
    if stopping.is_set() and report.state == "stopped":
        notice(f"stopped; escrowmq plan run {plan.id} goes on")
    return report


def _confirm(plan: Plan) -> None:
    """Ask for confirmation. Without a terminal, --yes is required."""
    if not sys.stdin.isatty():
        hint = f"say --yes; or look at it, and run it: escrowmq plan run {plan.id}"
        raise error(Code.BAD_ARGUMENT, "nobody is there to be asked", hint)
    left = plan.rows - plan.next
    typer.confirm(f"{plan.act} for {left:,} rows, digest {plan.digest[:16]}?", abort=True, err=True)


def _failures(outcomes: Mapping[str, int]) -> int:
    from escrowmq.plans import Outcome

    return sum(count for name, count in outcomes.items() if Outcome[name.upper()].is_failure)
