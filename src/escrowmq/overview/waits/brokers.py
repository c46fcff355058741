"""Pending work at the brokers: brokers themselves, undecided transactions, dead letters, groups that lag."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from escrowmq.overview.asking import Asking
from escrowmq.overview.values import Cause
from escrowmq.overview.waits.grouping import MOST_GROUPS, MOST_SAMPLES, OTHERS, Alike
from escrowmq.overview.words import many, quoted, since
from escrowmq.platform.times import duration, to_us
from escrowmq.wire.actions import dead_letters, producers, transactions

MOST_NAMES = 10_000
"""Maximum number of groups of one broker whose dead letters or undecided transactions are listed."""
LAG_SECONDS = 30.0
"""A consumer group lags if its oldest message waits longer than this, in seconds."""


def find_broker_causes(asking: Asking, now_us: int, lag_seconds: float = LAG_SECONDS) -> Iterator[Cause]:
    """Yield all causes at the brokers, those of the brokers themselves first."""
    yield from _find_unhealthy(asking)
    yield from _find_undecided(asking, now_us)
    yield from _find_dead_letters(asking, now_us)
    yield from _find_lagging(asking, now_us, lag_seconds)


def _find_unhealthy(asking: Asking) -> Iterator[Cause]:
    for one in asking.ask_all(lambda admin: admin.health(), anew=True):
        broker, status, reason = one["broker"], one["status"], one["reason"]
        if status in ("unreachable", "stopped", "stopping"):
            text = f"Broker {broker} does not work ({status}: {quoted(reason)}); what it has waits for it."
            yield Cause("broker", broker, status, 1, "broker", None, True, text, broker)
        elif status == "full":
            text = f"Broker {broker} refuses messages: {quoted(reason)}."
            yield Cause("disk", broker, quoted(reason), 1, "broker", None, True, text, broker)
        elif status == "damaged":
            text = f"The log of broker {broker} is damaged in places, and the rest goes on: {quoted(reason)}."
            yield Cause(
                "damaged",
                broker,
                quoted(reason),
                _count_damaged_frames(asking, broker),
                "frame",
                None,
                True,
                text,
                broker,
            )


def _count_damaged_frames(asking: Asking, broker: str) -> int:
    rows = asking.ask_all(lambda admin: admin.stats())
    return next((int(row.get("log_damaged_frames", 1)) for row in rows if row["broker"] == broker), 1)


# Undecided transactions


_UNDECIDED = {
    "due": "a question about them is due",
    "unanswered": "asked, and nobody answered, or the answer was UNKNOWN",
    "asked_out": "asked as often as the rules of the group say",
    "aged": "undecided for too long, or damaged, so that nobody can be asked",
}
"""Texts of the broker's causes. Transactions with any other cause are not due yet."""


def _find_undecided(asking: Asking, now_us: int) -> Iterator[Cause]:
    for broker in asking.addresses:
        connected: dict[str | None, int] = {}
        if (listed := asking.ask_one(broker, producers.LIST({}))) is not None:
            connected = {one["group"]: one["members"] for one in listed["producers"]}
        summary = transactions.SUMMARY({"samples": MOST_SAMPLES})
        for group in asking.list_entries(broker, summary, "groups", MOST_NAMES):
            for waiting in group["causes"]:
                if waiting["cause"] in _UNDECIDED:
                    yield _make_undecided_cause(
                        group["group"], waiting, connected.get(group["group"], 0), broker, now_us
                    )


def _make_undecided_cause(
    group: str | None, waiting: Mapping[str, Any], connected: int, broker: str, now_us: int
) -> Cause:
    name, count, parked = group or "(forgotten)", waiting["count"], waiting["state"] == "parked"
    why = _UNDECIDED[waiting["cause"]]
    if not parked and not connected:
        why += "; nobody of the group is connected to be asked"
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


def _find_dead_letters(asking: Asking, now_us: int) -> Iterator[Cause]:
    summary = dead_letters.SUMMARY({"causes": MOST_GROUPS, "samples": MOST_SAMPLES})
    for broker in asking.addresses:
        for group in asking.list_entries(broker, summary, "groups", MOST_NAMES):
            name = group["group"]
            for one in group["causes"]:
                samples = [{"place": _format_place(sample), **sample} for sample in one["samples"]]
                alike = Alike(one["count"], one["oldest_us"], [*samples])
                yield _make_dead_cause(
                    name, broker, one["cause"], alike, now_us, {"group": name, "cause": one["cause"]}
                )
            if "others" in group:
                rest = Alike(group["others"]["count"], group["others"]["oldest_us"])
                yield _make_dead_cause(name, broker, f"{group['others']['causes']:,} {OTHERS}", rest, now_us, {})


def _format_place(sample: Mapping[str, Any]) -> str:
    return f"{sample['topic']}/{sample['queue']}/{sample['offset']}"


def _make_dead_cause(name: str, broker: str, cause: str, alike: Alike, now_us: int, selection: dict[str, Any]) -> Cause:
    oldest = "" if alike.count == 1 else "the oldest "
    age = f", {oldest}{since(alike.oldest_us, now_us)}" if alike.oldest_us is not None else ""
    text = f"{many(alike.count, 'dead letter')} of consumer group {name}{age}: {quoted(cause)}."
    acts = ("dead_letters.retry", "dead_letters.discard") if selection else ()
    return Cause(
        "dead", name, cause, alike.count, "dead letter", alike.oldest_us, True, text, broker, tuple(alike.samples),
        acts, selection,
    )  # fmt: skip


def _find_lagging(asking: Asking, now_us: int, lag_seconds: float) -> Iterator[Cause]:
    for stands in asking.ask_all(lambda admin: admin.standing()):
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
        why, person = "nobody consumes: no consumer asks for messages, and none holds any", True
    elif leased and not waiting and not retrying:
        why = (
            f"its consumers hold {'it' if leased == 1 else f'all {leased:,} of them'}, and have not settled "
            f"{'it' if leased == 1 else 'them'}"
        )
    elif retrying and not waiting:
        why = f"{many(retrying, 'message')} failed and {'comes' if retrying == 1 else 'come'} again"
    else:
        why = (
            f"its consumers are behind: {many(leased, 'message')} in their hands, {waiting:,} in line, {retrying:,} "
            "to come again"
        )
    seconds = one["lag_seconds"]
    age = duration(float(int(seconds)) if seconds >= 1 else seconds)
    text = f"Consumer group {name} lags {many(lag, 'message')} and {age} behind in {one['topic']}: {why}."
    since_us = now_us - to_us(seconds)
    cause = why.partition(":")[0]
    sample = {"topic": one["topic"], "lag": lag, "lag_seconds": seconds, "leased": leased, "retrying": retrying}
    return Cause("lagging", name, cause, lag, "message", since_us, person, text, broker, (sample,))
