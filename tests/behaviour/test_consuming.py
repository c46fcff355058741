"""Consumer groups, delays, starts, dead letters; systems.md 4.1 and 4.15."""

from __future__ import annotations

import asyncio
import threading
import time
from datetime import UTC, datetime

import pyarrow as pa
import pytest

import escrowmq as mq
from escrowmq.model import FOREVER


def fill(bus, g, t, count, **given):
    receipts = bus.producer(f"{g}-fill").send_batch([mq.Message(t, str(i).encode(), **given) for i in range(count)])
    return receipts.check()


def test_each_group_gets_every_message_once(bus, t, g, drain):
    fill(bus, g, t, 100)
    for group in (g, f"{g}-2"):
        found = drain(bus.consumer(group, [t]), 100)
        assert {message.body for message in found} == {str(i).encode() for i in range(100)}
        assert {message.attempt for message in found} == {1}


def test_consumers_of_a_group_share_its_messages(bus, t, g):
    fill(bus, g, t, 400)
    found, lock = [], threading.Lock()
    consumers = [bus.consumer(g, [t]) for _ in range(4)]

    def run(consumer):
        with consumer:
            for batch in consumer.batches(20):
                batch.ack()
                with lock:
                    found.extend(batch.arrow.column("body").to_pylist())
                    if len(found) >= 400:
                        for one in consumers:
                            one.stop()

    threads = [threading.Thread(target=run, args=(consumer,)) for consumer in consumers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == sorted(str(i).encode() for i in range(400))
    with bus.consumer(g, [t]) as rest:
        assert rest.receive(10, wait=0.1) == []


def is_receiving(bus, g):
    return any(one["receiving"] for one in bus.admin.standing()[0]["consumers"] if one["group"] == g)


@pytest.mark.parametrize("loop", [lambda consumer: consumer, lambda consumer: consumer.batches(10)])
def test_a_receive_after_a_loop_gets_what_comes(bus, t, g, eventually, loop):
    producer = bus.producer(f"{g}-fill")
    producer.send(t, b"first")
    with bus.consumer(g, [t]) as consumer:
        for found in loop(consumer):
            found.ack()
            break
        eventually(lambda: is_receiving(bus, g))  # ahead of the next use: it will get the message
        threading.Timer(0.1, producer.send, (t, b"second")).start()
        assert [message.body for message in consumer.receive(1, wait=60.0)] == [b"second"]


async def test_a_receive_of_a_task_after_a_loop_gets_what_comes(broker, t, g, eventually):
    async with await broker.aconnect() as bus:
        producer = bus.producer(f"{g}-fill")
        await producer.send(t, b"first")
        consumer = await bus.consumer(g, [t])
        async for batch in consumer.batches(10):
            await batch.ack()
            break
        waiting = asyncio.create_task(consumer.receive(1, wait=60.0))
        await asyncio.sleep(0.1)
        await producer.send(t, b"second")
        assert [message.body for message in await waiting] == [b"second"]
        await consumer.close()


def test_a_waiting_consumer_is_woken(bus, t, g):
    consumer = bus.consumer(g, [t])
    bodies = []

    def run():
        for message in consumer:
            bodies.append(message.body)
            message.ack()
            if message.body == b"stop":
                return

    thread = threading.Thread(target=run)
    thread.start()
    producer = bus.producer(f"{g}-p")
    for body in (b"1", b"2", b"stop"):
        producer.send(t, body, queue=0)
    thread.join(60)
    assert bodies == [b"1", b"2", b"stop"]


def test_a_nack_comes_back_flagged_after_its_delay(bus, t, g):
    fill(bus, g, t, 1)
    consumer = bus.consumer(g, [t])
    (message,) = consumer.receive(1, wait=60)
    assert (message.attempt, message.redelivered) == (1, False)
    start = time.monotonic()
    message.nack(delay=0.2)
    consumer.flush()
    (again,) = consumer.receive(1, wait=60)
    assert time.monotonic() - start >= 0.15
    assert (again.attempt, again.redelivered, again.body, again.offset) == (2, True, message.body, message.offset)
    again.ack()


def test_what_is_not_acked_comes_back_when_its_lease_ends_and_late_acks_are_refused(bus, t, g):
    fill(bus, g, t, 3)
    consumer, other = bus.consumer(g, [t], lease=0.3), bus.consumer(g, [t])
    late = consumer.receive(3, wait=60)
    late[0].ack()
    early = consumer.flush()  # 1 where the machine was slower than the lease
    left = late[1 - early :]
    again = []
    while len(again) < len(left):
        again.extend(other.receive(3, wait=60))
    assert {m.body for m in again} == {m.body for m in left}
    assert {m.attempt for m in again} == {2}
    for message in late[1:]:
        message.ack()
    assert consumer.flush() == 2 + early


def test_extend_keeps_a_lease(bus, t, g):
    fill(bus, g, t, 1)
    consumer, late = bus.consumer(g, [t], lease=0.3), -1
    while consumer.refused > late:  # until the machine is quicker than the lease
        late = consumer.refused
        (message,) = consumer.receive(1, wait=60)
        message.extend(3600)
        consumer.flush()
    assert consumer.receive(1, wait=0.6) == []
    message.ack()
    assert consumer.flush() == late


def test_past_the_limit_it_is_a_dead_letter_that_can_be_retried_or_discarded(bus, t, g):
    fill(bus, g, t, 2)
    consumer = bus.consumer(g, [t], max_attempts=2, retry_backoff=0.01)
    dead = 0
    while dead < 4:
        for message in consumer.receive(10, wait=60):
            dead += 1
            message.nack(delay=0, cause=f"no {message.body.decode()}")
        consumer.flush()
    letters = bus.admin.dead_letters(g)
    assert {(letter["attempts"], letter["cause"][:4]) for letter in letters} == {(2, "no 0"), (2, "no 1")}
    assert bus.admin.retry_dead_letters(g, letters[:1]) == 1
    (again,) = consumer.receive(10, wait=60)
    assert again.offset == letters[0]["offset"]
    again.ack()
    consumer.flush()
    assert bus.admin.discard_dead_letters(g) == 1
    assert bus.admin.dead_letters(g) == []


@pytest.mark.parametrize(("tags", "wanted"), [("a||b", {"a", "b"}), (["c"], {"c"}), (None, {"a", "b", "c", None})])
def test_tags_filter(bus, t, g, tags, wanted, drain):
    producer = bus.producer(f"{g}-p")
    for tag in ("a", "b", "c", None):
        producer.send_batch([mq.Message(t, b"", tag=tag)] * 3)
    found = drain(bus.consumer(g, [t], tags=tags), 3 * len(wanted))
    assert {message.tag for message in found} == wanted


def test_another_subscription_is_refused(bus, t, g):
    bus.consumer(g, [t], tags="a")
    with pytest.raises(mq.Rejected, match="SUBSCRIPTION_MISMATCH"):
        bus.consumer(g, [t], tags="b")


def test_a16_the_start_of_a_group_that_exists_is_not_passed_over_without_a_word(bus, t, g):
    bus.consumer(g, [t], start="latest")
    bus.consumer(g, [t], start="latest")
    bus.consumer(g, [t])
    with pytest.raises(
        mq.Rejected, match=r"exists and began at latest, not earliest \(start= says where a new group"
    ) as no:
        bus.consumer(g, [t], start="earliest")
    assert no.value.code is mq.Code.SUBSCRIPTION_MISMATCH
    with pytest.raises(mq.Rejected, match=r"not 2026-01-02T00:00:00\+00:00"):
        bus.consumer(g, [t], start=datetime(2026, 1, 2, tzinfo=UTC))
    bus.consumer(f"{g}-since", [t], start=datetime(2026, 1, 2, tzinfo=UTC))
    bus.consumer(f"{g}-since", [t], start=datetime(2026, 1, 2, tzinfo=UTC))


@pytest.mark.parametrize(
    ("redelivery", "delays"),
    [("3x5min", [300.0] * 3), ([1, 2.5], [1.0, 2.5]), ("10s, 1min", [10.0, 60.0])],
)
def test_3_8_redelivery_is_a_groups_own(bus, t, g, redelivery, delays):
    bus.consumer(g, [t], redelivery=redelivery)
    bus.consumer(g, [t])
    (group,) = (group for group in bus.admin.groups() if group["name"] == g)
    assert (group["retry_delays"], group["max_attempts"]) == (delays, len(delays) + 1)
    with pytest.raises(mq.Rejected, match=r"SUBSCRIPTION_MISMATCH: the consumer group .* has max_attempts"):
        bus.consumer(g, [t], max_attempts=9)


def test_3_17_redelivery_goes_on_until_a_consumer_succeeds(own, t, g):
    """It has failed more often than the broker's settings allow, and comes again."""
    with own(max_attempts=2).connect() as bus:
        consumer = bus.consumer(g, [t], redelivery="forever", retry_backoff=0.0)
        bus.consumer(g, [t], redelivery="forever")
        bus.producer("p").send(t, b"once more")
        for attempt in range(1, 6):
            message = next(consumer.messages())
            assert message.attempt == attempt
            message.nack(cause="not yet")
        next(consumer.messages()).ack()
        consumer.flush()
        assert bus.admin.dead_letters(g) == []
        bus.admin.alter_group(g, redelivery="3x5min")
        (altered,) = bus.admin.alter_group(g, redelivery="forever")
        assert (altered["retry_delays"], altered["max_attempts"]) == ([], FOREVER)
        for ask in (lambda **more: bus.consumer(g, [t], **more), lambda **more: bus.admin.alter_group(g, **more)):
            with pytest.raises(mq.Misuse, match="one of them"):
                ask(redelivery="forever", max_attempts=9)


@pytest.mark.parametrize("redelivery", ["", "often", [], [-1], ["x"], 5])
def test_redelivery_that_makes_no_sense_is_refused(bus, t, g, redelivery):
    with pytest.raises(mq.Misuse, match="3x5min"):
        bus.consumer(g, [t], redelivery=redelivery)


def test_a_group_is_given_another_subscription(own, t, g, drain):
    """By hand, as the refusal says; and it is the group's still after a restart."""
    broker = own()
    with broker.connect() as bus:
        consumer = bus.consumer(g, [t], tags="a")
        bus.producer("p").send_batch([mq.Message(t, b"1", tag="a"), mq.Message(t, b"2", tag="b")])
        drain(consumer, 1)
        with pytest.raises(mq.Rejected, match=r"bus\.admin\.alter_group"):
            bus.consumer(g, [t, f"{t}-more"], tags="b")
        (altered,) = bus.admin.alter_group(g, topics=[t, f"{t}-more"], tags="b", redelivery=[0.01, 0.02])
        assert (altered["topics"], altered["tags"], altered["max_attempts"]) == ([t, f"{t}-more"], ["b"], 3)
        with pytest.raises(mq.Misuse, match="did you mean 'ordered'"):
            bus.admin.alter_group(g, order=True)
    broker.restart()
    with broker.connect() as bus:
        bus.producer("p").send_batch([mq.Message(topic, b"3", tag=tag) for topic in (t, f"{t}-more") for tag in "ab"])
        found = drain(bus.consumer(g, [t, f"{t}-more"], tags="b"), 2)
        assert {(message.topic, message.tag) for message in found} == {(t, "b"), (f"{t}-more", "b")}
        bus.producer("p").send(t, b"bad", tag="b")
        again = bus.consumer(g, [t, f"{t}-more"], tags="b")
        attempts = []
        while not bus.admin.dead_letters(g):
            for message in again.receive(1, wait=1.0):
                attempts.append(message.attempt)
                message.nack()
            again.flush()
        assert attempts == [1, 2, 3]


def test_ordered_groups_give_each_queue_in_order_one_at_a_time(bus, t, g):
    producer = bus.producer(f"{g}-p")
    for i in range(30):
        producer.send(t, str(i).encode(), key="same")
    found, nacked = [], False
    with bus.consumer(g, [t], ordered=True, retry_backoff=0.01) as consumer:
        for batch in consumer.batches(7, idle_timeout=60.0):
            if not nacked and len(found) >= 7:
                nacked = True
                batch.nack(delay=0)
                continue
            found.extend(int(message.body) for message in batch)
            batch.ack()
            if len(found) == 30:
                break
    assert found == list(range(30))


def test_keys_keep_their_queue_and_order(bus, t, g, drain):
    producer = bus.producer(f"{g}-p")
    receipts = [producer.send(t, str(i).encode(), key=f"k{i % 5}") for i in range(50)]
    for key in range(5):
        assert len({receipts[i].queue for i in range(key, 50, 5)}) == 1
        offsets = [receipts[i].offset for i in range(key, 50, 5)]
        assert offsets == sorted(offsets)
    drain(bus.consumer(g, [t]), 50)


@pytest.mark.invariant("I21")
def test_delayed_messages_are_not_early(bus, t, g):
    producer = bus.producer(f"{g}-p")
    consumer = bus.consumer(g, [t])
    start = time.monotonic()
    receipt = producer.send(t, b"later", delay=0.5)
    assert receipt.offset is None
    producer.send(t, b"now")
    found = []
    while len(found) < 2:
        found.extend((message.body, time.monotonic() - start) for message in consumer.receive(10, wait=60))
    assert sorted(body for body, _ in found) == [b"later", b"now"]
    assert dict(found)[b"later"] >= 0.5


def test_delayed_and_transactional(bus, t, g):
    producer = bus.producer(g, checker=lambda check: mq.UNKNOWN)
    consumer = bus.consumer(g, [t])
    start = time.monotonic()
    with producer.transaction() as txn:
        txn.send(t, b"later", delay=0.4)
    with producer.transaction() as txn:
        txn.send(t, b"never", delay=0.1)
        txn.rollback()
    (message,) = consumer.receive(10, wait=60)
    assert message.body == b"later"
    assert time.monotonic() - start >= 0.4
    assert consumer.receive(10, wait=0.2) == []


def test_start_latest_and_from_a_time(bus, t, g, drain):
    fill(bus, g, t, 5)
    latest = bus.consumer(f"{g}-latest", [t], start="latest")
    time.sleep(0.02)
    between = datetime.now(UTC)
    time.sleep(0.02)
    producer = bus.producer(f"{g}-p")
    for i in range(3):
        producer.send(t, f"new {i}".encode())
    expected = {f"new {i}".encode() for i in range(3)}
    assert {message.body for message in drain(latest, 3)} == expected
    since = bus.consumer(f"{g}-since", [t], start=between)
    assert {message.body for message in drain(since, 3)} == expected


def test_close_gives_back_at_once_what_was_not_handed_out(bus, t, g):
    fill(bus, g, t, 100)
    with bus.consumer(g, [t]) as consumer:
        stream = consumer.messages()
        for _ in range(10):
            next(stream).ack()
    other = bus.consumer(g, [t])
    found = []
    for message in other.messages(idle_timeout=60.0):
        found.append(message.body)
        message.ack()
        if len(found) == 90:
            break
    assert len(set(found)) == 90


def test_a_closed_consumer_takes_no_more_messages(bus, t, g):
    consumer = bus.consumer(g, [t])
    assert list(consumer.messages(idle_timeout=0.05)) == []
    consumer.close()
    fill(bus, g, t, 20)
    found = bus.consumer(g, [t]).receive(100, wait=60)
    assert {message.attempt for message in found} == {1}
    assert len(found) == 20


def test_qos_2_by_the_message_id(bus, t, g, drain):
    producer = bus.producer(f"{g}-p", qos=2)
    receipts = [producer.send(t, b"x", message_id=f"{g}-1") for _ in range(3)]
    assert len({(receipt.position, receipt.offset) for receipt in receipts}) == 1
    marks = set()
    consumer = bus.consumer(g, [t], qos=2, seen=lambda message: message.message_id in marks)
    (message,) = consumer.receive(10, wait=60)
    marks.add(message.message_id)
    message.nack(delay=0)
    consumer.flush()
    assert consumer.receive(10, wait=0.3) == []
    producer.send(t, b"y")
    assert [m.body for m in consumer.receive(10, wait=60)] == [b"y"]


def test_qos_0_end_to_end(bus, t, g):
    producer = bus.producer(f"{g}-p", qos=0)
    for i in range(50):
        producer.send(t, str(i).encode())
    assert producer.flush()
    assert producer.dropped == 0
    with bus.consumer(g, [t], qos=0) as consumer:
        found = []
        for message in consumer.messages(idle_timeout=60.0):
            found.append(message.body)
            if len(found) == 50:
                break
    assert bus.consumer(g, [t]).receive(100, wait=0.2) == []


def test_batches_are_arrow_and_acks_are_durable_on_return(bus, t, g):
    table = pa.table({"topic": [t] * 1000, "body": [str(i) for i in range(1000)], "key": [None] * 1000})
    assert bus.producer(f"{g}-p").send_batch(table).ok
    total = 0
    with bus.consumer(g, [t]) as consumer:
        for batch in consumer.batches(max_messages=300, idle_timeout=60.0):
            assert 0 < len(batch) <= 300
            total += batch.arrow.num_rows
            batch.ack()
            if total == 1000:
                break
    assert total == 1000
    assert bus.consumer(g, [t]).receive(10, wait=0.1) == []


def test_reading_leaves_everything_where_it_is(bus, t, g, drain):
    fill(bus, g, t, 50)
    table = bus.admin.read(t).read_all()
    assert sorted(table.column("body").to_pylist()) == sorted(str(i).encode() for i in range(50))
    assert set(table.column("attempt").to_pylist()) == {0}
    queue = table.column("queue")[0].as_py()
    one = bus.admin.read(t, queue=queue, start=1, end=3, columns=["offset"]).read_all()
    assert one.to_pylist() == [{"offset": 1}, {"offset": 2}]
    drain(bus.consumer(g, [t]), 50)


async def test_consuming_to_await(broker, t, g):
    async with await broker.aconnect() as bus:
        producer = bus.producer(f"{g}-p")
        await producer.send_batch([mq.Message(t, str(i).encode()) for i in range(200)])
        consumer = await bus.consumer(g, [t])
        bodies = []
        async for message in consumer:
            bodies.append(message.body)
            await message.ack()
            if len(bodies) == 100:
                break
        await consumer.close()
        async with await bus.consumer(g, [t]) as other:
            async for batch in other.batches(50, idle_timeout=60.0):
                bodies.extend(message.body for message in batch)
                await batch.ack()
                if len(bodies) == 200:
                    break
        assert sorted(bodies) == sorted(str(i).encode() for i in range(200))
