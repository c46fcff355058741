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
    return Topics(
        topics=[
            Topic(
                name=row["name"],
                broker=row["broker"],
                queues=[Queue(queue=one["queue"], head=one["head"], end=one["end"]) for one in row["queues"]],
            )
            for row in rows
        ]
    )


@health_router.get("/healthz")
async def healthz(request: Request, response: Response) -> Health:
    """Whether every broker takes messages."""
    rows = await gateway_of(request).health()
    well = all(row["status"] == "ok" for row in rows)
    response.status_code = 200 if well else 503
    brokers = [BrokerHealth(broker=row["broker"], status=row["status"], reason=row["reason"]) for row in rows]
    return Health(status="ok" if well else "not ok", brokers=brokers)


def _found(row: Mapping[str, Any]) -> Found:
    return Found(
        topic=row["topic"],
        queue=row["queue"],
        offset=row["offset"],
        position=row["position"],
        message_id=row["message_id"],
        key=row["key"],
        tag=row["tag"],
        properties=row["properties"],
        body=base64.b64encode(row["body"]).decode(),
        state=row["state"],
        visible=row["visible"],
        transaction_id=row["transaction"],
        born_us=row["born_us"],
        stored_us=row["stored_us"],
    )
