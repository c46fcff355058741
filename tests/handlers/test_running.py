"""Running handlers: threads and tasks, concurrency, order, leases, stopping, health."""

import asyncio
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import escrowmq as mq
from escrowmq.broker import embedded
from escrowmq.client.bus import Bus
from escrowmq.client.consuming import consumption
from escrowmq.errors import Code, Misuse, error
from escrowmq.handlers import App, Handled, working
from escrowmq.platform.clock import SystemClock
from escrowmq.testing.link import TwinLink


class Results:
    """Collects results; ``take`` waits for that many."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Handled] = queue.SimpleQueue()

    def __call__(self, handled: Handled) -> None:
        self._queue.put(handled)

    def take(self, count: int) -> list[Handled]:
        return [self._queue.get() for _ in range(count)]


def bodies(results: list[Handled]) -> set[bytes]:
    return {one.message.body for one in results}


def test_plain_and_awaited_handlers_over_a_blocking_bus(app: App, bus: mq.Bus) -> None:
    threads: dict[str, Any] = {}

    @app.handler("orders", group="plain")
    def plain(body: bytes) -> None:
        threads["plain"] = threading.current_thread()

    @app.handler("orders", group="awaited")
    async def awaited(body: bytes, message: mq.Received) -> None:
        threads["awaited"] = asyncio.get_running_loop()

    results = Results()
    with app.running(bus, on_handled=results) as running:
        bus.producer("p").send("orders", b"one")
        assert {one.handler for one in results.take(2)} == {"plain", "awaited"}
        assert running.health() == {"status": "ok"}
        assert not running.wait(0)
    assert threads["plain"] is not threading.main_thread()
    assert threads["awaited"].is_closed()
    bus.producer("p").send("orders", b"the bus goes on")


async def test_the_same_over_an_asynchronous_bus(app: App, tmp_path: Path) -> None:
    loops = []

    @app.handler("orders", group="plain")
    def plain(body: bytes) -> None: ...

    @app.handler("orders", group="awaited", concurrency=3)
    async def awaited(body: bytes) -> None:
        loops.append(asyncio.get_running_loop())

    results = Results()
    async with await mq.aconnect(f"file:{tmp_path / 'broker'}") as bus:
        async with app.running(bus, on_handled=results) as running:
            for number in range(5):
                await bus.producer("p").send("orders", b"%d" % number)
            done = await asyncio.to_thread(results.take, 10)
            assert running.health() == {"status": "ok"}
        await bus.producer("p").send("orders", b"the bus goes on")
    assert all(one.outcome == "acked" for one in done)
    assert set(loops) == {asyncio.get_running_loop()}


async def test_the_bus_decides_the_form(app: App, tmp_path: Path) -> None:
    @app.handler("orders", group="g")
    def plain(body: bytes) -> None: ...

    async with await mq.aconnect(f"file:{tmp_path / 'broker'}") as bus:
        with pytest.raises(Misuse, match=r"async with app\.running"), app.running(bus):
            pass
    with Bus([TwinLink()]) as blocking, pytest.raises(Misuse, match=r"with app\.running"):
        async with app.running(blocking):
            pass


def test_a_refused_subscription_is_raised_and_leaves_nothing_running(app: App, bus: mq.Bus) -> None:
    bus.consumer("g", "others").close()

    @app.handler("orders", group="fine")
    async def fine(body: bytes) -> None: ...

    @app.handler("orders", group="g")
    def plain(body: bytes) -> None: ...

    before = threading.active_count()
    with pytest.raises(mq.Rejected, match="SUBSCRIPTION_MISMATCH"), app.running(bus):
        pass
    assert not [one for one in threading.enumerate() if one.name == "escrowmq-handlers"]
    assert threading.active_count() <= before + 2, "a timer of the bus, at most"


@pytest.mark.parametrize("kind", ["plain", "awaited"])
def test_as_many_at_once_as_the_concurrency_says(app: App, bus: mq.Bus, kind: str) -> None:
    barrier = threading.Barrier(4)

    if kind == "plain":

        @app.handler("orders", group="g", concurrency=4)
        def plain(body: bytes) -> None:
            barrier.wait()
    else:

        @app.handler("orders", group="g", concurrency=4)
        async def awaited(body: bytes) -> None:
            await asyncio.to_thread(barrier.wait)

    results = Results()
    for number in range(8):
        bus.producer("p").send("orders", b"%d" % number)
    with app.running(bus, on_handled=results):
        assert len(bodies(results.take(8))) == 8


def test_messages_of_one_key_come_in_order_and_never_side_by_side(app: App, bus: mq.Bus) -> None:
    """Also after failures: the first delivery of each third message fails."""
    lock, inside, problems = threading.Lock(), set[str](), list[str]()
    seen: dict[str, list[int]] = {}

    @app.handler("orders", group="g", concurrency=4, ordered=True, max_attempts=50)
    def handle(number: int, message: mq.Received) -> None:
        key = message.key or ""
        with lock:
            if key in inside:
                problems.append(f"{key} side by side at {number}")
            inside.add(key)
        try:
            threading.Event().wait(0.001)
            if number % 3 == 0 and message.attempt == 1:
                raise ValueError(number)
            seen.setdefault(key, []).append(number)
        finally:
            with lock:
                inside.discard(key)

    results = Results()
    producer = bus.producer("p")
    for number in range(60):
        producer.send("orders", b"%d" % number, key=f"k{number % 6}")
    with app.running(bus, on_handled=results):
        done = 0
        while done < 60:
            done += results.take(1)[0].outcome == "acked"
    assert problems == []
    for key, numbers in seen.items():
        assert numbers == sorted(numbers), key
    assert sorted(number for numbers in seen.values() for number in numbers) == list(range(60))


LEASE = 600.0


class Clock(SystemClock):
    """The broker's clock, which a test moves on."""

    ahead_us = 0

    def now_us(self) -> int:
        return super().now_us() + self.ahead_us


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the broker that the fixture ``bus`` opens: ask for it first. Leases are extended all the time."""
    made = Clock()
    monkeypatch.setattr(embedded, "SystemClock", lambda: made)
    monkeypatch.setattr(working, "EXTENSIONS", LEASE / 0.02)
    return made


@pytest.mark.parametrize("kind", ["plain", "awaited"])
def test_a_handler_that_needs_longer_than_the_lease_runs_once(
    app: App, clock: Clock, bus: mq.Bus, kind: str, eventually: Callable[..., Any]
) -> None:
    """Another consumer of the group sees nothing of it, although several leases pass."""
    begun: list[bytes] = []
    finish = threading.Event()

    if kind == "plain":

        @app.handler("orders", group="g", lease=LEASE)
        def plain(body: bytes) -> None:
            begun.append(body)
            finish.wait()
    else:

        @app.handler("orders", group="g", lease=LEASE)
        async def awaited(body: bytes) -> None:
            begun.append(body)
            await asyncio.to_thread(finish.wait)

    results = Results()
    bus.producer("p").send("orders", b"slow")

    def end_us() -> int:
        """When the lease ends, as it is now."""
        return max(held["deadline_us"] for member in bus.admin.members("g") for held in member["held"])

    came = []
    with app.running(bus, on_handled=results), bus.consumer("g", "orders", lease=LEASE) as other:
        while not begun:
            threading.Event().wait(0.01)
        for _ in range(9):
            clock.ahead_us += round(LEASE / 3 * 1e6)
            extended_us = clock.now_us() + round(0.9 * LEASE * 1e6)
            eventually(lambda least=extended_us: end_us() >= least, 60.0)
            came += other.receive(1)
        finish.set()
        (done,) = results.take(1)
    assert came == []
    assert (begun, done.outcome, done.message.attempt) == ([b"slow"], "acked", 1)


def test_messages_behind_a_slow_one_go_to_another_process(
    app: App, bus: mq.Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits here for a part of a lease goes back, its attempt not counted. The part is small here, so that the
    lease can be long."""
    assert consumption.KEPT < 1
    monkeypatch.setattr(consumption, "KEPT", 0.3 / LEASE)
    monkeypatch.setattr(working, "EXTENSIONS", LEASE / 0.1)
    begun, finish = threading.Event(), threading.Event()

    @app.handler("orders", group="g", lease=LEASE)
    def handle(body: bytes) -> None:
        begun.set()
        finish.wait()

    producer = bus.producer("p")
    for number in range(5):
        producer.send("orders", b"%d" % number, queue=0)
    results = Results()
    with app.running(bus, on_handled=results):
        begun.wait()
        with bus.consumer("g", "orders", lease=LEASE) as other:
            came = []
            for message in other:
                came.append((message.body, message.attempt))
                message.ack()
                if len(came) == 4:
                    break
        finish.set()
        assert [one.message.body for one in results.take(1)] == [b"0"]
    assert sorted(came) == [(b"%d" % number, 1) for number in range(1, 5)]


