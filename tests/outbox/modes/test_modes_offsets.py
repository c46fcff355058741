"""Offsets in the consumer's database: one transaction with the effect, fenced by the epoch, slots that never
overlap."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st
from modes_roles import noted, offset_effect

import escrowmq as mq
from damaging import flip
from escrowmq.errors import Code, Corrupt, Fenced, Misuse, Rejected
from escrowmq.outbox.modes import BothReachProducer, OffsetConsumer, Slot, Taken, divide, fence, slots_of, split_topic
from escrowmq.outbox.tables import trans_recv_offset


@pytest.fixture
def local(make_database: Callable[[str], str]) -> Any:
    engine = sa.create_engine(make_database("local"))
    yield engine
    engine.dispose()


def fill(bus: mq.Bus, topic: str, count: int, start: int = 0) -> list[bytes]:
    """Send messages to the topic's one queue; their ids."""
    producer = bus.producer("plain")
    receipts = producer.send_batch([mq.Message(topic, b"%d" % n) for n in range(start, start + count)])
    producer.close()
    return list(receipts.check().message_ids.to_pylist())


def drain(consumer: OffsetConsumer, effect: Any = offset_effect, most: int = 7) -> int:
    total = 0
    while found := consumer.poll(effect, most):
        total += found
    return total


def test_each_message_has_one_effect_and_the_offset_moves_with_it(bus: mq.Bus, database: sa.Engine, t: str) -> None:
    ids = fill(bus, t, 20)
    with OffsetConsumer(bus, database, "cart", t, slots_of(bus, t), owner="c-1") as consumer:
        assert drain(consumer) == 20
        ids += fill(bus, t, 5, 20)
        assert drain(consumer) == 5
        assert set(consumer.positions.values()) == {25}
    assert noted(database, "effects") == ids
    with OffsetConsumer(bus, database, "cart", t, owner="c-1") as again:
        assert drain(again) == 0
    with OffsetConsumer(bus, database, "another", t, owner="c-1") as other:
        assert drain(other) == 25


def test_what_the_effect_gets(bus: mq.Bus, local: sa.Engine, t: str) -> None:
    ids = fill(bus, t, 3)
    got: list[Taken] = []
    OffsetConsumer(bus, local, "cart", t, owner="c-1").poll(lambda session, messages: got.append(messages))
    (messages,) = got
    assert [m.message_id for m in messages] == ids == messages.arrow.column("message_id").to_pylist()
    assert [m.offset for m in messages] == [0, 1, 2]
    assert messages[-1].body == b"2"
    assert [m.body for m in messages[1:]] == [b"1", b"2"]


def test_queues_that_are_made_later_are_claimed_with_their_first_message(
    bus: mq.Bus, database: sa.Engine, t: str
) -> None:
    ids = fill(bus, t, 2)
    with OffsetConsumer(bus, database, "cart", t, owner="c-1") as consumer:
        assert drain(consumer) == 2
        bus.admin.create_topic(t, 3, may_exist=True)
        producer = bus.producer("later")
        ids += [producer.send(t, b"late", queue=2).message_id for _ in range(9)]
        assert drain(consumer) == 9
        assert {slot.queue for slot in consumer.positions} >= {0, 2}
    assert noted(database, "effects") == ids
    with OffsetConsumer(bus, database, "cart", t, owner="c-1") as again:
        assert drain(again) == 0


def test_a_queue_that_is_made_later_and_is_anothers_is_refused_and_not_passed_over(
    bus: mq.Bus, database: sa.Engine, t: str
) -> None:
    fill(bus, t, 1)
    with OffsetConsumer(bus, database, "cart", t, owner="c-1") as consumer:
        assert drain(consumer) == 1
        bus.admin.create_topic(t, 2, may_exist=True)
        ids = [bus.producer("later").send(t, b"late", queue=1).message_id for _ in range(3)]
        other = OffsetConsumer(bus, database, "cart", t, slots_of(bus, t, queues=[1]), owner="c-2")
        for _ in range(2):
            with pytest.raises(Rejected) as refused:
                drain(consumer)
            assert refused.value.code is Code.ALREADY_EXISTS
        other.close()
        assert drain(consumer) == 3
    assert noted(database, "effects")[1:] == ids


