"""Blocking and to await: the two faces of every client class offer the same, and the blocking one is exactly typed."""

from __future__ import annotations

import asyncio
import inspect
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import escrowmq as mq
from escrowmq.client.aio import AsyncBus
from escrowmq.client.bus import Bus
from escrowmq.client.consuming.received import AsyncReceived, AsyncReceivedBatch
from escrowmq.client.lanes.blocking import blocking, iterating
from escrowmq.testing.link import TwinLink

PAIRS = [
    (mq.Bus, mq.AsyncBus),
    (mq.Producer, mq.AsyncProducer),
    (mq.Transaction, mq.AsyncTransaction),
    (mq.Consumer, mq.AsyncConsumer),
    (mq.Received, AsyncReceived),
    (mq.ReceivedBatch, AsyncReceivedBatch),
    (mq.Reader, mq.AsyncReader),
]
SPECIAL = {"__enter__": "__aenter__", "__exit__": "__aexit__", "__iter__": "__aiter__"}
"""What the language calls on each face. A received batch has its messages already: both iterate it with a plain
``for``.
"""


def public(kind):
    return {name for name in dir(kind) if not name.startswith("_")}


def of(pair):
    return f"{pair[0].__name__}"


@pytest.mark.parametrize("pair", PAIRS, ids=of)
def test_both_faces_have_the_same_names(pair):
    blocking_face, async_face = pair
    assert public(blocking_face) == public(async_face)
    if blocking_face is not mq.ReceivedBatch:
        assert all(hasattr(blocking_face, one) == hasattr(async_face, other) for one, other in SPECIAL.items())


METHODS = [(pair, name) for pair in PAIRS for name in sorted(public(pair[0])) if name != "admin"]


@pytest.mark.parametrize(("pair", "name"), METHODS, ids=lambda one: one if isinstance(one, str) else of(one))
def test_both_faces_have_the_same_parameters_and_docstrings(pair, name):
    one, other = (inspect.getattr_static(kind, name) for kind in pair)
    if not callable(one):
        assert one is other, "a property or attribute of their base"
        return
    assert inspect.getdoc(one) == inspect.getdoc(other) is not None
    assert inspect.signature(one) == inspect.signature(other), "parameters, defaults and annotations"
    assert not inspect.iscoroutinefunction(one)


def test_the_faces_are_different_classes():
    for blocking_face, async_face in PAIRS:
        assert not issubclass(blocking_face, async_face)
        assert not issubclass(async_face, blocking_face)


TYPED = """
from collections.abc import Iterator, Sequence
from typing import assert_type

import escrowmq as mq


def check(bus: mq.Bus) -> None:
    assert_type(bus, mq.Bus)
    producer = bus.producer("p", qos=1, timeout=2.0)
    assert_type(producer, mq.Producer)
    assert_type(producer.send("t", b"x", key="k", delay=1.0), mq.Receipt)
    assert_type(producer.send_batch([], shard=1), mq.Receipts)
    assert_type(producer.commit("id"), mq.Code)
    assert_type(producer.end_batch([], mq.COMMIT), mq.EndResults)
    assert_type(producer.last_batch("w"), int | None)
    assert_type(producer.dropped, int)
    with producer.transaction() as txn:
        assert_type(txn, mq.Transaction)
        assert_type(txn.send("t", b"x", check_immunity=1.0), mq.Receipt)
        assert_type(txn.id, mq.TransactionId | None)
    consumer = bus.consumer("c", "t", qos=2, seen=lambda message: message.message_id == b"")
    assert_type(consumer, mq.Consumer)
    assert_type(consumer.receive(1, wait=1.0), list[mq.Received])
    assert_type(consumer.messages(idle_timeout=1), Iterator[mq.Received])
    for batch in consumer.batches(10, idle_timeout=1):
        assert_type(batch, mq.ReceivedBatch)
        assert_type(batch[0], mq.Received)
        assert_type(batch.ack(wait=False), None)
    with bus.reader("t", start="latest") as reader:
        assert_type(reader, mq.Reader)
        assert_type(reader.batches(), Iterator[mq.ReadBatch])


async def check_async(bus: mq.AsyncBus) -> None:
    producer = bus.producer("p", unasked=True)
    assert_type(producer, mq.AsyncProducer)
    assert_type(await producer.send("t", b"x"), mq.Receipt)
    consumer = await bus.consumer("c", "t")
    assert_type(consumer, mq.AsyncConsumer)
    assert_type(await consumer.flush(), int)


def wrong(bus: mq.Bus) -> None:
    bus.producer("p", colour=1)  # type: ignore[call-arg]
    bus.producer("p").send("t", b"x", check_immunity=1.0)  # type: ignore[call-arg]
    bus.producer("p").send("t", b"x", key=1)  # type: ignore[arg-type]
    bus.consumer("c", "t", prefetch="2")  # type: ignore[arg-type]
    bus.consumer("c").receive()  # type: ignore[call-arg]
    bus.producer("p", checker=says_nothing)  # type: ignore[arg-type]
    bus.producer("p", checker=says_commit)  # type: ignore[arg-type]
    bus.producer("p", checker=Batches())  # type: ignore[arg-type]
    bus.producer("p").send_in_transaction(mq.Message("t", b"x"), lambda *_: "COMMIT")  # type: ignore


def says_nothing(check: mq.Check) -> None: ...
def says_commit(check: mq.Check) -> str: return "COMMIT"


class Batches:
    def decide_batch(self, checks: Sequence[mq.Check]) -> list[bool]: return [True for _ in checks]
"""


