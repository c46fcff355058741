"""In-doubt work stays with the consumer that had it, until its next process comes or a person fences it (row 4.9)."""

import asyncio

import pytest

import escrowmq as mq
from escrowmq.errors import Code


def fill(bus: mq.Bus, topic: str, count: int, size: int = 10) -> None:
    bus.admin.create_topic(topic, 1, may_exist=True)
    bus.producer("plain").send_batch([mq.Message(topic, b"%0*d" % (size, n)) for n in range(count)]).check()


def holder(bus: mq.Bus, topic: str, instance: str, **options) -> mq.Consumer:
    return bus.consumer(f"c-{topic}", topic, instance=instance, in_doubt="hold", **options)


def numbers(messages) -> list[tuple[int, int]]:
    return [(int(message.body), message.attempt) for message in messages]


def silent(broker, topic: str, count: int) -> list[mq.Received]:
    """A process that takes messages and is never heard of again (its connection goes with it)."""
    with broker.connect() as bus:
        return holder(bus, topic, "one").receive(count, wait=60)


@pytest.mark.invariant("I27")
def test_nobody_else_gets_it_until_the_name_comes_back(own, t):
    broker = own(lease_seconds=0.05)
    with broker.connect() as bus:
        fill(bus, t, 6)
        assert numbers(silent(broker, t, 4)) == [(n, 1) for n in range(4)]
        with holder(bus, t, "two") as other:
            assert numbers(other.receive(10, wait=60)) == [(4, 1), (5, 1)]
            assert other.receive(10, wait=0.3) == [], "six leases' time"
            with holder(bus, t, "one") as back:
                again = back.receive(10, wait=60)
                assert numbers(again) == [(n, 2) for n in range(4)]
                assert all(message.redelivered for message in again)
                for message in again:
                    message.ack()
                assert back.flush() == 0


@pytest.mark.invariant("I27")
def test_an_older_process_can_neither_receive_nor_settle(own, t):
    broker = own()
    with broker.connect() as bus, broker.connect() as other:
        fill(bus, t, 3)
        old = holder(bus, t, "one")
        [first, second] = old.receive(2, wait=60)
        first.ack()
        old.flush()
        with holder(other, t, "one") as new:
            assert numbers(new.receive(10, wait=60)) == [(1, 2), (2, 1)]
            second.ack()
            assert old.flush() == 1
            with pytest.raises(mq.Fenced):
                old.receive(1, wait=0)
            with pytest.raises(mq.Fenced):
                next(old.batches())


@pytest.mark.invariant("I27")
def test_fencing_gives_back_to_the_group(own, t):
    broker = own()
    with broker.connect() as bus:
        fill(bus, t, 4)
        lost = holder(bus, t, "one")
        held = lost.receive(3, wait=60)
        with holder(bus, t, "two") as other:
            [line] = [line for line in bus.admin.members(f"c-{t}") if line["instance"] == "one"]
            assert (line["messages"], line["fenced"], line["held"][0]["last"]) == (3, False, 2)
            assert bus.admin.fence(f"c-{t}", "one") == 3
            assert numbers(other.receive(10, wait=60)) == [(0, 2), (1, 2), (2, 2), (3, 1)]
            for message in held:
                message.ack()
            assert lost.flush() == 3, "late acknowledgements are refused"
            with pytest.raises(mq.Fenced):
                lost.receive(1, wait=0)
            [line] = [line for line in bus.admin.members(f"c-{t}") if line["instance"] == "one"]
            assert (line["messages"], line["fenced"]) == (0, True)
        for group, name, code in ((f"c-{t}", "nobody", Code.NOT_FOUND), ("none", "one", Code.UNKNOWN_GROUP)):
            with pytest.raises(mq.Rejected) as caught:
                bus.admin.fence(group, name)
            assert caught.value.code is code


@pytest.mark.invariant("I23")
def test_a_broker_restart_keeps_what_is_held_and_loses_nothing(own, kind, t):
    if kind == "embedded":
        pytest.skip("an embedded broker restarts with its program")
    broker = own()
    with broker.connect() as bus:
        fill(bus, t, 300, size=1000)
        with holder(bus, t, "one", max_bytes=10_000) as consumer:
            batches = consumer.batches(50)
            done, held = [], next(batches)
            for kill in (True, False):
                broker.restart(kill=kill)
                held.ack()
                done += numbers(held)
                held = next(batches)
            held.ack()
            done += numbers(held)
            while len({number for number, _ in done}) < 300:
                batch = next(batches)
                batch.ack()
                done += numbers(batch)
            assert sorted(number for number, _ in done) == list(range(300)), "acknowledged once each"
            assert consumer.refused == 0
        with holder(bus, t, "two") as other:
            assert other.receive(10, wait=0.2) == []


@pytest.mark.invariant("I23")
def test_what_was_fetched_and_not_handed_out_is_given_back_uncounted(own, t):
    broker = own()
    with broker.connect() as bus:
        fill(bus, t, 10)
        with holder(bus, t, "one", prefetch=4) as consumer:
            for message in consumer:
                assert numbers([message]) == [(0, 1)]
                message.ack()
                break
        with holder(bus, t, "two") as other:
            assert numbers(other.receive(20, wait=60)) == [(n, 1) for n in range(1, 10)]


def test_options_go_together(bus, t):
    for options in (
        {"in_doubt": "hold"},
        {"instance": "a"},
        {"in_doubt": "x"},
        {"in_doubt": "hold", "instance": "a", "lease": 3},
    ):
        with pytest.raises(mq.Misuse):
            bus.consumer("g", t, **options)
    with bus.consumer(f"c-{t}", t), pytest.raises(mq.Rejected) as caught:
        holder(bus, t, "one")
    assert caught.value.code is Code.SUBSCRIPTION_MISMATCH


def test_to_await(own, t):
    broker = own()
    with broker.connect() as bus:
        fill(bus, t, 2)

    async def work() -> list[tuple[int, int]]:
        async with await broker.aconnect() as bus:
            consumer = await bus.consumer(f"c-{t}", t, instance="one", in_doubt="hold")
            return numbers(await consumer.receive(10, wait=60))

    assert asyncio.run(work()) == [(0, 1), (1, 1)]
    assert asyncio.run(work()) == [(0, 2), (1, 2)]
