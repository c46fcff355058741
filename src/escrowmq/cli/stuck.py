"""``escrowmq stuck``: producer-driven transactions whose decision differs from the broker's, for an operator."""

from __future__ import annotations

from typer import Option

from escrowmq.cli.options import App, Database, Limit, choice_option
from escrowmq.cli.printing import Columns, moment, print_rows

app = App("Producer-driven transactions whose row and broker disagree.")


@app.command("list")
def list_(
    database: Database,
    group: str | None = Option(None, "--group", "-g", help="Only of this producer group."),
    state: str = choice_option(
        "stuck", ["stuck", "to_send"], "--state", "-s", help="stuck, or to_send: the compensation mode must send them."
    ),
    limit: Limit = 100,
    after: str | None = Option(None, metavar="ID", help="Only rows after this one."),
) -> None:
    """List rows that need an operator, with the broker's response."""
    from escrowmq import outbox
    from escrowmq.outbox.modes.journal import Stage

    with database.opened() as engine:
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
        "broker's response": "reason",
        "transaction": "transaction",
        "topic": "topic",
        "key": "key",
        ">attempts": "attempts",
        "created": lambda row: moment(row["created_us"]),
    }
    print_rows(rows, database.json, columns, "no such rows")
