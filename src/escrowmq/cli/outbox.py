"""``escrowmq outbox``, ``stuck`` and ``inbox``: the tables of producers and consumers, and the relay."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text
from typer import Argument, Option

from escrowmq import outbox
from escrowmq.cli.failures import Exit, finish
from escrowmq.cli.options import (
    DEFAULT_URL,
    PASSWORD,
    App,
    Database,
    DatabaseUrl,
    Limit,
    LogOptions,
    MetricsOptions,
    Why,
    choice_option,
    pairs,
    time_option,
)
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
    from escrowmq.outbox.modes import Slot
    from escrowmq.outbox.relay import Backlog, Relay

app = App("The local message table: messages committed with a database transaction.")

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
def migrate(database: Database) -> None:
    """Create the tables, or upgrade them to this version. Repeating it, even concurrently, is safe."""
    with database.open(make=True) as engine:
        before = outbox.migrate(engine)
    now = outbox.tables.SCHEMA_VERSION
    if database.json:
        return print_json({"before": before, "version": now})
    notice(f"the tables are of version {now}" + (", as before" if before == now else ""))


@app.command("list")
def list_(
    database: Database,
    state: str = choice_option("waiting", [*_STYLES, "all"], "--state", "-s", help="Of this state"),
    limit: Limit = 100,
    after: int = Option(0, metavar="SEQ", help="Only rows after this one: the next page."),
) -> None:
    """List messages of the table, without bodies; by default those that need an operator."""
    with database.open() as engine:
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
    empty = "no messages" if state == "all" else f"no message is {state}; --state all lists all"
    print_rows([_to_json(row) for row in found], database.json, columns, empty)


@app.command("show")
def show(
    database: Database, message_id: str = Argument(..., metavar="ID", help="A message id, as `outbox list` shows it.")
) -> None:
    """Show one message with its body, properties, errors and history."""
    with database.open() as engine:
        row = outbox.attention.show(engine, message_id)
    if database.json:
        return print_json(_to_json(row))
    facts = {"message id": row.id.hex(), "state": _state(row.state.name.lower())}
    facts |= {name: getattr(row, name) for name in ("seq", "topic", "key", "tag", "attempts")}
    times = ("created", "due", "sent", "done")
    facts |= {name: moment(getattr(row, f"{name}_us")) for name in times}
    facts |= {f"property {name}": cell(value) for name, value in row.properties.items()}
    print_facts({**facts, "body": body_text(row.body or b"", 2000)})
    for line in (row.error or "").splitlines():
        notice(line)


def _to_json(row: Row) -> dict[str, Any]:
    """Convert a row to JSON values; listed rows have no body."""
    fields = {name: getattr(row, name) for name in row.__slots__}
    if fields["body"] is None:
        del fields["body"]
    return plain({**fields, "state": row.state.name.lower()})


def _state(name: str) -> Text:
    return Text(name, _STYLES[name])


@dataclass
class _Sending:
    """Where a relay sends to, and how: the settings of ``Relay``."""

    to: str = Option(
        DEFAULT_URL,
        "--to",
        "-t",
        envvar="ESCROWMQ_URL",
        help="Where to: escrow://HOST:PORT[,HOST:PORT...], kafka://HOST:PORT[,...], amqp://..., redis://..." + PASSWORD,
    )
    target_option: list[str] | None = Option(
        None, "--target-option", "-o", metavar="NAME=VALUE", help="An option of the target; repeatable."
    )
    workers: int = Option(2, min=1, max=64, help="Threads.")
    batch_rows: int = Option(4000, min=1, max=65_536, help="Rows of one batch.")
    redeliveries: int = Option(3, min=0, help="Attempts after a refusal, before an operator must decide.")
    redelivery_interval: float = time_option("5min", "--redelivery-interval", "Between two such attempts.")
    on_exhausted: str = Option("hold_key", help="What a waiting message does to later ones of its key: hold_key, pass.")
    await_callback: bool = Option(False, "--await-callback", help="Keep sent rows until the callback; resend without.")
    keep: float = time_option("0s", "--keep", "Keep sent rows this long.")
    lease: float = time_option("30s", "--lease", "A relay silent for this long loses its lanes.")
    poll_interval: float = time_option("500ms", "--poll-interval", "Longest pause between two reads of the table.")

    def target(self) -> Any:
        """Open the target."""
        from escrowmq.outbox.targets.opening import open_target, read_options

        named: dict[str, Any] = {
            name.replace("-", "_"): value for name, value in pairs(self.target_option, "--target-option").items()
        }
        return open_target(self.to, **read_options(self.to, named))

    def settings(self) -> dict[str, Any]:
        """Return the arguments of ``Relay``."""
        return {name: value for name, value in vars(self).items() if name not in ("to", "target_option")}


@dataclass
class _Reporting:
    """When a relay ends, and what it reports."""

    once: bool = Option(False, "--once", help="End when the table has nothing left to send, whichever relay sent it.")
    patience: float = time_option("1min", "--patience", "With --once: give up after this long.")
    status_interval: float = time_option("10s", "--status-interval", "Between two status lines.")
    json: bool = Option(False, "--json", help="Status as JSON lines on standard output.")


@app.command("relay")
def relay(
    database: DatabaseUrl, sending: _Sending, reporting: _Reporting, metrics: MetricsOptions, log: LogOptions
) -> None:
    """Relay committed messages until SIGTERM or Ctrl-C. The current batch is finished first.

    Several relays on one database share the work. With --once the exit code is 4 if unsent rows remain, which are
    counted; rows that need an operator are counted separately. Rows leased by a killed relay are sent after the lease
    expires.
    """
    from escrowmq.outbox.relay import Relay
    from escrowmq.outbox.relay.metrics import collector
    from escrowmq.platform.descriptors import raise_descriptor_limit
    from escrowmq.platform.listening import shown_address

    raise_descriptor_limit()
    log.start()
    with ExitStack() as stack:
        engine = stack.enter_context(database.open())
        target = stack.enter_context(closing(sending.target()))
        running = Relay(engine, target, **sending.settings())
        stack.callback(running.stop)
        if reporting.once:
            is_complete = _drain(running, reporting)
        else:
            made = lambda: collector(shown_address(sending.to), lambda: running.statistics, running.backlog)  # noqa: E731
            at = stack.enter_context(metrics.serve(made))
            _run(running, shown_address(sending.to), reporting, at)
            _show(running, reporting.json)
            is_complete = True
    if not is_complete:
        raise typer.Exit(Exit.UNKNOWN)


def _drain(running: Relay, reporting: _Reporting) -> bool:
    """Send all pending rows. Returns whether no unsent rows remain. Raises the error of an unreachable database."""
    with stop_signals(running.ask_to_stop):
        drained = running.drain(reporting.patience)
    left = running.backlog()
    _show(running, reporting.json, left=left)
    if left.unsent:
        rows = {"pending": left.pending, "retrying (refused, tried again later)": left.retrying, "held": left.held}
        counted = ", ".join(f"{count:,} {name}" for name, count in rows.items() if count)
        notice(f"not sent: {counted}; the oldest was written {duration(left.lag)} ago")
    if not drained:
        notice("there was not enough time: the target or the database is away, or another relay has the rows leased")
    if left.waiting:
        notice(f"{left.waiting:,} need an operator (escrowmq outbox list)")
    return drained and not left.unsent


def _run(running: Relay, to: str, reporting: _Reporting, metrics: str | None) -> None:
    ended = threading.Event()

    def report() -> None:
        shown, at = None, time.monotonic()
        while not ended.wait(reporting.status_interval or 10.0):
            now = running.statistics
            if reporting.json or now != shown:
                rate = (now.sent - (shown.sent if shown else 0)) / (time.monotonic() - at)
                _show(running, reporting.json, rate)
            shown, at = now, time.monotonic()

    with stop_signals(running.ask_to_stop):
        running.start()
        if reporting.json:
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


# Producer-driven transactions


stuck = App("Producer-driven transactions whose row and broker disagree.")


@stuck.command("list")
def list_stuck(
    database: Database,
    group: str | None = Option(None, "--group", "-g", help="Only of this producer group."),
    state: str = choice_option("stuck", ["stuck", "to_send"], "--state", "-s", help="Of this state"),
    limit: Limit = 100,
    after: str | None = Option(None, metavar="ID", help="Only rows after this one."),
) -> None:
    """List rows that need an operator, with the broker's response."""
    from escrowmq.outbox.modes.journal import Stage

    with database.open() as engine:
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


