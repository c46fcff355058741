"""System views from the bus: ``%half``, ``%op``, ``%acks`` and dead letters, read and followed as RocketMQ's system
topics are.
"""

import asyncio
import itertools
import threading
from datetime import UTC, datetime

import pytest

import escrowmq as mq
from escrowmq.errors import Code, Misuse, Rejected
from escrowmq.schemas import ACK_VIEW, DELIVERY, HALF_VIEW, OP_VIEW

DEAD = "%dead-letters.failing"


def rows(reader, **more) -> list:
    return [message for batch in reader.batches(idle_timeout=0, **more) for message in batch]


def begin(bus: mq.Bus, count: int, first: int = 0) -> list[mq.Receipt]:
    producer = bus.producer("shop", unasked=True)
    return [
        producer.prepare("t", b"%d" % n, key=f"k{n}", tag="a" if n % 2 else "b") for n in range(first, first + count)
    ]


def decide(bus: mq.Bus, receipts: list[mq.Receipt]) -> None:
    producer = bus.producer("shop", unasked=True)
    for n, receipt in enumerate(receipts):
        (producer.rollback if n % 2 else producer.commit)(receipt.transaction_id)


def fail(bus: mq.Bus, *bodies: bytes) -> None:
    """Dead letters of the group "failing"."""
    with bus.consumer("failing", "d", max_attempts=1) as consumer:
        bus.producer("p").send_batch([mq.Message("d", body, queue=n % 4) for n, body in enumerate(bodies)]).check()
        for message in itertools.islice(consumer, len(bodies)):
            message.nack(cause="spoilt")
        consumer.flush()


@pytest.fixture
def filled(own):
    """A broker with six half messages, their decisions, acknowledgements and dead letters."""
    broker = own(auto_create_topics=True)
    with broker.connect() as bus:
        receipts = begin(bus, 6)
        decide(bus, receipts[:4])
        with bus.consumer("g", "t") as consumer:
            for message in itertools.islice(consumer, 2):
                message.ack()
            consumer.flush()
        fail(bus, b"x", b"y")
        broker.receipts = receipts
        yield broker, bus


def test_a_reader_reads_every_view(filled):
    broker, bus = filled
    shard = bus.admin.hello()[0]["shard"]
    with bus.reader("%half") as reader:
        found = rows(reader)
        assert [m.body for m in found] == [b"%d" % n for n in range(6)]
        assert [m.position for m in found] == [m.offset for m in found] == [r.position for r in broker.receipts]
        assert [m.transaction_id for m in found] == [r.transaction_id for r in broker.receipts]
        assert reader.positions() == {(shard, 0): bus.admin.offsets("%half")[0]["end"]}
    with bus.reader("%half", tags="a", key="k3") as reader:
        (batch,) = reader.batches(idle_timeout=0)
        assert batch.arrow.schema == HALF_VIEW
        assert [(m.key, batch.arrow["state"][0].as_py()) for m in batch] == [("k3", mq.TransactionState.ROLLED_BACK)]
    with bus.reader("%op") as reader:
        (batch,) = reader.batches(idle_timeout=0)
        assert batch.arrow.schema == OP_VIEW
        assert [m.tag for m in batch] == ["committed", "rolled_back"] * 2
        assert [m.key for m in batch] == [str(r.transaction_id) for r in broker.receipts[:4]]
        assert [m.body for m in batch] == [b"%d" % r.position for r in broker.receipts[:4]]
        assert batch[0].properties["decided_by"] == "producer"
        assert batch.next_offset == batch[3].position + 1
    with bus.reader("%acks", of_group="g") as reader:
        (batch,) = reader.batches(idle_timeout=0)
        assert batch.arrow.schema == ACK_VIEW
        assert {m.tag for m in batch} == {"g"}
        assert sum(batch.arrow["count"].to_pylist()) == 2
        assert {m.key.partition("/")[0] for m in batch} == {"t"}
    with bus.reader(DEAD) as reader:
        (batch,) = reader.batches(idle_timeout=0)
        assert batch.arrow.schema == DELIVERY
        assert sorted(m.body for m in batch) == [b"x", b"y"]
    with bus.reader("%op", columns=["state"]) as reader:
        (batch,) = reader.batches(idle_timeout=0)
        assert batch.arrow.schema.names == ["state", "position"]
        assert [m.tag for m in batch] == ["committed", "rolled_back"] * 2


def test_1_15_a_committed_message_tells_where_its_half_message_stands(filled):
    _, bus = filled
    shard = bus.admin.hello()[0]["shard"]
    (committed, *_) = bus.consumer("who-asks", "t").receive(10, wait=60.0)
    assert committed.transaction_id is not None
    with bus.reader("%half", start={(shard, 0): committed.position}) as reader:
        half = rows(reader)[0]
    assert (half.offset, half.message_id) == (committed.position, committed.message_id)
    assert (half.born, half.stored, half.transaction_id) == (committed.born, committed.stored, committed.transaction_id)


