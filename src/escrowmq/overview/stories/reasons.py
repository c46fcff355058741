"""Reasons why a message waits, one sentence each. A table holds the sentences; the functions below it choose one for
each place.

If a message waits at several places, the reason that needs an operator comes first (see :class:`Rank`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

from escrowmq.model import FOREVER
from escrowmq.overview.stories.brokers import AtBroker
from escrowmq.overview.values import Offer
from escrowmq.overview.words import at, many, quoted, since


class Rank(IntEnum):
    """What a waiting message needs in order to continue. The lowest value is reported first."""

    PERSON = 0
    """A decision of an operator."""
    SOMEBODY = 1
    """A producer, a consumer or a relay that connects."""
    TIME = 2
    """Nothing but time."""
    HANDS = 3
    """Nothing: a process is working on it."""
    LINE = 4
    """Nothing: other messages are ahead of it."""
    DONE = 9
    """The message does not wait."""


@dataclass(frozen=True, slots=True)
class Reason:
    """The reason why a message waits at one place, or does not wait there."""

    rank: Rank
    state: str
    sentence: str
    offers: tuple[Offer, ...] = ()


class Sentence(NamedTuple):
    """One row of a table of reasons; ``text`` has the fields of :meth:`str.format`."""

    rank: Rank
    state: str
    text: str

    def fill(self, offers: tuple[Offer, ...] = (), **facts: object) -> Reason:
        """Return the reason with ``facts`` as the fields of the sentence."""
        return Reason(self.rank, self.state, self.text.format(**facts), offers)


_UNDECIDED = "It has been undecided {since}"
_GROUP = "Group {group}"
_FAILED = _GROUP + " {times}{last}; "

SENTENCES = {
    "unknown": Sentence(Rank.DONE, "unknown", "Nothing is known that it could wait for."),
    # Its transaction, at the broker
    "parked": Sentence(
        Rank.PERSON,
        "parked",
        "It is parked: {group} did not decide it after {checks}, "
        "so a person decides (commit, roll back, or ask again).",
    ),
    "parked unasked": Sentence(
        Rank.PERSON,
        "parked",
        "It is parked, and {group} was never asked with an answer: nobody who could be asked was connected, "
        "or the log is damaged under it. A person decides.",
    ),
    "open": Sentence(Rank.HANDS, "open", "Its transaction is undecided; more is not known."),
    "no producer group": Sentence(
        Rank.SOMEBODY, "open", _UNDECIDED + ", and its producer group {group} is not known any more."
    ),
    "deciding": Sentence(
        Rank.HANDS,
        "open",
        _UNDECIDED + ": its producer is to decide it, and its group {group} is asked {due} if it does not.",
    ),
    "no producer": Sentence(
        Rank.SOMEBODY,
        "open",
        _UNDECIDED + ", and its producer group {group} has nobody connected who could be asked ({asked}).",
    ),
    "asked": Sentence(
        Rank.HANDS,
        "asked",
        _UNDECIDED + ", and its producer group {group} is being asked, session {session}, "
        "and has not answered yet ({asked}).",
    ),
    "unanswered": Sentence(
        Rank.TIME, "open", _UNDECIDED + ": its producer group {group} was {asked} and did not decide ({last}); {next}."
    ),
    "being asked": Sentence(
        Rank.HANDS, "open", _UNDECIDED + ", and its producer group {group} is being asked{session} ({asked})."
    ),
    "rolled_back": Sentence(
        Rank.DONE,
        "rolled_back",
        "It does not wait: its transaction was rolled back, and no consumer will see it.",
    ),
    "expired": Sentence(
        Rank.DONE,
        "expired",
        "It does not wait: its transaction was given up, as it stayed undecided for too long, "
        "and no consumer will see it.",
    ),
    # Its queue
    "delayed": Sentence(Rank.TIME, "delayed", "It is delayed: consumers can get it {visible}."),
    "damaged": Sentence(Rank.PERSON, "damaged", "The log is damaged under it: {cause}."),
    "gone": Sentence(
        Rank.DONE,
        "gone",
        "It does not wait: it has left its queue by retention, and who had consumed it is not known any more.",
    ),
    "no consumer group": Sentence(Rank.DONE, "visible", "It does not wait: no consumer group consumes topic {topic}."),
    # A consumer group
    "dead": Sentence(
        Rank.PERSON,
        "dead",
        _GROUP + " gave it up {dead} after {attempts} ({cause}); a person decides whether it is delivered again.",
    ),
    "paused": Sentence(
        Rank.PERSON, "paused", _GROUP + " is paused: nothing is delivered to it until a person resumes it."
    ),
    "filtered": Sentence(
        Rank.DONE, "filtered", "It does not wait: group {group} will pass it over, because of its tag."
    ),
    "no consumer": Sentence(
        Rank.SOMEBODY,
        "waiting",
        _GROUP + " has not been given it yet, and no consumer of it asks for messages now{before}.",
    ),
    "in line": Sentence(Rank.LINE, "waiting", _GROUP + " has not been given it yet: {before}."),
    "in doubt": Sentence(
        Rank.SOMEBODY,
        "in_doubt",
        _GROUP + " handed it to {holder}, whose process may have died with it: "
        "it waits until {holder} comes back, or a person shuts it out.",
    ),
    "leased": Sentence(
        Rank.HANDS, "leased", _GROUP + " is at it: {holder} has had it{since} ({attempt}), and {lease}."
    ),
    "behind": Sentence(
        Rank.LINE,
        "behind",
        _GROUP + " keeps the order of each key: it waits behind offset {offset} of its key, which has failed.",
    ),
    "retry due": Sentence(Rank.TIME, "retrying", _FAILED + "it is delivered again {due}."),
    "retry without consumer": Sentence(
        Rank.SOMEBODY, "retrying", _FAILED + "it may be delivered again, and no consumer of it asks for messages now."
    ),
    "retry in line": Sentence(Rank.LINE, "retrying", _FAILED + "it is delivered again as soon as its turn comes."),
}

_OVER = {
    "acked": "has acknowledged it",
    "filtered": "passed it over, because of its tag",
    "discarded": "had it as a dead letter, and a person discarded it",
    "expired": "lost it to retention before it was consumed",
    "skipped": "began behind it",
    "gone": "is done with it, and how is not known any more",
}
"""Texts of the states in which a consumer group has finished with a message."""


def make_reason(name: str, offers: tuple[Offer, ...] = (), **facts: object) -> Reason:
    """Return the reason with this name in :data:`SENTENCES`, filled with ``facts``."""
    return SENTENCES[name].fill(offers, **facts)


def choose_reason(reasons: Sequence[Reason]) -> Reason:
    """Return the reason of the lowest rank. Its sentence also gives the number of other places where the message
    waits."""
    if not reasons:
        return make_reason("unknown")
    ordered = sorted(reasons, key=lambda reason: reason.rank)
    first = ordered[0]
    others = sum(reason.rank < Rank.DONE for reason in ordered[1:])
    more = f" It waits at {many(others, 'more place')} besides." if others and first.rank < Rank.DONE else ""
    offers = tuple(offer for reason in ordered for offer in reason.offers)
    return Reason(first.rank, first.state, first.sentence + more, offers)


def explain_at_broker(of: AtBroker, now_us: int) -> Iterator[Reason]:
    """Yield the reasons why a message waits at its broker."""
    message = of.message
    state = message["state"]
    if state == "parked":
        yield _explain_parked(of)
    elif state == "open":
        yield _explain_open(of, now_us)
    elif state in ("rolled_back", "expired"):
        yield make_reason(state)
    elif not message["visible"] and state != "edited":
        yield _explain_invisible(message, now_us)
    elif of.stands is None:
        visible = "It is visible" if message["visible"] else "One consumer group gets it in place of a dead letter"
        yield Reason(Rank.DONE, state, f"{visible}; where it stands for consumer groups is not known.")
    else:
        yield from _explain_groups(of, of.stands, now_us)


def _explain_parked(of: AtBroker) -> Reason:
    shown = of.transaction or {}
    group, checks = shown.get("group") or "its producer group, which is forgotten,", shown.get("checks", 0)
    acts = ("commit", "rollback", "recheck")
    offers = tuple(Offer(f"transactions.{act}", {"ids": [of.message["transaction"]]}) for act in acts)
    return make_reason("parked" if checks else "parked unasked", offers, group=group, checks=many(checks, "question"))


def _explain_open(of: AtBroker, now_us: int) -> Reason:
    shown, producers = of.transaction, of.producers
    if shown is None:
        return make_reason("open")
    acts = ("commit", "rollback")
    offers = tuple(Offer(f"transactions.{act}", {"ids": [of.message["transaction"]]}) for act in acts)
    facts: dict[str, Any] = {"group": shown["group"] or "(forgotten)", "since": since(shown["prepared_us"], now_us)}
    if producers is None:
        return make_reason("no producer group", offers, **facts)
    checks, most, due_us = shown["checks"], producers["check_max"], shown.get("due_us", 0)
    due = at(due_us, now_us)
    facts |= {"asked": f"asked {many(checks, 'time')} of {most}"}
    if due_us > now_us and not checks:
        return make_reason("deciding", offers, due=due, **facts)
    if not producers["members"]:
        return make_reason("no producer", offers, **facts)
    session = shown.get("asked_session")
    if due_us > now_us and session:
        return make_reason("asked", offers, session=session, **facts)
    if due_us > now_us:
        unknown_us, exhausted = shown.get("unknown_us"), producers["checks_exhausted"] == "rollback"
        last = (
            f"UNKNOWN was answered {at(unknown_us, now_us)}"
            if unknown_us
            else "nobody answered, or the answer was UNKNOWN"
        )
        follows = "asked again" if checks < most else "rolled back" if exhausted else "parked"
        return make_reason("unanswered", offers, last=last, next=f"it is {follows} {due}", **facts)
    session = f", session {session}, and has not answered yet" if session else ""
    return make_reason("being asked", offers, session=session, **facts)


def _explain_invisible(message: Mapping[str, Any], now_us: int) -> Reason:
    if message["visible_us"] > now_us:
        return make_reason("delayed", visible=at(message["visible_us"], now_us))
    if message["damaged"]:
        return make_reason("damaged", cause=quoted(message["damaged"]))
    return make_reason("gone")


def _explain_groups(of: AtBroker, stands: Mapping[str, Any], now_us: int) -> Iterator[Reason]:
    groups = [one for one in stands["groups"] if one["subscribed"] or one["state"] != "waiting"]
    if not groups:
        yield make_reason("no consumer group", topic=of.message["topic"])
        return
    done = [one for one in groups if one["state"] in _OVER]
    for one in groups:
        if one["state"] not in _OVER:
            yield _explain_group(of, one, stands.get("events", []), now_us)
    if done:
        listed = ", ".join(f"{one['group']} {_OVER[one['state']]}" for one in done[:5])
        more = f", and {many(len(done) - 5, 'more group')}" if len(done) > 5 else ""
        state = "acked" if any(one["state"] == "acked" for one in done) else done[0]["state"]
        yield Reason(Rank.DONE, state, f"It does not wait: {listed}{more}.")


def _explain_group(of: AtBroker, one: Mapping[str, Any], events: Sequence[Mapping[str, Any]], now_us: int) -> Reason:
    state, group = one["state"], one["group"]
    if state == "dead":
        return _explain_dead(of, one, now_us)
    if state == "leased":
        return _explain_leased(one, now_us)
    if one.get("paused"):
        return make_reason("paused", group=group)
    if state == "retrying":
        return _explain_retry(one, events, now_us)
    if not one.get("chosen", True):
        return make_reason("filtered", group=group)
    before = one["before"]
    ahead = f"{many(before, 'message')} of its queue {'comes' if before == 1 else 'come'} first"
    if not one["receiving"] and not one.get("leases", 0):
        return make_reason("no consumer", group=group, before=f" ({ahead})" if before else "")
    return make_reason("in line", group=group, before=ahead if before else "it is the next of its queue")


def _explain_dead(of: AtBroker, one: Mapping[str, Any], now_us: int) -> Reason:
    place = {name: of.message[name] for name in ("topic", "queue", "offset")} | {"broker": of.broker}
    letter = place | {"dead_us": one["dead_us"], "attempts": one["attempt"]}
    selection = {"group": one["group"], "items": [letter]}
    offers = (Offer("dead_letters.retry", selection), Offer("dead_letters.discard", selection))
    attempts, cause = many(one["attempt"], "attempt"), quoted(one["cause"])
    return make_reason(
        "dead", offers, group=one["group"], dead=at(one["dead_us"], now_us), attempts=attempts, cause=cause
    )


def _explain_leased(one: Mapping[str, Any], now_us: int) -> Reason:
    group, holder = one["group"], f"instance {one['instance']}" if one.get("instance") else f"member {one['member']}"
    if one.get("in_doubt"):
        return make_reason("in doubt", group=group, holder=holder)
    held = f" {since(one['leased_us'], now_us)}" if one.get("leased_us") else ""
    attempt = f"attempt {one['attempt']}" + (f" of {one['max_attempts']}" if one["max_attempts"] < FOREVER else "")
    deadline_us = one["deadline_us"]
    lease = "its lease does not end by time" if deadline_us is None else f"its lease ends {at(deadline_us, now_us)}"
    return make_reason("leased", group=group, holder=holder, since=held, attempt=attempt, lease=lease)


def _explain_retry(one: Mapping[str, Any], events: Sequence[Mapping[str, Any]], now_us: int) -> Reason:
    group, failed = one["group"], max(one["attempt"] - 1, 0)
    if "behind" in one:
        return make_reason("behind", group=group, offset=one["behind"])
    times = f"has failed it {many(failed, 'time')}" if failed else "is to be given it"
    failures = [event for event in events if event["group"] == group and event["event"] == "failed"]
    last = ""
    if failures:
        how = "its lease ended without an answer" if failures[-1].get("expired") else "its consumer gave it back"
        last = f" (last {at(failures[-1]['time_us'], now_us)}: {how}; why is stored only of dead letters)"
    if one["due_us"] > now_us:
        return make_reason("retry due", group=group, times=times, last=last, due=at(one["due_us"], now_us))
    return make_reason(
        "retry in line" if one["receiving"] else "retry without consumer", group=group, times=times, last=last
    )