def test_a_failed_effect_moves_nothing(bus: mq.Bus, database: sa.Engine, t: str) -> None:
    fill(bus, t, 3)
    consumer = OffsetConsumer(bus, database, "cart", t, owner="c-1")

    def fails(session: Any, messages: Taken) -> None:
        offset_effect(session, messages)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        consumer.poll(fails)
    assert noted(database, "effects") == []
    assert drain(consumer) == 3
    assert len(noted(database, "effects")) == 3


@pytest.mark.invariant("I24")
def test_a_newer_consumer_fences_the_older_one(bus: mq.Bus, database: sa.Engine, t: str) -> None:
    """The same owner, started again: the one before rolls back in the middle of its effect."""
    fill(bus, t, 4)
    old = OffsetConsumer(bus, database, "cart", t, owner="c-1")
    new = OffsetConsumer(bus, database, "cart", t, owner="c-1")
    with pytest.raises(Fenced):
        old.poll(offset_effect)
    assert noted(database, "effects") == []
    assert drain(new) == 4
    with pytest.raises(Fenced):
        old.poll(lambda session, messages: pytest.fail("a fenced consumer must not even begin"))
    assert len(noted(database, "effects")) == 4


def test_a_take_over_waits_for_the_transaction_that_is_under_way(bus: mq.Bus, database: sa.Engine, t: str) -> None:
    fill(bus, t, 4)
    old = OffsetConsumer(bus, database, "cart", t, owner="c-1")
    made: list[OffsetConsumer] = []
    taking = threading.Thread(
        target=lambda: made.append(OffsetConsumer(bus, database, "cart", t, owner="c-2", take_over=True))
    )

    def effect(session: Any, messages: Taken) -> None:
        taking.start()
        taking.join(0.2)
        offset_effect(session, messages)

    assert old.poll(effect, 2) == 2
    taking.join()
    assert set(made[0].positions.values()) == {2}
    assert drain(made[0]) == 2
    assert len(set(noted(database, "effects"))) == 4 == len(noted(database, "effects"))


def test_a_silent_consumers_slots_stay_its_own_until_fenced_by_hand(bus: mq.Bus, database: sa.Engine, t: str) -> None:
    """4.9: nobody but a person knows that it is dead."""
    fill(bus, t, 2)
    silent = OffsetConsumer(bus, database, "cart", t, owner="c-1")
    with pytest.raises(Rejected) as raised:
        OffsetConsumer(bus, database, "cart", t, owner="c-2")
    assert raised.value.code is Code.ALREADY_EXISTS
    fence(database, "cart", t, list(silent.positions))
    other = OffsetConsumer(bus, database, "cart", t, owner="c-2")
    with pytest.raises(Fenced):
        silent.poll(offset_effect)
    assert drain(other) == 2
    other.close()
    third = OffsetConsumer(bus, database, "cart", t, owner="c-3")
    silent.close()  # lets nothing go that is not its own any more
    with pytest.raises(Rejected):
        OffsetConsumer(bus, database, "cart", t, owner="c-4")
    third.close()


def test_virtual_queues_split_one_queue_without_loss_or_overlap(bus: mq.Bus, database: sa.Engine, t: str) -> None:
    ids = fill(bus, t, 25)
    parts = [
        OffsetConsumer(bus, database, "cart", t, slots_of(bus, t, stride=3, part=part), owner=f"c-{part}")
        for part in range(3)
    ]
    taken = [drain(consumer) for consumer in parts]
    assert taken == [9, 8, 8]
    assert sorted(noted(database, "effects")) == sorted(ids)


def test_overlapping_strides_are_refused(bus: mq.Bus, database: sa.Engine, t: str) -> None:
    fill(bus, t, 1)
    OffsetConsumer(bus, database, "cart", t, slots_of(bus, t, stride=4, part=1), owner="c-1").close()
    for stride, part in ((1, 0), (2, 1), (8, 5), (6, 3)):
        with pytest.raises(Misuse):
            OffsetConsumer(bus, database, "cart", t, slots_of(bus, t, stride=stride, part=part), owner="c-1")
    OffsetConsumer(bus, database, "cart", t, slots_of(bus, t, stride=4, part=2), owner="c-1").close()
    OffsetConsumer(bus, database, "cart", t, slots_of(bus, t, stride=8, part=3), owner="c-1").close()
    with pytest.raises(Misuse):
        OffsetConsumer(bus, database, "other", t, [Slot(*key) for key in _both(bus, t)], owner="c-1")


