"""examples/fastapi: the shop is killed while messages are everywhere, and each cart is cleared once."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "fastapi"


def test_the_example_does_what_its_page_says(tmp_path: Path) -> None:
    page = (EXAMPLE / "README.md").read_text()
    command, *shown = re.findall(r"^```\n(python.*?)```", page, re.DOTALL | re.MULTILINE)[0].splitlines()
    words = [sys.executable, str(EXAMPLE / "run.py"), str(tmp_path / command.split()[-1])]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == shown


def test_the_page_shows_the_program() -> None:
    assert f"```python\n{(EXAMPLE / 'shop.py').read_text()}```" in (EXAMPLE / "README.md").read_text()


def test_each_file_has_less_than_a_hundred_lines() -> None:
    assert all(len(file.read_text().splitlines()) < 100 for file in EXAMPLE.glob("*.py"))
