"""The table of settings and limits: source of ``escrowmq serve`` flags, environment (``ESCROWMQ_…``), TOML, docs.

Each field of :class:`BrokerSettings` is one line of the table: name, default, unit, reason. Durations are seconds as
floats; text such as ``"500ms"``, ``"8min"``, ``"72h"``, ``"7d"`` is accepted too. Sizes are bytes; ``"4MiB"`` works.
"""

from __future__ import annotations

import dataclasses
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

from escrowmq.errors import Code, Misuse

SECONDS = "seconds"
BYTES = "bytes"
COUNT = "count"
CHOICE = "choice"
FLAG = "flag"
TEXT = "text"


def _setting(unit: str, default: Any, reason: str, *, least: float = 0, choices: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"unit": unit, "reason": reason, "least": least, "choices": choices})


_seconds, _bytes, _count = (partial(_setting, unit) for unit in (SECONDS, BYTES, COUNT))
_choice, _flag = partial(_setting, CHOICE), partial(_setting, FLAG)


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerSettings:
    """All settings of a broker. Raises Misuse(BAD_SETTING) with the name of the setting if a value is out of range."""

    # Check-back (systems.md 1.6 to 1.8)
    transaction_timeout: float = _seconds(6.0, "time before the first check-back of a half message", least=0.001)
    check_interval: float = _seconds(30.0, "between two check-backs of one transaction", least=0.001)
    check_max: int = _count(15, "check-backs of one transaction before it is parked", least=1)
    half_retention: float = _seconds(72 * 3600.0, "an undecided half message older than this is parked", least=1)
    checks_exhausted: str = _choice(
        "park", "action after the last check-back: park (for the operator) or rollback", choices=("park", "rollback")
    )
    checks_in_flight: int = _count(20_000, "unanswered check-backs of one member; protects slow producers", least=1)

    # Groups and topics
    reject_transactional: bool = _flag(False, "refuse half messages with NO_PERMISSION")
    mixed_groups: bool = _flag(False, "let a transactional producer group also send plain messages")
    auto_create_topics: bool = _flag(True, "create a topic at its first message or subscription")
    default_queues: int = _count(4, "queues of a topic created without a number", least=1)
    producer_expiration: float = _seconds(
        30 * 86400.0,
        "a producer session (of a process, a Spark query) unused this long is removed; the last removes its group",
        least=1,
    )

    # Consumption
    lease_seconds: float = _seconds(60.0, "a consumer must settle its messages within this time", least=0.001)
    max_attempts: int = _count(16, "deliveries of one message to one group before its dead-letter queue", least=1)
    retry_backoff: float = _seconds(1.0, "delay before the second delivery; doubles each time")
    retry_backoff_max: float = _seconds(300.0, "longest time between two deliveries")

    # Storage
    retention: float = _seconds(7 * 86400.0, "segments wholly older than this are dropped", least=1)
    segment_bytes: int = _bytes(256 << 20, "size at which a segment is sealed", least=1 << 12)
    compression: str = _choice("none", "of message frames", choices=("none", "lz4"))
    dedup_window: float = _seconds(3600.0, "a message id sent again within this time gets its first receipt")
    dedup_max: int = _count(1 << 20, "ranges of message ids remembered; a steady client needs one each", least=1)
    snapshot_bytes: int = _bytes(
        256 << 20, "log written since the last snapshot before the next; bounds restart time", least=1 << 12
    )
    snapshot_frames: int = _count(
        20_000, "frames written since the last snapshot before the next; small ones replay no faster", least=1
    )

    # Limits: checked where data enters
    max_body_bytes: int = _bytes(4 << 20, "one message; a reader must be able to hold several", least=1)
    max_key_bytes: int = _bytes(1024, "keys are compared and indexed", least=1)
    max_tag_bytes: int = _bytes(128, "tags are names, not data", least=1)
    max_tags: int = _count(65_536, "distinct tags of a shard; each is remembered", least=1)
    max_properties_bytes: int = _bytes(32 << 10, "names and values together")
    max_batch_rows: int = _count(65_536, "rows of one request", least=1)
    max_batch_bytes: int = _bytes(64 << 20, "one request in memory", least=1 << 10)
    max_delay: float = _seconds(40 * 86400.0, "longest delay of a message")
    max_topics: int = _count(4096, "topics of a shard", least=1)
    max_queues: int = _count(1024, "queues of one topic", least=1)
    max_groups: int = _count(4096, "producer groups, and consumer groups, of a shard", least=1)
    max_open_transactions: int = _count(4_000_000, "undecided transactions of one producer group", least=1)
    max_transaction_messages: int = _count(10_000, "messages of one transaction", least=1)
    max_connections: int = _count(4096, "client connections; over it the one idle longest is closed", least=1)
    max_calls: int = _count(8192, "streams and reads in progress; each takes a thread or two", least=1)
    max_held_bytes: int = _bytes(
        256 << 20, "requests, responses, reads in progress; over it, connections not read are closed", least=1 << 20
    )
    max_waiting_bytes: int = _bytes(256 << 20, "requests waiting for the writer; more get QUEUE_FULL", least=1 << 10)
    max_writers: int = _count(1_000_000, "writers of numbered batches (Spark queries) remembered", least=1)
    max_sessions: int = _count(
        2_000_000, "producer sessions remembered; one for each start of a producer within producer_expiration", least=1
    )
    max_leases: int = _count(10_000, "unsettled leases of one consumer group", least=1)
    max_receive_rows: int = _count(65_536, "messages of one receive", least=1)

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            _check(f, getattr(self, f.name))

    @classmethod
    def load(cls, path: Path | None = None, overrides: Mapping[str, Any] | None = None) -> BrokerSettings:
        """Load defaults, then the TOML table ``[broker]``, then ``ESCROWMQ_NAME`` variables, then ``overrides``.

        Raises Misuse(BAD_SETTING) for an unknown name (with the nearest valid one) or an unreadable value.
        """
        values: dict[str, Any] = {}
        if path is not None:
            try:
                values.update(tomllib.loads(path.read_text()).get("broker", {}))
            except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
                raise Misuse(Code.BAD_SETTING, f"cannot read {path}: {problem}") from problem
        for f in dataclasses.fields(cls):
            if (text := os.environ.get(f"ESCROWMQ_{f.name.upper()}")) is not None:
                values[f.name] = text
        values.update({name: value for name, value in (overrides or {}).items() if value is not None})
        return cls.of(values)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> BrokerSettings:
        """Build settings from names and values; values may be text."""
        known = {f.name: f for f in dataclasses.fields(cls)}
        for name in values:
            if name not in known:
                raise Misuse(Code.BAD_SETTING, f"there is no setting {name!r}", nearest(name, list(known)))
        return cls(**{name: _read(known[name], value) for name, value in values.items()})


