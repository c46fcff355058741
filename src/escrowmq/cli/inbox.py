"""``escrowmq inbox``: the records of consumers in their database (handled messages, offsets, stored prepares)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from escrowmq.cli.failures import finish
from escrowmq.cli.options import Json, Limit, Why, seconds
from escrowmq.cli.outbox import DatabaseUrl, Ids
from escrowmq.cli.printing import Columns, moment, notice, print_json, print_rows
from escrowmq.errors import Code, error

if TYPE_CHECKING:
    from escrowmq.outbox.acts import Done
    from escrowmq.outbox.modes import Slot

app = typer.Typer(
    no_args_is_help=True,
    help="What consumers store in their database: handled messages, offsets, prepares.",
)

Group = Annotated[str, typer.Argument(metavar="GROUP", help="The consumer group.")]
OfTopic = Annotated[
    str | None, typer.Option("--topic", "-t", help="The messages' topic, where several topics have the same ids.")
]
After = Annotated[str | None, typer.Option("--after", metavar="ID", help="Only what comes after this one.")]
Slots = Annotated[
    list[str],
    typer.Argument(metavar="SLOT...", help="SHARD/QUEUE, or SHARD/QUEUE/STRIDE/PART, as `inbox offsets` shows them."),
]


@app.command("list")
def list_(group: Group, database_url: DatabaseUrl, limit: Limit = 100, after: After = None, json: Json = False) -> None:
    """List records of messages that a group has handled, by id."""
    from escrowmq import outbox

    with outbox.engines.opened(database_url) as engine:
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
    print_rows(rows, json, columns, "no such marks")


@app.command("forget")
def forget(
    group: Group, ids: Ids, database_url: DatabaseUrl, topic: OfTopic = None, why: Why = None, json: Json = False
) -> None:
    """Delete records of handled messages, so that redeliveries are handled again. The action is recorded."""
    from escrowmq import outbox

    with outbox.engines.opened(database_url) as engine:
        _finish(outbox.handled.forget_marks(engine, group, ids, topic=topic, why=why), json)


@app.command("settle")
def settle(
    group: Group, ids: Ids, database_url: DatabaseUrl, topic: OfTopic = None, why: Why = None, json: Json = False
) -> None:
    """Mark messages as handled: the group skips them. The action is recorded (`escrowmq acts list`)."""
    from escrowmq import outbox

    with outbox.engines.opened(database_url) as engine:
        _finish(outbox.handled.settle_marks(engine, group, ids, topic=topic, why=why), json)


@app.command("prepares")
def prepares(
    group: Group,
    database_url: DatabaseUrl,
    older_than: Annotated[
        str, typer.Option("--older-than", metavar="TIME", help="Only those stored so long ago.")
    ] = "0s",
    limit: Limit = 100,
    after: After = None,
    json: Json = False,
) -> None:
    """List stored prepares of the both-reach mode without a decision, by id."""
    from escrowmq import outbox

    age = seconds(older_than, "--older-than") or 0.0
    with outbox.engines.opened(database_url) as engine:
        found = outbox.modes.list_prepares(engine, group, older_than=age, limit=limit, after=after)
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
    print_rows(rows, json, columns, "no such prepares")


@app.command("discard")
def discard(group: Group, ids: Ids, database_url: DatabaseUrl, why: Why = None, json: Json = False) -> None:
    """Delete stored prepares; a later commit has no effect. The action is recorded (`escrowmq acts list`)."""
    from escrowmq import outbox

    with outbox.engines.opened(database_url) as engine:
        _finish(outbox.modes.discard_prepares(engine, group, ids, why=why), json)


@app.command("offsets")
def offsets(
    database_url: DatabaseUrl,
    group: Annotated[str | None, typer.Option("--group", "-g", help="Only of this consumer group.")] = None,
    topic: Annotated[str | None, typer.Option("--topic", "-t", help="Only of this topic.")] = None,
    limit: Limit = 1000,
    json: Json = False,
) -> None:
    """List the offsets that consumers keep in their database, and their owners."""
    from escrowmq import outbox

    with outbox.engines.opened(database_url) as engine:
        found = outbox.modes.list_places(engine, group, topic, limit=limit)
    rows = [
        {
            "group": one.group,
            "topic": one.topic,
            "slot": shown(one.slot),
            "next_offset": one.next_offset,
            "owner": one.owner,
        }
        for one in found
    ]
    columns: Columns = {
        "group": "group",
        "topic": "topic",
        "slot": "slot",
        ">next offset": "next_offset",
        "owner": lambda row: row["owner"] or "nobody",
    }
    print_rows(rows, json, columns, "no such offsets")


@app.command("move")
def move(
    group: Group,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The topic.")],
    slots: Slots,
    database_url: DatabaseUrl,
    to: Annotated[int, typer.Option("--to", min=0, metavar="OFFSET", help="The next offset that is handled.")],
    why: Why = None,
    json: Json = False,
) -> None:
    """Move offsets without an owner, back or forward. The action is recorded (`escrowmq acts list`)."""
    from escrowmq import outbox

    wanted = dict.fromkeys(map(slot_of, slots), to)
    with outbox.engines.opened(database_url) as engine:
        done = outbox.modes.move(engine, group, topic, wanted, why=why)
    finish("slot", [(shown(one.slot), one.code, {"was": one.was}) for one in done], json)


@app.command("fence")
def fence(
    group: Group,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The topic.")],
    slots: Slots,
    database_url: DatabaseUrl,
    why: Why = None,
    json: Json = False,
) -> None:
    """Fence a consumer, and release its slots. The action is recorded (`escrowmq acts list`)."""
    from escrowmq import outbox

    wanted = [slot_of(text) for text in slots]
    with outbox.engines.opened(database_url) as engine:
        outbox.modes.fence(engine, group, topic, wanted, why=why)
    if json:
        return print_json({"fenced": [shown(slot) for slot in wanted]})
    notice(f"whoever had {', '.join(map(shown, wanted))} can commit nothing about it any more")


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


def _finish(results: list[Done], json: bool) -> None:
    """Print one result per id; the exit code is that of the first failure."""
    rows: list[tuple[str, Code, dict[str, Any]]] = [(one.id.hex(), one.code, {}) for one in results]
    finish("message id", rows, json)
