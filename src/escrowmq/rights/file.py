"""The rights file: TOML with principals, their tokens, certificates, roles and rules."""

from __future__ import annotations

import datetime as dt
import hashlib
import os
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from escrowmq.errors import Code, Misuse
from escrowmq.rights.rules import ROLES, Limits, Principal, Rule
from escrowmq.settings import BYTES, nearest, parse_quantity

_NAME = r"^[A-Za-z0-9._@-]{1,64}$"
_Count = Annotated[int, msgspec.Meta(ge=1)]


class _Token(msgspec.Struct, forbid_unknown_fields=True):
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    id: str = ""
    name: str = ""
    expires: Any = None  # a date or a time of TOML; msgspec knows no union of them


class _Limits(msgspec.Struct, forbid_unknown_fields=True):
    rows_per_s: _Count | None = None
    bytes_per_s: _Count | str | None = None
    open_transactions: _Count | None = None
    connections: _Count | None = None


class _Role(msgspec.Struct, forbid_unknown_fields=True):
    allow: list[str]


class _Principal(msgspec.Struct, forbid_unknown_fields=True):
    tokens: list[_Token] = []
    certificates: list[str] = []
    roles: list[str] = []
    allow: list[str] = []
    limits: _Limits = msgspec.field(default_factory=_Limits)


class _File(msgspec.Struct, forbid_unknown_fields=True):
    principals: dict[Annotated[str, msgspec.Meta(pattern=_NAME)], _Principal]
    roles: dict[Annotated[str, msgspec.Meta(pattern=_NAME)], _Role] = {}


class Token(NamedTuple):
    """A known token, without its secret."""

    principal: Principal
    sha256: str
    identity: str
    name: str
    expires_us: int | None
    """Microseconds since 1970 from which it is invalid; None: it does not expire."""


@dataclass(frozen=True, slots=True)
class Rights:
    """The content of a rights file."""

    digest: str
    """First 12 hexadecimal digits of the file's SHA-256, to compare brokers."""
    principals: Mapping[str, Principal]
    tokens: Mapping[str, Token]
    """By SHA-256."""
    certificates: Mapping[str, Principal]
    """By subject alternative name or common name."""


def load(path: Path) -> Rights:
    """Read a rights file. Raises Misuse(BAD_SETTING) that names the file and the place of the mistake."""
    try:
        with open(path, "rb") as opened:
            if os.fstat(opened.fileno()).st_mode & 0o022:
                raise Misuse(Code.BAD_SETTING, f"{path}: other users can write it", f"chmod go-w {path}")
            folder = path.resolve().parent
            if folder.stat().st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH:
                text = f"{path}: other users can put another file in its place"
                raise Misuse(Code.BAD_SETTING, text, f"chmod o-w {folder}")
            return parse(opened.read(), str(path))
    except OSError as problem:
        raise _bad(str(path), str(problem.strerror or problem)) from None


def parse(content: bytes, where: str = "the rights file") -> Rights:
    """Parse the content of a rights file. Raises Misuse(BAD_SETTING)."""
    try:
        read = msgspec.convert(tomllib.loads(content.decode()), _File)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as problem:
        raise _bad(where, str(problem)) from None
    roles = dict(ROLES)
    for name, role in read.roles.items():
        if name in ROLES:
            raise _bad(where, f"roles.{name}: this role exists already, with {_rules_text(ROLES[name])}")
        roles[name] = _rules(where, f"roles.{name}.allow", role.allow)
    principals: dict[str, Principal] = {}
    tokens: dict[str, Token] = {}
    certificates: dict[str, Principal] = {}
    for name, entry in read.principals.items():
        at = f"principals.{name}"
        rules = _rules(where, f"{at}.allow", entry.allow)
        for role_name in entry.roles:
            if role_name not in roles:
                hint = nearest(role_name, list(roles)) or f"there are {', '.join(roles)}"
                raise _bad(where, f"{at}.roles: no role {role_name!r}; {hint}")
            rules += roles[role_name]
        principal = principals[name] = Principal(name, tuple(dict.fromkeys(rules)), _limits(where, at, entry.limits))
        for token in entry.tokens:
            if token.sha256 in tokens:
                raise _bad(where, f"{at}.tokens: {tokens[token.sha256].principal.name} has this token, too")
            expires_us = _microseconds(where, at, token.expires)
            tokens[token.sha256] = Token(principal, token.sha256, token.id, token.name, expires_us)
        for certificate in entry.certificates:
            if certificate in certificates:
                raise _bad(where, f"{at}.certificates: {certificates[certificate].name} has {certificate!r}, too")
            certificates[certificate] = principal
    if not principals:
        raise _bad(where, "there is no principal, so nobody could do anything")
    return Rights(hashlib.sha256(content).hexdigest()[:12], principals, tokens, certificates)


def _bad(where: str, problem: str) -> Misuse:
    return Misuse(Code.BAD_SETTING, f"{where}: {problem}", "`escrowmq rights init` writes an example with comments")


def _rules(where: str, at: str, texts: list[str]) -> tuple[Rule, ...]:
    rules = []
    for text in texts:
        try:
            rules.append(Rule.parse(text))
        except (ValueError, TypeError) as problem:
            raise _bad(where, f"{at}: {problem}") from None
    return tuple(rules)


def _rules_text(rules: tuple[Rule, ...]) -> str:
    return ", ".join(f"`{rule}`" for rule in rules)


def _limits(where: str, at: str, entry: _Limits) -> Limits:
    values: dict[str, Any] = msgspec.structs.asdict(entry)
    if isinstance(entry.bytes_per_s, str):
        try:
            values["bytes_per_s"] = max(int(parse_quantity(entry.bytes_per_s, BYTES)), 1)
        except ValueError as problem:
            raise _bad(where, f"{at}.limits.bytes_per_s: {problem}") from None
    return Limits(**values)


def _microseconds(where: str, at: str, expires: Any) -> int | None:
    """Return microseconds since 1970; of a day its beginning, UTC, and a time without a zone is UTC."""
    if expires is None:
        return None
    if not isinstance(expires, dt.date):
        raise _bad(where, f"{at}.tokens: expires = {expires!r} is no date, write it as 2027-02-01")
    if not isinstance(expires, dt.datetime):
        expires = dt.datetime(expires.year, expires.month, expires.day)
    if expires.tzinfo is None:
        expires = expires.replace(tzinfo=dt.UTC)
    return int(expires.timestamp() * 1_000_000)
