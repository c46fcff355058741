"""What waits at the brokers: brokers themselves, undecided transactions, dead letters, groups that lag."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from escrowmq.overview.asking import Asking
from escrowmq.overview.values import Cause
from escrowmq.overview.waits.grouping import OTHERS, Alike, Grouped, masked
from escrowmq.overview.words import many, quoted, since
from escrowmq.platform.times import duration
from escrowmq.wire.actions import dead_letters, transactions

LISTED = 2_000
"""Things of one group and broker that are looked at one by one."""
LAG_SECONDS = 30.0
"""A consumer group lags if its oldest message waits for longer."""


def at_brokers(asking: Asking, now_us: int, lag_seconds: float = LAG_SECONDS) -> Iterator[Cause]:
    """Every cause, brokers first."""
    yield from _brokers(asking)
    yield from _undecided(asking, now_us)
    yield from _dead(asking, now_us)
    yield from _lagging(asking, now_us, lag_seconds)


def _brokers(asking: Asking) -> Iterator[Cause]:
    for one in asking.all(lambda admin: admin.health(), anew=True):
        broker, status, reason = one["broker"], one["status"], one["reason"]
        if status in ("unreachable", "stopped", "stopping"):
            text = f"Broker {broker} does not work ({status}: {quoted(reason)}); what it has waits for it."
            yield Cause("broker", broker, status, 1, "broker", None, True, text, broker)
        elif status == "full":
            text = f"Broker {broker} refuses messages: {quoted(reason)}."
            yield Cause("disk", broker, quoted(reason), 1, "broker", None, True, text, broker)
        elif status == "damaged":
            text = f"The log of broker {broker} is damaged in places, and the rest goes on: {quoted(reason)}."
            yield Cause("damaged", broker, quoted(reason), _damaged(asking, broker), "frame", None, True, text, broker)


def _damaged(asking: Asking, broker: str) -> int:
    rows = asking.all(lambda admin: admin.stats())
    return next((int(row.get("log_damaged_frames", 1)) for row in rows if row["broker"] == broker), 1)


# Undecided transactions


def _undecided(asking: Asking, now_us: int) -> Iterator[Cause]:
    for group in asking.all(lambda admin: admin.producers()):
        if group["parked"]:
            yield from _parked(asking, group, now_us)
        if group["open"] and group["oldest_us"] is not None:
            yield from _open(asking, group, now_us)


def _parked(asking: Asking, group: Mapping[str, Any], now_us: int) -> Iterator[Cause]:
    name, broker, total = group["group"], group["broker"], group["parked"]
    listed = _of_broker(asking, broker, "parked", name, None)
    alike: dict[str, Alike] = {}
    for one in listed:
        why = (
            "asked as often as its rules say"
            if one["checks"]
            else "never asked: nobody was connected, or the log is damaged under it"
        )
        alike.setdefault(why, Alike()).add(
            one["prepared_us"], {"id": one["id"], "prepared_us": one["prepared_us"], "checks": one["checks"]}
        )
    if len(listed) < total and alike:  # of the others it is not known which
        max(alike.values(), key=lambda one: one.count).count += total - len(listed)
    for why, one in alike.items():
        text = f"{many(one.count, 'transaction')} of producer group {name} {'waits' if one.count == 1 else 'wait'} for a decision by a person: {why}."
        yield Cause(
            "parked", name, why, one.count, "transaction", one.oldest_us, True, text, broker, tuple(one.samples),
            ("transactions.commit", "transactions.rollback", "transactions.recheck"), {"group": name, "state": "parked"},
        )  # fmt: skip


def _open(asking: Asking, group: Mapping[str, Any], now_us: int) -> Iterator[Cause]:
    name, broker, timeout = group["group"], group["broker"], group["transaction_timeout"]
    if now_us - group["oldest_us"] < timeout * 1e6:
        return
    listed = _of_broker(asking, broker, "open", name, timeout)
    if not listed:
        return
    alike = Alike()
    for one in listed:
        alike.add(one["prepared_us"], {"id": one["id"], "prepared_us": one["prepared_us"], "checks": one["checks"]})
    alone = not group["members"]
    why = (
        "nobody of the group is connected to be asked"
        if alone
        else "asked, and nobody answered, or the answer was UNKNOWN"
    )
    text = f"{many(alike.count, 'transaction')} of producer group {name} undecided {since(alike.oldest_us or now_us, now_us)}: {why}."
    yield Cause(
        "undecided", name, why, alike.count, "transaction", alike.oldest_us, alone, text, broker, tuple(alike.samples),
        ("transactions.commit", "transactions.rollback"),
        {"group": name, "state": "open", "older_than": timeout}, len(listed) >= LISTED,
    )  # fmt: skip


def _of_broker(asking: Asking, broker: str, state: str, group: str, older_than: float | None) -> list[Any]:
    request: transactions.List = {"state": state, "group": group}
    if older_than is not None:
        request["older_than"] = older_than
    return asking.listed(broker, transactions.LIST(request), "transactions", LISTED)


# Consumer groups


def _dead(asking: Asking, now_us: int) -> Iterator[Cause]:
    for group in asking.all(lambda admin: admin.groups()):
        if not group["dead_letters"]:
            continue
        name, broker = group["name"], group["broker"]
        listed = asking.listed(broker, dead_letters.LIST({"group": name}), "dead_letters", LISTED)
        alike: Grouped[str] = Grouped(lambda _: OTHERS)
        for one in listed:
            place = f"{one['topic']}/{one['queue']}/{one['offset']}"
            sample = {
                "place": place,
                "message_id": one["message_id"],
                "key": one["key"],
                "cause": one["cause"],
                "dead_us": one["dead_us"],
            }
            alike.of(masked(one["cause"])).add(one["dead_us"], sample)
        rest = group["dead_letters"] - len(listed)
        for cause, group_of in alike.items():
            yield _dead_cause(name, broker, cause, group_of, now_us)
        if rest > 0:
            yield _dead_cause(name, broker, "not looked at one by one", Alike(rest), now_us)


def _dead_cause(name: str, broker: str, cause: str, alike: Alike, now_us: int) -> Cause:
    age = f", the oldest {since(alike.oldest_us, now_us)}" if alike.oldest_us is not None else ""
    text = f"{many(alike.count, 'dead letter')} of consumer group {name}{age}: {cause}."
    return Cause(
        "dead", name, cause, alike.count, "dead letter", alike.oldest_us, True, text, broker, tuple(alike.samples),
        ("dead_letters.retry", "dead_letters.discard"), {"group": name, "cause": cause},
    )  # fmt: skip


def _lagging(asking: Asking, now_us: int, lag_seconds: float) -> Iterator[Cause]:
    for stands in asking.all(lambda admin: admin.standing()):
        for one in stands["consumers"]:
            if one["lag"] and one["lag_seconds"] > lag_seconds:
                yield _lag_cause(one, stands["broker"], now_us)


def _lag_cause(one: Mapping[str, Any], broker: str, now_us: int) -> Cause:
    name, lag, leased, retrying = one["group"], one["lag"], one["leased"], one["retrying"]
    waiting = lag - leased - retrying
    person = False
    if one.get("paused"):
        why, person = "the group is paused", True
    elif not leased and not one["receiving"]:
        why, person = "nobody consumes: no consumer asks for messages, and none holds any", True
    elif leased and not waiting and not retrying:
        why = f"its consumers hold {'it' if leased == 1 else f'all {leased:,} of them'}, and have not settled {'it' if leased == 1 else 'them'}"
    elif retrying and not waiting:
        why = f"{many(retrying, 'message')} failed and {'comes' if retrying == 1 else 'come'} again"
    else:
        why = f"its consumers are behind: {many(leased, 'message')} in their hands, {waiting:,} in line, {retrying:,} to come again"
    seconds = one["lag_seconds"]
    age = duration(float(int(seconds)) if seconds >= 1 else seconds)
    text = f"Consumer group {name} lags {many(lag, 'message')} and {age} behind in {one['topic']}: {why}."
    since_us = now_us - round(seconds * 1e6)
    cause = why.partition(":")[0]
    sample = {"topic": one["topic"], "lag": lag, "lag_seconds": seconds, "leased": leased, "retrying": retrying}
    return Cause("lagging", name, cause, lag, "message", since_us, person, text, broker, (sample,))
