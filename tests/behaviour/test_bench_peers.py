"""The benchmark beside peers, in its shortest form: it starts servers, loads them, and its figures add up."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def peers(*flags: str) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "bench" / "peers"), "--rounds", "1", "--seconds", "0.1", "--json", *flags]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT / "src")}
    )
    assert done.returncode == 0, done.stderr
    content: dict[str, Any] = json.loads(done.stdout)
    return content


def test_every_transaction_of_a_short_run_is_committed(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    content = peers(
        "--peers", "escrowmq", "--works", "16 threads", "--undecided", "0", "--queued", "20", "--page", str(page)
    )
    [figure] = content["figures"]
    assert (figure["work"], figure["peer"], figure["failed"]) == ("16 threads, transactions/s", "EscrowMQ", 0)
    assert len(figure["values"]) == 1
    assert 0 < figure["low"] <= figure["median"] <= figure["high"]
    assert figure["written_bytes"] > 1024  # a body at least: what is answered was written
    [recovery] = content["recovery"]
    assert (recovery["undecided"], recovery["queued"]) == (None, 20)
    assert recovery["queued_mib"] > 0
    assert "16 threads" in page.read_text()


@pytest.mark.long
def test_all_that_was_undecided_at_a_kill_is_asked_about() -> None:
    content = peers("--peers", "escrowmq", "--works", "none", "--undecided", "1000", "--queued", "0")
    [recovery] = content["recovery"]
    assert (recovery["undecided"], recovery["asked"]) == (1000, 1000)


def test_a_peer_that_is_not_here_is_named(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "bench" / "peers"), "--peers", "redis", "--rounds", "1", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (
        "without Redis Streams: redis-server is not installed; on Debian: apt-get install redis-server" in done.stderr
    )
    assert json.loads(done.stdout)["figures"] == []