@pytest.mark.parametrize("kind", ["plain", "awaited"])
def test_a_graceful_stop(app: App, bus: mq.Bus, kind: str) -> None:
    """The message at hand is acknowledged; the others go back at once, and no attempt is counted."""
    begun, finish = threading.Event(), threading.Event()

    def act() -> None:
        begun.set()
        finish.wait()

    if kind == "plain":

        @app.handler("orders", group="g")
        def plain(body: bytes) -> None:
            act()
    else:

        @app.handler("orders", group="g")
        async def awaited(body: bytes) -> None:
            await asyncio.to_thread(act)

    producer = bus.producer("p")
    for number in range(20):
        producer.send("orders", b"%d" % number)
    results = Results()
    with app.running(bus, on_handled=results) as running:
        begun.wait()
        running.stop()
        assert running.wait()
        with bus.consumer("g", "orders") as other:
            came = []
            for message in other:  # while the first one still runs
                came.append((message.body, message.attempt))
                message.ack()
                if len(came) == 19:
                    break
        finish.set()
    (done,) = results.take(1)
    assert done.outcome == "acked"
    assert {attempt for _, attempt in came} == {1}
    assert len({body for body, _ in came} | {done.message.body}) == 20
    (group,) = [group for group in bus.admin.groups() if group["name"] == "g"]
    assert group["leases"] == 0


