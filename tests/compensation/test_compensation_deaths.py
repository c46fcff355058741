"""A process is killed (SIGKILL) at each place between two steps: nothing is lost, every effect is there once, nothing
stays open or suspended.
"""

import json
import os
import sys
from pathlib import Path

import pytest
from compensation_child import PLACES

import forked

HERE = Path(__file__).parent


@pytest.mark.invariant("I48")
def test_killed_at_every_place(tmp_path: Path) -> None:
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    environment.pop("ESCROWMQ_FAILPOINT", None)
    command = [sys.executable, HERE / "compensation_child.py", tmp_path]
    ran = forked.run(command, cwd=HERE, env=environment)
    assert ran.returncode == 0, ran.stderr
    forks = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [fork["place"] for fork in forks if fork["killed"]] == list(PLACES), (forks, ran.stderr)
    assert forks[-1]["code"] == 0, ran.stderr
    assert [(fork["before"], fork["faults"]) for fork in forks] == [(place, []) for place in (None, *PLACES)], (
        ran.stderr
    )


def test_the_places_are_those_of_the_code() -> None:
    """A place that is renamed or added is not forgotten here."""
    source = Path(sys.modules["escrowmq"].__file__).parent / "compensation"
    named = {
        line.split('reach("')[1].split('"')[0]
        for path in sorted(source.glob("*.py"))
        for line in path.read_text().splitlines()
        if 'reach("compensation.' in line
    }
    assert named == {place for place in PLACES if place.startswith("compensation.")}
