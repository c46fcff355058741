"""Why a message waits, in one sentence: of all that is true of it, what keeps it longest comes first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from escrowmq.model import FOREVER
from escrowmq.overview.stories.brokers import AtBroker
from escrowmq.overview.values import Offer
from escrowmq.overview.words import at, many, quoted, since


class Rank(IntEnum):
    """What must happen before it goes on; the first of all that is true is told."""

    PERSON = 0
    """A person decides."""
    SOMEBODY = 1
    """Somebody must come back: a producer, a consumer, a relay."""
    TIME = 2
    """It goes on by itself at a time."""
    HANDS = 3
    """It is in somebody's hands now."""
    LINE = 4
    """It stands in line behind others."""
    DONE = 9
    """Nothing is to come."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why it waits at one place, or that it does not."""

    rank: Rank
    state: str
    sentence: str
    offers: tuple[Offer, ...] = ()


def the_reason(reasons: Sequence[Reason]) -> Reason:
    """What is told first; it says how many others there are."""
    if not reasons:
        return Reason(Rank.DONE, "unknown", "Nothing is known that it could wait for.")
    ordered = sorted(reasons, key=lambda reason: reason.rank)
    first = ordered[0]
    others = sum(reason.rank < Rank.DONE for reason in ordered[1:])
    more = f" It waits at {many(others, 'more place')} besides." if others and first.rank < Rank.DONE else ""
    offers = tuple(offer for reason in ordered for offer in reason.offers)
    return Reason(first.rank, first.state, first.sentence + more, offers)


# At a broker


def at_broker(of: AtBroker, now_us: int) -> Iterator[Reason]:
    """Why it waits at its broker."""
    message = of.message
    state = message["state"]
    if state == "parked":
        yield _parked(of, now_us)
    elif state == "open":
        yield _open(of, now_us)
    elif state in ("rolled_back", "expired"):
        word = "rolled back" if state == "rolled_back" else "given up, as it stayed undecided for too long"
        yield Reason(Rank.DONE, state, f"It does not wait: its transaction was {word}, and no consumer will see it.")
    elif not message["visible"] and state != "edited":
        yield _not_visible(of, now_us)
    elif of.stands is None:
        visible = "It is visible" if message["visible"] else "One consumer group gets it in place of a dead letter"
        yield Reason(Rank.DONE, state, f"{visible}; where it stands for consumer groups is not known.")
    else:
        yield from _at_groups(of, of.stands, now_us)


def _ids(of: AtBroker) -> dict[str, Any]:
    return {"ids": [of.message["transaction"]]}


def _parked(of: AtBroker, now_us: int) -> Reason:
    shown = of.transaction or {}
    asked = many(shown.get("checks", 0), "question")
    group = shown.get("group") or "its producer group, which is forgotten,"
    text = (
        f"It is parked: {group} did not decide it after {asked}, so a person decides (commit, roll back, or ask again)."
    )
    if not shown.get("checks", 0):
        text = f"It is parked, and {group} was never asked with an answer: nobody who could be asked was connected, or the log is damaged under it. A person decides."
    offers = tuple(Offer(f"transactions.{act}", _ids(of)) for act in ("commit", "rollback", "recheck"))
    return Reason(Rank.PERSON, "parked", text, offers)


