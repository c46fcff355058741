"""Handles the messages that can be received now, in the calling thread or task: for tests and for commands that end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from escrowmq.client.consuming.received import LeasedRows
from escrowmq.client.lanes.blocking import finished
from escrowmq.handlers.handler import Handler
from escrowmq.handlers.outcomes import Handled
from escrowmq.handlers.running import make_work
from escrowmq.handlers.working import Work


async def handle_available(handlers: Sequence[Handler], bus: Any, *, is_loop: bool) -> list[Handled]:
    """Handle messages until no handler receives any, those that handlers send included. Returns one result per message,
    in the order of handling. On an event loop if ``is_loop``; otherwise coroutine functions run on one of their own."""
    results: list[Handled] = []
    works: list[Work] = []
    with ExitStack() as stack:
        runner = None if is_loop else stack.enter_context(asyncio.Runner())
        try:
            for handler in handlers:
                works.append(await make_work(handler, bus, results.append, lambda problem: None, is_loop))
            while sum([await _take(work, runner) for work in works]):
                pass
        finally:
            for work in works:
                work.close()
                for consumer in work.consumers:
                    await consumer._close()
    return [single for result in results for single in _split(result)]


async def _take(work: Work, runner: asyncio.Runner | None) -> int:
    """Handle what one receive of a handler brings. Returns how many messages that were."""
    consumer, choices = work.consumers[0], work.handler.choices
    consumption = consumer._consumption
    taken = 0
    for number, batch in await consumption.receive_once(choices.receive if choices.batch else 1, 0.0):
        if not batch.num_rows:
            continue
        if consumption.order is not None:
            consumption.order.add(number, batch)
        received = consumer._batch(LeasedRows(number, batch, consumption))
        for one in [received] if choices.batch else list(received):
            if runner is not None and work.handler.awaits:
                runner.run(work.handle(one))
            else:
                await work.handle(one)
            taken += len(one) if choices.batch else 1
    for lane in consumption.lanes:
        await consumption.waiting.away(lane.drain, consumption.timeout)
    return taken


def _split(result: Handled) -> list[Handled]:
    if not hasattr(result.message, "arrow"):
        return [result]
    return [Handled(result.handler, one, result.outcome, result.seconds, result.error) for one in result.message]


def handle_available_blocking(handlers: Sequence[Handler], bus: Any) -> list[Handled]:
    """As :func:`handle_available`, over a blocking bus."""
    return finished(handle_available(handlers, bus, is_loop=False))
