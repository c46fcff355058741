"""``escrowmq outbox``: create the tables, run the relay, list, show, retry, discard or settle messages."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from escrowmq.cli.exporting import Insecure, Metrics, serve_metrics
from escrowmq.cli.failures import Exit, finish
from escrowmq.cli.options import DEFAULT_URL, Json, Limit, LogJson, LogLevel, Why, pairs, seconds, start_log
from escrowmq.cli.printing import (
    Columns,
    body_text,
    cell,
    duration,
    moment,
    notice,
    print_facts,
    print_json,
    print_json_line,
    print_rows,
)
from escrowmq.cli.rows import plain
from escrowmq.errors import Code, error
from escrowmq.platform.signals import stop_signals

if TYPE_CHECKING:
    from escrowmq.outbox.attention import Row
    from escrowmq.outbox.relay import Backlog, Relay

app = typer.Typer(no_args_is_help=True, help="The local message table: messages committed with a database transaction.")

DatabaseUrl = Annotated[
    str,
    typer.Option(
        "--database-url",
        "-d",
        envvar="ESCROWMQ_DATABASE_URL",
        help="The database, as SQLAlchemy names it: sqlite:///shop.db, postgresql://user@host/shop, "
        "mysql://user@host/shop. A password can stand in the environment variable instead, where ps does not show "
        "it.",
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
    """Create the tables, or upgrade them to this version. Repeating it, even concurrently, is safe."""
    from escrowmq import outbox

    with outbox.engines.opened(database_url, make=True) as engine:
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
    """List messages of the table, without bodies; by default those that need an operator."""
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
    print_rows([_to_json(row) for row in found], json, columns, "no such messages")


@app.command("show")
def show(
    database_url: DatabaseUrl,
    message_id: Annotated[str, typer.Argument(metavar="ID", help="A message id, as `outbox list` shows it.")],
    json: Json = False,
) -> None:
    """Show one message with its body, properties, errors and history."""
    from escrowmq import outbox

    with outbox.engines.opened(database_url) as engine:
        row = outbox.attention.show(engine, message_id)
    if json:
        return print_json(_to_json(row))
    facts = {"message id": row.id.hex(), "state": _state(row.state.name.lower())}
    facts |= {name: getattr(row, name) for name in ("seq", "topic", "key", "tag", "attempts")}
    times = ("created", "due", "sent", "done")
    facts |= {name: moment(getattr(row, f"{name}_us")) for name in times}
    facts |= {f"property {name}": cell(value) for name, value in row.properties.items()}
    print_facts({**facts, "body": body_text(row.body or b"", 2000)})
    for line in (row.error or "").splitlines():
        notice(line)


@app.command("retry")
def retry(database_url: DatabaseUrl, ids: Ids, why: Why = None, json: Json = False) -> None:
    """Send waiting or discarded messages again, with new attempts. The action is recorded (`escrowmq acts list`)."""
    _apply_to_each(database_url, ids, why, json, "retry")


@app.command("discard")
def discard(database_url: DatabaseUrl, ids: Ids, why: Why = None, json: Json = False) -> None:
    """Discard messages; `retry` restores them. The action is recorded (`escrowmq acts list`)."""
    _apply_to_each(database_url, ids, why, json, "discard")


@app.command("settle")
def settle(database_url: DatabaseUrl, ids: Ids, why: Why = None, json: Json = False) -> None:
    """Mark messages as done without sending them. The action is recorded (`escrowmq acts list`)."""
    _apply_to_each(database_url, ids, why, json, "settle")


def _apply_to_each(url: str, ids: list[str], why: str | None, json: bool, act: str) -> None:
    """Apply one operation to every id and print each result; the exit code is that of the first failure."""
    from escrowmq import outbox

    with outbox.engines.opened(url) as engine:
        results = getattr(outbox.attention, act)(engine, ids, why=why)
    states = [{"state": None if r.state is None else r.state.name.lower()} for r in results]
    finish("message id", [(r.id.hex(), r.code, state) for r, state in zip(results, states, strict=True)], json)


def _to_json(row: Row) -> dict[str, Any]:
    """Convert a row to JSON values; listed rows have no body."""
    fields = {name: getattr(row, name) for name in row.__slots__}
    if fields["body"] is None:
        del fields["body"]
    return plain({**fields, "state": row.state.name.lower()})


def _state(name: str) -> Text:
    return Text(name, _STYLES[name])


@app.command("relay")
def relay(
    database_url: DatabaseUrl,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            "-t",
            envvar="ESCROWMQ_URL",
            help="Where to: escrow://HOST:PORT[,HOST:PORT...], kafka://HOST:PORT[,...], amqp://..., redis://... A "
            "password can stand in the environment variable instead, where ps does not show it.",
        ),
    ] = DEFAULT_URL,
    once: Annotated[
        bool, typer.Option("--once", help="End when the table has nothing left to send, whichever relay sent it.")
    ] = False,
    patience: Annotated[
        str, typer.Option("--patience", metavar="TIME", help="With --once: give up after this long.")
    ] = "1min",
    workers: Annotated[int, typer.Option("--workers", min=1, max=64, help="Threads.")] = 2,
    batch_rows: Annotated[int, typer.Option("--batch-rows", min=1, max=65_536, help="Rows of one batch.")] = 4000,
    redeliveries: Annotated[
        int,
        typer.Option("--redeliveries", min=0, help="Tries after a refusal, before it waits for a person."),
    ] = 3,
    redelivery_interval: Annotated[
        str, typer.Option("--redelivery-interval", metavar="TIME", help="Between two such tries.")
    ] = "5min",
    on_exhausted: Annotated[
        str,
        typer.Option("--on-exhausted", help="What a waiting message does to later ones of its key: hold_key, pass."),
    ] = "hold_key",
    await_callback: Annotated[
        bool, typer.Option("--await-callback", help="Keep sent rows until the consumer's callback; resend without.")
    ] = False,
    keep: Annotated[str, typer.Option("--keep", metavar="TIME", help="Keep sent rows this long.")] = "0s",
    lease: Annotated[
        str, typer.Option("--lease", metavar="TIME", help="A relay silent for this long loses its lanes.")
    ] = "30s",
    poll_interval: Annotated[
        str, typer.Option("--poll-interval", metavar="TIME", help="Longest pause between two looks at the table.")
    ] = "500ms",
    status_interval: Annotated[
        str, typer.Option("--status-interval", metavar="TIME", help="Between two status lines.")
    ] = "10s",
    target_option: Annotated[
        list[str] | None,
        typer.Option(
            "--target-option", "-o", metavar="NAME=VALUE", help="An option of the target; may be given again."
        ),
    ] = None,
    metrics: Metrics = None,
    insecure: Insecure = False,
    json: Annotated[bool, typer.Option("--json", help="Status as JSON lines on standard output.")] = False,
    log_level: LogLevel = "info",
    log_json: LogJson = False,
) -> None:
    """Relay committed messages until SIGTERM or Ctrl-C. The current batch is finished first.

    Several relays on one database share the work. With --once the exit code is 4 if unsent rows remain, which are
    counted; rows that need an operator are counted separately. Rows leased by a killed relay are sent after the lease
    expires.
    """
    from escrowmq import outbox
    from escrowmq.outbox.relay import Relay
    from escrowmq.outbox.relay.metrics import collector
    from escrowmq.outbox.targets.opening import open_target, read_options
    from escrowmq.platform.descriptors import raise_descriptor_limit
    from escrowmq.platform.listening import shown_address

    raise_descriptor_limit()
    start_log(log_level, log_json)
    settings = {
        "workers": workers,
        "batch_rows": batch_rows,
        "redeliveries": redeliveries,
        "redelivery_interval": seconds(redelivery_interval, "--redelivery-interval"),
        "on_exhausted": on_exhausted,
        "await_callback": await_callback,
        "keep": seconds(keep, "--keep"),
        "lease": seconds(lease, "--lease"),
        "poll_interval": seconds(poll_interval, "--poll-interval"),
    }
    wait = seconds(patience, "--patience")
    every = seconds(status_interval, "--status-interval") or 10.0
    given = pairs(target_option, "--target-option")
    named: dict[str, Any] = {name.replace("-", "_"): value for name, value in given.items()}
    with ExitStack() as stack:
        engine = stack.enter_context(outbox.engines.opened(database_url))
        target = open_target(to, **read_options(to, named))
        stack.callback(target.close)
        running = Relay(engine, target, **settings)
        stack.callback(running.stop)
        if once:
            all_sent = _drain(running, wait, json)
        else:
            made = lambda: collector(shown_address(to), lambda: running.statistics, running.backlog)  # noqa: E731
            at = stack.enter_context(serve_metrics(metrics, insecure, made, lambda: {"status": "ok"}))
            all_sent = _run(running, shown_address(to), every, json, at)
            _show(running, json)
    if not all_sent:
        raise typer.Exit(Exit.UNKNOWN)


def _drain(running: Relay, patience: float | None, json: bool) -> bool:
    """Send all pending rows. Returns whether no unsent rows remain. Raises the error of an unreachable database."""
    with stop_signals(running.ask_to_stop):
        drained = running.drain(patience)
    left = running.backlog()
    _show(running, json, left=left)
    if left.unsent:
        rows = {
            "pending": left.pending,
            "retrying (refused, tried again later)": left.retrying,
            "held behind": left.held,
        }
        counted = ", ".join(f"{count:,} {name}" for name, count in rows.items() if count)
        notice(f"not sent: {counted}; the oldest was written {duration(left.lag)} ago")
    if not drained:
        notice("there was not enough time: the target or the database is away, or another relay has the rows leased")
    if left.waiting:
        notice(f"{left.waiting:,} wait for a person (escrowmq outbox list)")
    return drained and not left.unsent


def _run(running: Relay, to: str, every: float, json: bool, metrics: str | None) -> bool:
    ended = threading.Event()

    def report() -> None:
        shown, at = None, time.monotonic()
        while not ended.wait(every):
            now = running.statistics
            if json or now != shown:
                rate = (now.sent - (shown.sent if shown else 0)) / (time.monotonic() - at)
                _show(running, json, rate)
            shown, at = now, time.monotonic()

    with stop_signals(running.ask_to_stop):
        running.start()
        if json:
            print_json_line({"event": "started", "to": to, "metrics": metrics, **running.statistics.as_dict()})
        else:
            notice(f"relaying to {to}{f', metrics at {metrics}' if metrics else ''}; Ctrl-C stops it")
        reporter = threading.Thread(target=report, daemon=True)
        reporter.start()
        try:
            running.wait()
        finally:
            ended.set()
            reporter.join()
            running.stop()
    return True


def _show(running: Relay, json: bool, rate: float | None = None, left: Backlog | None = None) -> None:
    now = running.statistics
    if json:
        event = "stopped" if rate is None else "status"
        backlog = {} if left is None else {"lag": left.lag, "left": left.as_dict()}
        return print_json_line({"event": event, **now.as_dict(), **backlog})
    troubles = ("refused", "waiting", "repeated", "target_failures", "database_failures")
    parts = [f"{now.sent:,} sent"]
    if rate is not None:
        parts += [f"{rate:,.0f}/s", f"{now.lanes} lanes", f"{duration(now.lag)} behind" if now.lag else "nothing left"]
    parts += [f"{count:,} {name.replace('_', ' ')}" for name in troubles if (count := getattr(now, name))]
    notice(", ".join(parts))
