"""Reading without a group: offsets that the caller keeps, waiting, ranges that are gone, offsets by time."""

import asyncio
import threading
import time
from datetime import UTC, datetime, timedelta

import pytest

import escrowmq as mq
from escrowmq.errors import Code
from escrowmq.schemas import DELIVERY


def bodies(batches) -> list[bytes]:
    return [message.body for batch in batches for message in batch]


def fill(bus: mq.Bus, topic: str, count: int, queues: int = 1, first: int = 0) -> None:
    bus.admin.create_topic(topic, queues, may_exist=True)
    messages = [mq.Message(topic, b"%d" % n, queue=n % queues) for n in range(first, first + count)]
    bus.producer("plain").send_batch(messages).check()


def test_it_reads_what_is_there_and_keeps_the_next_offset(bus, t):
    fill(bus, t, 100, queues=3)
    with bus.reader(t) as reader:
        shard = bus.admin.hello()[0]["shard"]
        assert reader.positions() == {(shard, queue): 0 for queue in range(3)}
        seen: dict[tuple[int, int], int] = dict(reader.positions())
        for batch in reader.batches(7, idle_timeout=0):
            assert batch.arrow.schema == DELIVERY
            assert len(batch) <= 7
            assert batch.arrow["offset"].to_pylist() == list(range(seen[batch.place], batch.next_offset))
            assert set(batch.arrow["lease"].to_pylist()) == {-1}
            assert set(batch.arrow["attempt"].to_pylist()) == {0}
            assert [m.body for m in batch] == [b"%d" % (3 * m.offset + batch.queue) for m in batch]
            seen[batch.place] = batch.next_offset
            assert reader.positions() == seen, "what was handed out, not what was fetched"
        assert seen == {(shard, 0): 34, (shard, 1): 33, (shard, 2): 33}
    assert not bus.admin.groups() or all(t not in group["topics"] for group in bus.admin.groups())


@pytest.mark.invariant("I41")
def test_it_goes_on_from_stored_positions(bus, t):
    fill(bus, t, 20, queues=2)
    with bus.reader(t) as reader:
        for batch in reader.batches(3):
            stored = reader.positions()
            first = bodies([batch])
            break
    fill(bus, t, 6, queues=2, first=20)
    with bus.reader(t, start=stored) as reader:
        rest = bodies(reader.batches(idle_timeout=0))
    assert sorted(first + rest, key=int) == [b"%d" % n for n in range(26)]
    with bus.reader(t, queues=[1], start={(0, 1): 5}) as reader:
        assert bodies(reader.batches(idle_timeout=0)) == [b"%d" % (2 * n + 1) for n in range(5, 13)]
    with bus.reader(t, start="latest") as reader:
        assert bodies(reader.batches(idle_timeout=0)) == []
        fill(bus, t, 1, queues=2, first=26)
        assert bodies(reader.batches(idle_timeout=0)) == [b"26"]


def test_it_wakes_when_a_message_becomes_visible_not_before(bus, t, g):
    bus.admin.create_topic(t, 2)
    found: list[bytes] = []
    came = threading.Event()
    with bus.reader(t) as reader:

        def read() -> None:
            for batch in reader.batches():
                found.extend(bodies([batch]))
                came.set()

        thread = threading.Thread(target=read)
        thread.start()
        producer = bus.producer(g, checker=lambda check: mq.UNKNOWN)
        half = producer.prepare(t, b"half", queue=1)
        bus.producer("plain").send(t, b"plain", queue=0)
        assert came.wait(60)
        assert found == [b"plain"]
        came.clear()
        producer.commit(half.transaction_id)
        assert came.wait(60)
        assert found == [b"plain", b"half"]
        reader.close()
        thread.join(60)
        assert not thread.is_alive()


def test_queues_that_are_made_later_are_read_too(bus, t):
    fill(bus, t, 2)
    with bus.reader(t) as reader, bus.reader(t, queues=[0]) as only:
        assert len(bodies(reader.batches(idle_timeout=0))) == 2
        bus.admin.create_topic(t, 3, may_exist=True)
        bus.producer("plain").send(t, b"new", queue=2)
        assert bodies(reader.batches(idle_timeout=0)) == [b"new"]
        assert {queue: offset for (_, queue), offset in reader.positions().items()} == {0: 2, 2: 1}
        assert len(bodies(only.batches(idle_timeout=0))) == 2
        assert len(only.positions()) == 1


def test_seeking(bus, t):
    fill(bus, t, 30, queues=2)
    with bus.reader(t) as reader:
        everything = bodies(reader.batches(idle_timeout=0))
        reader.seek("earliest")
        assert bodies(reader.batches(4, idle_timeout=0)) == everything
        place = next(place for place in reader.positions() if place[1] == 1)
        reader.seek({place: 13})
        assert bodies(reader.batches(idle_timeout=0)) == [b"27", b"29"]
        reader.seek({(0, 0): 14})
        assert bodies(reader.batches(idle_timeout=0)) == [b"28"]
        reader.seek(datetime.now(UTC) + timedelta(hours=1))
        assert bodies(reader.batches(idle_timeout=0)) == []
        for start in ({place: 16}, {place: -1}, {(9, 0): 0}, {1: 0}, "middle"):
            with pytest.raises(mq.Misuse):
                reader.seek(start)


