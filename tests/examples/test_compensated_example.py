"""examples/cart/compensated on SQLite alone: confirms are lost, each order has its effect once, and the program says
who made it.

tests/pipeline/test_compensated_run.py has the same processes with Redis, killed.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "cart" / "compensated" / "compensated.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True)


@pytest.mark.invariant("I48")
def test_every_confirm_is_lost_and_every_order_has_its_effect(tmp_path: Path) -> None:
    done = run("--orders", "12", "--drop", "100", "--folder", str(tmp_path / "run"))
    assert done.returncode == 0, done.stdout + done.stderr
    placed, cleared, tidied, verdict = done.stdout.splitlines()
    assert placed == "10 orders were placed; 12 ends of transactions were lost on the way"
    by_message, by_scheduler = map(int, re.findall(r"\d+", cleared))
    assert by_message + by_scheduler == 10
    assert by_scheduler
    assert tidied == "2 refused orders whose rollback was lost were rolled back by the operator"
    assert verdict == "verdict: each order once"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--orders", "0"], "at least 1"),
        (["--drop", "101"], "0 to 100"),
        (["--sets", "memcached://127.0.0.1"], "BAD_URL"),
        (["--database-url", "sqlite:///shop.db"], "BAD_URL"),
    ],
    ids=["orders", "drop", "sets", "database"],
)
def test_what_it_cannot_use_is_said(arguments: list[str], said: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
