"""The paths of the gateway, one module per subject."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import Request, Response

from escrowmq.errors import Code, Rejected
from escrowmq.gateway.core import Gateway
from escrowmq.gateway.problems import SOME_REFUSED


def gateway_of(request: Request) -> Gateway:
    """Return the gateway that serves a request."""
    found: Gateway = request.app.state.gateway
    return found


def check_count(request: Request, items: Sequence[Any]) -> None:
    """Rejected(BATCH_TOO_LARGE) for more items than one request may have."""
    most = gateway_of(request).settings.max_messages
    if len(items) > most:
        raise Rejected(Code.BATCH_TOO_LARGE, f"{len(items)} at a time; the limit is {most}", "ask for fewer at a time")


def some_refused(response: Response, results: Sequence[Any]) -> int:
    """Return how many of these results are problems; the response's status is 207 if any is."""
    refused = sum(result.problem is not None for result in results)
    response.status_code = SOME_REFUSED if refused else 200
    return refused


@asynccontextmanager
async def leaving(request: Request) -> AsyncIterator[asyncio.Task[None]]:
    """Yield a task that ends when the client leaves."""

    async def until_gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task = asyncio.create_task(until_gone())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
