"""Records operator actions before they run, and resolves after a crash whether they took effect."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from escrowmq.acts import Done, Journal, Record
from escrowmq.acts.telling import results, to_act, to_broken
from escrowmq.broker.reads.readable import Readable
from escrowmq.errors import EscrowError
from escrowmq.ledger import listings
from escrowmq.ledger.columns.arrays import Int64s
from escrowmq.ledger.groups import limits
from escrowmq.ledger.groups.dead.letters import NOT_DEAD
from escrowmq.ledger.groups.reports import deaths, described
from escrowmq.ledger.ledger import Ledger
from escrowmq.model import TransactionId, message_id
from escrowmq.wire.actions import acts, brokers, dead_letters, groups, producers, rights, topics, transactions, writers
from escrowmq.wire.actions.action import Action


def recorded(
    engine: Readable, action: Action[Any, Any], request: Mapping[str, Any], **more: Any
) -> AbstractContextManager[Done]:
    """Return a context manager that records an operator action before its block runs, with its ``request``, changed by
    ``more``, and its end after it. Raises as :meth:`escrowmq.acts.Journal.act`: an action that cannot be recorded does
    not run."""
    what = {name: value for name, value in request.items() if name not in ("by", "why")} | more
    return engine.log.acts.act(action.name, what, engine.clock.now_us, request.get("by"), request.get("why"))


def ending(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result to record for an operator action with this answer: how often each code occurs and, if they
    differ, the code of each item. An answer without ``codes`` is the result itself."""
    return results(answer["codes"]) if "codes" in answer else dict(answer)


def named(engine: Readable, chosen: Int64s, died_us: Int64s) -> list[list[Any]]:
    """Return a list of topic, queue, offset and time of death for each dead letter in ``chosen``, pairs of queue id and
    offset."""
    ids = set(chosen[:, 0].tolist())
    places = engine.look(lambda: {id: engine.shard.ledger.topics.queues[id].place for id in ids}).result()
    return [
        [places[id].topic, places[id].queue, offset, time_us]
        for (id, offset), time_us in zip(chosen.tolist(), died_us.tolist(), strict=True)
    ]


# Reading the record


def page(engine: Readable, request: acts.List, most: int) -> acts.Page:
    """Return one page of the recorded operator actions; of ``most`` entries unless the request names a limit."""
    journal, newest = engine.log.acts, request.get("newest", False)
    found = journal.listed(request.get("after", 0), request.get("limit", most), newest=newest)
    answer = acts.Page(acts=[to_act(one) for one in found])
    if found and not newest and journal.has_after(found[-1].begun.number):
        answer["next"] = found[-1].begun.number
    return answer


def verified(engine: Readable) -> acts.Verified:
    """Verify the hash chain of the recorded actions. Returns their number, the last hash, and where the chain is
    broken."""
    count, last, breaks = engine.log.acts.verify()
    return {"shard": engine.log.shard, "records": count, "last": last, "broken": to_broken(breaks)}


# After a crash

FOUND_QUEUES = 100  # queues of a group whose places are recorded


def resolve(journal: Journal, ledger: Ledger, now_us: int) -> int:
    """Complete the records of operator actions that a crash interrupted, with the state of their subjects in the
    ledger. Returns how many there were."""
    return journal.resolve(lambda record: {"interrupted": True, "found": _find_state(ledger, record)}, now_us)


def _find_state(ledger: Ledger, record: Record) -> Any:
    """Return the current state of what a recorded action was about, or the name of an error's code if the ledger does
    not know it."""
    try:
        return _STATES[record.act or ""](ledger, record.what)
    except EscrowError as problem:
        return problem.code.name
    except (KeyError, TypeError, ValueError) as problem:  # an edited record
        return f"the record cannot be read: {problem!r:.100}"


def _transactions(ledger: Ledger, ids: list[str]) -> dict[str, Any]:
    def state(printed: str) -> str:
        try:
            found = listings.transaction(ledger, TransactionId.parse(printed))
        except EscrowError as problem:
            return problem.code.name
        return f"{found['state']} by {found['decided_by']}" if "decided_by" in found else str(found["state"])

    return results([state(printed) for printed in ids])