async def test_a_task_that_outlives_the_grace_is_cancelled_and_retried(app: App, tmp_path: Path) -> None:
    begun = asyncio.Event()

    @app.handler("orders", group="g", retry_backoff=0.0)
    async def handle(body: bytes) -> None:
        begun.set()
        await asyncio.Event().wait()

    results = Results()
    async with await mq.aconnect(f"file:{tmp_path / 'broker'}") as bus:
        await bus.producer("p").send("orders", b"x")
        async with app.running(bus, grace=0.0, on_handled=results):
            await begun.wait()
        (done,) = results.take(1)
        assert (done.outcome, type(done.error)) == ("retried", asyncio.CancelledError)
        consumer = await bus.consumer("g", "orders")
        async with consumer:
            async for message in consumer:
                assert message.attempt == 2
                break


def test_health_fails_when_no_broker_answers(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """The link answers an empty receive only when there is a message, as if its broker were silent."""
    monkeypatch.setattr("escrowmq.handlers.running.SILENT_SECONDS", 0.2)

    @app.handler("orders", group="g")
    def handle(body: bytes) -> None: ...

    results = Results()
    with Bus([TwinLink()]) as bus, app.running(bus, on_handled=results) as running:
        wait_until(lambda: "handle: no broker has answered" in running.health().get("reason", ""))
        monkeypatch.setattr("escrowmq.handlers.running.SILENT_SECONDS", 600.0)
        bus.producer("p").send("orders", b"x")
        results.take(1)
        assert running.health() == {"status": "ok"}


def wait_until(ready: Callable[[], bool]) -> None:
    while not ready():
        threading.Event().wait(0.01)


def test_an_error_that_no_retry_mends_ends_the_wait(app: App, tmp_path: Path) -> None:
    @app.handler("orders", group="g")
    def handle(body: bytes) -> None: ...

    bus = mq.connect(f"file:{tmp_path / 'broker'}")
    with app.running(bus) as running:
        worker = running._threads.works[0].workers[0]  # type: ignore[union-attr]
        worker.consumer._consumption.fetcher.refuse(error(Code.FENCED))
        with pytest.raises(mq.Fenced):
            running.wait()
        assert running.health()["status"] == "stopped"
    bus.close()


def test_a_released_message_of_an_ordered_group_comes_before_the_later_ones_of_its_key(bus: mq.Bus) -> None:
    producer = bus.producer("p")
    for number in range(3):
        producer.send("orders", b"%d" % number, key="k")
    came = []
    with bus.consumer("g", "orders", ordered=True) as consumer:
        for message in consumer:
            came.append((message.body, message.attempt))
            if len(came) == 1:
                message.release()
            else:
                message.ack()
            if len(came) == 4:
                break
        assert consumer.flush() == 0
    assert [body for body, _ in came] == [b"0", b"0", b"1", b"2"]


def test_threads_that_wait_share_the_messages_of_one_receive(bus: mq.Bus) -> None:
    """All of them are waiting when four messages come at once; each must get one, or the barrier would never open."""
    barrier, done = threading.Barrier(4), []
    with bus.consumer("g", "orders") as consumer:

        def work() -> None:
            for message in consumer:
                barrier.wait()
                message.ack()
                done.append(message)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        rows = [mq.Message("orders", b"x", queue=0) for _ in range(4)]
        bus.producer("p").send_batch(rows).check()
        wait_until(lambda: len(done) == 4)
        consumer.stop()
        for thread in threads:
            thread.join()
