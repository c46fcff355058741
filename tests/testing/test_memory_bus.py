"""A bus in memory: what is due happens when the test moves the clock, and everything else at once."""

import asyncio
import threading
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import escrowmq as mq
from escrowmq import testing
from escrowmq.testing import buses


def keys(messages: list) -> list[str | None]:
    return [message.key for message in messages]


def take(consumer: mq.Consumer) -> list[mq.Received]:
    """Everything that is there now."""
    return list(consumer.messages(idle_timeout=0))


def test_a_bus_in_memory_is_a_bus() -> None:
    with testing.memory_bus() as bus:
        assert isinstance(bus, mq.Bus)
        shop, cart = bus.producer("shop"), bus.consumer("cart", "orders")
        shop.send("orders", b"one", key="o-1")
        shop.send_batch([mq.Message("orders", b"two", key="o-2"), mq.Message("orders", b"three", key="o-3")])
        assert keys(bus.sent("orders")) == ["o-1", "o-2", "o-3"]
        received = take(cart)
        assert sorted(keys(received)) == ["o-1", "o-2", "o-3"]
        for message in received:
            if message.key != "o-2":
                message.ack()
        cart.flush()
        assert sorted(keys(bus.acknowledged("cart"))) == ["o-1", "o-3"]
        assert bus.sent("nothing") == bus.acknowledged("nobody") == bus.dead_letters("nobody") == []


def test_check_backs_are_answered_when_the_clock_moves() -> None:
    with testing.memory_bus() as bus:
        asked = []

        def decide(check: mq.Check) -> mq.Outcome:
            asked.append(bus.clock.now() - begun)
            return mq.COMMIT if len(asked) == 3 else mq.UNKNOWN

        shop = bus.producer("shop", checker=decide)
        begun = bus.clock.now()
        shop.prepare("orders", b"one", key="o-1")
        bus.clock.advance(5.9)
        assert asked == []
        bus.clock.advance(1000)
        assert asked == [timedelta(seconds=seconds) for seconds in (6, 36, 66)]
        assert keys(bus.sent("orders")) == ["o-1"]
        assert bus.clock.now() - begun == timedelta(seconds=1005.9)


def test_delays_leases_and_retries_follow_the_clock() -> None:
    with testing.memory_bus(lease_seconds=20) as bus:
        shop = bus.producer("shop")
        cart = bus.consumer("cart", "orders", max_attempts=3, redelivery=[5, 7])
        shop.send("orders", b"", key="late", delay=10)
        assert take(cart) == bus.sent("orders") == []
        bus.clock.advance(10)
        (first,) = take(cart)
        assert (first.key, first.attempt) == ("late", 1)
        bus.clock.advance(20)  # its lease expires, and a pause of 5 seconds begins
        assert take(cart) == []
        bus.clock.advance(5)
        (second,) = take(cart)
        assert second.attempt == 2
        second.nack(cause="no")
        bus.clock.advance(6.5)
        assert take(cart) == []
        bus.clock.advance(1)
        (third,) = take(cart)
        assert third.attempt == 3
        third.nack(cause="still no")
        cart.flush()
        assert keys(bus.dead_letters("cart")) == ["late"]
        (dead,) = bus.admin.dead_letters("cart")
        assert dead["cause"].startswith("still no")


def test_a_consumer_that_waits_gets_what_another_thread_sends() -> None:
    with testing.memory_bus() as bus:
        cart, got = bus.consumer("cart", "orders"), []

        def work() -> None:
            for message in cart:
                got.append(message.key)
                message.ack()
                if len(got) == 20:
                    return

        thread = threading.Thread(target=work)
        thread.start()
        shop = bus.producer("shop")
        for number in range(20):
            shop.send("orders", b"", key=str(number))
        thread.join()
        assert sorted(got, key=int) == [str(number) for number in range(20)]


def test_a_receive_waits_in_real_time() -> None:
    with testing.memory_bus() as bus:
        cart = bus.consumer("cart", "orders")
        assert cart.receive(1, wait=0.01) == []
        with bus.reader("%half") as reader:
            assert list(reader.batches(idle_timeout=0.01)) == []


