"""Dead letters of consumer groups."""

from __future__ import annotations

from typing import Any

import numpy as np

from escrowmq.broker.actions.answering import PAGE, answers, page_of, results_of
from escrowmq.broker.reads.lookups import damaged_places
from escrowmq.broker.reads.readable import Readable
from escrowmq.broker.recording import ending, named, recorded
from escrowmq.broker.requests import MAX_IDS
from escrowmq.broker.writer.engine import Engine
from escrowmq.errors import Code, error
from escrowmq.ledger.commands import SettleDead
from escrowmq.wire.actions import dead_letters
from escrowmq.wire.actions.action import Results


@answers(dead_letters.LIST)
def _list_dead_letters(engine: Readable, request: dead_letters.List) -> dead_letters.Page:
    limit, after = request.get("limit", PAGE), request.get("after")
    if after is not None and len(after) != 2:
        raise error(Code.BAD_REQUEST, "'after' must be the 'next' of the page before")

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
def _settle_dead_letters(engine: Engine, request: dead_letters.Settle) -> Results:
    def look() -> list[tuple[int, int]]:
        ledger = engine.shard.ledger
        if not request.get("all", False):
            items = request.get("items", [])
            return [(ledger.queue_id(item["topic"], item["queue"]), item["offset"]) for item in items]
        letters = ledger.groups.dead_letters(request["group"], ledger.topics, MAX_IDS)
        return [(letter["queue_id"], letter["offset"]) for letter in letters]

    chosen = np.array(engine.look(look).result(), np.int64).reshape(-1, 2)
    retry = request["act"] == "retry"
    damaged = damaged_places(engine, chosen) if retry else np.zeros(len(chosen), bool)
    codes = np.full(len(chosen), Code.DAMAGED, np.uint8)
    good = chosen[~damaged]
    with recorded(engine, dead_letters.SETTLE, request, items=named(engine, chosen)) as done:
        codes[~damaged] = engine.submit(SettleDead(request["group"], good[:, 0], good[:, 1], retry)).result()
        answer = results_of(codes)
        done.ended = ending(answer)
    return answer