def _open(of: AtBroker, now_us: int) -> Reason:
    shown, producers = of.transaction, of.producers
    if shown is None:
        return Reason(Rank.HANDS, "open", "Its transaction is undecided; more is not known.")
    group, checks, due_us = shown["group"] or "(forgotten)", shown["checks"], shown.get("due_us", 0)
    undecided = f"It has been undecided {since(shown['prepared_us'], now_us)}"
    offers = (Offer("transactions.commit", _ids(of)), Offer("transactions.rollback", _ids(of)))
    if producers is None:
        return Reason(
            Rank.SOMEBODY, "open", f"{undecided}, and its producer group {group} is not known any more.", offers
        )
    most, asked = producers["check_max"], f"asked {many(checks, 'time')} of {producers['check_max']}"
    if due_us > now_us and not checks:
        return Reason(
            Rank.HANDS,
            "open",
            f"{undecided}: its producer is to decide it, and its group {group} is asked {at(due_us, now_us)} if it does not.",
            offers,
        )
    if not producers["members"]:
        text = f"{undecided}, and its producer group {group} has nobody connected who could be asked ({asked})."
        return Reason(Rank.SOMEBODY, "open", text, offers)
    last = "nobody answered, or the answer was UNKNOWN"
    if shown.get("unknown_us"):
        last = f"UNKNOWN was answered {at(shown['unknown_us'], now_us)}"
    whom = f", session {shown['asked_session']}, and has not answered yet" if shown.get("asked_session") else ""
    if due_us > now_us and whom:
        return Reason(
            Rank.HANDS, "asked", f"{undecided}, and its producer group {group} is being asked{whom} ({asked}).", offers
        )
    if due_us > now_us:
        follows = f"it is asked again {at(due_us, now_us)}" if checks < most else f"it is parked {at(due_us, now_us)}"
        if checks >= most and producers["checks_exhausted"] == "rollback":
            follows = f"it is rolled back {at(due_us, now_us)}"
        return Reason(
            Rank.TIME,
            "open",
            f"{undecided}: its producer group {group} was {asked} and did not decide ({last}); {follows}.",
            offers,
        )
    return Reason(
        Rank.HANDS, "open", f"{undecided}, and its producer group {group} is being asked{whom} ({asked}).", offers
    )


def _not_visible(of: AtBroker, now_us: int) -> Reason:
    message = of.message
    if message["visible_us"] > now_us:
        text = f"It is delayed: consumers can get it {at(message['visible_us'], now_us)}."
        return Reason(Rank.TIME, "delayed", text)
    if message["damaged"]:
        return Reason(Rank.PERSON, "damaged", f"The log is damaged under it: {quoted(message['damaged'])}.")
    text = "It does not wait: it has left its queue by retention, and who had consumed it is not known any more."
    return Reason(Rank.DONE, "gone", text)


# At consumer groups


def _at_groups(of: AtBroker, stands: Mapping[str, Any], now_us: int) -> Iterator[Reason]:
    groups = [one for one in stands["groups"] if one["subscribed"] or one["state"] != "waiting"]
    if not groups:
        topic = of.message["topic"]
        yield Reason(Rank.DONE, "visible", f"It does not wait: no consumer group consumes topic {topic}.")
        return
    done = [one for one in groups if one["state"] in _OVER]
    for one in groups:
        if one["state"] not in _OVER:
            yield _in_group(of, one, stands.get("events", []), now_us)
    if done:
        said = ", ".join(f"{one['group']} {_OVER[one['state']]}" for one in done[:5])
        more = f", and {many(len(done) - 5, 'more group')}" if len(done) > 5 else ""
        state = "acked" if any(one["state"] == "acked" for one in done) else done[0]["state"]
        yield Reason(Rank.DONE, state, f"It does not wait: {said}{more}.")


_OVER = {
    "acked": "has acknowledged it",
    "filtered": "passed it over, because of its tag",
    "discarded": "had it as a dead letter, and a person discarded it",
    "expired": "lost it to retention before it was consumed",
    "skipped": "began behind it",
    "gone": "is done with it, and how is not known any more",
}