def _dead_letters(ledger: Ledger, what: Mapping[str, Any]) -> dict[str, Any]:
    items = [(ledger.queue_id(item[0], item[1]), item[2], item[3] if len(item) > 3 else None) for item in what["items"]]
    queue_ids, offsets = (np.array([item[column] for item in items], np.int64) for column in (0, 1))
    died_us, _ = deaths(ledger.groups.group(what["group"]), queue_ids, offsets)
    now = [(item[2], have) for item, have in zip(items, died_us.tolist(), strict=True)]  # older records name no death
    return results(["dead" if have != NOT_DEAD and seen in (None, have) else "settled" for seen, have in now])


def _edit(ledger: Ledger, what: Mapping[str, Any]) -> str:
    cursor = ledger.groups.group(what["group"]).cursor(ledger.queue_id(what["topic"], what["queue"]))
    edit = cursor.edited.get(what["offset"])
    if edit is not None and edit.message_id.hex() == what["message_id"]:
        return "edited"
    letter = cursor.dead.letter(what["offset"])
    return "dead" if letter is not None and letter[0] == what["dead_us"] else "settled"


def _places(ledger: Ledger, what: Mapping[str, Any]) -> Any:
    group = ledger.groups.group(what["group"])
    cursors = [(ledger.topics.queues[id].place, cursor.place) for id, cursor in sorted(group.cursors.items())]
    return {"places": [[place.topic, place.queue, offset] for place, offset in cursors[:FOUND_QUEUES]]}


def _group_deletion(ledger: Ledger, what: Mapping[str, Any]) -> Any:
    group = ledger.groups.group(what["group"])  # UNKNOWN_GROUP if it is deleted
    return {"number": group.ordinal, "dead_letters": sum(len(cursor.dead) for cursor in group.cursors.values())}


def _topic(ledger: Ledger, what: Mapping[str, Any]) -> dict[str, Any]:
    queues = ledger.topics.queue_ids(what["name"])
    return {"queues": len(queues), **listings.retention_of(ledger.topics.by_name[what["name"]].rules)}


def _topic_deletion(ledger: Ledger, what: Mapping[str, Any]) -> dict[str, Any]:
    if not ledger.topics.has(what["name"]):
        return {"deleted": True}
    _, halves = ledger.transactions.undecided_in(ledger.topics.queue_ids(what["name"]))
    return {"deleted": False, "undecided": halves}  # 0 if they were rolled back and the deletion itself was lost


_STATES: dict[str, Callable[[Ledger, Mapping[str, Any]], Any]] = {
    transactions.SETTLE.name: lambda ledger, what: _transactions(ledger, what["ids"]),
    transactions.RECHECK.name: lambda ledger, what: _transactions(ledger, what["ids"]),
    transactions.REVEAL.name: lambda ledger, what: _transactions(ledger, [what["id"]]),
    dead_letters.SETTLE.name: _dead_letters,
    dead_letters.EDIT.name: _edit,
    groups.ALTER.name: lambda ledger, what: described(ledger.groups.group(what["group"]).subscription, ledger.rules),
    groups.RESET.name: _places,
    groups.PAUSE.name: lambda ledger, what: {"paused": sorted(ledger.groups.group(what["group"]).paused)},
    groups.RESUME.name: lambda ledger, what: {"paused": sorted(ledger.groups.group(what["group"]).paused)},
    groups.LIMIT.name: lambda ledger, what: limits.given(ledger.groups.group(what["group"]).limits),
    groups.DELETE.name: _group_deletion,
    groups.FENCE.name: lambda ledger, what: [
        one for one in ledger.groups.members(what["group"], ledger.topics) if one.get("instance") == what["instance"]
    ],
    producers.ALTER.name: lambda ledger, what: [
        one for one in listings.producers_list(ledger) if one["group"] == what["group"]
    ],
    topics.ALTER.name: _topic,
    topics.DELETE.name: _topic_deletion,
    writers.FORGET.name: lambda ledger, what: {"batch": ledger.writers.last(message_id(what["writer"]))},
    brokers.STEP_DOWN.name: lambda _, what: {"led": what["url"], "opened_anew": True},  # all that can be known
    rights.RELOAD.name: lambda _, what: {"rights": what["rights"]},
}
"""By operator action: the state that shows whether it took effect."""
