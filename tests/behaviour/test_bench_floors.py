"""The benchmark of floors, in its shortest form: every floor answers what it is asked, and its figures add up."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SHORT = ("--repeats", "1", "--seconds", "0.05", "--warm", "0")


def floors(*flags: str, root: Path = ROOT) -> str:
    command = [sys.executable, str(root / "bench" / "floors.py"), *SHORT, *flags]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("work", ["1,000 in flight", "batches of 100", pytest.param("", marks=pytest.mark.long)])
def test_a_work_stands_beside_its_floor(work: str) -> None:
    found: dict[str, Any] = json.loads(floors("--json", "--only", work, "--rows", "40000"))
    assert found["figures"]
    for figure in found["figures"]:
        assert figure["name"]
        assert len(figure["ours"]) == len(figure["floor"]) == 1
        assert figure["ours"][0] > 0
        if "written" in figure["unit"] and not figure["floor"][0]:
            continue  # this file system is not counted
        assert figure["ratio"]["median"] == pytest.approx(figure["ours"][0] / figure["floor"][0])


def test_the_documents_have_a_place_for_the_table(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "speed.md", tmp_path / "docs" / "speed.md")
    shutil.copytree(ROOT / "bench", tmp_path / "bench", ignore=shutil.ignore_patterns("__pycache__"))
    table = floors("--docs", "--only", "one caller", root=tmp_path)
    text = (tmp_path / "docs" / "speed.md").read_text()
    assert text.count("| work | its floor | ours | floor |") == 1
    assert table.strip() in text
