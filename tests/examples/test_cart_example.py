"""examples/cart: the program is killed between its database commit and its COMMIT, and nothing is lost or doubled."""

from __future__ import annotations

import runpy
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

import escrowmq as mq
from escrowmq import outbox

SCRIPT = Path(__file__).parents[2] / "examples" / "cart" / "cart.py"


PATIENT = (Path(__file__).parent / "patient.py").read_text()
RUN = f"""{PATIENT}
import runpy, sys

sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", RUN, SCRIPT, folder, *arguments], capture_output=True, text=True)


def told(ran: subprocess.CompletedProcess[str]) -> list[str]:
    """What it printed. A machine that stands still is asked about an order while it is placed, or twice."""
    lines = [line for line in ran.stdout.splitlines() if not line.startswith("asked about o-1: ")]
    return list(dict.fromkeys(lines))


def rows(folder: Path, table: str) -> list[tuple[str, str]]:
    connection = sqlite3.connect(folder / "shop.db")
    try:
        query = {"orders": "SELECT id, customer FROM orders", "cleared_carts": "SELECT * FROM cleared_carts"}[table]
        return connection.execute(query + " ORDER BY 1").fetchall()
    finally:
        connection.close()


@pytest.mark.invariant("I24")
def test_a_crash_between_the_database_commit_and_the_commit_loses_and_doubles_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = run(folder, "--order", "o-1")
    assert first.returncode == 0, first.stderr
    assert told(first) == ["order o-1 is placed", "the cart of ann is cleared for order o-1"]

    crashed = run(folder, "--order", "o-2", "--customer", "bob", "--crash")
    assert crashed.returncode == -signal.SIGKILL
    assert rows(folder, "orders") == [("o-1", "ann"), ("o-2", "bob")]
    assert rows(folder, "cleared_carts") == [("o-1", "ann")]

    again = run(folder)
    assert again.returncode == 0, again.stderr
    assert told(again) == [
        "asked about o-2: it is in the database",
        "the cart of bob is cleared for order o-2",
    ]
    assert rows(folder, "cleared_carts") == [("o-1", "ann"), ("o-2", "bob")]
    assert run(folder).stdout == ""


@pytest.mark.parametrize("slow", ["before its insert", "after its insert"])
def test_a_local_transaction_slower_than_the_timeout_and_its_message_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    """It is asked about while it runs: before its insert, the answer ROLLBACK fences it; after it, it is in flight, and
    then rolls back."""
    cart = runpy.run_path(str(SCRIPT))
    asked = threading.Event()
    bind, decide = outbox.bind_tx, outbox.Barrier.decide_ids

    def deciding(self: outbox.Barrier, ids: Any) -> Any:
        try:
            return decide(self, ids)
        finally:
            asked.set()

    def binding(connection: Any, txn: Any) -> None:
        bind(connection, txn)
        if slow == "after its insert":
            assert asked.wait()
            raise RuntimeError("no money")

    def inserting(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if slow == "before its insert" and statement.startswith("INSERT INTO orders"):
            assert asked.wait()

    monkeypatch.setattr(outbox, "bind_tx", binding)
    monkeypatch.setattr(outbox.Barrier, "decide_ids", deciding)
    sa.event.listen(sa.Engine, "before_cursor_execute", inserting)
    try:
        with pytest.raises((RuntimeError, mq.Fenced)):
            cart["main"](tmp_path / "run", "o-1", "ann", False)
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", inserting)
    assert not rows(tmp_path / "run", "orders")
    with mq.connect(f"file:{tmp_path / 'run' / 'broker'}") as bus:
        assert not bus.admin.read("orders").read_all().num_rows
        assert not bus.admin.transactions(state="undecided")