def test_a_checker_that_raises_is_asked_again() -> None:
    with testing.memory_bus() as bus:
        answers = iter([RuntimeError("no database"), mq.ROLLBACK])

        def decide(check: mq.Check) -> mq.Outcome:
            answer = next(answers)
            if isinstance(answer, Exception):
                raise answer
            return answer

        shop = bus.producer("shop", checker=decide)
        receipt = shop.prepare("orders", b"one")
        bus.clock.advance(6)
        assert bus.admin.transaction(receipt.transaction_id)["state"] == "open"
        bus.clock.advance(30)
        assert bus.admin.transaction(receipt.transaction_id)["state"] == "rolled_back"


def test_the_clock_does_not_step_back() -> None:
    with testing.memory_bus() as bus, pytest.raises(ValueError, match="never steps back"):
        bus.clock.advance(-1)


def test_settings_are_those_of_a_broker() -> None:
    with pytest.raises(mq.Misuse, match="lease_seconds"), testing.memory_bus(lease_second=1):
        pass


async def test_the_same_with_asyncio() -> None:
    async with testing.amemory_bus() as bus:
        assert isinstance(bus, mq.AsyncBus)

        async def decide(check: mq.Check) -> mq.Outcome:
            await asyncio.sleep(0)
            return mq.COMMIT

        shop = bus.producer("shop", checker=decide)
        await shop.prepare("orders", b"half", key="o-1")
        await shop.rollback((await shop.prepare("orders", b"no", key="o-2")).transaction_id)
        assert await bus.sent("orders") == []
        await bus.clock.advance(6)
        assert keys(await bus.sent("orders")) == ["o-1"]
        cart = await bus.consumer("cart", "orders", max_attempts=1)
        async for message in cart.messages(idle_timeout=0):
            await message.nack(cause="no")
        await cart.flush()
        assert keys(await bus.dead_letters("cart")) == ["o-1"]
        assert await bus.acknowledged("cart") == []


@settings(max_examples=15)
@given(st.lists(st.floats(0, 500), min_size=1, max_size=6))
def test_one_move_is_as_good_as_many(steps: list[float]) -> None:
    """What has happened, and when, does not depend on the steps in which a test moves the clock."""

    def happened(moves: list[float]) -> list[tuple[str | None, timedelta]]:
        events: list[tuple[str | None, timedelta]] = []
        with testing.memory_bus(transaction_timeout=11, check_interval=40) as bus:
            begun = bus.clock.now()

            def decide(check: mq.Check) -> mq.Outcome:
                events.append((check.messages[0].key, bus.clock.now() - begun))
                return mq.UNKNOWN if check.attempt < 3 else mq.COMMIT

            shop = bus.producer("shop", checker=decide)
            for key, immunity in (("a", 3.0), ("b", 30.0)):
                shop.prepare("orders", b"", key=key, check_immunity=immunity)
            for move in moves:
                bus.clock.advance(move)
            return sorted(events)

    assert happened(steps) == happened([sum(timedelta(seconds=step).total_seconds() for step in steps)])


def test_receives_of_one_consumer_are_answered_in_their_order() -> None:
    """However many it has sent ahead, and whoever serves them."""
    with testing.memory_bus() as bus:
        shop, cart = bus.producer("shop"), bus.consumer("cart", "orders", ordered=True, prefetch=4, max_bytes=1)

        def send() -> None:
            for number in range(60):
                shop.send("orders", b"", key="o-1", tag=str(number))

        thread = threading.Thread(target=send)
        thread.start()
        got = []
        for message in cart:
            got.append(int(message.tag or ""))
            message.ack()
            if len(got) == 60:
                break
        thread.join()
        assert got == list(range(60))


def test_a_checker_that_waits_for_the_test_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buses, "PATIENCE", 0.1)
    may_answer = threading.Event()
    with testing.memory_bus() as bus:

        def decide(check: mq.Check) -> mq.Outcome:
            may_answer.wait()
            return mq.COMMIT

        bus.producer("shop", checker=decide).prepare("orders", b"one", key="o-1")
        with pytest.raises(mq.Unknown, match="1 checks are unanswered"):
            bus.clock.advance(6)
        may_answer.set()
        monkeypatch.undo()
        bus.clock.advance(0)
        assert keys(bus.sent("orders")) == ["o-1"]
