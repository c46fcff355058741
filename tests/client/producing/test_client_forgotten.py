"""Sessions that the broker has forgotten: renewed by the client itself, nothing lost, repeated or out of order."""

from __future__ import annotations

import asyncio
import threading

import pytest

import escrowmq as mq
from escrowmq.client.aio import AsyncBus
from escrowmq.client.bus import Bus
from escrowmq.errors import error
from escrowmq.testing.link import TwinLink
from escrowmq.wire import Exchange


class Link(TwinLink):
    """A twin whose ``session.open`` may be refused."""

    refusal: mq.Code | None = None

    def action(self, name, request, timeout):
        if name == "session.open" and self.refusal is not None:
            self.actions.append((name, request))
            raise error(self.refusal)
        return super().action(name, request, timeout)

    def opened(self):
        return [request for name, request in self.actions if name == "session.open"]


@pytest.fixture
def twin():
    return Link()


@pytest.fixture
def bus(twin):
    with Bus([twin]) as bus:
        yield bus


def bodies(twin):
    return [row["body"] for row in twin.topics["orders"]]


def start(work):
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_what_was_refused_is_sent_again_unchanged(twin, bus):
    producer = bus.producer("p")
    producer.send("orders", b"0")
    twin.forget()
    receipt = producer.send("orders", b"1")
    assert bodies(twin) == [b"0", b"1"]
    refused, taken = twin.seen(Exchange.SEND)[1:]
    assert refused.equals(taken)
    assert receipt.message_id == taken.column("message_id")[0].as_py()
    assert [request.options["session"] for request in twin.requests] == [1, 1, 2]
    assert "resume" not in twin.opened()[1], "a name of the client's making is nobody else's"


def test_a_named_instance_asks_whether_its_name_is_taken(twin, bus):
    producer = bus.producer("p", instance="me")
    producer.send("orders", b"0")
    twin.forget()
    producer.send("orders", b"1")
    assert [request.get("resume") for request in twin.opened()] == [None, 1]


@pytest.mark.invariant("I19")
def test_batches_in_flight_keep_their_order_and_nothing_newer_goes_first(twin, bus, eventually):
    """I19"""
    producer = bus.producer("p")
    producer.send("orders", b"first")
    twin.hold(Exchange.SEND)
    batches = [[mq.Message("orders", b"%d-%d" % (n, row)) for row in range(70 << n)] for n in range(3)]
    lane = producer._production.lane(Exchange.SEND, 0)
    threads = []
    for n, batch in enumerate(batches):
        threads.append(start(lambda batch=batch: producer.send_batch(batch)))
        eventually(lambda n=n: len(twin.seen(Exchange.SEND)) == n + 2)
    twin.forget()
    threads.append(start(lambda: producer.send("orders", b"last")))
    eventually(lambda: lane.waiting == 1)
    twin.release(Exchange.SEND)
    for thread in threads:
        thread.join()
    assert bodies(twin) == [b"first", *(m.body for batch in batches for m in batch), b"last"]
    assert len(twin.opened()) == 2


def test_none_leaves_under_a_new_session_while_another_is_in_flight(twin, bus, eventually):
    """I19: another lane has renewed the session meanwhile; what is on its way under the old one comes first."""
    producer = bus.producer("p", checker=lambda check: mq.UNKNOWN)
    producer.send("orders", b"0")
    transaction = producer.prepare("orders", b"half").transaction_id
    twin.hold(Exchange.SEND)
    lane = producer._production.lane(Exchange.SEND, 0)
    first = start(lambda: producer.send_batch([mq.Message("orders", b"%d" % n) for n in range(1, 71)]))
    eventually(lambda: len(twin.seen(Exchange.SEND)) == 2)
    twin.forget()
    producer.rollback(transaction)  # renews it
    second = start(lambda: producer.send_batch([mq.Message("orders", b"%d" % n) for n in range(71, 150)]))
    eventually(lambda: lane.broken)
    twin.release(Exchange.SEND)
    for thread in (first, second):
        thread.join()
    assert bodies(twin) == [b"%d" % n for n in range(150)]
    assert len(twin.opened()) == 2, "one lane renewed it, the other found it renewed"


def test_a_transaction_goes_on(twin, bus):
    producer = bus.producer("p", checker=lambda check: mq.UNKNOWN)
    with producer.transaction() as txn:
        txn.send("orders", b"1")
        twin.forget()
        txn.send("orders", b"2")
        twin.forget()
    assert bodies(twin) == [b"1", b"2"]


def test_refused_as_fenced_all_callers_are_told_and_nothing_leaves(twin, bus, eventually):
    producer = bus.producer("p", instance="me")
    producer.send("orders", b"0")
    twin.forget()
    twin.refusal = mq.Code.FENCED
    for _ in range(2):
        with pytest.raises(mq.Fenced):
            producer.send("orders", b"1")
    assert bodies(twin) == [b"0"]
    twin.refusal = None
    producer.send("orders", b"2")
    assert bodies(twin) == [b"0", b"2"]


def test_a_broker_that_is_away_meanwhile_is_waited_for(twin, bus, eventually):
    producer = bus.producer("p")
    producer.send("orders", b"0")
    twin.forget()
    twin.refusal = mq.Code.DISCONNECTED
    sending = start(lambda: producer.send("orders", b"1"))
    eventually(lambda: len(twin.opened()) > 2)
    twin.refusal = None
    sending.join()
    assert bodies(twin) == [b"0", b"1"]


def test_one_that_is_forgotten_again_and_again_gives_up_at_its_deadline(twin, bus, hurried):
    producer = bus.producer("p")
    producer.send("orders", b"0")
    twin._is_unknown_session = lambda options: True
    with hurried(producer, 0.3), pytest.raises(mq.Unknown):
        producer.send("orders", b"1")
    del twin._is_unknown_session
    producer.send("orders", b"2")
    assert bodies(twin) == [b"0", b"2"]


def test_the_async_face(twin):
    async def run():
        async with AsyncBus([twin]) as bus:
            producer = bus.producer("p")
            await producer.send("orders", b"0")
            twin.forget()
            await asyncio.gather(*(producer.send("orders", b"%d" % n) for n in range(1, 200)))

    asyncio.run(run())
    assert bodies(twin) == [b"%d" % n for n in range(200)]
