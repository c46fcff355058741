"""examples/cart: the program is killed between its database commit and its COMMIT, and nothing is lost or doubled."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "examples" / "cart" / "cart.py"


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, folder, *arguments], capture_output=True, text=True, timeout=120)


def rows(folder: Path, table: str) -> list[tuple[str, str]]:
    connection = sqlite3.connect(folder / "shop.db")
    try:
        query = {"orders": "SELECT id, customer FROM orders", "cleared_carts": "SELECT * FROM cleared_carts"}[table]
        return connection.execute(query + " ORDER BY 1").fetchall()
    finally:
        connection.close()


def test_a_crash_between_the_database_commit_and_the_commit_loses_and_doubles_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = run(folder, "--order", "o-1")
    assert first.returncode == 0, first.stderr
    assert first.stdout.splitlines() == ["order o-1 is placed", "the cart of ann is cleared for order o-1"]

    crashed = run(folder, "--order", "o-2", "--customer", "bob", "--crash")
    assert crashed.returncode == -signal.SIGKILL
    assert rows(folder, "orders") == [("o-1", "ann"), ("o-2", "bob")]
    assert rows(folder, "cleared_carts") == [("o-1", "ann")]

    again = run(folder)
    assert again.returncode == 0, again.stderr
    assert again.stdout.splitlines() == [
        "asked about o-2: it is in the database",
        "the cart of bob is cleared for order o-2",
    ]
    assert rows(folder, "cleared_carts") == [("o-1", "ann"), ("o-2", "bob")]
    assert run(folder).stdout == ""
