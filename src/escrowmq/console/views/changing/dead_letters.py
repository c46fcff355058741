"""Edit a dead letter and deliver it: another message in its place, to this group alone."""

from __future__ import annotations

import secrets
from typing import Any

from escrowmq.console.asked import Answer, Asked, Page, Redirect
from escrowmq.console.core import Console
from escrowmq.console.limits import EDITABLE_BYTES
from escrowmq.console.views.changing.groups import reason
from escrowmq.console.views.dead_letters import ROOM, letter_at
from escrowmq.errors import Code, error
from escrowmq.message.names import check_name

SPARE_PROPERTIES = 2
"""Empty lines of the form, for properties that are new."""
_PLACE = ("broker", "topic", "queue", "offset")


def form(console: Console, asked: Asked) -> Page:
    """Return the form, with the message as it is. The id of the new message is in it: sent twice, it is done once."""
    name = check_name(asked.places["group"], Code.BAD_GROUP_NAME)
    found = letter_at(console, name, asked)
    text, note = _editable(found["message"].get("body"))
    properties = [(key, value) for key, value in found["message"].get("properties", {}).items() if is_editable(key)]
    values = {
        "name": name,
        "letter": found,
        "text": text,
        "note": note,
        "properties": properties + [("", "")] * SPARE_PROPERTIES,
        "new_id": secrets.token_hex(16),
    }
    return Page("edit.html", "Edit and deliver again", values, ROOM)


def edit(console: Console, asked: Asked) -> Answer:
    """Do it: the dead letter is gone and the new message is there, in one step."""
    name = check_name(asked.places["group"], Code.BAD_GROUP_NAME)
    why = reason(asked)
    old = letter_at(console, name, Asked(asked.path, asked.places, {place: asked.one(place) for place in _PLACE}))
    item = {
        **{place: old[place] for place in _PLACE},
        "dead_us": asked.counted("dead_us", 0),
        "attempts": asked.counted("attempts", 0),
    }
    changes = _changes(asked, old["message"])
    console.admin.edit_dead_letter(name, item, message_id=_identity(asked.one("new_id")), why=why, **changes)
    return Redirect(f"/find?q={old['topic']}/{old['queue']}/{old['offset']}")


def is_editable(name: str) -> bool:
    """Return whether a property is the application's: what the broker notes of a message stays as it is."""
    return not name.startswith("ESCROWMQ_")


def _changes(asked: Asked, old: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the form that differ from the message: an unchanged body stays, byte for byte."""
    changes: dict[str, Any] = {}
    without: list[str] = []
    text, _ = _editable(old.get("body"))
    body = asked.one("body")
    if body != "" if text is None else _lines(body) != _lines(text):
        if len(body.encode()) > EDITABLE_BYTES:
            raise error(
                Code.BODY_TOO_LARGE, f"a body of more than {EDITABLE_BYTES:,} bytes cannot be written on a page"
            )
        changes["body"] = _like(text, body).encode()
    for field in ("key", "tag"):
        value = asked.one(field)
        if _type(value) != _type(old.get(field) or ""):
            without += [] if value else [field]
            changes |= {field: value} if value else {}
    names, values = asked.form.get("property_name", ()), asked.form.get("property_value", ())
    if len(names) != len(values):
        raise error(Code.BAD_ARGUMENT, "each property needs a name and a value")
    given = {key: value for key, value in zip(names, values, strict=True) if key}
    had = {_type(key): (key, value) for key, value in (old.get("properties") or {}).items() if is_editable(key)}
    same = {key for key, value in given.items() if key in had and _type(had[key][1]) == _type(value)}
    if new := {had[key][0] if key in had else key: value for key, value in given.items() if key not in same}:
        changes["properties"] = new
    without += [key for typed, (key, _) in had.items() if typed not in given]
    return {**changes, "without": without} if without else changes


def _editable(body: bytes | None) -> tuple[str | None, str]:
    """Return a body as a text that a form can hold, or None and why not."""
    if body is None:
        return None, "Its body is damaged: what you write takes its place."
    if len(body) > EDITABLE_BYTES:
        return (
            None,
            "Its body is too large for a page: it stays as it is unless you write another. escrowmq dead-letters edit "
            "takes a file.",
        )
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return (
            None,
            "Its body is no text: it stays as it is unless you write another. escrowmq dead-letters edit takes a file.",
        )
    if "\0" in text:
        return None, "Its body holds bytes that a form cannot carry: it stays as it is unless you write another."
    return text, ""


def _lines(text: str) -> str:
    """Return a text with one kind of line ends: a form sends another than it was given."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _type(text: str) -> str:
    """Return a text as a line of a form gives it back."""
    return text.replace("\r", "").replace("\n", "").replace("\0", "\ufffd")


def _like(old: str | None, new: str) -> str:
    """Return a text with the line ends of the old one."""
    return _lines(new).replace("\n", "\r\n") if old is not None and "\r\n" in old else _lines(new)


def _identity(text: str) -> str:
    if len(text) != 32 or not all(letter in "0123456789abcdef" for letter in text):
        raise error(Code.BAD_ARGUMENT, "this form names no new message", "load the page anew")
    return text
