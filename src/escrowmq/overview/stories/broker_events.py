"""Events of a message that a broker stores, each with a sentence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from escrowmq.overview.stories.brokers import AtBroker
from escrowmq.overview.values import Event
from escrowmq.overview.words import at, many, quote

_DECIDERS = {
    "producer": "by its producer",
    "check": "by the answer to a check",
    "exhausted": "after the last check, as the rules of its group specify",
    "retention": "because it was undecided for too long",
    "replaced": "because its message id was prepared again",
}
_STATES = {"committed": "Committed", "rolled_back": "Rolled back", "expired": "Expired"}
Events = Iterator[tuple[int | None, str, str, Mapping[str, Any]]]
"""Events of one broker: time, name, sentence, facts."""


def list_broker_events(at_broker: AtBroker, now_us: int) -> list[Event]:
    """Return all events of a message at its broker: of its transaction, its answers, its place, and its consumer
    groups."""
    lists = (
        _list_transaction_events(at_broker),
        _list_unknown_answers(at_broker),
        _list_place_events(at_broker, now_us),
        _list_group_events(at_broker, now_us),
    )
    return [Event(us, name, at_broker.broker, text, facts) for found in lists for us, name, text, facts in found]


def describe_operator(at_broker: AtBroker, time_us: int) -> str:
    """Return a text that names the operator of a manual operation at a time, and the reason."""
    act = at_broker.acts.get(time_us)
    if act is None:
        return "by an operator who is not recorded"
    why = f": {quote(act['why'])}" if act.get("why") else "; no reason was given"
    return f"by {quote(act.get('by') or 'an unnamed operator')} (act {act['number']}){why}"


def _list_transaction_events(of: AtBroker) -> Events:
    message, shown = of.message, of.transaction
    stored_us = message["stored_us"]
    if message["state"] == "edited":
        text = f"Stored in place of dead letter {message['edited_from'] or '(damaged)'}, for group {message['group']}."
        yield stored_us, "replaced", text, {"edited_from": message["edited_from"]}
    elif message["transaction"] is None:
        yield stored_us, "stored", "Stored as a plain message.", {}
    elif shown is None:
        yield stored_us, "prepared", f"Prepared in transaction {message['transaction']}.", {}
    else:
        for number, event in enumerate(shown["timeline"]):
            facts = {name: value for name, value in event.items() if name not in ("event", "time_us")}
            yield event["time_us"], event["event"], _describe_transaction_event(of, shown, number), facts


def _describe_transaction_event(of: AtBroker, shown: Mapping[str, Any], number: int) -> str:
    timeline, group = shown["timeline"], shown["group"]
    event = timeline[number]
    kind = event["event"]
    if kind == "prepared":
        by = "a deleted producer group" if group is None else f"producer group {group}"
        by += f", instance {shown['instance']}" if group is not None and shown["instance"] else ""
        is_first = all(earlier["event"] != "prepared" for earlier in timeline[:number])
        text = f"Prepared by {by} in transaction {shown['id']}" if is_first else "More of the transaction was prepared"
        count = event.get("messages", 1)
        return f"{text}: {many(count, 'half message')}." if count > 1 else f"{text}."
    if kind == "checked":
        answer = _describe_answer(timeline[number + 1 :])
        return f"Producer group {group or '(deleted)'} was checked, check {event.get('attempt', '?')}; {answer}"
    if kind == "parked":
        return f"Parked after {many(shown['checks'], 'check')}: an operator must decide."
    if kind == "reopened":
        return f"Reopened {describe_operator(of, event['time_us'])}."
    return f"{_STATES.get(kind, kind)} {_describe_decision(of, event)}."


def _list_unknown_answers(of: AtBroker) -> Events:
    """Yield the last check-back answer UNKNOWN. The broker keeps only the last one since its start."""
    if unknown_us := (of.transaction or {}).get("unknown_us"):
        yield unknown_us, "answered", "The answer was UNKNOWN (the last such answer; earlier ones are not stored).", {}


def _describe_answer(later: list[Mapping[str, Any]]) -> str:
    """Describe the answer to a check-back, as far as the log shows. The log stores decisions, but not answers that
    decide nothing."""
    following = next((event for event in later if event["event"] != "prepared"), None)
    if following is None:
        return "there is no decision yet."
    if following.get("by") == "check":
        return "the answer decided it."
    if following["event"] in ("checked", "parked"):
        return "no answer, or the answer was UNKNOWN."
    return "another request decided it."


def _describe_decision(of: AtBroker, event: Mapping[str, Any]) -> str:
    if event.get("by") == "operator":
        return describe_operator(of, event["time_us"])
    text = _DECIDERS.get(event.get("by", ""), "by an unknown decider")
    session = event.get("session")
    own = (of.transaction or {}).get("instance")
    prepared_by = int(str(of.message["transaction"]).split("-")[1], 16)
    if not session:
        return text
    return f"{text} (session {session}" + (f", instance {own})" if session == prepared_by and own else ")")


def _list_place_events(of: AtBroker, now_us: int) -> Events:
    message = of.message
    if message["damaged"]:
        yield None, "damaged", f"The log is damaged at this message: {quote(message['damaged'])}.", {}
    if message["state"] == "edited":
        return
    if message["visible"]:
        placed_us = None if of.stands is None else of.stands["placed_us"]
        place = {name: message[name] for name in ("offset", "queue")}
        where = f"{message['topic']}/{message['queue']}/{message['offset']}"
        yield placed_us, "placed", f"Visible to consumers at {where}.", place
    elif message["visible_us"] > now_us and message["state"] in ("plain", "committed", "open", "parked"):
        yield None, "delayed", f"Delayed: not visible before it is due {at(message['visible_us'], now_us)}.", {}


def _list_group_events(of: AtBroker, now_us: int) -> Events:
    for event in (of.stands or {}).get("events", []):
        facts = {name: value for name, value in event.items() if name != "time_us"}
        text = f"Group {event['group']}: {_describe_group_event(of, event, now_us)}."
        yield event["time_us"], event["event"], text, facts


def _describe_group_event(of: AtBroker, event: Mapping[str, Any], now_us: int) -> str:
    attempt, kind = event.get("attempt"), event["event"]
    times = f"attempt {attempt}" if attempt else "an attempt without a known number"
    if kind == "leased":
        member = f"member {event['member']}" if "member" in event else "the next process of its member"
        return f"delivered to {member}, {times}"
    if kind == "failed":
        how = "its lease expired" if event.get("expired") else "its consumer returned it"
        how += f", {quote(event['cause'])}" if event.get("cause") else ""
        due = at(event["due_us"], now_us).removeprefix("at ")
        return f"failed, {times}: {how}; delivered again from {due} on"
    if kind in ("acked", "released", "dead"):
        return {
            "acked": f"acknowledged, {times}",
            "released": "returned without processing, which does not count as an attempt",
            "dead": f"made a dead letter after {times}: {quote(event.get('cause'))}",
        }[kind]
    does = {
        "reset": "moved to another place of the queue",
        "edited": f"the dead letter was replaced by message {event.get('message_id', '')}, for this group alone,",
        "retried": "the dead letter was delivered again, with new attempts,",
    }.get(kind, "the dead letter was discarded")
    return f"{does} {describe_operator(of, event['time_us'])}"
