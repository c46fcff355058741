"""Transactions: listed, shown, settled by an operator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from escrowmq.broker.actions.answering import PAGE, answers, does, microseconds, page_of, results_of, transaction_ids
from escrowmq.broker.reads.lookups import show_transaction
from escrowmq.broker.reads.readable import Readable
from escrowmq.broker.requests import transaction_id
from escrowmq.ledger.commands import End, Recheck
from escrowmq.ledger.listings import transactions as transactions_list
from escrowmq.ledger.listings import undecided
from escrowmq.model import DecidedBy, Outcome
from escrowmq.schemas import ENDING
from escrowmq.wire.actions import transactions


@answers(transactions.LIST)
def _list_transactions(engine: Readable, request: transactions.List) -> transactions.Page:
    limit, older_us = request.get("limit", PAGE), microseconds(request.get("older_than"))
    before_us = None if older_us is None else engine.clock.now_us() - older_us

    def look() -> list[Any]:
        return transactions_list(
            engine.shard.ledger,
            state=request.get("state"),
            group=request.get("group"),
            before_us=before_us,
            limit=limit,
            after=request.get("after", -1),
            cause=request.get("cause"),
            now_us=engine.clock.now_us(),
        )

    page: transactions.Page = page_of("transactions", engine.look(look).result(), limit, lambda last: last["position"])
    return page


@answers(transactions.SUMMARY)
def _summarize(engine: Readable, request: transactions.Summarize) -> transactions.Undecided:
    limit, after, samples = request.get("limit", PAGE), request.get("after", -1), request.get("samples", 3)

    def look() -> list[Any]:
        return undecided(engine.shard.ledger, request.get("group"), after, limit, samples, engine.clock.now_us())

    page: transactions.Undecided = page_of("groups", engine.look(look).result(), limit, lambda last: last["number"])
    return page


@answers(transactions.SHOW)
def _show_transaction(engine: Readable, request: transactions.Show) -> transactions.Shown:
    return show_transaction(engine, transaction_id(request["id"]))


def _by_operator(request: transactions.Settle) -> End:
    outcome, ids = Outcome[request["outcome"].upper()], transaction_ids(request["ids"])
    batch = pa.RecordBatch.from_arrays([ids, pa.array(np.full(len(ids), outcome, np.uint8))], schema=ENDING)
    return End(batch, np.zeros(len(ids), np.int64), DecidedBy.OPERATOR)


does(transactions.SETTLE, _by_operator, lambda ended: results_of(ended.column("code").to_numpy()))
does(transactions.RECHECK, lambda request: Recheck(transaction_ids(request["ids"])), results_of)
