"""``escrowmq acts``: the recorded operator actions, and the verification of their record."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import typer
from rich.text import Text
from typer import Argument, Option

from escrowmq import outbox
from escrowmq.acts.telling import describe_outcome
from escrowmq.cli.failures import Exit
from escrowmq.cli.options import App, Brokers, Limit
from escrowmq.cli.printing import Columns, cell, duration, moment, notice, print_facts, print_json, print_rows
from escrowmq.errors import Code, error

app = App("The record of operator actions: who did what, when and why.")

_SHORT = 3
"""List items that a table shows."""


@dataclass
class _Record(Brokers):
    """The record of the brokers or of a database."""

    database_url: str | None = Option(
        None,
        "--database-url",
        "-d",
        help="Instead of a broker's acts those in this database (outbox, inbox, compensation): sqlite:///shop.db, "
        "postgresql://user@host/shop.",
    )

    @contextmanager
    def open(self) -> Iterator[tuple[Callable[..., Iterable[Any]], Callable[[], Iterable[Any]]]]:
        """Provide two functions: one lists some actions, the other iterates over all."""
        if self.database_url is None:
            with self.admin() as admin:
                yield admin.acts, admin.acts
            return
        with outbox.engines.opened(self.database_url) as engine:
            yield partial(outbox.acts.list_acts, engine), partial(outbox.acts.each_act, engine)


@app.command("list")
def list_(
    record: _Record,
    act: str | None = Option(None, help="Only of this kind, such as transactions.settle."),
    by: str | None = Option(None, help="Only of this user, as recorded or without the host."),
    about: str | None = Option(None, help="Only with this group, id, topic or other text in it."),
    limit: Limit = 100,
) -> None:
    """List operator actions, oldest first."""
    with record.open() as (listing, every):
        narrowed = act is not None or by is not None or about is not None
        listed = every() if narrowed else listing(limit, newest=True)
        found: list[Any] = list(deque((one for one in listed if _matches(one, act, by, about)), maxlen=limit))
    columns: Columns = {
        ">act": "number",
        "when": lambda one: moment(one["time_us"]),
        "by": lambda one: one["by"] or "unknown",
        "what": "act",
        "about": lambda one: _summarize(one["what"]),
        "why": lambda one: one["why"] or "",
        "result": lambda one: describe_outcome(one, _summarize),
    }
    print_rows(found, record.json, columns, "no such acts")


@app.command("show")
def show(record: _Record, number: int = Argument(..., metavar="ACT", min=1, help="The number of an act.")) -> None:
    """Show an operator action with all its details."""
    with record.open() as (listing, _):
        found: list[Any] = [one for one in listing(1, after=number - 1) if one["number"] == number]
    if not found:
        raise error(Code.NOT_FOUND, f"there is no act {number}")
    if record.json:
        return print_json(found)
    for one in found:
        # In a database the action and its record are one transaction, so it ends when it begins.
        us = one.get("ended_us", one["time_us"]) - one["time_us"]
        took = f" (after {duration(us / 1e6)})" if us else ""
        print_facts(
            {
                "act": f"{number}: {one['act']}",
                "when": moment(one["time_us"]),
                "by": f"{one['by'] or 'unknown'} (unverified)",
                "why": one["why"],
                **_list_arguments(one),
                "result": describe_outcome(one, _summarize) + took,
                "hash": one["hash"],
            }
        )


@app.command("verify")
def verify(record: _Record) -> None:
    """Verify the hash chain of operator actions. Exit code 1, with the places, if a record was altered.

    A user who can write the record can forge the chain: keep the last hash elsewhere, and compare.
    """
    found: list[Any]
    if record.database_url is None:
        with record.admin() as admin:
            found = list(admin.verify_acts())
    else:
        with outbox.engines.opened(record.database_url) as engine:
            found = [outbox.acts.verify_acts(engine)]
    if record.json:
        print_json(found)
    for one in [] if record.json else found:
        place = "broker" if record.database_url is None else "database"
        print_facts({place: one[place], "records": one["records"], "last hash": one["last"]})
        for broken in one["broken"]:
            named = f" (record {broken['number']})" if "number" in broken else ""
            notice(f"line {broken['line']}{named}: {broken['what']}")
    if any(one["broken"] for one in found):
        raise typer.Exit(Exit.FINDING)


def _matches(one: Mapping[str, Any], act: str | None, by: str | None, about: str | None) -> bool:
    actor = one["by"] or ""
    return (
        (act is None or one["act"] == act)
        and (by is None or by in (actor, actor.partition("@")[0]))
        and (about is None or about in str(one["what"]))
    )


def _list_arguments(one: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an action; each list item on a line, with its own result and note if recorded."""
    ended = one.get("ended", {})
    each, notes = ended.get("each", ()), ended.get("notes", {})
    facts: dict[str, Any] = {}
    for name, value in one["what"].items():
        if not isinstance(value, list):
            facts[name] = value
            continue
        lines = []
        for number, item in enumerate(value):
            parts = [_item(item), _item(each[number]) if len(each) == len(value) else "", notes.get(str(item), "")]
            lines.append(cell("  ".join(part for part in parts if part)))
        facts[name] = Text("\n").join(lines)
    return facts


def _item(item: Any) -> str:
    return " ".join(map(str, item)) if isinstance(item, list) else str(item)


def _summarize(what: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_first_items(value)}" for name, value in what.items())


def _first_items(value: Any) -> str:
    if not isinstance(value, list):
        return str(value)
    shown = [_item(one) for one in value[:_SHORT]]
    return ", ".join(shown) + (f" and {len(value) - _SHORT:,} more" if len(value) > _SHORT else "")
