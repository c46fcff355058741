"""``escrowmq transactions``: list, show, commit, roll back and recheck transactions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from escrowmq.cli.failures import finish, show_error
from escrowmq.cli.options import DEFAULT_URL, Json, Limit, Url, Why, admin_at, broker_time, seconds
from escrowmq.cli.plan import PlansFolder, Yes, run_as_plan
from escrowmq.cli.printing import (
    Columns,
    ago,
    duration,
    moment,
    notice,
    print_facts,
    print_json,
    print_rows,
    state,
)
from escrowmq.cli.rows import body_of, plain
from escrowmq.errors import Code, EscrowError, error

app = typer.Typer(no_args_is_help=True, help="Transactions: list, show, commit, roll back.")

Ids = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[ID]...",
        help="Transaction ids, such as 9f3a01c2-3-2a, or ids that producers gave to their messages (--group: of which "
        "group).",
        show_default=False,
    ),
]
State = Annotated[
    str | None, typer.Option("--state", "-s", help="Those undecided, open, or parked, by a plan.", show_default=False)
]
OfGroup = Annotated[
    str | None,
    typer.Option(
        "--group",
        "-g",
        help="Those of this producer group, by a plan; with message ids: the group that they are of.",
        show_default=False,
    ),
]
OlderThan = Annotated[
    str | None,
    typer.Option(
        "--older-than",
        metavar="TIME",
        help="Those prepared longer ago than 30s, 5min, 2h, by a plan.",
        show_default=False,
    ),
]
_ORDER = ("time_us", "event", "position")
_MESSAGES: Columns = {
    **{"topic": "topic", "key": "key", "tag": "tag", "message id": "message_id"},
    "body": lambda message: body_of(message, 80),
}


@app.command("list")
def list_(
    state_: Annotated[
        str | None,
        typer.Option("--state", "-s", help="undecided, open, parked, committed, rolled_back or expired; else all."),
    ] = None,
    group: Annotated[str | None, typer.Option("--group", "-g", help="Of this producer group.")] = None,
    older_than: Annotated[
        str | None, typer.Option("--older-than", metavar="TIME", help="Prepared longer ago than 30s, 5min, 2h.")
    ] = None,
    cause: Annotated[
        str | None, typer.Option("--cause", help="Waiting for this reason, as `transactions summary` names it.")
    ] = None,
    limit: Limit = 100,
    url: Url = DEFAULT_URL,
    json: Json = False,
) -> None:
    """List transactions in the order of their prepare."""
    with admin_at(url) as admin:
        found = admin.transactions(state_, group, seconds(older_than, "--older-than"), limit, cause=cause)[:limit]
        now_us = 0 if json else broker_time(admin)
    columns: Columns = {
        "transaction": "id",
        "state": lambda t: state(t["state"]),
        "group": "group",
        ">messages": "messages",
        ">checks": "checks",
        "prepared": lambda t: ago(t["prepared_us"], now_us),
        "decided by": "decided_by",
    }
    print_rows(found, json, columns, "no such transactions")


@app.command("summary")
def summary(
    group: Annotated[str | None, typer.Argument(metavar="[GROUP]", help="The producer group; else all.")] = None,
    url: Url = DEFAULT_URL,
    json: Json = False,
) -> None:
    """Count undecided transactions by producer group and cause."""
    with admin_at(url) as admin:
        groups = admin.transactions_summary(group)
        now_us = 0 if json else broker_time(admin)
    if json:
        return print_json([plain(one) for one in groups])
    rows = [{"group": one["group"], **cause} for one in groups for cause in one["causes"]]
    columns: Columns = {
        "group": "group",
        "state": lambda row: state(row["state"]),
        ">transactions": "count",
        "oldest": lambda row: ago(row["oldest_us"], now_us),
        "newest": lambda row: ago(row["newest_us"], now_us),
        "cause": "cause",
        "why": lambda row: _explain_cause(row["cause"], *row["checks"]),
        "such as": lambda row: row["samples"][0]["id"] if row["samples"] else "",
    }
    print_rows(rows, False, columns, "nothing is undecided")


def _explain_cause(cause: str, least: int, most: int) -> str:
    checked = f"asked {least}" + (f" to {most}" if most > least else "") + (" time" if most == 1 else " times")
    return {
        "not_due": "the first question comes later",
        "due": "a question is due, and no producer of the group was there to be asked",
        "unanswered": f"{checked} without a decision; it is checked again, or parked",
        "asked_out": f"{checked} without a decision; it waits for a person",
        "aged": f"half_retention ended, or it cannot be read ({checked}); it waits for a person",
    }.get(cause, cause)


@app.command("show")
def show(
    transaction: Annotated[str, typer.Argument(metavar="ID", help="A transaction id, such as 9f3a01c2-3-2a.")],
    body: Annotated[
        bool,
        typer.Option("--body", help="Also the bodies of one that was rolled back or has expired; this is recorded."),
    ] = False,
    why: Why = None,
    url: Url = DEFAULT_URL,
    json: Json = False,
) -> None:
    """Show a transaction: its messages and its history."""
    with admin_at(url) as admin:
        found: Any = admin.transaction(transaction, bodies=body, why=why)
    found["messages"] = [plain(message) for message in found["messages"]]
    if json:
        return print_json(found)
    facts = {n.replace("_", " "): found.get(n) for n in ("group", "instance", "checks", "message_count")}
    print_facts({"transaction": found["id"], "state": state(found["state"]), **facts})
    print_rows(found["messages"], json, _MESSAGES, "no messages")
    if not body and any(message.get("withheld") for message in found["messages"]):
        notice("the bodies are withheld; --body shows them, and this is recorded")
    start = found["timeline"][0]["time_us"] if found["timeline"] else 0
    columns: Columns = {
        "time": lambda event: moment(event["time_us"]),
        ">after": lambda event: duration((event["time_us"] - start) / 1e6),
        "event": "event",
        "details": lambda event: " ".join(f"{name} {value}" for name, value in event.items() if name not in _ORDER),
    }
    print_rows(found["timeline"], json, columns, "nothing happened to it")


@app.command("commit")
def commit(
    ids: Ids = None,
    state_: State = None,
    group: OfGroup = None,
    older_than: OlderThan = None,
    yes: Yes = False,
    plans: PlansFolder = None,
    why: Why = None,
    url: Url = DEFAULT_URL,
    json: Json = False,
) -> None:
    """Commit undecided transactions: their messages become visible. Name them, or select them for a plan."""
    if chosen := _parse_selection("commit", ids, state_, group, older_than):
        return run_as_plan("transactions.commit", chosen, why, url, yes=yes, folder=plans, json=json)
    _apply_to_each(ids or [], why, url, json, "commit", group)


@app.command("rollback")
def rollback(
    ids: Ids = None,
    state_: State = None,
    group: OfGroup = None,
    older_than: OlderThan = None,
    yes: Yes = False,
    plans: PlansFolder = None,
    why: Why = None,
    url: Url = DEFAULT_URL,
    json: Json = False,
) -> None:
    """Roll back undecided transactions: their messages never become visible. Name them, or select them for a plan."""
    if chosen := _parse_selection("roll back", ids, state_, group, older_than):
        return run_as_plan("transactions.rollback", chosen, why, url, yes=yes, folder=plans, json=json)
    _apply_to_each(ids or [], why, url, json, "rollback", group)


@app.command("recheck")
def recheck(
    ids: Ids = None,
    state_: State = None,
    group: OfGroup = None,
    older_than: OlderThan = None,
    yes: Yes = False,
    plans: PlansFolder = None,
    why: Why = None,
    url: Url = DEFAULT_URL,
    json: Json = False,
) -> None:
    """Reopen parked transactions and restart their check-back. Name them, or select them for a plan."""
    if chosen := _parse_selection("ask about again", ids, state_, group, older_than):
        return run_as_plan("transactions.recheck", chosen, why, url, yes=yes, folder=plans, json=json)
    _apply_to_each(ids or [], why, url, json, "recheck", group)


def _parse_selection(
    what: str, ids: list[str] | None, state_: str | None, group: str | None, older_than: str | None
) -> dict[str, Any] | None:
    """Return the selection for a plan; None if ids are named."""
    given = {"state": state_, "group": group, "older_than": seconds(older_than, "--older-than")}
    chosen = {name: value for name, value in given.items() if value is not None}
    if ids and chosen.keys() == {"group"}:
        return None  # the group in which messages with these ids are looked up
    if bool(ids) == bool(chosen):
        hint = "name some by their ids, or choose by --group, --state, --older-than"
        raise error(Code.BAD_ARGUMENT, f"which transactions to {what}?", hint)
    return chosen or None


def _apply_to_each(ids: list[str], why: str | None, url: str, json: bool, act: str, group: str | None) -> None:
    """Apply one operation to every id and print each result; the exit code is that of the first failure."""
    results: list[tuple[str, Code, dict[str, Any]]] = []
    with admin_at(url) as admin:
        do: Callable[..., Code] = getattr(admin, act)
        for identity in ids:
            try:
                code = do(identity, why=why, group=group)
            except EscrowError as problem:
                code = problem.code
                if not json:
                    show_error(problem)
            results.append((identity, code, {}))
    finish("transaction", results, json)
