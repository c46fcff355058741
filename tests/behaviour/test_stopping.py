"""Stopping and closing consumers: what was handled is acknowledged, what was not started goes back at once; I20."""

from __future__ import annotations

import asyncio
import signal
import threading

import pytest

import escrowmq as mq

PATIENCE = 60.0


def fill(bus, g, t, count):
    bus.producer(f"{g}-fill").send_batch([mq.Message(t, str(i).encode(), key="k") for i in range(count)]).check()


def rest_of(bus, g, t, drain, count, **given):
    """What another consumer of the group gets because it was given back, not because a lease ended."""
    with bus.consumer(g, [t], **given) as other:
        found = drain(other, count)
        assert other.receive(10, wait=0.2) == []
    assert {message.attempt for message in found} == {1}, "a lease ended"
    return found


def beside(function, *given):
    thread = threading.Thread(target=function, args=given)
    thread.start()
    return thread


@pytest.mark.invariant("I20")
def test_stop_ends_a_receive_that_waits_after_a_loop(bus, t, g, drain):
    fill(bus, g, t, 1)
    with bus.consumer(g, [t]) as consumer:
        for message in consumer:
            message.ack()
            break
        found = [None]
        waiting = beside(lambda: found.append(consumer.receive(1, wait=3600.0)))
        consumer.stop()
        waiting.join()
        assert found == [None, []]
        fill(bus, g, t, 1)
        assert len(rest_of(bus, g, t, drain, 1)) == 1


@pytest.mark.invariant("I20")
@pytest.mark.parametrize("ordered", [False, True])
def test_stop_ends_the_loop_and_returns_the_rest_at_once(bus, t, g, drain, ordered):
    fill(bus, g, t, 50)
    consumer = bus.consumer(g, [t], ordered=ordered)
    handled = []
    for message in consumer:
        handled.append(message.body)
        if len(handled) == 7:
            consumer.stop()
        message.ack()  # the message at hand is acknowledged after stop()
    assert consumer.stopped
    assert len(handled) == 7
    consumer.flush()
    found = rest_of(bus, g, t, drain, 43, ordered=ordered)
    assert {message.attempt for message in found} == {1}
    assert sorted([*handled, *(message.body for message in found)]) == sorted(str(i).encode() for i in range(50))
    consumer.close()


@pytest.mark.parametrize("qos", [1, 2])
def test_close_waits_for_the_handler_of_another_thread(bus, t, g, drain, qos):
    fill(bus, g, t, 20)
    given = {"qos": qos, "seen": lambda message: False} if qos == 2 else {}
    consumer = bus.consumer(g, [t], **given)
    handling, go_on = threading.Event(), threading.Event()

    def handle():
        for message in consumer:
            handling.set()
            go_on.wait(PATIENCE)
            message.ack()

    worker = beside(handle)
    assert handling.wait(PATIENCE)
    closer = beside(consumer.close, 600.0)
    found = rest_of(bus, g, t, drain, 19)  # goes back while the handler still works
    assert closer.is_alive()
    go_on.set()
    worker.join()
    closer.join()
    assert len(found) == 19
    assert consumer.refused == 0


def test_close_waits_for_a_batch_of_another_thread(bus, t, g):
    fill(bus, g, t, 30)
    consumer = bus.consumer(g, [t])
    handling, go_on, acked = threading.Event(), threading.Event(), []

    def handle():
        for batch in consumer.batches(30):
            handling.set()
            go_on.wait(PATIENCE)
            batch.ack()
            acked.append(len(batch))

    worker = beside(handle)
    assert handling.wait(PATIENCE)
    closer = beside(consumer.close, 600.0)
    go_on.set()
    worker.join()
    closer.join()
    assert acked


def test_close_within_a_loop_lets_the_loop_finish(bus, t, g, drain):
    fill(bus, g, t, 10)
    consumer = bus.consumer(g, [t])
    seen = 0
    for message in consumer:
        consumer.close()
        seen += 1
        message.ack()
    assert seen == 1
    assert len(rest_of(bus, g, t, drain, 9)) == 9


@pytest.mark.invariant("I20")
@pytest.mark.parametrize("what", ["consumer", "bus", "both"])
def test_a_signal_handler_may_close_while_a_message_is_handled(broker, t, g, drain, what):
    """The outside trial's defect: SIGTERM at each deployment lost the acknowledgement of work that was done."""
    bus = broker.connect()
    fill(bus, g, t, 10)
    consumer = bus.consumer(g, [t])

    def on_signal(_number, _frame):
        if what != "bus":
            consumer.close()
        if what != "consumer":
            bus.close()

    before = signal.signal(signal.SIGTERM, on_signal)
    try:
        seen = 0
        for message in consumer:
            signal.raise_signal(signal.SIGTERM)
            seen += 1
            message.ack()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == 1
    assert consumer.refused == 0
    bus.close()
    with broker.connect() as again:
        assert len(rest_of(again, g, t, drain, 9)) == 9


