"""The webhooks configured by the operator's flags and file, with their events. None is ever taken from a message."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from escrowmq.errors import Code, Misuse
from escrowmq.gateway.addresses import check_table, check_url, read_seconds, read_secret
from escrowmq.gateway.signing import secret_keys
from escrowmq.gateway.webhooks.rules import Rule

_KEYS = ("url", "events", "secret_env", "timeout", "ca_file", "topics", "groups")
MOST_HOOKS = 64
TIMEOUT = 10.0


@dataclass(frozen=True, slots=True)
class Hook:
    """One webhook. ``timeout``: seconds for a complete response; ``topics`` and ``groups``: notify only about these
    (empty: all; events without a topic or group always match); ``secret``: HMAC keys, empty: unsigned notices;
    ``ca_file``: trusted certificates instead of the system's."""

    name: str
    url: str
    rules: tuple[Rule, ...]
    secret: tuple[bytes, ...] = field(default=(), repr=False)
    timeout: float = TIMEOUT
    ca_file: str | None = None
    topics: frozenset[str] = frozenset()
    groups: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        check_url(self.url)
        if self.secret:
            secret_keys(self.secret)
        if not self.rules:
            raise Misuse(Code.BAD_SETTING, f"the webhook {self.name} names no events", 'such as events = ["parked"]')
        if isinstance(self.timeout, bool) or not isinstance(self.timeout, int | float) or not 0 < self.timeout <= 60:
            raise Misuse(Code.BAD_SETTING, f"webhook.{self.name}.timeout = {self.timeout!r}: seconds, up to 60")

    def wants(self, facts: Mapping[str, Any]) -> bool:
        """Decide whether an event matches the topics and groups."""
        topic, group = facts.get("topic"), facts.get("group")
        return (not self.topics or topic is None or topic in self.topics) and (
            not self.groups or group is None or group in self.groups
        )


def read_hooks(
    flags: Sequence[str] = (), tables: Mapping[str, Any] | None = None, environment: Mapping[str, str] | None = None
) -> list[Hook]:
    """Read the webhooks from tables ``[webhook.NAME]`` (url, events, secret_env, timeout, ca_file, topics, groups) and
    from flags ``EVENT[,EVENT...]=URL``. Secrets come from environment variables only. Raises Misuse(BAD_SETTING,
    BAD_URL)."""
    known = os.environ if environment is None else environment
    hooks = [_read_table(name, table, known) for name, table in (tables or {}).items()]
    for number, flag in enumerate(flags):
        events, equals, url = flag.partition("=")
        if not equals:
            hint = "for example parked,dead:10/1min=http://127.0.0.1:9000/escrowmq"
            raise Misuse(Code.BAD_SETTING, f"{flag!r} is not EVENT[,EVENT...]=URL", hint)
        hooks.append(Hook(f"flag-{number + 1}", url, tuple(map(Rule.read, events.split(",")))))
    if len(hooks) > MOST_HOOKS:
        raise Misuse(Code.BAD_SETTING, f"{len(hooks)} webhooks; at most {MOST_HOOKS}")
    return hooks


def _read_table(name: str, table: Any, environment: Mapping[str, str]) -> Hook:
    place = f"webhook.{name}"
    check_table(place, table, _KEYS)
    return Hook(
        name,
        table["url"],
        tuple(map(Rule.read, _read_texts(place, table, "events"))),
        read_secret(place, table.get("secret_env"), environment),
        read_seconds(place, table.get("timeout", TIMEOUT)),
        table.get("ca_file"),
        frozenset(_read_texts(place, table, "topics")),
        frozenset(_read_texts(place, table, "groups")),
    )


def _read_texts(place: str, table: Mapping[str, Any], key: str) -> list[str]:
    given = table.get(key, [])
    if not isinstance(given, list) or not all(isinstance(one, str) for one in given):
        raise Misuse(Code.BAD_SETTING, f"{place}.{key} is not a list of texts")
    return given
