"""HTTP routes for look-ups: messages by id or key, topics, health."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response

from escrowmq.client.links.answers import Listing
from escrowmq.client.reading.viewing import view_message
from escrowmq.gateway.callers import Callers
from escrowmq.gateway.models import (
    BrokerHealth,
    Found,
    FoundMessages,
    Health,
    MissingBroker,
    Queue,
    Topic,
    Topics,
    ViewedMessage,
)
from escrowmq.gateway.routes import gateway_of
from escrowmq.message.names import MAX_NAME
from escrowmq.model import StoredMessage

router = APIRouter(tags=["looking"])
health_router = APIRouter(tags=["looking"])

MOST_FOUND = 10
"""Messages of one look-up; each may have a body of several MiB."""


@router.get("/lookup")
async def lookup(
    request: Request,
    message_id: Annotated[str | None, Query(max_length=1024)] = None,
    key: Annotated[str | None, Query(max_length=4096)] = None,
    topic: Annotated[str | None, Query(max_length=MAX_NAME)] = None,
    limit: Annotated[int, Query(ge=1, le=MOST_FOUND)] = MOST_FOUND,
) -> FoundMessages:
    """Find messages by id or by key, newest first, including half messages with their transaction's state."""
    gateway = gateway_of(request)
    find = gateway.admin.lookup
    found = await gateway.on_thread(find, message_id=message_id, key=key, topic=topic, limit=limit)
    return FoundMessages(messages=[_to_found(row) for row in found[:limit]], missing=_missing(found))


@router.get("/view")
async def view(
    request: Request,
    topic: Annotated[str, Query(max_length=MAX_NAME)],
    id_or_key: Annotated[str, Query(max_length=4096)],
) -> ViewedMessage:
    """Return the message of a topic with an id, else the newest with a key: prepared, committed or plain, not rolled
    back or expired. 503 with `BROKER_AWAY` if it may be on an unreachable broker."""
    gateway = gateway_of(request)
    found = await gateway.on_thread(view_message, gateway.bus.router, topic, id_or_key, gateway.settings.timeout)
    return ViewedMessage(message=None if found is None else _view_to_found(found))


@router.get("/topics")
async def topics(request: Request) -> Topics:
    """List all topics with their stored offsets."""
    gateway = gateway_of(request)
    rows = await gateway.on_thread(gateway.admin.topics)
    queues = [[Queue.of_row(queue) for queue in row["queues"]] for row in rows]
    listed = [Topic.of_row(row, queues=each) for row, each in zip(rows, queues, strict=True)]
    return Topics(topics=listed, missing=_missing(rows))


@health_router.get("/healthz")
async def healthz(request: Request, response: Response) -> Health:
    """Report whether every broker accepts messages."""
    callers: Callers = request.app.state.callers
    rows = await callers.own.health()
    statuses = {row["status"] for row in rows}
    response.status_code = 200 if statuses <= {"ok", "damaged"} else 503
    status: Literal["ok", "damaged", "not ok"] = "damaged" if "damaged" in statuses else "ok"
    return Health(
        status="not ok" if response.status_code == 503 else status, brokers=[BrokerHealth.of_row(row) for row in rows]
    )


def _view_to_found(found: StoredMessage) -> Found:
    row = dataclasses.asdict(found)
    identity, transaction = found.message_id, found.transaction_id
    row["transaction"] = None if transaction is None else str(transaction)
    row["message_id"] = None if identity is None else identity.hex()
    return _to_found(row)


def _missing(listing: Listing[Any]) -> list[MissingBroker]:
    return [MissingBroker.of_row(one) for one in listing.missing]


def _to_found(row: Mapping[str, Any]) -> Found:
    body = None if row["body"] is None else base64.b64encode(row["body"]).decode()
    return Found.of_row(row, body=body, transaction_id=row["transaction"])
