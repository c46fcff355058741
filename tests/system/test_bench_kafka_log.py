"""The benchmark of the log on Kafka, in its shortest form: it runs, what it measured was stored, and its tables have
their place.
"""

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


def bench(*flags: str, root: Path = ROOT) -> str:
    command = [sys.executable, str(root / "bench" / "kafka_log.py"), "--quick", *flags]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_it_measures_is_stored(kafka_url: str) -> None:
    found: dict[str, Any] = json.loads(bench("--json", "--only", "1 caller, batches", "--kafka", kafka_url))
    [work] = found["works"]
    for side in ("local", "kafka"):
        [figures] = work[side]
        assert (figures["failed"], found["stored"][side]) == (0, found["done"][side])
        assert found["done"][side] >= 1000  # one call at least
        assert figures["written_per_body_byte"] > 1
    assert work["ratio"] == [work["kafka"][0]["rate"] / work["local"][0]["rate"]]
    assert found["stored"]["standby"] == found["stored"]["kafka"]  # which has it from Kafka alone


@pytest.mark.long
def test_its_tables_have_their_place_in_the_documents(tmp_path: Path) -> None:
    """With a Kafka of its own, whose work is measured, too, and a standby."""
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "scale.md", tmp_path / "docs" / "scale.md")
    shutil.copytree(ROOT / "bench", tmp_path / "bench", ignore=shutil.ignore_patterns("__pycache__"))
    table = bench("--docs", root=tmp_path)
    text = (tmp_path / "docs" / "scale.md").read_text()
    assert table.strip() in text
    assert "| standby |" in text
