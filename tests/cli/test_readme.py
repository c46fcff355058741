"""What the README tells a newcomer to type really works."""

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_runs import Run, Served

README = (Path(__file__).parent.parent.parent / "README.md").read_text()


def test_the_program_of_the_readme_runs(tmp_path: Path) -> None:
    program, _ = re.findall(r"```python\n(.*?)```", README, re.DOTALL)  # the other: tests/spark/test_spark_docs.py
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], cwd=tmp_path, capture_output=True, text=True
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "o-1 b'one book'\n", "")


def test_the_session_of_the_readme_runs(
    serve: Callable[..., Served], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    (session,) = [block for block in blocks if "escrowmq send" in block]
    monkeypatch.setenv("ESCROWMQ_URL", serve().url)
    commands = [shlex.split(line)[1:] for line in session.splitlines() if line.startswith("escrowmq")]
    assert len(commands) == 8
    for words in commands:
        ran = run(*words)
        assert ran.code == 0, (words, ran)
