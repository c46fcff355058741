"""Handlers on a bus in memory: a test calls them, moves the clock, and asserts what became of the messages."""

from typing import Any

import escrowmq as mq
from escrowmq import testing
from escrowmq.handlers import App, Discard, Retry


def cart() -> App:
    app = App()

    @app.handler("orders", group="cart", max_attempts=2)
    def handle(body: str, message: mq.Received) -> None:
        if body == "nonsense":
            raise Discard("no order")
        if body == "early" and message.attempt == 1:
            raise Retry(after=5)

    return app


def outcomes(handled: list[Any]) -> list[tuple[str | None, str]]:
    return sorted((one.message.key, one.outcome) for one in handled)


def test_a_test_sees_what_became_of_each_message() -> None:
    with testing.memory_bus() as bus:
        producer, app = bus.producer("shop"), cart()
        for number, body in enumerate((b"fine", b"nonsense", b"early")):
            producer.send("orders", body, key=f"o-{number}")
        assert outcomes(app.run_available(bus)) == [("o-0", "acked"), ("o-1", "dead"), ("o-2", "retried")]
        assert [message.key for message in bus.acknowledged("cart")] == ["o-0"]
        assert [message.key for message in bus.dead_letters("cart")] == ["o-1"]
        assert app.run_available(bus) == []
        bus.clock.advance(5)
        assert outcomes(app.run_available(bus)) == [("o-2", "acked")]


async def test_the_same_with_asyncio() -> None:
    async with testing.amemory_bus() as bus:
        await bus.producer("shop").send("orders", b"early", key="o-1")
        app = cart()
        assert outcomes(await app.arun_available(bus)) == [("o-1", "retried")]
        await bus.clock.advance(5)
        assert outcomes(await app.arun_available(bus)) == [("o-1", "acked")]
