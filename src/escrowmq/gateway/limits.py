"""The settings table ``[gateway]``: limits on requests, message counts, waiting receives and timeouts. Every limit is
checked before memory is allocated; docs/http.md documents the table."""

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
    """The table ``[gateway]`` of a configuration file. Raises Misuse(BAD_SETTING) for an invalid value."""

    max_request_bytes: int = _limit(16 << 20, BYTES)
    """Body of one request: room for one message of 4 MiB in base64 and more. Above: 413."""
    max_bytes_in_flight: int = _limit(64 << 20, BYTES)
    """Bodies of all unanswered requests together. Above: 503."""
    max_requests: int = _limit(1000, COUNT)
    """Unanswered requests, including waiting receives. Above: 503."""
    max_messages: int = _limit(1000, COUNT)
    """Messages, transactions or handles of one request. Above: 413."""
    max_values: int = _limit(64_000, COUNT)
    """Names and values in one request's JSON, counted before parsing: 64 for each of ``max_messages``. Above: 413."""
    max_receives: int = _limit(256, COUNT)
    """Concurrent receives at the broker; times ``max_receive_bytes`` it bounds the memory of their results."""
    max_receive_bytes: int = _limit(1 << 20, BYTES)
    """Message bytes of one receive; a larger message is delivered alone."""
    max_wait: float = _limit(30.0, SECONDS, 0)
    """Maximum wait of a receive; longer values are reduced to it."""
    max_groups: int = _limit(4096, COUNT)
    """Producer groups, and consumer groups, of one gateway."""
    timeout: float = _limit(30.0, SECONDS, 0.001)
    """Timeout of a broker's response; then 504."""
    body_timeout: float = _limit(30.0, SECONDS, 0.001)
    """Timeout for a client to send its body."""
    header_timeout: float = _limit(10.0, SECONDS, 0.001)
    """Timeout for a connection to send a request's headers, initially from its opening; then it is closed."""
    answer_timeout: float = _limit(60.0, SECONDS, 0.001)
    """Timeout for a client to read a response; then the connection is closed."""
    max_connections: int = _limit(2100, COUNT)
    """Open connections: two for each of ``max_requests``, plus a reserve. Above: the connection idle longest is closed,
    or the new one if none is idle."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, least = getattr(self, field.name), field.metadata["least"]
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < inf:
                raise Misuse(Code.BAD_SETTING, f"gateway.{field.name} = {value!r}: a number, at least {least}")

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> GatewaySettings:
        """Return settings from names and values, including texts such as ``"16MiB"``."""
        known = {field.name: field.metadata["unit"] for field in dataclasses.fields(cls)}
        for name in values:
            if name not in known:
                raise Misuse(Code.BAD_SETTING, f"there is no setting gateway.{name}", nearest(name, list(known)))
        return cls(**{name: _parse(name, value, known[name]) for name, value in values.items()})


def _parse(name: str, value: Any, unit: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        number = int(value) if unit == COUNT else parse_quantity(value, unit)
    except ValueError as problem:
        raise Misuse(Code.BAD_SETTING, f"gateway.{name} = {value!r}: {problem}") from None
    return number if unit == SECONDS else int(number)
