"""Events of a message that a broker stores, each with a sentence."""

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


def list_broker_events(at_broker: AtBroker, now_us: int) -> list[Event]:
    """Return all events of a message at its broker: of its transaction, its answers, its place, and its consumer
    groups."""
    return [
        *_list_transaction_events(at_broker),
        *_list_unknown_answers(at_broker),
        *_list_place_events(at_broker, now_us),
        *_list_group_events(at_broker, now_us),
    ]


def describe_operator(at_broker: AtBroker, time_us: int) -> str:
    """Return a text that names the operator of a manual operation at a time, and the reason."""
    act = at_broker.acts.get(time_us)
    if act is None:
        return "by hand; who did it is not recorded"
    why = f": {quoted(act['why'])}" if act.get("why") else "; no reason was given"
    return f"by {quoted(act.get('by') or 'somebody who gave no name')} (act {act['number']}){why}"


def _list_transaction_events(of: AtBroker) -> Iterator[Event]:
    message, shown = of.message, of.transaction
    if message["state"] == "edited":
        old = message["edited_from"] or "a message that was damaged"
        text = f"Put in place of the dead letter {old}, for consumer group {message['group']} alone."
        yield _make_event(of, message["stored_us"], "replaced", text, {"edited_from": message["edited_from"]})
        return
    if message["transaction"] is None:
        yield _make_event(of, message["stored_us"], "stored", "Stored as a plain message.")
        return
    if shown is None:
        yield _make_event(of, message["stored_us"], "prepared", f"Prepared in transaction {message['transaction']}.")
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
                f"{event.get('attempt', '?')}; {_describe_answer(timeline[number + 1 :])}"
            )
        elif kind == "parked":
            text = f"Parked after {many(shown['checks'], 'question')}: from now on it waits for a person."
        elif kind == "reopened":
            text = f"Opened again {describe_operator(of, time_us)}."
        else:
            text = f"{_STATES.get(kind, kind)} {_describe_decision(of, event)}."
        yield _make_event(of, time_us, kind, text, facts)


def _list_unknown_answers(of: AtBroker) -> Iterator[Event]:
    """Yield the last check-back answer UNKNOWN. The broker keeps only the last one since its start."""
    shown = of.transaction or {}
    if shown.get("unknown_us"):
        yield _make_event(
            of,
            shown["unknown_us"],
            "answered",
            "UNKNOWN was answered (the last such answer; earlier ones are not kept).",
        )


def _describe_answer(later: list[Mapping[str, Any]]) -> str:
    """Describe the answer to a check-back, as far as the log shows. The log stores decisions, but not answers that
    decide nothing."""
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
        return describe_operator(of, event["time_us"])
    text = _DECIDERS.get(event.get("by", ""), "by nobody knows whom")
    session = event.get("session")
    own = (of.transaction or {}).get("instance")
    prepared_by = int(str(of.message["transaction"]).split("-")[1], 16)
    if not session:
        return text
    return f"{text} (session {session}" + (f", instance {own})" if session == prepared_by and own else ")")


def _list_place_events(of: AtBroker, now_us: int) -> Iterator[Event]:
    message = of.message
    if message["damaged"]:
        yield _make_event(of, None, "damaged", f"The log is damaged under it: {quoted(message['damaged'])}.")
    if message["state"] == "edited":
        return
    if message["visible"]:
        placed_us = None if of.stands is None else of.stands["placed_us"]
        where = f"{message['topic']}/{message['queue']}/{message['offset']}"
        yield _make_event(
            of,
            placed_us,
            "placed",
            f"Visible to consumers at {where}.",
            {"offset": message["offset"], "queue": message["queue"]},
        )
    elif message["visible_us"] > now_us and message["state"] in ("plain", "committed", "open", "parked"):
        yield _make_event(
            of, None, "delayed", f"Delayed: not visible before it is due {at(message['visible_us'], now_us)}."
        )


def _list_group_events(of: AtBroker, now_us: int) -> Iterator[Event]:
    if of.stands is None:
        return
    for event in of.stands.get("events", []):
        facts = {name: value for name, value in event.items() if name != "time_us"}
        yield _make_event(of, event["time_us"], event["event"], _describe_group_event(of, event, now_us), facts)


def _describe_group_event(of: AtBroker, event: Mapping[str, Any], now_us: int) -> str:
    group, kind, attempt = event["group"], event["event"], event.get("attempt")
    times = f"attempt {attempt}" if attempt else "an attempt whose number is not known"
    if kind == "leased":
        return (
            f"Group {group}: handed to member {event['member']}, {times}."
            if "member" in event
            else f"Group {group}: handed to the next process of its member, {times}."
        )
    if kind == "reset":
        return f"Group {group}: moved to another place of the queue {describe_operator(of, event['time_us'])}."
    if kind == "acked":
        return f"Group {group}: acknowledged, {times}."
    if kind == "released":
        return f"Group {group}: given back unhandled, which does not count as an attempt."
    if kind == "failed":
        how = "its lease ended without an answer" if event.get("expired") else "its consumer gave it back"
        if event.get("cause"):
            how += f", {quoted(event['cause'])}"
        return (
            f"Group {group}: failed, {times}: {how}; delivered again from {_format_begin(event['due_us'], now_us)} on."
        )
    if kind == "dead":
        return f"Group {group}: given up after {times}: {quoted(event.get('cause'))}."
    if kind == "edited":
        return (
            f"Group {group}: message {event.get('message_id', '')} was put in place of the dead letter, for this group "
            "alone,"
            f" {describe_operator(of, event['time_us'])}."
        )
    act = "delivered again, attempts counted anew," if kind == "retried" else "discarded for good"
    return f"Group {group}: the dead letter was {act} {describe_operator(of, event['time_us'])}."


def _format_begin(time_us: int, now_us: int) -> str:
    return at(time_us, now_us).removeprefix("at ")


def _make_event(
    of: AtBroker, time_us: int | None, event: str, sentence: str, facts: Mapping[str, Any] | None = None
) -> Event:
    return Event(time_us, event, of.broker, sentence, facts or {})
