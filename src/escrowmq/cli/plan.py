"""``escrowmq plan``: bulk operations on a frozen selection: make, inspect, run in steps, stop and resume."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer import Argument, Option

from escrowmq import outbox
from escrowmq.cli.failures import Exit
from escrowmq.cli.options import DEFAULT_URL, PASSWORD, App, Json, Operation, Url, Why, bus_at, time_option
from escrowmq.cli.plan_printing import (
    STATES,
    finish,
    format_outcomes,
    progress_line,
    row_columns,
    show_counts,
    show_plan,
)
from escrowmq.cli.printing import RUN, Columns, moment, notice, print_json, print_rows
from escrowmq.errors import Code, error
from escrowmq.platform.signals import stop_signals

if TYPE_CHECKING:
    from escrowmq.plans import Plan, Plans, Report
    from escrowmq.plans.subjects import Where

app = App("Bulk operations on a frozen selection: preview, dry-run, then run in resumable steps.")

PlanId = Annotated[str, Argument(metavar="PLAN", help="The id of a plan, or a prefix of it.")]
PlansFolder = Annotated[
    Path | None,
    Option(envvar="ESCROWMQ_PLANS", help="The folder of plans. [default: escrowmq/plans in the state directory]"),
]

BATCH = 4096
STEPS = "1,2,5,10,25,50,100"


@dataclass
class PlanOptions:
    """How an operation runs as a plan."""

    yes: bool = Option(False, "--yes", "-y", help="Do not request confirmation.")
    plans: PlansFolder = None


@dataclass
class _Source:
    """The brokers or the database whose rows a plan changes."""

    url: Url = DEFAULT_URL
    database_url: str | None = Option(
        None,
        "--database-url",
        "-d",
        envvar="ESCROWMQ_DATABASE_URL",
        help="The database whose rows these are, as SQLAlchemy names it." + PASSWORD,
    )

    @contextmanager
    def open(self, act: str) -> Iterator[Where]:
        """Open the broker or database that contains the rows of an operation."""
        from escrowmq.plans import is_of_database

        if not is_of_database(act):
            # The plan reports unreachable brokers.
            logging.getLogger("escrowmq.client.links.presence").setLevel(logging.ERROR)
            with bus_at(self.url) as bus:
                yield bus
            return
        if self.database_url is None:
            raise error(Code.BAD_ARGUMENT, f"{act} acts on rows of a database", "name it with --database-url")
        with outbox.engines.opened(self.database_url) as engine:
            yield engine


@dataclass
class _Selection:
    """Which rows a plan changes."""

    group: str | None = Option(None, "--group", "-g", help="Of this consumer (dead letters) or producer group.")
    topic: str | None = Option(None, "--topic", "-t", help="Only of this topic.")
    cause: str | None = Option(None, help="Only of this cause; numbers and ids in it do not count.")
    containing: str | None = Option(None, help="Dead letters: only with this text in their cause.")
    key: str | None = Option(None, "--key", "-k", help="Only with this key.")
    tag: str | None = Option(None, help="Only with this tag.")
    state: str | None = Option(
        None,
        "--state",
        "-s",
        help="Transactions: undecided, unless given, open, or parked; rows of a database: waiting, stuck ...",
    )
    older_than: float | None = time_option(None, "--older-than", "Dead, or prepared, longer ago than 30s, 5min, 2h.")
    ids: str | None = Option(None, metavar="FILE", help="Only those in this file, one a line; - is standard input.")
    compensation: str | None = Option(None, help="The name of the compensation whose cases these are.")

    def fields(self, act: str) -> dict[str, Any]:
        """Return the selection for an operation, with the content of the file of ids."""
        from escrowmq.plans import is_of_database

        given = vars(self) | {"ids": None if self.ids is None else _read_lines(self.ids)}
        if is_of_database(act):
            given["error"] = given.pop("cause")
        return {name: value for name, value in given.items() if value is not None}


@app.command("make")
def make(
    selection: _Selection,
    source: _Source,
    act: str = Argument(
        ...,
        metavar="ACT",
        help="dead_letters.retry|discard, transactions.commit|rollback|recheck; of a database "
        "outbox.retry|discard|settle, stuck.retry|commit|rollback|resend|settle, compensation.retry|settle.",
    ),
    without_missing: bool = Option(False, "--without-missing", help="Omit the rows of unavailable brokers."),
    why: Why = None,
    plans: PlansFolder = None,
    json: Json = False,
) -> None:
    """Make a plan: select rows, freeze the selection, and preview it. Nothing is changed."""
    fields = selection.fields(act)
    with source.open(act) as where:
        made = _make_plan(_plans(plans), where, act, fields, why=why, without_missing=without_missing)
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
        ">processed": "next",
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
    offset: int = Option(0, min=0, help="From this row on; the first is 0."),
    limit: int = Option(100, "--limit", "-n", min=1, max=100_000, help="At most this many."),
    result: str | None = Option(
        None,
        metavar="OUTCOME",
        help="Only those with this result: done, already, changed, conflict, damaged, gone, refused, none.",
    ),
    plans: PlansFolder = None,
    json: Json = False,
) -> None:
    """List the rows of a plan, each with its result."""
    found = _plans(plans).rows(plan, offset, limit, outcome=result)
    print_rows(found, json, row_columns(found, result=True), "no such rows")


@app.command("dry-run")
def dry_run(source: _Source, plan: PlanId, plans: PlansFolder = None, json: Json = False) -> None:
    """Dry-run a plan: check every remaining row, and print the result that it would have now. Nothing is changed.

    Exit code 1 if some would fail.
    """
    from escrowmq.plans.outcomes import count_failures

    folder = _plans(plans)
    with source.open(folder.get(plan).act) as where, Console(stderr=True).status("checking") as status:
        counts = folder.dry_run(
            plan, where, progress=lambda done, of: status.update(f"checked {done:,} of {of:,} rows")
        )
    if json:
        print_json(counts.to_json())
    else:
        show_counts(counts)
    if count_failures(counts.by_outcome):
        raise typer.Exit(Exit.FINDING)


@dataclass
class _Pace:
    """How a run proceeds, and what stops it."""

    ramp: str = Option(STEPS, metavar="PERCENTAGES", help="The steps, in percent of the set; 100 is all at once.")
    pause: float = time_option("5s", "--pause", "The pause after each step.")
    rate: float | None = Option(None, help="At most so many rows a second.")
    stop_after: str | None = Option(None, metavar="N|N%", help="Stop after so many failures, or at this share of rows.")
    batch: int = Option(BATCH, min=1, max=BATCH, help="Rows of one act at most.")
    digest: str | None = Option(None, help="Run only if the plan's digest begins so.")

    def run(self, plans: Plans, plan: Plan, where: Where) -> Report:
        """Run a plan; a signal stops it after its batch."""
        from escrowmq.plans import Ramp

        stopping = threading.Event()
        given: dict[str, Any] = vars(self) | {"ramp": Ramp.parse(self.ramp, self.pause)}
        del given["pause"]
        with stop_signals(stopping.set), Console(stderr=True).status("running") as status:
            report = plans.run(
                plan.id, where, **given, progress=lambda now: status.update(progress_line(now)), stop=stopping
            )
        if stopping.is_set() and report.state == "stopped":
            notice(f"stopped; resume it with escrowmq plan run {plan.id}")
        return report


@app.command("run")
def run(pace: _Pace, source: _Source, options: PlanOptions, plan: PlanId, json: Json = False) -> None:
    """Run a plan in steps, for every remaining row. Run it again to resume after a stop.

    Ctrl-C stops it after the batch. Exit code 1 if rows failed or it stopped by itself.
    """
    folder = _plans(options.plans)
    found = folder.get(plan)
    if not options.yes:
        _confirm(found)
    with source.open(found.act) as where:
        report = pace.run(folder, found, where)
    finish(found, report, json)


@app.command("stop")
def stop(plan: PlanId, plans: PlansFolder = None) -> None:
    """Stop the run of a plan after its current batch. Exit code 1 if none is running."""
    if not _plans(plans).stop(plan):
        notice("no run of this plan is in progress")
        raise typer.Exit(Exit.FINDING)
    notice("it stops after its batch")


@app.command("delete")
def delete(plan: PlanId, plans: PlansFolder = None) -> None:
    """Delete a plan and its results. The record of its operations is kept (`escrowmq acts list`)."""
    _plans(plans).delete(plan)
    notice("deleted")


def run_as_plan(act: str, selection: Mapping[str, Any], options: PlanOptions, operation: Operation) -> None:
    """Make a plan of the current rows, show it, confirm, and run it at once (``transactions commit --group ...``)."""
    plans = _plans(options.plans)
    with _Source(operation.url, None).open(act) as bus:
        made = _make_plan(plans, bus, act, selection, why=operation.why, without_missing=False)
        if not options.yes:
            show_plan(made)
            _confirm(made)
        report = _Pace("100", 0.0, None, None, BATCH, None).run(plans, made, bus)
    finish(made, report, operation.json)


def _plans(folder: Path | None) -> Plans:
    from escrowmq.plans import Plans

    return Plans(folder)


def _read_lines(name: str) -> list[str]:
    """Read the lines of a file."""
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text()
    except (OSError, UnicodeDecodeError) as problem:
        raise error(Code.BAD_ARGUMENT, f"--ids: {name} cannot be read: {problem}") from None
    return [line.strip() for line in text.splitlines() if line.strip()]


def _make_plan(
    plans: Plans, where: Where, act: str, selection: Mapping[str, Any], *, why: str | None, without_missing: bool
) -> Plan:
    with Console(stderr=True).status("selecting") as status:
        made = plans.make(
            where,
            act,
            selection,
            why=why,
            without_missing=without_missing,
            progress=lambda rows: status.update(f"{rows:,} rows so far"),
        )
    RUN.missing += made.missing
    return made


def _confirm(plan: Plan) -> None:
    """Ask for confirmation. Without a terminal, --yes is required."""
    if not sys.stdin.isatty():
        hint = f"add --yes; or review the plan, then run it: escrowmq plan run {plan.id}"
        raise error(Code.BAD_ARGUMENT, "there is no terminal to confirm the plan", hint)
    left = plan.rows - plan.next
    typer.confirm(f"{plan.act} for {left:,} rows, digest {plan.digest[:16]}?", abort=True, err=True)
