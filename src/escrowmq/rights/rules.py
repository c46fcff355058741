"""The seven kinds of access, the rules that grant them, and principals."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from escrowmq.errors import Code, EscrowError, error
from escrowmq.settings import nearest


class Access(StrEnum):
    """A kind of access. The first five are granted for names, the last two for the whole broker."""

    SEND = "send"
    PRODUCE = "produce"
    CONSUME = "consume"
    READ = "read"
    ACT = "act"
    VIEW = "view"
    ADMIN = "admin"


WHOLE = frozenset({Access.VIEW, Access.ADMIN})
"""Access that has no name."""
_PHRASES = {
    Access.SEND: "send to topic {}",
    Access.PRODUCE: "produce for group {}",
    Access.CONSUME: "consume group {}",
    Access.READ: "read topic {}",
    Access.ACT: "act on {}",
    Access.VIEW: "view this broker",
    Access.ADMIN: "administer this broker",
}
_NAME = re.compile(r"[A-Za-z0-9._-]{0,127}\*?")
_MOST_KEPT = 4096


class Need(NamedTuple):
    """A right that a call needs. ``name`` None: of VIEW and ADMIN; of the others a right for any name is enough."""

    access: Access
    name: str | None = None

    def __str__(self) -> str:
        """Return the rule that grants it."""
        return str(self.access) if self.access in WHOLE else f"{self.access} {self.name or 'NAME'}"

    def phrase(self) -> str:
        """Return the operation in words: ``consume group cart``."""
        return _PHRASES[self.access].format(self.name or "any")


def denied(principal: str, need: Need) -> EscrowError:
    """Return Denied(DENIED), which names the principal and the right that it lacks."""
    return error(
        Code.DENIED,
        f"{principal} may not {need.phrase()}: it needs `{need}`",
        "an administrator can add it to the rights file; `escrowmq whoami` shows the rights of a token",
    )


class Rule(NamedTuple):
    """A granted access: for one name, or for every name that begins with a prefix (``prefix`` true)."""

    access: Access
    name: str = ""
    prefix: bool = False

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Parse ``consume cart``, ``send orders*`` or ``view``. Raises ValueError with the reason."""
        word, *names = text.split()
        try:
            access = Access(word)
        except ValueError:
            hint = nearest(word, [str(one) for one in Access])
            raise ValueError(f"{word!r} is no kind of access" + (f"; {hint}" if hint else "")) from None
        if access in WHOLE:
            if names:
                raise ValueError(f"{access} has no name: write only {str(access)!r}")
            return cls(access)
        if len(names) != 1 or not _NAME.fullmatch(names[0]):
            raise ValueError(f"{text!r} needs one name, or a prefix and '*', such as '{access} orders*'")
        return cls(access, names[0].removesuffix("*"), names[0].endswith("*"))

    def __str__(self) -> str:
        """Return the rule as it is written in the file."""
        return str(self.access) if self.access in WHOLE else f"{self.access} {self.name}{'*' * self.prefix}"

    def grants(self, need: Need) -> bool:
        """Return whether the rule is sufficient for ``need``."""
        if self.access is not need.access:
            return False
        if need.name is None:
            return True
        return need.name.startswith(self.name) if self.prefix else need.name == self.name

    def includes(self, other: Rule) -> bool:
        """Return whether this rule grants everything that ``other`` grants."""
        if self.access is not other.access or (other.prefix and not self.prefix):
            return False
        return other.name.startswith(self.name) if self.prefix else other.name == self.name


def rules_of(*texts: str) -> tuple[Rule, ...]:
    """Parse several rules."""
    return tuple(map(Rule.parse, texts))


ROLES: dict[str, tuple[Rule, ...]] = {
    "reader": rules_of("read *", "view"),
    "spark": rules_of("read *", "view"),
    "service": rules_of("send *", "produce *", "consume *", "read *"),
    "operator": rules_of("read *", "view", "act *"),
    "admin": rules_of("send *", "produce *", "consume *", "read *", "act *", "view", "admin"),
}
"""Roles that need no definition in the file."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one principal at one broker; None: none."""

    rows_per_s: int | None = None
    bytes_per_s: int | None = None
    open_transactions: int | None = None
    connections: int | None = None

    @property
    def is_set(self) -> bool:
        """Return whether rows or bytes are limited."""
        return self.rows_per_s is not None or self.bytes_per_s is not None


@dataclass(frozen=True, slots=True)
class Principal:
    """A name with its rules and limits. Rules are never removed from a principal; a new file has new principals."""

    name: str
    rules: tuple[Rule, ...]
    limits: Limits = Limits()
    _kept: dict[Need, Rule | None] = field(default_factory=dict, repr=False, compare=False)

    def rule_for(self, need: Need) -> Rule | None:
        """Return the rule that grants ``need``; None if none does."""
        try:
            return self._kept[need]
        except KeyError:
            found = next((rule for rule in self.rules if rule.grants(need)), None)
            if len(self._kept) < _MOST_KEPT:
                self._kept[need] = found
            return found

    def missing(self, needs: Iterable[Need]) -> Need | None:
        """Return the first of ``needs`` that no rule grants; None if all are granted."""
        return next((need for need in needs if self.rule_for(need) is None), None)

    def includes(self, other: Principal) -> bool:
        """Return whether every rule of ``other`` is granted by a rule of this one."""
        return all(any(rule.includes(theirs) for rule in self.rules) for theirs in other.rules)
