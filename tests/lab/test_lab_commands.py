"""``escrowmq-lab``: its commands, and the benchmarks that it runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from escrowmq.cli.failures import Exit
from escrowmq_lab.cli.main import app


def run(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def test_its_commands() -> None:
    assert set(typer.main.get_command(app).commands) == {"simulate", "chaos", "bench"}  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["simulate", "chaos", "bench"])
def test_the_product_says_where_a_command_went(name: str) -> None:
    done = subprocess.run([sys.executable, "-m", "escrowmq", name, "--seed", "3"], capture_output=True, text=True)
    assert done.returncode == Exit.USAGE
    assert f"escrowmq-lab {name}" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    folder = tmp_path / "bench"
    folder.mkdir()
    (folder / "good.py").write_text('"""A claim.\n\nMore."""\n')
    (folder / "bad.py").write_text('"""Another."""\nraise SystemExit(3)\n')
    (folder / "_shared.py").write_text("raise SystemExit(4)\n")
    (folder / "long").mkdir()
    (folder / "long" / "__main__.py").write_text('"""A folder."""\nraise SystemExit(5)\n')
    return folder


def test_benchmarks_are_listed_and_run(scripts: Path) -> None:
    listed = run("bench", "--folder", str(scripts), "--list", "--json")
    assert json.loads(listed.stdout) == [
        {"name": "bad", "claim": "Another."},
        {"name": "good", "claim": "A claim."},
        {"name": "long", "claim": "A folder."},
    ]
    assert "A claim." in run("bench", "--folder", str(scripts), "--list").stdout
    assert run("bench", "good", "--folder", str(scripts)).exit_code == 0
    every = run("bench", "--folder", str(scripts))
    assert (every.exit_code, every.stderr) == (Exit.FINDING, "failed: bad\n")  # a folder only runs when it is named
    assert run("bench", "long", "--folder", str(scripts)).stderr == "failed: long\n"


def test_missing_benchmarks_are_named(scripts: Path, tmp_path: Path) -> None:
    assert "good" in run("bench", "best", "--folder", str(scripts)).stderr
    nothing = run("bench", "--folder", str(tmp_path / "absent"))
    assert (nothing.exit_code, "--folder" in nothing.stderr) == (Exit.USAGE, True)
