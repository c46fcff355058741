"""``escrowmq lookup``: find messages by key or id, half messages included."""

from __future__ import annotations

from typing import Annotated

import typer

from escrowmq.cli.failures import Exit
from escrowmq.cli.options import DEFAULT_URL, Json, Limit, Url, admin_at
from escrowmq.cli.printing import body_text, moment, print_json, print_table, state
from escrowmq.cli.rows import plain
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
    if json:
        print_json(found)
    else:
        print_table(
            ("topic", "place", "state", "key", "tag", "stored", "message id", "transaction", "body"),
            [
                (
                    m["topic"],
                    "-" if m["offset"] is None else f"{m['queue']}/{m['offset']}",
                    state(m["state"]),
                    m["key"],
                    m["tag"],
                    moment(m["stored_us"]),
                    m["message_id"],
                    m["transaction"],
                    "(binary)" if m["body"] is None else body_text(m["body"].encode(), 60),
                )
                for m in found
            ],
            "nothing found",
        )
    if not found:
        raise typer.Exit(Exit.FINDING)