CACHE = Path(__file__).parents[2] / ".mypy_cache" / "faces"
"""What mypy finds out about the libraries, which it knows by their contents, serves until they change."""


def test_a_type_checker_sees_the_exact_types_of_both_faces(tmp_path):
    """``warn_unused_ignores`` is part of strict: what is marked wrong must be wrong."""
    program = tmp_path / "typed.py"
    program.write_text(TYPED)
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", f"--cache-dir={CACHE}"]
    result = subprocess.run(
        [*command, "--follow-imports=silent", "--ignore-missing-imports", program], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture
def bus():
    with Bus([TwinLink()]) as bus:
        yield bus


@pytest.mark.parametrize(
    "call",
    [
        lambda bus: bus.producer("p", colour="red"),
        lambda bus: bus.consumer("c", "t", colour="red"),
        lambda bus: bus.reader("t", colour="red"),
        lambda bus: bus.producer("p").send("t", b"x", colour="red"),
        lambda bus: bus.producer("p").send("t", b"x", check_immunity=1.0),
        lambda bus: bus.producer("p").send("t", b"x", check_immunity=None),
        lambda bus: bus.consumer("c", "t").batches(colour="red"),
        lambda bus: bus.producer("p", unasked=True).prepare("t", b"x", colour="red"),
        lambda bus: bus.producer("p", unasked=True).transaction().send("t", b"x", colour="red"),
    ],
)
def test_an_unknown_option_is_a_type_error(bus, call):
    with pytest.raises(TypeError, match=r"unexpected keyword argument '(colour|check_immunity)'"):
        call(bus)


async def test_an_unknown_option_is_a_type_error_to_await_too():
    async with AsyncBus([TwinLink()]) as bus:
        with pytest.raises(TypeError, match="check_immunity"):
            await bus.producer("p").send("t", b"x", check_immunity=1.0)
        with pytest.raises(TypeError, match="colour"):
            await bus.consumer("c", "t", colour="red")


class Suspending:
    async def once(self):
        """Waits for an event loop."""
        await asyncio.sleep(0)

    async def often(self):
        """Gives one, then waits for an event loop."""
        yield 1
        await asyncio.sleep(0)


def test_a_coroutine_that_suspends_is_an_error_on_the_blocking_face():
    with pytest.raises(RuntimeError, match=r"once waits for an event loop"):
        blocking(Suspending.once)(Suspending())
    steps = iterating(Suspending.often)(Suspending())
    assert next(steps) == 1
    with pytest.raises(RuntimeError, match=r"often waits for an event loop"):
        next(steps)


def test_leaving_an_iteration_ends_its_coroutine():
    ended = []

    class Counting:
        async def numbers(self):
            """Counts."""
            try:
                while True:
                    yield len(ended)
            finally:
                ended.append(True)

    steps = iterating(Counting.numbers)(Counting())
    assert next(steps) == 0
    steps.close()
    assert ended == [True]


def test_representations_name_the_face(bus):
    producer = bus.producer("p", unasked=True)
    with producer.transaction() as txn:
        assert repr(txn) == "<Transaction without messages: active>"
        txn.send("t", b"x")
    assert re.fullmatch(r"<Transaction 00000001-[0-9a-f]+-[0-9a-f]+: ended>", repr(txn))
    (message,) = bus.consumer("c", "t").receive(1)
    assert repr(message) == "<Received t/0@0, 1 bytes>"


def test_the_blocking_face_works_inside_a_running_event_loop(bus):
    """In a coroutine it blocks the loop, as it always did, and nothing else."""

    async def program():
        producer = bus.producer("p")
        producer.send("t", b"x")
        return [message.body for message in bus.consumer("c", "t").messages(idle_timeout=0.01)]

    assert asyncio.run(program()) == [b"x"]


def test_threads_share_one_consumer_and_close_ends_them_all(bus):
    bus.producer("p").send_batch([mq.Message("t", str(i).encode()) for i in range(3000)])
    consumer = bus.consumer("c", "t")
    found, lock, all_there = [], threading.Lock(), threading.Event()

    def run():
        for message in consumer:
            message.ack()
            with lock:
                found.append(message.offset)
                if len(found) == 3000:
                    all_there.set()

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert all_there.wait(60)
    consumer.close()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert sorted(found) == list(range(3000))
