"""``escrowmq groups reset | pause | resume | delete``: operations on a whole consumer group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from escrowmq.cli.options import Operation, broker_time, parse_seconds
from escrowmq.cli.printing import Columns, notice, print_json, print_rows
from escrowmq.errors import Code, error

if TYPE_CHECKING:
    from escrowmq.client.admin import Admin

Name = Annotated[str, Argument(metavar="GROUP", help="The consumer group.")]


@dataclass
class _Start:
    """Where a group continues, and in which queues."""

    to: str | None = Option(None, help="earliest, end, a time (2026-01-31T09:30), or how long ago (2h).")
    offset: int | None = Option(None, min=0, help="An offset of the --queue.")
    by: int | None = Option(None, help="This many messages in each queue: --by=-100 is backward, --by 100 is forward.")
    topic: str | None = Option(None, "--topic", "-t", help="In this topic only.")
    queue: int | None = Option(None, "--queue", "-q", min=0, help="In this queue of the topic only.")

    def given(self, admin: Admin) -> dict[str, Any]:
        """Return the arguments of ``reset_group``."""
        to = None if self.to is None else _parse_start(self.to, admin)
        return {"to": to, "offset": self.offset, "shift": self.by, "topic": self.topic, "queue": self.queue}


def reset(
    operation: Operation,
    start: _Start,
    name: Name,
    force: bool = Option(False, "--force", help="Also messages that members hold, in a group made with in_doubt=hold."),
    dry_run: bool = Option(False, "--dry-run", help="Show the result, and change nothing."),
) -> None:
    """Set the offsets of a consumer group: it receives earlier messages again, or skips messages.

    Running consumers continue from there. Their leased messages of these queues are redelivered; acknowledgements of
    those are rejected.
    """
    if (start.to is not None) + (start.offset is not None) + (start.by is not None) != 1:
        raise error(Code.BAD_ARGUMENT, "where to? give one of --to, --offset and --by")
    with operation.admin() as admin:
        moves = admin.reset_group(name, **start.given(admin), force=force, dry_run=dry_run, why=operation.why)
    columns: Columns = {
        "queue": lambda move: f"{move['topic']}/{move['queue']}",
        ">was at": "was",
        ">continues at": "now",
        ">again": "again",
        ">skipped": "skipped",
        ">held": "leased",
        ">dead letters again": "dead",
        "broker": "broker",
    }
    print_rows(moves, operation.json, columns, "no queues yet")
    if not operation.json:
        notice(f"{name} {'would continue' if dry_run else 'continues'}: {_total(moves)}")


def _total(moves: Sequence[Mapping[str, Any]]) -> str:
    again, passed = (sum(move[name] for move in moves) for name in ("again", "skipped"))
    dead = sum(move["dead"] for move in moves)
    return f"{again + dead:,} messages again, {passed:,} skipped"


def _parse_start(text: str, admin: Admin) -> str | datetime:
    """Parse the start position for a group. Raises Misuse(BAD_ARGUMENT)."""
    if text in ("earliest", "latest", "end"):
        return "latest" if text == "end" else text
    if text[:1].isdigit() and text[-1:].isalpha() and "T" not in text:
        past = parse_seconds(text, "--to")
        return datetime.fromtimestamp(broker_time(admin) / 1e6 - past, UTC)
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        hint = "earliest, end, a time such as 2026-01-31T09:30, or how long ago, such as 2h"
        raise error(Code.BAD_ARGUMENT, f"--to: {text!r} is not a start position", hint) from None
    return found.astimezone() if found.tzinfo is None else found


Topics = Annotated[list[str] | None, Option("--topic", "-t", help="This topic only; all unless given. Repeatable.")]


def pause(operation: Operation, name: Name, topics: Topics = None) -> None:
    """Pause delivery to a consumer group.

    Consumers may still acknowledge leased messages; a pause counts as no attempt.
    """
    with operation.admin() as admin:
        _show(name, admin.pause_group(name, topics, why=operation.why), operation.json)


def resume(operation: Operation, name: Name, topics: Topics = None) -> None:
    """Resume delivery to a consumer group."""
    with operation.admin() as admin:
        _show(name, admin.resume_group(name, topics, why=operation.why), operation.json)


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
    return f"is paused for {', '.join(topics)}" if topics else "receives messages"


def delete(
    operation: Operation,
    name: Name,
    force: bool = Option(False, "--force", help="Also while consumers wait for messages or hold some."),
) -> None:
    """Delete a consumer group with its offsets, retries and dead letters.

    The messages remain. A later group of this name is new and starts where its first consumer specifies.
    """
    with operation.admin() as admin:
        found = admin.delete_group(name, force=force, why=operation.why)
    if operation.json:
        return print_json(found)
    for one in found:
        counts = (
            f"with {one['dead_letters']:,} dead letters, {one['retrying']:,} retries and {one['leased']:,} held "
            "messages"
        )
        typer.echo(f"{one['broker']}: {name} is deleted {counts}")
