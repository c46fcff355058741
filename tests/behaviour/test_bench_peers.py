"""The benchmark beside peers, in its shortest form: it starts servers, loads them, its figures add up, and nothing that
fails stops it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
SHORT = ("--rounds", "1", "--seconds", "0.1", "--warm", "0")


def run(*flags: str, root: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "bench" / "peers"), *flags]
    given = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT / "lab" / "src"))), **environment}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=given)
    assert done.returncode == 0, done.stderr
    return done


def peers(*flags: str, **environment: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(run(*SHORT, "--json", *flags, **environment).stdout)
    return content


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A short run of one work on one peer."""
    path = tmp_path_factory.mktemp("peers") / "figures.json"
    flags = ("--peers", "=escrowmq", "--works", "64 threads", "--undecided", "0", "--queued", "20", "--json", str(path))
    run(*SHORT, *flags)
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def test_every_transaction_of_a_short_run_is_committed(measured: dict[str, Any]) -> None:
    [figure] = measured["runs"]
    assert (figure["work"], figure["peer"], figure["failed"]) == ("64 threads", "EscrowMQ", 0)
    assert figure["rate"] > 0
    assert 0 < figure["p10_ms"] <= figure["p50_ms"] <= figure["p99_ms"]
    assert figure["written_per_body_byte"] > 1  # what is answered was written
    [recovery] = measured["recovery"]
    assert (recovery["undecided"], recovery["queued"], recovery["failure"]) == (None, 20, None)
    assert recovery["queued_mib"] > 0
    assert measured["failures"] == []


def with_others(measured: dict[str, Any], path: Path) -> Path:
    """The figures of a run, as if RocketMQ had been there with half our rate and FastMiniMQ had failed."""
    [figure] = measured["runs"]
    ours = {**figure, "rate": 20_000.0, "server_us": 51.0}
    content = {**measured, "runs": [ours, {**figure, "peer": "RocketMQ", "rate": 10_000.0}]}
    content["failures"] = [{"work": "64 threads", "peer": "FastMiniMQ", "round": 0, "reason": "it ended\nwith 1"}]
    [peer] = measured["peers"]
    content["peers"] = [peer, *({**peer, "name": name, "promise": "p"} for name in ("RocketMQ", "FastMiniMQ"))]
    path.write_text(json.dumps(content))
    return path


def test_goals_stand_beside_what_a_run_had(measured: dict[str, Any], tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    report = run(
        "--report", "--json", str(with_others(measured, tmp_path / "given.json")), "--page", str(page)
    ).stdout.splitlines()
    assert "| 64 threads | ≥ 15,000/s | 20,000/s | met |" in report
    assert "| 64 threads | ≥ 5 × RocketMQ | 2.00 ×: 20,000/s to 10,000/s | **not met** |" in report
    assert "| 64 threads | ≥ 1.5 × FastMiniMQ | 20,000/s; FastMiniMQ not measured | ? |" in report
    assert "| 64 threads | broker's processor time ≤ 50 µs | 51.00 µs | **not met** |" in report
    assert "| 64 threads, /s | 20,000 | 10,000 | failed |" in report
    assert "- FastMiniMQ, 64 threads, round 1: failed: it ended with 1" in report
    assert "64 threads" in page.read_text()
    picture = ElementTree.parse(page.with_suffix(".svg"))
    assert len(picture.findall(".//{*}rect")) == 3  # the ground, and a bar for each that has a figure


def test_the_documents_have_places_for_the_tables(measured: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "speed.md", tmp_path / "docs" / "speed.md")
    shutil.copytree(ROOT / "bench", tmp_path / "bench", ignore=shutil.ignore_patterns("__pycache__"))
    given = str(with_others(measured, tmp_path / "given.json"))
    for _ in range(2):  # the second replaces the first
        run("--report", "--docs", "--json", given, root=tmp_path)
    text, before = ((root / "docs" / "speed.md").read_text() for root in (tmp_path, ROOT))
    assert text.count("| 64 threads, /s | 20,000 |") == 1
    without = [re.sub("<!-- peers: w.*<!-- peers: end -->", "", one, flags=re.DOTALL) for one in (text, before)]
    assert without[0] == without[1]
    assert (tmp_path / "docs" / "peers.svg").read_text().startswith("<svg")


def test_a_run_goes_on_from_its_file(measured: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    path.write_text(json.dumps(measured))
    flags = ("--peers", "=escrowmq", "--works", "64 threads", "--undecided", "0", "--queued", "20")
    done = run(*SHORT, *flags, "--resume", "--json", str(path))
    assert done.stderr == ""  # nothing was left to measure
    assert json.loads(path.read_text())["runs"] == measured["runs"]


@pytest.mark.long
def test_all_that_was_undecided_at_a_kill_is_asked_about() -> None:
    content = peers("--peers", "=escrowmq", "--works", "none", "--undecided", "1000", "--queued", "0")
    [recovery] = content["recovery"]
    assert (recovery["undecided"], recovery["asked"]) == (1000, 1000)


def test_a_peer_that_is_not_here_is_named(tmp_path: Path) -> None:
    content = peers("--peers", "redis", PATH=str(tmp_path))
    [peer] = content["peers"]
    assert peer["missing"] == "redis-server is not installed; on Debian: apt-get install redis-server"
    assert content["runs"] == []


def test_a_peer_that_fails_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "redis-server").write_text("#!/bin/sh\necho no; exit 1\n")
    (tmp_path / "redis-server").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    content = peers("--peers", "redis", "--works", "16 threads;64 threads", "--queued", "1", PATH=path)
    assert [(one["work"], "did not start" in one["reason"]) for one in content["failures"]] == [
        ("64 threads", True),
        ("16 threads", True),
    ]
    assert "did not start" in content["recovery"][0]["failure"]


def test_the_grpc_client_commits_every_transaction_at_the_gateway() -> None:
    flags = ("--grpc", "--peers", "=escrowmq", "--works", "64 threads", "--undecided", "0", "--queued", "0")
    content = peers(*flags)
    [peer] = content["peers"]
    if peer["missing"]:
        if os.environ.get("CI"):
            pytest.fail(peer["missing"])
        pytest.skip(peer["missing"])
    [figure] = content["runs"]
    assert (figure["work"], figure["peer"], figure["failed"]) == ("64 threads", "EscrowMQ", 0)
    assert figure["rate"] > 0


def test_a_machine_without_java_measures_no_grpc_client(tmp_path: Path) -> None:
    content = peers("--grpc", PATH=str(tmp_path), XDG_CACHE_HOME=str(tmp_path))
    assert [bool(peer["missing"]) for peer in content["peers"]] == [True] * 4
    assert content["runs"] == content["recovery"] == []