def test_it_begins_where_it_is_told(filled):
    broker, bus = filled
    shard = bus.admin.hello()[0]["shard"]
    now = datetime.now(UTC)
    third = broker.receipts[3].position
    with bus.reader("%half", start={(shard, 0): third}) as reader:
        assert [m.key for m in rows(reader, max_messages=1)] == ["k3", "k4", "k5"]
        reader.seek({(shard, 0): third + 1})
        assert [m.key for m in rows(reader)] == ["k4", "k5"]
        kept = reader.positions()
    for view in ("%half", "%op", "%acks", DEAD):
        with bus.reader(view, start="latest") as late, bus.reader(view, start=now) as timed:
            assert not rows(late)
            assert not rows(timed)
    with bus.reader("%half", start=now) as timed, bus.reader(DEAD, start=now) as dead:
        begin(bus, 1, first=6)
        fail(bus, b"z")
        assert [m.key for m in rows(timed)] == ["k6"]
        assert [m.body for m in rows(dead)] == [b"z"]
        positions = dead.positions()
    with bus.reader(DEAD, start=positions) as dead, bus.reader("%half", start=kept) as half:
        assert not rows(dead)
        assert [m.key for m in rows(half)] == ["k6"]
        bus.admin.retry_dead_letters("failing")
        fail(bus)
        with bus.consumer("failing", "d") as consumer:
            for message in itertools.islice(consumer, 3):
                message.nack()
            consumer.flush()
        assert len(rows(dead)) == 3, "they died again"


def test_it_is_followed(filled):
    _, bus = filled
    views = ("%half", "%op", "%acks", DEAD)
    found = {view: [] for view in views}
    everything = threading.Event()

    def follow(view, reader):
        for batch in reader:
            found[view] += [m.offset for m in batch]
            if all(len(each) >= 3 for each in found.values()):
                everything.set()

    readers = {view: bus.reader(view, start="latest") for view in views}
    threads = [threading.Thread(target=follow, args=pair) for pair in readers.items()]
    for thread in threads:
        thread.start()
    for n in range(3):
        decide(bus, begin(bus, 1, first=10 + n))
        with bus.consumer("g", "t") as consumer:
            next(iter(consumer)).ack()
        fail(bus, b"later")
    assert everything.wait(60), found
    for reader in readers.values():
        reader.close()
    for thread in threads:
        thread.join()
    assert all(len(found[view]) == 3 for view in ("%half", "%op", DEAD))


def test_a_consumer_browses_and_acknowledges_nothing(filled):
    broker, bus = filled

    def look(found, message):
        assert [m.body for m in found] == [b"%d" % n for n in range(6)]
        assert message.attempt == 0
        for act in (message.ack, message.nack, lambda: message.extend(1.0)):
            with pytest.raises(mq.EscrowError) as caught:
                act()
            assert caught.value.code is Code.DENIED

    before = bus.admin.groups()
    with bus.consumer("browser", "%half") as consumer:
        found = list(itertools.islice(consumer, 6))
        look(found, found[0])
        assert list(consumer.messages(idle_timeout=0.5)) == []
        assert consumer.flush() == consumer.refused == 0
        begin(bus, 1, first=6)
        assert [m.key for m in consumer.receive(5, wait=60.0)] == ["k6"]
        batch = next(bus.consumer("browser", "%op", tags=None).batches())
        with pytest.raises(mq.EscrowError, match="nothing to ack"):
            batch.ack()
        assert len(batch) == 4
        assert [m.body for m in bus.consumer("browser", DEAD).receive(1, wait=60.0)] == [b"x"]
    assert bus.admin.groups() == before, "no group was made"

    async def awaited():
        async with await broker.aconnect() as other, await other.consumer("browser", ["%half"], tags="a") as consumer:
            found = []
            async for message in consumer:
                found.append(message)
                if len(found) == 3:
                    break
            assert [m async for m in consumer.messages(idle_timeout=0.5)] == []
            assert [m.key for m in found] == ["k1", "k3", "k5"]
            with pytest.raises(mq.EscrowError, match="nothing to nack"):
                await found[0].nack()
            async with await other.reader("%op") as reader:
                return [m.tag async for batch in reader.batches(idle_timeout=0) for m in batch]

    assert asyncio.run(awaited()) == ["committed", "rolled_back"] * 2

    for options in ({"ordered": True}, {"max_attempts": 3}, {"qos": 0}, {"in_doubt": "hold", "instance": "a"}):
        with pytest.raises(Misuse, match="for reading only"):
            bus.consumer("browser", "%half", **options)
    with pytest.raises(Misuse, match="browses one system view alone"):
        bus.consumer("browser", ["%half", "t"])
    for view in ("%halves", "%dead-letters.nobody"):
        with pytest.raises(Rejected) as caught:
            bus.consumer("browser", view)
        assert caught.value.code in (Code.UNKNOWN_TOPIC, Code.UNKNOWN_GROUP)
