"""Recording of operator actions: before they run; after a crash, whether they took effect."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from escrowmq.acts import Done, Journal, Record
from escrowmq.acts.telling import results, to_act, to_broken
from escrowmq.broker.reads.readable import Readable
from escrowmq.errors import EscrowError
from escrowmq.ledger import listings
from escrowmq.ledger.columns.arrays import Int64s
from escrowmq.ledger.groups.dead.letters import NOT_DEAD
from escrowmq.ledger.groups.reports import deaths, described
from escrowmq.ledger.ledger import Ledger
from escrowmq.ledger.transactions.spanning import undecided_in
from escrowmq.model import TransactionId, message_id
from escrowmq.wire.actions import acts, brokers, dead_letters, groups, producers, rights, topics, transactions, writers
from escrowmq.wire.actions.action import Action


@contextmanager
def recorded(engine: Readable, action: Action[Any, Any], request: Mapping[str, Any], **more: Any) -> Iterator[Done]:
    """Record an act, and do it in the block. What it is about is the ``request``, but for what ``more`` says better;
    who and why are taken from it. Raises as :meth:`escrowmq.acts.Journal.act`: what cannot be recorded is not done."""
    what = {name: value for name, value in request.items() if name not in ("by", "why")} | more
    now_us = engine.clock.now_us
    with engine.log.acts.act(action.name, what, now_us, request.get("by"), request.get("why")) as done:
        yield done


def ending(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result that the record gets for an operator action with this answer."""
    return results(answer["codes"]) if "codes" in answer else dict(answer)


def named(engine: Readable, chosen: Int64s, died_us: Int64s) -> list[list[Any]]:
    """Topic, queue, offset and time of death of dead letters, for the record; ``chosen`` are pairs of a queue's id and
    an offset."""
    ids = set(chosen[:, 0].tolist())
    places = engine.look(lambda: {id: engine.shard.ledger.topics.queues[id].place for id in ids}).result()
    return [
        [places[id].topic, places[id].queue, offset, time_us]
        for (id, offset), time_us in zip(chosen.tolist(), died_us.tolist(), strict=True)
    ]


# Reading the record


def page(engine: Readable, request: acts.List, most: int) -> acts.Page:
    """One page: as many acts as are asked for, or as go into one answer."""
    journal, newest = engine.log.acts, request.get("newest", False)
    found = journal.listed(request.get("after", 0), request.get("limit", most), newest=newest)
    answer = acts.Page(acts=[to_act(one) for one in found])
    if found and not newest and journal.has_after(found[-1].begun.number):
        answer["next"] = found[-1].begun.number
    return answer


def verified(engine: Readable) -> acts.Verified:
    """Verify the chain of the record of operator actions."""
    count, last, breaks = engine.log.acts.verify()
    return {"shard": engine.log.shard, "records": count, "last": last, "broken": to_broken(breaks)}


# After a crash

FOUND_QUEUES = 100  # queues of which it is found where a group is


def resolve(journal: Journal, ledger: Ledger, now_us: int) -> int:
    """Find out what became of the acts that the end of a broker interrupted, from what its log says; how many there
    were."""
    return journal.resolve(lambda record: {"interrupted": True, "found": _find_state(ledger, record)}, now_us)


def _find_state(ledger: Ledger, record: Record) -> Any:
    """Return the current state of the action's subject, or the code of an error if it is unknown."""
    try:
        return _LOOKS[record.act or ""](ledger, record.what)
    except EscrowError as problem:
        return problem.code.name
    except (KeyError, TypeError, ValueError) as problem:  # a record that somebody edited
        return f"the record cannot be read: {problem!r:.100}"


def _transactions(ledger: Ledger, what: Mapping[str, Any]) -> dict[str, Any]:
    return results([_state(ledger, printed) for printed in what["ids"]])


def _state(ledger: Ledger, printed: str) -> str:
    try:
        found = listings.transaction(ledger, TransactionId.parse(printed))
    except EscrowError as problem:
        return problem.code.name
    return f"{found['state']} by {found['decided_by']}" if "decided_by" in found else str(found["state"])


def _describe_reveal(ledger: Ledger, what: Mapping[str, Any]) -> dict[str, Any]:
    """Return the transaction's state: showing its bodies changed nothing."""
    return results([_state(ledger, what["id"])])


