"""``escrowmq outbox``: the tables, what waits for a person, and a relay that is watched."""

import json
import signal
import sqlite3
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from cli_runs import Run

from escrowmq.cli.failures import Exit
from escrowmq.outbox import State, send_tx
from escrowmq.outbox.tables import SCHEMA_VERSION, trans_message, trans_schema
from forked import Forked


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    monkeypatch.setenv("ESCROWMQ_DATABASE_URL", url)
    return url


@pytest.fixture
def waiting(run: Run, database: str) -> list[str]:
    """Three messages that wait for a person, by their ids."""
    assert run("outbox", "migrate").code == 0
    engine = sa.create_engine(database)
    with engine.begin() as connection:
        ids = [
            send_tx(connection, "orders", b"order %d" % n, key=f"o-{n}", properties={"a": "b"}).hex() for n in range(3)
        ]
        connection.execute(sa.update(trans_message).values(state=State.WAITING, attempts=4, error="UNKNOWN_TOPIC"))
    engine.dispose()
    return ids


def test_migrate_tells_what_was_there(run: Run, database: str) -> None:
    assert run("outbox", "migrate", "--json").json == {"before": 0, "version": SCHEMA_VERSION}
    assert run("outbox", "migrate", "--json").json == {"before": SCHEMA_VERSION, "version": SCHEMA_VERSION}
    assert "as before" in run("outbox", "migrate").err


def test_what_waits_is_listed_and_shown(run: Run, waiting: list[str]) -> None:
    listed = run("outbox", "list", "--json").json
    assert [(m["id"], m["state"], m["key"], m["attempts"], m["body_bytes"]) for m in listed] == [
        (identity, "waiting", f"o-{n}", 4, 7) for n, identity in enumerate(waiting)
    ]
    assert "body" not in listed[0]
    assert [m["id"] for m in run("outbox", "list", "-n", "1", "--after", str(listed[0]["seq"]), "--json").json] == [
        waiting[1]
    ]
    assert run("outbox", "list", "-s", "sent", "--json").json == []
    assert len(run("outbox", "list", "-s", "all", "--json").json) == 3
    table = run("outbox", "list").out
    assert waiting[0] in table
    assert "UNKNOWN_TOPIC" in table
    shown = run("outbox", "show", waiting[1], "--json").json
    assert (shown["body"], shown["properties"], shown["state"]) == ("order 1", {"a": "b"}, "waiting")
    told = run("outbox", "show", waiting[1])
    assert ("order 1" in told.out, "UNKNOWN_TOPIC" in told.err) == (True, True)


def test_retry_discard_and_settle_tell_one_by_one_and_are_recorded(
    run: Run, waiting: list[str], tmp_path: Path
) -> None:
    done = run("outbox", "discard", waiting[0], "--why", "it was a test order", "--json")
    assert (done.code, done.json) == (
        0,
        [{"id": waiting[0], "result": "OK", "state": "discarded", "ok": True}],
    )
    some = run("outbox", "retry", waiting[0], "00" * 16, waiting[1], "--json")
    assert some.code == Exit.REJECTED
    assert [(r["result"], r["state"]) for r in some.json] == [("OK", "pending"), ("NOT_FOUND", None), ("OK", "pending")]
    again = run("outbox", "retry", waiting[0])
    assert (again.code, "CONFLICT" in again.out) == (Exit.REJECTED, True)
    settled = run("outbox", "settle", waiting[2], "--why", "the shop has it", "--json")
    assert (settled.code, settled.json[0]["state"]) == (0, "done")
    where = ("--database-url", f"sqlite:///{tmp_path / 'shop.db'}")
    found = run("acts", "list", *where, "--json").json
    assert [(act["number"], act["act"], act["why"]) for act in found] == [
        (1, "outbox.discard", "it was a test order"),
        (2, "outbox.retry", None),
        (3, "outbox.retry", None),
        (4, "outbox.settle", "the shop has it"),
    ]
    assert found[1]["ended"] == {"results": {"OK": 2, "NOT_FOUND": 1}, "each": ["OK", "NOT_FOUND", "OK"]}
    assert [act["number"] for act in run("acts", "list", *where, "--about", waiting[1], "--json").json] == [2]
    assert [act["number"] for act in run("acts", "list", *where, "-n", "1", "--json").json] == [4]
    told = run("acts", "show", "1", *where).out
    assert "it was a test order" in told
    assert "1 OK" in told
    shown = [line.split() for line in run("acts", "show", "2", *where).out.splitlines()]
    assert ["00" * 16, "NOT_FOUND"] in shown
    assert [waiting[1], "OK"] in shown
    assert run("acts", "show", "9", *where).code == Exit.REJECTED
    assert (run("acts", "verify", *where).code, run("acts", "verify", *where, "--json").json[0]["records"]) == (0, 4)
    with sqlite3.connect(tmp_path / "shop.db") as database:
        database.execute("UPDATE trans_act SET record = replace(record, 'test order', 'real order')")
    verified = run("acts", "verify", *where)
    assert (verified.code, "line 1 (record 1): it was changed" in verified.err) == (Exit.FINDING, True)


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("list", "--state", "open"), Exit.USAGE, "waiting"),
        (("show", "00" * 16), Exit.REJECTED, "NOT_FOUND"),
        (("list", "-d", "nonsense"), Exit.USAGE, "BAD_URL"),
        (("list", "-d", "oracle9://x"), Exit.USAGE, "BAD_URL"),
        (("list", "-d", "sqlite+aiosqlite://"), Exit.USAGE, "asynchronous"),
        (("list", "-d", "postgresql+pg8000://x/y"), Exit.USAGE, "MISSING_PACKAGE"),
        (("list", "-d", "postgresql://u:secret@127.0.0.1:1/y"), Exit.UNKNOWN, "DISCONNECTED"),
        (("list", "-d", "mysql://u:secret@127.0.0.1:1/y"), Exit.UNKNOWN, "DISCONNECTED"),
    ],
)
def test_wrong_use(run: Run, waiting: list[str], words: tuple[str, ...], code: Exit, told: str) -> None:
    ran = run("outbox", *words)
    assert (ran.code, told in ran.err) == (code, True), ran
    assert "secret" not in ran.err


