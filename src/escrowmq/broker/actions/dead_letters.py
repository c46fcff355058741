"""Dead letters of consumer groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from escrowmq.acts.telling import results
from escrowmq.broker.actions.answering import PAGE, answers, microseconds, results_of
from escrowmq.broker.reads.lookups import damaged_places
from escrowmq.broker.reads.readable import Readable
from escrowmq.broker.recording import named, recorded
from escrowmq.broker.writer.engine import Engine
from escrowmq.errors import Code, Rejected, error
from escrowmq.ledger.columns.arrays import Bools, Int64s
from escrowmq.ledger.commands import SettleDead
from escrowmq.ledger.groups import reports
from escrowmq.ledger.groups.dead.letters import NOT_DEAD, Block
from escrowmq.ledger.groups.dead.listing import Cause, Letters, Parts, Wanted, joined, page, summary
from escrowmq.ledger.ledger import Ledger
from escrowmq.ledger.queues.queues import Place
from escrowmq.ledger.transactions.table import NONE
from escrowmq.wire.actions import dead_letters
from escrowmq.wire.values import MAX_PAGE

MOST_CAUSES = 1000
"""About how many causes one answer has; the groups after them are in the next one."""


@answers(dead_letters.LIST)
def _list_dead_letters(engine: Readable, request: dead_letters.List) -> dead_letters.Page:
    """Return a page of a group's dead letters, or those that the request names, with key, tag and message id from the
    log (null where damaged)."""
    limit, after, older_us = request.get("limit", PAGE), _place_of(request), microseconds(request.get("older_than"))
    before_us = None if older_us is None else engine.clock.now_us() - older_us
    if "items" in request:
        limit = MAX_PAGE
        found = _find_named(engine, request)
    else:
        parts = engine.look(
            lambda: engine.shard.ledger.groups.dead(request["group"], engine.shard.ledger.topics, request.get("topic"))
        )
        found = page(parts.result(), limit, after, Wanted(request.get("cause"), before_us))

    def described() -> list[Any]:
        ledger = engine.shard.ledger
        return reports.dead_letters(found, ledger.topics, ledger.groups.by_name.get(request["group"]))

    letters = engine.look(described).result()
    if letters:
        positions = np.array([letter["position"] for letter in letters], np.int64)
        stored, damaged = engine.log.salvage(positions, ["key", "tag", "message_id"])
        for row, (letter, content) in enumerate(zip(letters, stored.to_pylist(), strict=True)):
            damage = damaged.get(row)
            known = damage is None or damage.body_only
            identity = content["message_id"].hex() if known else None
            letter |= {"key": content["key"], "tag": content["tag"], "message_id": identity}
            letter["damaged"] = None if damage is None else str(damage)
    listed = dead_letters.Page(dead_letters=letters)
    if len(found) == limit:
        listed["next"] = [int(found.queue_ids[-1]), int(found.offsets[-1])]
    return listed


def _find_named(engine: Readable, request: dead_letters.List) -> Letters:
    """Return the dead letters at the places (topic, queue, offset) that a request names, ordered by queue id and
    offset, each once. Places without a dead letter are left out."""
    items = request["items"]
    if len(items) >= MAX_PAGE:
        raise error(Code.BAD_REQUEST, f"{len(items)} items", f"ask for fewer than {MAX_PAGE} at a time")
    asked: dict[tuple[str, int], list[int]] = {}
    for item in items:
        asked.setdefault((item["topic"], item["queue"]), []).append(item["offset"])
    wanted = {place: np.unique(np.array(offsets, np.int64)) for place, offsets in asked.items()}

    def look() -> dict[int, Block]:
        ledger = engine.shard.ledger
        ids = {place: _queue_id(ledger, *place) for place in wanted}
        there = [(queue_id, wanted[place]) for place, queue_id in ids.items() if queue_id != NONE]
        dead = {id: ledger.groups.group(request["group"]).cursor(id).dead.among(offsets) for id, offsets in there}
        return {queue_id: found for queue_id, found in sorted(dead.items()) if found is not None}

    return joined([*engine.look(look).result().items()])


@answers(dead_letters.SUMMARY)
def _summarize(engine: Readable, request: dead_letters.Summarize) -> dead_letters.Summary:
    """Count the dead letters of each group of a page by cause, with samples. Each group is counted as it stands at one
    moment. Groups without any are left out, unless the request names one."""
    most, samples, only = request.get("causes", 20), request.get("samples", 3), request.get("group")
    limit = request.get("limit", PAGE)

    def names() -> list[tuple[int, str]]:
        groups = engine.shard.ledger.groups
        chosen = groups.groups.values() if only is None else [groups.group(only)]
        return sorted((group.ordinal, group.name) for group in chosen)

    def look(name: str) -> tuple[Parts, dict[int, Place]]:
        ledger = engine.shard.ledger
        parts = ledger.groups.dead(name, ledger.topics) if only or name in ledger.groups.by_name else {}
        return parts, {id: ledger.topics.queues[id].place for id in parts}

    after, answer = request.get("after", -1), dead_letters.Summary(groups=[])
    causes = 0
    for ordinal, name in engine.look(names).result():
        if ordinal <= after:
            continue
        parts, places = engine.look(lambda name=name: look(name)).result()  # type: ignore[misc]
        if not parts and only is None:
            continue
        told = summary(parts, most, samples)
        line: dead_letters.OfGroupSummary = {
            "group": name, "dead_letters": told.count, "causes": [_cause(cause, places) for cause in told.causes],
        }  # fmt: skip
        if told.others is not None:
            line["others"] = {**_times(told.others), "causes": told.kinds - len(told.causes)}
        answer["groups"].append(line)
        causes += len(told.causes)
        if only is None and (len(answer["groups"]) == limit or causes >= MOST_CAUSES):
            answer["next"] = ordinal
            break
    return answer


def _cause(cause: Cause, places: Mapping[int, Place]) -> dead_letters.Cause:
    samples: list[dead_letters.Sample] = [
        {
            "topic": places[queue_id].topic,
            "queue": places[queue_id].queue,
            "offset": offset,
            "attempts": attempts,
            "cause": text,
            "dead_us": dead_us,
        }
        for queue_id, offset, dead_us, attempts, text in cause.samples
    ]
    return {"cause": cause.kind, **_times(cause), "samples": samples}


def _times(cause: Cause) -> dead_letters.Times:
    return {"count": cause.count, "oldest_us": cause.oldest_us, "newest_us": cause.newest_us}


@answers(dead_letters.SETTLE)
def _settle_dead_letters(engine: Engine, request: dead_letters.Settle) -> dead_letters.Settled:
    """Retry or discard dead letters, those named or a page of ``all``, as a recorded operator action. Returns a code
    for each. A message that died again after it was listed is not touched."""
    limit, everything = request.get("limit", PAGE), request.get("all", False)
    there: Bools | None = None
    items = [] if everything else request.get("items", [])
    names = {(item["topic"], item["queue"]): number for number, item in enumerate(items)}
    of_name = np.array([names[item["topic"], item["queue"]] for item in items], np.int64)
    offsets = np.array([item["offset"] for item in items], np.int64)
    seen_us, seen_attempts = _seen(items, "dead_us"), _seen(items, "attempts")

    def look() -> tuple[Int64s, Int64s]:
        nonlocal there
        ledger = engine.shard.ledger
        if everything:
            found = page(ledger.groups.dead(request["group"], ledger.topics), limit, _place_of(request))
            return np.stack([found.queue_ids, found.offsets], axis=1), found.dead_us
        ids = np.full(len(items), NONE, np.int64)
        for name, number in names.items():
            ids[number] = _queue_id(ledger, *name)
        there = ids[of_name] != NONE
        places = np.stack([ids[of_name], offsets], axis=1)[there]
        died_us, attempts = reports.deaths(ledger.groups.group(request["group"]), places[:, 0], places[:, 1])
        for seen, have in ((seen_us[there], died_us), (seen_attempts[there], attempts)):
            died_us[(seen != _UNSEEN) & (seen != have)] = NOT_DEAD
        return places, died_us

    places, died_us = engine.look(look).result()
    retry = request["act"] == "retry"
    damaged = damaged_places(engine, request["group"], places) if retry else np.zeros(len(places), bool)
    codes = np.full(len(places), Code.DAMAGED, np.uint8)
    good = places[~damaged]
    with recorded(engine, dead_letters.SETTLE, request, items=named(engine, places, died_us)) as done:
        command = SettleDead(request["group"], good[:, 0], good[:, 1], retry, died_us[~damaged])
        codes[~damaged] = engine.submit(command).result()
        if there is not None:
            all_codes = np.full(len(there), Code.NOT_FOUND, np.uint8)
            all_codes[there] = codes
            codes = all_codes
        answer = dead_letters.Settled(codes=results_of(codes)["codes"])
        done.ended = results(answer["codes"])
    if everything and len(places) == limit:
        answer["next"] = places[-1].tolist()
    return answer


def _queue_id(ledger: Ledger, topic: str, queue: int) -> int:
    """As :meth:`Ledger.queue_id`; ``NONE`` if the topic was deleted since, or made again with fewer queues."""
    try:
        return ledger.queue_id(topic, queue)
    except Rejected:
        if topic in ledger.topics.deleted:
            return NONE
        raise


def _place_of(request: dead_letters.List | dead_letters.Settle) -> list[int] | None:
    after = request.get("after")
    if after is not None and len(after) != 2:
        raise error(Code.BAD_REQUEST, "'after' must be the 'next' of the page before")
    return after


_UNSEEN = np.iinfo(np.int64).min


def _seen(items: list[dead_letters.Shown], name: Literal["dead_us", "attempts"]) -> Int64s:
    """Return the field ``name`` with which each item was shown to the operator; ``_UNSEEN`` where the item does not
    have it."""
    return np.array([item.get(name, _UNSEEN) for item in items], np.int64)
