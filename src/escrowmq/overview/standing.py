"""The state of everything, on one screen: brokers, topics, groups, outboxes, and pending work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from escrowmq.client.bus import Bus
from escrowmq.overview.asking import Asking
from escrowmq.overview.values import (
    BrokerStands,
    DatabaseStands,
    GroupStands,
    ProducersStand,
    Status,
    TopicStands,
)
from escrowmq.overview.waits.brokers import LAG_SECONDS
from escrowmq.overview.waits.waiting import find_causes

if TYPE_CHECKING:
    import sqlalchemy as sa

RATE_SECONDS = 60.0
"""Period of topic rates, in seconds before now, if there is no earlier status."""
MOST_RATED = 200
"""Number of topics whose rates are measured if there is no earlier status; other topics get none."""


def status(
    bus: Bus, engines: Sequence[sa.Engine] = (), *, before: Status | None = None, lag_seconds: float = LAG_SECONDS
) -> Status:
    """Return the state of everything.

    ``before`` is an earlier status of the same brokers; rates are then those since it. Brokers and databases that did
    not answer are named in ``missing``, and their numbers are left out.
    """
    asking = Asking(bus, engines)
    now_us = asking.now_us()
    found = asking.ask_all(lambda admin: admin.standing())
    databases: list[DatabaseStands] = []
    causes = find_causes(asking, now_us, lag_seconds, databases)
    brokers, counted = _describe_brokers(asking, before, now_us)
    topics = _describe_topics(asking, found, before, now_us)
    return Status(
        now_us=now_us,
        brokers=tuple(brokers),
        topics=tuple(topics),
        groups=tuple(_sum_groups(found)),
        producers=tuple(_sum_producers(found)),
        databases=tuple(databases),
        waiting=tuple(causes),
        missing=asking.missing,
        counted={"topics": _sum_ends(found), **counted},
    )


def _describe_brokers(
    asking: Asking, before: Status | None, now_us: int
) -> tuple[list[BrokerStands], dict[str, dict[str, float]]]:
    health = asking.ask_all(lambda admin: admin.health(), anew=True)
    hellos = {one["broker"]: one for one in asking.ask_all(lambda admin: admin.hello())}
    stats: dict[str, Mapping[str, Any]] = {
        str(one["broker"]): one for one in asking.ask_all(lambda admin: admin.stats())
    }
    brokers, counted = [], {}
    for one in health:
        broker = one["broker"]
        numbers, hello = stats.get(broker, {}), hellos.get(broker)
        grown = {name: float(numbers[name]) for name in _COUNTERS if name in numbers}
        counted[broker] = grown
        rates = {name: _rate_since(before, broker, name, value, now_us) for name, value in grown.items()}
        brokers.append(
            BrokerStands(
                broker=broker,
                status=one["status"],
                reason=one["reason"],
                shard=hello["shard"] if hello else None,
                version=hello["version"] if hello else None,
                epoch=hello["epoch"] if hello else None,
                log_bytes=_to_int(numbers.get("log_stored_bytes")),
                free_bytes=_to_int(numbers.get("disk_free_bytes")),
                log_bytes_per_second=rates.get("log_bytes_total"),
                asked_per_second=rates.get("checks_asked_total"),
                unanswered=_to_int(numbers.get("checks_unanswered")),
            )
        )
    return brokers, counted


_COUNTERS = ("log_bytes_total", "checks_asked_total")


def _rate_since(before: Status | None, of: str, name: str, value: float, now_us: int) -> float | None:
    """Return the growth of a counter per second since the earlier status; None without one, or if the counter was
    reset."""
    was = None if before is None else before.counted.get(of, {}).get(name)
    if before is None or was is None or value < was or now_us <= before.now_us:
        return None
    return (value - was) / ((now_us - before.now_us) / 1e6)


def _to_int(value: Any) -> int | None:
    return None if value is None else int(value)


# Topics and groups, over all brokers


def _sum_ends(found: list[Any]) -> dict[str, float]:
    ends: dict[str, float] = {}
    for stands in found:
        for topic in stands["topics"]:
            ends[topic["topic"]] = ends.get(topic["topic"], 0.0) + topic["end"]
    return ends


def _describe_topics(asking: Asking, found: list[Any], before: Status | None, now_us: int) -> list[TopicStands]:
    stored: dict[str, int] = {}
    for stands in found:
        for topic in stands["topics"]:
            stored[topic["topic"]] = stored.get(topic["topic"], 0) + topic["stored"]
    ends, rates = _sum_ends(found), {}
    for number, name in enumerate(sorted(stored)):
        if before is not None:
            rates[name] = _rate_since(before, "topics", name, ends[name], now_us)
        elif number < MOST_RATED:
            rates[name] = _measure_recent_rate(asking, name, now_us)
    return [TopicStands(name, stored[name], rates.get(name)) for name in sorted(stored)]


def _measure_recent_rate(asking: Asking, topic: str, now_us: int) -> float | None:
    """Measure the messages per second of a topic over RATE_SECONDS, by the times when they became visible."""
    begin = datetime.fromtimestamp(now_us / 1e6 - RATE_SECONDS, UTC)
    rows = asking.ask_all(lambda admin: admin.offsets(topic, time=begin))
    return sum(row["end"] - row["offset_at"] for row in rows) / RATE_SECONDS if rows else None


def _sum_groups(found: list[Any]) -> list[GroupStands]:
    groups: dict[tuple[str, str], dict[str, Any]] = {}
    for stands in found:
        for one in stands["consumers"]:
            row = groups.setdefault(
                (one["group"], one["topic"]), dict.fromkeys(_SUMMED, 0) | {"lag_seconds": 0.0, "paused": False}
            )
            for name in _SUMMED:
                row[name] += one[name]
            row["lag_seconds"] = max(row["lag_seconds"], one["lag_seconds"])
            row["paused"] = row["paused"] or bool(one.get("paused", False))
    return [GroupStands(group=group, topic=topic, **row) for (group, topic), row in sorted(groups.items())]


_SUMMED = ("lag", "leased", "retrying", "dead", "receiving")


def _sum_producers(found: list[Any]) -> list[ProducersStand]:
    groups: dict[str, dict[str, Any]] = {}
    for stands in found:
        for one in stands["producers"]:
            row = groups.setdefault(one["group"], {"open": 0, "parked": 0, "oldest_seconds": 0.0, "connected": 0})
            for name in ("open", "parked", "connected"):
                row[name] += one[name]
            row["oldest_seconds"] = max(row["oldest_seconds"], one["oldest_seconds"])
    return [ProducersStand(group=group, **row) for group, row in sorted(groups.items())]
