"""``escrowmq find`` and ``status``: what they print, their exit codes, and names that would break a terminal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import sqlalchemy as sa
from cli_runs import Run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import escrowmq as mq
from escrowmq import outbox
from escrowmq.cli.failures import Exit
from escrowmq.cli.main import app
from escrowmq.overview import sources

HOSTILE = "k\n\r\x1b[2J\x1b]0;title\x07[bold red]\u202e\x00é"


@pytest.fixture
def made(url: str) -> None:
    """A message that waits, with everything hostile that a name may have, and a dead letter."""
    with mq.connect(url, default_queues=1) as bus:
        bus.producer("shop").send("orders", HOSTILE.encode(), key=HOSTILE, tag=HOSTILE, message_id="m")
        with bus.consumer("cart", "orders", max_attempts=1) as consumer:
            consumer.receive(1, wait=60.0)[0].nack(cause=HOSTILE)
            consumer.flush()


def is_plain(text: str) -> bool:
    """Whether a terminal is only made to print."""
    return all(character.isprintable() or character == "\n" for character in text)


def test_find_tells_a_story(run: Run, made: None, tmp_path: Path) -> None:
    database = f"sqlite:///{tmp_path / 'shop.db'}"
    engine = sa.create_engine(database)
    outbox.migrate(engine)
    engine.dispose()
    ran = run("find", "m", "-d", database)
    assert (ran.code, ran.err) == (Exit.OK, "")
    assert "Group cart made it a dead letter at " in ran.out
    assert "operations: dead_letters.retry, dead_letters.discard" in ran.out
    story = run("find", "m", "--json").json["stories"][0]
    assert (story["key"], story["state"], story["offers"][0]["act"]) == (HOSTILE, "dead", "dead_letters.retry")


def test_find_of_nothing_says_so(run: Run, made: None) -> None:
    ran = run("find", "nothing\x1b[2J")
    assert (ran.code, ran.out) == (Exit.FINDING, "")
    assert r"no message is found for nothing\x1b[2J" in ran.err
    ran = run("find", "nothing", "--json")
    assert (ran.code, ran.json["stories"]) == (Exit.FINDING, [])
    assert run("find", " ").code == Exit.USAGE


def test_a_hostile_name_is_text(run: Run, made: None) -> None:
    for words in (("find", "m"), ("find", HOSTILE), ("status",)):
        ran = run(*words)
        assert is_plain(ran.out + ran.err), words
        assert ("[bold red]" in ran.out) == (words[0] == "find"), words


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(wanted=st.text(min_size=1, max_size=30).filter(lambda text: text.strip() and not text.startswith("-")))
def test_whatever_is_looked_for_breaks_no_terminal(url: str, made: None, wanted: str) -> None:
    result = CliRunner().invoke(app, ["find", wanted, "-u", url])
    assert result.exit_code in (Exit.FINDING, Exit.OK, Exit.USAGE)
    assert is_plain(result.output)


def test_status_says_whether_an_operator_is_needed(run: Run, url: str) -> None:
    with mq.connect(url, default_queues=1) as bus:
        bus.producer("shop").send("orders", b"")
    ran = run("status")
    assert ran.code == Exit.OK
    assert "no work is pending" in ran.err
    with mq.connect(url) as bus, bus.consumer("cart", "orders", max_attempts=1) as consumer:
        consumer.receive(1, wait=60.0)[0].nack(cause="no")
        consumer.flush()
    ran = run("status")
    assert (ran.code, "1 cause needs an operator" in ran.err) == (Exit.FINDING, True)
    assert "1 dead letter of consumer group cart" in ran.out
    found = run("status", "--json").json
    assert (found["needs_person"], found["waiting"][0]["kind"]) == (True, "dead")


def test_status_can_be_watched(run: Run, url: str) -> None:
    with mq.connect(url, default_queues=1) as bus:
        bus.producer("shop").send("orders", b"")
    ran = run("status", "--watch", "--every", "0.1", "--times", "3", "--json")
    assert (ran.code, [line["topics"][0]["stored"] for line in ran.lines]) == (Exit.OK, [1, 1, 1])
    assert ran.lines[1]["brokers"][0]["log_bytes_per_second"] == 0.0
    assert "orders" in run("status", "--watch", "--every", "0.1", "--times", "2").out


def test_a_broker_that_is_silent_is_named(run: Run, monkeypatch: pytest.MonkeyPatch, silent: str) -> None:
    monkeypatch.setattr(sources, "PATIENCE", 0.2)
    url = f"escrow://{silent}"
    for words in (("status", "--json"), ("find", "m", "--json")):
        ran = run(*words, "-u", url)
        assert ran.code == Exit.OVERLOADED, words
        assert json.loads(ran.out)["missing"][0]["broker"] == url
        assert url in ran.err
