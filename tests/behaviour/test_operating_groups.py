"""What operators do to a whole consumer group: reset, pause, resume, delete; embedded and served."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

import escrowmq as mq
from escrowmq.client.admin import Admin
from escrowmq.errors import Code
from escrowmq.platform.failpoints import VARIABLE

Own = Callable[..., Any]
Eventually = Callable[..., Any]


def sent(bus: mq.Bus, topic: str, count: int, first: int = 0) -> None:
    producer = bus.producer(f"to-{topic}")
    producer.send_batch([mq.Message(topic, b"%d" % n, key="k") for n in range(first, first + count)])


def got(consumer: mq.Consumer, count: int) -> list[tuple[int, int]]:
    """Number and attempt of so many messages, in their order."""
    found: list[Any] = []
    while len(found) < count:
        found += consumer.receive(count - len(found), wait=60.0)
    return [(int(message.body), message.attempt) for message in found]


def queue_of(bus: mq.Bus, group: str) -> dict[str, Any]:
    """The queue in which everything stands."""
    (one,) = [one for one in bus.admin.groups() if one["name"] == group]
    (queue,) = [queue for queue in one["queues"] if queue["end"]]
    return dict(queue)


class TestReset:
    @pytest.mark.invariant("I22")
    def test_a_consumer_that_runs_goes_on_from_there_with_repeats(self, bus: mq.Bus, t: str, g: str) -> None:
        sent(bus, t, 6)
        with bus.consumer(g, t) as consumer:
            for message in consumer.receive(6, wait=60.0):
                message.ack()
            consumer.flush()
            shown = bus.admin.reset_group(g, "earliest", dry_run=True)
            assert queue_of(bus, g)["acked"] == 6, "nothing was done"
            done = bus.admin.reset_group(g, "earliest", why="the release was wrong")
            assert list(done) == list(shown)
            assert [(one["was"], one["now"], one["again"]) for one in done if one["again"]] == [(6, 0, 6)]
            assert got(consumer, 6) == [(n, 2) for n in range(6)]
            sent(bus, t, 1, first=6)
            assert got(consumer, 1) == [(6, 1)]
        act = bus.admin.acts(newest=True)[-1]
        assert (act["act"], act["why"]) == ("groups.reset", "the release was wrong")
        assert (act["ended"]["again"], act["ended"]["skipped"]) == (6, 0)

    @pytest.mark.invariant("I23")
    def test_what_is_held_is_lost_and_what_is_passed_over_does_not_come(self, bus: mq.Bus, t: str, g: str) -> None:
        sent(bus, t, 4)
        with bus.consumer(g, t) as consumer:
            first = consumer.receive(2, wait=60.0)
            bus.admin.reset_group(g, shift=3)
            first[0].ack()
            consumer.flush()
            assert consumer.refused == 1
            sent(bus, t, 1, first=4)
            assert got(consumer, 2) == [(3, 1), (4, 1)]
            assert queue_of(bus, g)["skipped"] == 3

    def test_to_a_time_and_to_an_offset(self, bus: mq.Bus, t: str, g: str) -> None:
        sent(bus, t, 2)
        bus.consumer(g, t).close()
        place = queue_of(bus, g)
        there = {"topic": t, "queue": place["queue"]}
        assert [one["now"] for one in bus.admin.reset_group(g, offset=1, **there)] == [1]
        now_us = bus.admin.hello()[0]["time_us"]
        late = datetime.fromtimestamp(now_us / 1e6 + 3600, UTC)
        assert [one["now"] for one in bus.admin.reset_group(g, late, **there)] == [2]
        with pytest.raises(mq.Rejected) as refused:
            bus.admin.reset_group(g, offset=3, **there)
        assert refused.value.code is Code.BAD_REQUEST
        with pytest.raises(mq.Rejected) as unknown:
            bus.admin.reset_group("nobody", "earliest")
        assert unknown.value.code is Code.UNKNOWN_GROUP


class TestPause:
    @pytest.mark.invariant("I23")
    def test_a_consumer_waits_and_goes_on_at_once(self, bus: mq.Bus, t: str, g: str, eventually: Eventually) -> None:
        with bus.consumer(g, t) as consumer:
            bus.admin.pause_group(g, why="the database is full")
            sent(bus, t, 3)
            found: list[Any] = []
            waiting = threading.Thread(target=lambda: found.extend(consumer.receive(1, wait=600.0)))
            waiting.start()
            stands = lambda: next(x for x in bus.admin.standing()[0]["consumers"] if x["group"] == g)  # noqa: E731
            eventually(lambda: stands()["receiving"])
            assert stands()["paused"]
            assert stands()["lag"] == 3
            assert not found
            bus.admin.resume_group(g)
            waiting.join()
            assert [message.body for message in found] == [b"0"]

    def test_what_is_held_can_be_acknowledged(self, bus: mq.Bus, t: str, g: str) -> None:
        sent(bus, t, 2)
        with bus.consumer(g, t) as consumer:
            held = consumer.receive(2, wait=60.0)
            (paused,) = bus.admin.pause_group(g)
            assert (paused["all"], paused["leased"]) == (True, 2)
            for message in held:
                message.ack()
            consumer.flush()
            assert consumer.refused == 0
        assert queue_of(bus, g)["acked"] == 2
        assert [one["paused"] for one in bus.admin.groups() if one["name"] == g] == [True]

    def test_it_is_paused_after_a_restart_and_in_a_folder_without_a_broker(self, own: Own, t: str, g: str) -> None:
        broker = own()
        with broker.connect() as bus:
            bus.consumer(g, t).close()
            bus.admin.pause_group(g, t)
        broker.restart(kill=True)
        with broker.connect() as bus:
            sent(bus, t, 1)
            with bus.consumer(g, t) as consumer:
                assert consumer.receive(1, wait=0.2) == []
        broker.stop()
        with mq.connect(f"file:{broker.folder}", read_only=True) as bus:
            (one,) = bus.admin.groups()
            assert (one["paused"], one["paused_topics"]) == (False, [t])


class TestDelete:
    def test_the_name_is_a_new_group_afterwards(self, bus: mq.Bus, t: str, g: str) -> None:
        sent(bus, t, 3)
        with bus.consumer(g, t, max_attempts=1) as consumer:
            held = consumer.receive(3, wait=60.0)
            held[0].nack(0.0, "spoilt")
            held[1].ack()
            consumer.flush()
            with pytest.raises(mq.Rejected) as refused:
                bus.admin.delete_group(g)
            assert refused.value.code is Code.CONFLICT
            (gone,) = bus.admin.delete_group(g, force=True, why="nobody needs it")
            assert (gone["dead_letters"], gone["leased"]) == (1, 1)
            with pytest.raises(mq.Rejected) as unknown:
                consumer.receive(1, wait=60.0)
            assert unknown.value.code is Code.UNKNOWN_GROUP
        assert bus.admin.acts(newest=True)[-1]["ended"]["dead_letters"] == 1
        with bus.consumer(g, t, start="latest") as consumer:
            sent(bus, t, 1, first=3)
            assert got(consumer, 1) == [(3, 1)]

    def test_a_request_that_is_repeated_does_not_take_the_new_group(self, bus: mq.Bus, t: str, g: str) -> None:
        bus.consumer(g, t).close()
        link = bus.router.links[0]
        number = next(one["group"] for one in bus.admin.groups() if one["name"] == g)
        request = {"group": g, "number": number, "force": True}
        link.action("groups.delete", request, 30)
        bus.consumer(g, t).close()
        with pytest.raises(mq.Rejected) as refused:
            link.action("groups.delete", request, 30)
        assert refused.value.code is Code.UNKNOWN_GROUP
        with pytest.raises(mq.Rejected):
            bus.admin.delete_group("nobody")


@pytest.mark.invariant("I22")
@pytest.mark.parametrize("step", ["acts.recorded", "acts.done"])
def test_killed_in_the_middle_of_a_reset_it_is_done_and_recorded_or_not_done(
    step: str, make_broker: Own, served_kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, step)
    broker = make_broker(served_kind)
    monkeypatch.delenv(VARIABLE)
    with broker.connect() as bus:
        bus.admin.create_topic("orders", 1)
        sent(bus, "orders", 4)
        bus.consumer("cart", "orders").close()
        broker.dies_of(lambda: Admin(bus.router, 2.0).reset_group("cart", "latest", why=step))
    broker.restart(kill=True)
    with broker.connect() as bus:
        (one,) = bus.admin.acts()
        place = 0 if step == "acts.recorded" else 4
        assert one["ended"] == {"interrupted": True, "found": {"places": [["orders", 0, place]]}}
        assert queue_of(bus, "cart")["next"] == place


@pytest.mark.parametrize("act", ["pause", "resume", "delete"])
@pytest.mark.parametrize("step", ["acts.recorded", "acts.done"])
def test_killed_in_the_middle_of_an_act_on_a_group_the_record_says_what_is_true(
    step: str, act: str, make_broker: Own, served_kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, f"{step}:2" if act == "resume" else step)
    broker = make_broker(served_kind)
    monkeypatch.delenv(VARIABLE)
    with broker.connect() as bus:
        bus.admin.create_topic("orders", 1)
        sent(bus, "orders", 1)
        bus.consumer("cart", "orders").close()
        if act == "resume":
            bus.admin.pause_group("cart", ["orders"])
        admin = Admin(bus.router, 2.0)
        given = ["cart", ["orders"]] if act == "pause" else ["cart"]
        broker.dies_of(lambda: getattr(admin, f"{act}_group")(*given, why=step))
    done = step == "acts.done"
    broker.restart(kill=True)
    with broker.connect() as bus:
        admin = bus.admin
        one = admin.acts()[-1]
        assert (one["act"], one["why"], one["ended"]["interrupted"]) == (f"groups.{act}", step, True)
        names = [listed["name"] for listed in admin.groups()]
        if act == "delete":
            kept = {"number": one["ended"]["found"]["number"], "dead_letters": 0} if not done else None
            assert one["ended"]["found"] == ("UNKNOWN_GROUP" if done else kept)
            assert names == ([] if done else ["cart"])
            again = bus.consumer("cart", "orders")  # the group is whole: it goes on, or begins anew
            assert got(again, 1) == [(0, 1)]
        else:
            paused = done == (act == "pause")
            assert one["ended"]["found"] == {"paused": ["orders"] if paused else []}
            with bus.consumer("cart", "orders") as consumer:
                assert len(consumer.receive(1, wait=0.2 if paused else 60.0)) == (not paused)
                if paused:
                    admin.resume_group("cart")
                    assert got(consumer, 1) == [(0, 1)]
        assert admin.verify_acts()[0]["broken"] == []


def test_a_group_that_one_of_two_brokers_does_not_have_is_made_there_and_who_is_away_is_told(
    make_broker: Own, served_kind: str, t: str, g: str
) -> None:
    """What is to hold for a group must hold there, too, when its consumers come."""
    one, two = make_broker(served_kind, max_attempts=5), make_broker(served_kind, max_attempts=5)
    with one.connect() as first:
        first.admin.create_topic(t, 1)
        first.consumer(g, t, tags="a||b", start="latest", redelivery=[1, 2]).close()
        sent(first, t, 1)
    with mq.connect(f"{one.url},{two.address}") as both:
        assert [paused["all"] for paused in both.admin.pause_group(g)] == [True, True]
        altered = both.admin.alter_group(g, tags="b")
        assert [(x["tags"], x["retry_delays"], x["max_attempts"], x["start"]) for x in altered] == [
            (["b"], [1.0, 2.0], 3, "latest")
        ] * 2
        assert [listed["paused"] for listed in both.admin.groups() if listed["name"] == g] == [True, True]
        assert {move["broker"]: move["now"] for move in both.admin.reset_group(g, "earliest", topic=t)}[one.url] == 0
        with pytest.raises(mq.Misuse):
            both.admin.reset_group(g, offset=0, topic=t, queue=0)
    two.stop(kill=True)
    with mq.connect(f"{one.url},{two.address}") as both:
        admin = both.admin
        for found in (
            admin.reset_group(g, "latest"),
            admin.resume_group(g),
            admin.pause_group(g),
            admin.delete_group(g),
        ):
            assert {done["broker"] for done in found} == {one.url}
            assert [away["broker"] for away in found.missing] == [two.url]
