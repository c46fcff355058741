"""The settings table ``[gateway]``: limits on requests, message counts, waiting receives and timeouts. Every limit
holds before the memory is taken; the table is documented in docs/http.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from escrowmq.errors import Code, Misuse
from escrowmq.settings import BYTES, SECONDS, nearest, parse_quantity

COUNT = "count"


def _limit(default: float, unit: str, least: float = 1) -> Any:
    return dataclasses.field(default=default, metadata={"unit": unit, "least": least})


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """The table ``[gateway]`` of a configuration file. Raises Misuse(BAD_SETTING) for a value that makes no sense."""

    max_request_bytes: int = _limit(16 << 20, BYTES)
    """One request's body: room for one message of 4 MiB in base64 and more. Over it: 413."""
    max_bytes_in_flight: int = _limit(64 << 20, BYTES)
    """Bodies of all requests that are not answered yet. Over it: 503."""
    max_requests: int = _limit(1000, COUNT)
    """Requests that are not answered yet, waiting receives included. Over it: 503."""
    max_messages: int = _limit(1000, COUNT)
    """Messages, transactions or handles of one request. Over it: 413."""
    max_values: int = _limit(64_000, COUNT)
    """Names and values of one request's JSON, counted before it is parsed: 64 for each of ``max_messages``. Over it:
    413."""
    max_receives: int = _limit(256, COUNT)
    """Receives that wait at the broker at once; times ``max_receive_bytes`` it bounds what can arrive together."""
    max_receive_bytes: int = _limit(1 << 20, BYTES)
    """Messages of one receive; a larger message comes alone."""
    max_wait: float = _limit(30.0, SECONDS, 0)
    """Longest wait of a receive; longer ones are cut to it."""
    max_groups: int = _limit(4096, COUNT)
    """Producer groups, and consumer groups, that one gateway speaks for."""
    timeout: float = _limit(30.0, SECONDS, 0.001)
    """How long the broker's answer is waited for before 504."""
    body_timeout: float = _limit(30.0, SECONDS, 0.001)
    """How long a client may take to send its body."""
    header_timeout: float = _limit(10.0, SECONDS, 0.001)
    """How long a connection may take to send a request's headers, the first counted from its opening. Over it: closed.
    """
    answer_timeout: float = _limit(60.0, SECONDS, 0.001)
    """How long a client may take to read an answer. Over it: closed."""
    max_connections: int = _limit(2100, COUNT)
    """Open connections: two for each of ``max_requests``, and some. Over it the one that has waited longest for a
    request is closed, or, if all are at work, the new one."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, least = getattr(self, field.name), field.metadata["least"]
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < inf:
                raise Misuse(Code.BAD_SETTING, f"gateway.{field.name} = {value!r}: a number, at least {least}")

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> GatewaySettings:
        """Build settings from names and values, texts such as ``"16MiB"`` included."""
        known = {field.name: field.metadata["unit"] for field in dataclasses.fields(cls)}
        for name in values:
            if name not in known:
                raise Misuse(Code.BAD_SETTING, f"there is no setting gateway.{name}", nearest(name, list(known)))
        return cls(**{name: _number(name, value, known[name]) for name, value in values.items()})


def _number(name: str, value: Any, unit: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        number = int(value) if unit == COUNT else parse_quantity(value, unit)
    except ValueError as problem:
        raise Misuse(Code.BAD_SETTING, f"gateway.{name} = {value!r}: {problem}") from None
    return number if unit == SECONDS else int(number)
