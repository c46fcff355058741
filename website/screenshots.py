"""Photograph console and report for docs/pictures: a broker with orders, some of which wait, and a browser."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import sync_playwright

import escrowmq as mq
from escrowmq_lab.servers.chromium import flags, program

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
SIZE = {"width": 1200, "height": 800}


@contextmanager
def started(words: list[str], address: str) -> Iterator[str]:
    """Start a command of escrowmq. Yields the address that it prints."""
    process = subprocess.Popen(
        [sys.executable, "-m", "escrowmq", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(address + r"://[^\s,;]+", line)
        if found is None:
            raise SystemExit(f"{words[0]} did not start: {line}")
        yield found[0]
    finally:
        process.terminate()
        process.wait()


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, str]]:
    """Serve a broker and a console over it. Yields their addresses."""
    words = ["serve", "--folder", str(folder), "--listen", "127.0.0.1:0"]
    # Checks come quickly, so that there is a parked transaction to see.
    words += ["--transaction-timeout", "1s", "--check-interval", "1s", "--check-max", "1"]
    with (
        started(words, "escrow") as url,
        started(["console", "--url", url, "--listen", "127.0.0.1:0"], "http") as console,
    ):
        yield url, console


def answer(check: mq.Check) -> mq.Outcome:
    """Answer a check-back as a shop whose database does not know one of its orders."""
    return mq.UNKNOWN if check.messages[0].key == "order-1107" else mq.COMMIT


def sell(bus: mq.Bus, stop: threading.Event) -> None:
    """Place orders until ``stop``: most are committed, some are rolled back."""
    shop = bus.producer("shop", checker=answer)
    for number in range(1000, 100_000):
        with shop.transaction() as txn:
            txn.send("orders", b'{"article": "a book", "price": 12.5}', key=f"order-{number}")
            if number in (1107, 1108, 1109):
                txn.leave_undecided()
            elif number % 20 == 0:
                txn.rollback()
        if stop.wait(0.01):
            return


def consume(bus: mq.Bus, group: str, stop: threading.Event) -> None:
    """Handle orders until ``stop``; a few of them fail at each attempt."""
    consumer = bus.consumer(group, ["orders"], max_attempts=1)
    for message in consumer.messages(idle_timeout=1):
        number = int((message.key or "-0").partition("-")[2])
        if group == "cart" and number % 67 == 0:
            cause = "KeyError: 'currency'" if number % 2 else "TimeoutError: the price list did not answer"
            message.nack(cause=cause)
        else:
            message.ack()
        if stop.is_set():
            break
    consumer.close()


def work(url: str, seconds: float) -> None:
    """Let a shop and two consumer groups work."""
    stop = threading.Event()
    with mq.connect(url) as bus:
        calls = [(sell, (bus, stop)), (consume, (bus, "cart", stop)), (consume, (bus, "mail", stop))]
        threads = [threading.Thread(target=call, args=arguments) for call, arguments in calls]
        for thread in threads:
            thread.start()
        time.sleep(seconds)
        stop.set()
        for thread in threads:
            thread.join()


def photograph(folder: Path) -> None:
    """Write console.png, console-waiting.png, console-find.png and report.png into a folder."""
    with tempfile.TemporaryDirectory() as made, sync_playwright() as playwright:
        data, pages = Path(made) / "data", Path(made) / "pages"
        browser = playwright.chromium.launch(executable_path=program(), args=flags())
        page = browser.new_page(viewport=SIZE, color_scheme="light")
        with served(data) as (url, console):
            working = threading.Thread(target=work, args=(url, 32.0))
            working.start()
            page.goto(console)
            time.sleep(30)
            page.goto(console)
            page.screenshot(path=folder / "console.png")
            working.join()
            page.goto(f"{console}/waiting")
            page.screenshot(path=folder / "console-waiting.png")
            page.goto(f"{console}/find?q=order-1107")
            page.screenshot(path=folder / "console-find.png")
            report = ["report", "--url", url, "--out", str(pages)]
            subprocess.run([sys.executable, "-m", "escrowmq", *report], check=True)
        page.goto((pages / "report.html").as_uri())
        page.screenshot(path=folder / "report.png")
        browser.close()


if __name__ == "__main__":
    photograph(Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURES)
