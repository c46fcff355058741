"""Where one message stands for every consumer group, and what happened to it there."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import escrowmq as mq
from escrowmq.broker.reads import history
from escrowmq.errors import Code

SOON = {"retry_backoff": 0.0, "retry_backoff_max": 0.0}


def events(bus: mq.Bus, offset: int, group: str = "cart") -> list[str]:
    (at,) = bus.admin.message_standing("orders", 0, offset)
    return [one["event"] for one in at["events"] if one["group"] == group]


def standing(bus: mq.Bus, offset: int, group: str = "cart") -> dict:
    (at,) = bus.admin.message_standing("orders", 0, offset)
    return next(one for one in at["groups"] if one["group"] == group)


@pytest.fixture
def bus(tmp_path: Path):
    with mq.connect(f"file:{tmp_path / 'data'}", default_queues=1, lease_seconds=600.0) as opened:
        opened.admin.create_topic("orders")
        yield opened


def test_every_step_is_told_in_its_order(bus: mq.Bus) -> None:
    bus.producer("shop").send("orders", b"one", key="k")
    with bus.consumer("cart", "orders", max_attempts=2, **SOON) as consumer:
        for cause in ("late", "ValueError: spoilt"):
            (message,) = consumer.receive(1, wait=60.0)
            message.nack(cause=cause)
            consumer.flush()
        assert events(bus, 0) == ["leased", "failed", "leased", "dead"]
        dead = standing(bus, 0)
        assert (dead["state"], dead["attempt"]) == ("dead", 2)
        assert dead["cause"].startswith("ValueError: spoilt")
        bus.admin.retry_dead_letters("cart")
        (again,) = consumer.receive(1, wait=60.0)
        leased = standing(bus, 0)
        assert (leased["state"], leased["attempt"]) == ("leased", 1)
        again.ack()
        consumer.flush()
        assert events(bus, 0) == ["leased", "failed", "leased", "dead", "retried", "leased", "acked"]
    (at,) = bus.admin.message_standing("orders", 0, 0)
    times = [one["time_us"] for one in at["events"]]
    assert times == sorted(times)
    assert at["placed_us"] <= times[0]


def test_a_lease_that_passes_over_a_message_is_not_one_of_it(bus: mq.Bus) -> None:
    """In an ordered group the lease of 1, 2, 4 spans 3, which waits behind the failed message of its key."""
    bus.producer("shop").send_batch([mq.Message("orders", b"", key=key) for key in "abcab"])
    with bus.consumer(
        "cart", "orders", ordered=True, max_attempts=5, retry_backoff=600.0, retry_backoff_max=600.0
    ) as consumer:
        (first,) = consumer.receive(1, wait=60.0)
        first.nack()
        consumer.flush()
        taken = consumer.receive(4, wait=60.0)
        assert [message.offset for message in taken] == [1, 2, 4]
        for message in taken:
            message.ack()
        consumer.flush()
        assert standing(bus, 3)["state"] == "retrying"
        assert events(bus, 3) == []
        assert events(bus, 4) == ["leased", "acked"]


def test_an_ended_lease_is_told_from_what_was_given_back(tmp_path: Path) -> None:
    with mq.connect(f"file:{tmp_path / 'data'}", default_queues=1, lease_seconds=0.05, retry_backoff=0.0) as bus:
        bus.producer("shop").send("orders", b"one")
        with bus.consumer("cart", "orders") as consumer:
            consumer.receive(1, wait=60.0)  # never settled
        with bus.consumer("cart", "orders", lease=600.0) as consumer:
            (message,) = consumer.receive(1, wait=60.0)
            message.nack()
            consumer.flush()
        (at,) = bus.admin.message_standing("orders", 0, 0)
        assert [one["expired"] for one in at["events"] if one["event"] == "failed"] == [True, False]


def test_a_filter_a_start_and_a_discard_are_told(bus: mq.Bus) -> None:
    producer = bus.producer("shop")
    producer.send("orders", b"before")
    bus.consumer("late", "orders", start="latest").close()
    producer.send("orders", b"other", tag="other")
    producer.send("orders", b"mine", tag="mine")
    with bus.consumer("cart", "orders", tags="mine", max_attempts=1) as consumer:
        assert not standing(bus, 1)["chosen"]
        assert (standing(bus, 2)["chosen"], standing(bus, 2)["before"]) == (True, 2)
        consumer.receive(1, wait=60.0)[0].nack(cause="no")
        consumer.flush()
    bus.admin.discard_dead_letters("cart")
    assert [standing(bus, n)["state"] for n in (1, 2)] == ["filtered", "discarded"]
    assert events(bus, 1) == []
    assert events(bus, 2) == ["leased", "dead", "discarded"]
    assert standing(bus, 0, "late")["state"] == "skipped"


def test_in_order_the_one_that_comes_first_is_named(bus: mq.Bus) -> None:
    bus.producer("shop").send_batch([mq.Message("orders", b"", key=key) for key in "aba"])
    with bus.consumer("cart", "orders", ordered=True, retry_backoff=600.0, retry_backoff_max=600.0) as consumer:
        first, second, _ = consumer.receive(3, wait=60.0)
        first.nack()
        second.ack()
        consumer.flush()
    assert standing(bus, 1)["state"] == "acked"
    behind = standing(bus, 2)
    assert (behind["state"], behind["behind"]) == ("retrying", 0)
    assert "behind" not in standing(bus, 0)


def test_a_group_that_was_reset_has_it_again(bus: mq.Bus) -> None:
    bus.producer("shop").send_batch([mq.Message("orders", b"") for _ in range(3)])
    with bus.consumer("cart", "orders") as consumer:
        for message in consumer.receive(2, wait=60.0):
            message.ack()
        consumer.flush()
    bus.admin.reset_group("cart", "earliest", why="again")
    assert standing(bus, 0)["state"] == "waiting"
    assert events(bus, 0) == ["leased", "acked", "reset"]
    with bus.consumer("cart", "orders") as consumer:
        consumer.receive(1, wait=60.0)[0].ack()
        consumer.flush()
    assert events(bus, 0) == ["leased", "acked", "reset", "leased", "acked"]
    bus.admin.reset_group("cart", "latest", why="no more")
    assert standing(bus, 2)["state"] == "skipped"
    assert events(bus, 2)[-1] == "reset"


def test_a_place_that_is_not_there_is_refused(bus: mq.Bus) -> None:
    for topic, queue, code in (
        ("none", 0, Code.UNKNOWN_TOPIC),
        ("orders", 7, Code.BAD_QUEUE),
        ("orders", 0, Code.NOT_FOUND),
    ):
        with pytest.raises(mq.Rejected) as caught:
            bus.admin.message_standing(topic, queue, 0)
        assert caught.value.code is code
    with pytest.raises(mq.Misuse):
        bus.admin.message_standing("orders", 0, 0, broker="escrow://elsewhere:1")


def test_a_log_too_long_to_read_is_said(bus: mq.Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    bus.producer("shop").send_batch([mq.Message("orders", b"") for _ in range(3)])
    with bus.consumer("cart", "orders", prefetch=1) as consumer:
        for _ in range(3):
            consumer.receive(1, wait=60.0)[0].ack()
            consumer.flush()
    monkeypatch.setattr(history, "MOST_FRAMES", 3)
    (at,) = bus.admin.message_standing("orders", 0, 2)
    assert at["until_us"] >= at["placed_us"]
    assert next(one["state"] for one in at["groups"]) == "acked"


ACTS = st.lists(
    st.tuples(st.sampled_from(["ack", "nack", "keep"]), st.integers(1, 3), st.booleans()), min_size=1, max_size=12
)


@settings(max_examples=15)
@given(acts=ACTS, ordered=st.booleans())
def test_what_is_told_agrees_with_what_is_true(
    acts: list[tuple[str, int, bool]], ordered: bool, tmp_path_factory
) -> None:
    """Whatever consumers do, the history of each message ends where the message stands, and its attempts rise one by
    one."""
    with mq.connect(f"file:{tmp_path_factory.mktemp('data') / 'd'}", default_queues=1) as bus:
        bus.producer("shop").send_batch([mq.Message("orders", b"", key=str(n % 3)) for n in range(6)])
        with bus.consumer("cart", "orders", ordered=ordered, max_attempts=2, **SOON) as consumer:
            for act, count, retry in acts:
                for message in consumer.receive(count, wait=0.0):
                    if act != "keep":
                        getattr(message, act)()
                consumer.flush()
                if retry:
                    bus.admin.retry_dead_letters("cart")
            for offset in range(6):
                found, state = events(bus, offset), standing(bus, offset)["state"]
                ends = {"waiting": [None, "released"], "leased": ["leased"], "acked": ["acked"], "dead": ["dead"]}
                last = found[-1] if found else None
                assert last in ends.get(state, ["failed", "retried", "released", None]), (state, found)
