"""With a real browser: the story of 3 a.m., keys, foreign texts that mean harm, small windows, and a console that goes
away.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from console_screens import check_page, paths_of
from console_visitor import Visitor
from console_world import HARM, HARMS, LONG, served_broker
from playwright.sync_api import Browser, Page, expect, sync_playwright
from pyspark.sql import SparkSession

import escrowmq as mq
from escrowmq.connecting import links
from escrowmq.console import ConsoleSettings, beside
from escrowmq.pipeline.audit import run as audit
from escrowmq_lab.servers.chromium import flags

expect.set_options(timeout=60_000)  # of a busy machine
QUICK = ConsoleSettings(sample_seconds=0.1, call_timeout=60.0, page_timeout=120.0)


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=chromium, args=flags())
        yield made
        made.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A window of its own, in which no script fails and nothing breaks the page's policy."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    made = context.new_page()
    made.set_default_timeout(60_000)
    problems: list[str] = []
    made.on("pageerror", lambda problem: problems.append(str(problem)))
    made.on("console", lambda line: problems.append(line.text) if "Content Security Policy" in line.text else None)
    yield made
    context.close()
    assert not problems


class Shop:
    """Producers and a consumer of one group. Until it is mended, the consumer fails all that is old: for three causes,
    one of them poison."""

    def __init__(self, bus: mq.Bus, folder: Path) -> None:
        self.bus = bus
        self.folder = folder
        self.mended = threading.Event()
        self.stopping = threading.Event()
        self.sent: dict[str, str] = {}
        """Key by message id."""
        self.effects: Counter[str] = Counter()
        self._sent = database(folder / "shop.db", "CREATE TABLE sent (message_id TEXT PRIMARY KEY, body TEXT)")
        self._handled = database(folder / "cart.db", "CREATE TABLE effects (message_id TEXT, price TEXT)")
        self.by_key: dict[str, str] = {}
        """The message that had its effect last, by its key."""
        self.news = threading.Condition()
        self.failed = 0
        self._threads: list[threading.Thread] = []

    def send(self, count: int, kind: str, body: bytes) -> None:
        batch = [mq.Message("orders", body, key=f"{kind}-{number}") for number in range(count)]
        receipts = self.bus.producer("shop").send_batch(batch)
        for message, receipt in zip(batch, receipts, strict=True):
            self.sent[receipt.message_id.hex()] = message.key or ""
        rows = [(receipt.message_id.hex(), body.decode()) for receipt in receipts]
        self._sent.executemany("INSERT INTO sent VALUES (?, ?)", rows)

    def begin(self, *works: Callable[[], None]) -> None:
        for work in works:
            self._threads.append(threading.Thread(target=work, daemon=True))
            self._threads[-1].start()

    def consume(self) -> None:
        consumer = self.bus.consumer("cart", ["orders"], max_attempts=1)
        while not self.stopping.is_set():
            for message in consumer.messages(idle_timeout=0.2):
                try:
                    self._handle(message)
                except (ValueError, KeyError, TimeoutError) as problem:
                    message.nack(cause=f"{type(problem).__name__}: {problem}")
                    with self.news:
                        self.failed += 1
                        self.news.notify_all()
                else:
                    message.ack()
                if self.stopping.is_set():
                    break
        consumer.close()

    def _handle(self, message: Any) -> None:
        order = json.loads(message.body)
        if not self.mended.is_set():
            if order.get("old"):
                raise TimeoutError(f"the price list did not answer within {order['old']} s")
            if "price" not in order:
                raise KeyError("price")
        self._handled.execute("INSERT INTO effects VALUES (?, ?)", (message.message_id.hex(), str(order["price"])))
        with self.news:
            self.effects[message.message_id.hex()] += 1
            self.by_key[message.key or ""] = message.message_id.hex()
            self.news.notify_all()

    def trade(self) -> None:
        """Live traffic: until the end, some every few milliseconds."""
        number = 0
        while not self.stopping.wait(0.005):
            self.send(5, f"live{number}", b'{"price": 1}')
            number += 1

    def wait(self, ready: Callable[[], bool]) -> None:
        with self.news:
            assert self.news.wait_for(ready, 60)

    def close(self) -> None:
        self.stopping.set()
        for thread in self._threads:
            thread.join()

    def end(self) -> None:
        """Nobody works any more, and the databases are closed."""
        self.close()
        self._sent.close()
        self._handled.close()

    def manifest(self) -> Path:
        """The folder as a run that the audit can read: what was sent is in the topic, and what the group was given has
        its effect."""
        tables = {
            name: {"database": file, "table": name, "id": "message_id"}
            for name, file in (("sent", "shop.db"), ("effects", "cart.db"))
        }
        described = {
            "log": "data",
            "topics": ["orders"],
            "ids": {"orders": "message_id"},
            "tables": tables,
            "comparisons": [
                {"expected": "table:sent", "found": "topic:orders", "columns": ["body"]},
                {"expected": "group:cart/orders", "found": "table:effects", "columns": ["price"]},
            ],
            "consumers": {"cart": "effects"},
        }
        (self.folder / "manifest.json").write_text(json.dumps(described))
        return self.folder


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[tuple[Shop, str]]:
    """A shop with 1,000 dead letters, and its console."""
    with (
        served_broker(tmp_path / "data") as url,
        mq.connect(url) as bus,
        beside(lambda _: links(url, {}), listen="127.0.0.1:0", plans=tmp_path / "plans", settings=QUICK) as at,
    ):
        made = Shop(bus, tmp_path)
        made.send(599, "slow", b'{"old": 30, "price": 5}')
        made.send(400, "free", b'{"gift": true}')
        made.send(1, "poison", f'{{"price": "{HARM}'.encode())
        made.begin(made.consume)
        made.wait(lambda: made.failed == 1000)
        try:
            yield made, at["console"]
        finally:
            made.end()


def database(path: Path, table: str) -> sqlite3.Connection:
    """A database of one writer at a time, each statement a transaction."""
    made = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    made.execute("PRAGMA synchronous = off")
    made.execute("PRAGMA journal_mode = wal")
    made.execute(table)
    return made


def ready(page: Page) -> None:
    """Wait until the page's script listens to keys."""
    expect(page.locator("button[data-open=keys]")).to_be_visible()


