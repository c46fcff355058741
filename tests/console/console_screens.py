"""Every page of the console, for the tests that look at all of them, and as pictures for people:

    python tests/console/console_screens.py FOLDER

writes each page wide and narrow: light, dark, with high contrast, and in the colours of the user's own.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from console_world import HARM, LONG, fail_all, fill, served_broker
from playwright.sync_api import Page, sync_playwright

import escrowmq as mq
from escrowmq.connecting import links
from escrowmq.console import ConsoleSettings, beside
from escrowmq.plans import Plans
from escrowmq_lab.servers.chromium import flags, program

LOOKS: dict[str, dict[str, Any]] = {
    "light": {"color_scheme": "light"},
    "dark": {"color_scheme": "dark"},
    "contrast": {"contrast": "more"},
    "forced": {"forced_colors": "active"},
}
"""What a user's system may ask for."""
SIZES = {"wide": (1280, 800), "narrow": (360, 740)}


def paths_of(bus: mq.Bus, group: str) -> list[str]:
    """The path of every page; ``group`` has dead letters."""
    letter = bus.admin.dead_letters(group)[0]
    place = urlencode({name: letter[name] for name in ("broker", "topic", "queue", "offset")})  # type: ignore[literal-required]
    message = urlencode({name: letter[name] for name in ("broker", "queue", "offset")})  # type: ignore[literal-required]
    transaction = bus.admin.transactions(state="open")[0]["id"]
    return [
        *(
            "/",
            "/waiting",
            "/find",
            "/topics",
            "/groups",
            "/producers",
            "/producers/shop/alter",
            "/transactions",
            "/dead-letters",
            "/databases",
            "/plans",
            "/acts",
        ),
        f"/topics/{LONG}",
        f"/topics/{letter['topic']}",
        f"/topics/{letter['topic']}/message?{message}",
        f"/topics/{letter['topic']}/message?{message}&as=hex",
        f"/topics/{letter['topic']}/delete",
        f"/groups/{group}",
        f"/groups/{group}/reset?to=earliest",
        f"/dead-letters/{group}",
        f"/dead-letters/{group}/letter?{place}",
        f"/dead-letters/{group}/edit?{place}",
        f"/transactions/{transaction}",
        f"/find?{urlencode({'q': letter['key'] or ''})}",
        f"/find?{urlencode({'q': HARM + '?'})}",
        "/plans/new?" + urlencode({"act": "dead_letters.retry", "selection": f'{{"group": "{group}"}}'}),
        "/acts/verify",
        "/nothing",
    ]


def check_page(page: Page, url: str) -> None:
    """Open a page, and see that no foreign text ran, and that it is not wider than the window."""
    page.goto(url)
    assert "harmed" not in page.evaluate("document.title.toLowerCase().split(' · ')[1] ?? document.title"), url
    assert page.locator("main script, main img, main iframe").count() == 0, url
    narrow = (
        page.evaluate("innerWidth") <= SIZES["narrow"][0]
    )  # tables may be moved sideways where there is room to see it
    part = "document.querySelector('main')" if narrow else "document.documentElement"
    wide = page.evaluate(f"{part}.scrollWidth - {part}.clientWidth")
    assert wide <= 0, f"{url} is {wide} wider than the window"


def take(folder: Path) -> None:
    """Write the pictures of all pages."""
    folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as made,
        served_broker(Path(made) / "data", check_max=1, transaction_timeout=1.0, check_interval=1.0) as url,
        mq.connect(url) as bus,
        beside(
            lambda _: links(url, {}),
            listen="127.0.0.1:0",
            plans=Path(made) / "plans",
            settings=ConsoleSettings(sample_seconds=0.2),
        ) as at,
        sync_playwright() as playwright,
    ):
        fill(bus)
        fail_all(bus, "cart", "orders", {"order": "ValueError: the price 12.50 of order 17 is not in the list"}, 60)
        fail_all(bus, "evil", "hostile", {}, 6)
        bus.admin.retry_dead_letters("cart", bus.admin.dead_letters("cart", 3), why="the list is back")
        plans = Plans(Path(made) / "plans")
        done = plans.make(bus, "dead_letters.retry", {"group": "cart"}, why="the price list is back, ticket 4711")
        paths = [
            *paths_of(bus, "cart"),
            *[path for path in paths_of(bus, "evil") if "evil" in path or "hostile" in path],
        ]
        plans.dry_run(done.id, bus)
        paths += [f"/plans/{done.id}", f"/plans/{done.id}/rows", "/acts/1"]
        browser = playwright.chromium.launch(executable_path=program(), args=flags())
        for size, (width, height) in SIZES.items():
            for scheme, look in LOOKS.items():
                context = browser.new_context(viewport={"width": width, "height": height}, **look)
                page = context.new_page()
                for path in paths:
                    check_page(page, at["console"] + path)
                    name = "".join(letter if letter.isalnum() else "-" for letter in path.strip("/"))[:60] or "overview"
                    page.screenshot(path=folder / f"{name}-{size}-{scheme}.png", full_page=True)
                context.close()
        browser.close()


if __name__ == "__main__":
    take(Path(sys.argv[1]))
