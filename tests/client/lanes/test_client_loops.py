"""Lanes of an event loop: a link that the loop drives needs no thread that sends, and may be answered from anywhere."""

from __future__ import annotations

import asyncio
import threading

import pytest

import escrowmq as mq
from escrowmq.client.aio import AsyncBus
from escrowmq.testing.link import TwinLink
from escrowmq.wire import Exchange, LoopLink


class Driven(TwinLink):
    """A twin that an event loop drives: it answers on the loop, or on a thread. ``threads``: those that sent a
    parcel."""

    def __init__(self, answers="loop"):
        super().__init__()
        self.answers, self.loop, self.threads, self.rows = answers, None, set(), []

    def attach(self, loop):
        assert self.loop is None
        self.loop = loop

    def parcel(self, parcel, done):
        self.threads.add(threading.get_ident())
        self.rows.append(len(parcel.rows))

        def answer():
            TwinLink.parcel(self, parcel, done)

        if self.answers == "at once":
            answer()
        elif self.answers == "loop":
            self.loop.call_soon_threadsafe(answer)
        else:
            threading.Thread(target=answer).start()


def senders():
    return [thread for thread in threading.enumerate() if thread.name == "escrowmq-sender"]


def test_only_links_with_attach_are_driven_by_the_loop():
    assert isinstance(Driven(), LoopLink)
    assert not isinstance(TwinLink(), LoopLink)


@pytest.mark.parametrize("answers", ["at once", "loop", "thread"])
async def test_a_driven_link_is_used_on_the_loop_itself(answers):
    twin, before = Driven(answers), senders()
    async with AsyncBus([twin]) as bus:
        assert set(senders()) <= set(before)
        producer = bus.producer("p", checker=lambda check: mq.UNKNOWN)

        async def one(number):
            async with producer.transaction() as txn:
                await txn.send("t", b"%d" % number)

        await one(0)
        twin.rows.clear()
        await asyncio.gather(*(one(number) for number in range(1, 50)))
        assert twin.threads == {threading.get_ident()}
        assert max(twin.rows) == 49, "callers of one turn of the loop share a request"
    assert sorted(row["body"] for row in twin.topics["t"]) == sorted(b"%d" % number for number in range(50))


async def test_errors_and_losses_reach_the_caller_on_a_driven_link():
    twin = Driven()
    async with AsyncBus([twin]) as bus:
        producer = bus.producer("p")
        await producer.send("t", b"0")
        twin.lose(Exchange.SEND, applied=True, times=2)
        assert (await producer.send("t", b"1")).offset == 1
        twin.refuse(Exchange.SEND, mq.Overloaded(mq.Code.QUEUE_FULL))
        with pytest.raises(mq.Overloaded):
            await producer.send("t", b"2")
        with pytest.raises(mq.Rejected, match="BODY_TOO_LARGE"):
            await producer.send("t", b"x" * (5 << 20))
        with pytest.raises(TypeError):
            await producer.send("t", b"x", transaction=b"0" * 16)
    assert [row["body"] for row in twin.topics["t"]] == [b"0", b"1"]


async def test_a_caller_that_was_cancelled_holds_up_nobody():
    twin = Driven()
    async with AsyncBus([twin]) as bus:
        producer = bus.producer("p")
        await producer.send("t", b"0")
        twin.hold(Exchange.SEND)
        first, second = (asyncio.create_task(producer.send("t", body)) for body in (b"1", b"2"))
        while len(twin.seen(Exchange.SEND)) < 2:
            await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        twin.release(Exchange.SEND)
        assert (await second).offset == 2


async def test_what_is_sent_on_the_loop_leaves_when_the_coroutine_of_a_call_runs():
    """``send`` stays a coroutine: it can be made into a task, and does nothing before it runs."""
    twin = Driven()
    async with AsyncBus([twin]) as bus:
        producer = bus.producer("p")
        await producer.send("t", b"0")
        call = producer.send("t", b"1")
        assert asyncio.iscoroutine(call)
        await asyncio.create_task(call)
        assert len(twin.topics["t"]) == 2