def test_without_tables_and_with_newer_ones(run: Run, database: str) -> None:
    absent = run("outbox", "list")
    assert (absent.code, "escrowmq outbox migrate" in absent.err) == (Exit.USAGE, True)
    run("outbox", "migrate")
    engine = sa.create_engine(database)
    with engine.begin() as connection:
        connection.execute(sa.update(trans_schema).values(version=99))
    engine.dispose()
    for command in ("list", "migrate"):
        newer = run("outbox", command)
        assert (newer.code, "version 99" in newer.err, "upgrade escrowmq" in newer.err) == (Exit.USAGE, True, True)


def test_a_relay_serves_its_metrics_until_it_is_told_to_stop(
    run: Run, waiting: list[str], eventually: Any, tmp_path: Path
) -> None:
    assert run("outbox", "retry", waiting[0]).code == 0
    words = ["outbox", "relay", "--to", f"file:{tmp_path / 'data'}", "--metrics", "127.0.0.1:0", "--json"]
    process = Forked(
        [sys.executable, "-m", "escrowmq", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        started = json.loads(process.stdout.readline())

        def page() -> str:
            with urllib.request.urlopen(started["metrics"] + "/metrics") as answer:
                return str(answer.read().decode())

        sent = f'escrowmq_relay_sent_total{{target="{started["to"]}"}} 1.0'
        eventually(lambda: sent in page(), timeout=120.0)
        assert "escrowmq_outbox_waiting 2.0" in page()
        process.send_signal(signal.SIGTERM)
        process.communicate()
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate()


def test_metrics_for_other_machines_must_be_wanted(run: Run, database: str, tmp_path: Path) -> None:
    assert run("outbox", "migrate").code == 0
    ran = run("outbox", "relay", "--to", f"file:{tmp_path / 'data'}", "--metrics", "0.0.0.0:0")
    assert (ran.code, "--insecure" in ran.err) == (Exit.DENIED, True)


def test_what_waits_is_retried_by_a_plan(run: Run, waiting: list[str]) -> None:
    made = run("plan", "make", "outbox.retry", "--cause", "UNKNOWN_TOPIC", "--why", "the topic is there", "--json").json
    assert (made["rows"], made["counts"]["reason"]) == (3, {"UNKNOWN_TOPIC": 3})
    assert run("plan", "dry-run", made["id"], "--json").json["by_outcome"] == {"done": 3}
    done = run("plan", "run", made["id"], "--yes", "--ramp", "100", "--json")
    assert (done.code, done.json["outcomes"]) == (0, {"done": 3})
    assert {row["state"] for row in run("outbox", "list", "-s", "all", "--json").json} == {"pending"}
