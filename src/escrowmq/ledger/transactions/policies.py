"""Rules that one producer group has instead of the shard's: which messages it serves, and its check-back.

They are set by the process that creates the group, or by an operator; each event has all of them. They apply to
everything that is undecided from then on. Unset ones are the shard's settings.
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
)  # the fields of :class:`ProducerRules` by the names of the settings that they override
_MOST_CHECKS = 1 << 30


class CheckRules(NamedTuple):
    """The check-back of a group: until the first check, between two, how many, and whether to roll back after them."""

    first_us: int
    interval_us: int
    most: int
    rollback: bool


def check_rules(own: ProducerRules | None, rules: Rules) -> CheckRules:
    """Return the check-back rules of a group: its ``own`` where set, else the shard's."""
    if own is None:
        return CheckRules(
            rules.transaction_timeout_us, rules.check_interval_us, rules.check_max, rules.exhausted_rollback
        )
    given = ((getattr(own, name), getattr(rules, name)) for name in NAMES if name != "kind")
    return CheckRules(*(default if value is None else value for value, default in given))


def check(own: ProducerRules, rules: Rules) -> None:
    """Validate the rules of a group. Raises BAD_REQUEST, or BAD_DELAY for times beyond ``half_retention``."""
    if own.kind is not None and own.kind not in KINDS:
        hint = f"one of {', '.join(KINDS)}"
        raise error(Code.BAD_REQUEST, f"{own.kind!r:.100} is not a kind of producer group", hint)
    if own.check_max is not None and not 1 <= own.check_max <= _MOST_CHECKS:
        raise error(Code.BAD_REQUEST, "check_max is at least 1")
    times = {"transaction_timeout": own.transaction_timeout_us, "check_interval": own.check_interval_us}
    if any(time is not None and time < 1 for time in times.values()):
        raise error(Code.BAD_REQUEST, "transaction_timeout and check_interval are longer than nothing")
    for name, time in times.items():
        if time is not None and time > rules.half_retention_us:
            why = f"{name} {time / 1e6} is longer than half_retention, {rules.half_retention_us / 1e6} seconds"
            raise error(Code.BAD_DELAY, why, "half_retention")


def alter(had: ProducerRules, command: AlterProducers) -> ProducerRules:
    """Return a group's own rules after an operator's changes. Raises BAD_REQUEST for an unknown name in ``reset``, or a
    rule that is both given and reset."""
    if unknown := set(command.reset) - set(NAMES):
        raise error(Code.BAD_REQUEST, f"no rule {sorted(unknown)[0]!r:.100} that could be reset")
    given = _given(command.rules)
    if both := given.keys() & set(command.reset):
        raise error(Code.BAD_REQUEST, f"{sorted(both)[0]!r} is both given and reset")
    return dataclasses.replace(had, **dict.fromkeys(command.reset), **given)


def _given(own: ProducerRules) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(own).items() if value is not None}


def effective(own: ProducerRules | None, rules: Rules, kind: str | None) -> ProducerRules:
    """Return all rules that apply to a group of this ``kind``: its ``own`` where set, else the shard's."""
    values: tuple[Any, ...] = (kind, *check_rules(own, rules))
    return ProducerRules(**dict(zip(NAMES, values, strict=True)))


def differences(wanted: ProducerRules, have: ProducerRules) -> str:
    """Describe which of the ``wanted`` rules a group with the rules ``have`` does not fulfil; empty if none."""
    shown, asked = described_values(have), described_values(wanted)
    pairs = [(name, shown[name], value) for name, value in asked.items() if value is not None]
    return ", ".join(f"{name} {has}, not {value}" for name, has, value in pairs if value != has)


def described_values(own: ProducerRules) -> dict[str, Any]:
    """Return rules as a dict by the names of the settings, times in seconds; None: not set."""
    times = (None if us is None else us / 1e6 for us in (own.transaction_timeout_us, own.check_interval_us))
    after = {None: None, True: "rollback", False: "park"}[own.exhausted_rollback]
    return dict(zip(FIELDS, (own.kind, *times, own.check_max, after), strict=True))


def described(own: ProducerRules | None, rules: Rules, kind: str | None, transactional: bool) -> dict[str, Any]:
    """Return the effective rules of a group as a dict, with the names of its ``own``. ``transactional``: it had a
    session for half messages."""
    own_values = described_values(own or ProducerRules())
    return {
        "transactional": transactional or kind == TRANSACTIONAL,
        **described_values(effective(own, rules, kind)),
        "own": [name for name, value in own_values.items() if value is not None],
    }


def dump(own: ProducerRules) -> str:
    """Return the rules as JSON without those that are not set."""
    return json.dumps(_given(own), sort_keys=True, separators=(",", ":"))


def load(text: str) -> ProducerRules:
    """Return the rules from their JSON; unknown names are ignored."""
    return ProducerRules(**{name: value for name, value in json.loads(text).items() if name in NAMES})