# What consumers store


inbox = App("What consumers store in their database: handled messages, offsets, prepares.")

Group = Annotated[str, Argument(metavar="GROUP", help="The consumer group.")]
After = Annotated[str | None, Option(metavar="ID", help="Only rows after this one.")]


@inbox.command("list")
def list_marks(database: Database, group: Group, limit: Limit = 100, after: After = None) -> None:
    """List records of messages that a group has handled, by id."""
    with database.open() as engine:
        found = outbox.handled.list_marks(engine, group, limit=limit, after=after)
    rows = [
        {"message_id": one.message_id.hex(), "topic": one.topic, "seen_us": one.seen_us, "forgotten": one.is_forgotten}
        for one in found
    ]
    columns: Columns = {
        "message id": "message_id",
        "topic": lambda row: row["topic"] or "any",
        "handled": lambda row: moment(row["seen_us"]),
        "forgotten": lambda row: "yes: it may be handled again" if row["forgotten"] else "",
    }
    print_rows(rows, database.json, columns, "no such marks")


@inbox.command("prepares")
def prepares(
    database: Database,
    group: Group,
    older_than: float = time_option("0s", "--older-than", "Only those stored so long ago."),
    limit: Limit = 100,
    after: After = None,
) -> None:
    """List stored prepares of the both-reach mode without a decision, by id."""
    with database.open() as engine:
        found = outbox.modes.list_prepares(engine, group, older_than=older_than, limit=limit, after=after)
    rows = [
        {name: getattr(one, name) for name in one.__slots__} | {"message_id": one.message_id.hex()} for one in found
    ]
    columns: Columns = {
        "message id": "message_id",
        "topic": "topic",
        "key": "key",
        ">bytes": "body_bytes",
        "stored": lambda row: moment(row["prepared_us"]),
    }
    print_rows(rows, database.json, columns, "no such prepares")


