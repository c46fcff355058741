"""``escrowmq outbox``: the local message table of a database: make it, see what waits for a person, and settle it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from escrowmq.cli.failures import finish
from escrowmq.cli.options import Json, Limit
from escrowmq.cli.printing import Columns, body_text, cell, moment, notice, print_facts, print_json, print_rows
from escrowmq.cli.rows import plain
from escrowmq.errors import Code, error

if TYPE_CHECKING:
    from escrowmq.outbox.attention import Row

app = typer.Typer(no_args_is_help=True, help="The local message table: messages that left with a database transaction.")

DatabaseUrl = Annotated[
    str,
    typer.Option(
        "--database-url",
        "-d",
        envvar="ESCROWMQ_DATABASE_URL",
        help="The database, as SQLAlchemy names it: sqlite:///shop.db, postgresql://user@host/shop, mysql://user@host/shop.",
    ),
]
Ids = Annotated[list[str], typer.Argument(metavar="ID...", help="Message ids, as `outbox list` shows them.")]
_STYLES = {
    "pending": "yellow",
    "retrying": "yellow",
    "held": "yellow",
    "waiting": "bold magenta",
    "sent": "green",
    "done": "green",
    "discarded": "red",
}


@app.command("migrate")
def migrate(database_url: DatabaseUrl, json: Json = False) -> None:
    """Create the tables, or upgrade them to this version. Harmless when it is run again, or twice at once."""
    from escrowmq import outbox

    with outbox.engines.opened(database_url) as engine:
        before = outbox.migrate(engine)
    now = outbox.tables.SCHEMA_VERSION
    if json:
        return print_json({"before": before, "version": now})
    notice(f"the tables are of version {now}" + (", as before" if before == now else ""))


@app.command("list")
def list_(
    database_url: DatabaseUrl,
    state: Annotated[
        str,
        typer.Option(
            "--state", "-s", help="pending, retrying, held, waiting (for a person), sent, done, discarded, or all."
        ),
    ] = "waiting",
    limit: Limit = 100,
    after: Annotated[int, typer.Option("--after", metavar="SEQ", help="Only rows after this one: the next page.")] = 0,
    json: Json = False,
) -> None:
    """List messages of the table, without bodies; by default those that wait for a person."""
    if state not in (*_STYLES, "all"):
        raise error(Code.BAD_ARGUMENT, f"--state {state}", f"one of {', '.join(_STYLES)}, all")
    from escrowmq import outbox

    with outbox.engines.opened(database_url) as engine:
        wanted = None if state == "all" else outbox.State[state.upper()]
        found = outbox.attention.list_messages(engine, state=wanted, limit=limit, after=after)
    columns: Columns = {
        ">seq": "seq",
        "message id": "id",
        "state": lambda row: _state(row["state"]),
        "topic": "topic",
        "key": "key",
        ">bytes": "body_bytes",
        ">attempts": "attempts",
        "created": lambda row: moment(row["created_us"]),
        "error": lambda row: (row["error"] or "").partition("\n")[0] or None,
    }
    print_rows([_plain(row) for row in found], json, columns, "no such messages")


@app.command("show")
def show(
    database_url: DatabaseUrl,
    message_id: Annotated[str, typer.Argument(metavar="ID", help="A message id, as `outbox list` shows it.")],
    json: Json = False,
) -> None:
    """Show one message with its body, properties, errors and what was done to it."""
    from escrowmq import outbox

    with outbox.engines.opened(database_url) as engine:
        row = outbox.attention.show(engine, message_id)
    if json:
        return print_json(_plain(row))
    facts = {"message id": row.id.hex(), "state": _state(row.state.name.lower())}
    facts |= {name: getattr(row, name) for name in ("seq", "topic", "key", "tag", "attempts")}
    times = ("created", "due", "sent", "done")
    facts |= {name: moment(getattr(row, f"{name}_us")) for name in times}
    facts |= {f"property {name}": cell(value) for name, value in row.properties.items()}
    print_facts({**facts, "body": body_text(row.body or b"", 2000)})
    for line in (row.error or "").splitlines():
        notice(line)


@app.command("retry")
def retry(database_url: DatabaseUrl, ids: Ids, json: Json = False) -> None:
    """Send messages again that wait or were discarded, attempts counted anew."""
    _each(database_url, ids, json, "retry")


@app.command("discard")
def discard(database_url: DatabaseUrl, ids: Ids, json: Json = False) -> None:
    """Never send these messages. They stay in the table; `retry` brings them back."""
    _each(database_url, ids, json, "discard")


def _each(url: str, ids: list[str], json: bool, act: str) -> None:
    """Do one act to every id; each has its own result, the exit code is that of the first that failed."""
    from escrowmq import outbox

    with outbox.engines.opened(url) as engine:
        results = getattr(outbox.attention, act)(engine, ids)
    states = [{"state": None if r.state is None else r.state.name.lower()} for r in results]
    finish("message id", [(r.id.hex(), r.code, state) for r, state in zip(results, states, strict=True)], json)


def _plain(row: Row) -> dict[str, Any]:
    """A row in JSON's values; a listed one has no body."""
    fields = {name: getattr(row, name) for name in row.__slots__}
    if fields["body"] is None:
        del fields["body"]
    return plain({**fields, "state": row.state.name.lower()})


def _state(name: str) -> Text:
    return Text(name, _STYLES[name])