def test_a_signal_handler_may_close_while_nothing_comes(bus, t, g):
    consumer = bus.consumer(g, [t])
    before = signal.signal(signal.SIGTERM, lambda *_: consumer.close())
    main = threading.main_thread().ident
    timer = threading.Timer(0.3, lambda: signal.pthread_kill(main, signal.SIGTERM))
    timer.start()
    try:
        assert list(consumer) == []
    finally:
        signal.signal(signal.SIGTERM, before)
        timer.join()


def test_the_grace_ends(bus, t, g):
    fill(bus, g, t, 1)
    consumer = bus.consumer(g, [t])
    handling, go_on, problems = threading.Event(), threading.Event(), []

    def handle():
        for message in consumer:
            handling.set()
            go_on.wait(PATIENCE)
            try:
                message.ack()
            except mq.errors.Unknown as problem:
                problems.append(problem)

    worker = beside(handle)
    assert handling.wait(PATIENCE)
    consumer.close(grace=0.1)
    assert worker.is_alive()
    go_on.set()
    worker.join()
    assert [problem.code.name for problem in problems] == ["CLOSED"]


def test_a_second_close_waits_for_nothing(bus, t, g):
    fill(bus, g, t, 1)
    consumer = bus.consumer(g, [t])
    handling, go_on = threading.Event(), threading.Event()

    def handle():
        for _ in consumer:
            handling.set()
            go_on.wait(PATIENCE)

    worker = beside(handle)
    assert handling.wait(PATIENCE)
    first = beside(consumer.close, 1e6)
    consumer.close(1e6)
    first.join()
    go_on.set()
    worker.join()


def test_two_threads_finish_their_batches(bus, t, g, drain, eventually):
    fill(bus, g, t, 60)
    consumer = bus.consumer(g, [t])
    both, go_on, handled = threading.Barrier(3), threading.Event(), []

    def handle():
        for batch in consumer.batches(20):
            both.wait(PATIENCE)
            go_on.wait(PATIENCE)
            handled.extend(batch.arrow.column("body").to_pylist())
            batch.ack()

    workers = [beside(handle), beside(handle)]
    both.wait(PATIENCE)
    closer = beside(consumer.close, 600.0)
    eventually(lambda: consumer.stopped)
    go_on.set()
    for worker in [*workers, closer]:
        worker.join()
    assert len(handled) == 40
    assert len(rest_of(bus, g, t, drain, 20)) == 20


def test_a_message_that_was_released_comes_again_uncounted(bus, t, g, drain):
    fill(bus, g, t, 3)
    consumer = bus.consumer(g, [t])
    for attempt in range(3):
        found = consumer.receive(3, wait=PATIENCE)
        assert {message.attempt for message in found} == {1}, attempt
        for message in found:
            message.release()
        consumer.flush()
    found = drain(consumer, 3)
    assert {message.attempt for message in found} == {1}


async def test_tasks_finish_their_messages(broker, t, g, drain):
    async with await broker.aconnect() as bus:
        producer = bus.producer(f"{g}-fill")
        (await producer.send_batch([mq.Message(t, str(i).encode()) for i in range(20)])).check()
        consumer = await bus.consumer(g, [t])
        handling, go_on, seen = asyncio.Event(), asyncio.Event(), []

        async def handle():
            async for message in consumer:
                handling.set()
                await go_on.wait()
                seen.append(message.body)
                await message.ack()

        worker = asyncio.create_task(handle())
        await asyncio.wait_for(handling.wait(), PATIENCE)
        closer = asyncio.create_task(consumer.close())
        await asyncio.sleep(0)
        go_on.set()
        await worker
        await closer
        assert len(seen) == 1
        assert consumer.refused == 0
        other = await bus.consumer(g, [t])
        found = []
        async for message in other.messages(idle_timeout=60.0):
            found.append(message.body)
            await message.ack()
            if len(found) == 19:
                break
        assert sorted([*seen, *found]) == sorted(str(i).encode() for i in range(20))


async def test_stop_of_the_awaited_consumer_ends_its_loop(broker, t, g):
    async with await broker.aconnect() as bus:
        await bus.producer(f"{g}-fill").send(t, b"x")
        consumer = await bus.consumer(g, [t])
        async for message in consumer:
            await consumer.stop()
            await consumer.close()  # within the loop: its end disconnects
            await message.ack()
        assert consumer.refused == 0
