"""The check-back URLs that the operator configured, one per producer group. None is ever taken from a message."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

from escrowmq.errors import Code, Misuse
from escrowmq.gateway.signing import secret_keys
from escrowmq.message.names import check_name
from escrowmq.platform.listening import shown_address
from escrowmq.settings import SECONDS, nearest, parse_quantity

DEFAULT_TIMEOUT = 10.0
_KEYS = ("url", "secret_env", "timeout", "ca_file")


@dataclass(frozen=True, slots=True)
class Address:
    """The check-back URL of one group. ``timeout``: seconds for a complete response; ``secret``: HMAC keys, empty:
    unsigned requests; ``ca_file``: trusted certificates instead of the system's."""

    group: str
    url: str
    secret: tuple[bytes, ...] = field(default=(), repr=False)
    timeout: float = DEFAULT_TIMEOUT
    ca_file: str | None = None

    def __post_init__(self) -> None:
        check_name(self.group, Code.BAD_GROUP_NAME)
        check_url(self.url)
        if self.secret:
            secret_keys(self.secret)
        if isinstance(self.timeout, bool) or not isinstance(self.timeout, int | float) or not 0 < self.timeout <= 3600:
            raise Misuse(
                Code.BAD_SETTING, f"check_back.{self.group}.timeout = {self.timeout!r}: seconds, up to an hour"
            )


def check_url(url: str) -> None:
    """Raise Misuse(BAD_URL) unless ``url`` is an http or https URL without credentials or a fragment."""
    try:
        parts = urlsplit(url)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        sound = False
    if not sound or not url.isascii() or not url.isprintable() or " " in url:
        raise Misuse(
            Code.BAD_URL,
            f"{shown_address(url)!r} is not an http or https address",
            "for example http://127.0.0.1:8000/checks",
        )
    if parts.username is not None or parts.password is not None or parts.fragment:
        raise Misuse(Code.BAD_URL, "a check-back address holds no user, password or fragment", "sign: secret_env = ...")


def read_addresses(
    flags: Sequence[str] = (), tables: Mapping[str, Any] | None = None, environment: Mapping[str, str] | None = None
) -> dict[str, Address]:
    """Read the addresses by group: from tables ``[check_back.GROUP]`` (url, secret_env, timeout, ca_file), overridden
    by flags ``GROUP=URL``. Secrets come from environment variables only. Raises Misuse(BAD_SETTING, BAD_URL)."""
    known = os.environ if environment is None else environment
    found = {group: _read_table(group, table, known) for group, table in (tables or {}).items()}
    for flag in flags:
        group, equals, url = flag.partition("=")
        if not equals:
            raise Misuse(
                Code.BAD_SETTING, f"{flag!r} is not GROUP=URL", "for example shop=http://127.0.0.1:8000/checks"
            )
        found[group] = replace(found[group], url=url) if group in found else Address(group, url)
    return found


def _read_table(group: str, table: Any, environment: Mapping[str, str]) -> Address:
    place = f"check_back.{group}"
    check_table(place, table, _KEYS)
    return Address(
        group,
        table["url"],
        read_secret(place, table.get("secret_env"), environment),
        read_seconds(place, table.get("timeout", DEFAULT_TIMEOUT)),
        table.get("ca_file"),
    )


def check_table(place: str, table: Any, keys: Sequence[str]) -> None:
    """Raise Misuse(BAD_SETTING) unless the table ``place`` of a file has a ``url``, and only settings of ``keys``."""
    if not isinstance(table, Mapping) or not isinstance(table.get("url"), str):
        raise Misuse(Code.BAD_SETTING, f"[{place}] has no url")
    for name in table:
        if name not in keys:
            raise Misuse(Code.BAD_SETTING, f"there is no setting {place}.{name}", nearest(name, list(keys)))


def read_secret(place: str, variable: Any, environment: Mapping[str, str]) -> tuple[bytes, ...]:
    """Return the HMAC keys in an environment variable, none if it is None. Raises Misuse(BAD_SETTING)."""
    if variable is None:
        return ()
    if not isinstance(variable, str) or not environment.get(variable):
        raise Misuse(
            Code.BAD_SETTING, f"{place}.secret_env: the environment has no {variable}", "set it, or leave it out"
        )
    return tuple(secret_keys(environment[variable]))


def read_seconds(place: str, value: Any) -> Any:
    """Return the timeout of a table in seconds, as it is unless it is a text. Raises Misuse(BAD_SETTING)."""
    try:
        return parse_quantity(value, SECONDS) if isinstance(value, str) else value
    except ValueError as problem:
        raise Misuse(Code.BAD_SETTING, f"{place}.timeout: {problem}") from None
