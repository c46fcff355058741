"""Pending work, and the state of everything on one screen: brokers, topics, groups and outboxes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from escrowmq.client.bus import Bus
from escrowmq.client.links.answers import Listing
from escrowmq.overview.sources import Sources
from escrowmq.overview.values import (
    BrokerStands,
    Cause,
    DatabaseStands,
    GroupStands,
    ProducersStand,
    ReaderStands,
    Status,
    TopicStands,
)
from escrowmq.overview.waits.brokers import LAG_SECONDS, find_broker_causes

if TYPE_CHECKING:
    import sqlalchemy as sa

RATE_SECONDS = 60.0
"""Period of topic rates, in seconds before now, if there is no earlier status."""
MOST_RATED = 200
"""Number of topics whose rates are measured if there is no earlier status; other topics get none."""


def waiting(bus: Bus, engines: Sequence[sa.Engine] = (), *, lag_seconds: float = LAG_SECONDS) -> Listing[Cause]:
    """Return pending work, grouped by its cause.

    Causes that need an operator come first, among them problems of brokers and databases, then the largest. A consumer
    group lags if its oldest message waits longer than ``lag_seconds``. ``missing`` names the brokers and databases that
    did not answer; their pending work is not included.
    """
    sources = Sources(bus, engines)
    causes = find_causes(sources, sources.now_us(), lag_seconds)
    return Listing(causes, sources.missing)


def find_causes(
    sources: Sources, now_us: int, lag_seconds: float, stands: list[DatabaseStands] | None = None
) -> list[Cause]:
    """Return all causes in order. If ``stands`` is given, append the state of each outbox to it."""
    causes = [*find_broker_causes(sources, now_us, lag_seconds)]
    if sources.engines:  # without databases, SQLAlchemy may be missing
        from escrowmq.overview.waits.databases import find_database_causes

        causes += find_database_causes(sources, stands)
    for one in sources.missing:
        if one["broker"] not in sources.addresses:
            text = f"Database {one['broker']} cannot be read: {one['reason']}."
            where = one["broker"]
            causes.append(Cause("database", where, one["reason"], 1, "database", None, True, text, where))
    return sorted(causes, key=lambda cause: (not cause.needs_person, _FIRST.get(cause.kind, len(_FIRST)), -cause.count))


_FIRST = {"broker": 0, "database": 1, "disk": 2, "damaged": 3}
"""Kinds that may be the cause of all others."""


def status(
    bus: Bus, engines: Sequence[sa.Engine] = (), *, before: Status | None = None, lag_seconds: float = LAG_SECONDS
) -> Status:
    """Return the state of everything.

    ``before`` is an earlier status of the same brokers; rates are then those since it. Brokers and databases that did
    not answer are named in ``missing``, and their numbers are left out.
    """
    sources = Sources(bus, engines)
    now_us = sources.now_us()
    found = sources.request_all(lambda admin: admin.standing())
    databases: list[DatabaseStands] = []
    causes = find_causes(sources, now_us, lag_seconds, databases)
    brokers, counted = _describe_brokers(sources, before, now_us)
    listed = [topic for stands in found for topic in stands["topics"]]
    ends = _sum_by(listed, "topic", "end")
    return Status(
        now_us=now_us,
        brokers=tuple(brokers),
        topics=tuple(_describe_topics(sources, _sum_by(listed, "topic", "stored"), ends, before, now_us)),
        groups=tuple(_sum_groups(found)),
        producers=tuple(_sum_producers(found)),
        databases=tuple(databases),
        waiting=tuple(causes),
        missing=sources.missing,
        readers=tuple(sum_readers(found)),
        counted={"topics": dict(ends), **counted},
    )


def _describe_brokers(
    sources: Sources, before: Status | None, now_us: int
) -> tuple[list[BrokerStands], dict[str, dict[str, float]]]:
    health = sources.request_all(lambda admin: admin.health(), anew=True)
    hellos = {one["broker"]: one for one in sources.request_all(lambda admin: admin.hello())}
    stats: dict[Any, Mapping[str, Any]] = {
        one["broker"]: one for one in sources.request_all(lambda admin: admin.stats())
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
                rights=hello.get("rights") if hello else None,
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


def _sum_by(rows: Sequence[Mapping[str, Any]], key: str, name: str) -> Counter[str]:
    """Return the sum of a number over the rows with the same key."""
    sums: Counter[str] = Counter()
    for row in rows:
        sums[row[key]] += row[name]
    return sums


def _describe_topics(
    sources: Sources, stored: Counter[str], ends: Counter[str], before: Status | None, now_us: int
) -> Iterator[TopicStands]:
    for number, name in enumerate(sorted(stored)):
        rate = None
        if before is not None:
            rate = _rate_since(before, "topics", name, ends[name], now_us)
        elif number < MOST_RATED:
            rate = _measure_recent_rate(sources, name, now_us)
        yield TopicStands(name, stored[name], rate)


def _measure_recent_rate(sources: Sources, topic: str, now_us: int) -> float | None:
    """Measure the messages per second of a topic over RATE_SECONDS, by the times when they became visible."""
    begin = datetime.fromtimestamp(now_us / 1e6 - RATE_SECONDS, UTC)
    rows = sources.request_all(lambda admin: admin.offsets(topic, time=begin))
    return sum(row["end"] - row["offset_at"] for row in rows) / RATE_SECONDS if rows else None


def _sum_groups(found: list[Any]) -> Iterator[GroupStands]:
    for (group, topic), rows in _grouped([one for stands in found for one in stands["consumers"]], "group", "topic"):
        sums = {name: sum(one[name] for one in rows) for name in ("lag", "leased", "retrying", "dead", "receiving")}
        flags = {name: any(one.get(name) for one in rows) for name in ("paused", "limited")}
        yield GroupStands(
            group=group, topic=topic, **sums, lag_seconds=max(one["lag_seconds"] for one in rows), **flags
        )


def sum_readers(found: Sequence[Any]) -> Iterator[ReaderStands]:
    """Return the streaming queries, over all brokers' answers to ``standing``."""
    listed = [one for stands in found for one in stands.get("readers", ())]
    for (reader, topic), rows in _grouped(listed, "reader", "topic"):
        lag, read_us = sum(one["lag"] for one in rows), max(one["read_us"] for one in rows)
        yield ReaderStands(reader=reader, topic=topic, lag=lag, read_us=read_us)


def _sum_producers(found: list[Any]) -> Iterator[ProducersStand]:
    for (group,), rows in _grouped([one for stands in found for one in stands["producers"]], "group"):
        sums = {name: sum(one[name] for one in rows) for name in ("open", "parked", "connected")}
        yield ProducersStand(group=group, **sums, oldest_seconds=max(one["oldest_seconds"] for one in rows))


def _grouped(rows: list[Mapping[str, Any]], *names: str) -> list[tuple[tuple[Any, ...], list[Mapping[str, Any]]]]:
    """Return the rows of each combination of these fields, in order."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return sorted(groups.items(), key=lambda group: group[0])
