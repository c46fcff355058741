"""Changes to a producer group: its kind and its check-back rules."""

from __future__ import annotations

from typing import Any, get_args

from escrowmq.console.asked import Answer, Page, Params, Redirect
from escrowmq.console.core import Console
from escrowmq.console.views.changing.groups import reason
from escrowmq.errors import Code, error
from escrowmq.message.names import check_name
from escrowmq.settings import SECONDS, parse_quantity
from escrowmq.wire.actions.producers import RuleName

ROOM = "/producers"
BROKER = "broker"
"""Input that restores the broker's rule."""
_CHOICES = {"kind": ("plain", "transactional", "mixed"), "checks_exhausted": ("park", "rollback")}


def show(console: Console, params: Params) -> Page:
    """Show the group's rules at each broker, and the form to change them."""
    name = _name(params)
    listed = console.admin.producers()
    rows = [row for row in listed if row["group"] == name]
    if not rows and not listed.missing:
        raise error(Code.UNKNOWN_GROUP, f"no producer group {name!r}", "a group is made when its first producer sends")
    values = {"name": name, "rows": rows, "missing": listed.missing, "choices": _CHOICES}
    return Page("producer_alter.html", f"Rules of {name}", values, ROOM)


def alter(console: Console, params: Params) -> Answer:
    """Set the group's own rules, or restore the broker's; empty fields change nothing."""
    name = _name(params)
    changes: dict[str, Any] = {}
    reset: list[RuleName] = []
    for rule in get_args(RuleName):
        if (text := params.form_text(rule)) is None:
            continue
        if text == BROKER:
            reset.append(rule)
        else:
            changes[rule] = _parse_value(params, rule, text)
    if not changes and not reset:
        raise error(Code.BAD_ARGUMENT, "nothing is to be changed", "go back, and say what")
    console.admin.alter_producers(name, why=reason(params), reset=reset, **changes)
    return Redirect(f"{ROOM}?name={name}")


def _parse_value(params: Params, rule: str, text: str) -> Any:
    if rule in _CHOICES:
        if text not in _CHOICES[rule]:
            raise error(Code.BAD_ARGUMENT, f"{rule} is {text!r:.40}", f"one of {', '.join(_CHOICES[rule])}")
        return text
    if rule == "check_max":
        return params.form_number(rule, 0)
    try:
        return parse_quantity(text, SECONDS)
    except ValueError as problem:
        raise error(Code.BAD_ARGUMENT, f"{rule.replace('_', ' ')}: {problem}") from None


def _name(params: Params) -> str:
    return check_name(params.places["group"], Code.BAD_GROUP_NAME)
