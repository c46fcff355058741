"""Edit and redeliver a dead letter: replace it with another message, for this group only."""

from __future__ import annotations

import json
import secrets
from typing import Any
from urllib.parse import urlencode

from escrowmq.console.asked import Answer, Page, Params, Redirect
from escrowmq.console.core import Console
from escrowmq.console.limits import EDITABLE_BYTES
from escrowmq.console.views.changing.groups import reason
from escrowmq.console.views.dead_letters import ROOM, letter_at
from escrowmq.errors import Code, error
from escrowmq.message.names import check_name

SPARE_PROPERTIES = 2
"""Empty lines of the form, for new properties."""
_PLACE = ("broker", "topic", "queue", "offset")


def form(console: Console, params: Params) -> Page:
    """Show the form. It contains the new message's id, so that a repeated submission is applied once."""
    name = check_name(params.places["group"], Code.BAD_GROUP_NAME)
    found = letter_at(console, name, params)
    text, note = _decode_for_form(found["message"].get("body"))
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


def edit(console: Console, params: Params) -> Answer:
    """Replace the dead letter with the edited message in one step."""
    name = check_name(params.places["group"], Code.BAD_GROUP_NAME)
    why = reason(params)
    old = letter_at(
        console, name, Params(params.path, params.places, {place: params.form_value(place) for place in _PLACE})
    )
    item = {
        **{place: old[place] for place in _PLACE},
        "dead_us": params.form_number("dead_us", 0),
        "attempts": params.form_number("attempts", 0),
    }
    changes = _changes(params, old["message"])
    console.admin.edit_dead_letter(name, item, message_id=_check_id(params.form_value("new_id")), why=why, **changes)
    return Redirect(f"/find?q={old['topic']}/{old['queue']}/{old['offset']}")


def retry(console: Console, params: Params) -> Answer:
    """Deliver one dead letter of the list again, as it was shown there. Redirects to the list."""
    name = check_name(params.places["group"], Code.BAD_GROUP_NAME)
    why = reason(params)
    try:
        item = json.loads(params.form_value("letter"))
        place = f"{item['topic']}/{item['queue']:d}/{item['offset']:d}"
    except (ValueError, TypeError, LookupError, RecursionError):
        raise error(Code.BAD_ARGUMENT, "this form names no dead letter", "load the page anew") from None
    (code,) = console.admin.settle_dead_letters(name, [item], "retry", why=why)
    if code is not Code.OK:
        raise error(code, f"{place} was not retried: {code.sentence}", "look at the group's dead letters again")
    kept = {field: value for field in ("cause", "topic", "older") if (value := params.form_text(field)) is not None}
    return Redirect(f"{ROOM}/{name}?" + urlencode({**kept, "retried": place, "why": why}))


def is_editable(name: str) -> bool:
    """Decide whether a property belongs to the application: the broker's own properties cannot be changed."""
    return not name.startswith("ESCROWMQ_")


def _changes(params: Params, old: dict[str, Any]) -> dict[str, Any]:
    """Return the differences between form and message; an unchanged body stays identical byte for byte."""
    changes: dict[str, Any] = {}
    without: list[str] = []
    text, _ = _decode_for_form(old.get("body"))
    body = params.form_value("body")
    if body != "" if text is None else _normalize(body) != _normalize(text):
        if len(body.encode()) > EDITABLE_BYTES:
            raise error(
                Code.BODY_TOO_LARGE, f"a body of more than {EDITABLE_BYTES:,} bytes cannot be written on a page"
            )
        changes["body"] = _with_line_ends(text, body).encode()
    for field in ("key", "tag"):
        value = params.form_value(field)
        if _single_line(value) != _single_line(old.get(field) or ""):
            without += [] if value else [field]
            changes |= {field: value} if value else {}
    names, values = params.form.get("property_name", ()), params.form.get("property_value", ())
    if len(names) != len(values):
        raise error(Code.BAD_ARGUMENT, "each property needs a name and a value")
    given = {key: value for key, value in zip(names, values, strict=True) if key}
    had = {_single_line(key): (key, value) for key, value in (old.get("properties") or {}).items() if is_editable(key)}
    same = {key for key, value in given.items() if key in had and _single_line(had[key][1]) == _single_line(value)}
    if new := {had[key][0] if key in had else key: value for key, value in given.items() if key not in same}:
        changes["properties"] = new
    without += [key for typed, (key, _) in had.items() if typed not in given]
    return {**changes, "without": without} if without else changes


def _decode_for_form(body: bytes | None) -> tuple[str | None, str]:
    """Decode a body for a form. Returns None and the reason if a form cannot contain it."""
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


def _normalize(text: str) -> str:
    """Normalize line ends: a browser sends other ones than it received."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _single_line(text: str) -> str:
    """Return a text as a single-line form field sends it."""
    return text.replace("\r", "").replace("\n", "").replace("\0", "\ufffd")


def _with_line_ends(old: str | None, new: str) -> str:
    """Convert a text to the line ends of the old one."""
    return _normalize(new).replace("\n", "\r\n") if old is not None and "\r\n" in old else _normalize(new)


def _check_id(text: str) -> str:
    if len(text) != 32 or not all(letter in "0123456789abcdef" for letter in text):
        raise error(Code.BAD_ARGUMENT, "this form names no new message", "load the page anew")
    return text
