"""Rules that one producer group has instead of the shard's: which messages it serves, and how its check-back goes.

A group's own rules come with the process that makes it, or by an operator's action; each is one event that names all of
them. They hold for everything that is undecided from then on. What a group has not of its own follows the shard's
settings.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any, NamedTuple

from escrowmq.errors import Code, error
from escrowmq.ledger.commands import AlterProducers, ProducerRules, Rules

PLAIN, TRANSACTIONAL, MIXED = KINDS = ("plain", "transactional", "mixed")
NAMES = tuple(field.name for field in dataclasses.fields(ProducerRules))
FIELDS = dict(
    zip(("kind", "transaction_timeout", "check_interval", "check_max", "checks_exhausted"), NAMES, strict=True)
)
"""The fields of :class:`ProducerRules` by the names of the settings that they override."""
_MOST_CHECKS = 1 << 30


class Asking(NamedTuple):
    """How a group's check-back goes: until the first question, between two, how many, and what follows the last."""

    first_us: int
    interval_us: int
    most: int
    rollback: bool


def asking(own: ProducerRules | None, rules: Rules) -> Asking:
    """Return the rules that count for a group with these of its own."""
    if own is None:
        return Asking(rules.transaction_timeout_us, rules.check_interval_us, rules.check_max, rules.exhausted_rollback)
    return Asking(*(_first(getattr(own, name), getattr(rules, name)) for name in NAMES if name != "kind"))


def _first(own: Any, other: Any) -> Any:
    return other if own is None else own


def check(own: ProducerRules, rules: Rules) -> None:
    """BAD_REQUEST for what makes no sense, BAD_DELAY for a first question that ``half_retention`` would forestall."""
    if own.kind is not None and own.kind not in KINDS:
        raise error(
            Code.BAD_REQUEST, f"{own.kind!r:.100} is not a kind of producer group", f"one of {', '.join(KINDS)}"
        )
    if own.check_max is not None and not 1 <= own.check_max <= _MOST_CHECKS:
        raise error(Code.BAD_REQUEST, "check_max is at least 1")
    if any(time is not None and time < 1 for time in (own.transaction_timeout_us, own.check_interval_us)):
        raise error(Code.BAD_REQUEST, "transaction_timeout and check_interval are longer than nothing")
    for name, time in (("transaction_timeout", own.transaction_timeout_us), ("check_interval", own.check_interval_us)):
        if time is not None and time > rules.half_retention_us:
            longest = rules.half_retention_us / 1e6
            raise error(
                Code.BAD_DELAY,
                f"{name} {time / 1e6} is longer than half_retention, {longest} seconds",
                "half_retention",
            )


def altered(had: ProducerRules, command: AlterProducers) -> ProducerRules:
    """Return a group's own rules after an act. BAD_REQUEST for a name in ``reset`` that is none."""
    if unknown := set(command.reset) - set(NAMES):
        raise error(Code.BAD_REQUEST, f"no rule {sorted(unknown)[0]!r:.100} that could be reset")
    given = {name: value for name, value in dataclasses.asdict(command.rules).items() if value is not None}
    if both := given.keys() & set(command.reset):
        raise error(Code.BAD_REQUEST, f"{sorted(both)[0]!r} is both given and reset")
    return dataclasses.replace(had, **dict.fromkeys(command.reset), **given)


def effective(own: ProducerRules | None, rules: Rules, kind: str | None) -> ProducerRules:
    """Return all rules that count for a group, of its own or not; its ``kind`` as it is."""
    first, interval, most, rollback = asking(own, rules)
    return ProducerRules(
        kind=kind,
        transaction_timeout_us=first,
        check_interval_us=interval,
        check_max=most,
        exhausted_rollback=rollback,
    )


def differences(wanted: ProducerRules, have: ProducerRules) -> str:
    """In words, where a group is not as it is wanted; empty if it is."""
    shown, asked = described_values(have), described_values(wanted)
    return ", ".join(
        f"{name} {shown[name]}, not {value}"
        for name, value in asked.items()
        if value is not None and value != shown[name]
    )


def described_values(own: ProducerRules) -> dict[str, Any]:
    """Rules by the names of the settings, times in seconds; None: not set."""
    rollback = own.exhausted_rollback
    values = (
        own.kind,
        _seconds(own.transaction_timeout_us),
        _seconds(own.check_interval_us),
        own.check_max,
        None if rollback is None else "rollback" if rollback else "park",
    )
    return dict(zip(FIELDS, values, strict=True))


def described(own: ProducerRules | None, rules: Rules, kind: str | None, transactional: bool) -> dict[str, Any]:
    """Describe the rules of a group: those that apply to it, and which of them are its own. ``transactional``: it had
    a session for half messages."""
    own_values = described_values(own or ProducerRules())
    return {
        "transactional": transactional or kind == TRANSACTIONAL,
        **described_values(effective(own, rules, kind)),
        "own": [name for name, value in own_values.items() if value is not None],
    }


def _seconds(time_us: int | None) -> float | None:
    return None if time_us is None else time_us / 1e6


def dump(own: ProducerRules) -> str:
    """Return the rules as JSON, those that are not set left out."""
    given = {name: value for name, value in dataclasses.asdict(own).items() if value is not None}
    return json.dumps(given, sort_keys=True, separators=(",", ":"))


def load(text: str) -> ProducerRules:
    """Return the rules from their JSON; a name that this version does not know is of no effect."""
    return ProducerRules(**{name: value for name, value in json.loads(text).items() if name in NAMES})
