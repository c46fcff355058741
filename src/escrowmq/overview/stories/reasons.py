"""Reasons why a message waits, one sentence each. A table holds the sentences; the functions below it choose one for
each place.

If a message waits at several places, the reason that needs an operator comes first (see :class:`Rank`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple

from escrowmq.model import FOREVER
from escrowmq.overview.stories.brokers import AtBroker
from escrowmq.overview.values import Offer
from escrowmq.overview.words import at, many, quote, since


class Rank(IntEnum):
    """What a waiting message needs in order to continue. The lowest value is reported first."""

    OPERATOR = 0
    """A decision of an operator."""
    PROCESS = 1
    """A producer, a consumer or a relay that connects."""
    TIME = 2
    """Only time."""
    WORK = 3
    """Nothing: a process is working on it."""
    TURN = 4
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


OPERATOR, PROCESS, TIME, WORK, TURN, DONE = (partial(Sentence, rank) for rank in Rank)

_UNDECIDED = "It has been undecided {since}"
_CHECKED = _UNDECIDED + ". Its producer group {group} is being checked{session} ({checked})."
_FAILED = "Group {group} {times}{last}; it "

SENTENCES = {
    "unknown": DONE("unknown", "It does not wait, as far as is known."),
    # Its transaction, at the broker
    "parked": OPERATOR("parked", "It is parked after {checks} of {group} without a decision; an operator must decide."),
    "parked unasked": OPERATOR(
        "parked",
        "It is parked: no check was answered, as no process of {group} was connected, or the log is damaged here. An "
        "operator must decide.",
    ),
    "open": WORK("open", "Its transaction is undecided; no details are known."),
    "no producer group": PROCESS("open", _UNDECIDED + ", and its producer group {group} no longer exists."),
    "deciding": WORK("open", _UNDECIDED + ". If its producer does not decide it, group {group} is checked {due}."),
    "no producer": PROCESS(
        "open", _UNDECIDED + ", and no process of its producer group {group} is connected ({checked})."
    ),
    "asked": WORK("asked", _CHECKED),
    "being asked": WORK("open", _CHECKED),
    "unanswered": TIME(
        "open", _UNDECIDED + ": its producer group {group} was {checked} and did not decide ({last}); {next}."
    ),
    "rolled_back": DONE(
        "rolled_back", "It does not wait: its transaction was rolled back, and no consumer receives it."
    ),
    "expired": DONE("expired", "It does not wait: its transaction expired undecided, and no consumer receives it."),
    # Its queue
    "delayed": TIME("delayed", "It is delayed: consumers can receive it {visible}."),
    "damaged": OPERATOR("damaged", "The log is damaged at this message: {cause}."),
    "gone": DONE("gone", "It does not wait: retention removed it from its queue. Who consumed it is not known."),
    "no consumer group": DONE("visible", "It does not wait: no consumer group consumes topic {topic}."),
    # A consumer group
    "dead": OPERATOR(
        "dead", "Group {group} made it a dead letter {dead} after {attempts} ({cause}); an operator must decide."
    ),
    "paused": OPERATOR("paused", "Group {group} is paused: it receives no messages until an operator resumes it."),
    "limited": TIME(
        "waiting", "Group {group} is at its limits: it receives more when time passes or messages are acknowledged."
    ),
    "filtered": DONE("filtered", "It does not wait: group {group} will skip it because of its tag."),
    "no consumer": PROCESS(
        "waiting", "Group {group} has not received it yet, and no consumer requests messages now{before}."
    ),
    "in line": TURN("waiting", "Group {group} has not received it yet: {before}."),
    "in doubt": PROCESS(
        "in_doubt",
        "Group {group} delivered it to {holder}, which may have died: it waits until {holder} returns or is fenced.",
    ),
    "leased": WORK("leased", "Group {group} is processing it: {holder} has held it{since} ({attempt}), and {lease}."),
    "behind": TURN("behind", "Group {group} keeps the order of each key: it waits behind failed offset {offset}."),
    "retry due": TIME("retrying", _FAILED + "is delivered again {due}."),
    "retry without consumer": PROCESS(
        "retrying", _FAILED + "can be delivered again, and no consumer requests messages now."
    ),
    "retry in line": TURN("retrying", _FAILED + "is delivered again at its turn."),
}

_OVER = {
    "acked": "has acknowledged it",
    "filtered": "skipped it because of its tag",
    "discarded": "had it as a dead letter, which an operator discarded",
    "expired": "lost it to retention before it was consumed",
    "skipped": "started after it",
    "gone": "has finished with it; how is not known",
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
    more = f" It also waits at {many(others, 'other place')}." if others and first.rank < Rank.DONE else ""
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
        where = "It is visible" if message["visible"] else "One consumer group receives it in place of a dead letter"
        yield Reason(Rank.DONE, state, f"{where}; its state in consumer groups is not known.")
    else:
        yield from _explain_groups(of, of.stands, now_us)


def _explain_parked(of: AtBroker) -> Reason:
    shown = of.transaction or {}
    group, checks = shown.get("group") or "its deleted producer group", shown.get("checks", 0)
    offers = _offer_decisions(of, "commit", "rollback", "recheck")
    return make_reason("parked" if checks else "parked unasked", offers, group=group, checks=many(checks, "check"))


def _offer_decisions(of: AtBroker, *acts: str) -> tuple[Offer, ...]:
    return tuple(Offer(f"transactions.{act}", {"ids": [of.message["transaction"]]}) for act in acts)


def _explain_open(of: AtBroker, now_us: int) -> Reason:
    shown, producers = of.transaction, of.producers
    if shown is None:
        return make_reason("open")
    offers = _offer_decisions(of, "commit", "rollback")
    facts: dict[str, Any] = {"group": shown["group"] or "(deleted)", "since": since(shown["prepared_us"], now_us)}
    if producers is None:
        return make_reason("no producer group", offers, **facts)
    checks, most, due_us = shown["checks"], producers["check_max"], shown.get("due_us", 0)
    session, is_due, due = shown.get("asked_session"), due_us <= now_us, at(due_us, now_us)
    facts |= {"checked": f"checked {many(checks, 'time')} of {most}"}
    if not is_due and not checks:
        return make_reason("deciding", offers, due=due, **facts)
    if not producers["members"]:
        return make_reason("no producer", offers, **facts)
    if is_due or session:
        facts["session"] = f", session {session}, and has not answered yet" if session else ""
        return make_reason("being asked" if is_due else "asked", offers, **facts)
    unknown_us, exhausted = shown.get("unknown_us"), producers["checks_exhausted"] == "rollback"
    last = f"the answer was UNKNOWN {at(unknown_us, now_us)}" if unknown_us else "no answer, or the answer was UNKNOWN"
    follows = "checked again" if checks < most else "rolled back" if exhausted else "parked"
    return make_reason("unanswered", offers, last=last, next=f"it is {follows} {due}", **facts)


def _explain_invisible(message: Mapping[str, Any], now_us: int) -> Reason:
    if message["visible_us"] > now_us:
        return make_reason("delayed", visible=at(message["visible_us"], now_us))
    if message["damaged"]:
        return make_reason("damaged", cause=quote(message["damaged"]))
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
    if one.get("limited") and one.get("chosen", True) and one.get("due_us", 0) <= now_us:
        return make_reason("limited", group=group)
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
    attempts, cause = many(one["attempt"], "attempt"), quote(one["cause"])
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
    lease = "its lease does not expire" if deadline_us is None else f"its lease expires {at(deadline_us, now_us)}"
    return make_reason("leased", group=group, holder=holder, since=held, attempt=attempt, lease=lease)


def _explain_retry(one: Mapping[str, Any], events: Sequence[Mapping[str, Any]], now_us: int) -> Reason:
    group, failed = one["group"], max(one["attempt"] - 1, 0)
    if "behind" in one:
        return make_reason("behind", group=group, offset=one["behind"])
    times = f"failed to process it {many(failed, 'time')}" if failed else "is to receive it"
    failures = [event for event in events if event["group"] == group and event["event"] == "failed"]
    last = ""
    if failures:
        how = "its lease expired" if failures[-1].get("expired") else "its consumer returned it"
        last = f" (last {at(failures[-1]['time_us'], now_us)}: {how}; the cause is stored only for dead letters)"
    if one["due_us"] > now_us:
        return make_reason("retry due", group=group, times=times, last=last, due=at(one["due_us"], now_us))
    name = "retry in line" if one["receiving"] else "retry without consumer"
    return make_reason(name, group=group, times=times, last=last)
