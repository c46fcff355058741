"""Webhooks: after how many events who is told, over real connections, to receivers that are slow, broken, silent or
away.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import escrowmq as mq
from escrowmq.errors import Misuse
from escrowmq.gateway.signing import verify
from escrowmq.gateway.webhooks import Hook, Rule, Webhooks, Window, posting, read_hooks
from escrowmq.platform.logs import tell

SECRET = "whsec_" + "MDEyMzQ1Njc4OWFiY2RlZg=="


class Told:
    """A receiver of notices: ``answers`` are the statuses of the next posts (200 when there are no more); a status of 0
    says nothing at all."""

    def __init__(self) -> None:
        self.posts: list[tuple[dict[str, str], bytes]] = []
        self.answers: list[int] = []
        self.closing = threading.Event()
        self.news = threading.Condition()
        told = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                with told.news:
                    told.posts.append(({name.lower(): value for name, value in self.headers.items()}, body))
                    status = told.answers.pop(0) if told.answers else 200
                    told.news.notify_all()
                if not status:
                    told.closing.wait()
                    return
                self.send_response(status)
                if status == 302:
                    self.send_header("location", f"http://127.0.0.1:{told.port}/elsewhere")
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/hook"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def wait(self, count: int) -> list[dict[str, Any]]:
        """The notices, once there are so many posts."""
        with self.news:
            assert self.news.wait_for(lambda: len(self.posts) >= count, 60), f"{len(self.posts)} of {count}"
            return [json.loads(body) for _, body in self.posts]

    def close(self) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def receiver() -> Iterator[Callable[[], Told]]:
    made: list[Told] = []

    def start() -> Told:
        made.append(Told())
        return made[-1]

    yield start
    for one in made:
        one.close()


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posting, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(posting, "LAST_PAUSE", 0.01)


def dead(number: int, **facts: Any) -> None:
    tell(logging.WARNING, "dead", f"dead: {number}", topic="orders", group="cart", offset=number, **facts)


# Rules


@pytest.mark.parametrize(
    ("text", "rule"),
    [("parked", Rule("parked")), ("dead:10", Rule("dead", 10)), (" dead:100/5min ", Rule("dead", 100, 300.0))],
)
def test_a_rule_is_read(text: str, rule: Rule) -> None:
    assert Rule.read(text) == rule


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ded",
        "dead:",
        "dead:0",
        "dead:1/",
        "dead:1/0s",
        "dead:1/2d",
        "dead/1min",
        "dead:99999999999",
        "dead:1/5 minutes",
    ],
)
def test_what_is_no_rule_is_refused(text: str) -> None:
    with pytest.raises(Misuse):
        Rule.read(text)


@given(st.integers(1, 20), st.lists(st.tuples(st.floats(0, 30), st.integers(1, 50)), max_size=40), st.floats(1, 20))
def test_a_storm_is_two_notices_a_window_and_none_is_left_uncounted(
    count: int, events: list[tuple[float, int]], within: float
) -> None:
    window, now, told, seen = Window(Rule("dead", count, within)), 0.0, [], 0
    for pause, size in events:
        now += pause
        told += [(now, one) for one in [window.due(now)] if one]
        seen += size
        told += [(now, one) for one in [window.saw(now, size, {"n": seen})] if one]
    if (end := window.ends) is not None:
        told += [(end, one) for one in [window.due(end)] if one]
    assert window.ends is None
    assert sum(notice.count for _, notice in told) <= seen
    if count == 1:
        assert sum(notice.count for _, notice in told) == seen
    for at, _ in told:
        assert sum(at <= other < at + within for other, _ in told) <= 3  # the end of one window, and two of the next
    assert all(0 < len(notice.samples) <= 5 for _, notice in told)


def test_fewer_than_the_count_within_the_time_are_not_told() -> None:
    window = Window(Rule("dead", 3, 10.0))
    for now in (0.0, 6.0, 12.0, 18.0):
        assert window.due(now) is None
        assert window.saw(now, 1, {}) is None
    window.due(30.0)
    assert window.saw(30.0, 3, {}) is not None


# Posts


def test_a_signed_notice_says_what_happened_where_and_how_often(receiver: Callable[[], Told]) -> None:
    told = receiver()
    hook = Hook("pager", told.url, (Rule("dead", 3),), (b"0123456789abcdef",))
    with Webhooks([hook], {"url": "escrow://127.0.0.1:7700"}):
        for number in range(3):
            dead(number)
        (notice,) = told.wait(1)
    assert notice["type"] == "escrowmq.dead"
    assert notice["data"]["count"] == 3
    assert notice["data"]["source"] == {"url": "escrow://127.0.0.1:7700"}
    assert [one["offset"] for one in notice["data"]["samples"]] == [0, 1, 2]
    headers, body = told.posts[0]
    verify(b"0123456789abcdef", headers, body)


def test_other_kinds_topics_and_groups_are_not_told(receiver: Callable[[], Told]) -> None:
    told = receiver()
    hook = Hook(
        "pager",
        told.url,
        (Rule("dead"), Rule("full")),
        timeout=60.0,
        topics=frozenset({"orders"}),
        groups=frozenset({"mail"}),
    )
    with Webhooks([hook], {}):
        dead(1)
        tell(logging.WARNING, "parked", "parked", group="mail")
        tell(logging.WARNING, "dead", "dead", topic="returns", group="mail")
        tell(logging.WARNING, "full", "full", cause="no space")
        (notice,) = told.wait(1)
    assert notice["type"] == "escrowmq.full"
    assert len(told.posts) == 1


def test_what_is_not_taken_is_posted_again_under_its_id(
    receiver: Callable[[], Told], caplog: pytest.LogCaptureFixture
) -> None:
    told = receiver()
    told.answers = [500, 302, 404]
    with Webhooks([Hook("pager", told.url, (Rule("dead"),), timeout=60.0)], {}):
        dead(1)
        told.wait(4)
    assert len({headers["webhook-id"] for headers, _ in told.posts}) == 1
    assert len(told.posts) == 4, "no redirect is followed"
    assert "status 500" in caplog.text
    assert "pager answers again" in caplog.text


def test_who_says_nothing_delays_no_other_address_and_no_end(
    receiver: Callable[[], Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(posting, "CLOSE_SECONDS", 0.05)
    silent, told = receiver(), receiver()
    silent.answers = [0]
    hooks = [Hook("silent", silent.url, (Rule("dead"),)), Hook("pager", told.url, (Rule("dead"),))]
    with Webhooks(hooks, {}):
        dead(1)
        silent.wait(1)
        told.wait(1)
        dead(2)
    silent.closing.set()


def test_an_address_that_is_away_drops_the_oldest_and_costs_nothing(
    receiver: Callable[[], Told], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(posting, "MOST_NOTICES", 3)
    monkeypatch.setattr(posting, "CLOSE_SECONDS", 0.05)
    address = posting._Address(Hook("gone", "http://127.0.0.1:9/hook", (Rule("dead"),)))
    for number in range(10):
        address.put(b"%d" % number)
    assert [body for _, body, _ in address._waiting] == [b"7", b"8", b"9"]
    assert caplog.text.count("the oldest are dropped") == 1
    assert "ConnectError" in str(address.post("msg_1", b"{}"))
    address.start()
    address.stop(0.0)


def test_after_the_end_nobody_listens(receiver: Callable[[], Told]) -> None:
    told = receiver()
    with Webhooks([Hook("pager", told.url, (Rule("dead"),), timeout=60.0)], {}) as hooks:
        dead(1)
        told.wait(1)
    dead(2)
    hooks.close()
    assert len(told.posts) == 1
    assert hooks not in logging.getLogger("escrowmq.events").handlers


def test_a_brokers_dead_letter_and_parked_transaction_are_told(receiver: Callable[[], Told], tmp_path: Path) -> None:
    told = receiver()
    quick = {"transaction_timeout": 0.05, "check_interval": 0.05, "check_max": 1, "retry_backoff": 0.01}
    with (
        Webhooks([Hook("pager", told.url, (Rule("dead"), Rule("parked"), Rule("opened")), timeout=60.0)], {}),
        mq.connect(f"file:{tmp_path}", **quick) as bus,
    ):
        producer = bus.producer("shop", checker=lambda check: mq.UNKNOWN)
        producer.prepare("orders", b"half")
        bus.producer("plain").send("returns", b"spoilt")
        with bus.consumer("cart", "returns", max_attempts=1) as consumer:
            next(iter(consumer)).nack(0.0, "spoilt")
            with told.news:
                assert told.news.wait_for(lambda: len({json.loads(body)["type"] for _, body in told.posts}) == 3, 60)
            notices = told.wait(3)
    kinds = {notice["type"]: notice["data"]["samples"][0] for notice in notices}
    assert set(kinds) == {"escrowmq.opened", "escrowmq.dead", "escrowmq.parked"}
    assert kinds["escrowmq.dead"]["group"] == "cart"
    assert kinds["escrowmq.parked"]["group"] == "shop"


# Configured


def test_hooks_come_from_tables_and_flags_and_secrets_from_the_environment() -> None:
    table = {
        "url": "https://pager.example/hook",
        "events": ["dead:10/1min", "parked"],
        "secret_env": "PAGER",
        "timeout": "5s",
        "groups": ["cart"],
    }
    one, other = read_hooks(["full,space=http://127.0.0.1:9/x"], {"pager": table}, {"PAGER": SECRET})
    assert (one.name, one.rules, one.timeout, one.groups) == (
        "pager",
        (Rule("dead", 10), Rule("parked")),
        5.0,
        {"cart"},
    )
    assert one.secret == (b"0123456789abcdef",)
    assert "0123456789abcdef" not in repr(one)
    assert [rule.kind for rule in other.rules] == ["full", "space"]


@pytest.mark.parametrize(
    ("flags", "tables"),
    [
        (["parked"], {}),
        (["parked=ftp://a/b"], {}),
        (["parked=http://user:word@a/b"], {}),
        (["=http://a/b"], {}),
        ([], {"a": {"url": "http://a/b"}}),
        ([], {"a": {"events": ["parked"]}}),
        ([], {"a": {"url": "http://a/b", "events": "parked"}}),
        ([], {"a": {"url": "http://a/b", "events": ["parked"], "secret_env": "ABSENT"}}),
        ([], {"a": {"url": "http://a/b", "events": ["parked"], "timeout": "2h"}}),
        ([], {"a": {"url": "http://a/b", "events": ["parked"], "colour": "red"}}),
        (["parked=http://a/b"] * 65, {}),
    ],
)
def test_mistakes_are_told_before_anything_is_served(flags: list[str], tables: dict[str, Any]) -> None:
    with pytest.raises(Misuse):
        read_hooks(flags, tables, {})
