"""examples/django: orders whose process is killed around the commit, and the worker that runs their tasks."""

from __future__ import annotations

import shutil
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "django"
SOURCES = sorted(EXAMPLE.rglob("*.py"))


def test_the_example_is_short() -> None:
    assert sum(len(path.read_text().splitlines()) for path in SOURCES) < 100


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_the_page_shows_the_example(source: Path) -> None:
    """docs/django.md is about these files, and has those that a reader writes."""
    page = (EXAMPLE.parents[1] / "docs" / "django.md").read_text()
    if source.name != "__init__.py":
        assert f"```python\n# {source.relative_to(EXAMPLE)}\n{source.read_text().partition(chr(10) * 2)[2]}```" in page


def test_the_example_does_what_its_page_says(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLE, tmp_path, dirs_exist_ok=True)
    blocks = (EXAMPLE / "README.md").read_text().split("```")[1::2]
    placing = [line for block in blocks[:2] for line in block.splitlines() if line]
    told: list[str] = []
    for line in placing:
        if not line.startswith("python"):
            assert told == [line]
            continue
        done = subprocess.run(
            [sys.executable, "-W", "error", *line.split()[1:]], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == (-signal.SIGKILL if "--crash" in line else 0), done.stderr
        told = done.stdout.splitlines()
    command, *mails = blocks[2].split("\n")[1:-1]
    for wanted in (mails, []):  # the second worker has nothing left to do
        with subprocess.Popen(
            [sys.executable, "-W", "error", *command.split()[1:]],
            cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        ) as worker:  # fmt: skip
            assert worker.stdout is not None
            assert worker.stderr is not None
            assert "Ctrl-C stops it" in worker.stderr.readline()
            assert sorted(worker.stdout.readline().strip() for _ in wanted) == wanted
            worker.terminate()
            out, errors = worker.communicate()
        assert (worker.returncode, out) == (0, ""), errors
    assert rows(tmp_path, "SELECT id FROM shop_order ORDER BY 1") == ["o-1", "o-3"]
    assert rows(tmp_path, 'SELECT "order" FROM shop_mail ORDER BY 1') == ["o-1", "o-3"]


def rows(folder: Path, query: str) -> list[str]:
    with closing(sqlite3.connect(folder / "shop.db")) as database:
        return [str(one) for (one,) in database.execute(query)]
