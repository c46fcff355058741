"""Operations on a consumer group: pause, resume, set where it continues, fence a member, delete it."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from escrowmq.client.altering import signed
from escrowmq.console.asked import Answer, Asked, Page, Redirect
from escrowmq.console.core import Console
from escrowmq.console.limits import MAX_TYPED
from escrowmq.errors import Code, error
from escrowmq.message.names import check_name
from escrowmq.wire.actions import groups as actions

ROOM = "/groups"
MOST_MOVES = 10_000
"""Queues that one reset on a page moves."""


def pause(console: Console, asked: Asked) -> Answer:
    """Hand out nothing."""
    name = _name(asked)
    console.admin.pause_group(name, why=reason(asked))
    return Redirect(f"{ROOM}/{name}")


def resume(console: Console, asked: Asked) -> Answer:
    """Hand out again."""
    name = _name(asked)
    console.admin.resume_group(name, why=reason(asked))
    return Redirect(f"{ROOM}/{name}")


def delete(console: Console, asked: Asked) -> Answer:
    """Forget the group; its name was typed."""
    name = _name(asked)
    typed(asked, name)
    console.admin.delete_group(name, force=asked.one("force") == "yes", why=reason(asked))
    return Redirect(ROOM)


def fence(console: Console, asked: Asked) -> Answer:
    """Shut a silent member out; its name was typed."""
    name, instance = _name(asked), asked.one("instance")
    typed(asked, instance)
    console.admin.fence(name, instance, why=reason(asked))
    return Redirect(f"{ROOM}/{name}")


def look(console: Console, asked: Asked) -> Page:
    """Preview a reset: the old and new place in each queue, and how many messages are redelivered or skipped."""
    name = _name(asked)
    to, force = asked.text("to") or "earliest", asked.text("force") == "yes"
    chosen: dict[str, Any] = {"topic": asked.text("topic")}
    if (queue := asked.text("queue")) is not None:
        chosen["queue"] = asked.number("queue", 0)
    if to == "time":
        chosen["to"] = _moment(asked.text("time"))
    elif to == "shift":
        chosen["shift"] = _shift(asked.text("shift"))
    elif to == "offset":
        chosen["offset"] = asked.number("offset", 0)
        if queue is None or chosen["topic"] is None:
            raise error(Code.BAD_ARGUMENT, "an offset is one of a queue", "name the topic and the queue, too")
    elif to in ("earliest", "latest"):
        chosen["to"] = to
    else:
        raise error(Code.BAD_ARGUMENT, f"{to!r:.40} is no place to go on")
    moves: list[Any] = list(console.admin.reset_group(name, dry_run=True, force=force, **chosen))
    if len(moves) > MOST_MOVES:
        raise error(
            Code.TOO_MANY, f"these are {len(moves):,} queues", "take a topic at a time, or escrowmq groups reset"
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


def reset(console: Console, asked: Asked) -> Answer:
    """Set the group to the places that were shown, at each broker."""
    name = _name(asked)
    typed(asked, name)
    why = reason(asked)
    for address, places in _places(asked.one("places")).items():
        request = actions.Reset(group=name, places=places, force=asked.one("force") == "yes")
        console.ask(console.number_of(address), actions.RESET(signed(request, why)))
    return Redirect(f"{ROOM}/{name}")


def reason(asked: Asked) -> str:
    """Return why, as the form says. Raises Misuse(BAD_ARGUMENT) without one."""
    why = asked.said("why")
    if why is None:
        raise error(
            Code.BAD_ARGUMENT, "an act needs a reason: whoever reads the record asks for it", "go back, and say why"
        )
    return why


def typed(asked: Asked, name: str) -> None:
    """See that a name was typed to confirm. Raises Misuse(BAD_ARGUMENT)."""
    if not name or asked.one("typed")[:MAX_TYPED].strip() != name:
        raise error(Code.BAD_ARGUMENT, f"type {name!r:.150} to say that you mean it", "go back, and type it")


def _name(asked: Asked) -> str:
    return check_name(asked.places["group"], Code.BAD_GROUP_NAME)


def _moment(text: str | None) -> datetime:
    try:
        return datetime.fromisoformat(text or "").astimezone()
    except (ValueError, OverflowError):
        raise error(Code.BAD_ARGUMENT, f"{text!r:.60} is no time", "such as 2026-11-23T03:00") from None


def _shift(text: str | None) -> int:
    try:
        shift = int(text or "")
        if abs(shift) >= 1 << 53:
            raise ValueError
    except ValueError:
        raise error(Code.BAD_ARGUMENT, f"{text!r:.40} is no number of messages") from None
    return shift


def _places(text: str) -> dict[str, list[actions.Place]]:
    """Return the places that the page has shown, by broker."""
    try:
        return {
            str(address): [
                actions.Place(topic=str(topic), queue=int(queue), offset=int(offset)) for topic, queue, offset in places
            ]
            for address, places in json.loads(text).items()
        }
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise error(Code.BAD_ARGUMENT, "this form does not say where the group is to go on") from None
