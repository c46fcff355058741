"""Events of a message that a broker knows, with a sentence each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from escrowmq.overview.stories.brokers import AtBroker
from escrowmq.overview.values import Event
from escrowmq.overview.words import at, many, quoted

_DECIDERS = {
    "producer": "by its producer",
    "check": "by the answer to a question",
    "exhausted": "after the last question, as the rules of its group say",
    "retention": "because it stayed undecided for too long",
    "replaced": "because its message id was prepared anew",
}
_STATES = {"committed": "Committed", "rolled_back": "Rolled back", "expired": "Expired"}


def broker_events(at_broker: AtBroker, now_us: int) -> list[Event]:
    """Return all of them, in the order in which they happened."""
    return [
        *_of_transaction(at_broker),
        *_of_answers(at_broker),
        *_of_place(at_broker, now_us),
        *_of_groups(at_broker, now_us),
    ]


def who(at_broker: AtBroker, time_us: int) -> str:
    """Return who did what was done manually at a time, and why."""
    act = at_broker.acts.get(time_us)
    if act is None:
        return "by hand; who did it is not recorded"
    why = f": {quoted(act['why'])}" if act.get("why") else "; no reason was given"
    return f"by {quoted(act.get('by') or 'somebody who gave no name')} (act {act['number']}){why}"


def _of_transaction(of: AtBroker) -> Iterator[Event]:
    message, shown = of.message, of.transaction
    if message["state"] == "edited":
        old = message["edited_from"] or "a message that was damaged"
        text = f"Put in place of the dead letter {old}, for consumer group {message['group']} alone."
        yield _event(of, message["stored_us"], "replaced", text, {"edited_from": message["edited_from"]})
        return
    if message["transaction"] is None:
        yield _event(of, message["stored_us"], "stored", "Stored as a plain message.")
        return
    if shown is None:
        yield _event(of, message["stored_us"], "prepared", f"Prepared in transaction {message['transaction']}.")
        return
    group, instance = shown["group"], shown["instance"]
    by = (
        "a producer that is forgotten"
        if group is None
        else f"producer group {group}" + (f", instance {instance}" if instance else "")
    )
    first = True
    timeline = shown["timeline"]
    for number, event in enumerate(timeline):
        kind, time_us = event["event"], event["time_us"]
        facts = {name: value for name, value in event.items() if name not in ("event", "time_us")}
        if kind == "prepared":
            count = event.get("messages", 1)
            text = f"Prepared by {by} in transaction {shown['id']}" if first else "More of the transaction was prepared"
            text += f": {many(count, 'half message')}." if count > 1 else "."
            first = False
        elif kind == "checked":
            text = (
                f"Producer group {group or '(forgotten)'} was asked what became of it, question "
                f"{event.get('attempt', '?')}; {_answer(timeline[number + 1 :])}"
            )
        elif kind == "parked":
            text = f"Parked after {many(shown['checks'], 'question')}: from now on it waits for a person."
        elif kind == "reopened":
            text = f"Opened again {who(of, time_us)}."
        else:
            text = f"{_STATES.get(kind, kind)} {_describe_decision(of, event)}."
        yield _event(of, time_us, kind, text, facts)


def _of_answers(of: AtBroker) -> Iterator[Event]:
    """Yield the check-backs whose answer decided nothing: the broker remembers the last time, and only since its
    start."""
    shown = of.transaction or {}
    if shown.get("unknown_us"):
        yield _event(
            of,
            shown["unknown_us"],
            "answered",
            "UNKNOWN was answered (the last such answer; earlier ones are not kept).",
        )


def _answer(later: list[Mapping[str, Any]]) -> str:
    """Describe the answer to a check-back, as far as the log tells: it keeps decisions, and no answers that decide
    nothing."""
    following = next((event for event in later if event["event"] != "prepared"), None)
    if following is None:
        return "no decision has come yet."
    if following.get("by") == "check":
        return "the answer decided it."
    if following["event"] in ("checked", "parked"):
        return "no decision came: nobody answered, or the answer was UNKNOWN."
    return "it was not the answer that decided it."


def _describe_decision(of: AtBroker, event: Mapping[str, Any]) -> str:
    if event.get("by") == "operator":
        return who(of, event["time_us"])
    text = _DECIDERS.get(event.get("by", ""), "by nobody knows whom")
    session = event.get("session")
    own = (of.transaction or {}).get("instance")
    prepared_by = int(str(of.message["transaction"]).split("-")[1], 16)
    if not session:
        return text
    return f"{text} (session {session}" + (f", instance {own})" if session == prepared_by and own else ")")


def _of_place(of: AtBroker, now_us: int) -> Iterator[Event]:
    message = of.message
    if message["damaged"]:
        yield _event(of, None, "damaged", f"The log is damaged under it: {quoted(message['damaged'])}.")
    if message["state"] == "edited":
        return
    if message["visible"]:
        placed_us = None if of.stands is None else of.stands["placed_us"]
        where = f"{message['topic']}/{message['queue']}/{message['offset']}"
        yield _event(
            of,
            placed_us,
            "placed",
            f"Visible to consumers at {where}.",
            {"offset": message["offset"], "queue": message["queue"]},
        )
    elif message["visible_us"] > now_us and message["state"] in ("plain", "committed", "open", "parked"):
        yield _event(of, None, "delayed", f"Delayed: not visible before it is due {at(message['visible_us'], now_us)}.")


def _of_groups(of: AtBroker, now_us: int) -> Iterator[Event]:
    if of.stands is None:
        return
    for event in of.stands.get("events", []):
        facts = {name: value for name, value in event.items() if name != "time_us"}
        yield _event(of, event["time_us"], event["event"], _in_group(of, event, now_us), facts)


def _in_group(of: AtBroker, event: Mapping[str, Any], now_us: int) -> str:
    group, kind, attempt = event["group"], event["event"], event.get("attempt")
    times = f"attempt {attempt}" if attempt else "an attempt whose number is not known"
    if kind == "leased":
        return (
            f"Group {group}: handed to member {event['member']}, {times}."
            if "member" in event
            else f"Group {group}: handed to the next process of its member, {times}."
        )
    if kind == "reset":
        return f"Group {group}: moved to another place of the queue {who(of, event['time_us'])}."
    if kind == "acked":
        return f"Group {group}: acknowledged, {times}."
    if kind == "released":
        return f"Group {group}: given back unhandled, which does not count as an attempt."
    if kind == "failed":
        how = "its lease ended without an answer" if event.get("expired") else "its consumer gave it back"
        if event.get("cause"):
            how += f", {quoted(event['cause'])}"
        return f"Group {group}: failed, {times}: {how}; delivered again from {_from(event['due_us'], now_us)} on."
    if kind == "dead":
        return f"Group {group}: given up after {times}: {quoted(event.get('cause'))}."
    if kind == "edited":
        return (
            f"Group {group}: message {event.get('message_id', '')} was put in place of the dead letter, for this group "
            "alone,"
            f" {who(of, event['time_us'])}."
        )
    act = "delivered again, attempts counted anew," if kind == "retried" else "discarded for good"
    return f"Group {group}: the dead letter was {act} {who(of, event['time_us'])}."


def _from(time_us: int, now_us: int) -> str:
    return at(time_us, now_us).removeprefix("at ")


def _event(
    of: AtBroker, time_us: int | None, event: str, sentence: str, facts: Mapping[str, Any] | None = None
) -> Event:
    return Event(time_us, event, of.broker, sentence, facts or {})
