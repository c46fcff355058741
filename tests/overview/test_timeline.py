"""What became of a message at a broker: every kind of event is produced for real, with its sentence and the reason why
it waits.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import escrowmq as mq
from damaging import FILLER, flip
from escrowmq.broker.embedded import open_embedded
from escrowmq.client.bus import Bus
from escrowmq.client.links.link import ServedLink
from escrowmq.errors import Code
from escrowmq.overview import Story, timeline
from escrowmq.overview.stories import brokers
from escrowmq.overview.stories.brokers import parse_wanted
from escrowmq.settings import BrokerSettings
from escrowmq.wire.addresses import Address
from escrowmq_lab.servers.process import free_port

Open = Callable[..., mq.Bus]
Until = Callable[[Callable[[], Any]], Any]


def the_one(bus: mq.Bus, wanted: str, *engines: Any) -> Story:
    found = timeline(bus, wanted, engines)
    assert json.loads(json.dumps(found.to_json()))["wanted"] == wanted
    assert found.missing == ()
    (story,) = found.stories
    return story


def words(story: Story) -> list[str]:
    return [event.event for event in story.events]


def said(story: Story, event: str) -> str:
    """What is said of the last event of a kind."""
    return [one.sentence for one in story.events if one.event == event][-1]


def offered(story: Story) -> list[str]:
    return [offer.act for offer in story.offers]


def test_a_plain_message_that_nobody_consumes(opened: Open) -> None:
    bus = opened()
    bus.producer("shop").send("orders", b"one", key="k", tag="t", properties={"a": "b"}, message_id="m")
    story = the_one(bus, "m")
    assert words(story) == ["stored", "placed"]
    assert (story.topic, story.key, story.tag, story.body, story.properties) == ("orders", "k", "t", "one", {"a": "b"})
    assert (story.waits, story.why) == (False, "It does not wait: no consumer group consumes topic orders.")
    assert the_one(bus, "k") == the_one(bus, "orders/0/0") == story
    assert the_one(bus, str(story.message_id)) == story


def test_a_delayed_message(opened: Open) -> None:
    bus = opened()
    bus.producer("shop").send("orders", b"one", delay=600.0, message_id="m")
    story = the_one(bus, "m")
    assert words(story) == ["stored", "delayed"]
    assert (story.state, story.waits) == ("delayed", True)
    assert story.why.startswith("It is delayed: consumers can receive it at ")


def test_an_edited_message_is_found_by_its_id_and_says_what_it_replaced(opened: Open) -> None:
    bus = opened()
    bus.producer("shop").send("orders", b"poison", message_id="old")
    bus.consumer("other", "orders").close()
    with bus.consumer("cart", "orders", max_attempts=1, retry_backoff=0.001) as consumer:
        for message in consumer.receive(1, wait=60.0):
            message.nack(0.0, "poison")
        consumer.flush()
    (letter,) = bus.admin.dead_letters("cart")
    bus.admin.edit_dead_letter("cart", letter, body=b"cured", message_id="new", why="a typo")
    story = the_one(bus, "new")
    assert words(story) == ["replaced", "edited"]
    text = f"Stored in place of dead letter {letter['message_id']}, for group cart."
    assert said(story, "replaced") == text
    assert "a typo" in said(story, "edited")
    assert (story.waits, story.body) == (True, "cured")
    with bus.consumer("cart", "orders", max_attempts=1, retry_backoff=0.001) as consumer:
        for message in consumer.receive(1, wait=60.0):
            message.ack()
        consumer.flush()
    story = the_one(bus, "new")
    assert (words(story), story.why) == (
        ["replaced", "edited", "leased", "acked"],
        "It does not wait: cart has acknowledged it.",
    )
    assert "dead" in words(the_one(bus, "old"))


# Transactions


def test_a_transaction_that_its_producer_decides(opened: Open) -> None:
    bus = opened()
    producer = bus.producer("shop", checker=lambda _: mq.UNKNOWN, instance="one")
    good, bad = (producer.prepare("orders", b"", message_id=name).transaction_id for name in ("good", "bad"))
    story = the_one(bus, "good")
    assert (words(story), story.state, offered(story)) == (
        ["prepared"],
        "open",
        ["transactions.commit", "transactions.rollback"],
    )
    assert "If its producer does not decide it, group shop is checked at" in story.why
    producer.commit(good)
    producer.rollback(bad)
    story = the_one(bus, str(good))
    assert words(story) == ["prepared", "committed", "placed"]
    assert said(story, "prepared") == f"Prepared by producer group shop, instance one in transaction {good}."
    assert said(story, "committed") == "Committed by its producer (session 1, instance one)."
    story = the_one(bus, "bad")
    assert words(story) == ["prepared", "rolled_back"]
    assert story.why == "It does not wait: its transaction was rolled back, and no consumer receives it."


def test_a_transaction_that_an_answer_decides(opened: Open, until: Until) -> None:
    bus = opened(transaction_timeout=0.05, check_interval=0.05)
    answers = itertools.chain([mq.UNKNOWN], itertools.repeat(mq.COMMIT))
    producer = bus.producer("shop", checker=lambda _: next(answers))
    producer.prepare("orders", b"", message_id="m")
    until(lambda: not bus.admin.transactions("open"))
    story = the_one(bus, "m")
    # On a busy machine the next check is sent before the answer to the one before comes.
    checked = [event.sentence for event in story.events if event.event == "checked"]
    rest = [word for word in words(story) if word != "checked"]
    assert (rest[0], sorted(rest[1:-2]), rest[-2:]) == ("prepared", ["answered"], ["committed", "placed"])
    assert len(checked) >= 2
    assert checked[0].endswith("check 1; no answer, or the answer was UNKNOWN.")
    assert checked[-1].endswith(f"check {len(checked)}; the answer decided it.")
    assert said(story, "committed").startswith("Committed by the answer to a check (session ")


def test_a_transaction_that_is_being_asked_about(opened: Open, until: Until) -> None:
    bus = opened(transaction_timeout=0.01, check_interval=600.0)
    come, go = threading.Event(), threading.Event()

    def check(_: mq.Check) -> mq.Outcome:
        come.set()
        go.wait(60.0)
        return mq.UNKNOWN

    bus.producer("shop", checker=check).prepare("orders", b"", message_id="m")
    assert come.wait(60.0)
    try:
        story = the_one(bus, "m")
        assert story.state == "asked"
        assert "is being checked, session 1, and has not answered yet (checked 1 time of 15)." in story.why
    finally:
        go.set()
    until(lambda: "answered" in words(the_one(bus, "m")))
    story = the_one(bus, "m")
    assert (story.state, words(story)) == ("open", ["prepared", "checked", "answered"])
    assert "did not decide (the answer was UNKNOWN at " in story.why


def test_a_transaction_that_nobody_can_be_asked_about(opened: Open, until: Until) -> None:
    bus = opened(transaction_timeout=0.01, check_interval=0.01)
    bus.producer("shop", unasked=True).prepare("orders", b"", message_id="m")
    until(lambda: "no process" in the_one(bus, "m").why)
    text = "and no process of its producer group shop is connected (checked 0 times of 15)."
    assert text in the_one(bus, "m").why


def test_a_transaction_asked_in_vain_is_parked_and_a_person_acts(opened: Open, until: Until) -> None:
    bus = opened(transaction_timeout=0.01, check_interval=0.01, check_max=2)
    producer = bus.producer("shop", checker=lambda _: mq.UNKNOWN)
    identity = producer.prepare("orders", b"", message_id="m").transaction_id
    until(lambda: bus.admin.transactions("parked"))
    story = the_one(bus, "m")
    # How many answers come before it is parked depends on how busy the machine is.
    assert [word for word in words(story) if word != "answered"] == ["prepared", "checked", "checked", "parked"]
    assert story.why == "It is parked after 2 checks of shop without a decision; an operator must decide."
    assert offered(story) == ["transactions.commit", "transactions.rollback", "transactions.recheck"]
    assert story.offers[0].selection == {"ids": [str(identity)]}
    producer.close()
    bus.admin.recheck(identity, why="the shop is back")
    for number in range(5):  # others of the record lie before it and behind it
        bus.admin.alter_producers("other", check_max=number + 1)
    bus.admin.commit(identity, why="paid\x1b[31m, ticket 4711")
    for number in range(5):
        bus.admin.alter_producers("other", check_max=number + 1)
    story = the_one(bus, "m")
    assert said(story, "reopened").endswith(" (act 1): the shop is back.")
    assert said(story, "committed").startswith("Committed by ")
    assert said(story, "committed").endswith(r" (act 13): paid\x1b[31m, ticket 4711.")


def test_the_last_question_may_roll_it_back_and_a_later_prepare_replace_it(opened: Open, until: Until) -> None:
    bus = opened(transaction_timeout=0.01, check_interval=0.01)
    rules = mq.CheckPolicy(check_max=1, checks_exhausted="rollback")
    bus.producer("strict", checker=lambda _: mq.UNKNOWN, check_policy=rules).prepare("orders", b"", message_id="m")
    until(lambda: not bus.admin.transactions("open"))
    text = "Rolled back after the last check, as the rules of its group specify."
    assert said(the_one(bus, "m"), "rolled_back") == text
    replacing = bus.producer("replacing", unasked=True, replaces=True)
    replacing.prepare("orders", b"first", message_id="again")
    replacing.prepare("orders", b"second", message_id="again")
    newest, before = timeline(bus, "again").stories
    assert (newest.state, before.state) == ("open", "rolled_back")
    assert said(before, "rolled_back").startswith("Rolled back because its message id was prepared again (session 2, ")


def test_what_stayed_undecided_for_too_long(opened: Open, until: Until) -> None:
    bus = opened(half_retention=1.0, transaction_timeout=0.05, check_interval=0.05)
    identity = bus.producer("shop", unasked=True).prepare("orders", b"", message_id="m").transaction_id
    until(lambda: bus.admin.transaction(identity)["state"] == "parked")
    story = the_one(bus, "m")
    assert words(story) == ["prepared", "parked"]
    assert "no check was answered" in story.why


def test_a_transaction_of_several_messages_gives_a_story_for_each(opened: Open) -> None:
    bus = opened()
    with bus.producer("shop", unasked=True).transaction() as txn:
        txn.send("orders", b"1", message_id="one")
        txn.send("orders", b"2", message_id="two")
    found = timeline(bus, str(txn.id))
    assert {story.body for story in found.stories} == {"1", "2"}
    assert not found.more
    assert timeline(bus, str(txn.id), limit=1).more


# Consumer groups


def test_every_way_in_which_a_group_may_have_it(opened: Open) -> None:
    bus = opened()
    bus.producer("shop").send_batch([mq.Message("orders", b"", key="k", message_id=f"m{n}") for n in range(6)])
    with bus.consumer("cart", "orders", max_attempts=2) as consumer:
        waiting = the_one(bus, "m1").why
        text = "Group cart has not received it yet, and no consumer requests messages now"
        assert waiting == f"{text} (1 message of its queue comes first)."
        dead, failed, acked, leased, released = consumer.receive(5, wait=60.0)
        dead.nack(delay=0.0, cause="ValueError: one")
        consumer.flush()
        (dead,) = consumer.receive(1, wait=60.0)
        dead.nack(cause="ValueError: two")
        failed.nack()
        acked.ack()
        consumer.flush()
        story = the_one(bus, "m3")
        assert (words(story)[-1], story.state, story.waits) == ("leased", "leased", True)
        assert "(attempt 1 of 2), and its lease expires at" in story.why
        story = the_one(bus, "m0")
        assert words(story) == ["stored", "placed", "leased", "failed", "leased", "dead"]
        assert story.state == "dead"
        assert "after 2 attempts (ValueError: two" in story.why
        assert offered(story) == ["dead_letters.retry", "dead_letters.discard"]
        (item,) = story.offers[0].selection["items"]
        assert (item["topic"], item["queue"], item["offset"], item["attempts"]) == ("orders", 0, 0, 2)
        story = the_one(bus, "m1")
        assert (words(story)[-1], story.state) == ("failed", "retrying")
        assert story.why.startswith("Group cart failed to process it 1 time (last at ")
        assert "; it is delivered again at " in story.why
        story = the_one(bus, "m2")
        assert (words(story)[-1], story.why) == ("acked", "It does not wait: cart has acknowledged it.")
        bus.admin.discard_dead_letters("cart", why="poison")
        story = the_one(bus, "m0")
        assert said(story, "discarded").startswith("Group cart: the dead letter was discarded by ")
        assert said(story, "discarded").endswith(": poison.")
        assert not story.waits
        assert (leased.offset, released.offset) == (3, 4)
    story = the_one(bus, "m4")
    assert words(story)[-2:] == ["leased", "released"] or words(story)[-1] == "leased"


def test_two_groups_and_the_one_that_is_worst_off_comes_first(opened: Open) -> None:
    bus = opened()
    bus.producer("shop").send("orders", b"", message_id="m")
    with bus.consumer("cart", "orders", max_attempts=1) as consumer:
        consumer.receive(1, wait=60.0)[0].nack(cause="no")
        consumer.flush()
    bus.consumer("other", "orders").close()
    story = the_one(bus, "m")
    assert story.why.startswith("Group cart made it a dead letter at ")
    assert story.why.endswith("It also waits at 1 other place.")
    bus.admin.retry_dead_letters("cart")
    assert said(the_one(bus, "m"), "retried").startswith(
        "Group cart: the dead letter was delivered again, with new attempts, by "
    )


def test_in_order_it_waits_behind_the_one_of_its_key(opened: Open) -> None:
    bus = opened()
    bus.producer("shop").send_batch([mq.Message("orders", b"", key="k", message_id=f"m{n}") for n in range(2)])
    with bus.consumer("cart", "orders", ordered=True) as consumer:
        consumer.receive(2, wait=60.0)[0].nack()
        consumer.flush()
    assert the_one(bus, "m1").why == ("Group cart keeps the order of each key: it waits behind failed offset 0.")


def test_what_is_in_doubt_and_what_a_tag_passes_over(opened: Open) -> None:
    bus = opened()
    bus.producer("shop").send("orders", b"", tag="other", message_id="m")
    bus.consumer("tagged", "orders", tags="mine").close()
    assert the_one(bus, "m").why == "It does not wait: group tagged will skip it because of its tag."
    held = bus.consumer("held", "orders", in_doubt="hold", instance="one")
    held.receive(1, wait=60.0)
    with bus.consumer("held", "orders", in_doubt="hold", instance="one"):
        story = the_one(bus, "m")
    assert story.state == "in_doubt"
    assert "instance one, which may have died" in story.why


def test_a_group_that_is_paused_or_was_reset(opened: Open) -> None:
    bus = opened()
    bus.producer("shop").send("orders", b"", message_id="m")
    bus.consumer("cart", "orders").close()
    bus.admin.pause_group("cart", why="the shop is closed")
    assert the_one(bus, "m").why == ("Group cart is paused: it receives no messages until an operator resumes it.")
    bus.admin.reset_group("cart", "latest", why="too old")
    story = the_one(bus, "m")
    assert said(story, "reset").startswith("Group cart: moved to another place of the queue by ")
    assert said(story, "reset").endswith(": too old.")
    assert story.why == "It does not wait: cart started after it."


def test_a_group_at_its_limits(opened: Open) -> None:
    bus = opened()
    bus.producer("shop").send("orders", b"", message_id="held")
    with bus.consumer("cart", "orders") as consumer:
        bus.admin.limit_group("cart", in_flight=1)
        (held,) = consumer.receive(1, wait=60.0)
        bus.producer("shop").send("orders", b"", message_id="m")
        assert the_one(bus, "m").why.startswith("Group cart is at its limits: it receives more when")
        held.ack()
        consumer.flush()
        assert "limits" not in the_one(bus, "m").why


# What cannot be known


def test_damage_is_said(opened: Open, tmp_path: Path) -> None:
    with mq.connect(f"file:{tmp_path / 'data'}", default_queues=1, segment_bytes=1 << 12) as bus:
        bus.producer("shop").send("orders", b"its body is lost", message_id="m")
        bus.producer("shop").send("filler", FILLER * 5)
    flip(tmp_path / "data", b"its body is lost")
    with mq.connect(f"file:{tmp_path / 'data'}", default_queues=1, segment_bytes=1 << 12) as bus:
        story = the_one(bus, "m")
        assert said(story, "damaged").startswith("The log is damaged at this message: ")
        assert story.body is None


def test_nothing_is_found_and_nothing_can_be_called_that(opened: Open) -> None:
    bus = opened()
    for wanted in ("nothing", "0-0-0", "ffffffff-1-7", "orders/0/0", "none/0/0", "'; DROP TABLE", "\x1b[31m"):
        found = timeline(bus, wanted)
        assert (found.stories, found.more, found.missing) == ((), False, ())
    for wanted in ("", " \n", "x" * 10_001):
        with pytest.raises(mq.Misuse) as caught:
            timeline(bus, wanted)
        assert caught.value.code is Code.BAD_ARGUMENT


@given(text=st.text(min_size=1, max_size=60))
def test_whatever_is_looked_for_has_a_meaning(text: str) -> None:
    if text.strip() and text.isprintable():
        assert len(parse_wanted(text).message_id) == 16


def test_two_brokers_of_which_one_is_away(tmp_path: Path) -> None:
    away = ServedLink([Address("127.0.0.1", free_port())], stays=True)
    there = open_embedded(tmp_path / "data", BrokerSettings(default_queues=1))
    with Bus([there]) as alone, Bus([there, away]) as bus:
        alone.producer("shop").send("orders", b"", message_id="m")
        found = timeline(bus, "m")
        (story,) = found.stories
        assert words(story) == ["stored", "placed"]
        assert [one["broker"] for one in found.missing] == [away.address]


def test_two_brokers_that_have_something_of_the_same_key(tmp_path: Path) -> None:
    links = [open_embedded(tmp_path / name, BrokerSettings(default_queues=1)) for name in "ab"]
    with Bus([links[0]]) as one:
        one.producer("shop").send("orders", b"a", key="k")
        with Bus([links[1]]) as other:
            other.producer("shop").send("orders", b"b", key="k")
            with Bus(links) as both:
                found = timeline(both, "k")
                assert {story.body for story in found.stories} == {"a", "b"}
                assert {story.events[0].where for story in found.stories} == {link.address for link in links}
                assert len(timeline(both, "orders/0/0").stories) == 2


def test_an_act_is_found_among_many(opened: Open) -> None:
    bus = opened()
    producer = bus.producer("shop", unasked=True)
    ids = [producer.prepare("orders", b"", message_id=f"m{n}").transaction_id for n in range(20)]
    for number, identity in enumerate(ids):
        bus.admin.commit(identity, why=f"reason {number}")
    for number in (0, 1, 9, 18, 19):
        assert said(the_one(bus, f"m{number}"), "committed").endswith(f"(act {2 * number + 1}): reason {number}.")


def test_who_acted_is_looked_up_for_the_last_acts_only(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(brokers, "MOST_ACTS", 1)
    bus = opened()
    bus.producer("shop").send("orders", b"", message_id="m")
    with bus.consumer("cart", "orders", max_attempts=1) as consumer:
        for _ in range(2):
            consumer.receive(1, wait=60.0)[0].nack(cause="no")
            consumer.flush()
            bus.admin.retry_dead_letters("cart", why="again")
    first, last = (event.sentence for event in the_one(bus, "m").events if event.event == "retried")
    assert first.endswith("by an operator who is not recorded.")
    assert last.endswith(": again.")
