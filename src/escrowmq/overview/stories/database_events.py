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
from escrowmq.overview.words import many, quoted

_NOTE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)Z (\w+) by (.*)")
"""A line that an operator action adds to a row."""


def list_database_events(row: InDatabase) -> list[Event]:
    """Return all events of a message in one database, table by table."""
    return [
        *_list_outbox_events(row),
        *_list_driven_events(row),
        *_list_consumer_events(row),
        *_list_compensation_events(row),
        *_list_acts(row),
    ]


def list_barrier_events(barriers: list[dict[str, Any]], transaction: bytes) -> list[Event]:
    """Return the events that barriers store about a transaction."""
    events = []
    for row in barriers:
        if bytes(row["transaction_id"]) != transaction:
            continue
        if row["reason"] == Reason.COMMITTED:
            text = f"The local transaction committed (barrier, branch {row['branch']})."
        else:
            text = f"The barrier was closed: the local transaction cannot commit any more (branch {row['branch']})."
        events.append(Event(row["decided_us"], "local", row["database"], text, {"branch": row["branch"]}))
    return events


def error_of(row: Mapping[str, Any]) -> str | None:
    """Return the error of an outbox row without the notes of operator actions; None if there is none."""
    lines = [line for line in (row["error"] or "").splitlines() if not _NOTE.fullmatch(line)]
    return "\n".join(lines) or None


def _list_outbox_events(row: InDatabase) -> Iterator[Event]:
    outbox = row.outbox
    if outbox is None:
        return
    where, state = row.database, State(outbox["state"])
    yield Event(
        outbox["created_us"],
        "written",
        where,
        f"Written to the outbox with the business change (row {outbox['seq']}).",
        {"seq": outbox["seq"]},
    )
    if outbox["attempts"] and outbox["sent_us"] is None:
        text = f"The relay has tried it {many(outbox['attempts'], 'time')}; the last time: {quoted(error_of(outbox))}."
        yield Event(None, "tried", where, text, {"attempts": outbox["attempts"]})
    if outbox["sent_us"] is not None:
        text = "Sent by the relay: the receipt of its target is durable."
        if state is State.WAITING:
            text += f" Tried {many(outbox['attempts'], 'time')} since: {quoted(error_of(outbox))}."
        yield Event(outbox["sent_us"], "sent", where, text)
    if outbox["done_us"] is not None:
        yield Event(outbox["done_us"], "called_back", where, "The consumer's callback came: it has had its effect.")
    for line in reversed((outbox["error"] or "").splitlines()):
        if match := _NOTE.fullmatch(line):
            time_us = round(datetime.strptime(match[1], "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC).timestamp() * 1e6)
            done = {"retry": "sent again, tries counted anew,", "discard": "discarded"}.get(match[2], match[2])
            yield Event(
                time_us, "by_hand", where, f"The outbox row was {done} by {quoted(match[3])}.", {"act": match[2]}
            )
    if state is State.DISCARDED:
        yield Event(None, "discarded", where, "A person decided that the outbox row is not to be sent.")


def _list_driven_events(row: InDatabase) -> Iterator[Event]:
    driven = row.driven
    if driven is not None:
        stage = Stage(driven["state"]).name
        text = (
            f"Stored by producer group {driven['producer_group']}, which drives its transaction itself; its row "
            f"stands at {stage}."
        )
        yield Event(
            driven["created_us"], "driven", row.database, text, {"stage": stage.lower(), "attempts": driven["attempts"]}
        )


def _list_consumer_events(row: InDatabase) -> Iterator[Event]:
    for mark in row.prepared:
        text = f"Group {mark['consumer_group']} keeps it in its database until it is decided."
        yield Event(mark["prepared_us"], "kept", row.database, text, {"group": mark["consumer_group"]})
    for mark in row.marks:
        if not stands(mark["topic"]):
            text = (
                f"Group {mark['consumer_group']} had consumed it; then a person took its mark away: it is handled "
                "again when it comes again."
            )
            yield Event(mark["seen_us"], "forgotten", row.database, text, {"group": mark["consumer_group"]})
            continue
        text = f"Group {mark['consumer_group']} has consumed it: its effect and this mark are one transaction."
        yield Event(mark["seen_us"], "consumed", row.database, text, {"group": mark["consumer_group"]})


def _list_acts(row: InDatabase) -> Iterator[Event]:
    """Yield the operator actions from the record of the database."""
    for act in row.acts:
        place = act["what"]["messages"].index(row.message_id.hex())
        ended = act.get("ended", {})
        code = ended["each"][place] if "each" in ended else next(iter(ended.get("results", {})), "?")
        why = quoted(act["why"]) if act["why"] else "no reason was given"
        result = "" if code == "OK" else f" It came to {code}."
        text = (
            f"{act['act']} by {quoted(act['by'] or 'somebody who gave no name')} (act {act['number']}): {why}.{result}"
        )
        yield Event(
            act["time_us"], "by_hand", row.database, text, {"act": act["act"], "number": act["number"], "result": code}
        )


_SETS = {
    "half": ("announced", "announced, and in the half set: it is compared with what was handled."),
    "taken": ("taken", "announced, and taken from the half set by a scheduler, which is about to repair it."),
    "commit": ("handled", "handled: it is in the commit set, and its announcement has not been compared yet."),
}


def _list_compensation_events(row: InDatabase) -> Iterator[Event]:
    for entry in row.sets:
        event, text = _SETS[entry["what"]]
        yield Event(
            entry["time_us"], event, row.database, f"Compensation {entry['name']}: {text}", {"name": entry["name"]}
        )
    for case in row.cases:
        state = CaseState(case["state"]).name
        text = (
            f"Compensation {case['name']}: a case since then, {state} after "
            f"{many(case['attempts'], 'try', 'tries')}: {quoted(case['reason'])}."
        )
        yield Event(case["first_us"], "case", row.database, text, {"name": case["name"], "state": state.lower()})
        for line in reversed((case["notes"] or "").splitlines()):
            yield Event(
                None, "by_hand", row.database, f"Compensation {case['name']}: {quoted(line)}", {"name": case["name"]}
            )
