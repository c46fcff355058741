"""What the gateway keeps in memory for clients that do not read, and for callers that are gone."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest

import escrowmq as mq
from escrowmq.gateway.core import Gateway
from escrowmq.gateway.limits import GatewaySettings
from escrowmq.gateway.rocketmq.clients import MAX_COMMAND_BYTES, Clients, Stream, complete_settings
from escrowmq.gateway.rocketmq.protocol import definition
from escrowmq.gateway.rocketmq.statuses import Refusal


@pytest.fixture
def clients() -> Clients:
    return Clients(30.0, lambda given: complete_settings(given, fifo=False))


@pytest.fixture
def run(broker: str, clients: Clients) -> Callable[[Callable[[Gateway], Any]], Any]:
    """Run a coroutine function with a gateway, which is closed after it and given to nobody else."""

    def work(body: Callable[[Gateway], Any]) -> Any:
        async def main() -> Any:
            gateway = Gateway(await mq.aconnect(broker), GatewaySettings(), {})
            try:
                return await body(gateway)
            finally:
                await gateway.close()

        return asyncio.run(main())

    return work


def test_answers_to_a_client_that_reads_nothing_are_bounded_in_bytes(clients: Clients, run: Any) -> None:
    settings = definition.Settings(client_type=definition.PRODUCER, user_agent={"hostname": "x" * (3 << 20)})

    async def body(gateway: Gateway) -> None:
        stream = clients.enter(gateway, "silent")
        for _ in range(MAX_COMMAND_BYTES // (3 << 20)):
            clients.learn(stream, settings)
        with pytest.raises(Refusal, match="does not read"):
            clients.learn(stream, settings)
        while stream.waiting:
            await stream.take()
        clients.learn(stream, settings)
        clients.leave(stream)
        other: Stream = clients.enter(gateway, "another")
        assert other.put(settings=definition.Settings())
        clients.leave(other)

    run(body)


def test_a_closed_gateway_of_a_token_leaves_memory_with_its_producers(clients: Clients, run: Any, topic: str) -> None:
    async def body(gateway: Gateway) -> Any:
        clients.transactional(gateway, topic)
        clients.plain(gateway)
        return ref(gateway)

    known = run(body)
    gc.collect()
    assert known() is None
