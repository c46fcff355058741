"""Changes to a consumer group: pause, resume, reset offsets, fence a member, delete it."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from escrowmq.client.altering import signed
from escrowmq.console.asked import Answer, Page, Params, Redirect
from escrowmq.console.core import Console
from escrowmq.console.limits import MAX_TYPED
from escrowmq.errors import Code, error
from escrowmq.message.names import check_name
from escrowmq.wire.actions import groups as actions

ROOM = "/groups"
MOST_MOVES = 10_000
"""Maximum number of queues in one reset on a page."""


def pause(console: Console, params: Params) -> Answer:
    """Pause delivery."""
    name = _name(params)
    console.admin.pause_group(name, why=reason(params))
    return Redirect(f"{ROOM}/{name}")


def resume(console: Console, params: Params) -> Answer:
    """Resume delivery."""
    name = _name(params)
    console.admin.resume_group(name, why=reason(params))
    return Redirect(f"{ROOM}/{name}")


def delete(console: Console, params: Params) -> Answer:
    """Delete the group after its name was typed."""
    name = _name(params)
    check_typed(params, name)
    console.admin.delete_group(name, force=params.form_value("force") == "yes", why=reason(params))
    return Redirect(ROOM)


def fence(console: Console, params: Params) -> Answer:
    """Fence a silent member after its name was typed."""
    name, instance = _name(params), params.form_value("instance")
    check_typed(params, instance)
    console.admin.fence(name, instance, why=reason(params))
    return Redirect(f"{ROOM}/{name}")


def preview(console: Console, params: Params) -> Page:
    """Preview a reset: old and new offset of each queue, and the number of redelivered and skipped messages."""
    name = _name(params)
    to, force = params.text("to") or "earliest", params.text("force") == "yes"
    chosen: dict[str, Any] = {"topic": params.text("topic")}
    if (queue := params.text("queue")) is not None:
        chosen["queue"] = params.number("queue", 0)
    if to == "time":
        chosen["to"] = _parse_time(params.text("time"))
    elif to == "shift":
        chosen["shift"] = _parse_shift(params.text("shift"))
    elif to == "offset":
        chosen["offset"] = params.number("offset", 0)
        if queue is None or chosen["topic"] is None:
            raise error(Code.BAD_ARGUMENT, "an offset is one of a queue", "name the topic and the queue, too")
    elif to in ("earliest", "latest"):
        chosen["to"] = to
    else:
        raise error(Code.BAD_ARGUMENT, f"{to!r:.40} is no place to go on")
    moves: list[Any] = list(console.admin.reset_group(name, dry_run=True, force=force, **chosen))
    if len(moves) > MOST_MOVES:
        raise error(
            Code.TOO_MANY,
            f"these are {len(moves):,} queues",
            "take a topic at a time, or escrowmq groups reset",
        )
    places: dict[str, list[Any]] = {}
    for move in moves:
        places.setdefault(move["broker"], []).append([move["topic"], move["queue"], move["now"]])
    values = {
        "name": name,
        "moves": moves,
        "again": sum(move["again"] for move in moves),
        "dead": sum(move["dead"] for move in moves),
        "skipped": sum(move["skipped"] for move in moves),
        "places": json.dumps(places),
        "force": force,
    }
    return Page("reset.html", f"Set where {name} goes on", values, ROOM)


def reset(console: Console, params: Params) -> Answer:
    """Set the group to the previewed offsets, at each broker."""
    name = _name(params)
    check_typed(params, name)
    why = reason(params)
    for address, places in _parse_places(params.form_value("places")).items():
        request = actions.Reset(group=name, places=places, force=params.form_value("force") == "yes")
        console.ask(console.number_of(address), actions.RESET(signed(request, why)))
    return Redirect(f"{ROOM}/{name}")


def reason(params: Params) -> str:
    """Return the reason from the form. Raises Misuse(BAD_ARGUMENT) without one."""
    why = params.form_text("why")
    if why is None:
        raise error(
            Code.BAD_ARGUMENT, "an act needs a reason: whoever reads the record asks for it", "go back, and say why"
        )
    return why


def check_typed(params: Params, name: str) -> None:
    """Check that a name was typed for confirmation. Raises Misuse(BAD_ARGUMENT)."""
    if not name or params.form_value("typed")[:MAX_TYPED].strip() != name:
        raise error(Code.BAD_ARGUMENT, f"type {name!r:.150} to say that you mean it", "go back, and type it")


def _name(params: Params) -> str:
    return check_name(params.places["group"], Code.BAD_GROUP_NAME)


def _parse_time(text: str | None) -> datetime:
    try:
        return datetime.fromisoformat(text or "").astimezone()
    except (ValueError, OverflowError):
        raise error(Code.BAD_ARGUMENT, f"{text!r:.60} is no time", "such as 2026-11-23T03:00") from None


def _parse_shift(text: str | None) -> int:
    try:
        shift = int(text or "")
        if abs(shift) >= 1 << 53:
            raise ValueError
    except ValueError:
        raise error(Code.BAD_ARGUMENT, f"{text!r:.40} is no number of messages") from None
    return shift


def _parse_places(text: str) -> dict[str, list[actions.Place]]:
    """Parse the previewed offsets, by broker."""
    try:
        return {
            str(address): [
                actions.Place(topic=str(topic), queue=int(queue), offset=int(offset)) for topic, queue, offset in places
            ]
            for address, places in json.loads(text).items()
        }
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise error(Code.BAD_ARGUMENT, "this form does not say where the group is to go on") from None
