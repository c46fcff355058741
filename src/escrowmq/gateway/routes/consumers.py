"""HTTP routes to receive, acknowledge, return and extend messages, each identified by a handle."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

from fastapi import APIRouter, Request, Response

from escrowmq.client.consuming.delivery import Rows
from escrowmq.client.consuming.options import ConsumerOptions, cause_text, delay_us, subscription
from escrowmq.errors import Code, EscrowError, Misuse
from escrowmq.gateway.models import (
    Delivered,
    DeliveredMessages,
    ExtendIn,
    HandlesIn,
    NackIn,
    ReceiveIn,
    SettleResult,
    SettleResults,
)
from escrowmq.gateway.problems import to_problem
from escrowmq.gateway.routes import check_count, count_refused, gateway_of, watch_disconnect
from escrowmq.gateway.settling import LeaseHandle
from escrowmq.message.names import check_name
from escrowmq.model import Act, TransactionId

EVENTS_TYPE = "application/cloudevents-batch+json"

router = APIRouter(prefix="/consumers/{group}", tags=["consumers"])


@router.post(
    "/receive",
    response_model=DeliveredMessages,
    responses={200: {"content": {EVENTS_TYPE: {"schema": {"type": "array", "items": {"type": "object"}}}}}},
)
async def receive(group: str, body: ReceiveIn, request: Request) -> DeliveredMessages | Response:
    """Lease messages, waiting up to ``wait`` seconds. Messages not settled within the lease are redelivered.

    With ``Accept: application/cloudevents-batch+json`` they are CloudEvents with the attributes ``escrowhandle`` and
    ``escrowattempt``.
    """
    as_events = EVENTS_TYPE in request.headers.get("accept", "")
    if as_events:
        from escrowmq import cloudevents  # noqa: F401  # raises without the extra, before anything is leased
    gateway = gateway_of(request)
    check_name(group, Code.BAD_GROUP_NAME)
    if body.topics is not None:
        options = ConsumerOptions(
            tags=body.tags,
            ordered=body.ordered,
            start=body.start,
            max_attempts=body.max_attempts,
            retry_backoff=body.retry_backoff,
            retry_backoff_max=body.retry_backoff_max,
            redelivery=body.redelivery,
        )
        await gateway.subscribe(subscription(group, body.topics, options))
    wanted = min(body.max_messages, gateway.settings.max_messages)
    lease_ms = None if body.lease is None else max(round(body.lease * 1000), 1)
    async with watch_disconnect(request) as gone:
        wait = min(body.wait, gateway.settings.max_wait)
        received = await gateway.receiving.receive(group, wanted, wait, lease_ms, gone)
        if received is None:
            return Response(b"[]", media_type=EVENTS_TYPE) if as_events else DeliveredMessages(messages=[])
        number, batch = received
        try:
            shard = await gateway.shard(number)
            rows = Rows(number, batch)
            answer = _to_events(rows, shard) if as_events else _to_deliveries(rows, shard, body.as_text)
        except BaseException:
            gateway.settler.give_back(number, group, batch)
            raise
        if gone.done():
            gateway.settler.give_back(number, group, batch)
        return answer


@router.post("/ack")
async def ack(group: str, body: HandlesIn, request: Request, response: Response) -> SettleResults:
    """Acknowledge messages: the group has processed them. Repeating is harmless."""
    return await _settle(group, body, Act.ACK, 0, None, request, response)


@router.post("/nack")
async def nack(group: str, body: NackIn, request: Request, response: Response) -> SettleResults:
    """Return messages for redelivery after ``delay`` or the group's back-off; finally they become dead letters."""
    return await _settle(group, body, Act.NACK, delay_us(body.delay), cause_text(body.cause), request, response)


@router.post("/extend")
async def extend(group: str, body: ExtendIn, request: Request, response: Response) -> SettleResults:
    """Extend the lease to ``seconds`` from now."""
    return await _settle(group, body, Act.EXTEND, delay_us(body.seconds), None, request, response)


async def _settle(
    group: str, body: HandlesIn, act: Act, delay: int, cause: str | None, request: Request, response: Response
) -> SettleResults:
    check_count(request, body.handles)
    outcomes = await gateway_of(request).settler.settle(group, body.handles, act, delay, cause)
    results = [
        SettleResult(handle=text, problem=to_problem(outcome) if isinstance(outcome, EscrowError) else None)
        for text, outcome in zip(body.handles, outcomes, strict=True)
    ]
    if len(outcomes) == 1 and isinstance(outcomes[0], EscrowError):
        raise outcomes[0]
    return SettleResults(results=results, refused=count_refused(response, results))


def _each(rows: Rows) -> Iterator[dict[str, Any]]:
    names = rows.batch.schema.names
    for row in zip(*(rows.list(name) for name in names), strict=True):
        yield dict(zip(names, row, strict=True))


def _to_deliveries(rows: Rows, shard: int, as_text: bool) -> DeliveredMessages | Response:
    return DeliveredMessages(messages=[_to_delivery(row, shard, as_text) for row in _each(rows)])


def _to_events(rows: Rows, shard: int) -> DeliveredMessages | Response:
    from escrowmq import cloudevents

    events: list[bytes] = []
    for row in _each(rows):
        born = datetime.fromtimestamp(row["born_us"] / 1e6, UTC)
        message = SimpleNamespace(**{**row, "properties": dict(row["properties"] or ()), "born": born})
        handle = str(LeaseHandle(shard, row["lease"], row["offset"]))
        more: dict[str, str | int] = {"escrowhandle": handle, "escrowattempt": row["attempt"]}
        try:
            made = cloudevents.to_json(cloudevents.from_message(message), **more)
        except (
            Misuse,
            RecursionError,
        ):  # it is delivered all the same, as no event
            message.properties = {}
            made = cloudevents.to_json(cloudevents.from_message(message), **more)
        events.append(made)
    return Response(b"[" + b",".join(events) + b"]", media_type=EVENTS_TYPE)


def _to_delivery(row: dict[str, Any], shard: int, as_text: bool) -> Delivered:
    text = _decode_text(row["body"]) if as_text else None
    transaction = row["transaction"]
    return Delivered.of_row(
        row,
        handle=str(LeaseHandle(shard, row["lease"], row["offset"])),
        properties=dict(row["properties"] or ()),
        body=None if text is not None else base64.b64encode(row["body"]).decode(),
        text=text,
        transaction_id=None if transaction is None else str(TransactionId.from_bytes(transaction)),
    )


def _decode_text(raw: bytes) -> str | None:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None
