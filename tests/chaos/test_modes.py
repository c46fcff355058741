"""Each delivery mode of the chaos run does what it says where nothing is wrong."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from alone import relay, run_alone, two_brokers

from escrowmq_lab.chaos.modes import MODES


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with two_brokers(tmp_path_factory.mktemp("brokers")) as url:
        yield url


RELAYED = {"outbox", "compensation"}
"""Modes that put something into the outbox."""

ALONE = [name for name, mode in MODES.items() if mode.beside(Path(), "") is None]
"""The others need a program of theirs: ``tests/spark/test_chaos_sink.py``."""


@pytest.mark.parametrize("name", ALONE)
def test_without_faults_each_business_row_has_one_effect(name: str, brokers: str, tmp_path: Path) -> None:
    run_alone(MODES[name](), tmp_path, brokers, beside=relay if name in RELAYED else None)
