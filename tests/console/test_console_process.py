"""The commands: ready line, clean stop, refusals; in the broker's process and in its own."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from typer.testing import CliRunner

from escrowmq.cli.main import app

Start = Callable[..., tuple[Any, dict[str, Any]]]


def test_beside_a_broker_and_on_its_own(start: Start, tmp_path: Path) -> None:
    folder, database = str(tmp_path / "data"), f"sqlite:///{tmp_path / 'shop.db'}"
    broker, ready = start(
        "serve", "-d", folder, "-l", "127.0.0.1:0", "--console", "127.0.0.1:0", "--http", "127.0.0.1:0"
    )
    assert {"console", "http", "asks"} <= set(ready)
    console, told = start("console", "-u", ready["url"], "-l", "127.0.0.1:0", "--database-url", database)
    assert set(told) == {"console", "url", "pid"}
    for url in (ready["console"], told["console"]):
        deadline = time.monotonic() + 60
        while ">ok<" not in (page := httpx.get(url, trust_env=False, timeout=60.0)).text:  # a busy broker may be late
            assert page.status_code == 200
            assert time.monotonic() < deadline, page.text
        assert page.status_code == 200
    for process in (console, broker):
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        assert "Traceback" not in errors


def test_it_stays_on_the_loopback_unless_told() -> None:
    result = CliRunner().invoke(app, ["console", "--listen", "0.0.0.0:0"])
    assert result.exit_code != 0
    assert "--insecure" in str(result.exception) + result.output
