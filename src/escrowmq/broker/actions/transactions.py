"""Transactions: listed, shown, settled by an operator."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from escrowmq.broker.actions.answering import PAGE, answers, does, microseconds, page_of, results_of, transaction_ids
from escrowmq.broker.reads.lookups import bodies_of, show_transaction
from escrowmq.broker.reads.readable import Readable
from escrowmq.broker.recording import recorded
from escrowmq.broker.requests import transaction_id
from escrowmq.broker.writer.engine import Engine
from escrowmq.ledger.commands import End, Recheck
from escrowmq.ledger.listings import Waiting, Wanted, some_transactions
from escrowmq.model import DecidedBy, Outcome
from escrowmq.schemas import ENDING
from escrowmq.wire.actions import transactions


@answers(transactions.LIST)
def _list_transactions(engine: Readable, request: transactions.List) -> transactions.Page:
    """Return a page of the transactions that match the request. Searches in several short looks at the ledger, so that
    none keeps the writer for long."""
    limit, older_us = request.get("limit", PAGE), microseconds(request.get("older_than"))
    now_us = engine.clock.now_us()
    before_us = None if older_us is None else now_us - older_us
    wanted = Wanted(request.get("state"), request.get("group"), before_us, request.get("cause"), now_us)
    found: list[Any] = []
    place: int | None = request.get("after", -1)
    while place is not None and len(found) < limit:
        look = partial(_some, engine, wanted, limit - len(found), place)
        more, place = engine.look(look).result()
        found += more
    page: transactions.Page = page_of("transactions", found, limit, lambda last: last["position"])
    return page


def _some(engine: Readable, wanted: Wanted, limit: int, after: int) -> tuple[list[Any], int | None]:
    return some_transactions(engine.shard.ledger, wanted, limit, after)


@answers(transactions.SUMMARY)
def _summarize(engine: Readable, request: transactions.Summarize) -> transactions.Undecided:
    """Return a page of producer groups, each with a summary of its undecided transactions. Reads in several short looks
    at the ledger, so that none keeps the writer for long."""
    limit, after, samples = request.get("limit", PAGE), request.get("after", -1), request.get("samples", 3)
    group, now_us = request.get("group"), engine.clock.now_us()
    waiting = engine.look(lambda: Waiting(engine.shard.ledger, group, after, limit, samples, now_us)).result()
    while engine.look(lambda: waiting.look(engine.shard.ledger)).result():
        pass
    page: transactions.Undecided = page_of("groups", waiting.to_json(), limit, lambda last: last["number"])
    return page


@answers(transactions.SHOW)
def _show_transaction(engine: Readable, request: transactions.Show) -> transactions.Shown:
    return show_transaction(engine, transaction_id(request["id"]))


@answers(transactions.REVEAL)
def _reveal(engine: Engine, request: transactions.Reveal) -> transactions.Revealed:
    identity = transaction_id(request["id"])
    with recorded(engine, transactions.REVEAL, request) as done:
        bodies = bodies_of(engine, identity)
        done.ended = {"messages": len(bodies)}
    return {"bodies": bodies}


def _by_operator(request: transactions.Settle) -> End:
    outcome, ids = Outcome[request["outcome"].upper()], transaction_ids(request["ids"])
    batch = pa.RecordBatch.from_arrays([ids, pa.array(np.full(len(ids), outcome, np.uint8))], schema=ENDING)
    return End(batch, np.zeros(len(ids), np.int64), DecidedBy.OPERATOR)


does(transactions.SETTLE, _by_operator, lambda ended: results_of(ended.column("code").to_numpy()))
does(transactions.RECHECK, lambda request: Recheck(transaction_ids(request["ids"])), results_of)
