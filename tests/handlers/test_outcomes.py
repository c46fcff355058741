"""What becomes of a message: by what its handler returns or raises."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import escrowmq as mq
from escrowmq import hooks
from escrowmq.errors import Misuse
from escrowmq.handlers import App, Discard, Handled, Retry
from escrowmq.message.limits import MAX_CAUSE


def outcomes(results: list[Handled]) -> dict[str, str]:
    return {result.message.body.decode(): result.outcome for result in results}


def define(app: App, kind: str, act: Callable[[str], None], **choices: Any) -> None:
    """A plain or a coroutine handler that does the same."""
    if kind == "plain":

        @app.handler("orders", group="g", **choices)
        def plain(body: str) -> None:
            act(body)
    else:

        @app.handler("orders", group="g", **choices)
        async def awaited(body: str) -> None:
            await asyncio.sleep(0)
            act(body)


def fail(body: str) -> None:
    if body == "bug":
        raise KeyError("sku")
    if body == "later":
        raise Retry("the warehouse is closed", after=3600)
    if body == "never":
        raise Discard("no such customer")
    if body == "exit":
        raise SystemExit(3)
    if body == "cancelled":
        raise asyncio.CancelledError


@pytest.mark.parametrize("kind", ["plain", "awaited"])
def test_outcomes(app: App, bus: mq.Bus, kind: str) -> None:
    define(app, kind, fail, retry_backoff=60.0, retry_backoff_max=60.0)
    producer = bus.producer("p")
    for body in ("fine", "bug", "later", "never", "exit", "cancelled"):
        producer.send("orders", body.encode())
    done = app.run_available(bus)
    assert outcomes(done) == {
        "fine": "acked",
        "bug": "retried",
        "later": "retried",
        "never": "dead",
        "exit": "retried",
        "cancelled": "retried",
    }
    assert {type(one.error) for one in done} == {
        type(None), KeyError, Retry, Discard, SystemExit, asyncio.CancelledError,
    }  # fmt: skip
    (dead,) = bus.admin.dead_letters("g")
    assert (dead["cause"], dead["attempts"]) == ("no such customer", 1)


def drain(app: App, bus: mq.Bus, count: int) -> list[Handled]:
    """Handle until there are ``count`` results, retries included."""
    done: list[Handled] = []
    while len(done) < count:
        done += app.run_available(bus)
    return done


def test_the_last_attempt_leaves_the_traceback(app: App, bus: mq.Bus) -> None:
    define(app, "plain", fail)
    bus.producer("p").send("orders", b"bug")
    done = drain(app, bus, 3)
    assert [one.outcome for one in done] == ["retried", "retried", "dead"]
    (dead,) = bus.admin.dead_letters("g")
    cause = dead["cause"]
    assert cause.startswith("KeyError: 'sku'\n")
    assert f'File "{__file__}", line ' in cause
    assert 'raise KeyError("sku")' in cause
    assert "escrowmq/handlers" not in cause.replace(str(Path(__file__).parent), "")
    assert cause.endswith("attempt 3 of 3")


def test_a_long_error_fits(app: App, bus: mq.Bus) -> None:
    def recurse(depth: int) -> None:
        if not depth:
            raise ValueError("x" * 5000)
        recurse(depth - 1)

    define(app, "plain", lambda body: recurse(50), max_attempts=1)
    bus.producer("p").send("orders", b"")
    assert [one.outcome for one in app.run_available(bus)] == ["dead"]
    (dead,) = bus.admin.dead_letters("g")
    head, _, rest = dead["cause"].partition("\n")
    assert head.startswith("ValueError: xxx")
    assert len(dead["cause"]) < MAX_CAUSE + 50
    assert 'raise ValueError("x" * 5000)' in rest, "the innermost frame is kept"


def test_an_undecodable_body_is_dead_at_once(app: App, bus: mq.Bus) -> None:
    seen = []

    @app.handler("orders", group="g")
    def handle(body: dict[str, int]) -> None:
        seen.append(body)

    for body in (b"{", b'{"a": "b"}', b'{"a": 1}'):
        bus.producer("p").send("orders", body)
    done = app.run_available(bus)
    assert [one.outcome for one in done].count("dead") == 2
    assert seen == [{"a": 1}]
    causes = sorted(dead["cause"] for dead in bus.admin.dead_letters("g"))
    assert causes[0].startswith("the body is no dict")
    assert "Expected `int`" in causes[1] or "Expected `int`" in causes[0]


def test_a_retry_checks_its_delay() -> None:
    for wrong in (-1, "soon", True):
        with pytest.raises(Misuse):
            Retry(after=wrong)  # type: ignore[arg-type]


def test_messages_that_handlers_send_are_handled_too(app: App, bus: mq.Bus) -> None:
    producer = bus.producer("p")

    @app.handler("orders", group="g")
    def first(body: bytes) -> None:
        producer.send("mails", b"mail of " + body)

    @app.handler("mails", group="h")
    async def second(body: bytes) -> None: ...

    producer.send("orders", b"o")
    assert [(one.handler, one.message.body) for one in app.run_available(bus)] == [
        ("first", b"o"),
        ("second", b"mail of o"),
    ]
    assert app.run_available(bus) == []


def test_batches(app: App, bus: mq.Bus) -> None:
    sizes = []

    @app.handler("orders", group="arrow", batch=2)
    def arrow(batch: pa.RecordBatch, received: mq.ReceivedBatch) -> None:
        sizes.append((batch.num_rows, len(received)))
        if b"bad" in batch.column("body").to_pylist():
            raise Discard("a bad batch")

    for body in (b"a", b"b", b"bad"):
        bus.producer("p").send("orders", body, queue=0)
    done = app.run_available(bus)
    assert sizes == [(2, 2), (1, 1)]
    assert outcomes(done) == {"a": "acked", "b": "acked", "bad": "dead"}
    assert [dead["cause"] for dead in bus.admin.dead_letters("arrow")] == ["a bad batch"]


class Mailer:
    pass


class Clock:
    pass


def test_dependencies_are_entered_and_left_around_each_message(app: App, bus: mq.Bus) -> None:
    seen: list[Any] = []

    @app.dependency(Mailer)
    @contextmanager
    def mailer() -> Iterator[Mailer]:
        seen.append("open")
        try:
            yield Mailer()
        finally:
            seen.append("close")

    @app.dependency(Clock)
    async def clock() -> AsyncIterator[Clock]:
        yield Clock()
        seen.append("clock closed")

    @app.handler("orders", group="plain")
    def plain(body: str, mailer: Mailer) -> None:
        seen.append(type(mailer))
        raise Discard("no")

    @app.handler("orders", group="awaited")
    async def awaited(body: str, clock: Clock, mailer: Mailer) -> None:
        seen.append((type(clock), type(mailer)))

    bus.producer("p").send("orders", b"x")
    app.run_available(bus)
    assert seen == ["open", Mailer, "close", "open", (Clock, Mailer), "close", "clock closed"]
    app.dependency(Mailer)(lambda: "replaced")
    seen.clear()
    bus.producer("p").send("orders", b"x")
    app.run_available(bus)
    assert seen[0] is str


def test_a_plain_handler_rejects_an_asynchronous_dependency(app: App, bus: mq.Bus) -> None:
    @app.dependency(Clock)
    async def clock() -> Clock:
        return Clock()

    @app.handler("orders", group="g")
    def plain(body: str, clock: Clock) -> None: ...

    bus.producer("p").send("orders", b"x")
    done = app.run_available(bus)  # again, on a machine that needs longer than the back-off
    assert {str(one.error) for one in done} == {str(done[0].error)}
    assert "the dependency Clock is asynchronous" in str(done[0].error)


@pytest.mark.parametrize("kind", ["plain", "awaited"])
def test_hooks_see_what_a_handler_raises(app: App, bus: mq.Bus, kind: str) -> None:
    calls: list[Any] = []

    @contextmanager
    def watch(call: hooks.Call) -> Iterator[None]:
        if call.operation != "handle":
            yield
            return
        try:
            yield
        except Exception as problem:
            calls.append((call.topic, call.messages[0].body, type(problem)))
            raise
        calls.append((call.topic, call.messages[0].body, None))

    define(app, kind, fail)
    for body in (b"fine", b"never"):
        bus.producer("p").send("orders", body, queue=0)
    remove = hooks.add(watch)
    try:
        app.run_available(bus)
    finally:
        remove()
    assert calls == [("orders", b"fine", None), ("orders", b"never", Discard)]


async def test_the_same_to_await(app: App, tmp_path: Path) -> None:
    define(app, "plain", fail, max_attempts=5)

    @app.handler("orders", group="awaited")
    async def awaited(body: str, message: mq.Received) -> None:
        fail(body)

    async with await mq.aconnect(f"file:{tmp_path / 'broker'}") as bus:
        producer = bus.producer("p")
        for body in ("fine", "never", "later"):
            await producer.send("orders", body.encode())
        done = await app.arun_available(bus)
        assert len(done) == 6
        assert outcomes(done) == {"fine": "acked", "never": "dead", "later": "retried"}
        for group in ("g", "awaited"):
            assert [dead["cause"] for dead in await bus.admin.dead_letters(group)] == ["no such customer"]


def test_a_consumer_rejects(bus: mq.Bus) -> None:
    producer = bus.producer("p")
    for body in (b"a", b"b", b"c"):
        producer.send("orders", body, queue=0)
    with bus.consumer("g", "orders") as consumer:
        first, *_ = consumer.receive(1, wait=60.0)
        first.reject("bad message")
        consumer.flush()
        for batch in consumer.batches(idle_timeout=60.0):
            batch.reject("bad batch")
            break
        consumer.flush()
    assert [(dead["cause"], dead["attempts"]) for dead in bus.admin.dead_letters("g")] == [
        ("bad message", 1), ("bad batch", 1), ("bad batch", 1),
    ]  # fmt: skip
