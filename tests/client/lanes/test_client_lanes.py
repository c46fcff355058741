"""Lanes over the twin: coalescing, splitting, sending again, deadlines, order."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import escrowmq as mq
from escrowmq import schemas
from escrowmq.client.bus import Bus
from escrowmq.errors import unsent
from escrowmq.wire import Exchange


def ids_of(batch):
    raw = b"".join(batch.column("message_id").to_pylist())
    return np.frombuffer(raw, schemas.MESSAGE_ID_DTYPE)


def in_threads(count, work):
    results = [None] * count

    def run(index):
        try:
            results[index] = work(index)
        except mq.EscrowError as problem:
            results[index] = problem

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    return threads, results


def test_a_lone_caller_is_sent_at_once(twin, bus):
    receipt = bus.producer("p").send("orders", b"x", key="k", tag="t", properties={"a": "b"})
    assert receipt.offset == 0
    assert receipt.topic == "orders"
    (batch,) = twin.seen(Exchange.SEND)
    row = batch.to_pylist()[0]
    assert (row["body"], row["key"], row["tag"], row["properties"]) == (b"x", "k", "t", [("a", "b")])
    assert row["queue"] == -1
    assert row["message_id"] == receipt.message_id


def test_whoever_arrives_while_a_batch_is_in_flight_rides_in_the_next(twin, bus, eventually):
    producer = bus.producer("p")
    producer.send("orders", b"first")
    twin.hold(Exchange.SEND)
    threads, results = in_threads(12, lambda i: producer.send("orders", str(i).encode()))
    lane = producer._production.lane(Exchange.SEND, 0)
    eventually(lambda: lane.waiting == 11)
    twin.release(Exchange.SEND)
    for thread in threads:
        thread.join()
    sizes = [batch.num_rows for batch in twin.seen(Exchange.SEND)]
    assert sizes == [1, 1, 11]
    bodies = [row["body"] for batch in twin.seen(Exchange.SEND)[1:] for row in batch.to_pylist()]
    assert sorted(bodies) == sorted(str(i).encode() for i in range(12))
    stored = {row["message_id"]: row["body"] for row in twin.topics["orders"]}
    assert [stored[receipt.message_id] for receipt in results] == [str(i).encode() for i in range(12)]


def test_message_ids_of_a_client_are_one_run(twin, bus):
    producer = bus.producer("p")
    for i in range(5):
        producer.send("orders", b"x")
    producer.send_batch([mq.Message("orders", b"y") for _ in range(3)])
    ids = np.concatenate([ids_of(batch) for batch in twin.seen(Exchange.SEND)])
    assert len(set(ids["instance"])) == 1
    assert np.array_equal(np.diff(ids["sequence"]), np.ones(7))


def test_callers_own_ids_stand_among_made_ones(twin, bus):
    receipts = bus.producer("p").send_batch(
        [mq.Message("t", b"a"), mq.Message("t", b"b", message_id="order-1"), mq.Message("t", b"c")]
    )
    ids = receipts.message_ids.to_pylist()
    from escrowmq.model import message_id

    assert ids[1] == message_id("order-1")
    assert len(set(ids)) == 3


@pytest.mark.parametrize("applied", [False, True])
def test_a_lost_batch_is_sent_again_unchanged(twin, bus, applied):
    producer = bus.producer("p")
    twin.lose(Exchange.SEND, applied=applied, times=3)
    receipt = producer.send("orders", b"x")
    batches = twin.seen(Exchange.SEND)
    assert len(batches) == 4
    assert all(batch.equals(batches[0]) for batch in batches)
    assert len(twin.topics["orders"]) == 1
    assert twin.topics["orders"][0]["message_id"] == receipt.message_id


@pytest.mark.invariant("I19")
def test_what_was_lost_goes_before_what_is_newer(twin, bus, eventually):
    producer = bus.producer("p")
    producer.send("orders", b"0")
    twin.hold(Exchange.SEND)
    first, _ = in_threads(1, lambda i: producer.send("orders", b"1"))
    lane = producer._production.lane(Exchange.SEND, 0)
    eventually(lambda: len(twin.seen(Exchange.SEND)) == 2)
    second, _ = in_threads(1, lambda i: producer.send("orders", b"2"))
    eventually(lambda: lane.waiting == 1)
    twin.lose(Exchange.SEND, applied=False)
    twin.release(Exchange.SEND)
    for thread in (*first, *second):
        thread.join()
    assert [row["body"] for row in twin.topics["orders"]] == [b"0", b"1", b"2"]


def test_no_answer_in_time_is_unknown_and_names_the_message(twin, bus, hurried):
    producer = bus.producer("p")
    producer.send("other", b"opens the session")
    twin.hold(Exchange.SEND)
    with hurried(producer), pytest.raises(mq.Unknown) as raised:
        producer.send("orders", b"x", message_id="o-1")
    assert raised.value.code is mq.Code.TIMED_OUT
    twin.release(Exchange.SEND)
    receipt = producer.send("orders", b"x", message_id=raised.value.message_id)
    assert receipt.message_id == raised.value.message_id
    assert len(twin.topics["orders"]) == 1


def test_a_broker_away_for_too_long_is_unknown_and_later_calls_go_on(twin, bus, hurried):
    producer = bus.producer("p")
    producer.send("orders", b"x")
    twin.away = True
    with hurried(producer, 1.0), pytest.raises(mq.Unknown, match="TIMED_OUT"):
        producer.send("orders", b"y")
    twin.away = False
    assert producer.send("orders", b"z").position > 0


@pytest.mark.parametrize("left", [False, True])
def test_at_the_deadline_it_is_told_whether_a_request_may_have_left(twin, bus, hurried, monkeypatch, left):
    producer = bus.producer("p")
    producer.send("orders", b"x")

    def fail(*_):
        problem = unsent("there is no connection")
        problem.left = left
        raise problem

    monkeypatch.setattr(twin, "parcel", fail)
    with hurried(producer, 0.2), pytest.raises(mq.Unknown, match="TIMED_OUT") as raised:
        producer.send("orders", b"y")
    assert raised.value.left is left


def test_a_refusal_of_the_whole_batch_reaches_every_caller_as_its_own_exception(twin, bus, eventually):
    producer = bus.producer("p")
    producer.send("t", b"0")
    twin.hold(Exchange.SEND)
    threads, results = in_threads(5, lambda i: producer.send("t", b"x"))
    eventually(lambda: producer._production.lane(Exchange.SEND, 0).waiting == 4)
    twin.refuse(Exchange.SEND, mq.Overloaded(mq.Code.QUEUE_FULL, retry_after=7.0))
    twin.refuse(Exchange.SEND, mq.Overloaded(mq.Code.QUEUE_FULL, retry_after=7.0))
    twin.release(Exchange.SEND)
    for thread in threads:
        thread.join()
    assert all(isinstance(result, mq.Overloaded) and result.retry_after == 7.0 for result in results)
    assert len({id(result) for result in results}) == 5


def test_closing_gives_waiting_callers_an_answer(twin, eventually, hurried):
    bus = Bus([twin])
    producer = bus.producer("p", timeout=300.0)
    twin.hold(Exchange.SEND)
    threads, results = in_threads(3, lambda i: producer.send("t", b"x"))
    eventually(lambda: len(twin.seen(Exchange.SEND)) == 1)
    with hurried(producer):
        bus.close()
    for thread in threads:
        thread.join()
    assert all(isinstance(result, mq.Unknown) for result in results)
    with pytest.raises(mq.Unknown, match="CLOSED"):
        producer.send("t", b"y")


def test_big_batches_are_split_by_the_limits_of_the_broker(twin, bus):
    twin.limits = {"max_batch_rows": 10, "max_body_bytes": 100}
    bodies = [b"x" * (101 if i == 7 else 5) for i in range(35)]
    receipts = bus.producer("p").send_batch([mq.Message("t", b"", key=str(i)) for i in range(35)])
    assert receipts.ok
    import pyarrow as pa

    table = pa.table({"topic": ["t"] * 35, "body": bodies})
    receipts = bus.producer("p").send_batch(table)
    assert receipts.codes.tolist() == [mq.Code.BODY_TOO_LARGE if i == 7 else 0 for i in range(35)]
    assert max(batch.num_rows for batch in twin.seen(Exchange.SEND)) <= 10
    stored = [row["body"] for row in twin.topics["t"]][35:]
    assert stored == [body for body in bodies if len(body) <= 100]
    assert [receipts.offsets[i] for i in (6, 8)] == [41, 42]
    with pytest.raises(mq.Rejected, match="BODY_TOO_LARGE"):
        receipts[7]


def test_small_batches_of_several_callers_share_a_request(twin, bus, eventually):
    producer = bus.producer("p")
    producer.send("orders", b"first")
    twin.hold(Exchange.SEND)
    lane = producer._production.lane(Exchange.SEND, 0)
    parked, _ = in_threads(1, lambda _: producer.send("orders", b"in flight"))
    eventually(lambda: lane.waiting == 0 and len(twin.seen(Exchange.SEND)) == 2)

    def send(caller):
        return producer.send_batch([mq.Message("orders", f"{caller}-{row}".encode()) for row in range(5)])

    threads, results = in_threads(6, send)
    eventually(lambda: lane.waiting == 30)
    twin.release(Exchange.SEND)
    for thread in (*threads, *parked):
        thread.join()
    assert [batch.num_rows for batch in twin.seen(Exchange.SEND)] == [1, 1, 30]
    stored = {row["message_id"]: row["body"] for row in twin.topics["orders"]}
    for caller, receipts in enumerate(results):  # each has its own part of the answer
        assert receipts.ok
        assert [stored[receipt.message_id] for receipt in receipts] == [f"{caller}-{row}".encode() for row in range(5)]
        assert np.array_equal(np.diff(receipts.positions), np.ones(4))


def test_batches_that_were_lost_together_are_answered_apart(twin, bus, eventually):
    producer = bus.producer("p")
    producer.send("orders", b"first")
    twin.hold(Exchange.SEND)
    lane = producer._production.lane(Exchange.SEND, 0)
    lone, _ = in_threads(1, lambda _: producer.send("orders", b"in flight"))
    eventually(lambda: lane.waiting == 0 and len(twin.seen(Exchange.SEND)) == 2)
    threads, results = in_threads(
        3, lambda caller: producer.send_batch([mq.Message("orders", b"%d" % caller)] * (caller + 1))
    )
    eventually(lambda: lane.waiting == 6)
    twin.lose(Exchange.SEND, applied=True)
    twin.release(Exchange.SEND)
    for thread in (*lone, *threads):
        thread.join()
    assert [len(receipts) for receipts in results] == [1, 2, 3]
    assert all(receipts.ok for receipts in results)
    assert len(twin.topics["orders"]) == 8


def test_requests_of_several_callers_keep_to_a_brokers_smaller_limits(twin, bus, eventually):
    twin.limits = {"max_batch_rows": 8}
    producer = bus.producer("p")
    producer.send("orders", b"first")
    twin.hold(Exchange.SEND)
    lane = producer._production.lane(Exchange.SEND, 0)
    lone, _ = in_threads(1, lambda _: producer.send("orders", b"in flight"))
    eventually(lambda: lane.waiting == 0 and len(twin.seen(Exchange.SEND)) == 2)
    ones, _ = in_threads(20, lambda i: producer.send("orders", b"one"))
    eventually(lambda: lane.waiting == 20)
    fives, _ = in_threads(4, lambda i: producer.send_batch([mq.Message("orders", b"five")] * 5))
    eventually(lambda: lane.waiting == 40)
    twin.release(Exchange.SEND)
    for thread in (*lone, *ones, *fives):
        thread.join()
    assert max(batch.num_rows for batch in twin.seen(Exchange.SEND)) <= 8
    assert len(twin.topics["orders"]) == 42


def test_a_caller_that_is_interrupted_while_it_sends_holds_up_no_other(twin, monkeypatch):
    """Ctrl-C: the interrupted caller was sending for all."""
    exchange, raised = twin.exchange, []

    def interrupted(*given):
        if not raised:
            raised.append(True)
            raise KeyboardInterrupt
        return exchange(*given)

    with Bus([twin]) as bus:
        producer = bus.producer("p", timeout=60)
        producer.send("t", b"0")
        monkeypatch.setattr(twin, "exchange", interrupted)
        with pytest.raises(KeyboardInterrupt):
            producer.send("t", b"1")
        producer.send("t", b"2")
    assert {row["body"] for row in twin.topics["t"]} == {b"0", b"1", b"2"}, "what was on its way is sent again"
