"""Looking things up: messages by id or key, topics, health."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from escrowmq.gateway.models import BrokerHealth, Found, FoundMessages, Health, Queue, Topic, Topics
from escrowmq.gateway.routes import gateway_of
from escrowmq.message.names import MAX_NAME

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
    """Messages by id or by key, newest first; half messages are found too, with their transaction's state."""
    gateway = gateway_of(request)
    find = gateway.admin.lookup
    found = await gateway.on_thread(find, message_id=message_id, key=key, topic=topic, limit=limit)
    return FoundMessages(messages=[_found(row) for row in found[:limit]])


@router.get("/topics")
async def topics(request: Request) -> Topics:
    """All topics, with the offsets that are stored."""
    gateway = gateway_of(request)
    rows = await gateway.on_thread(gateway.admin.topics)
    queues = [[Queue.of_row(queue) for queue in row["queues"]] for row in rows]
    return Topics(topics=[Topic.of_row(row, queues=each) for row, each in zip(rows, queues, strict=True)])


@health_router.get("/healthz")
async def healthz(request: Request, response: Response) -> Health:
    """Whether every broker takes messages."""
    rows = await gateway_of(request).health()
    well = all(row["status"] == "ok" for row in rows)
    response.status_code = 200 if well else 503
    return Health(status="ok" if well else "not ok", brokers=[BrokerHealth.of_row(row) for row in rows])


def _found(row: Mapping[str, Any]) -> Found:
    return Found.of_row(row, body=base64.b64encode(row["body"]).decode(), transaction_id=row["transaction"])
