"""Dead letters of consumer groups."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from escrowmq.acts.telling import results
from escrowmq.broker.actions.answering import PAGE, answers, page_of, results_of
from escrowmq.broker.reads.lookups import damaged_places
from escrowmq.broker.reads.readable import Readable
from escrowmq.broker.recording import named, recorded
from escrowmq.broker.writer.engine import Engine
from escrowmq.errors import Code, error
from escrowmq.ledger.columns.arrays import Bools, Int64s
from escrowmq.ledger.commands import SettleDead
from escrowmq.ledger.groups.failed import NOT_DEAD
from escrowmq.wire.actions import dead_letters


@answers(dead_letters.LIST)
def _list_dead_letters(engine: Readable, request: dead_letters.List) -> dead_letters.Page:
    limit, after = request.get("limit", PAGE), _place_of(request)

    def look() -> list[Any]:
        ledger = engine.shard.ledger
        return ledger.groups.dead_letters(request["group"], ledger.topics, limit, after)

    letters = engine.look(look).result()
    if letters:
        positions = np.array([letter["position"] for letter in letters], np.int64)
        stored, damaged = engine.log.salvage(positions, ["key", "tag", "message_id"])
        for row, (letter, content) in enumerate(zip(letters, stored.to_pylist(), strict=True)):
            damage = damaged.get(row)
            known = damage is None or damage.body_only
            identity = content["message_id"].hex() if known else None
            letter |= {"key": content["key"], "tag": content["tag"], "message_id": identity}
            letter["damaged"] = None if damage is None else str(damage)
    page: dead_letters.Page = page_of("dead_letters", letters, limit, lambda last: [last["queue_id"], last["offset"]])
    return page


@answers(dead_letters.SETTLE)
def _settle_dead_letters(engine: Engine, request: dead_letters.Settle) -> dead_letters.Settled:
    """Each act names the deaths that it is about: what dies again between the look, the record and the act is not touched."""
    limit, everything = request.get("limit", PAGE), request.get("all", False)

    def look() -> tuple[Int64s, Int64s]:
        ledger = engine.shard.ledger
        if everything:
            letters = ledger.groups.dead_letters(request["group"], ledger.topics, limit, _place_of(request))
            return _columns([[letter["queue_id"], letter["offset"]] for letter in letters]), _columns(
                [[letter["dead_us"]] for letter in letters], 1
            )[:, 0]
        items = request.get("items", [])
        ids = {place: ledger.queue_id(*place) for place in {(item["topic"], item["queue"]) for item in items}}
        places = _columns([[ids[item["topic"], item["queue"]], item["offset"]] for item in items])
        died_us, attempts = ledger.groups.deaths(request["group"], places[:, 0], places[:, 1])
        died_us[_others(items, "dead_us", died_us) | _others(items, "attempts", attempts)] = NOT_DEAD
        return places, died_us

    places, died_us = engine.look(look).result()
    retry = request["act"] == "retry"
    damaged = damaged_places(engine, places) if retry else np.zeros(len(places), bool)
    codes = np.full(len(places), Code.DAMAGED, np.uint8)
    good = places[~damaged]
    with recorded(engine, dead_letters.SETTLE, request, items=named(engine, places, died_us)) as done:
        command = SettleDead(request["group"], good[:, 0], good[:, 1], retry, died_us[~damaged])
        codes[~damaged] = engine.submit(command).result()
        answer = dead_letters.Settled(codes=results_of(codes)["codes"])
        done.ended = results(answer["codes"])
    if everything and len(places) == limit:
        answer["next"] = places[-1].tolist()
    return answer


def _place_of(request: dead_letters.List | dead_letters.Settle) -> list[int] | None:
    after = request.get("after")
    if after is not None and len(after) != 2:
        raise error(Code.BAD_REQUEST, "'after' must be the 'next' of the page before")
    return after


def _columns(rows: list[list[int]], width: int = 2) -> Int64s:
    return np.array(rows, np.int64).reshape(-1, width)


def _others(items: list[dead_letters.Shown], name: Literal["dead_us", "attempts"], now: Int64s) -> Bools:
    """Which items were shown with another value than they have now; one that says nothing of it was not."""
    return np.array([item.get(name, have) != have for item, have in zip(items, now.tolist(), strict=True)], bool)
