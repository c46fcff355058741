"""Pending work at the brokers: brokers themselves, undecided transactions, dead letters, groups that lag."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from escrowmq.overview.sources import Sources
from escrowmq.overview.values import Cause
from escrowmq.overview.waits.grouping import MOST_GROUPS, MOST_SAMPLES, OTHERS
from escrowmq.overview.words import many, quote, since
from escrowmq.platform.times import duration, to_us
from escrowmq.wire.actions import dead_letters, producers, transactions

MOST_NAMES = 10_000
"""Maximum number of groups of one broker whose dead letters or undecided transactions are listed."""
LAG_SECONDS = 30.0
"""A consumer group lags if its oldest message waits longer than this, in seconds."""


def find_broker_causes(sources: Sources, now_us: int, lag_seconds: float = LAG_SECONDS) -> Iterator[Cause]:
    """Yield all causes at the brokers, those of the brokers themselves first."""
    yield from _find_unhealthy(sources)
    yield from _find_undecided(sources, now_us)
    yield from _find_dead_letters(sources, now_us)
    yield from _find_lagging(sources, now_us, lag_seconds)


def _find_unhealthy(sources: Sources) -> Iterator[Cause]:
    for one in sources.request_all(lambda admin: admin.health(), anew=True):
        broker, status, reason = one["broker"], one["status"], quote(one["reason"])
        kind, cause, count, unit = "disk", reason, 1, "broker"
        if status in ("unreachable", "stopped", "stopping"):
            kind, cause = "broker", status
            text = f"Broker {broker} does not work ({status}: {reason}); its messages wait for it."
        elif status == "full":
            text = f"Broker {broker} refuses messages: {reason}."
        elif status == "damaged":
            kind, count, unit = "damaged", _count_damaged_frames(sources, broker), "frame"
            text = f"The log of broker {broker} is damaged in places; the rest works: {reason}."
        else:
            continue
        yield Cause(kind, broker, cause, count, unit, None, True, text, broker)


def _count_damaged_frames(sources: Sources, broker: str) -> int:
    rows = sources.request_all(lambda admin: admin.stats())
    return next((int(row.get("log_damaged_frames", 1)) for row in rows if row["broker"] == broker), 1)


# Undecided transactions


_UNDECIDED = {
    "due": "a check is due",
    "unanswered": "checked, without an answer or with the answer UNKNOWN",
    "asked_out": "the last check was without a decision",
    "aged": "undecided for too long, or damaged, so that it cannot be checked",
}
"""Texts of the broker's causes. Transactions with any other cause are not due yet."""


def _find_undecided(sources: Sources, now_us: int) -> Iterator[Cause]:
    for broker in sources.addresses:
        connected: dict[str | None, int] = {}
        if (listed := sources.request_one(broker, producers.LIST({}))) is not None:
            connected = {one["group"]: one["members"] for one in listed["producers"]}
        summary = transactions.SUMMARY({"samples": MOST_SAMPLES})
        for group in sources.list_entries(broker, summary, "groups", MOST_NAMES):
            for waiting in group["causes"]:
                if waiting["cause"] in _UNDECIDED:
                    members = connected.get(group["group"], 0)
                    yield _make_undecided_cause(group["group"], waiting, members, broker, now_us)


def _make_undecided_cause(
    group: str | None, waiting: Mapping[str, Any], connected: int, broker: str, now_us: int
) -> Cause:
    name, count, parked = group or "(deleted)", waiting["count"], waiting["state"] == "parked"
    why = _UNDECIDED[waiting["cause"]]
    if not parked and not connected:
        why += "; no process of the group is connected"
    age = ("" if count == 1 else "the oldest ") + since(waiting["oldest_us"], now_us)
    verb = "waits" if count == 1 else "wait"
    text = f"{many(count, 'transaction')} of producer group {name} {verb} for a decision, {age}: {why}."
    samples = tuple({name: one[name] for name in ("id", "prepared_us", "checks")} for one in waiting["samples"])
    selection = {} if group is None else {"group": group, "state": waiting["state"], "cause": waiting["cause"]}
    acts = ("transactions.commit", "transactions.rollback", *(("transactions.recheck",) if parked else ()))
    return Cause(
        "parked" if parked else "undecided", name, why, count, "transaction", waiting["oldest_us"],
        parked or not connected, text, broker, samples, acts if selection else (), selection,
    )  # fmt: skip


# Consumer groups


def _find_dead_letters(sources: Sources, now_us: int) -> Iterator[Cause]:
    summary = dead_letters.SUMMARY({"causes": MOST_GROUPS, "samples": MOST_SAMPLES})
    for broker in sources.addresses:
        for group in sources.list_entries(broker, summary, "groups", MOST_NAMES):
            name = group["group"]
            for one in group["causes"]:
                yield _make_dead_cause(name, broker, one, now_us, {"group": name, "cause": one["cause"]})
            if (rest := group.get("others")) is not None:
                yield _make_dead_cause(name, broker, {**rest, "cause": f"{rest['causes']:,} {OTHERS}"}, now_us, {})


def _make_dead_cause(name: str, broker: str, one: Mapping[str, Any], now_us: int, selection: dict[str, Any]) -> Cause:
    count, cause, oldest_us = one["count"], one["cause"], one["oldest_us"]
    samples = tuple({"place": f"{s['topic']}/{s['queue']}/{s['offset']}", **s} for s in one.get("samples", ()))
    age = f", {'' if count == 1 else 'the oldest '}{since(oldest_us, now_us)}" if oldest_us is not None else ""
    text = f"{many(count, 'dead letter')} of consumer group {name}{age}: {quote(cause)}."
    acts = ("dead_letters.retry", "dead_letters.discard") if selection else ()
    return Cause("dead", name, cause, count, "dead letter", oldest_us, True, text, broker, samples, acts, selection)


def _find_lagging(sources: Sources, now_us: int, lag_seconds: float) -> Iterator[Cause]:
    for stands in sources.request_all(lambda admin: admin.standing()):
        for one in stands["consumers"]:
            if one["lag"] and one["lag_seconds"] > lag_seconds:
                yield _make_lag_cause(one, stands["broker"], now_us)


def _make_lag_cause(one: Mapping[str, Any], broker: str, now_us: int) -> Cause:
    name, lag, leased, retrying = one["group"], one["lag"], one["leased"], one["retrying"]
    waiting = lag - leased - retrying
    person = False
    if one.get("paused"):
        why, person = "the group is paused", True
    elif not leased and not one["receiving"]:
        why, person = "there is no consumer: none requests messages, and none holds any", True
    elif leased and not waiting and not retrying:
        why = f"its consumers hold {'it' if leased == 1 else f'all {leased:,} of them'} without a result yet"
    elif retrying and not waiting:
        why = f"{many(retrying, 'message')} failed and {'is' if retrying == 1 else 'are'} delivered again"
    else:
        counts = f"{many(leased, 'message')} leased, {waiting:,} waiting, {retrying:,} to deliver again"
        why = f"its consumers are behind{', and the group has limits' if one.get('limited') else ''}: {counts}"
    seconds = one["lag_seconds"]
    age = duration(float(int(seconds)) if seconds >= 1 else seconds)
    text = f"Consumer group {name} lags {many(lag, 'message')} and {age} behind in {one['topic']}: {why}."
    sample = {name: one[name] for name in ("topic", "lag", "lag_seconds", "leased", "retrying")}
    cause, since_us = why.partition(":")[0], now_us - to_us(seconds)
    return Cause("lagging", name, cause, lag, "message", since_us, person, text, broker, (sample,))