@inbox.command("offsets")
def offsets(
    database: Database,
    group: str | None = Option(None, "--group", "-g", help="Only of this consumer group."),
    topic: str | None = Option(None, "--topic", "-t", help="Only of this topic."),
    limit: Limit = 1000,
) -> None:
    """List the offsets that consumers keep in their database, and their owners."""
    with database.open() as engine:
        found = outbox.modes.list_places(engine, group, topic, limit=limit)
    names = ("group", "topic", "next_offset", "owner")
    rows = [{name: getattr(one, name) for name in names} | {"slot": format_slot(one.slot)} for one in found]
    columns: Columns = {
        "group": "group",
        "topic": "topic",
        "slot": "slot",
        ">next offset": "next_offset",
        "owner": lambda row: row["owner"] or "none",
    }
    print_rows(rows, database.json, columns, "no such offsets")


@dataclass
class _Slots(Database):
    """Slots of a topic, to change."""

    topic: str = Argument(..., metavar="TOPIC", help="The topic.")
    slots: list[str] = Argument(..., metavar="SLOT...", help="SHARD/QUEUE or SHARD/QUEUE/STRIDE/PART, as listed.")
    why: Why = None


@inbox.command("move")
def move(
    of: _Slots, group: Group, to: int = Option(..., min=0, metavar="OFFSET", help="The next offset that is handled.")
) -> None:
    """Move offsets without an owner, back or forward. The action is recorded (`escrowmq acts list`)."""
    wanted = dict.fromkeys(map(parse_slot, of.slots), to)
    with of.open() as engine:
        done = outbox.modes.move(engine, group, of.topic, wanted, why=of.why)
    finish("slot", [(format_slot(one.slot), one.code, {"was": one.was}) for one in done], of.json)


@inbox.command("fence")
def fence(of: _Slots, group: Group) -> None:
    """Fence a consumer, and release its slots. The action is recorded (`escrowmq acts list`)."""
    wanted = [parse_slot(text) for text in of.slots]
    with of.open() as engine:
        outbox.modes.fence(engine, group, of.topic, wanted, why=of.why)
    if of.json:
        return print_json({"fenced": [format_slot(slot) for slot in wanted]})
    notice(f"{', '.join(map(format_slot, wanted))}: the previous owner is fenced")


def format_slot(slot: Slot) -> str:
    """Format a slot in the syntax of these commands."""
    whole = f"{slot.shard:08x}/{slot.queue}"
    return whole if slot.stride == 1 else f"{whole}/{slot.stride}/{slot.part}"


def parse_slot(text: str) -> Slot:
    """Parse a slot. Raises Misuse(BAD_ARGUMENT)."""
    from escrowmq.outbox.modes import Slot

    shard, *numbers = text.split("/")
    try:
        if len(numbers) not in (1, 3):
            raise ValueError
        return Slot(int(shard, 16), *map(int, numbers))
    except ValueError:
        hint = "SHARD/QUEUE, or SHARD/QUEUE/STRIDE/PART, such as 0000002a/3"
        raise error(Code.BAD_ARGUMENT, f"{text!r} is no slot", hint) from None
