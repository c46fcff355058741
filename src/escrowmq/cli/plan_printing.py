"""The output of ``escrowmq plan``: plans, rows, results of dry runs, progress and reports of runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import typer
from rich.text import Text

from escrowmq.cli.failures import Exit, exit_code
from escrowmq.cli.printing import Columns, duration, moment, notice, print_facts, print_json, print_rows
from escrowmq.errors import Code, error

if TYPE_CHECKING:
    from escrowmq.plans import Counts, Plan, Report

STATES = {
    "made": "cyan",
    "running": "yellow",
    "stopped": "yellow",
    "interrupted": "bold magenta",
    "failed": "red",
    "finished": "green",
}
_OUTCOMES = {"done": "green", "already": "cyan", "none": "dim"}


def progress_line(report: Report) -> str:
    """Describe the progress of a run on one line."""
    rate = report.handled / report.seconds if report.seconds else 0.0
    share = 100.0 * report.next / report.rows
    done = f"{report.next:,} of {report.rows:,} rows ({share:.3g} %), {rate:,.0f} rows/s"
    again = f"; {report.again:,} failed again" if report.again else ""
    return f"step {report.step} of {report.steps}: {done}; {format_outcomes(report.outcomes)}{again}"


def finish(plan: Plan, report: Report, json: bool) -> None:
    """Print the report, and exit with its code."""
    if json:
        print_json(report.to_json())
    else:
        by = f"{report.handled:,} by this run in {duration(report.seconds)}"
        facts: dict[str, Any] = {
            "plan": plan.id,
            "act": plan.act,
            "state": Text(report.state, STATES.get(report.state, "")),
            "rows": f"{report.next:,} of {report.rows:,} processed, {by}",
            "results": format_outcomes(report.outcomes) or "none",
        }
        print_facts(facts | _troubles(report))
        if report.next < report.rows:
            notice(f"escrowmq plan run {plan.id} resumes it; escrowmq plan rows {plan.id} shows each row")
    if report.code is not None:
        raise typer.Exit(exit_code(error(Code[report.code])))
    if report.state == "stopped" and not report.failures:
        raise typer.Exit(Exit.INTERRUPTED)
    if report.state != "finished" or report.failures:
        raise typer.Exit(Exit.FINDING)


def _troubles(of: Report | Plan) -> dict[str, Any]:
    """Return facts about rows that failed again or are in doubt, and why a run ended."""
    found: dict[str, Any] = {}
    if of.again:
        found["failed again"] = f"{of.again:,} rows that were done"
    if of.in_doubt:
        found["in doubt"] = f"{of.in_doubt:,} rows: the next run determines their results"
    if of.reason:
        found["because"] = of.reason
    return found


def format_outcomes(outcomes: Mapping[str, int]) -> str:
    """Format the number of rows by outcome."""
    return ", ".join(f"{count:,} {name}" for name, count in outcomes.items())


def show_plan(plan: Plan) -> None:
    """Print a plan: its selection, progress and samples."""
    facts: dict[str, Any] = {
        "plan": plan.id,
        "act": plan.act,
        **plan.settings,
        "rows": plan.rows,
        "digest": plan.digest,
        "selection": ", ".join(f"{name} {value}" for name, value in plan.selection.items()) or "all",
        "at": plan.source,
        "made": f"{moment(plan.made_us)} by {plan.by}",
        "why": plan.why,
        "state": Text(plan.state, STATES.get(plan.state, "")),
    }
    if plan.missing:
        facts["without"] = ", ".join(one["broker"] for one in plan.missing)
    if plan.not_found:
        facts["not found"] = f"{plan.not_found:,} of the ids name nothing"
    if plan.runs:
        facts["processed"] = f"{plan.next:,}: {format_outcomes(plan.outcomes or {}) or 'none'}"
    facts |= _troubles(plan)
    for column, values in plan.counts.items():
        facts[f"by {column}"] = ", ".join(f"{count:,} {value or '(none)'}" for value, count in values.items())
    print_facts(facts)
    print_rows(plan.samples, False, row_columns(plan.samples), "no rows")


def show_counts(counts: Counts) -> None:
    """Print the counts of a dry run."""
    from escrowmq.plans import Outcome

    columns: Columns = {
        "outcome": lambda one: Text(one[0], _OUTCOMES.get(one[0], "red")),
        ">rows": lambda one: one[1],
        "": lambda one: "this plan would do it" if one[0] == "done" else Outcome[one[0].upper()].sentence,
    }
    if counts.handled:
        notice(f"{counts.handled:,} rows were processed before")
    print_rows(list(counts.by_outcome.items()), False, columns, "no rows remain")  # type: ignore[arg-type]
    samples = [{"row": one.row, "outcome": one.outcome, **one.about} for one in counts.samples]
    if samples:
        print_rows(samples, False, row_columns(samples, result=True), "")


def row_columns(rows: Iterable[Mapping[str, Any]], *, result: bool = False) -> Columns:
    """Choose the columns of a table of rows, without internal and empty ones."""
    hidden = {"row", "outcome", "place", "position", "queue_id", "instance", "topic", "queue", "offset", "damaged"}
    given = list(dict.fromkeys(name for row in rows for name, value in row.items() if value is not None))
    columns: Columns = {">row": "row"}
    if result:
        columns["outcome"] = lambda row: Text(row["outcome"], _OUTCOMES.get(row["outcome"], "red"))
    if "offset" in given:
        columns["message"] = lambda row: f"{row['topic']}/{row['queue']}/{row['offset']}"
    for name in given:
        if name.endswith("_us"):
            head = {"dead_us": "dead since", "prepared_us": "prepared"}.get(name, name.removesuffix("_us"))
            columns[head] = lambda row, name=name: moment(row[name])  # type: ignore[misc]
        elif name not in hidden:
            columns[name.replace("_", " ")] = name
    return columns
