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
from escrowmq.overview.waits.waiting import look

if TYPE_CHECKING:
    import sqlalchemy as sa

RATE_SECONDS = 60.0
"""Without a status before, rates of topics are over so many seconds before now."""
MOST_RATED = 200
"""Topics whose rates are asked without a status before; of the others there is none then."""


def status(
    bus: Bus, engines: Sequence[sa.Engine] = (), *, before: Status | None = None, lag_seconds: float = LAG_SECONDS
) -> Status:
    """Return the state of everything. ``before``: an earlier status of the same brokers; rates are those since then.
    Who is away is named in ``missing``, and its numbers are not in it."""
    asking = Asking(bus, engines)
    now_us = asking.now_us()
    found = asking.all(lambda admin: admin.standing())
    databases: list[DatabaseStands] = []
    causes = look(asking, now_us, lag_seconds, databases)
    brokers, counted = _brokers(asking, before, now_us)
    topics = _topics(asking, found, before, now_us)
    return Status(
        now_us=now_us,
        brokers=tuple(brokers),
        topics=tuple(topics),
        groups=tuple(_groups(found)),
        producers=tuple(_producers(found)),
        databases=tuple(databases),
        waiting=tuple(causes),
        missing=asking.missing,
        counted={"topics": _ends(found), **counted},
    )


def _brokers(
    asking: Asking, before: Status | None, now_us: int
) -> tuple[list[BrokerStands], dict[str, dict[str, float]]]:
    health = asking.all(lambda admin: admin.health(), anew=True)
    hellos = {one["broker"]: one for one in asking.all(lambda admin: admin.hello())}
    stats: dict[str, Mapping[str, Any]] = {str(one["broker"]): one for one in asking.all(lambda admin: admin.stats())}
    brokers, counted = [], {}
    for one in health:
        broker = one["broker"]
        numbers, hello = stats.get(broker, {}), hellos.get(broker)
        grown = {name: float(numbers[name]) for name in _GROWING if name in numbers}
        counted[broker] = grown
        rates = {name: _rate(before, broker, name, value, now_us) for name, value in grown.items()}
        brokers.append(
            BrokerStands(
                broker=broker,
                status=one["status"],
                reason=one["reason"],
                shard=hello["shard"] if hello else None,
                version=hello["version"] if hello else None,
                epoch=hello["epoch"] if hello else None,
                log_bytes=_whole(numbers.get("log_stored_bytes")),
                free_bytes=_whole(numbers.get("disk_free_bytes")),
                log_bytes_per_second=rates.get("log_bytes_total"),
                asked_per_second=rates.get("checks_asked_total"),
                unanswered=_whole(numbers.get("checks_unanswered")),
            )
        )
    return brokers, counted


_GROWING = ("log_bytes_total", "checks_asked_total")


def _rate(before: Status | None, of: str, name: str, value: float, now_us: int) -> float | None:
    """Return how fast a number grew since the status before; None without one, or when it began anew."""
    was = None if before is None else before.counted.get(of, {}).get(name)
    if before is None or was is None or value < was or now_us <= before.now_us:
        return None
    return (value - was) / ((now_us - before.now_us) / 1e6)


def _whole(value: Any) -> int | None:
    return None if value is None else int(value)


# Topics and groups, over all brokers


def _ends(found: list[Any]) -> dict[str, float]:
    ends: dict[str, float] = {}
    for stands in found:
        for topic in stands["topics"]:
            ends[topic["topic"]] = ends.get(topic["topic"], 0.0) + topic["end"]
    return ends


def _topics(asking: Asking, found: list[Any], before: Status | None, now_us: int) -> list[TopicStands]:
    stored: dict[str, int] = {}
    for stands in found:
        for topic in stands["topics"]:
            stored[topic["topic"]] = stored.get(topic["topic"], 0) + topic["stored"]
    ends, rates = _ends(found), {}
    for number, name in enumerate(sorted(stored)):
        if before is not None:
            rates[name] = _rate(before, "topics", name, ends[name], now_us)
        elif number < MOST_RATED:
            rates[name] = _rate_by_time(asking, name, now_us)
    return [TopicStands(name, stored[name], rates.get(name)) for name in sorted(stored)]


def _rate_by_time(asking: Asking, topic: str, now_us: int) -> float | None:
    """By the times when messages became visible."""
    begin = datetime.fromtimestamp(now_us / 1e6 - RATE_SECONDS, UTC)
    rows = asking.all(lambda admin: admin.offsets(topic, time=begin))
    return sum(row["end"] - row["offset_at"] for row in rows) / RATE_SECONDS if rows else None


def _groups(found: list[Any]) -> list[GroupStands]:
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


def _producers(found: list[Any]) -> list[ProducersStand]:
    groups: dict[str, dict[str, Any]] = {}
    for stands in found:
        for one in stands["producers"]:
            row = groups.setdefault(one["group"], {"open": 0, "parked": 0, "oldest_seconds": 0.0, "connected": 0})
            for name in ("open", "parked", "connected"):
                row[name] += one[name]
            row["oldest_seconds"] = max(row["oldest_seconds"], one["oldest_seconds"])
    return [ProducersStand(group=group, **row) for group, row in sorted(groups.items())]
