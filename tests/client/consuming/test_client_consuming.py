"""Consumers over the twin: iteration, batches, acknowledgements, closing, quality of service."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
import warnings
from datetime import UTC, datetime

import pyarrow as pa
import pytest

import escrowmq as mq
from escrowmq import schemas
from escrowmq.client.aio import AsyncBus
from escrowmq.client.bus import Bus
from escrowmq.client.consuming.settling import SettlingCodec, lease_runs
from escrowmq.testing.link import TwinLink
from escrowmq.wire import Exchange


def fill(bus, count, topic="t"):
    bus.producer("p").send_batch([mq.Message(topic, str(i).encode(), key=str(i)) for i in range(count)])


@pytest.mark.invariant("I2")
def test_iteration_gives_every_message_with_its_columns(twin, bus):
    before = datetime.now(UTC)
    bus.producer("p").send("t", b"x", key="k", tag="a", properties={"n": "v"}, message_id="m-1")
    after = datetime.now(UTC)
    consumer = bus.consumer("c", ["t"])
    message = next(iter(consumer))
    assert (message.topic, message.body, message.key, message.tag) == ("t", b"x", "k", "a")
    assert message.properties == {"n": "v"}
    assert (message.queue, message.offset, message.attempt, message.redelivered) == (0, 0, 1, False)
    assert message.transaction_id is None
    assert before <= message.born <= after
    message.ack()
    assert consumer.flush() == 0
    assert twin.acked["c"] == [("t", 0)]


def test_acks_in_order_collapse_to_one_run(twin, bus):
    fill(bus, 1000)
    consumer = bus.consumer("c", ["t"])
    twin.hold(Exchange.SETTLE)
    for message in consumer.messages(idle_timeout=0):
        message.ack()
        if message.offset == 999:
            break
    twin.release(Exchange.SETTLE)
    consumer.flush()
    assert sorted(offset for _, offset in twin.acked["c"]) == list(range(1000))
    assert sum(batch.num_rows for batch in twin.seen(Exchange.SETTLE)) <= 6


def test_a_batch_is_acked_as_one_run_and_durable_on_return(twin, bus):
    fill(bus, 2500)
    consumer = bus.consumer("c", ["t"])
    sizes = []
    for batch in consumer.batches(max_messages=1000, idle_timeout=0.5):
        assert batch.arrow.schema == schemas.DELIVERY
        before = len(twin.acked["c"])
        batch.ack()
        assert len(twin.acked["c"]) == before + len(batch)
        sizes.append(len(batch))
    assert sizes == [1000, 1000, 500]
    assert [batch.num_rows for batch in twin.seen(Exchange.SETTLE)] == [1, 1, 1]


@pytest.mark.invariant("I23")
def test_nack_brings_it_back_flagged(twin, bus):
    fill(bus, 3)
    consumer = bus.consumer("c", ["t"])
    messages = consumer.receive(3)
    messages[1].nack(delay=0, cause="no")
    consumer.flush()
    (again,) = consumer.receive(3)
    assert (again.offset, again.attempt, again.redelivered) == (1, 2, True)
    settle = twin.seen(Exchange.SETTLE)[0].to_pylist()[0]
    assert (settle["act"], settle["delay_us"], settle["cause"]) == (1, 0, "no")


@pytest.mark.invariant("I27")
def test_late_acts_are_told(twin, bus):
    fill(bus, 2)
    consumer = bus.consumer("c", ["t"])
    messages = consumer.receive(2)
    twin._leased.clear()
    messages[0].ack()
    assert consumer.flush() == 1
    with pytest.raises(mq.Rejected, match="LEASE_LOST"):
        messages[1].extend(5)


def test_an_ack_that_was_applied_and_lost_is_no_refusal(twin, bus):
    fill(bus, 2)
    consumer = bus.consumer("c", ["t"])
    twin.lose(Exchange.SETTLE, applied=True)
    (batch,) = list(consumer.batches(idle_timeout=0.5))
    batch.ack()
    assert consumer.refused == 0
    assert len(twin.acked["c"]) == 2


def test_an_ack_that_was_lost_and_then_came_too_late_is_unknown(twin, bus):
    """The lease ended meanwhile: by this ack or by time, nobody can say; to call it ok would lose the redelivery."""
    fill(bus, 2)
    consumer = bus.consumer("c", ["t"])
    (batch,) = list(consumer.batches(idle_timeout=0.5))
    twin._leased.clear()
    twin.lose(Exchange.SETTLE, applied=False)
    with pytest.raises(mq.Unknown, match="DISCONNECTED"):
        batch.ack()
    assert consumer.refused == 0
    assert twin.acked["c"] == []


def test_close_gives_back_what_was_not_handed_out(twin, bus):
    fill(bus, 2500)
    with bus.consumer("c", ["t"]) as consumer:
        stream = consumer.messages()
        for _ in range(10):
            next(stream).ack()
    assert len(twin.acked["c"]) == 10
    returned = sorted(offset for _, offset, _ in twin._returned["c"])
    assert returned[0] == 10
    assert returned == list(range(10, 10 + len(returned)))
    assert not [key for key in twin._leased if key[0] == "c"]
    assert list(stream) == []


def test_close_ends_a_waiting_iteration(bus, eventually):
    consumer = bus.consumer("c", ["t"])
    ended = threading.Event()

    def run():
        for _ in consumer:
            pass
        ended.set()

    thread = threading.Thread(target=run)
    thread.start()
    eventually(lambda: consumer._consumption.fetcher._started)
    consumer.close()
    assert ended.wait(60)
    thread.join()


def test_lost_receives_are_asked_again(twin, bus):
    fill(bus, 5)
    twin.lose(Exchange.RECEIVE, applied=False, times=3)
    consumer = bus.consumer("c", ["t"])
    assert [message.offset for message in itertools.islice(consumer.messages(idle_timeout=60), 5)] == list(range(5))


def test_a_refused_receive_is_raised(twin, bus):
    fill(bus, 1)
    twin.refuse(Exchange.RECEIVE, mq.Denied(mq.Code.DENIED))
    consumer = bus.consumer("c", ["t"])
    with pytest.raises(mq.Denied):
        next(iter(consumer))


def test_qos_0_acks_before_handing_out(twin, bus):
    fill(bus, 5)
    consumer = bus.consumer("c", ["t"], qos=0)
    next(iter(consumer))
    assert len(twin.acked["c"]) == 5


@pytest.mark.invariant("I24")
def test_qos_2_passes_over_what_the_database_has(twin, bus):
    fill(bus, 6)
    marks = {b"1", b"2", b"5"}
    consumer = bus.consumer("c", ["t"], qos=2, seen=lambda message: message.body in marks)
    found = [message.body for message in consumer.messages(idle_timeout=0.5)]
    assert found == [b"0", b"3", b"4"]
    consumer.flush()
    assert sorted(offset for _, offset in twin.acked["c"]) == [1, 2, 5]


@pytest.mark.parametrize(
    "given",
    [
        {"qos": 3},
        {"qos": 2},
        {"seen": bool},
        {"prefetch": 0},
        {"lease": 0},
        {"start": "yesterday"},
        {"tags": ""},
        {"topics": []},
        {"topics": "a b"},
        {"group": ""},
    ],
)
def test_bad_options(twin, bus, given):
    given = {"group": "c", "topics": "t", **given}
    with pytest.raises(mq.EscrowError):
        bus.consumer(**given)
    assert not [name for name, _ in twin.actions if name == "groups.subscribe"]


def test_the_subscription_that_is_asked_for(twin, bus):
    bus.consumer("c", "t", tags="a || b", ordered=True, start=datetime(2026, 1, 2, tzinfo=UTC), max_attempts=3)
    (request,) = [request for name, request in twin.actions if name == "groups.subscribe"]
    assert request == {
        "group": "c",
        "topics": ["t"],
        "tags": ["a", "b"],
        "ordered": True,
        "start": "1767312000000000",
        "max_attempts": 3,
    }


def test_consumers_receive_from_all_brokers():
    twins = [TwinLink(shard) for shard in (11, 12)]
    with Bus(twins) as bus:
        fill(bus, 100)
        consumer = bus.consumer("c", ["t"])
        keys = set()
        for batch in consumer.batches(idle_timeout=0.5):
            keys.update(batch.arrow.column("key").to_pylist())
            batch.ack()
        assert len(keys) == 100
        assert all(len(twin.acked["c"]) == len(twin.topics["t"]) > 0 for twin in twins)


async def test_async_iteration_batches_and_close(twin):
    async with AsyncBus([twin]) as bus:
        await bus.producer("p").send_batch([mq.Message("t", str(i).encode()) for i in range(1500)])
        consumer = await bus.consumer("c", ["t"])
        count = 0
        async for message in consumer:
            await message.ack()
            count += 1
            if count == 20:
                break
        await consumer.close()
        assert len(twin.acked["c"]) == 20
        other, left = await bus.consumer("c", ["t"]), 1480
        async for batch in other.batches(idle_timeout=60):
            await batch.ack()
            left -= len(batch)
            if not left:
                break
        assert sorted(offset for _, offset in twin.acked["c"]) == list(range(1500))
        assert [message async for message in other.messages(idle_timeout=0)] == []


def delivery(rows):
    names = ["lease", "offset"]
    data = [dict(zip(names, row, strict=True)) for row in rows]
    return pa.RecordBatch.from_pylist(data, schema=pa.schema([("lease", pa.int64()), ("offset", pa.int64())]))


def test_runs_cover_gaps_of_one_lease_and_never_two_leases():
    runs = lease_runs(delivery([(1, 0), (1, 3), (2, 4), (2, 5), (1, 9), (1, 2)]))
    assert [column.tolist() for column in runs] == [[1, 2, 1, 1], [0, 4, 9, 2], [4, 2, 1, 1]]


def test_rows_out_of_order_are_not_merged():
    codec = SettlingCodec()
    batch, memo = codec.encode(
        [(1, 0, -2, 0, 0, None), (1, 3, 0, 0, 0, None), (1, 9, 5, 0, 0, None), (1, 5, 3, 1, 7, "c")]
    )
    assert [(row["start"], row["count"], row["act"]) for row in batch.to_pylist()] == [(0, 4, 0), (9, 1, 0), (5, 1, 1)]
    assert memo.tolist() == [0, 0, 1, 2]


@pytest.mark.parametrize("face", ["blocking", "awaited"])
def test_a_receive_that_a_broker_never_answers_is_unknown(twin, face):
    twin.hold(Exchange.RECEIVE)

    async def receive():
        bus = AsyncBus([twin])
        await (await bus.consumer("c", ["t"], timeout=0.05)).receive()

    blocking = Bus([twin]).consumer("c", ["t"])
    blocking._consumption.timeout = 0.05  # it has its time to subscribe
    with pytest.raises(mq.Unknown, match="TIMED_OUT"):
        asyncio.run(receive()) if face == "awaited" else blocking.receive()


@pytest.mark.invariant("I7")
def test_a_fenced_consumer_asks_no_more_and_every_call_says_so(twin, bus):
    fill(bus, 3)
    for _ in range(2):
        twin.refuse(Exchange.RECEIVE, mq.Fenced(mq.Code.FENCED))
    consumer = bus.consumer("c", ["t"])
    for _ in range(3):
        with pytest.raises(mq.Fenced):
            next(iter(consumer))
    fetcher = consumer._consumption.fetcher
    assert fetcher._paused == [False], "no pause, after which it would ask again"
    asked = len([request for request in twin.requests if request.kind is Exchange.RECEIVE])
    fetcher._request(0)
    assert len([request for request in twin.requests if request.kind is Exchange.RECEIVE]) == asked <= 2


async def test_an_ack_that_nobody_awaits_counts(twin):
    bus = AsyncBus([twin])
    await bus.producer("p").send_batch([mq.Message("t", b"x") for _ in range(4)])
    consumer = await bus.consumer("c", ["t"])
    first, second, third, fourth = await consumer.receive(4)
    gc.collect()  # what other tests left behind is not this one's
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first.ack()
        gc.collect()
    await second.ack()
    await asyncio.create_task(third.ack())
    await asyncio.gather(asyncio.wait_for(fourth.ack(), 60))
    assert await consumer.flush() == 0
    await bus.close()
    assert twin.acked["c"] == [("t", offset) for offset in range(4)]


async def test_nor_is_one_of_a_batch_lost_and_awaiting_it_tells_what_became_of_it(twin):
    bus = AsyncBus([twin])
    await bus.producer("p").send_batch([mq.Message("t", b"x") for _ in range(40)])
    consumer = await bus.consumer("c", ["t"])
    batches = consumer.batches(10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (await anext(batches)).ack()
        gc.collect()
    await (await anext(batches)).ack()
    await asyncio.create_task((await anext(batches)).ack())
    last = await anext(batches)
    twin.refuse(Exchange.SETTLE, mq.Rejected(mq.Code.LEASE_LOST))
    with pytest.raises(mq.Rejected, match="LEASE_LOST"):
        await last.ack()
    twin.hold(Exchange.SETTLE)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(last.ack(), 0.01)
    twin.release(Exchange.SETTLE)
    await consumer.flush()
    await bus.close()
    assert twin.acked["c"] == [("t", offset) for offset in range(40)]


def test_a_cause_that_is_no_text_is_refused_at_once_and_harms_no_neighbour(twin, bus):
    """Acts leave in batches: what no batch can hold must not get into one."""
    fill(bus, 4)
    consumer = bus.consumer("c", ["t"])
    messages = consumer.receive(4)
    twin.hold(Exchange.SETTLE)
    messages[0].nack(cause="first")
    messages[1].ack()
    with pytest.raises(mq.Misuse, match="BAD_ARGUMENT"):
        messages[2].nack(cause=ValueError("no"))
    messages[2].nack(cause="lone \ud800 surrogate")
    messages[3].nack(cause="x" * 40_000_000)
    twin.release(Exchange.SETTLE)
    assert consumer.flush() == 0
    assert twin.acked["c"] == [("t", 1)]
    causes = [row["cause"] for batch in twin.seen(Exchange.SETTLE) for row in batch.to_pylist()]
    assert causes == ["first", None, "lone ? surrogate", "x" * 1024]
    with pytest.raises(mq.Misuse, match="BAD_ARGUMENT"):
        next(iter(consumer.batches(idle_timeout=0.5))).nack(cause=7)


@pytest.mark.invariant("I25")
def test_what_nobody_took_is_given_back_before_its_lease_ends(twin, bus):
    """The consumer is busy with its first batch; what was fetched ahead is released, and fetched anew when it comes
    back."""
    fill(bus, 3000)
    consumer = bus.consumer("c", ["t"], lease=0.3)
    batches = consumer.batches(max_messages=1000, idle_timeout=60)
    released = threading.Event()
    real = twin.exchange

    def exchange(kind, batch, options):
        if kind is Exchange.SETTLE and mq.model.Act.RELEASE in batch["act"].to_pylist():
            released.set()
        return real(kind, batch, options)

    twin.exchange = exchange
    first = next(batches)
    fill(bus, 10)
    assert released.wait(60)
    first.ack()
    found = first.arrow["offset"].to_pylist()
    for batch in batches:
        batch.ack()
        found += batch.arrow["offset"].to_pylist()
        if len(found) == 3010:
            consumer.stop()
    assert sorted(found) == list(range(3010))


def test_a_consumer_that_takes_messages_one_by_one_says_so(twin, bus):
    fill(bus, 2)
    one, whole = bus.consumer("one", ["t"]), bus.consumer("whole", ["t"])
    assert next(iter(one)).body == next(iter(whole.batches())).arrow["body"][0].as_py()
    said = {r.options["group"]: r.options.get("one_by_one") for r in twin.requests if r.kind is Exchange.RECEIVE}
    assert said == {"one": True, "whole": False}
