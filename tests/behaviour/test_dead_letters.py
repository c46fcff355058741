"""Dead letters under an operator's hands: only the death that was shown is settled; embedded and served."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import escrowmq as mq
from escrowmq.client.admin import Admin, dead_letters
from escrowmq.errors import Code
from escrowmq.platform.failpoints import VARIABLE

Own = Callable[..., Any]


def fail(bus: mq.Bus, count: int, cause: str = "spoilt", group: str = "cart", topic: str = "orders") -> None:
    """Take ``count`` messages, and fail each of them for good."""
    with bus.consumer(group, topic, max_attempts=1, retry_backoff=0.001) as consumer:
        left = count
        while left:
            for message in consumer.receive(left, wait=5.0):
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
    step: str, make_broker: Own, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, step)
    broker = make_broker("served")
    monkeypatch.delenv(VARIABLE)
    with broker.connect() as bus:
        shown = some_dead(bus, 2)
        with pytest.raises(mq.Unknown):
            Admin(bus.router, 2.0).discard_dead_letters("cart", shown, why=step)
    broker.restart(kill=True)
    with broker.connect() as bus:
        done = step == "acts.done"
        (one,) = bus.admin.acts()
        assert one["ended"] == {"interrupted": True, "found": {"results": {"settled" if done else "dead": 2}}}
        again = bus.admin.settle_dead_letters("cart", shown, "discard")
        assert again == [Code.NOT_FOUND if done else Code.OK] * 2
