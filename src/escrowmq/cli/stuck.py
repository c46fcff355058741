"""``escrowmq stuck``: producer-driven transactions whose decision differs from the broker's, for an operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from escrowmq.cli.failures import finish
from escrowmq.cli.options import Json, Limit, Why
from escrowmq.cli.outbox import DatabaseUrl, Ids
from escrowmq.cli.printing import Columns, moment, print_rows
from escrowmq.errors import Code, error

app = typer.Typer(no_args_is_help=True, help="Producer-driven transactions whose row and broker disagree.")

_STATES = ("stuck", "to_send")


@app.command("list")
def list_(
    database_url: DatabaseUrl,
    group: Annotated[str | None, typer.Option("--group", "-g", help="Only of this producer group.")] = None,
    state: Annotated[
        str, typer.Option("--state", "-s", help="stuck, or to_send: what the compensation mode has still to send.")
    ] = "stuck",
    limit: Limit = 100,
    after: Annotated[str | None, typer.Option("--after", metavar="ID", help="Only rows after this one.")] = None,
    json: Json = False,
) -> None:
    """List rows that need an operator, with the broker's response."""
    if state not in _STATES:
        raise error(Code.BAD_ARGUMENT, f"--state {state}", f"one of {', '.join(_STATES)}")
    from escrowmq import outbox
    from escrowmq.outbox.modes.journal import Stage

    with outbox.engines.opened(database_url) as engine:
        found = outbox.modes.list_stuck(engine, group, state=Stage[state.upper()], limit=limit, after=after)
    rows = [
        {name: getattr(row, name) for name in row.__slots__}
        | {
            "id": row.id.hex(),
            "state": row.state.name.lower(),
            "was": None if row.was is None else row.was.name.lower(),
            "shard": None if row.shard is None else f"{row.shard:08x}",
            "transaction": None if row.transaction is None else str(row.transaction),
        }
        for row in found
    ]
    columns: Columns = {
        "message id": "id",
        "group": "group",
        "was": "was",
        "the broker says": "reason",
        "transaction": "transaction",
        "topic": "topic",
        "key": "key",
        ">attempts": "attempts",
        "created": lambda row: moment(row["created_us"]),
    }
    print_rows(rows, json, columns, "no such rows")


@app.command("retry")
def retry(database_url: DatabaseUrl, ids: Ids, why: Why = None, json: Json = False) -> None:
    """Retry the decision at the program's next redrive. The action is recorded (`escrowmq acts list`)."""
    from escrowmq import outbox

    _apply_to_each(outbox.modes.retry_stuck, database_url, ids, why, json)


@app.command("commit")
def commit(database_url: DatabaseUrl, ids: Ids, why: Why = None, json: Json = False) -> None:
    """Commit these transactions. The action is recorded (`escrowmq acts list`)."""
    from escrowmq import outbox

    _apply_to_each(outbox.modes.commit_stuck, database_url, ids, why, json)


@app.command("rollback")
def rollback(database_url: DatabaseUrl, ids: Ids, why: Why = None, json: Json = False) -> None:
    """Roll back these transactions. The action is recorded (`escrowmq acts list`)."""
    from escrowmq import outbox

    _apply_to_each(outbox.modes.rollback_stuck, database_url, ids, why, json)


@app.command("resend")
def resend(database_url: DatabaseUrl, ids: Ids, why: Why = None, json: Json = False) -> None:
    """Prepare and commit messages whose transactions are lost. The action is recorded (`escrowmq acts list`).

    Within the broker's dedup_window this returns the first transaction; if that was committed, two messages have the
    id.
    """
    from escrowmq import outbox

    _apply_to_each(outbox.modes.resend_stuck, database_url, ids, why, json)


@app.command("settle")
def settle(database_url: DatabaseUrl, ids: Ids, why: Why = None, json: Json = False) -> None:
    """Delete resolved rows; the broker keeps its state. The action is recorded (`escrowmq acts list`)."""
    from escrowmq import outbox

    _apply_to_each(outbox.modes.settle_stuck, database_url, ids, why, json)


def _apply_to_each(act: Callable[..., Any], url: str, ids: list[str], why: str | None, json: bool) -> None:
    """Apply one operation to every id and print each result; the exit code is that of the first failure."""
    from escrowmq import outbox

    with outbox.engines.opened(url) as engine:
        results = act(engine, ids, why=why)
    states = [{"state": None if one.state is None else one.state.name.lower()} for one in results]
    finish("message id", [(one.id.hex(), one.code, s) for one, s in zip(results, states, strict=True)], json)
