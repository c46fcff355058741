"""The pages: what they show, filters and pages of long lists, brokers that are away, the numbers of the overview."""

from __future__ import annotations

import html
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from console_visitor import Visitor
from console_world import LONG, served_broker

import escrowmq as mq
from escrowmq.connecting import links
from escrowmq.console import ConsoleSettings, paging
from escrowmq.console.pictures import spark
from escrowmq.console.sampling import Sample, Sampler
from escrowmq.console.views import overview
from escrowmq.errors import Misuse
from escrowmq.testing.link import TwinLink
from escrowmq.wire.actions import dead_letters


def text(page: str) -> str:
    """A page as a person reads it."""
    body = re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", body)).split())


def test_topics_and_their_messages(visitor: Visitor) -> None:
    listed = text(visitor.get("/topics"))
    assert f"{LONG} 4 1 1" in listed
    assert "orders 4 60 60" in listed
    assert "4 topics" not in listed, "a short list has no filter"
    page = text(visitor.get("/topics/orders", queue=1))
    assert "Messages of queue 1 newest first" in page
    assert '{"order": ' in page
    empty = text(visitor.get("/topics/payments", queue=3))
    assert "This queue holds no messages." in empty or "payment-" in empty


def test_a_message_with_its_properties_and_body(visitor: Visitor, world: mq.Bus) -> None:
    found = world.admin.read("orders", queue=1, start=0, end=1).read_all().to_pylist()[0]
    page = visitor.get("/topics/orders/message", queue=1, offset=0)
    assert found["message_id"].hex() in page
    assert "trace" in page
    assert '"currency": "EUR",\n' in html.unescape(page)
    page = visitor.get("/topics/orders/message", queue=1, offset=0, **{"as": "hex"})
    assert "000000  7b 22 6f 72 64 65 72 22" in page


def test_groups_producers_and_transactions(visitor: Visitor, world: mq.Bus) -> None:
    assert "books orders 0 – 0 0 0 60" in text(visitor.get("/groups"))
    page = text(visitor.get("/groups/books"))
    assert "up to 16; then a dead letter" in page
    producers = text(visitor.get("/producers"))
    assert "pay-ments transactional" in producers
    assert "shop plain" in producers
    listed = text(visitor.get("/transactions", state="open", group="pay-ments"))
    assert listed.count(" pay-ments ") == 1
    assert "No transactions are like this" in text(visitor.get("/transactions", state="parked"))
    identity = world.admin.transactions(state="committed")[0]["id"]
    page = text(visitor.get(f"/transactions/{identity}"))
    assert "prepared" in page
    assert "committed, by producer" in page
    assert "payment-0" in page


def test_long_lists_come_by_pages(open_console: Callable[..., Visitor], tmp_path: Path) -> None:
    """Each dead letter stands on one page, once; and so does each topic."""
    with served_broker(tmp_path / "data") as url, mq.connect(url) as bus:
        for number in range(130):
            bus.admin.create_topic(f"topic-{number:03}", queues=1)
        producer = bus.producer("p")
        for number in range(120):
            producer.send("topic-000", b"x", key=f"k{number:03}")
        consumer = bus.consumer("g", ["topic-000"], max_attempts=1)
        left = 120
        for message in consumer.messages(idle_timeout=60):
            message.nack(cause="it cannot be")
            left -= 1
            if not left:
                break
        consumer.close()
        visitor = open_console(url)
        path, keys, pages = "/dead-letters/g", [], 0
        while path:
            page = visitor.get(path)
            keys += re.findall(r">(k\d\d\d)<", page)
            pages += 1
            following = re.search(r'rel="next" href="(\?[^"]+)"', page)
            path = "/dead-letters/g" + html.unescape(following[1]) if following else ""
        assert (pages, len(keys), len(set(keys))) == (3, 120, 120)
        first = visitor.get("/topics")
        assert len(re.findall(r"data-row", first)) == 100
        assert "130 of 130 topics" in text(first)
        assert len(re.findall(r"data-row", visitor.get("/topics", start=100))) == 30
        assert text(visitor.get("/topics", name="C-12")).count("topic-12") == 10


def test_the_place_in_a_listing_is_not_believed() -> None:
    router: Any = None
    for cursor in ("", "e", "bnVsbA", "WzFd", "eyIwIjp7fX0", "eyIwIjpbMSwyLDMsNCw1LDYsNyw4LDldfQ", "\u00e9", "//"):
        if not cursor:
            continue
        with pytest.raises(Misuse, match="no page of the listing"):
            paging.page(router, dead_letters.LIST({"group": "g"}), "dead_letters", cursor, 1.0)


# Brokers that are away


