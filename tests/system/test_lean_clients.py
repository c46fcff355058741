"""Clients over the lean carrier of a real broker: killed, stopped, without that carrier, on a Unix socket; threads and event loops."""

from __future__ import annotations

import asyncio
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from load import Broker, eventually

import escrowmq as mq
from escrowmq.errors import Code


class LocalBroker(Broker):
    """It listens on a Unix socket, too, or ``without`` the lean carrier."""

    def __init__(self, folder: Path, *, without: bool = False) -> None:
        super().__init__(folder, lease_seconds=30)
        self._flags += ["--no-lean"] if without else ["--lean-socket", str(folder.with_suffix(".s"))]


def link_of(bus: Any) -> Any:
    return bus.router.links[0]


def numbers(bus: mq.Bus, topic: str) -> dict[bytes, list[int]]:
    """What each sender sent, in the order of the topic's one queue."""
    found: dict[bytes, list[int]] = {}
    for body in bus.admin.read(topic).read_all().column("body").to_pylist():
        name, _, number = body.partition(b" ")
        found.setdefault(name, []).append(int(number))
    return found


def test_threads_go_on_through_a_kill_and_a_stop_in_order_and_without_a_double(tmp_path: Path) -> None:
    with LocalBroker(tmp_path / "data") as broker, mq.connect(broker.url) as bus:
        bus.admin.create_topic("orders", queues=1)
        producer = bus.producer("plain")
        producer.send("orders", b"first 0")
        assert link_of(bus).lean
        assert link_of(bus)._lean._socket.family == socket.AF_UNIX
        sent = [0] * 4
        over = threading.Event()
        wrong: list[BaseException] = []

        def work(name: int) -> None:
            try:
                while not over.is_set():
                    producer.send("orders", b"%d %d" % (name, sent[name]))
                    sent[name] += 1
            except BaseException as problem:
                wrong.append(problem)

        workers = [threading.Thread(target=work, args=(name,)) for name in range(4)]
        for worker in workers:
            worker.start()
        for end in (broker.kill, broker.stop):
            mark = list(sent)
            eventually("all go on", lambda mark=mark: all(now > then + 5 for now, then in zip(sent, mark, strict=True)))
            end()
            broker.start()
        mark = list(sent)
        eventually("all go on", lambda: all(now > then + 5 for now, then in zip(sent, mark, strict=True)))
        over.set()
        for worker in workers:
            worker.join()
        assert not wrong
        eventually("it is lean again", lambda: producer.send("orders", b"last 0") and link_of(bus).lean)
        found = numbers(bus, "orders")
        for name in range(4):
            assert found[b"%d" % name] == list(range(sent[name]))


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    with LocalBroker(tmp_path_factory.mktemp("lean") / "data") as served:
        yield served


@pytest.mark.parametrize("option", ["", "?carrier=flight"])
def test_both_carriers_do_the_same(broker, option):
    topic = f"same{len(option)}"
    with mq.connect(broker.url + option) as bus:
        producer = bus.producer("shop", unasked=True)
        with producer.transaction() as txn:
            txn.send(topic, b"1", key="k", tag="t", properties={"a": "b"})
            txn.send(topic, b"2")
        kept = producer.prepare(topic, b"never")
        assert producer.rollback(kept.transaction_id) is Code.ROLLED_BACK
        assert producer.rollback(kept.transaction_id) is Code.ALREADY_ROLLED_BACK
        with pytest.raises(mq.Rejected, match="CONFLICT"):
            producer.commit(kept.transaction_id)
        bus.producer("plain").send(topic, bytes(2 << 20))  # too large for the lean carrier
        with bus.consumer(topic, topic) as consumer:
            received = [consumer.receive(1, wait=10)[0] for _ in range(3)]
            for message in received:
                message.ack()
            assert consumer.flush() == 0
        assert sorted(message.body for message in received) == [bytes(2 << 20), b"1", b"2"]
        assert getattr(link_of(bus), "lean", False) is (not option)


async def test_an_event_loop_needs_no_thread_to_read(broker):
    before = set(threading.enumerate())
    async with await mq.aconnect(broker.url) as bus:
        producer = bus.producer("plain")
        await asyncio.gather(*(producer.send("loop", b"%d" % n) for n in range(500)))
        consumer = await bus.consumer("loop", "loop")
        waiting = asyncio.create_task(consumer.receive(1000, wait=10))
        received = [message.body for message in await waiting]
        while len(received) < 500:
            received += [message.body for message in await consumer.receive(1000, wait=10)]
        assert sorted(map(int, received)) == list(range(500))
        assert link_of(bus).lean
        names = {thread.name for thread in set(threading.enumerate()) - before}
        assert not names & {"escrowmq-lean", "escrowmq-lean-flight", "escrowmq-send", "escrowmq-receive"}
        await consumer.close()


def test_a_consumer_that_waits_is_woken_and_one_that_closes_leaves_nothing_leased(broker):
    with mq.connect(broker.url) as bus, mq.connect(broker.url) as other:
        producer = other.producer("plain")
        producer.send("wake", b"0")
        with bus.consumer("wake", "wake") as consumer:
            assert consumer.receive(1, wait=10)[0].body == b"0"
            got: list[bytes] = []
            waiting = threading.Thread(target=lambda: got.append(consumer.receive(1, wait=30)[0].body))
            waiting.start()
            producer.send("wake", b"1")
            waiting.join(30)
            assert got == [b"1"]
        producer.send("wake", b"2")
        with bus.consumer("wake", "wake") as consumer:
            assert b"2" in {message.body for message in consumer.receive(10, wait=10)}


def test_a_broker_without_the_lean_carrier_is_used_all_the_same(tmp_path):
    with LocalBroker(tmp_path / "data", without=True) as served, mq.connect(served.url) as bus:
        producer = bus.producer("shop", unasked=True)
        assert producer.commit(producer.prepare("orders", b"x").transaction_id) is Code.COMMITTED
        assert not link_of(bus).lean
