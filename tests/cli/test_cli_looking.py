"""What a new user meets: a mistyped name makes nothing, a limit is a limit, and what failed says so in a line."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import NoReturn

import pytest
from cli_runs import Run

import escrowmq as mq
from escrowmq.cli import reconcile
from escrowmq.cli.failures import Exit
from escrowmq.cli.options import broker_time
from escrowmq.cli.printing import ago
from escrowmq.errors import Code, Unknown, error

LOOKING = [
    ("topics", "list"),
    ("groups", "list"),
    ("groups", "show", "g"),
    ("transactions", "list"),
    ("dead-letters", "list", "g"),
    ("tail", "orders"),
    ("lookup", "k"),
]


@pytest.mark.parametrize("words", LOOKING, ids=" ".join)
def test_a_command_that_looks_makes_no_folder(run: Run, tmp_path: Path, words: tuple[str, ...]) -> None:
    ran = run(*words, "--url", f"file:{tmp_path / 'mistyped'}")
    assert (ran.code, "NOT_A_DATA_FOLDER" in ran.err, "mistyped" in ran.err) == (Exit.USAGE, True, True)
    assert not (tmp_path / "mistyped").exists()


@pytest.mark.parametrize(
    "words", [("list",), ("show", "00" * 16), ("retry", "00" * 16), ("relay", "--once")], ids=" ".join
)
def test_a_command_that_looks_makes_no_database(run: Run, tmp_path: Path, words: tuple[str, ...]) -> None:
    ran = run("outbox", *words, "--database-url", f"sqlite:///{tmp_path / 'mistyped.db'}")
    assert (ran.code, "there is no database" in ran.err, "outbox migrate" in ran.err) == (Exit.USAGE, True, True)
    assert not (tmp_path / "mistyped.db").exists()


def test_tail_shows_as_many_as_asked_for_and_not_as_many_a_queue(run: Run, url: str) -> None:
    with mq.connect(url) as bus:
        producer = bus.producer("shop")
        for number in range(12):
            producer.send("orders", b"%d" % number, queue=number % 4)
    last = run("tail", "orders", "--limit", "3", "--json").lines
    assert [message["body"] for message in last] == ["9", "10", "11"]
    first = run("tail", "orders", "--limit", "3", "--from-start", "--json").lines
    assert [message["body"] for message in first] == ["0", "1", "2"]
    assert len(run("tail", "orders", "--json").lines) == 10
    assert len(run("tail", "orders", "--from-start", "--json").lines) == 12


def test_what_was_sent_before_the_end_is_told(run: Run, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from escrowmq.client.producing.producer import Producer

    send, batches = Producer.send_batch, []

    def sending(self: Producer, batch: list[mq.Message]) -> object:
        batches.append(len(batch))
        if len(batches) == 3:
            raise error(Code.TIMED_OUT)
        return send(self, batch)

    monkeypatch.setattr(Producer, "send_batch", sending)
    ran = run("send", "orders", "x", "--count", "5000")
    assert (ran.code, "2,000 of 5,000 were surely sent to orders" in ran.err) == (Exit.UNKNOWN, True)
    assert isinstance(error(Code.TIMED_OUT), Unknown)


@pytest.mark.parametrize("name", ["/proc/x", "/proc", "/dev/null/x"])
def test_a_folder_that_cannot_be_made_is_one_clear_line(run: Run, name: str) -> None:
    assert os.path.isdir("/proc")
    ran = run("serve", "--folder", name, "--listen", "127.0.0.1:0")
    assert ran.code == Exit.USAGE
    assert ran.err.startswith("NOT_A_DATA_FOLDER: ")
    assert "Traceback" not in ran.err


def test_the_progress_of_a_group_is_readable(run: Run, url: str) -> None:
    with mq.connect(url) as bus:
        bus.producer("shop").send("orders", b"x", queue=2)
        with bus.consumer("cart", ["orders"]) as consumer:
            (message,) = consumer.receive(1, wait=60)
            message.ack()
    told = run("groups", "show", "cart").out
    head = next(line for line in told.splitlines() if "stored" in line)
    assert head.split() == [
        "queue",
        "stored",
        "settled",
        "before",
        "waiting",
        "acked",
    ]  # and no column that is 0 everywhere
    assert max(len(line.rstrip()) for line in told[told.index(head) :].splitlines()) <= 80
    assert "orders/2" in told


def test_ages_are_told_by_the_brokers_clock(run: Run, bus: mq.Bus, undecided: Callable[[str], str]) -> None:
    """A person's machine may be an hour behind the broker: everything was 0 ms old, or an hour too old."""
    before = time.time_ns() // 1000
    told = broker_time(bus.admin)
    assert before - 60_000_000 <= told <= time.time_ns() // 1000 + 60_000_000
    undecided("o-1")
    (listed,) = bus.admin.transactions()
    assert ago(listed["prepared_us"], listed["prepared_us"] + 90_000_000) == "1 min 30 s ago"
    assert ago(listed["prepared_us"], listed["prepared_us"] - 1) == "0 ms ago"
    assert " ms ago" in run("transactions", "list").out or " s ago" in run("transactions", "list").out


def test_the_grace_of_a_reconciliation_is_counted_by_the_brokers_clock(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoClock(datetime):
        @classmethod
        def now(cls, tz: object = None) -> NoReturn:
            raise AssertionError("this machine's clock was asked")

    with mq.connect(url) as bus:
        bus.producer("shop").send("orders", b"x")
    monkeypatch.setattr(reconcile, "datetime", NoClock)
    began = time.time()
    before = reconcile._before(None, 600.0, url)
    assert began - 60 <= before.timestamp() + 600 <= time.time() + 60


def test_a_listing_creates_nothing(run: Run, url: str) -> None:
    listings = [
        *(["topics", "list"], ["groups", "list"], ["groups", "list", "--producers"], ["transactions", "list"]),
        *(["groups", "show", "nosuch"], ["dead-letters", "list", "nosuch"], ["dead-letters", "summary", "nosuch"]),
        *(["transactions", "list", "--group", "nosuch"], ["tail", "nosuch"], ["tail", "%dead-letters.nosuch"]),
        *(["lookup", "nosuch"], ["find", "nosuch"], ["status"], ["writers", "list"], ["acts", "list"]),
    ]
    for words in listings:
        run(*words)
    assert not Path(url.removeprefix("file:")).exists()
    run("send", "orders", "x")
    stored = [run(*words, "--json").json for words in listings[:4]]
    for words in listings:
        run(*words)
    assert [run(*words, "--json").json for words in listings[:4]] == stored
