"""A whole run of the monkey, in its short form; and runs of modes that are wrong, which must be found."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa

from escrowmq_lab.chaos.modes import MODES
from escrowmq_lab.chaos.options import Options
from escrowmq_lab.chaos.plan import Blow
from escrowmq_lab.chaos.report import JSON, PAGE, Record, write_report
from escrowmq_lab.chaos.run import Monkey, run
from escrowmq_lab.databases import open_engine

WITHOUT_JAVA = tuple(name for name, mode in MODES.items() if mode.beside(Path(), "") is None)


@pytest.mark.invariant(
    "I1", "I2", "I3", "I4", "I5", "I9", "I14", "I15", "I19", "I20", "I23", "I24", "I33", "I37", "I38", "I39", "I48"
)
def test_nothing_is_lost_repeated_or_leaked_in_ten_rounds(tmp_path: Path) -> None:
    """All modes but Spark's, which has a test of its own; every number of nodes from 1 to 10, and every blow."""
    phases: list[str] = []

    def told(monkey: Monkey) -> None:
        phases.append(monkey.phase)

    outcome = run(Options(rounds=10, period=1.2, seed=1, modes=WITHOUT_JAVA), tmp_path, told)
    record = Record.of(outcome)
    assert record.findings.ok, (outcome.folder, record.findings.numbers, record.findings.broken)
    assert [phase for phase, _ in itertools.groupby(phases)] == ["starting", "striking", "settling", "checking"]
    assert set(record.struck) == set(range(1, 11))
    assert {happening.blow for happening in record.happenings} == set(Blow)
    assert all(0 < happening.at_us <= happening.until_us for happening in record.happenings)
    assert set(record.findings.tallies) == set(WITHOUT_JAVA)
    assert all(tally.effects == tally.business > 0 for tally in record.findings.tallies.values())
    assert record.total("confirmed") > 0  # how many depends on the machine
    write_report(tmp_path, record)
    assert json.loads((tmp_path / JSON).read_text())["ok"]
    assert (tmp_path / PAGE).is_file()


@pytest.mark.invariant("I1", "I3", "I24")
@pytest.mark.parametrize(
    ("mode", "found"), [("Unmarked", "repeated"), ("AckFirst", "lost"), ("Hasty", "leaked")], ids=str
)
def test_a_mode_that_is_wrong_is_found(mode: str, found: str, tmp_path: Path) -> None:
    wrong = f"wrong_modes:{mode}"
    options = Options(
        rounds=1, period=0.5, producers=1, brokers=1, consumers=1, modes=(wrong,), patience=60.0, rate=100
    )
    findings = run(options, tmp_path).findings
    (name,) = findings.tallies
    assert findings.of(found, name) > 0, findings.broken
    # A node that ends by itself is a finding, too.
    assert findings.subjects("failed") == ({"consumer-1"} if mode != "Hasty" else set())


def test_the_databases_may_be_on_a_server(postgres_url: str, tmp_path: Path) -> None:
    """They are made for the run, and gone after it."""
    small = Options(rounds=2, period=0.7, producers=1, brokers=1, consumers=1, modes=("barrier",), seed=3)
    outcome = run(replace(small, database_url=postgres_url), tmp_path)
    assert outcome.findings.ok, outcome.findings.broken
    engine = open_engine(postgres_url)
    with engine.connect() as connection:
        assert not connection.scalars(sa.text("SELECT datname FROM pg_database WHERE datname LIKE 'chaos%'")).all()
    engine.dispose()


def test_no_node_outlives_a_director_that_is_killed(tmp_path: Path) -> None:
    """Paused ones neither: the system kills them with their parent."""
    command = [
        sys.executable,
        "-m",
        "escrowmq_lab",
        "chaos",
        "--rounds",
        "1",
        "--period",
        "600",
        "--folder",
        str(tmp_path / "run"),
    ]
    small = ["--producers", "1", "--brokers", "1", "--consumers", "1", "--modes", "barrier"]
    logs = [tmp_path / "run" / "nodes" / f"{name}-1.log" for name in ("producer", "broker", "consumer")]
    with (tmp_path / "said").open("wb") as said:
        director = subprocess.Popen([*command, *small], start_new_session=True, stdout=said, stderr=said)
    while director.poll() is None and not all(log.exists() and "started as process" in log.read_text() for log in logs):
        time.sleep(0.05)
    assert director.poll() is None, (tmp_path / "said").read_text()
    nodes = [int(log.read_text().partition("started as process ")[2].split()[0]) for log in logs]
    os.kill(nodes[0], signal.SIGSTOP)
    director.kill()
    director.wait()
    while any(_runs(node) for node in nodes) or _any_runs(director.pid):
        time.sleep(0.05)


def _any_runs(group: int) -> bool:
    """Whether a process of this group does: the fork server, the proxy."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[2]) == group and fields[0] not in "ZX":
                return True
    return False


def _runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