def nearest(name: str, known: list[str]) -> str:
    """Return a hint with the known name closest to ``name``, or an empty string."""
    from difflib import get_close_matches

    close = get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else ""


_UNITS: dict[str, dict[str, float]] = {
    SECONDS: {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "": 1.0},
    BYTES: {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 1000, "mb": 10**6, "gb": 10**9},
}
_FLAGS = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)


def parse_quantity(text: str, unit: str) -> float:
    """Convert ``"8min"`` to 480.0 (seconds), ``"4MiB"`` to 4194304.0 (bytes). Raises ValueError for other text."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS[unit]:
        raise ValueError(f"{text!r} is not a number of {unit} such as {'8min' if unit == SECONDS else '4MiB'}")
    return float(match[1]) * _UNITS[unit][match[2].lower()]


def _read(f: dataclasses.Field[Any], value: Any) -> Any:
    """Convert ``value`` to the type of setting ``f``."""
    unit = f.metadata["unit"]
    try:
        if unit == FLAG:
            if isinstance(value, bool):
                return value
            return _FLAGS[str(value).strip().lower()]
        if isinstance(value, bool) and unit in (SECONDS, BYTES, COUNT):
            raise TypeError("a boolean, not a number")
        if unit in _UNITS:
            number = parse_quantity(value, unit) if isinstance(value, str) else value
            return float(number) if unit == SECONDS else int(number)
        if unit == COUNT:
            if isinstance(value, float) and not value.is_integer():
                raise ValueError("not a whole number")
            return int(value)
        return value
    except (ValueError, KeyError, TypeError, OverflowError) as problem:
        raise Misuse(Code.BAD_SETTING, f"{f.name} = {value!r}: not readable as {unit}", str(problem)) from problem


def _check(f: dataclasses.Field[Any], value: Any) -> None:
    unit, least, choices = f.metadata["unit"], f.metadata["least"], f.metadata["choices"]
    if unit in (SECONDS, BYTES, COUNT):
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < inf:
            raise Misuse(Code.BAD_SETTING, f"{f.name} = {value!r}: a number of {unit}, at least {least}")
    elif choices and value not in choices:
        raise Misuse(Code.BAD_SETTING, f"{f.name} = {value!r}: one of {', '.join(choices)}")
