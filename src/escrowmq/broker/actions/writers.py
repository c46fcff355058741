"""Writers of numbered batches."""

from __future__ import annotations

from typing import Any

from escrowmq.broker.actions.answering import PAGE, answers, does, looks, page_of, submits, transaction_ids
from escrowmq.broker.reads.readable import Readable
from escrowmq.ledger.commands import CommitBatch, ForgetWriter
from escrowmq.ledger.listings import writers_list
from escrowmq.model import message_id
from escrowmq.wire.actions import writers

submits(
    writers.COMMIT,
    lambda request: CommitBatch(
        message_id(request["writer"]), request["batch"], transaction_ids(request["transactions"]), request["session"]
    ),
)
does(writers.FORGET, lambda request: ForgetWriter(message_id(request["writer"])))
looks(writers.SHOW, lambda shard, request: {"batch": shard.ledger.writers.last(message_id(request["writer"]))})


@answers(writers.LIST)
def _list_writers(engine: Readable, request: writers.List) -> writers.Page:
    limit, after = request.get("limit", PAGE), request.get("after", "")
    start = message_id(after) if after else b""
    found: list[Any] = engine.look(lambda: writers_list(engine.shard.ledger, start, limit)).result()
    listed = [writer | {"members": engine.listeners.count(writer["group"])} for writer in found]
    page: writers.Page = page_of("writers", listed, limit, lambda last: last["writer"])
    return page
