"""``escrowmq transactions``: list, show, commit, roll back and recheck transactions."""

from __future__ import annotations

from typing import Any

from typer import Argument, Option

from escrowmq.cli.options import App, Brokers, Limit, Operation, broker_time, time_option
from escrowmq.cli.printing import Columns, ago, duration, moment, notice, print_facts, print_json, print_rows, state
from escrowmq.cli.rows import body_of, plain

app = App("Transactions: list, show, commit, roll back.")

_ORDER = ("time_us", "event", "position")
_MESSAGES: Columns = {
    **{"topic": "topic", "key": "key", "tag": "tag", "message id": "message_id"},
    "body": lambda message: body_of(message, 80),
}


@app.command("list")
def list_(
    brokers: Brokers,
    state_: str | None = Option(None, "--state", "-s", help="undecided, open, parked, committed, rolled_back, expired"),
    group: str | None = Option(None, "--group", "-g", help="Of this producer group."),
    older_than: Any = time_option(None, "--older-than", "Prepared longer ago than 30s, 5min, 2h."),
    cause: str | None = Option(None, help="Undecided for this cause, as `transactions summary` names it."),
    limit: Limit = 100,
) -> None:
    """List transactions in the order of their prepare."""
    with brokers.admin() as admin:
        found = admin.transactions(state_, group, older_than, limit, cause=cause)[:limit]
        now_us = 0 if brokers.json else broker_time(admin)
    columns: Columns = {
        "transaction": "id",
        "state": lambda t: state(t["state"]),
        "group": "group",
        ">messages": "messages",
        ">checks": "checks",
        "prepared": lambda t: ago(t["prepared_us"], now_us),
        "decided by": "decided_by",
    }
    print_rows(found, brokers.json, columns, "no such transactions")


@app.command("summary")
def summary(
    brokers: Brokers, group: str | None = Argument(None, metavar="[GROUP]", help="The producer group; else all.")
) -> None:
    """Count undecided transactions by producer group and cause."""
    with brokers.admin() as admin:
        groups = admin.transactions_summary(group)
        now_us = 0 if brokers.json else broker_time(admin)
    if brokers.json:
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
    checked = f"checked {least}" + (f" to {most}" if most > least else "") + (" time" if most == 1 else " times")
    return {
        "not_due": "the first check is not due yet",
        "due": "a check is due, and no producer of the group was connected",
        "unanswered": f"{checked} without a decision; it is checked again, or parked",
        "asked_out": f"{checked} without a decision; an operator must decide",
        "aged": f"half_retention ended, or it cannot be read ({checked}); an operator must decide",
    }.get(cause, cause)


@app.command("show")
def show(
    operation: Operation,
    transaction: str = Argument(..., metavar="ID", help="A transaction id, such as 9f3a01c2-3-2a."),
    body: bool = Option(False, "--body", help="Also bodies that are withheld; this is recorded."),
) -> None:
    """Show a transaction: its messages and its history."""
    with operation.admin() as admin:
        found: Any = admin.transaction(transaction, bodies=body, why=operation.why)
    found["messages"] = [plain(message) for message in found["messages"]]
    if operation.json:
        return print_json(found)
    facts = {n.replace("_", " "): found.get(n) for n in ("group", "instance", "checks", "message_count")}
    print_facts({"transaction": found["id"], "state": state(found["state"]), **facts})
    print_rows(found["messages"], False, _MESSAGES, "no messages")
    if not body and any(message.get("withheld") for message in found["messages"]):
        notice("the bodies are withheld; --body shows them, and this is recorded")
    start = found["timeline"][0]["time_us"] if found["timeline"] else 0
    columns: Columns = {
        "time": lambda event: moment(event["time_us"]),
        ">after": lambda event: duration((event["time_us"] - start) / 1e6),
        "event": "event",
        "details": lambda event: " ".join(f"{name} {value}" for name, value in event.items() if name not in _ORDER),
    }
    print_rows(found["timeline"], False, columns, "nothing happened to it")
