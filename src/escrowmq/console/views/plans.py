"""Plans: an operation on a frozen selection, which is made, inspected, dry-run, run in steps, stopped and resumed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from escrowmq.console.asked import Answer, Page, Params, Redirect
from escrowmq.console.core import Console, group_of
from escrowmq.console.jobs import Job
from escrowmq.console.views.transactions import seconds
from escrowmq.console.words import plural
from escrowmq.errors import Code, Overloaded, error
from escrowmq.plans import ACTS, Outcome, Plan, Ramp, Report, StopAfter
from escrowmq.plans.ramp import PAUSE, SHARES

ROOM = "/plans"
WORDS: Mapping[str, str] = {
    "dead_letters.retry": "Deliver dead letters again",
    "dead_letters.discard": "Discard dead letters",
    "transactions.commit": "Commit transactions",
    "transactions.rollback": "Roll transactions back",
    "transactions.recheck": "Ask about transactions anew",
    "outbox.retry": "Send rows again",
    "outbox.discard": "Discard rows",
    "outbox.settle": "Call rows sent",
    "stuck.retry": "Try stuck transactions again",
    "stuck.commit": "Commit stuck transactions",
    "stuck.rollback": "Roll stuck transactions back",
    "stuck.resend": "Send stuck messages again",
    "stuck.settle": "Settle stuck rows",
    "compensation.retry": "Try cases again",
    "compensation.settle": "Settle cases",
}
"""Labels of operations on buttons."""
FINAL = ("discard", "rollback", "commit", "settle")
"""Endings of operations that cannot be undone: the number of rows is typed before they run."""
FIELDS = (
    "database", "compensation", "group", "topic", "cause", "containing", "reason", "key", "tag", "state",
    "older_than", "ids"
)  # fmt: skip
"""Fields of a selection, in the order of the form."""
QUICKLY = 1.5
"""Time (s) that a form waits for its job before it shows the progress."""
ROWS = 100


def plans(console: Console, params: Params) -> Page:
    """List all plans of the folder, newest first."""
    listed = console.plans.list()[::-1]
    start = params.number("start", 0)
    values = {
        "rows": listed[start : start + ROWS],
        "words": WORDS,
        "next": start + ROWS if start + ROWS < len(listed) else None,
        "previous": max(start - ROWS, 0) if start else None,
        "folder": str(console.plans.folder),
    }
    return Page("plans.html", "Plans", values, ROOM, live=5)


def new(console: Console, params: Params) -> Page:
    """Show the form of a new plan, filled in from a cause, a transaction or a dead letter."""
    console.require_view()
    act = params.text("act") or ""
    chosen = _parse_selection(params.text("selection") or "{}")
    if "error" in chosen:
        chosen.setdefault("reason", chosen["error"])
    if unknown := sorted(set(chosen) - {*FIELDS, "error", "items"}):
        raise error(
            Code.BAD_ARGUMENT, f"this form cannot choose by {', '.join(unknown)}", "make the plan by the command"
        )
    kind = act.partition(".")[0]
    acts = [one for one in ACTS if one.partition(".")[0] == kind] or list(ACTS)
    fields = _fields(kind)
    fields += tuple(name for name in FIELDS if chosen.get(name) is not None and name not in fields)
    values = {
        "acts": acts,
        "act": act if act in acts else acts[0],
        "words": WORDS,
        "chosen": {name: _format(chosen[name]) for name in FIELDS if chosen.get(name) is not None},
        "fields": fields,
        "engines": console.databases,
        "group": chosen.get("group"),
        "items": json.dumps(chosen["items"]) if chosen.get("items") else None,
    }
    return Page("plan_new.html", "Make a plan", values, ROOM)


def make(console: Console, params: Params) -> Answer:
    """Freeze the selection. Redirects to the plan, or to the progress of its creation."""
    act, why = params.form_value("act"), params.form_text("why")
    if act not in ACTS:
        raise error(Code.BAD_ARGUMENT, f"{act!r:.60} is no act of a plan")
    if why is None:
        raise error(
            Code.BAD_ARGUMENT,
            "a plan needs a reason: whoever reads the record of acts asks for it",
            "go back, and say why",
        )
    selection = _form_selection(params)
    where = console.where(act, selection.get("database"), selection.get("group"))
    without = params.form_value("without_missing") == "yes"

    def work(job: Job) -> str:
        def on_progress(rows: int) -> None:
            job.progress = f"{plural(rows, 'row')} so far"
            if job.stop.is_set():
                raise Overloaded(Code.CLOSED, "the console is stopping")

        made = console.plans.make(where, act, selection, why=why, without_missing=without, progress=on_progress)
        return f"{ROOM}/{made.id}"

    return _redirect_to_result(console.jobs.begin("plan", "", work))


def plan(console: Console, params: Params) -> Page:
    """Show one plan: its selection, the dry run, the results."""
    found = console.plans.get(params.places["id"])
    run, dry_job = console.jobs.of("run", found.id), console.jobs.of("dry run", found.id)
    running = found.state == "running" or (run is not None and not run.ended.is_set())
    dry = dry_job is not None and not dry_job.ended.is_set()
    values = {
        "plan": found,
        "words": WORDS,
        "outcomes": _outcomes(found.outcomes or {}, found.rows),
        "sentences": {one.name.lower(): one.sentence for one in Outcome},
        "dry": console.plans.last_dry_run(found.id),
        "looking": dry_job if dry else None,
        "told": run.progress if running and run is not None else "",
        "running": running,
        "problem": _problem(run) or _problem(dry_job),
        "final": found.act.rpartition(".")[2] in FINAL,
        "foreign": console.is_foreign(found),
        "source": ", ".join((console.source, *console.databases)),
        "needed": console.lacks_plan(found.act, group_of(found)),
        "ramp": ", ".join(f"{share:g}" for share in SHARES),
        "pause": f"{PAUSE:g}",
        "columns": _columns(found.samples),
    }
    return Page("plan.html", f"Plan {found.id}", values, ROOM, live=1 if running or dry else 0)


def rows(console: Console, params: Params) -> Page:
    """Show rows of the frozen selection, each with its result."""
    found = console.plans.get(params.places["id"])
    start, outcome = params.number("start", 0), params.text("outcome")
    listed = console.plans.rows(found.id, start, ROWS, outcome=outcome)
    more = len(listed) == ROWS and listed[-1]["row"] + 1 < found.rows
    values = {
        "plan": found,
        "rows": listed,
        "columns": _columns(listed),
        "outcome": outcome or "",
        "outcomes": [one.name.lower() for one in Outcome],
        "next": listed[-1]["row"] + 1 if more else None,
        "first": start == 0,
    }
    return Page("plan_rows.html", f"Rows of plan {found.id}", values, ROOM)


def dry_run(console: Console, params: Params) -> Answer:
    """Check every row without changes."""
    found = console.plans.get(params.places["id"])
    console.require(console.lacks_plan(found.act, group_of(found)))

    def work(job: Job) -> str:
        def on_progress(done: int, of: int) -> None:
            job.progress = f"{done:,} of {of:,} rows"
            if job.stop.is_set():
                raise Overloaded(Code.CLOSED, "the console is stopping")

        console.plans.dry_run(found.id, console.place_of(found), progress=on_progress)
        return f"{ROOM}/{found.id}"

    return _redirect_to_plan(console.jobs.begin("dry run", found.id, work), found)


def run(console: Console, params: Params) -> Answer:
    """Run the operation on the frozen selection in steps; finished rows are never repeated."""
    found = console.plans.get(params.places["id"])
    console.require(console.lacks_plan(found.act, group_of(found)))
    if found.act.rpartition(".")[2] in FINAL and params.form_number("rows", -1) != found.rows:
        text = f"this cannot be taken back: type the number of its rows, {found.rows}, to say that you know"
        raise error(Code.BAD_ARGUMENT, text, "go back, and type it")
    ramp = Ramp.parse(params.form_text("ramp") or "100", seconds(params.form_text("pause") or "0", "pause"))
    rate = _parse_rate(params.form_text("rate"))
    limit = StopAfter.parse(params.form_text("stop_after"))
    digest = params.form_value("digest")
    if digest != found.digest:
        raise error(Code.CONFLICT, "this plan is not the one that was shown", "look at it again")

    def work(job: Job) -> str:
        def on_progress(report: Report) -> None:
            job.progress = f"step {report.step} of {report.steps}"

        console.plans.run(
            found.id,
            console.place_of(found),
            ramp=ramp,
            rate=rate,
            stop_after=limit,
            digest=digest,
            progress=on_progress,
            stop=job.stop,
        )
        return f"{ROOM}/{found.id}"

    return _redirect_to_plan(console.jobs.begin("run", found.id, work), found, 0.2)


def stop(console: Console, params: Params) -> Answer:
    """Stop a run after its current batch, whichever process runs it."""
    found = console.plans.get(params.places["id"])
    console.require(console.lacks_plan(found.act, group_of(found)))
    job = console.jobs.of("run", found.id)
    if job is not None:
        job.stop.set()
        job.ended.wait(QUICKLY)
    console.plans.stop(found.id)
    return Redirect(f"{ROOM}/{found.id}")


def delete(console: Console, params: Params) -> Answer:
    """Delete a plan and its results; its operations stay in the record."""
    found = console.plans.get(params.places["id"])
    console.require(console.lacks_plan(found.act, group_of(found)))
    console.plans.delete(found.id)
    return Redirect(ROOM)


def job(console: Console, params: Params) -> Answer:
    """Show the progress of a job, or its result once it has ended."""
    found = console.jobs.get(params.places["id"])
    if not found.ended.is_set():
        return Page("job.html", f"Making the {found.kind}", {"job": found}, ROOM, live=1)
    return _redirect_to_result(found)


def _redirect_to_result(job: Job) -> Answer:
    """Redirect to the result of a job. Raises its error."""
    if not job.ended.wait(QUICKLY):
        return Redirect(f"/work/{job.id}")
    if job.problem is not None:
        raise job.problem
    return Redirect(job.to)


def _redirect_to_plan(job: Job, found: Plan, patience: float = QUICKLY) -> Answer:
    if job.ended.wait(patience) and job.problem is not None:
        raise job.problem
    return Redirect(f"{ROOM}/{found.id}")


def _problem(job: Job | None) -> Any:
    return job.problem if job is not None and job.ended.is_set() else None


def _parse_rate(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        rate = float(text)
        if not 0 < rate < 1e9:
            raise ValueError
    except ValueError:
        raise error(Code.BAD_ARGUMENT, f"{text!r:.40} is no number of rows a second") from None
    return rate


def _form_selection(params: Params) -> dict[str, Any]:
    """Return the selection from the form; empty fields are left out."""
    found: dict[str, Any] = {name: value for name in FIELDS if (value := params.form_text(name)) is not None}
    if "older_than" in found:
        found["older_than"] = seconds(found["older_than"], "older than")
    if "ids" in found:
        found["ids"] = found["ids"].split()
    if (items := params.form_text("items")) is not None:
        found["items"] = _parse_items(items)
    return found


def _parse_items(text: str) -> list[Any]:
    """Parse the dead letters named by a page, with the state shown there."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list) or not found:
        raise error(Code.BAD_ARGUMENT, "this form names no dead letters that can be read")
    return found


