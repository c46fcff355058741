"""Events of a message that a database stores, each with a sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from escrowmq.compensation.cases import CaseState
from escrowmq.outbox.inbox import stands
from escrowmq.outbox.modes.journal import Stage
from escrowmq.outbox.tables import Reason, State
from escrowmq.overview.stories.known import InDatabase
from escrowmq.overview.values import Event
from escrowmq.overview.words import many, quote

_NOTE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)Z (\w+) by (.*)")
"""A line that an operator action adds to a row."""


Events = Iterator[tuple[int | None, str, str, Mapping[str, Any]]]
"""Events of one database: time, name, sentence, facts."""


def list_database_events(row: InDatabase) -> list[Event]:
    """Return all events of a message in one database, table by table."""
    lists = (
        _list_outbox_events(row),
        _list_driven_events(row),
        _list_consumer_events(row),
        _list_compensation_events(row),
        _list_acts(row),
    )
    return [Event(us, name, row.database, text, facts) for found in lists for us, name, text, facts in found]


def list_barrier_events(barriers: list[dict[str, Any]], transaction: bytes) -> list[Event]:
    """Return the events that barriers store about a transaction."""
    events = []
    for row in barriers:
        if bytes(row["transaction_id"]) == transaction:
            result = "committed" if row["reason"] == Reason.COMMITTED else "can no longer commit"
            branch = f", branch {row['branch']}" if row["branch"] else ""
            text = f"The local transaction {result} (barrier{branch})."
            events.append(Event(row["decided_us"], "local", row["database"], text, {"branch": row["branch"]}))
    return events


def error_of(row: Mapping[str, Any]) -> str | None:
    """Return the error of an outbox row without the notes of operator actions; None if there is none."""
    lines = [line for line in (row["error"] or "").splitlines() if not _NOTE.fullmatch(line)]
    return "\n".join(lines) or None


def _list_outbox_events(row: InDatabase) -> Events:
    outbox = row.outbox
    if outbox is None:
        return
    state, seq = State(outbox["state"]), outbox["seq"]
    failed = f"{many(outbox['attempts'], 'attempt')}; the last error: {quote(error_of(outbox))}."
    yield outbox["created_us"], "written", f"Written to the outbox with the business change (row {seq}).", {"seq": seq}
    if outbox["attempts"] and outbox["sent_us"] is None:
        yield None, "tried", f"The relay made {failed}", {"attempts": outbox["attempts"]}
    if outbox["sent_us"] is not None:
        more = f" Since then {failed}" if state is State.WAITING else ""
        yield outbox["sent_us"], "sent", f"Sent by the relay: the receipt of its target is durable.{more}", {}
    if outbox["done_us"] is not None:
        yield outbox["done_us"], "called_back", "The consumer's callback arrived: its effect is committed.", {}
    for line in reversed((outbox["error"] or "").splitlines()):
        if match := _NOTE.fullmatch(line):
            time_us = round(datetime.strptime(match[1], "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC).timestamp() * 1e6)
            done = {"retry": "retried, with new attempts,", "discard": "discarded"}.get(match[2], match[2])
            yield time_us, "by_hand", f"The outbox row was {done} by {quote(match[3])}.", {"act": match[2]}
    if state is State.DISCARDED:
        yield None, "discarded", "An operator decided that the outbox row is not sent.", {}


def _list_driven_events(row: InDatabase) -> Events:
    if (driven := row.driven) is not None:
        stage = Stage(driven["state"]).name
        text = f"Stored by producer-driven group {driven['producer_group']}; its stage is {stage}."
        yield driven["created_us"], "driven", text, {"stage": stage.lower(), "attempts": driven["attempts"]}


def _list_consumer_events(row: InDatabase) -> Events:
    for mark in row.prepared:
        group = mark["consumer_group"]
        yield mark["prepared_us"], "kept", f"Group {group} stores it until it is decided.", {"group": group}
    for mark in row.marks:
        group, event = mark["consumer_group"], "consumed"
        text = f"Group {group} has consumed it: its effect and this mark are one transaction."
        if not stands(mark["topic"]):
            event = "forgotten"
            text = f"Group {group} had consumed it; then an operator deleted the mark: a redelivery is handled again."
        yield mark["seen_us"], event, text, {"group": group}


def _list_acts(row: InDatabase) -> Events:
    """Yield the operator actions from the record of the database."""
    for act in row.acts:
        place = act["what"]["messages"].index(row.message_id.hex())
        ended = act.get("ended", {})
        code = ended["each"][place] if "each" in ended else next(iter(ended.get("results", {})), "?")
        by, why = quote(act["by"] or "an unnamed operator"), quote(act["why"] or "no reason was given")
        result = "" if code == "OK" else f" Its result was {code}."
        text = f"{act['act']} by {by} (act {act['number']}): {why}.{result}"
        yield act["time_us"], "by_hand", text, {"act": act["act"], "number": act["number"], "result": code}


_SETS = {
    "half": ("announced", "announced, and in the half set: it is compared with the handled ids."),
    "taken": ("taken", "announced, and taken from the half set by a scheduler, which is about to repair it."),
    "commit": ("handled", "handled: it is in the commit set, and not yet compared with its announcement."),
}


def _list_compensation_events(row: InDatabase) -> Events:
    for entry in row.sets:
        event, text = _SETS[entry["what"]]
        yield entry["time_us"], event, f"Compensation {entry['name']}: {text}", {"name": entry["name"]}
    for case in row.cases:
        state, name = CaseState(case["state"]).name, case["name"]
        attempts = many(case["attempts"], "attempt")
        text = f"Compensation {name}: a case since then, {state} after {attempts}: {quote(case['reason'])}."
        yield case["first_us"], "case", text, {"name": name, "state": state.lower()}
        for line in reversed((case["notes"] or "").splitlines()):
            yield None, "by_hand", f"Compensation {name}: {quote(line)}", {"name": name}