def press(page: Page, *keys: str) -> None:
    """Keys, on a page that listens."""
    ready(page)
    for key in keys:
        page.keyboard.press(key)


def make_plan(page: Page, cause: str, act: str, why: str) -> None:
    """From what waits to the plan of one cause."""
    press(page, "g", "w")
    card = page.locator(".cause", has_text=cause)
    card.get_by_role("link", name=act).click()
    page.get_by_label("Why").fill(why)
    page.get_by_role("button", name="Make the plan").click()
    page.get_by_role("button", name="Dry run").click()
    expect(page.get_by_text("it would be done")).to_be_visible()


@pytest.mark.spark
def test_three_in_the_morning(page: Page, shop: tuple[Shop, str], spark: SparkSession) -> None:
    """1,000 dead letters of three causes, one of them poison: found, looked at, edited, planned, tried dry, delivered
    again in steps under live traffic, the rest settled; then the audit on Spark agrees about every id, and the edited
    message is found by its own id."""
    made, console = shop
    made.begin(made.trade)
    page.goto(console)
    expect(page.locator(".figure.urgent", has_text="dead letters")).to_contain_text("1,000")

    press(page, "g", "w")
    for count, cause in (("599", "TimeoutError"), ("400", "KeyError"), ("1", "JSONDecodeError")):
        expect(page.locator(".cause", has_text=cause).locator("strong").first).to_have_text(count)

    # The poison: looked for, read, edited.
    press(page, "/")
    page.keyboard.type("poison-0\n")
    expect(page.locator(".story .sentence")).to_contain_text("made it a dead letter")
    page.goto(console + "/dead-letters/cart")
    page.get_by_role("link", name="JSONDecodeError").first.click()
    page.locator("tbody a", has_text="orders/").first.click()
    expect(page.locator("pre.body")).to_contain_text(HARM)
    poison = page.locator("dd code").first.inner_text()
    page.get_by_role("link", name="Edit and deliver again").click()
    page.get_by_label("Body").fill('{"price": 7}')
    page.get_by_label("Why").fill("the price was cut off")
    page.get_by_role("button", name="Deliver it like this").click()
    made.wait(lambda: "poison-0" in made.by_key)
    edited = made.by_key["poison-0"]
    assert edited != poison

    # The price list is back: what failed of it is delivered again, in steps.
    made.mended.set()
    make_plan(page, "TimeoutError", "Deliver dead letters again", "the price list is back")
    expect(page.locator("main")).to_contain_text("599 rows")
    page.get_by_label("Steps").fill("2, 20, 100")
    page.get_by_label("Pause").fill("0.3s")
    page.get_by_role("button", name="Run: deliver dead letters again").click()
    expect(page.locator(".state.running, .state.finished")).to_be_visible()
    expect(page.locator(".state.finished")).to_be_visible()
    expect(page.locator("tr", has_text="this plan did it")).to_contain_text("599")

    # The rest is settled for good; its number is typed.
    make_plan(page, "KeyError", "Discard dead letters", "gifts are not sold any more")
    page.get_by_label("Steps").fill("100")
    page.locator("#rows").fill("400")
    page.get_by_role("button", name="Run: discard dead letters").click()
    expect(page.locator(".state.finished")).to_be_visible()

    press(page, "g", "w")
    page.wait_for_url(console + "/waiting")  # the page before it contains none either, and would get the next keys
    expect(page.locator("main")).not_to_contain_text("dead letters of consumer group cart")
    press(page, "g", "a")
    expect(page.locator("tbody")).to_contain_text("gifts are not sold any more")
    page.get_by_role("link", name="Check that nobody touched the record").click()
    expect(page.locator(".state.ok")).to_have_text("whole")
    assert "harmed" not in page.title()

    # Every id: each message had its effect once, but for those that were discarded, and the poison, in whose place
    # another one stands.
    slow = {id for id, key in made.sent.items() if key.startswith("slow-")}
    free = {id for id, key in made.sent.items() if key.startswith("free-")}
    made.wait(lambda: all(made.effects[id] for id in slow))
    stop_trading(made)
    wanted = set(made.sent) - free - {poison} | {edited}
    assert made.sent[poison] == "poison-0"
    made.wait(lambda: set(made.effects) >= wanted)
    assert {id for id, count in made.effects.items() if count} == wanted
    assert set(made.effects.values()) <= {0, 1}
    assert not made.bus.admin.dead_letters("cart")
    page.goto(console)
    press(page, "/")
    page.keyboard.type(edited + "\n")
    expect(page.locator(".story")).to_contain_text(f"Stored in place of dead letter {poison}")
    made.close()
    verdict = audit(made.manifest(), spark=spark)
    assert verdict.findings == ()
    assert verdict.agrees
    assert [side.found_rows for side in verdict.comparisons] == [len(made.sent), len(wanted)]
    kept = [message for message in made.sent if message not in free]
    assert verdict.consumers == {"cart": len(kept)}


