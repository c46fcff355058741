"""``escrowmq compensate``: a run repairs a lost confirm, the status tells how it stands, a person deals with what is
left.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from cli_runs import Run, Served

import escrowmq as mq
from escrowmq import outbox
from escrowmq.cli.failures import Exit
from escrowmq.compensation import Announcing, CaseState, Journal
from escrowmq.compensation.cases import Cases
from escrowmq.errors import Code
from forked import Forked

HANDLER = """
import sqlalchemy as sa

def put(connection, message):
    connection.execute(sa.text("INSERT INTO cart VALUES (:body)"), {"body": message.body.decode()})
"""
ONCE = ("compensate", "run", "cart", "--topic", "orders", "--once", "--grace", "0s")


class Lost(Announcing):
    """Whose ends are lost on their way, all of them."""

    def commit(self, prepared: Any) -> tuple[Code, ...]:
        return (Code.SENT,) * len(prepared.ids)


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[sa.Engine]:
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    monkeypatch.setenv("ESCROWMQ_DATABASE_URL", url)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "cart_handler.py").write_text(HANDLER)
    engine = sa.create_engine(url, connect_args={"timeout": 60.0})  # for SQLite's lock
    outbox.migrate(engine)
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE cart (body TEXT)"))
        connection.execute(sa.text("CREATE TABLE orders (id TEXT)"))
    yield engine
    engine.dispose()


@pytest.fixture
def placed(database: sa.Engine) -> Callable[[str], bytes]:
    """Places an order whose confirm is lost, and announces it; its id."""

    def place(url: str) -> bytes:
        with mq.connect(url) as bus:
            producer, keys = bus.producer("shop", unasked=True), bus.producer("keys")
            way = Lost(producer, database=database, announce="direct", by=keys)
            sent = way.send(
                mq.Message("orders", b"book"),
                lambda session: session.execute(sa.text("INSERT INTO orders VALUES ('o')")),
            )
            return sent.check().ids[0]

    return place


def cart(engine: sa.Engine) -> list[str]:
    with engine.connect() as connection:
        return list(connection.scalars(sa.text("SELECT body FROM cart")))


def waiting(engine: sa.Engine, count: int = 3) -> list[str]:
    """Cases that need an operator; their ids."""
    ids = [bytes([number]) * 16 for number in range(count)]
    Journal(engine, "cart").begin("an epoch")
    Cases(engine, "cart", 1).record_failures(dict.fromkeys(ids, "no broker has it"))
    return [identity.hex() for identity in ids]


def test_one_run_repairs_what_was_lost(run: Run, url: str, database: sa.Engine, placed: Any) -> None:
    identity = placed(url)
    ran = run(*ONCE, "--handler", "cart_handler:put", "--json")
    assert (ran.code, ran.json["effects"], ran.json["committed"]) == (0, 1, 1), ran.err
    assert cart(database) == ["book"]
    assert run("lookup", "--id", identity.hex(), "--topic", "orders", "--json").json[0]["state"] == "committed"
    assert run(*ONCE, "--handler", "cart_handler:put").code == 0
    assert cart(database) == ["book"], "once"
    told = run("compensate", "status", "cart", "--json")
    assert told.code == 0
    assert (told.json["suspended_us"], told.json["sets"]["half"], told.json["cases"]["stuck"]) == (None, 0, 0)
    assert "cases that need an operator" in run("compensate", "status", "cart").out


def test_only_committing_and_sending_again(
    run: Run, url: str, database: sa.Engine, placed: Any, tmp_path: Path
) -> None:
    first = placed(url)
    assert run(*ONCE, "--remedy", "commit").code == 0
    assert run("lookup", "--id", first.hex(), "--topic", "orders", "--json").json[0]["state"] == "committed"
    second = placed(url)
    (tmp_path / "sender.py").write_text("def again(message_id, message):\n    raise LookupError('no such order')\n")
    ran = run(*ONCE, "--remedy", "resend", "--handler", "sender:again", "--max-attempts", "1")
    assert ran.code == Exit.FINDING, ran.err
    (case,) = run("compensate", "list", "--json").json
    assert (case["message_id"], case["state"]) == (second.hex(), "stuck")
    assert "no such order" in case["reason"]


def test_a_store_that_is_away_is_told(run: Run, url: str, database: sa.Engine, placed: Any, tmp_path: Path) -> None:
    placed(url)
    nowhere = ("--sets", "redis://127.0.0.1:1/0")
    ran = run(*ONCE, "--handler", "cart_handler:put", *nowhere)
    assert (ran.code, "suspended" in ran.err) == (Exit.UNKNOWN, True)
    told = run("compensate", "status", "cart", *nowhere, "--json")
    assert told.code == Exit.FINDING
    assert told.json["suspended_us"] > 0
    assert told.json["sets"] is None
    assert "DISCONNECTED" in told.json["sets_problem"]
    told = run("compensate", "status", "cart", *nowhere)
    assert (told.code, "because" in told.out) == (Exit.FINDING, True)
    assert cart(database) == []


def test_cases_are_listed_by_pages_and_dealt_with_by_name(run: Run, database: sa.Engine) -> None:
    ids = waiting(database)
    page = run("compensate", "list", "cart", "--limit", "2", "--json").json
    assert [case["message_id"] for case in page] == ids[:2]
    assert {case["state"] for case in page} == {"stuck"}
    rest = run("compensate", "list", "--after", f"cart/{ids[1]}", "--json").json
    assert [case["message_id"] for case in rest] == ids[2:]
    done = run("compensate", "settle", "cart", ids[0], "00ff" * 8, "--why", "paid back by hand", "--json")
    assert done.code == Exit.REJECTED
    assert [(one["result"], one["state"]) for one in done.json] == [("OK", "settled"), ("NOT_FOUND", None)]
    assert run("compensate", "retry", "cart", ids[1]).code == 0
    told = {case["message_id"]: case for case in run("compensate", "list", "-s", "all", "--json").json}
    assert [told[identity]["state"] for identity in ids] == ["settled", "retry", "stuck"]
    assert ids[0] in run("compensate", "list", "-s", "settled").out
    recorded = run("acts", "list", "--database-url", database.url.render_as_string(hide_password=False), "--json").json
    assert [(act["act"], act["why"]) for act in recorded] == [
        ("compensation.settle", "paid back by hand"),
        ("compensation.retry", None),
    ]
    told_all = run("compensate", "status", "cart")
    assert told_all.code == Exit.FINDING, "one still waits"
    assert run("compensate", "list", "nobody", "--json").json == []


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("run", "cart", "-t", "orders", "--remedy", "pray"), Exit.USAGE, "one of handle, commit, resend"),
        (("run", "cart", "-t", "orders"), Exit.USAGE, "needs a --handler"),
        (("run", "cart", "-t", "orders", "--remedy", "commit", "--handler", "a:b"), Exit.USAGE, "no use"),
        (("run", "cart", "-t", "orders", "--handler", "nonsense"), Exit.USAGE, "MODULE:FUNCTION"),
        (("run", "cart", "-t", "orders", "--handler", "no_such_module:f"), Exit.USAGE, "no_such_module"),
        (("run", "cart", "-t", "orders", "--handler", "cart_handler:nothing"), Exit.USAGE, "nothing"),
        (("run", "cart", "-t", "orders", "--handler", "cart_handler:sa"), Exit.USAGE, "no function"),
        (("run", "cart", "-t", "orders", "--handler", "cart_handler:put", "--every", "soon"), Exit.USAGE, "--every"),
        (("run", "no name", "-t", "orders", "--remedy", "commit", "--once"), Exit.REJECTED, "BAD_GROUP_NAME"),
        (
            ("run", "cart", "-t", "orders", "--remedy", "commit", "--metrics", "0.0.0.0:0"),
            Exit.DENIED,
            "--insecure",
        ),
        (("status", "cart"), Exit.REJECTED, "NOT_FOUND"),
        (("status", "cart", "--sets", "kafka://x"), Exit.USAGE, "BAD_URL"),
        (("list", "--state", "bad"), Exit.USAGE, "waiting"),
        (("list", "--after", "cart"), Exit.USAGE, "NAME/ID"),
        (("list", "-d", "sqlite:///no.db"), Exit.USAGE, "no database"),
        (("retry", "cart", "00" * 16), Exit.REJECTED, "NOT_FOUND"),
    ],
)
def test_mistakes_are_told(run: Run, made: None, database: sa.Engine, words: Any, code: Exit, told: str) -> None:
    ran = run("compensate", *words)
    assert (ran.code, told in ran.err + ran.out) == (code, True), ran.err + ran.out


def test_a_process_runs_until_it_is_told_to_stop(
    serve: Callable[..., Served], run: Run, database: sa.Engine, placed: Any, eventually: Any, tmp_path: Path
) -> None:
    broker = serve()
    words = ["compensate", "run", "cart", "--topic", "orders", "--handler", "cart_handler:put", "--every", "50ms"]
    words += ["--grace", "0s", "--metrics", "127.0.0.1:0", "--json", "--url", broker.url, "--sets", "sqlite:///sets.db"]
    process = Forked(
        [sys.executable, "-m", "escrowmq", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    try:
        assert process.stdout is not None
        started = json.loads(process.stdout.readline())
        assert started["event"] == "started"
        placed(broker.url)
        eventually(lambda: cart(database) == ["book"], timeout=120.0)

        def page(path: str) -> str:
            with urllib.request.urlopen(started["metrics"] + path) as answer:
                return str(answer.read().decode())

        wanted = 'escrowmq_compensation_effects_total{compensation="cart"} 1.0'
        eventually(lambda: wanted in page("/metrics"), timeout=120.0)
        assert json.loads(page("/readyz")) == {"status": "ok"}
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate()
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, err
    lines = [json.loads(line) for line in out.splitlines()]
    assert lines[-1]["event"] == "stopped"
    assert lines[-1]["effects"] == 1
    assert not [name for name in CaseState if run("compensate", "list", "-s", name.name.lower(), "--json").json]
