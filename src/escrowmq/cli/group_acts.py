"""``escrowmq groups reset | pause | resume | delete``: operations on a whole consumer group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from escrowmq.cli.options import DEFAULT_URL, Json, Url, Why, admin_at, broker_time, seconds
from escrowmq.cli.printing import Columns, notice, print_json, print_rows
from escrowmq.errors import Code, error

if TYPE_CHECKING:
    from escrowmq.client.admin import Admin

Name = Annotated[str, typer.Argument(metavar="GROUP", help="The consumer group.")]
Topics = Annotated[
    list[str] | None, typer.Option("--topic", "-t", help="This topic only; all unless given. Repeatable.")
]


def reset(
    name: Name,
    to: Annotated[
        str | None,
        typer.Option("--to", help="earliest, end, a time (2026-01-31T09:30), or how long ago (2h)."),
    ] = None,
    offset: Annotated[int | None, typer.Option("--offset", min=0, help="An offset of the --queue.")] = None,
    by: Annotated[
        int | None, typer.Option("--by", help="So many messages of each queue: --by=-100 goes back, --by 100 on.")
    ] = None,
    topic: Annotated[str | None, typer.Option("--topic", "-t", help="In this topic only.")] = None,
    queue: Annotated[int | None, typer.Option("--queue", "-q", min=0, help="In this queue of the topic only.")] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Also what members of a group hold that was made with in_doubt=hold.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what it would do, and do nothing.")] = False,
    why: Why = None,
    url: Url = DEFAULT_URL,
    json: Json = False,
) -> None:
    """Set the offsets of a consumer group: it receives earlier messages again, or skips messages.

    Running consumers continue from there. Their leased messages of these queues are redelivered; acknowledgements of
    those are rejected.
    """
    if (to is not None) + (offset is not None) + (by is not None) != 1:
        raise error(Code.BAD_ARGUMENT, "where to? give one of --to, --offset and --by")
    where: dict[str, Any] = {"offset": offset, "shift": by, "topic": topic, "queue": queue, "force": force}
    with admin_at(url) as admin:
        moves = admin.reset_group(
            name, None if to is None else _parse_start(to, admin), dry_run=dry_run, why=why, **where
        )
    columns: Columns = {
        "queue": lambda move: f"{move['topic']}/{move['queue']}",
        ">was at": "was",
        ">goes on at": "now",
        ">again": "again",
        ">passed over": "skipped",
        ">held": "leased",
        ">dead letters again": "dead",
        "broker": "broker",
    }
    print_rows(moves, json, columns, "no queues yet")
    if not json:
        notice(f"{name} {'would go' if dry_run else 'goes'} on: {_total(moves)}")


def _total(moves: Sequence[Mapping[str, Any]]) -> str:
    again, passed = (sum(move[name] for move in moves) for name in ("again", "skipped"))
    dead = sum(move["dead"] for move in moves)
    return f"{again + dead:,} messages again, {passed:,} passed over"


def _parse_start(text: str, admin: Admin) -> str | datetime:
    """Parse the start position for a group. Raises Misuse(BAD_ARGUMENT)."""
    if text in ("earliest", "latest", "end"):
        return "latest" if text == "end" else text
    if text[:1].isdigit() and text[-1:].isalpha() and "T" not in text:
        past = seconds(text, "--to") or 0.0
        return datetime.fromtimestamp(broker_time(admin) / 1e6 - past, UTC)
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        hint = "earliest, end, a time such as 2026-01-31T09:30, or how long ago, such as 2h"
        raise error(Code.BAD_ARGUMENT, f"--to: {text!r} is no place to go on at", hint) from None
    return found.astimezone() if found.tzinfo is None else found


def pause(name: Name, topics: Topics = None, why: Why = None, url: Url = DEFAULT_URL, json: Json = False) -> None:
    """Pause delivery to a consumer group.

    Consumers may still acknowledge leased messages; a pause counts as no attempt.
    """
    with admin_at(url) as admin:
        _show(name, admin.pause_group(name, topics, why=why), json)


def resume(name: Name, topics: Topics = None, why: Why = None, url: Url = DEFAULT_URL, json: Json = False) -> None:
    """Resume delivery to a consumer group."""
    with admin_at(url) as admin:
        _show(name, admin.resume_group(name, topics, why=why), json)


def _show(name: str, found: Sequence[Mapping[str, Any]], json: bool) -> None:
    if json:
        return print_json(found)
    for one in found:
        held = f"; its consumers hold {one['leased']:,} messages" if one["leased"] else ""
        typer.echo(f"{one['broker']}: {name} {paused_words(one['all'], one['topics'])}{held}")


def paused_words(everything: bool, topics: Sequence[str]) -> str:
    """Describe which part of a group is paused."""
    if everything:
        return "is paused"
    return f"is paused for {', '.join(topics)}" if topics else "is handed messages"


def delete(
    name: Name,
    force: Annotated[
        bool, typer.Option("--force", help="Also while consumers wait for messages or hold some.")
    ] = False,
    why: Why = None,
    url: Url = DEFAULT_URL,
    json: Json = False,
) -> None:
    """Delete a consumer group with its offsets, retries and dead letters.

    The messages remain. A later group of this name is new and starts where its first consumer specifies.
    """
    with admin_at(url) as admin:
        found = admin.delete_group(name, force=force, why=why)
    if json:
        return print_json(found)
    for one in found:
        counts = (
            f"with {one['dead_letters']:,} dead letters, {one['retrying']:,} retries and {one['leased']:,} held "
            "messages"
        )
        typer.echo(f"{one['broker']}: {name} is deleted {counts}")