def stop_trading(made: Shop) -> None:
    """Nothing more is sent; the consumer goes on until all is there."""
    made.stopping.set()
    made.close()
    made.stopping.clear()
    made.begin(made.consume)


def test_no_page_is_harmed_or_too_wide(page: Page, world: mq.Bus, world_url: str, g: str, tmp_path: Path) -> None:
    """Names of 127 letters and foreign texts, in a window of 360: nothing runs, nothing lies outside, no page has to be
    moved sideways."""
    consumer = world.consumer(g, ["hostile", LONG], max_attempts=1)
    for number, message in enumerate(consumer.messages(idle_timeout=60), 1):
        message.nack(cause=HARMS[number % len(HARMS)].replace("\x00", ""))
        if number == len(HARMS) + 1:
            break
    consumer.close()
    with beside(lambda _: links(world_url, {}), listen="127.0.0.1:0", plans=tmp_path, settings=QUICK) as at:
        page.set_viewport_size({"width": 360, "height": 640})
        for path in paths_of(world, g):
            check_page(page, at["console"] + path)


def test_keys_lead_through_a_table(page: Page, console_url: str) -> None:
    page.goto(console_url + "/topics")
    press(page, "j")
    page.keyboard.press("j")
    second = page.locator("main a[data-row]").nth(1)
    expect(second).to_be_focused()
    assert second.evaluate("one => getComputedStyle(one).outlineStyle") != "none", "where one is can be seen"
    page.keyboard.press("k")
    expect(page.locator("main a[data-row]").first).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("h2", has_text="Messages of queue")).to_be_visible()
    press(page, "?")
    expect(page.locator("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("dialog")).to_be_hidden()
    page.keyboard.press("/")
    expect(page.locator(".search input")).to_be_focused()
    page.keyboard.type("g")
    assert page.url.endswith("/topics/hostile"), "a letter in a field is a letter"
    page.keyboard.press("Tab")
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Escape")
    page.keyboard.press("g")
    page.keyboard.press("o")
    expect(page.locator("h1")).to_have_text("Overview")


def test_a_live_page_stays_and_says_so_when_the_console_goes(page: Page, world_url: str) -> None:
    with beside(lambda _: links(world_url, {}), listen="127.0.0.1:0", settings=QUICK) as at:
        page.goto(at["console"] + "/")
        expect(page.locator(".figure").first).to_be_visible()
    expect(page.locator("#stale")).to_contain_text("did not answer")
    expect(page.locator(".figure").first).to_be_visible()


def test_everything_works_without_a_script(browser: Browser, world_url: str, tmp_path: Path) -> None:
    with beside(lambda _: links(world_url, {}), listen="127.0.0.1:0", plans=tmp_path, settings=QUICK) as at:
        context = browser.new_context(java_script_enabled=False)
        context.set_default_timeout(60_000)
        bare = context.new_page()
        bare.goto(at["console"] + "/transactions?state=open&group=pay-ments")
        bare.get_by_role("link", name="Ask about transactions anew").click()
        bare.get_by_label("Why").fill("a try")
        bare.get_by_role("button", name="Make the plan").click()
        bare.get_by_role("button", name="Dry run").click()
        expect(bare.get_by_text("it would be done")).to_be_visible()
        context.close()


def test_another_site_can_neither_frame_nor_send(browser: Browser, world_url: str, tmp_path: Path) -> None:
    """A page of another origin of this machine: same site, so that the browser would send the cookie along."""
    with (
        beside(lambda _: links(world_url, {}), listen="127.0.0.1:0", plans=tmp_path / "one", settings=QUICK) as at,
        beside(lambda _: links(world_url, {}), listen="127.0.0.1:0", plans=tmp_path / "two", settings=QUICK) as other,
    ):
        context = browser.new_context()
        context.set_default_timeout(60_000)
        victim, evil = context.new_page(), context.new_page()
        victim.goto(at["console"] + "/plans/new")
        token = victim.locator("input[name=token]").input_value()
        evil.goto(other["console"] + "/static/mark.svg")
        evil.goto("about:blank")
        evil.goto("data:text/html,<title>elsewhere</title>")
        evil.set_content(
            f'<form method="post" action="{at["console"]}/plans"><input name="token" value="{token}"><input name="act" '
            'value="transactions.commit"><input name="why" value="x"><button>go</button></form>'
            f'<iframe src="{at["console"]}/plans"></iframe>'
        )
        frame = evil.frames[-1]
        assert "Plans" not in frame.content()
        with evil.expect_navigation() as navigation:
            evil.get_by_role("button", name="go").click()
        assert navigation.value.status == 403
        assert not (tmp_path / "one").exists()
        context.close()


def test_a_visitor_and_a_browser_see_the_same(page: Page, visitor: Visitor) -> None:
    page.goto(visitor.url + "/groups/books")
    assert page.locator("h1").inner_text() == "books"
    assert '<h1><span class="foreign">books</span></h1>' in visitor.get("/groups/books")