def test_a_page_says_in_time_that_no_broker_answers(open_console: Callable[..., Visitor], tmp_path: Path) -> None:
    with served_broker(tmp_path / "data") as url:
        pass
    visitor = open_console(url, ConsoleSettings(call_timeout=0.5, absent_timeout=0.2, sample_seconds=0.05))
    page = text(visitor.get("/"))
    assert "unreachable" in page
    assert "no numbers" in page
    for path in ("/topics", "/groups", "/dead-letters/g", "/transactions", "/acts"):
        page = text(visitor.get(path, status=504))
        assert "TIMED_OUT" in page
        assert "Try again" in page


def test_a_page_that_takes_too_long_says_so(open_console: Callable[..., Visitor]) -> None:
    gate = threading.Event()

    class Stuck(TwinLink):
        def action(self, name: str, request: Any, timeout: float) -> Any:
            if name == "topics.list":
                assert gate.wait(60)
            return super().action(name, request, timeout)

    visitor = open_console([Stuck()], ConsoleSettings(page_timeout=0.2, sample_seconds=0.05))
    assert "no answer within 0.2 seconds" in text(visitor.get("/topics", status=504))
    gate.set()


def test_one_of_two_brokers_is_away(open_console: Callable[..., Visitor], tmp_path: Path) -> None:
    with served_broker(tmp_path / "one") as one:
        with served_broker(tmp_path / "two") as two:
            both = f"{one},{two.removeprefix('escrow://')}"
            with mq.connect(both) as bus:
                bus.admin.create_topic("t", queues=2)
            visitor = open_console(both)
            assert "t 4 0 0" in text(visitor.get("/topics"))
            assert "Not all brokers answered" not in text(visitor.get("/topics"))
        page = text(visitor.get("/topics"))
        assert "Not all brokers answered" in page
        assert two in page
        assert "t 2 0 0" in page
        assert "unreachable" in text(visitor.get("/"))


def test_a_bug_in_a_page_is_a_page_and_a_line_in_the_log(
    open_console: Callable[..., Visitor], caplog: pytest.LogCaptureFixture
) -> None:
    class Wrong(TwinLink):
        def action(self, name: str, request: Any, timeout: float) -> Any:
            return {} if name == "topics.list" else super().action(name, request, timeout)

    visitor = open_console([Wrong()], ConsoleSettings(sample_seconds=60))
    assert "the console failed on this page" in text(visitor.get("/topics", status=500))
    assert "KeyError" in caplog.text


# Numbers over time


def test_the_overview_has_the_brokers_numbers(open_console: Callable[..., Visitor], world_url: str) -> None:
    visitor = open_console(world_url)
    deadline = time.monotonic() + 60
    while "spark" not in (page := visitor.get("/")) or "undecided: 1" not in page:
        assert time.monotonic() < deadline, page
    assert 'data-live="4"' in page


def test_samples_are_bounded_and_survive_a_broker_that_goes(tmp_path: Path) -> None:
    with served_broker(tmp_path / "data") as url:
        bus = mq.Bus(links(url, {}))
        sampler = Sampler(bus.router, 0.001, 5, 0.3)
        sampler.start()
        assert sampler.wait(lambda samples: len(samples) == 5 and bool(samples[-1].numbers), 60)
        assert sampler.wait(lambda samples: samples[0].at > 0 and len(samples) == 5, 60)
    assert sampler.wait(lambda samples: bool(samples[-1].problem), 60)
    bus.close()
    sampler.close()
    assert len(sampler.samples()) == 5


def sample(at: float, **numbers: float) -> Sample:
    return Sample(at, {"a": numbers} if numbers else {}, {"a": 0.001} if numbers else {})


def test_rates_are_growth_per_second_and_break_where_nothing_is_known() -> None:
    looks = [
        sample(0.0, messages_total=10, half_messages_total=0),
        sample(2.0, messages_total=30, half_messages_total=2),
        sample(4.0),
        sample(6.0, messages_total=100, half_messages_total=2),
        sample(8.0, messages_total=5, half_messages_total=0),
        sample(10.0, messages_total=25, half_messages_total=0),
    ]
    figures = {figure.name: figure for _, section in overview.sections(looks) for figure in section}
    assert figures["stored"].text == "10"
    assert str(figures["stored"].picture).count('class="line"') == 2, "nothing is drawn over a gap or a new start"
    assert figures["dead letters"].text == "–"


def test_a_picture_of_nothing_is_nothing_and_a_flat_one_is_drawn() -> None:
    assert spark([], [], 10, "x") == ""
    assert spark([1.0], [None], 10, "x") == ""
    drawn = spark([1.0], [0.0], 10, '<b>"')
    assert "M238.0 46.0" in drawn
    assert "&lt;b&gt;&#34;" in drawn
