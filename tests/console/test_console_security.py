"""The console's door: foreign hosts, forged forms, framing, foreign texts, sizes."""

from __future__ import annotations

import dataclasses
import html
import re
import socket
import threading
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from console_visitor import Visitor
from console_world import HARMS

import escrowmq as mq
from escrowmq.console import ConsoleSettings, beside
from escrowmq.console.asked import Params
from escrowmq.console.tokens import Tokens
from escrowmq.errors import Denied
from escrowmq.testing.link import TwinLink

PAGES = ("/", "/topics", "/groups", "/producers", "/transactions", "/dead-letters", "/acts", "/acts/verify", "/nothing")


class Tags(HTMLParser):
    """What a browser would make of a page: its elements and their attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def harmless(page: str) -> None:
    """No script but ours, no handler, no style, no address outside, nothing that a foreign text brought."""
    for tag, attributes in Tags(page).found:
        assert tag not in ("iframe", "object", "embed", "base", "style"), tag
        if tag == "script":
            assert attributes == {"src": "/static/console.js", "defer": None}
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            assert name != "style", (tag, value)
            if name in ("href", "src", "action", "formaction"):
                assert re.match(r"/(?!/)|[?#]", value or ""), (tag, value)


@pytest.mark.parametrize("path", PAGES)
def test_no_page_may_be_framed_kept_or_load_anything_from_elsewhere(visitor: Visitor, path: str) -> None:
    answer = visitor.http.get(path)
    policy = {part.split()[0]: part.split()[1:] for part in answer.headers["content-security-policy"].split(";")}
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == ["'none'"]
    assert policy["script-src"] == policy["style-src"] == policy["form-action"] == ["'self'"]
    assert answer.headers["x-frame-options"] == "DENY"
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cross-origin-resource-policy"] == "same-origin"
    assert not [name for name in answer.headers if name.startswith("access-control")]
    harmless(answer.text)


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[", "localhost.", "10.0.0.1"]
)
def test_a_foreign_host_is_refused(visitor: Visitor, host: str) -> None:
    """A page that has its own name point to this machine comes no further than this."""
    for path in ("/", "/static/console.js", "/topics/orders/body?offset=0"):
        answer = visitor.http.get(path, headers={"Host": host})
        assert answer.status_code == 403, (host, path)
        assert "DENIED" in answer.text or path.startswith("/static")


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.1.2.3:99", "[::1]:7790", "LOCALHOST"])
def test_names_of_the_loopback_are_taken(visitor: Visitor, host: str) -> None:
    assert visitor.http.get("/topics", headers={"Host": host}).status_code == 200


def test_a_name_given_by_option_is_taken(open_console: Callable[..., Visitor]) -> None:
    visitor = open_console([TwinLink()], ConsoleSettings(hosts=("Console.Example",), sample_seconds=0.05))
    assert visitor.http.get("/topics", headers={"Host": "console.example:80"}).status_code == 200
    assert visitor.http.get("/topics", headers={"Host": "other.example"}).status_code == 403


def test_beyond_loopback_only_when_it_is_spelled_out() -> None:
    with pytest.raises(Denied, match="--insecure"), beside(lambda _: [TwinLink()], listen="0.0.0.0:0"):
        pass


def test_each_page_says_that_other_machines_reach_the_console(
    visitor: Visitor, caplog: pytest.LogCaptureFixture
) -> None:
    assert "--insecure" not in visitor.http.get("/topics").text
    with beside(lambda _: [TwinLink()], listen="0.0.0.0:0", insecure=True) as at:
        port = at["console"].rpartition(":")[2]
        answer = httpx.get(f"http://127.0.0.1:{port}/topics", trust_env=False, timeout=60.0)
    assert answer.status_code == 200
    assert "<code>--insecure</code>: other machines reach it" in answer.text
    assert "0.0.0.0 can be reached from other machines, and there is no TLS and access rights" in caplog.text


# Forms


def test_the_cookie_is_for_this_site_and_no_script(console_url: str) -> None:
    with httpx.Client(base_url=console_url, trust_env=False, timeout=60.0) as fresh:
        cookie = fresh.get("/topics").headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert cookie.startswith(f"escrowmq-console-{console_url.rpartition(':')[2]}=")


FORM = {"Content-Type": "application/x-www-form-urlencoded"}


def test_a_token_of_another_console_or_browser_does_not_fit() -> None:
    one, other = Tokens(1), Tokens(1)
    cookie, second = one.new_cookie(), one.new_cookie()
    assert one.fits(cookie, one.of(cookie))
    assert not one.fits(second, one.of(cookie))
    assert not other.fits(cookie, one.of(cookie))
    assert not one.fits(None, one.of(cookie))
    assert not one.fits(cookie, "é")
    assert one.cookie_of(f"{one.name}={cookie}") == cookie
    for broken in ("", f"{one.name}=short", f"{one.name}={'G' * 64}", "=;=,\x00", f"escrowmq-console-2={cookie}"):
        assert one.cookie_of(broken) is None


def test_a_form_is_bounded_in_bytes_fields_and_time(open_console: Callable[..., Visitor]) -> None:
    settings = ConsoleSettings(max_form_bytes=2000, max_fields=8, form_timeout=60.0, sample_seconds=0.05)
    visitor = open_console([TwinLink()], settings)
    headers = {**FORM, "Origin": visitor.url}

    def post(content: Any) -> int:
        return visitor.http.post("/topics", content=content, headers=headers).status_code

    assert post("a=" + "x" * 3000) == 413
    assert post(iter([b"a=" + b"x" * 1500, b"x" * 1500])) == 413
    assert post("&".join(f"a{n}=1" for n in range(9))) == 400
    assert post("a=%ff") == 400
    assert post(b"\xff") == 400
    visitor = open_console([TwinLink()], dataclasses.replace(settings, form_timeout=0.3))
    host, port = visitor.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as slow:
        head = f"POST /topics HTTP/1.1\r\nHost: {host}:{port}\r\nOrigin: {visitor.url}\r\nContent-Length: 100\r\n"
        slow.sendall(f"{head}Content-Type: {FORM['Content-Type']}\r\n\r\na=".encode())
        assert slow.recv(100).startswith(b"HTTP/1.1 408")


def test_slow_forms_keep_nobody_from_a_page(open_console: Callable[..., Visitor]) -> None:
    visitor = open_console([TwinLink()], ConsoleSettings(max_requests=4, max_forms=4, sample_seconds=0.05))
    host, port = visitor.url.removeprefix("http://").split(":")
    head = f"POST /topics HTTP/1.1\r\nHost: {host}:{port}\r\nOrigin: {visitor.url}\r\nContent-Length: 100\r\n"
    slow = [socket.create_connection((host, int(port)), timeout=60) for _ in range(12)]
    for one in slow:
        one.sendall(f"{head}Content-Type: {FORM['Content-Type']}\r\n\r\na=".encode())
    for one in slow[:8]:  # each further form takes the place of the oldest
        assert one.recv(100).startswith(b"HTTP/1.1 408")
    for _ in range(3):
        assert visitor.http.get("/static/console.css").status_code == 200
    for one in slow:
        one.close()


@pytest.mark.parametrize("path", ["//evil.example/x", "///evil.example", "/%5C%5Cevil.example/x", "/\\evil.example"])
def test_the_page_of_an_error_leads_to_this_site_only(open_console: Callable[..., Visitor], path: str) -> None:
    visitor = open_console([TwinLink()], ConsoleSettings(sample_seconds=0.05))
    with socket.create_connection(tuple(visitor.url.removeprefix("http://").split(":")), timeout=60) as asked:
        asked.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
        answer = b""
        while more := asked.recv(1 << 16):
            answer += more
    links = [given.get("href") for tag, given in Tags(answer.decode()).found if tag == "a"]
    assert links
    assert [link for link in links if link is None or re.match(r"[/\\]{2}|[a-z]+:", link)] == []


def test_only_so_many_pages_are_made_at_once(open_console: Callable[..., Visitor]) -> None:
    gate, entered = threading.Event(), threading.Semaphore(0)

    class Slow(TwinLink):
        def action(self, name: str, request: Any, timeout: float | None = None) -> Any:
            if name == "topics.list":
                entered.release()
                assert gate.wait(60)
            return super().action(name, request, timeout)

    visitor = open_console(
        [Slow()], ConsoleSettings(max_requests=1, sample_seconds=0.05, call_timeout=60.0, page_timeout=120.0)
    )
    statuses: list[int] = []
    first = threading.Thread(target=lambda: statuses.append(visitor.http.get("/topics").status_code))
    first.start()
    assert entered.acquire(timeout=60)
    with httpx.Client(base_url=visitor.url, trust_env=False, timeout=60.0) as second:
        assert second.get("/static/console.css").status_code == 503
        gate.set()
        first.join()
    assert statuses == [200]


# Foreign texts


def test_foreign_texts_are_texts_wherever_they_stand(
    open_console: Callable[..., Visitor], world_url: str, world: mq.Bus, g: str
) -> None:
    """Bodies, keys, tags, properties, causes, instances, reasons, and whatever an address says."""
    visitor = open_console(world_url)
    consumer = world.consumer(g, ["hostile"], max_attempts=1, start="earliest")
    for number, message in enumerate(consumer.messages(idle_timeout=60)):
        message.nack(cause=HARMS[number].replace("\x00", ""))
        if number == len(HARMS) - 1:
            break
    consumer.close()
    letters = world.admin.dead_letters(g)
    assert len(letters) == len(HARMS)
    world.admin.retry_dead_letters(g, letters[:1], why=HARMS[1])
    seen = ""
    for letter in world.admin.dead_letters(g):
        place = {name: letter[name] for name in ("broker", "topic", "queue", "offset")}  # type: ignore[literal-required]
        for kind in ("text", "hex"):
            page = visitor.get(f"/dead-letters/{g}/letter", **place, **{"as": kind})
            harmless(page)
            seen += page
        page = visitor.get("/topics/hostile/message", **{name: place[name] for name in ("queue", "offset", "broker")})
        harmless(page)
    for path in ("/topics", "/topics/hostile", f"/dead-letters/{g}", "/acts", "/acts/1", "/producers", "/groups"):
        page = visitor.get(path)
        harmless(page)
        seen += page
    for harm in HARMS:
        for query in ({"name": harm}, {"group": harm}, {"state": harm}, {"older": harm}, {"after": harm}):
            for path in ("/topics", "/transactions", f"/dead-letters/{g}"):
                harmless(visitor.http.get(path, params=query).text)
        harmless(visitor.http.get(f"/topics/{quote(harm)}").text)
    texts = "".join(Tags(seen).texts)
    assert "<script>document.title='harmed'</script>" in texts, "it is shown as what it is"
    assert "{{ 7 * 7 }}" in texts
    assert "\u202e" not in seen, "what turns the direction of a line is spelled out"
    assert "\\u202etxt.exe" in texts
    assert "\x07" not in seen


def test_a_body_is_downloaded_and_never_shown(visitor: Visitor) -> None:
    answer = visitor.http.get("/topics/hostile/body", params={"queue": 0, "offset": 0})
    assert answer.status_code == 200
    assert answer.content in {harm.replace("\x00", "").encode() for harm in HARMS}
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["content-disposition"] == 'attachment; filename="hostile-0-0.bin"'
    assert "default-src 'none'" in answer.headers["content-security-policy"]


def test_values_of_an_address_are_bounded_and_numbers_are_numbers() -> None:
    from escrowmq.errors import Misuse

    params = Params("/", query={"a": "x" * 5000, "b": "-1", "c": "9" * 19, "d": " ", "e": "٣"})
    for name in "abce":
        with pytest.raises(Misuse, match=r"letters|whole number"):
            params.number(name, 0)
    assert params.number("d", 7) == 7


def test_a_page_says_what_it_refuses(visitor: Visitor) -> None:
    text = html.unescape(visitor.get("/transactions", status=400, older="soon"))
    assert "older" in text
    visitor.get("/transactions", status=400, after="!!!")
    visitor.get("/transactions", status=400, after="e30x")
    visitor.get("/topics/none", status=404)
    visitor.get("/topics/.bad", status=400)
    visitor.get("/groups/none", status=404)
    visitor.get("/acts/0", status=404)
    visitor.get("/acts/999999", status=404)
    visitor.get("/topics/orders/message", status=404, offset=99)
    visitor.get("/topics/orders/message", status=400, offset=0, broker="escrow://elsewhere")
    visitor.get("/dead-letters/books/letter", status=404, topic="orders", queue=0, offset=0)
    visitor.get("/transactions/1-2-3-4", status=404)  # no transaction id, so perhaps that of a message
    visitor.get("/../../etc/passwd", status=404)
    visitor.get("/static/..%2fapp.py", status=404)
