"""Dead letters under an operator's hands: only the death that was shown is settled; embedded and served."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest

import escrowmq as mq
from escrowmq.client.admin import Admin, dead_letters
from escrowmq.errors import Code
from escrowmq.overview import timeline
from escrowmq.platform.failpoints import VARIABLE

Own = Callable[..., Any]


def fail(bus: mq.Bus, count: int, cause: str = "spoilt", group: str = "cart", topic: str = "orders") -> None:
    """Take ``count`` messages, and fail each of them for good."""
    with bus.consumer(group, topic, max_attempts=1, retry_backoff=0.001) as consumer:
        left = count
        while left:
            for message in consumer.receive(left, wait=60.0):
                message.nack(0.0, cause)
                left -= 1
        consumer.flush()


def some_dead(bus: mq.Bus, count: int) -> list[Any]:
    """As many dead letters, in one queue, as they are listed."""
    bus.admin.create_topic("orders", 1, may_exist=True)
    bus.producer("shop").send_batch([mq.Message("orders", b"%d" % number, key=f"k{number}") for number in range(count)])
    fail(bus, count)
    return list(bus.admin.dead_letters("cart"))


def test_a_letter_that_died_again_is_not_the_one_that_was_shown(own: Own) -> None:
    with own().connect() as bus:
        shown = some_dead(bus, 3)
        assert bus.admin.retry_dead_letters("cart", shown[:2]) == 2
        fail(bus, 1, "again")
        admin = bus.admin
        assert admin.settle_dead_letters("cart", shown, "discard", why="as shown") == [
            Code.CONFLICT,
            Code.NOT_FOUND,
            Code.OK,
        ]
        (again,) = admin.dead_letters("cart")
        assert (again["offset"], again["cause"]) == (0, "again, attempt 1 of 1")
        other = {**again, "attempts": again["attempts"] + 1}
        assert admin.settle_dead_letters("cart", [other], "retry") == [Code.CONFLICT]
        assert admin.settle_dead_letters("cart", [again], "retry") == [Code.OK]
        ended = [act["ended"] for act in admin.acts() if act["why"] == "as shown"]
        assert ended == [{"results": {"CONFLICT": 1, "NOT_FOUND": 1, "OK": 1}, "each": ["CONFLICT", "NOT_FOUND", "OK"]}]


def test_a_rejected_message_is_a_dead_letter_at_once_and_the_others_of_its_lease_go_on(own: Own) -> None:
    with own().connect() as bus:
        bus.admin.create_topic("orders", 1)
        bus.producer("shop").send_batch([mq.Message("orders", b"%d" % number, key="k") for number in range(3)])
        with bus.consumer("cart", "orders", ordered=True) as consumer:
            messages = consumer.messages()
            next(messages).ack()
            next(messages).reject("no such product")
            last = next(messages)
            assert (last.body, last.redelivered) == (b"2", True)  # it waited behind the one that was rejected
            last.ack()
            consumer.flush()
        (letter,) = bus.admin.dead_letters("cart")
        assert (letter["offset"], letter["attempts"]) == (1, 1)
        assert letter["cause"] == "no such product"
        assert bus.admin.retry_dead_letters("cart") == 1
        with bus.consumer("cart", "orders", ordered=True) as consumer:
            [again] = consumer.receive(1, wait=60.0)
            assert again.body == b"1"
            again.ack()


def test_all_goes_by_pages_and_settles_each_place_once(own: Own, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letters, "MOST_AT_ONCE", 2)
    with own().connect() as bus:
        shown = some_dead(bus, 5)
        assert bus.admin.retry_dead_letters("cart", shown) == 5
        fail(bus, 5)
        assert bus.admin.discard_dead_letters("cart") == 5
        assert list(bus.admin.dead_letters("cart")) == []
        assert [len(act["what"]["items"]) for act in bus.admin.acts()] == [2, 2, 1, 2, 2, 1]


@pytest.mark.parametrize("step", ["acts.recorded", "acts.done"])
def test_killed_before_or_after_the_record_says_which_death_was_settled(
    step: str, make_broker: Own, served_kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, step)
    broker = make_broker(served_kind)
    monkeypatch.delenv(VARIABLE)
    with broker.connect() as bus:
        shown = some_dead(bus, 2)
        broker.dies_of(lambda: Admin(bus.router, 2.0).discard_dead_letters("cart", shown, why=step))
    broker.restart(kill=True)
    with broker.connect() as bus:
        done = step == "acts.done"
        (one,) = bus.admin.acts()
        assert one["ended"] == {"interrupted": True, "found": {"results": {"settled" if done else "dead": 2}}}
        again = bus.admin.settle_dead_letters("cart", shown, "discard")
        assert again == [Code.NOT_FOUND if done else Code.OK] * 2


def received(bus: mq.Bus, group: str = "cart") -> list[Any]:
    """What a group is given now, acknowledged."""
    with bus.consumer(group, "orders", max_attempts=1, retry_backoff=0.001) as consumer:
        found = consumer.receive(10, wait=60.0)
        for message in found:
            message.ack()
        consumer.flush()
    return list(found)


@pytest.mark.invariant("I25")
def test_an_edited_message_replaces_the_dead_letter_for_its_group_alone(own: Own) -> None:
    broker = own()
    with broker.connect() as bus:
        bus.admin.create_topic("orders", 1, may_exist=True)
        old = mq.Message("orders", b"poison", key="k", tag="a", properties={"a": "1", "b": "2"})
        bus.producer("shop").send_batch([old])
        bus.consumer("other", "orders", max_attempts=1, retry_backoff=0.001)
        fail(bus, 1)
        admin = bus.admin
        (letter,) = admin.dead_letters("cart")
        done = admin.edit_dead_letter(
            "cart", letter, body=b"cured", properties={"c": "3"}, without=["b", "tag"], message_id="cure-17", why="typo"
        )
        assert (done["edited_from"], done["repeated"]) == (letter["message_id"], False)
        again = admin.edit_dead_letter("cart", letter, body=b"cured", message_id="cure-17")
        assert again == {**done, "repeated": True}
        assert list(admin.dead_letters("cart")) == []
    broker.restart(kill=True)
    with broker.connect() as bus:
        (message,) = received(bus)
        assert (message.body, message.key, message.tag, message.attempt) == (b"cured", "k", None, 1)
        assert dict(message.properties) == {"a": "1", "c": "3", "ESCROWMQ_EDITED_FROM": letter["message_id"]}
        assert message.message_id.hex() == done["message_id"]
        assert (message.topic, message.queue, message.offset) == ("orders", 0, 0)
        (theirs,) = received(bus, "other")
        assert (theirs.body, theirs.message_id.hex()) == (b"poison", letter["message_id"])
        (found,) = bus.admin.lookup(message_id="cure-17")
        assert (found["state"], found["visible"], found["group"]) == ("edited", False, "cart")
        assert (found["body"], found["edited_from"]) == (b"cured", letter["message_id"])
        assert (found["topic"], found["queue"], found["offset"], found["transaction"]) == ("orders", 0, 0, None)
        assert [one["state"] for one in bus.admin.lookup(key="k")] == ["plain"]
        assert [one["state"] for one in bus.admin.lookup(message_id="cure-17", topic="orders")] == ["edited"]
        assert not bus.admin.lookup(message_id="cure-17", topic="others")
        assert [one["state"] for one in bus.admin.lookup(message_id=letter["message_id"])] == ["plain"]
        recorded = [act for act in bus.admin.acts() if act["act"] == "dead_letters.edit"]
        assert [act["ended"] for act in recorded] == [{"results": {"OK": 1}}, {"repeated": True}]
        what = recorded[0]["what"]
        assert (what["edited_from"], what["message_id"]) == (letter["message_id"], done["message_id"])
        assert what["body_sha256"] == hashlib.sha256(b"cured").hexdigest()
        assert (what["body_bytes"], recorded[0]["why"]) == (5, "typo")
        assert bus.admin.read("orders").read_all().column("body").to_pylist() == [b"poison"]


def test_an_edited_message_that_dies_is_a_dead_letter_with_its_new_content(own: Own) -> None:
    with own().connect() as bus:
        shown = some_dead(bus, 2)
        admin = bus.admin
        first = admin.edit_dead_letter("cart", shown[0], body=b"better", key="other")
        fail(bus, 1, "still poison")
        letter = admin.dead_letters("cart")[0]
        assert (letter["key"], letter["message_id"], letter["attempts"]) == ("other", first["message_id"], 1)
        with pytest.raises(mq.Rejected) as refused:
            admin.edit_dead_letter("cart", shown[0], body=b"late")
        assert refused.value.code is Code.CONFLICT
        second = admin.edit_dead_letter("cart", letter, tag="t")
        assert second["edited_from"] == first["message_id"]
        assert [(m.body, m.key, m.tag) for m in received(bus)] == [(b"better", "other", "t")]
        for wrong, code in (({"offset": 99}, Code.NOT_FOUND), ({"offset": 0}, Code.NOT_FOUND)):
            with pytest.raises(mq.Rejected) as refused:
                admin.edit_dead_letter("cart", {**shown[0], **wrong}, body=b"x")
            assert refused.value.code is code
        with pytest.raises(mq.Rejected) as refused:
            admin.edit_dead_letter("cart", shown[1], body=bytes(5 << 20))
        assert refused.value.code is Code.BODY_TOO_LARGE
        with pytest.raises(mq.Rejected) as refused:
            admin.edit_dead_letter("cart", shown[1], body=b"x", message_id=bytes.fromhex(shown[1]["message_id"]))
        assert refused.value.code is Code.MESSAGE_ID_TAKEN
        assert len(admin.dead_letters("cart")) == 1


@pytest.mark.invariant("I25")
@pytest.mark.parametrize("step", ["acts.recorded", "acts.done"])
def test_killed_at_an_edit_both_are_done_or_neither_and_done_again_it_is_done_once(
    step: str, make_broker: Own, served_kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, step)
    broker = make_broker(served_kind)
    monkeypatch.delenv(VARIABLE)
    with broker.connect() as bus:
        shown = some_dead(bus, 1)
        broker.dies_of(
            lambda: Admin(bus.router, 2.0).edit_dead_letter("cart", shown[0], body=b"cured", message_id="one edit")
        )
    broker.restart(kill=True)
    with broker.connect() as bus:
        done = step == "acts.done"
        (one,) = bus.admin.acts()
        assert one["ended"] == {"interrupted": True, "found": "edited" if done else "dead"}
        again = bus.admin.edit_dead_letter("cart", shown[0], body=b"cured", message_id="one edit")
        assert again["repeated"] is done
        assert [message.body for message in received(bus)] == [b"cured"]
        assert bus.admin.verify_acts()[0]["broken"] == []


def test_the_causes_of_the_last_five_attempts_are_kept(own: Own) -> None:
    """E18. They are read from the log, and so outlive the broker."""
    broker = own()
    with broker.connect() as bus:
        bus.producer("shop").send("orders", b"one")
        with bus.consumer("cart", "orders", max_attempts=7) as consumer:
            for attempt in range(1, 8):
                (message,) = consumer.receive(1, wait=60.0)
                message.nack(0.0, None if attempt == 4 else f"problem {attempt}")
                consumer.flush()
        (letter,) = bus.admin.dead_letters("cart")
        told = [(one["attempt"], one.get("cause")) for one in bus.admin.dead_letter_attempts("cart", letter)]
        assert told == [
            (3, "problem 3"),
            (4, None),
            (5, "problem 5"),
            (6, "problem 6"),
            (7, "problem 7, attempt 7 of 7"),
        ]
        sentences = " ".join(event.sentence for event in timeline(bus, "orders/0/0").stories[0].events)
        assert all(f"problem {attempt}" in sentences for attempt in (1, 2, 3, 5, 6, 7))
        place = {name: letter[name] for name in ("topic", "queue", "offset")}
    broker.restart(kill=True)
    with broker.connect() as bus:
        (letter,) = bus.admin.dead_letters("cart")
        assert place == {name: letter[name] for name in place}
        found = bus.admin.dead_letter_attempts("cart", letter)
        assert [(one["attempt"], one.get("cause")) for one in found] == told


def test_a_summary_tells_causes_apart_by_what_is_not_a_number(own: Own) -> None:
    with own().connect() as bus:
        bus.admin.create_topic("orders", 1, may_exist=True)
        bus.producer("shop").send_batch([mq.Message("orders", b"%d" % number) for number in range(5)])
        with bus.consumer("cart", "orders", max_attempts=1) as consumer:
            for number, message in enumerate(consumer.receive(5, wait=60.0)):
                message.nack(0.0, f"no stock for order {4711 + number}" if number < 3 else "poison")
            consumer.flush()
        (told,) = bus.admin.dead_letters_summary()
        assert (told["group"], told["dead_letters"], "others" in told) == ("cart", 5, False)
        assert [(one["cause"], one["count"]) for one in told["causes"]] == [("no stock for order #", 3), ("poison", 2)]
        assert told["causes"][0]["samples"][0]["cause"] == "no stock for order 4711, attempt 1 of 1"
        assert told["causes"][0]["oldest_us"] <= told["causes"][0]["newest_us"]
        (few,) = bus.admin.dead_letters_summary("cart", causes=1, samples=1)
        assert (few["others"]["count"], few["others"]["causes"], len(few["causes"][0]["samples"])) == (2, 1, 1)
        for cause in ("no stock for order #", "no stock for order 9, attempt 1 of 1"):
            assert [one["offset"] for one in bus.admin.dead_letters("cart", cause=cause)] == [0, 1, 2]
        assert [one["offset"] for one in bus.admin.dead_letters("cart", 1, cause="poison", topic="orders")] == [3]
        assert list(bus.admin.dead_letters("cart", topic="another")) == []
        assert list(bus.admin.dead_letters("cart", older_than=3600.0)) == []
        found = bus.admin.dead_letters_at("cart", [{"topic": "orders", "queue": 0, "offset": at} for at in (4, 9)])
        assert [one["offset"] for one in found] == [4]
