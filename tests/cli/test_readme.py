"""What README.md and docs/start.md tell a newcomer to type really works."""

import re
import shlex
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from cli_runs import Run, Served

import escrowmq as mq
import forked

ROOT = Path(__file__).parents[2]
README, START = (ROOT / "README.md").read_text(), (ROOT / "docs" / "start.md").read_text()
(PROGRAM,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
OWN_CHECKER, _ = re.findall(r"```python\n(.*?)```", START, re.DOTALL)  # the last: tests/spark/test_spark_docs.py
INSERT = '            connection.execute(orders.insert(), {"id": order})\n'
BIND = "            outbox.bind_tx(connection, txn)  # the message now stands and falls with it\n"
MAY_ASK = "            may_ask.set()\n"
ASKED = "            asked.wait()\n"
RAISE = "            raise RuntimeError('no money')\n"
LISTENING = """
import threading

from escrowmq import outbox

asked, may_ask = threading.Event(), threading.Event()


class Telling(outbox.Barrier):
    def decide_ids(self, ids):
        may_ask.wait()
        try:
            return super().decide_ids(ids)
        finally:
            asked.set()


outbox.Barrier = Telling
"""
"""Lets the local transaction wait until the checker has answered a first question about it, and the checker until it
may: on a busy machine the broker asks before anything was inserted."""
LISTENING_TO_DECIDE = """
import threading

asked = threading.Event()
answer = decide


def decide(check):
    try:
        return answer(check)
    finally:
        asked.set()
"""


def words(program: str) -> list[str | Path]:
    return [sys.executable, "-W", "error", "-c", program]


def run_program(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return forked.run(words(program), cwd=folder)


def impatient(program: str) -> str:
    """The program, with a broker that asks soon and again."""
    changed = program.replace(
        'mq.connect("file:./data")', 'mq.connect("file:./data", transaction_timeout=0.2, check_interval=0.2)'
    )
    assert changed != program
    return changed


def orders_and_messages(folder: Path) -> tuple[list[str], list[str]]:
    with closing(sqlite3.connect(folder / "shop.db")) as shop:
        orders = [row[0] for row in shop.execute("SELECT id FROM orders ORDER BY id")]
    with mq.connect(f"file:{folder / 'data'}") as bus:
        topics = {topic["name"] for topic in bus.admin.topics()}
        visible = bus.admin.read("orders").read_all().column("key").to_pylist() if "orders" in topics else []
        assert not bus.admin.transactions(state="undecided")
    return orders, sorted(visible)


def test_the_program_of_the_readme_runs_twice(tmp_path: Path) -> None:
    for _ in range(2):  # as a reader does: a Python starts
        result = subprocess.run(words(PROGRAM), cwd=tmp_path, capture_output=True, text=True)
        assert (result.returncode, result.stderr) == (0, "")
        key, _, body = result.stdout.partition(" ")
        assert (len(key), body) == (36, "b'one book'\n")
    orders, messages = orders_and_messages(tmp_path)
    assert len(orders) == 2
    assert orders == messages


@pytest.mark.invariant("I15")
@pytest.mark.parametrize(
    ("local", "stands"),
    [
        (INSERT + MAY_ASK + ASKED + RAISE + BIND, False),
        (MAY_ASK + ASKED + INSERT + BIND, False),  # the answer was ROLLBACK: whoever comes after it is fenced
        (INSERT + MAY_ASK + ASKED + BIND, True),
    ],
)
def test_a_local_transaction_slower_than_the_timeout_and_its_message_agree(
    tmp_path: Path, local: str, stands: bool
) -> None:
    assert INSERT + BIND in PROGRAM
    result = run_program(impatient(LISTENING + PROGRAM.replace(INSERT + BIND, local)), tmp_path)
    assert (result.returncode == 0) is stands, result.stderr
    orders, messages = orders_and_messages(tmp_path)
    assert len(orders) == stands
    assert orders == messages


@pytest.mark.invariant("I15")
@pytest.mark.parametrize(("local", "stands"), [(INSERT + ASKED + RAISE, False), (ASKED + INSERT, True)])
def test_the_checker_of_ones_own_does_not_guess(tmp_path: Path, local: str, stands: bool) -> None:
    program = PROGRAM.replace("checker=outbox.Barrier(shop)", "checker=decide").replace(INSERT + BIND, local)
    assert "outbox.B" not in program
    result = run_program(impatient(OWN_CHECKER + LISTENING_TO_DECIDE + program), tmp_path)
    assert (result.returncode == 0) is stands, result.stderr
    orders, messages = orders_and_messages(tmp_path)
    assert len(orders) == stands
    assert orders == messages


def test_the_session_at_the_command_line_runs(
    serve: Callable[..., Served], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = START.partition("## From the command line\n")[2].partition("\n## ")[0]
    monkeypatch.setenv("ESCROWMQ_URL", serve().url)
    commands = [shlex.split(line)[1:] for line in session.splitlines() if line.startswith("escrowmq ")]
    assert commands.pop(0) == ["dev"]  # tests/cli/test_cli_dev.py
    assert len(commands) == 4 + 8
    for words in commands:
        ran = run(*words)
        assert ran.code == 0, (words, ran)