def _parse_selection(text: str) -> dict[str, Any]:
    """Parse a selection from an address."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise error(Code.BAD_ARGUMENT, "this address has no selection that can be read")
    return found


def _format(value: Any) -> str:
    if isinstance(value, list):
        return "\n".join(map(str, value))
    return f"{value:g}s" if isinstance(value, float | int) else str(value)


def _fields(kind: str) -> tuple[str, ...]:
    if kind == "dead_letters":
        return ("group", "topic", "cause", "key", "tag", "older_than", "ids")
    if kind == "transactions":
        return ("state", "group", "cause", "older_than", "ids")
    if kind == "compensation":
        return ("database", "compensation", "topic", "reason", "key", "state", "older_than", "ids")
    if kind == "stuck":
        return ("database", "group", "topic", "reason", "key", "state", "older_than", "ids")
    if kind == "outbox":
        return ("database", "topic", "reason", "key", "state", "older_than", "ids")
    return FIELDS


def _columns(listed: Any) -> list[str]:
    """Choose the columns with values, without internal ones. A message's position is one column."""
    hidden = {"row", "outcome", "place", "queue_id", "position", "shard"}
    names = list(dict.fromkeys(name for one in listed for name, value in one.items() if value is not None))
    if {"topic", "queue", "offset"} <= set(names):
        hidden |= {"topic", "queue", "offset", "message_id"}
        names.insert(0, "message")
    return [name for name in names if name not in hidden]


def _outcomes(counts: Mapping[str, int], rows: int) -> list[dict[str, Any]]:
    return [
        {
            "name": one.name.lower(),
            "count": counts[one.name.lower()],
            "failure": one.is_failure,
            "sentence": one.sentence,
        }
        for one in Outcome
        if counts.get(one.name.lower())
    ]
