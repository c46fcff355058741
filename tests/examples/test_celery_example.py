"""examples/celery: its program prints what its page shows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "celery"


def test_the_example_does_what_its_page_says(tmp_path: Path) -> None:
    _, shown = (EXAMPLE / "README.md").read_text().split("```")[1::2]
    command = [sys.executable, str(EXAMPLE / "run.py"), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == shown.lstrip("\n")


def test_it_is_less_than_a_hundred_lines() -> None:
    assert sum(len(file.read_text().splitlines()) for file in EXAMPLE.glob("*.py")) < 100
