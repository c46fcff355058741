"""A whole run of the monkey, in its short form; and runs of modes that are wrong, which must be found."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from escrowmq.chaos.modes import MODES
from escrowmq.chaos.options import Options
from escrowmq.chaos.plan import Blow
from escrowmq.chaos.report import JSON, PAGE, Record, write_report
from escrowmq.chaos.run import Monkey, run

WITHOUT_JAVA = tuple(name for name, mode in MODES.items() if mode.beside(Path(), "") is None)


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
    assert record.total("confirmed") > 200
    write_report(tmp_path, record)
    assert json.loads((tmp_path / JSON).read_text())["ok"]
    assert (tmp_path / PAGE).is_file()


@pytest.mark.parametrize(
    ("mode", "found"), [("Unmarked", "repeated"), ("AckFirst", "lost"), ("Hasty", "leaked")], ids=str
)
def test_a_mode_that_is_wrong_is_found(mode: str, found: str, tmp_path: Path) -> None:
    wrong = f"wrong_modes:{mode}"
    options = Options(rounds=1, period=0.5, producers=1, brokers=1, consumers=1, modes=(wrong,), patience=8.0, rate=100)
    findings = run(options, tmp_path).findings
    (name,) = findings.tallies
    assert findings.of(found, name) > 0, findings.broken
    # A node that ends by itself is a finding, too.
    assert findings.subjects("failed") == ({"consumer-1"} if mode != "Hasty" else set())
