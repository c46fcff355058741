"""examples/first: killed at any line and run again, the program's database and its messages agree."""

from __future__ import annotations

import re
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

from typer.testing import CliRunner

import escrowmq as mq
import forked
from escrowmq.cli.main import app

FOLDER = Path(__file__).parents[2] / "examples" / "first"
SCRIPT = FOLDER / "first.py"
WAITS = {"transaction_timeout=20": "transaction_timeout=1, check_interval=1", "idle_timeout=20": "idle_timeout=2"}
"""The program waits for a reader; a test does not."""
PATIENT = (Path(__file__).parent / "patient.py").read_text()
KILLING = f"""{PATIENT}
import os, runpy, signal, sys

script, last = sys.argv[1], int(sys.argv[2])
lines = 0


def trace(frame, event, _):
    global lines
    if frame.f_code.co_filename != script:
        return None
    lines += event == "line"
    if lines == last:
        os.kill(os.getpid(), signal.SIGKILL)
    return trace


sys.settrace(trace)
runpy.run_path(script, run_name="__main__")
print("lines:", lines)
"""
WHOLE = f"""{PATIENT}
import runpy, sys

runpy.run_path(sys.argv[1], run_name="__main__")
"""
"""Runs a program, and kills it before it executes a line for the time number ``last``; prints how many it executed."""


def impatient() -> str:
    """Return the program with short waits."""
    program = SCRIPT.read_text()
    for wait, short in WAITS.items():
        assert program.count(wait) == 1
        program = program.replace(wait, short)
    return program


def run(folder: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore::ResourceWarning", *words]
    return forked.run(command, cwd=folder, input="\n")


def stored_orders(folder: Path) -> list[str]:
    with closing(sqlite3.connect(folder / "shop.db")) as shop:
        tables = [row[0] for row in shop.execute("SELECT name FROM sqlite_master WHERE name = 'orders'")]
        return [row[0] for row in shop.execute("SELECT id FROM orders ORDER BY id")] if tables else []


def visible_messages(folder: Path) -> list[str]:
    with mq.connect(f"file:{folder / 'data'}") as bus:
        topics = {topic["name"] for topic in bus.admin.topics()}
        return sorted(bus.admin.read("orders").read_all().column("key").to_pylist()) if "orders" in topics else []


def received(ran: subprocess.CompletedProcess[str]) -> list[str]:
    return re.findall(r"received: (\w+)", ran.stdout)


def test_it_is_short() -> None:
    assert len(SCRIPT.read_text().splitlines()) <= 25


def test_the_page_shows_the_program() -> None:
    assert f"```python\n{SCRIPT.read_text()}```" in (FOLDER / "README.md").read_text()


def test_killed_at_its_pause_and_run_again_it_is_correct_and_find_says_why(tmp_path: Path) -> None:
    killed = run(tmp_path, "-c", impatient().replace("input(", "os.kill(os.getpid(), 9); input("))
    assert killed.returncode == -signal.SIGKILL
    (order,) = stored_orders(tmp_path)
    assert visible_messages(tmp_path) == []
    script = tmp_path / "first.py"
    script.write_text(impatient())
    again = run(tmp_path, "-c", WHOLE, script)
    assert (again.returncode, again.stderr) == (0, "")
    assert order in received(again)
    assert sorted(received(again)) == stored_orders(tmp_path) == visible_messages(tmp_path)
    words = ["find", order, "--url", f"file:{tmp_path / 'data'}", "--database-url", f"sqlite:///{tmp_path / 'shop.db'}"]
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 0, found.output
    for reason in ("The local transaction committed", "was checked", "Committed by the answer", "acknowledged"):
        assert reason in found.output
        assert reason in (FOLDER / "README.md").read_text()


def test_killed_at_every_line_and_run_again_it_is_correct(tmp_path: Path) -> None:
    """Each run is the one that is run again after the kill before."""
    (tmp_path / "whole").mkdir()
    script = tmp_path / "first.py"
    script.write_text(impatient())
    whole = run(tmp_path / "whole", "-c", KILLING, script, "1000000")
    lines = int(re.findall(r"lines: (\d+)", whole.stdout)[0])
    assert lines >= len([line for line in SCRIPT.read_text().splitlines()[2:] if line])
    for line in range(1, lines + 1):
        ran = run(tmp_path, "-c", KILLING, script, str(line))
        assert ran.returncode == -signal.SIGKILL, (line, ran.stderr)
        if (tmp_path / "data").exists():
            assert {*visible_messages(tmp_path)} <= {*stored_orders(tmp_path)}, line
    last = run(tmp_path, "-c", WHOLE, script)
    assert (last.returncode, last.stderr) == (0, "")
    orders = stored_orders(tmp_path)
    assert len(orders) >= 5, "killed at, and after, its pause"
    assert visible_messages(tmp_path) == orders
    with mq.connect(f"file:{tmp_path / 'data'}") as bus:
        assert not bus.admin.transactions(state="undecided")
