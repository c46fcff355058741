"""``escrowmq dead-letters``: list, show, retry or discard the dead letters of a consumer group."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from escrowmq.cli.options import App, Brokers, Limit, Operation, pairs, time_option
from escrowmq.cli.printing import Columns, body_text, cell, moment, notice, print_facts, print_json, print_rows
from escrowmq.cli.rows import plain
from escrowmq.errors import Code, error
from escrowmq.wire import read_schema

if TYPE_CHECKING:
    from escrowmq.client.admin import Admin
    from escrowmq.client.entries import DeadLetter

app = App("Dead letters: messages that failed too often.")

Group = Annotated[str, Argument(metavar="GROUP", help="The consumer group.")]
Place = Annotated[str, Argument(metavar="TOPIC/QUEUE/OFFSET", help="Which, as `list` names it.")]

_ATTEMPTS: Columns = {
    "failed": lambda one: moment(one["time_us"]),
    ">attempt": "attempt",
    "cause": lambda one: (
        one.get("cause") or ("its lease ended" if one.get("expired") else "given back without a cause")
    ),
}


@app.command("list")
def list_(
    brokers: Brokers,
    group: Group,
    cause: str | None = Option(None, help="With such a cause: numbers and ids in it do not count."),
    topic: str | None = Option(None, "--topic", "-t", help="Of this topic."),
    older_than: Any = time_option(None, "--older-than", "Dead for longer than 30s, 5min, 2h."),
    limit: Limit = 100,
) -> None:
    """List the dead letters of a consumer group."""
    with brokers.admin() as admin:
        found = admin.dead_letters(group, limit, cause=cause, topic=topic, older_than=older_than)
    letters = [plain({"place": _format_place(letter), **letter}) for letter in found[:limit]]
    columns: Columns = {
        "message": "place",
        ">attempts": "attempts",
        "dead since": lambda letter: moment(letter["dead_us"]),
        "key": "key",
        "tag": "tag",
        "cause": "cause",
    }
    print_rows(letters, brokers.json, columns, f"{group} has no dead letters")


@app.command("summary")
def summary(
    brokers: Brokers,
    group: str | None = Argument(None, metavar="[GROUP]", help="The consumer group; else all."),
    causes: int = Option(20, min=1, max=1000, help="Causes of a group that are counted separately."),
) -> None:
    """Count dead letters by group and cause."""
    with brokers.admin() as admin:
        groups = admin.dead_letters_summary(group, causes=causes)
    if brokers.json:
        return print_json([plain(one) for one in groups])
    rows: list[dict[str, Any]] = []
    for one in groups:
        rows += [
            {"group": one["group"], **cause, "like": "".join(map(_format_place, cause["samples"][:1]))}
            for cause in one["causes"]
        ]
        if (others := one.get("others")) is not None:
            rows.append({"group": one["group"], **others, "cause": f"({others['causes']:,} other causes)", "like": ""})
    columns: Columns = {
        "group": "group",
        ">dead": "count",
        "since": lambda row: moment(row["oldest_us"]),
        "until": lambda row: moment(row["newest_us"]),
        "cause": "cause",
        "such as": "like",
    }
    print_rows(rows, False, columns, f"{group} has no dead letters" if group else "there are no dead letters")


@app.command("show")
def show(brokers: Brokers, group: Group, place: Place) -> None:
    """Show one dead letter with its body, properties, and the causes of its last five attempts."""
    item = parse_place(place)
    topic, queue, offset = item.values()
    with brokers.admin() as admin:
        found = _find(admin, group, place, item)
        columns = read_schema(topic, damaged=True).names
        rows = admin.read(topic, queue=queue, start=offset, end=offset + 1, columns=columns).read_all().to_pylist()
        attempts = admin.dead_letter_attempts(group, found[0])
    letter = {**(rows[0] if rows else {}), **found[0], "place": place, "last_attempts": attempts}
    if brokers.json:
        return print_json(plain(letter))
    shown = {name: letter.get(name) for name in ("place", "attempts", "cause", "key", "tag")}
    times = {"born": moment(letter.get("born_us")), "dead since": moment(letter["dead_us"])}
    properties = {f"property {name}": cell(value) for name, value in letter.get("properties") or []}
    body = letter.get("body", b"")
    shown_body = f"(damaged: {letter.get('damaged')})" if body is None else body_text(body, 2000)
    print_facts({**shown, **times, **properties, "body": shown_body})
    print_rows(attempts, False, _ATTEMPTS, "its attempts are not in the log any more")


@dataclass
class _Edit:
    """The changes of an edited message."""

    body: Path | None = Option(None, metavar="FILE", help="The new body; -: standard input.")
    key: str | None = Option(None, "--key", "-k", help="Another key.")
    tag: str | None = Option(None, help="Another tag.")
    properties: list[str] | None = Option(
        None, "--property", "-p", metavar="NAME=VALUE", help="A property; repeatable."
    )
    without: list[str] | None = Option(None, metavar="NAME", help="Leave out key, tag or a property; may be repeated.")

    def read(self) -> dict[str, Any]:
        """Return the changes as arguments of ``edit_dead_letter``."""
        properties = pairs(self.properties, "--property") or None
        stdin = str(self.body) == "-"
        body = None if self.body is None else sys.stdin.buffer.read() if stdin else self.body.read_bytes()
        return {
            "body": body, "key": self.key, "tag": self.tag, "properties": properties, "without": self.without or (),
        }  # fmt: skip


@app.command("edit")
def edit(operation: Operation, changes: _Edit, group: Group, place: Place) -> None:
    """Deliver an edited message to the group in place of a dead letter. Omitted options remain unchanged."""
    item, new = parse_place(place), changes.read()
    with operation.admin() as admin:
        found = _find(admin, group, place, item)
        if len(found) > 1:
            where = ", ".join(letter["broker"] for letter in found)
            text = f"several brokers have a dead letter {place}: {where}"
            raise error(Code.BAD_ARGUMENT, text, "name one of them with --url")
        done = admin.edit_dead_letter(group, found[0], why=operation.why, **new)
    if operation.json:
        return print_json(done)
    notice(f"{group} gets message {done['message_id']} in place of {done['edited_from'] or 'a damaged one'}")


def _find(admin: Admin, group: str, place: str, item: Mapping[str, Any]) -> Sequence[DeadLetter]:
    """Return the dead letters at a place, of all brokers. Raises Rejected(NOT_FOUND)."""
    if found := admin.dead_letters_at(group, [item]):
        return found
    raise error(Code.NOT_FOUND, f"{group} has no dead letter {place}", f"see `dead-letters list {group}`")


def _format_place(letter: Mapping[str, Any]) -> str:
    return f"{letter['topic']}/{letter['queue']}/{letter['offset']}"


def parse_place(place: str) -> dict[str, Any]:
    """Parse ``orders/0/17`` into topic, queue, offset."""
    parts = place.split("/")
    if len(parts) != 3 or not (parts[1].isdecimal() and parts[2].isdecimal()):
        raise error(Code.BAD_ARGUMENT, f"{place!r} is not TOPIC/QUEUE/OFFSET", "such as orders/0/17")
    return {"topic": parts[0], "queue": int(parts[1]), "offset": int(parts[2])}
