"""Clients of a real broker: killed, stopped; over TCP and a Unix socket; threads and event loops."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from load import Broker, eventually

import escrowmq as mq
from escrowmq.errors import Code


class LocalBroker(Broker):
    """It listens on a Unix socket, too."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, lease_seconds=300)
        self.path = folder.with_suffix(".s")
        self._flags += ["--socket", str(self.path)]

    @property
    def local(self) -> str:
        return f"escrow+unix://{self.path}"


def numbers(bus: mq.Bus, topic: str) -> dict[bytes, list[int]]:
    """What each sender sent, in the order of the topic's one queue."""
    found: dict[bytes, list[int]] = {}
    for body in bus.admin.read(topic).read_all().column("body").to_pylist():
        name, _, number = body.partition(b" ")
        found.setdefault(name, []).append(int(number))
    return found


@pytest.mark.invariant("I9", "I19")
def test_threads_go_on_through_a_kill_and_a_stop_in_order_and_without_a_double(tmp_path: Path) -> None:
    with LocalBroker(tmp_path / "data") as broker, mq.connect(broker.local) as bus:
        bus.admin.create_topic("orders", queues=1)
        producer = bus.producer("plain", timeout=60.0)
        producer.send("orders", b"first 0")
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
        found = numbers(bus, "orders")
        for name in range(4):
            assert found[b"%d" % name] == list(range(sent[name]))


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    with LocalBroker(tmp_path_factory.mktemp("served") / "data") as served:
        yield served


@pytest.mark.parametrize("place", ["url", "local"])
def test_both_sockets_do_the_same(broker, place):
    topic = f"same-{place}"
    with mq.connect(getattr(broker, place)) as bus:
        producer = bus.producer("shop", unasked=True)
        with producer.transaction() as txn:
            txn.send(topic, b"1", key="k", tag="t", properties={"a": "b"})
            txn.send(topic, b"2")
        kept = producer.prepare(topic, b"never")
        assert producer.rollback(kept.transaction_id) is Code.ROLLED_BACK
        assert producer.rollback(kept.transaction_id) is Code.ALREADY_ROLLED_BACK
        with pytest.raises(mq.Rejected, match="CONFLICT"):
            producer.commit(kept.transaction_id)
        bus.producer("plain").send(topic, bytes(2 << 20))
        with bus.consumer(topic, topic) as consumer:
            received = [consumer.receive(1, wait=60)[0] for _ in range(3)]
            for message in received:
                message.ack()
            assert consumer.flush() == 0
        assert sorted(message.body for message in received) == [bytes(2 << 20), b"1", b"2"]


async def test_an_event_loop_needs_no_thread_to_read(broker):
    before = set(threading.enumerate())
    async with await mq.aconnect(broker.url) as bus:
        producer = bus.producer("plain")
        await asyncio.gather(*(producer.send("loop", b"%d" % n) for n in range(500)))
        consumer = await bus.consumer("loop", "loop")
        waiting = asyncio.create_task(consumer.receive(1000, wait=60))
        received = [message.body for message in await waiting]
        while len(received) < 500:
            received += [message.body for message in await consumer.receive(1000, wait=60)]
        assert sorted(map(int, received)) == list(range(500))
        names = {thread.name for thread in set(threading.enumerate()) - before}
        assert not names & {"escrowmq-reader", "escrowmq-send", "escrowmq-receive"}
        await consumer.close()


def test_a_consumer_that_waits_is_woken_and_one_that_closes_leaves_nothing_leased(broker):
    with mq.connect(broker.url) as bus, mq.connect(broker.url) as other:
        producer = other.producer("plain")
        producer.send("wake", b"0")
        with bus.consumer("wake", "wake") as consumer:
            assert consumer.receive(1, wait=60)[0].body == b"0"
            got: list[bytes] = []
            waiting = threading.Thread(target=lambda: got.append(consumer.receive(1, wait=60)[0].body))
            waiting.start()
            producer.send("wake", b"1")
            waiting.join(60)
            assert got == [b"1"]
        producer.send("wake", b"2")
        with bus.consumer("wake", "wake") as consumer:
            found: set[bytes] = set()
            while b"2" not in found:
                received = consumer.receive(10, wait=60)
                assert received, found
                found |= {message.body for message in received}