def _in_group(of: AtBroker, one: Mapping[str, Any], events: Sequence[Mapping[str, Any]], now_us: int) -> Reason:
    state, group = one["state"], one["group"]
    if state == "dead":
        attempts = many(one["attempt"], "attempt")
        text = f"Group {group} gave it up {at(one['dead_us'], now_us)} after {attempts} ({quoted(one['cause'])}); a person decides whether it is delivered again."
        selection = {"group": group, "items": [_item(of, one)]}
        return Reason(
            Rank.PERSON,
            "dead",
            text,
            (Offer("dead_letters.retry", selection), Offer("dead_letters.discard", selection)),
        )
    if state == "leased":
        return _leased(one, now_us)
    if one.get("paused"):
        return Reason(
            Rank.PERSON, "paused", f"Group {group} is paused: nothing is delivered to it until a person resumes it."
        )
    if state == "retrying":
        return _retrying(one, events, now_us)
    if not one.get("chosen", True):
        return Reason(Rank.DONE, "filtered", f"It does not wait: group {group} will pass it over, because of its tag.")
    ahead = (
        f"{many(one['before'], 'message')} of its queue come first"
        if one["before"] != 1
        else "1 message of its queue comes first"
    )
    if not one["receiving"] and not one.get("leases", 0):
        before = f" ({ahead})" if one["before"] else ""
        return Reason(
            Rank.SOMEBODY,
            "waiting",
            f"Group {group} has not been given it yet, and no consumer of it asks for messages now{before}.",
        )
    return Reason(
        Rank.LINE,
        "waiting",
        f"Group {group} has not been given it yet: {ahead if one['before'] else 'it is the next of its queue'}.",
    )


def _item(of: AtBroker, one: Mapping[str, Any]) -> dict[str, Any]:
    message = of.message
    place = {"topic": message["topic"], "queue": message["queue"], "offset": message["offset"], "broker": of.broker}
    return place | {"dead_us": one["dead_us"], "attempts": one["attempt"]}


def _leased(one: Mapping[str, Any], now_us: int) -> Reason:
    group, holder = one["group"], f"instance {one['instance']}" if one.get("instance") else f"member {one['member']}"
    had = f" {since(one['leased_us'], now_us)}" if one.get("leased_us") else ""
    if one.get("in_doubt"):
        text = f"Group {group} handed it to {holder}, whose process may have died with it: it waits until {holder} comes back, or a person shuts it out."
        return Reason(Rank.SOMEBODY, "in_doubt", text)
    attempt = f"attempt {one['attempt']}" + (f" of {one['max_attempts']}" if one["max_attempts"] < FOREVER else "")
    ends = (
        "its lease does not end by time"
        if one["deadline_us"] is None
        else f"its lease ends {at(one['deadline_us'], now_us)}"
    )
    return Reason(
        Rank.HANDS,
        "leased",
        f"Group {group} is at it: {holder} has had it{had} ({attempt}), and {ends}.",
    )


def _retrying(one: Mapping[str, Any], events: Sequence[Mapping[str, Any]], now_us: int) -> Reason:
    group, due_us = one["group"], one["due_us"]
    failures = [event for event in events if event["group"] == group and event["event"] == "failed"]
    failed = max(one["attempt"] - 1, 0)
    times = f"has failed it {many(failed, 'time')}" if failed else "is to be given it"
    last = ""
    if failures:
        how = "its lease ended without an answer" if failures[-1].get("expired") else "its consumer gave it back"
        last = f" (last {at(failures[-1]['time_us'], now_us)}: {how}; why is stored only of dead letters)"
    if "behind" in one:
        return Reason(
            Rank.LINE,
            "behind",
            f"Group {group} keeps the order of each key: it waits behind offset {one['behind']} of its key, which has failed.",
        )
    if due_us > now_us:
        return Reason(
            Rank.TIME, "retrying", f"Group {group} {times}{last}; it is delivered again {at(due_us, now_us)}."
        )
    if not one["receiving"]:
        return Reason(
            Rank.SOMEBODY,
            "retrying",
            f"Group {group} {times}{last}; it may be delivered again, and no consumer of it asks for messages now.",
        )
    return Reason(
        Rank.LINE, "retrying", f"Group {group} {times}{last}; it is delivered again as soon as its turn comes."
    )


# In a database
