"""Consumers of a group, databases with their outboxes, counters in the menu, and the retry of one dead letter."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from html import unescape
from pathlib import Path

import pytest
import sqlalchemy as sa
from console_visitor import Visitor
from console_world import fail_all, served_broker

import escrowmq as mq
from escrowmq import outbox
from escrowmq.console.words import ago


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with served_broker(tmp_path / "data") as at:
        yield at


def test_a_group_shows_who_is_connected_and_what_each_holds(url: str, open_console: Callable[..., Visitor]) -> None:
    with mq.connect(url) as bus, mq.connect(url) as other:
        for number in range(10):
            bus.producer("shop").send("orders", b"x", key=str(number))
        with bus.consumer("cart", ["orders"]) as holds, other.consumer("cart", ["orders"]) as waits:
            held = holds.receive(20, wait=60)
            assert len(held) == 10
            loop = threading.Thread(target=lambda: list(waits.messages()))
            loop.start()
            while not any(one.get("receiving") for one in bus.admin.members("cart")):
                pass
            members = {one["messages"]: one for one in bus.admin.members("cart")}
            assert set(members) == {0, 10}
            assert not members[10]["receiving"]
            assert members[0]["address"] != members[10]["address"]
            page = open_console(url).get("/groups/cart")
            assert "waits for messages" in page
            assert "handles messages" in page
            assert str(members[0]["address"]) in page
            assert str(members[10]["address"]) in page
            waits.stop()
            loop.join()


def test_a_client_that_is_gone_is_not_connected_though_it_holds_messages(url: str) -> None:
    with mq.connect(url) as bus:
        bus.producer("shop").send("orders", b"x")
        with mq.connect(url) as other:
            consumer = other.consumer("cart", ["orders"], in_doubt="hold", instance="one")
            assert consumer.receive(1, wait=60)
            (member,) = bus.admin.members("cart")
            assert member["heard_us"] > 0
            consumer.close()
        while "heard_us" in bus.admin.members("cart")[0]:
            pass
        assert bus.admin.members("cart")[0]["instance"] == "one"


def test_a_dead_letter_is_retried_from_the_list_with_a_reason(url: str, open_console: Callable[..., Visitor]) -> None:
    with mq.connect(url) as bus:
        for number in range(3):
            bus.producer("shop").send("orders", b"x", key=f"k-{number}")
        fail_all(bus, "cart", "orders", {}, 3)
        visitor = open_console(url)
        page = visitor.get("/dead-letters/cart")
        letters = [unescape(value) for value in re.findall(r'name="letter" value="([^"]*)"', page)]
        assert len(letters) == 3
        visitor.post("/dead-letters/cart/retry", 400, letter=letters[1])
        assert len(bus.admin.dead_letters("cart")) == 3
        done = visitor.post("/dead-letters/cart/retry", letter=letters[1], why="the price is back")
        item = json.loads(letters[1])
        left = [(one["topic"], one["queue"], one["offset"]) for one in bus.admin.dead_letters("cart")]
        assert len(left) == 2
        assert (item["topic"], item["queue"], item["offset"]) not in left
        assert bus.admin.acts(newest=True)[0]["why"] == "the price is back"
        visitor.post("/dead-letters/cart/retry", 404, letter=letters[1], why="twice")
        page = visitor.get(done)
        assert "See what became of" in page
        assert 'value="the price is back"' in page
        for wrong in ("", "[]", '{"topic": 1}', "{"):
            visitor.post("/dead-letters/cart/retry", 400, letter=wrong, why="x")
        assert len(bus.admin.dead_letters("cart")) == 2


def test_the_menu_counts_dead_letters_and_undecided(url: str, open_console: Callable[..., Visitor]) -> None:
    with mq.connect(url) as bus:
        bus.producer("shop").send("orders", b"x")
        fail_all(bus, "cart", "orders", {}, 1)
        for _ in range(2):
            bus.producer("pay", unasked=True).transaction().send("orders", b"y")
        visitor = open_console(url)
        while 'title="1 dead letters"' not in (page := visitor.get("/topics")):
            pass
        assert 'title="2 undecided"' in page
        while "the top of the chart" not in visitor.get("/groups/cart"):
            pass


def test_databases_show_their_outboxes(url: str, tmp_path: Path, open_console: Callable[..., Visitor]) -> None:
    database = f"sqlite:///{tmp_path / 'shop.db'}"
    engine = sa.create_engine(database)
    outbox.migrate(engine)
    with engine.begin() as connection:
        for number in range(3):
            outbox.send_tx(connection, "orders", b"x", key=str(number))
    page = open_console(url, databases=[database]).get("/databases")
    assert re.search(r'data-label="Unsent" class="number">3<', page)
    assert "shop.db" in page
    assert "no databases" in open_console(url).get("/databases")
    engine.dispose()


def test_times_are_relative_with_the_exact_one_in_the_title() -> None:
    now = 1_800_000_000_000_000
    assert ">3 min ago</time>" in ago(now - 200_000_000, now)
    assert ">in 2 h</time>" in ago(now + 7_300_000_000, now)
    assert ">now</time>" in ago(now - 10, now)
    assert 'title="2027-01-15' in ago(now, now)
    assert ago(None, now) == "–"
