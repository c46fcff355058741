"""Operations on a producer group: which messages it serves, and how it is asked about what is undecided."""

from __future__ import annotations

from typing import Any, get_args

from escrowmq.console.asked import Answer, Asked, Page, Redirect
from escrowmq.console.core import Console
from escrowmq.console.views.changing.groups import reason
from escrowmq.errors import Code, error
from escrowmq.message.names import check_name
from escrowmq.settings import SECONDS, parse_quantity
from escrowmq.wire.actions.producers import RuleName

ROOM = "/producers"
BROKER = "broker"
"""What is typed or chosen to have the broker's rule again."""
_CHOICES = {"kind": ("plain", "transactional", "mixed"), "checks_exhausted": ("park", "rollback")}


def look(console: Console, asked: Asked) -> Page:
    """Return the rules that the group has at each broker, and the form to change them."""
    name = _name(asked)
    listed = console.admin.producers()
    rows = [row for row in listed if row["group"] == name]
    if not rows and not listed.missing:
        raise error(Code.UNKNOWN_GROUP, f"no producer group {name!r}", "a group is made when its first producer sends")
    values = {"name": name, "rows": rows, "missing": listed.missing, "choices": _CHOICES}
    return Page("producer_alter.html", f"Rules of {name}", values, ROOM)


def alter(console: Console, asked: Asked) -> Answer:
    """Give the group rules of its own, or the broker's again; what is left empty stays as it is."""
    name = _name(asked)
    changes: dict[str, Any] = {}
    reset: list[RuleName] = []
    for rule in get_args(RuleName):
        if (said := asked.said(rule)) is None:
            continue
        if said == BROKER:
            reset.append(rule)
        else:
            changes[rule] = _value(asked, rule, said)
    if not changes and not reset:
        raise error(Code.BAD_ARGUMENT, "nothing is to be changed", "go back, and say what")
    console.admin.alter_producers(name, why=reason(asked), reset=reset, **changes)
    return Redirect(f"{ROOM}?name={name}")


def _value(asked: Asked, rule: str, said: str) -> Any:
    if rule in _CHOICES:
        if said not in _CHOICES[rule]:
            raise error(Code.BAD_ARGUMENT, f"{rule} is {said!r:.40}", f"one of {', '.join(_CHOICES[rule])}")
        return said
    if rule == "check_max":
        return asked.counted(rule, 0)
    try:
        return parse_quantity(said, SECONDS)
    except ValueError as problem:
        raise error(Code.BAD_ARGUMENT, f"{rule.replace('_', ' ')}: {problem}") from None


def _name(asked: Asked) -> str:
    return check_name(asked.places["group"], Code.BAD_GROUP_NAME)
