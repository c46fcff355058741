"""The HTTP paths of the gateway, one module per subject."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import Request, Response

from escrowmq.errors import Code, EscrowError, Rejected, error
from escrowmq.gateway.callers import Callers
from escrowmq.gateway.core import Gateway
from escrowmq.gateway.problems import SOME_REFUSED


def gateway_of(request: Request) -> Gateway:
    """Return the gateway that serves a request, with its caller's rights."""
    found: Gateway = request.state.gateway
    return found


async def choose_gateway(request: Request) -> AsyncIterator[None]:
    """Provide the gateway of the request's token while the request lasts."""
    callers: Callers = request.app.state.callers
    authorization = request.headers.get("authorization", "")
    source = request.client.host if request.client is not None else ""
    key, gateway = await callers.enter(authorization, source)
    request.state.gateway = gateway
    problem: BaseException | None = None
    try:
        yield
    except BaseException as raised:
        problem = raised
        raise
    finally:
        await callers.leave(key, gateway, source, problem)
        if isinstance(problem, EscrowError) and problem.code is Code.CLOSED:  # by the broker: is the token the reason?
            await callers.leave(*await callers.enter(authorization, source), source, None)


def check_count(request: Request, items: Sequence[Any]) -> None:
    """Raise Rejected(BATCH_TOO_LARGE) for more items than one request may have."""
    most = gateway_of(request).settings.max_messages
    if len(items) > most:
        raise Rejected(Code.BATCH_TOO_LARGE, f"{len(items)} at a time; the limit is {most}", "ask for fewer at a time")


def count_refused(response: Response, results: Sequence[Any]) -> int:
    """Count the results that are problems; set the response's status to 207 if there are any. Raises
    Denied(UNAUTHENTICATED) if all of them are that: the token is wrong, not the items."""
    problems = [result.problem.name for result in results if result.problem is not None]
    if len(problems) == len(results) and set(problems) == {Code.UNAUTHENTICATED.name}:
        raise error(Code.UNAUTHENTICATED)
    if problems:
        response.status_code = SOME_REFUSED
    return len(problems)


@asynccontextmanager
async def watch_disconnect(request: Request) -> AsyncIterator[asyncio.Task[None]]:
    """Provide a task that completes when the client disconnects."""

    async def until_gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task = asyncio.create_task(until_gone())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
