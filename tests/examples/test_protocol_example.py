"""The client in Go that docs/reference/protocol.md names: it needs nothing but the page, and works against a broker."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from escrowmq_lab.servers.escrow import serving

ROOT = Path(__file__).parent.parent.parent
EXAMPLE = ROOT / "examples" / "protocol" / "main.go"


@pytest.mark.skipif(shutil.which("go") is None, reason="Go is not installed")
def test_a_client_in_go_commits_by_check_back_receives_and_acknowledges(tmp_path: Path) -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 150
    program = tmp_path / "client"
    own = {"GOCACHE": str(ROOT / ".cache" / "go"), "GOTOOLCHAIN": "local", "GOPROXY": "off", "GOFLAGS": ""}
    built = subprocess.run(
        ["go", "build", "-o", str(program), str(EXAMPLE)], env={**os.environ, **own}, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    with serving(tmp_path / "data", "--transaction-timeout", "0.2s") as broker:
        place = broker.url.removeprefix("escrow://")
        done = subprocess.run([str(program), place], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["committed by check-back: true", "received: hello", "acknowledged: true"]