def test_4_18_parts_of_a_queue_with_both_reach_messages_are_refused(bus: mq.Bus, local: sa.Engine, t: str) -> None:
    """A prepare and its end could go to different consumers. Nothing is handled, and the whole queue can still be
    read."""
    producer = BothReachProducer(bus.producer("shop-plain"), local, "shop-both")
    producer.send(mq.Message(t, b"a pen"), lambda session: None)
    fill(bus, t, 4)
    handled: list[object] = []
    for part in range(2):
        with OffsetConsumer(bus, local, "parts", t, slots_of(bus, t, stride=2, part=part), owner=f"c-{part}") as reader:
            with pytest.raises(Misuse, match=r"both-reach mode.*whole queue"):
                reader.poll(lambda session, messages: handled.append(messages))
            assert set(reader.positions.values()) == {0}
    assert handled == []
    with OffsetConsumer(bus, local, "whole", t, owner="c-9") as reader:
        assert reader.poll(lambda session, messages: handled.append(messages)) == 6


def _both(bus: mq.Bus, t: str) -> list[tuple[int, int, int, int]]:
    (slot,) = slots_of(bus, t)
    return [(slot.shard, slot.queue, 2, 0), (slot.shard, slot.queue, 4, 2)]


def test_claims_at_the_same_time_cannot_overlook_each_other(bus: mq.Bus, database: sa.Engine, t: str) -> None:
    fill(bus, t, 1)
    outcomes: list[str] = []
    barrier = threading.Barrier(2)

    def claim(stride: int) -> None:
        barrier.wait()
        try:
            OffsetConsumer(bus, database, "cart", t, slots_of(bus, t, stride=stride), owner="c-1")
            outcomes.append("claimed")
        except (Misuse, sa.exc.DBAPIError) as problem:
            outcomes.append(type(problem).__name__)

    threads = [threading.Thread(target=claim, args=(stride,)) for stride in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count("claimed") == 1
    with database.begin() as connection:
        owned = connection.execute(sa.select(trans_recv_offset).where(trans_recv_offset.c.stride > 0)).all()
    assert len(owned) == 1


def test_a_queue_at_rest_is_divided_anew(bus: mq.Bus, database: sa.Engine, t: str) -> None:
    ids = fill(bus, t, 10)
    (whole,) = slots_of(bus, t)
    consumer = OffsetConsumer(bus, database, "cart", t, [whole], owner="c-1")
    drain(consumer)
    with pytest.raises(Rejected):
        divide(database, "cart", t, whole.shard, whole.queue, 2)
    consumer.close()
    slots = divide(database, "cart", t, whole.shard, whole.queue, 2)
    ids += fill(bus, t, 7, 10)
    one = OffsetConsumer(bus, database, "cart", t, slots[:1], owner="a")
    assert drain(one) == 4
    one.close()
    with pytest.raises(Misuse):  # one part is ahead of the other
        divide(database, "cart", t, whole.shard, whole.queue, 1)
    two = OffsetConsumer(bus, database, "cart", t, slots[1:], owner="b")
    assert drain(two) == 3
    two.close()
    assert divide(database, "cart", t, whole.shard, whole.queue, 1) == [whole]
    with OffsetConsumer(bus, database, "cart", t, [whole], owner="c-1") as last:
        assert drain(last) == 0
    assert sorted(noted(database, "effects")) == sorted(ids)


@given(st.integers(1, 12), st.integers(0, 11), st.integers(1, 12), st.integers(0, 11))
def test_overlap_is_what_counting_finds(stride: int, part: int, other: int, of_other: int) -> None:
    one, two = Slot(1, 1, stride, part % stride), Slot(1, 1, other, of_other % other)
    offsets = range(stride * other)
    both = any(o % one.stride == one.part and o % two.stride == two.part for o in offsets)
    assert one.overlaps(two) == two.overlaps(one) == both
    assert not one.overlaps(Slot(1, 2, two.stride, two.part))
    for offset in offsets:
        assert one.first(offset) == next(o for o in range(offset, offset + stride) if o % stride == one.part)


def test_purged_offsets_are_an_error_unless_told_otherwise(
    tmp_path: Path, local: sa.Engine, t: str, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"retention": 1, "segment_bytes": 4096, "snapshot_bytes": 4096, "default_queues": 1}
    with mq.connect(f"file:{tmp_path / 'short'}", **options) as bus:
        fill(bus, t, 3)
        consumer = OffsetConsumer(bus, local, "cart", t, owner="c")
        skipping = OffsetConsumer(bus, local, "other", t, owner="c", on_purged="skip")

        engine: Any = bus.router.links[0]._calls.engine

        def trimmed() -> bool:
            engine.upkeep._retain_us = 0
            bus.producer("filler").send(t, b"x" * 5000)
            return bus.admin.topics()[0]["queues"][0]["head"] > 0

        _wait(trimmed)
        with pytest.raises(Rejected) as raised:
            consumer.poll(offset_effect)
        assert raised.value.code is Code.RANGE_PURGED
        assert set(consumer.positions.values()) == {0}
        with caplog.at_level(logging.WARNING):
            _wait(lambda: skipping.poll(offset_effect))
        assert "left the log unread" in caplog.text


def _wait(condition: Callable[[], Any]) -> None:
    import time

    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_where_to_start(bus: mq.Bus, local: sa.Engine, t: str) -> None:
    fill(bus, t, 5)
    for group, start, expected in (("a", "earliest", 5), ("b", "latest", 0), ("c", 3, 2)):
        with OffsetConsumer(bus, local, group, t, start=start, owner="c-1") as consumer:
            assert drain(consumer) == expected
    for bad in ("soon", True, 1.5):
        with pytest.raises(Misuse):
            OffsetConsumer(bus, local, "d", t, start=bad, owner="c-1")  # type: ignore[arg-type]
    with pytest.raises(Misuse):
        OffsetConsumer(bus, local, "d", t, on_purged="guess", owner="c-1")
    with pytest.raises(Rejected):
        OffsetConsumer(bus, local, "d", "no-such-topic", owner="c-1")
    with pytest.raises(Rejected):
        slots_of(bus, t, queues=[7])
    with pytest.raises(Rejected):
        OffsetConsumer(bus, local, "d", t, [Slot(1, 0)], owner="c-1")
    with pytest.raises(Misuse):
        Slot(1, 1, 2, 2)


def test_running_until_told_to_stop(bus: mq.Bus, local: sa.Engine, t: str) -> None:
    fill(bus, t, 3)
    consumer, stop = OffsetConsumer(bus, local, "cart", t, owner="c-1"), threading.Event()

    def effect(session: Any, messages: Taken) -> None:
        offset_effect(session, messages)
        stop.set()

    assert consumer.run(effect, stop=stop) == 3
    assert consumer.run(offset_effect, idle_timeout=0.0) == 0


def test_a_topic_in_parts() -> None:
    split = split_topic("t", 4)
    assert split.names == ("t-queue-1", "t-queue-2", "t-queue-3", "t-queue-4")
    keys = [f"k{n}" for n in range(200)]
    assert {split.of(key) for key in keys} == set(split.names)
    assert [split.of(key) for key in keys] == [split_topic("t", 4).of(key) for key in keys]
    assert [split.of(None) for _ in range(4)] == list(split.names)
    message = split.route(mq.Message("t", b"x", key="k1"))
    assert (message.topic, message.body) == (split.of("k1"), b"x")
    for parts in (0, True, 1.5):
        with pytest.raises(Misuse):
            split_topic("t", parts)  # type: ignore[arg-type]
    with pytest.raises(Rejected):
        split_topic("%t", 2)


def test_a_damaged_message_stops_an_effect_that_does_not_look(local: sa.Engine, tmp_path: Path) -> None:
    url, settings = f"file:{tmp_path / 'data'}", {"segment_bytes": 1 << 12, "default_queues": 1}
    with mq.connect(url, **settings) as bus:
        messages = [mq.Message("t", b"content %d." % n, key=f"k{n}") for n in range(4)]
        bus.producer("plain").send_batch(messages).check()
        bus.producer("plain").send("filler", bytes(5000))
    flip(tmp_path / "data", b"content 2.")
    seen: list[bytes] = []
    with mq.connect(url, **settings) as bus, OffsetConsumer(bus, local, "cart", "t", owner="c-1") as consumer:
        with pytest.raises(Corrupt, match="DAMAGED"):
            consumer.poll(lambda session, messages: [message.body for message in messages])
        assert consumer.poll(lambda session, messages: seen.extend(m.body for m in messages if not m.damaged)) == 4
    assert seen == [b"content 0.", b"content 1.", b"content 3."]
