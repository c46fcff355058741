"""The record of operator actions: who did what, when, why, with which result; and its verification."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from escrowmq.acts.telling import describe_outcome
from escrowmq.client.links.presence import Missing
from escrowmq.console.asked import Page, Params
from escrowmq.console.core import Console
from escrowmq.console.words import visible
from escrowmq.errors import Code, error
from escrowmq.outbox.acts import list_acts, verify_acts
from escrowmq.overview.sources import Sources

ROOM = "/acts"
NEWEST = 100
_SHORT = 3
"""List items that a line shows."""
_DETAILED = 200
"""List items that an action's own page shows."""


def acts(console: Console, params: Params) -> Page:
    """Show the newest operator actions, newest first."""
    listed = console.admin.acts(NEWEST, newest=True)
    kept, away = _in_databases(
        console, lambda engine, name: [{**one, "broker": name} for one in list_acts(engine, NEWEST, newest=True)]
    )
    found: list[Any] = sorted([*listed, *kept], key=lambda one: -one["time_us"])[:NEWEST]
    rows = [{**one, "about": _summarize(one["what"]), "ending": describe_outcome(one, _summarize)} for one in found]
    return Page("acts.html", "Acts", {"rows": rows, "most": NEWEST, "missing": [*listed.missing, *away]}, ROOM, live=10)


def act(console: Console, params: Params) -> Page:
    """Show one operator action with all its details."""
    text = params.places["number"]
    if not text.isdecimal() or len(text) > 15 or int(text) < 1:
        raise error(Code.NOT_FOUND, f"there is no act {text!r:.40}")
    number = int(text)
    wanted = params.text("broker")
    listed: list[Any] = []
    if wanted is None or wanted in console.addresses:
        listed += console.admin.acts(1, after=number - 1)
    if wanted not in console.addresses:
        kept, _ = _in_databases(
            console, lambda engine, name: [{**one, "broker": name} for one in list_acts(engine, 1, after=number - 1)]
        )
        listed += kept
    found = next((one for one in listed if one["number"] == number and wanted in (None, one["broker"])), None)
    if found is None:
        raise error(Code.NOT_FOUND, f"there is no act {number}")
    what = {name: _format(value) for name, value in found["what"].items() if name not in ("by", "why")}
    ended = {name: _format(value) for name, value in (found.get("ended") or {}).items()}
    values = {"act": found, "what": what, "ended": ended, "ending": describe_outcome(found, _summarize)}
    return Page("act.html", f"Act {number}", values, ROOM)


def verify(console: Console, params: Params) -> Page:
    """Verify the chain of records at each broker."""
    listed = console.admin.verify_acts()
    kept, away = _in_databases(console, lambda engine, name: [{**verify_acts(engine), "broker": name}])
    values = {"rows": [*listed, *kept], "missing": [*listed.missing, *away]}
    return Page("verify.html", "Is the record of acts whole?", values, ROOM)


def _in_databases(
    console: Console, read: Callable[[Any, str], list[dict[str, Any]]]
) -> tuple[list[dict[str, Any]], Sequence[Missing]]:
    """Read each database with ``read`` (engine, name). Returns the rows, and the databases that could not be read."""
    sources = Sources(console.bus, list(console.engines.values()))
    found: list[dict[str, Any]] = []
    sources.read_engines(lambda name, engine: found.extend(read(engine, name)))
    return found, sources.missing


def _format(value: Any) -> str:
    if isinstance(value, list):
        lines = [one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for one in value[:_DETAILED]]
        more = [f"and {len(value) - _DETAILED:,} more"] if len(value) > _DETAILED else []
        return "\n".join(visible(line) for line in [*lines, *more])
    return visible(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _summarize(what: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_first_items(value)}" for name, value in what.items() if name not in ("by", "why"))


def _first_items(value: Any) -> str:
    if not isinstance(value, list):
        return visible(value, 120)
    shown = [" ".join(map(str, one.values() if isinstance(one, dict) else [one])) for one in value[:_SHORT]]
    more = f" and {len(value) - _SHORT:,} more" if len(value) > _SHORT else ""
    return ", ".join(visible(one, 120) for one in shown) + more
