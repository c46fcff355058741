"""HTTP routes for transactions: prepare, then commit or roll back by id, from any connection at any later time."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from escrowmq.client.producing.oneway import Confirm
from escrowmq.errors import Code, EscrowError, Rejected
from escrowmq.gateway.models import (
    Decided,
    DecisionResult,
    DecisionResults,
    DecisionsIn,
    ReceiptOut,
    TransactionIn,
    TransactionOut,
    TransactionResult,
    TransactionResults,
    TransactionsIn,
    TransactionState,
)
from escrowmq.gateway.problems import to_problem
from escrowmq.gateway.producers import outcomes_of
from escrowmq.gateway.routes import check_count, count_refused, gateway_of
from escrowmq.gateway.routes.messages import IdempotencyKey, idempotent_id, message
from escrowmq.model import COMMIT, ROLLBACK, Outcome, TransactionId

router = APIRouter(prefix="/groups/{group}/transactions", tags=["transactions"])

ACCEPTED = 202
_ACCEPTED: dict[int | str, dict[str, Any]] = {
    ACCEPTED: {
        "model": Decided,
        "description": "With `confirm=oneway`: the end is on its way; its answer is not waited for.",
    }
}
Confirmed = Annotated[
    Confirm,
    Query(
        description="`oneway`: 202 at once; whether the decision was taken is never told. `answered`: when it is "
        "durable."
    ),
]


@router.post("")
async def prepare(
    group: str, body: TransactionIn, request: Request, idempotency_key: IdempotencyKey = None
) -> TransactionOut:
    """Prepare the half messages of one transaction: they are durable and invisible when this responds.

    Then run the local transaction, and commit or roll back by the id. A retry with the same message ids (or
    Idempotency-Key) returns the same transaction.
    """
    check_count(request, body.messages)
    return await _prepare(group, body, request, idempotency_key, 0)


@router.post("/batch")
async def prepare_many(
    group: str, body: TransactionsIn, request: Request, response: Response, idempotency_key: IdempotencyKey = None
) -> TransactionResults:
    """Prepare several transactions; each has its own result."""
    check_count(request, [message for one in body.transactions for message in one.messages])
    first, calls = 0, []
    for one in body.transactions:
        calls.append(_prepare(group, one, request, idempotency_key, first))
        first += len(one.messages)
    results = [
        TransactionResult(problem=to_problem(outcome))
        if isinstance(outcome, EscrowError)
        else TransactionResult(transaction=outcome)
        for outcome in await outcomes_of(calls)
    ]
    return TransactionResults(results=results, refused=count_refused(response, results))


@router.post("/end")
async def end_many(group: str, body: DecisionsIn, request: Request, response: Response) -> DecisionResults:
    """End several transactions; each has its own result."""
    check_count(request, body.decisions)
    outcomes = await outcomes_of(
        _end(group, one.transaction_id, COMMIT if one.outcome == "commit" else ROLLBACK, request)
        for one in body.decisions
    )
    results = [
        DecisionResult(transaction_id=one.transaction_id, problem=to_problem(outcome))
        if isinstance(outcome, EscrowError)
        else DecisionResult(transaction_id=one.transaction_id, code=outcome.code)
        for one, outcome in zip(body.decisions, outcomes, strict=True)
    ]
    return DecisionResults(results=results, refused=count_refused(response, results))


@router.post("/{transaction_id}/commit", responses=_ACCEPTED)
async def commit(
    group: str, transaction_id: str, request: Request, response: Response, confirm: Confirmed = "answered"
) -> Decided:
    """Commit: all messages of the transaction become visible. Repeating is harmless; 409 if it was rolled back.

    A ``message_id`` chosen by the producer may replace the transaction's id. 202 with ``confirm=oneway``.
    """
    return await _end(group, transaction_id, COMMIT, request, confirm, response)


@router.post("/{transaction_id}/rollback", responses=_ACCEPTED)
async def rollback(
    group: str, transaction_id: str, request: Request, response: Response, confirm: Confirmed = "answered"
) -> Decided:
    """Roll back: the messages never become visible. Repeating is harmless; 409 if committed. 202 if oneway."""
    return await _end(group, transaction_id, ROLLBACK, request, confirm, response)


@router.get("/{transaction_id}")
async def show(group: str, transaction_id: str, request: Request) -> TransactionState:
    """Return the state of a transaction, named by its id or by its producer's own ``message_id``."""
    gateway = gateway_of(request)
    row = await gateway.transaction(await gateway.transaction_named(group, transaction_id))
    if row["group"] not in (group, None):  # None: decided long ago, and its group is no longer stored
        raise Rejected(Code.WRONG_GROUP)
    return TransactionState.of_row(row, transaction_id=row["id"], group=group)


async def _prepare(group: str, body: TransactionIn, request: Request, key: str | None, first: int) -> TransactionOut:
    join = None if body.transaction_id is None else TransactionId.parse(body.transaction_id)
    messages = [
        message(one.topic, one, idempotent_id(key, request, first + at)) for at, one in enumerate(body.messages)
    ]
    receipts = await gateway_of(request).producers.prepare(group, messages, join)
    return TransactionOut(
        transaction_id=str(receipts[0].transaction_id), messages=[ReceiptOut.of(receipt) for receipt in receipts]
    )


async def _end(
    group: str,
    text: str,
    outcome: Outcome,
    request: Request,
    confirm: Confirm = "answered",
    response: Response | None = None,
) -> Decided:
    gateway = gateway_of(request)
    identity = await gateway.transaction_named(group, text)
    code = await gateway.producers.end(group, identity, outcome, confirm)
    if code is Code.SENT and response is not None:
        response.status_code = ACCEPTED
    return Decided(transaction_id=str(identity), code=code.name)  # type: ignore[arg-type]  # one of the five
