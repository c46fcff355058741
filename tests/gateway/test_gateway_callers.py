"""The gateway's connections, one for each token: none is lost, whatever comes while it connects."""

import asyncio
import contextlib

import pytest

from escrowmq.client.aio import AsyncBus
from escrowmq.errors import Code, Overloaded, error
from escrowmq.gateway import callers as module
from escrowmq.gateway.callers import Callers
from escrowmq.gateway.limits import GatewaySettings
from escrowmq.testing.link import TwinLink


class Bus(AsyncBus):
    """A connection that knows whether it is open."""

    is_open = True

    async def close(self):
        self.is_open = False
        await super().close()


class Broker:
    """Connects while ``gate`` is open. ``made``: the connections by token."""

    def __init__(self):
        self.gate, self.made = asyncio.Event(), {}
        self.gate.set()

    async def connect(self, token):
        await self.gate.wait()
        if token == "wrong":
            raise error(Code.UNAUTHENTICATED)
        self.made.setdefault(token, []).append(bus := Bus([TwinLink()]))
        return bus

    def open(self):
        return [token for token, made in self.made.items() for bus in made if bus.is_open]


@pytest.fixture
async def broker():
    return Broker()


@pytest.fixture
async def callers(broker, monkeypatch):
    monkeypatch.setattr(module, "MOST_CALLERS", 2)
    made = Callers(broker.connect, GatewaySettings(), {}, Bus([TwinLink()]), has_credential=True)
    yield made
    await made.close()
    assert broker.open() == []


async def test_requests_with_a_token_share_a_connection(broker, callers):
    one, two = await callers.enter("Bearer a", "here"), await callers.enter("bearer a", "here")
    assert one == two
    assert broker.open() == ["a"]


async def test_a_request_that_is_cancelled_as_it_connects_loses_no_connection(broker, callers):
    broker.gate.clear()
    asking = asyncio.create_task(callers.enter("Bearer a", "here"))
    await asyncio.sleep(0)
    broker.gate.set()
    for _ in range(20):  # at each turn of the loop until it has connected
        if broker.made:
            break
        await asyncio.sleep(0)
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asking
    await callers.enter("Bearer a", "here")
    assert broker.open() == ["a"]


async def test_two_first_requests_of_a_token_share_a_connection_when_there_is_no_room(broker, callers):
    for token in "ab":
        await callers.leave(*await callers.enter(f"Bearer {token}", "here"), "here", None)
    (key, one), (_, two) = await asyncio.gather(callers.enter("Bearer c", "here"), callers.enter("Bearer c", "here"))
    assert one is two
    assert sorted(broker.open()) == ["b", "c"]
    await callers.leave(key, one, "here", error(Code.UNAUTHENTICATED))
    assert broker.open() == ["b"]


async def test_callers_with_requests_are_not_closed_for_others(broker, callers):
    for token in "ab":
        await callers.enter(f"Bearer {token}", "here")
    with pytest.raises(Overloaded):
        await callers.enter("Bearer c", "here")
    assert broker.open() == ["a", "b"]


async def test_a_wrong_token_is_asked_again(broker, callers):
    for _ in range(3):
        with pytest.raises(module.EscrowError) as caught:
            await callers.enter("Bearer wrong", "here")
        assert caught.value.code is Code.UNAUTHENTICATED
    await callers.enter("Bearer a", "here")
    await callers.enter("Bearer b", "here")
