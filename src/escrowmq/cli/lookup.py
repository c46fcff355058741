"""``escrowmq lookup``: find messages by key or id, half messages included."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from escrowmq.cli.failures import Exit
from escrowmq.cli.options import DEFAULT_URL, Json, Limit, Url, admin_at
from escrowmq.cli.printing import Columns, moment, print_facts, print_rows, state
from escrowmq.cli.rows import body_of, plain
from escrowmq.errors import Code, error


def lookup(
    key: Annotated[str | None, typer.Argument(help="The key of the messages.")] = None,
    message_id: Annotated[
        str | None, typer.Option("--id", "-i", help="Instead of a key: the message id (32 digits, or your own).")
    ] = None,
    topic: Annotated[str | None, typer.Option("--topic", "-t", help="Only in this topic.")] = None,
    limit: Limit = 20,
    url: Url = DEFAULT_URL,
    json: Json = False,
) -> None:
    """Find messages by key or id, newest first: plain, half, rolled back, wherever they stand.

    Exit code 1 when there is none.
    """
    if (key is None) == (message_id is None):
        raise error(Code.BAD_ARGUMENT, "look up by key or by id", "escrowmq lookup KEY, or escrowmq lookup --id ID")
    with admin_at(url) as admin:
        found = [plain(m) for m in admin.lookup(message_id=message_id, key=key, topic=topic, limit=limit)[:limit]]
    if len(found) == 1 and not json:
        print_facts(_facts(found[0]))
    else:
        columns: Columns = {
            "message": _address,
            "state": lambda m: state(m["state"]),
            "key": "key",
            "tag": "tag",
            "stored": lambda m: moment(m["stored_us"]),
            "transaction": "transaction",
            "body": lambda m: body_of(m, 40),
        }
        print_rows(found, json, columns, "nothing found")
    if not found:
        raise typer.Exit(Exit.FINDING)


def _facts(message: dict[str, Any]) -> dict[str, Any]:
    """Everything about one message."""
    return {
        "message": _address(message),
        "state": state(message["state"]),
        "message id": message["message_id"],
        "transaction": message["transaction"],
        "key": message["key"],
        "tag": message["tag"],
        "born": moment(message["born_us"]),
        "stored": moment(message["stored_us"]),
        "visible from": moment(message["visible_us"]),
        "position": message["position"],
        **{f"property {name}": value for name, value in message["properties"].items()},
        "body": body_of(message, 2000),
    }


def _address(message: dict[str, Any]) -> str:
    """Where consumers find it; only the topic while they do not."""
    offset = message["offset"]
    return message["topic"] if offset is None else f"{message['topic']}/{message['queue']}/{offset}"