def test_offsets_by_time(bus, t):
    fill(bus, t, 4)
    time.sleep(0.01)  # times are the broker's: two of them must differ
    middle = datetime.now(UTC)
    time.sleep(0.01)
    fill(bus, t, 3, first=4)
    [line] = bus.admin.offsets(t, time=middle)
    assert (line["queue"], line["head"], line["end"], line["offset_at"]) == (0, 0, 7, 4)
    assert "offset_at" not in bus.admin.offsets(t, 0)[0]
    assert bus.admin.offsets(t, time=datetime.now(UTC) + timedelta(days=1))[0]["offset_at"] == 7
    with bus.reader(t, start=middle) as reader:
        assert bodies(reader.batches(idle_timeout=0)) == [b"4", b"5", b"6"]
    for ask, code in (
        (lambda: bus.admin.offsets(t, 5), Code.BAD_QUEUE),
        (lambda: bus.admin.offsets(t + "x"), Code.UNKNOWN_TOPIC),
    ):
        with pytest.raises(mq.Rejected) as caught:
            ask()
        assert caught.value.code is code


def test_tags_and_columns(bus, t):
    bus.admin.create_topic(t, 1)
    bus.producer("plain").send_batch([mq.Message(t, b"%d" % n, tag="ab"[n % 2]) for n in range(10)]).check()
    with bus.reader(t, tags="a", columns=["body"]) as reader:
        [batch] = reader.batches(idle_timeout=0)
        assert batch.arrow.schema.names == ["body", "offset"]
        assert batch.arrow["offset"].to_pylist() == [0, 2, 4, 6, 8]
        assert list(reader.positions().values()) == [10], "what is not wanted is behind it as well"


def test_what_cannot_be_read_is_told(bus, t):
    fill(bus, t, 1)
    for options, code in (
        ({"queues": [3]}, Code.BAD_QUEUE),
        ({"queues": []}, Code.BAD_ARGUMENT),
        ({"queues": [(77, 0)]}, Code.BAD_ARGUMENT),
        ({"start": {(0, 0): 2}}, Code.BAD_ARGUMENT),
    ):
        with pytest.raises(mq.EscrowError) as caught:
            bus.reader(t, **options)
        assert caught.value.code is code
    with pytest.raises(mq.Rejected) as caught:
        bus.reader(t + "-unknown")
    assert caught.value.code is Code.UNKNOWN_TOPIC


def test_to_await(broker, t):
    async def work() -> None:
        async with await broker.aconnect() as bus:
            producer = bus.producer("plain")
            await bus.admin.create_topic(t, 1)
            async with await bus.reader(t) as reader:
                waiting = asyncio.create_task(anext(reader.batches()))
                await producer.send(t, b"one")
                assert [m.body for m in await waiting] == [b"one"]
                assert list(reader.positions().values()) == [1]
                await reader.seek("earliest")
                assert [bodies([b]) async for b in reader.batches(idle_timeout=0)] == [[b"one"]]

    asyncio.run(work())


def test_a_reader_outlives_the_brokers_restart(own, kind, t):
    if kind == "embedded":
        pytest.skip("an embedded broker restarts with its program")
    broker = own()
    with broker.connect() as bus, bus.reader(t_made(bus, t)) as reader:
        fill(bus, t, 3)
        batches = reader.batches(1)
        assert bodies([next(batches)]) == [b"0"]
        broker.restart(kill=True)
        assert bodies([next(batches), next(batches)]) == [b"1", b"2"]
        fill(bus, t, 1, first=3)
        assert bodies([next(batches)]) == [b"3"]


def t_made(bus: mq.Bus, topic: str) -> str:
    bus.admin.create_topic(topic, 1)
    return topic


@pytest.mark.invariant("I41")
def test_a_start_that_left_with_retention_is_told(own, kind, t, eventually):
    if kind not in ("embedded", "partition"):
        pytest.skip("retention is the engine's: one kind shows it")
    broker = own(retention=1, segment_bytes=1 << 12, snapshot_bytes=1 << 12)
    with broker.connect() as bus:
        fill(bus, t, 50)
        engine = bus.router.links[0]._calls.engine

        def purged() -> bool:
            engine.upkeep._retain_us = 0
            bus.producer("plain").send(t, b"x" * 5000)
            return bus.admin.offsets(t)[0]["head"] > 0

        with bus.reader(t) as reader:
            eventually(purged)
            with pytest.raises(mq.Rejected) as caught:
                list(reader.batches(idle_timeout=0))
            assert caught.value.code is Code.RANGE_PURGED
            reader.seek("earliest")
            head = bus.admin.offsets(t)[0]["head"]
            assert next(reader.batches()).arrow["offset"][0].as_py() >= head > 0
