"""``escrowmq dead-letters``: list, show, retry or discard the dead letters of a consumer group."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from escrowmq.cli.failures import Exit
from escrowmq.cli.options import DEFAULT_URL, Json, Limit, Url, Why, admin_at, seconds
from escrowmq.cli.plan import PlansFolder, Yes, run_as_plan
from escrowmq.cli.printing import Columns, body_text, cell, moment, notice, print_facts, print_json, print_rows
from escrowmq.cli.rows import plain
from escrowmq.errors import Code, error
from escrowmq.wire import read_schema

app = typer.Typer(no_args_is_help=True, help="Dead letters: messages that failed too often.")

Group = Annotated[str, typer.Argument(metavar="GROUP", help="The consumer group.")]
Places = Annotated[
    list[str] | None,
    typer.Argument(metavar="[TOPIC/QUEUE/OFFSET]...", help="Which, as `dead-letters list` names them."),
]
All = Annotated[bool, typer.Option("--all", help="All that the group has now, by a plan.")]
Cause = Annotated[
    str | None, typer.Option("--cause", help="Those of such a cause, numbers and ids do not count; by a plan.")
]
Topic = Annotated[str | None, typer.Option("--topic", "-t", help="Those of this topic, by a plan.")]
OlderThan = Annotated[
    str | None,
    typer.Option("--older-than", metavar="TIME", help="Those dead for longer than 30s, 5min, 2h, by a plan."),
]


_ATTEMPTS: Columns = {
    "failed": lambda one: moment(one["time_us"]),
    ">attempt": "attempt",
    "cause": lambda one: (
        one.get("cause") or ("its lease ended" if one.get("expired") else "given back without a cause")
    ),
}


@app.command("list")
def list_(
    group: Group,
    cause: Annotated[
        str | None, typer.Option("--cause", help="With such a cause: numbers and ids in it do not count.")
    ] = None,
    topic: Annotated[str | None, typer.Option("--topic", "-t", help="Of this topic.")] = None,
    older_than: Annotated[
        str | None, typer.Option("--older-than", metavar="TIME", help="Dead for longer than 30s, 5min, 2h.")
    ] = None,
    limit: Limit = 100,
    url: Url = DEFAULT_URL,
    json: Json = False,
) -> None:
    """List the dead letters of a consumer group."""
    age = seconds(older_than, "--older-than")
    with admin_at(url) as admin:
        found = admin.dead_letters(group, limit, cause=cause, topic=topic, older_than=age)
        letters = [{"place": _format_place(letter), **letter} for letter in found[:limit]]
    columns: Columns = {
        "message": "place",
        ">attempts": "attempts",
        "dead since": lambda letter: moment(letter["dead_us"]),
        "key": "key",
        "tag": "tag",
        "cause": "cause",
    }
    print_rows([plain(letter) for letter in letters], json, columns, f"{group} has no dead letters")


@app.command("summary")
def summary(
    group: Annotated[str | None, typer.Argument(metavar="[GROUP]", help="The consumer group; else all.")] = None,
    causes: Annotated[int, typer.Option("--causes", min=1, max=1000, help="Causes of a group to tell apart.")] = 20,
    url: Url = DEFAULT_URL,
    json: Json = False,
) -> None:
    """Count dead letters by group and cause."""
    with admin_at(url) as admin:
        groups = admin.dead_letters_summary(group, causes=causes)
    if json:
        return print_json([plain(one) for one in groups])
    rows: list[dict[str, Any]] = []
    for one in groups:
        rows += [{"group": one["group"], **cause, "like": _sample(cause["samples"])} for cause in one["causes"]]
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
def show(
    group: Group,
    place: Annotated[str, typer.Argument(metavar="TOPIC/QUEUE/OFFSET", help="Which, as `list` names it.")],
    url: Url = DEFAULT_URL,
    json: Json = False,
) -> None:
    """Show one dead letter with its body, properties, and the causes of its last five attempts."""
    topic, queue, offset = _parse(place)
    with admin_at(url) as admin:
        found = admin.dead_letters_at(group, [{"topic": topic, "queue": queue, "offset": offset}])
        if not found:
            raise error(Code.NOT_FOUND, f"{group} has no dead letter {place}", f"see `dead-letters list {group}`")
        columns = read_schema(topic, damaged=True).names
        rows = admin.read(topic, queue=queue, start=offset, end=offset + 1, columns=columns).read_all().to_pylist()
        attempts = admin.dead_letter_attempts(group, found[0])
    letter = {**(rows[0] if rows else {}), **found[0], "place": place, "last_attempts": attempts}
    if json:
        return print_json(plain(letter))
    shown = {name: letter.get(name) for name in ("place", "attempts", "cause", "key", "tag")}
    times = {"born": moment(letter.get("born_us")), "dead since": moment(letter["dead_us"])}
    properties = {f"property {name}": cell(value) for name, value in letter.get("properties") or []}
    body = letter.get("body", b"")
    shown_body = f"(damaged: {letter.get('damaged')})" if body is None else body_text(body, 2000)
    print_facts({**shown, **times, **properties, "body": shown_body})
    print_rows(attempts, json, _ATTEMPTS, "its attempts are not in the log any more")


@app.command("retry")
def retry(
    group: Group,
    places: Places = None,
    all_: All = False,
    cause: Cause = None,
    topic: Topic = None,
    older_than: OlderThan = None,
    yes: Yes = False,
    plans: PlansFolder = None,
    why: Why = None,
    url: Url = DEFAULT_URL,
    json: Json = False,
) -> None:
    """Redeliver dead letters to the group, with new attempts. Name them, or select them for a plan."""
    if chosen := _parse_selection("retry", group, places, all_, cause, topic, older_than):
        return run_as_plan("dead_letters.retry", chosen, why, url, yes=yes, folder=plans, json=json)
    _settle(group, places or [], why, url, json, "retry")


@app.command("discard")
def discard(
    group: Group,
    places: Places = None,
    all_: All = False,
    cause: Cause = None,
    topic: Topic = None,
    older_than: OlderThan = None,
    yes: Yes = False,
    plans: PlansFolder = None,
    why: Why = None,
    url: Url = DEFAULT_URL,
    json: Json = False,
) -> None:
    """Discard dead letters: the group does not receive them again. Name them, or select them for a plan."""
    if chosen := _parse_selection("discard", group, places, all_, cause, topic, older_than):
        return run_as_plan("dead_letters.discard", chosen, why, url, yes=yes, folder=plans, json=json)
    _settle(group, places or [], why, url, json, "discard")


@app.command("edit")
def edit(
    group: Group,
    place: Annotated[str, typer.Argument(metavar="TOPIC/QUEUE/OFFSET", help="Which, as `list` names it.")],
    body: Annotated[
        Path | None, typer.Option("--body", metavar="FILE", help="The new body; -: standard input.")
    ] = None,
    key: Annotated[str | None, typer.Option("--key", "-k", help="Another key.")] = None,
    tag: Annotated[str | None, typer.Option("--tag", help="Another tag.")] = None,
    properties: Annotated[
        list[str] | None,
        typer.Option("--property", "-p", metavar="NAME=VALUE", help="Set a property; may be repeated."),
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option("--without", metavar="NAME", help="Leave out key, tag or a property; may be repeated."),
    ] = None,
    why: Why = None,
    url: Url = DEFAULT_URL,
    json: Json = False,
) -> None:
    """Deliver an edited message to the group in place of a dead letter. Omitted options remain unchanged."""
    topic, queue, offset = _parse(place)
    pairs = {}
    for text in properties or ():
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise error(Code.BAD_ARGUMENT, f"{text!r} is not NAME=VALUE")
        pairs[name] = value
    content = None if body is None else sys.stdin.buffer.read() if str(body) == "-" else body.read_bytes()
    with admin_at(url) as admin:
        found = admin.dead_letters_at(group, [{"topic": topic, "queue": queue, "offset": offset}])
        if not found:
            raise error(Code.NOT_FOUND, f"{group} has no dead letter {place}", f"see `dead-letters list {group}`")
        if len(found) > 1:
            where = ", ".join(letter["broker"] for letter in found)
            raise error(
                Code.BAD_ARGUMENT, f"several brokers have a dead letter {place}: {where}", "name one of them with --url"
            )
        done = admin.edit_dead_letter(
            group, found[0], body=content, key=key, tag=tag, properties=pairs or None, without=without or (), why=why
        )
    if json:
        return print_json(done)
    notice(f"{group} gets message {done['message_id']} in place of {done['edited_from'] or 'a damaged one'}")


def _parse_selection(
    act: str,
    group: str,
    places: list[str] | None,
    everything: bool,
    cause: str | None,
    topic: str | None,
    older_than: str | None,
) -> dict[str, Any] | None:
    """Return the selection for a plan; None if places are named."""
    given = {"cause": cause, "topic": topic, "older_than": seconds(older_than, "--older-than")}
    chosen = {name: value for name, value in given.items() if value is not None}
    if bool(places) == (everything or bool(chosen)):
        hint = "name some as TOPIC/QUEUE/OFFSET, or say --all, --cause, --topic, --older-than"
        raise error(Code.BAD_ARGUMENT, f"which dead letters to {act}?", hint)
    return None if places else {"group": group, **chosen}


def _settle(group: str, places: list[str], why: str | None, url: str, json: bool, act: str) -> None:
    """Apply one operation to the named dead letters; exit code 1 if some of them do not exist."""
    items = [dict(zip(("topic", "queue", "offset"), _parse(place), strict=True)) for place in places]
    with admin_at(url) as admin:
        do = admin.retry_dead_letters if act == "retry" else admin.discard_dead_letters
        done = do(group, items, why=why)
    if json:
        print_json({"group": group, "act": act, "settled": done})
    else:
        notice(f"{act}: {done:,} dead letters of {group}")
    if done < len(items):
        raise typer.Exit(Exit.FINDING)


def _sample(samples: list[Any]) -> str:
    return _format_place(samples[0]) if samples else ""


def _format_place(letter: Mapping[str, Any]) -> str:
    return f"{letter['topic']}/{letter['queue']}/{letter['offset']}"


def _parse(place: str) -> tuple[str, int, int]:
    """Parse ``orders/0/17`` into topic, queue, offset."""
    parts = place.split("/")
    if len(parts) != 3 or not (parts[1].isdecimal() and parts[2].isdecimal()):
        raise error(Code.BAD_ARGUMENT, f"{place!r} is not TOPIC/QUEUE/OFFSET", "such as orders/0/17")
    return parts[0], int(parts[1]), int(parts[2])
