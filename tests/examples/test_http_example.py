"""examples/http: the service is killed around its database commit, and is asked over HTTP what became of it."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "http"


def run(folder: Path, *words: str) -> list[str]:
    command = [sys.executable, str(EXAMPLE / "run.py"), str(folder), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def rows(database: Path, query: str) -> list[tuple[str, ...]]:
    connection = sqlite3.connect(database)
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()


def test_the_example_does_what_its_page_says(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shown = [block.splitlines() for block in (EXAMPLE / "README.md").read_text().split("```")[1::2]]
    assert len(shown) == 3
    for block in shown:
        lines = [line for line in block if line]
        words = lines[0].split()[3:]
        told = run(folder, *words)
        assert list(dict.fromkeys(told)) == lines[1:], "in this order; a question may be repeated"
    assert rows(folder / "orders.db", "SELECT * FROM orders ORDER BY 1") == [("o-1", "ann"), ("o-2", "bob")]
    assert rows(folder / "carts.db", "SELECT * FROM cleared_carts ORDER BY 1") == [("o-1", "ann"), ("o-2", "bob")]
    assert run(folder, "--order", "o-1") == ["refused: there is an order o-1 already"]
