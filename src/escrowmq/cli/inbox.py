"""``escrowmq inbox``: the records of consumers in their database (handled messages, offsets, stored prepares)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from escrowmq.cli.failures import finish
from escrowmq.cli.options import App, Database, Limit, Why, time_option
from escrowmq.cli.printing import Columns, moment, notice, print_json, print_rows
from escrowmq.errors import Code, error

if TYPE_CHECKING:
    from escrowmq.outbox.modes import Slot

app = App("What consumers store in their database: handled messages, offsets, prepares.")

Group = Annotated[str, Argument(metavar="GROUP", help="The consumer group.")]
After = Annotated[str | None, Option(metavar="ID", help="Only rows after this one.")]


@app.command("list")
def list_(database: Database, group: Group, limit: Limit = 100, after: After = None) -> None:
    """List records of messages that a group has handled, by id."""
    from escrowmq import outbox

    with database.opened() as engine:
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


@app.command("prepares")
def prepares(
    database: Database,
    group: Group,
    older_than: float = time_option("0s", "--older-than", "Only those stored so long ago."),
    limit: Limit = 100,
    after: After = None,
) -> None:
    """List stored prepares of the both-reach mode without a decision, by id."""
    from escrowmq import outbox

    with database.opened() as engine:
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


@app.command("offsets")
def offsets(
    database: Database,
    group: str | None = Option(None, "--group", "-g", help="Only of this consumer group."),
    topic: str | None = Option(None, "--topic", "-t", help="Only of this topic."),
    limit: Limit = 1000,
) -> None:
    """List the offsets that consumers keep in their database, and their owners."""
    from escrowmq import outbox

    with database.opened() as engine:
        found = outbox.modes.list_places(engine, group, topic, limit=limit)
    names = ("group", "topic", "next_offset", "owner")
    rows = [{name: getattr(one, name) for name in names} | {"slot": shown(one.slot)} for one in found]
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
    slots: list[str] = Argument(
        ..., metavar="SLOT...", help="SHARD/QUEUE, or SHARD/QUEUE/STRIDE/PART, as `inbox offsets` shows them."
    )
    why: Why = None


@app.command("move")
def move(
    of: _Slots, group: Group, to: int = Option(..., min=0, metavar="OFFSET", help="The next offset that is handled.")
) -> None:
    """Move offsets without an owner, back or forward. The action is recorded (`escrowmq acts list`)."""
    from escrowmq import outbox

    wanted = dict.fromkeys(map(slot_of, of.slots), to)
    with of.opened() as engine:
        done = outbox.modes.move(engine, group, of.topic, wanted, why=of.why)
    finish("slot", [(shown(one.slot), one.code, {"was": one.was}) for one in done], of.json)


@app.command("fence")
def fence(of: _Slots, group: Group) -> None:
    """Fence a consumer, and release its slots. The action is recorded (`escrowmq acts list`)."""
    from escrowmq import outbox

    wanted = [slot_of(text) for text in of.slots]
    with of.opened() as engine:
        outbox.modes.fence(engine, group, of.topic, wanted, why=of.why)
    if of.json:
        return print_json({"fenced": [shown(slot) for slot in wanted]})
    notice(f"{', '.join(map(shown, wanted))}: the previous owner is fenced")


def shown(slot: Slot) -> str:
    """Format a slot in the syntax of these commands."""
    whole = f"{slot.shard:08x}/{slot.queue}"
    return whole if slot.stride == 1 else f"{whole}/{slot.stride}/{slot.part}"


def slot_of(text: str) -> Slot:
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
