"""The short form of failover.py: over one real Kafka, served brokers, and a program that only knows ``escrow://a|b``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from failover import FAULTS, cluster, run

from escrowmq.chaos.proxy import Proxy
from escrowmq.testing.servers.seam import Absent

SHORT = ("kill", "cut")
LONG_RUNS = 20

Kafka = tuple[str, tuple[str, Proxy]]


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kafka]:
    try:
        with cluster(tmp_path_factory.mktemp("failover")) as made:
            yield made
    except Absent as problem:
        pytest.skip(str(problem))


@pytest.mark.parametrize(
    ("fault", "runs"),
    [(fault, 1) for fault in SHORT]
    + [
        pytest.param(fault, LONG_RUNS, marks=[pytest.mark.long, pytest.mark.timeout(0)], id=f"{fault}-long")
        for fault in FAULTS
    ],
)
def test_a_leader_that_is_struck_under_load_loses_repeats_and_leaks_nothing(
    kafka: Kafka, tmp_path: Path, fault: str, runs: int
) -> None:
    for number in range(runs):
        outcome = run(fault, tmp_path / str(number), *kafka)
        assert (outcome.lost, outcome.repeated, outcome.leaked, outcome.problems) == (0, 0, 0, 0)
        assert outcome.committed > 20
