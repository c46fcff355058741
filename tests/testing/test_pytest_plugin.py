"""The pytest plugin: pytest finds it by its entry point, and it costs a test run without messages nothing."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]

TEST = """
from datetime import timedelta

import escrowmq as mq


def test_an_order_that_nobody_decides(escrow_bus, escrow_clock):
    begun = escrow_clock.now()
    shop = escrow_bus.producer("shop", checker=lambda check: mq.COMMIT)
    shop.prepare("orders", b"one", key="o-1")
    escrow_clock.advance(6)
    assert [message.key for message in escrow_bus.sent("orders")] == ["o-1"]
    assert escrow_clock.now() - begun == timedelta(seconds=6)


def test_each_test_has_a_bus_of_its_own(escrow_bus):
    assert escrow_bus.sent("orders") == []
"""


def test_its_entry_point_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"escrowmq": "escrowmq.testing.plugin"}


def test_a_test_gets_a_bus_and_its_clock(tmp_path: Path) -> None:
    (tmp_path / "test_shop.py").write_text(TEST)
    words = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "escrowmq.testing.plugin"]
    alone = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    result = subprocess.run(words, cwd=tmp_path, env=alone, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "2 passed" in result.stdout


def test_it_imports_neither_broker_nor_arrow() -> None:
    program = "import escrowmq.testing.plugin, sys; print({'pyarrow', 'numpy', 'sqlalchemy'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