def _dead_letters(ledger: Ledger, what: Mapping[str, Any]) -> dict[str, Any]:
    items = [(ledger.queue_id(item[0], item[1]), item[2], item[3] if len(item) > 3 else None) for item in what["items"]]
    queue_ids, offsets = (np.array([item[column] for item in items], np.int64) for column in (0, 1))
    died_us, _ = deaths(ledger.groups.group(what["group"]), queue_ids, offsets)
    now = [(item[2], have) for item, have in zip(items, died_us.tolist(), strict=True)]  # older records name no death
    return results(["dead" if have != NOT_DEAD and seen in (None, have) else "settled" for seen, have in now])


def _describe_edit(ledger: Ledger, what: Mapping[str, Any]) -> str:
    cursor = ledger.groups.group(what["group"]).cursor(ledger.queue_id(what["topic"], what["queue"]))
    edit = cursor.edited.get(what["offset"])
    if edit is not None and edit.message_id.hex() == what["message_id"]:
        return "edited"
    letter = cursor.dead.letter(what["offset"])
    return "dead" if letter is not None and letter[0] == what["dead_us"] else "settled"


def _group(ledger: Ledger, what: Mapping[str, Any]) -> Any:
    return described(ledger.groups.group(what["group"]).subscription, ledger.rules)


def _places(ledger: Ledger, what: Mapping[str, Any]) -> Any:
    group = ledger.groups.group(what["group"])
    cursors = [(ledger.topics.queues[id].place, cursor.place) for id, cursor in sorted(group.cursors.items())]
    return {"places": [[place.topic, place.queue, offset] for place, offset in cursors[:FOUND_QUEUES]]}


def _describe_pause(ledger: Ledger, what: Mapping[str, Any]) -> Any:
    return {"paused": sorted(ledger.groups.group(what["group"]).paused)}


def _describe_deletion(ledger: Ledger, what: Mapping[str, Any]) -> Any:
    group = ledger.groups.group(what["group"])  # if it is gone, UNKNOWN_GROUP is what is found
    return {"number": group.ordinal, "dead_letters": sum(len(cursor.dead) for cursor in group.cursors.values())}


def _member(ledger: Ledger, what: Mapping[str, Any]) -> Any:
    members = ledger.groups.members(what["group"], ledger.topics)
    return [one for one in members if one.get("instance") == what["instance"]]


def _producers(ledger: Ledger, what: Mapping[str, Any]) -> Any:
    return [one for one in listings.producers_list(ledger) if one["group"] == what["group"]]


def _writer(ledger: Ledger, what: Mapping[str, Any]) -> Any:
    return {"batch": ledger.writers.last(message_id(what["writer"]))}


def _topic(ledger: Ledger, what: Mapping[str, Any]) -> dict[str, Any]:
    queues = ledger.topics.queue_ids(what["name"])
    return {"queues": len(queues), **listings.retention_of(ledger.topics.by_name[what["name"]].rules)}


def _describe_step_down(ledger: Ledger, what: Mapping[str, Any]) -> dict[str, Any]:
    return {"led": what["url"], "opened_anew": True}  # nothing more can be known: whoever opened the log looks for it


def _describe_topic_deletion(ledger: Ledger, what: Mapping[str, Any]) -> dict[str, Any]:
    if not ledger.topics.has(what["name"]):
        return {"deleted": True}
    _, halves = undecided_in(ledger.transactions, ledger.topics.queue_ids(what["name"]))
    return {"deleted": False, "undecided": halves}  # none, if they were rolled back and the deletion itself was lost


_LOOKS: dict[str, Callable[[Ledger, Mapping[str, Any]], Any]] = {
    transactions.SETTLE.name: _transactions,
    transactions.RECHECK.name: _transactions,
    transactions.REVEAL.name: _describe_reveal,
    dead_letters.SETTLE.name: _dead_letters,
    dead_letters.EDIT.name: _describe_edit,
    groups.ALTER.name: _group,
    groups.RESET.name: _places,
    groups.PAUSE.name: _describe_pause,
    groups.RESUME.name: _describe_pause,
    groups.DELETE.name: _describe_deletion,
    groups.FENCE.name: _member,
    producers.ALTER.name: _producers,
    topics.ALTER.name: _topic,
    topics.DELETE.name: _describe_topic_deletion,
    writers.FORGET.name: _writer,
    brokers.STEP_DOWN.name: _describe_step_down,
    rights.RELOAD.name: lambda ledger, what: {"rights": what["rights"]},
}
"""The acts of operators, and what tells afterwards whether they were done."""
