"""Tests have homes of their own: nothing of the user's is read or written, by whatever process."""

import os
import pwd
import subprocess
import sys
from pathlib import Path

from escrowmq.plans.folder import default_folder


def test_the_home_is_not_the_users():
    real = pwd.getpwuid(os.getuid()).pw_dir
    assert Path.home() != Path(real)
    assert list(Path.home().iterdir()) == []
    assert default_folder().is_relative_to(Path.home())


def test_processes_have_it_too():
    told = subprocess.run(
        [sys.executable, "-c", "import pathlib; print(pathlib.Path.home())"], capture_output=True, text=True, check=True
    )
    assert told.stdout.strip() == str(Path.home())


def test_settings_of_the_user_are_not_there():
    assert [name for name in os.environ if name.startswith("ESCROWMQ_")] == []


def test_a_run_takes_nothing_from_a_misleading_home(tmp_path):
    """The tests that once read the user's plans pass beside plans that cannot be read."""
    plan = tmp_path / ".local" / "state" / "escrowmq" / "plans" / "old" / "plan.json"
    plan.parent.mkdir(parents=True)
    plan.write_text("{broken")
    misled = {"HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / ".local" / "state"), "ESCROWMQ_URL": "nonsense"}
    chosen = "tests/console/test_console_acts.py::test_nothing_waits"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", chosen],
        cwd=Path(__file__).parents[1], env={**os.environ, **misled}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [plan]
