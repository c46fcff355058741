"""A shard that goes on at another address while Spark reads it and writes to it: every row once, and no option but the
list of addresses.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from bad_runs import numbers, rows, send, standing, undecided, visible, write_stream
from killing import Broker
from pyspark.sql import SparkSession

from escrowmq_lab.servers.process import free_port

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]

PATIENT = 120
"""Seconds in which the shard is led again."""


class Moving(Broker):
    """A broker that is killed and started on the same folder at the other of two addresses."""

    def __init__(self, folder: Path) -> None:
        self._ports = [free_port(), free_port()]
        super().__init__(folder)

    @property
    def url(self) -> str:
        return f"escrow://127.0.0.1:{self._ports[0]}"

    @url.setter
    def url(self, _: str) -> None:
        """What the other kind of broker chooses."""

    @property
    def both(self) -> str:
        """The addresses, in one order whatever happens."""
        return "escrow://" + "|".join(f"127.0.0.1:{port}" for port in sorted(self._ports))

    def move(self) -> None:
        self.kill()
        self._ports.reverse()
        self.start()


@pytest.fixture(scope="module")
def moving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Moving]:
    made = Moving(tmp_path_factory.mktemp("moving") / "data")
    try:
        send(made.both, 0, 40)
        yield made
    finally:
        made.kill()


@pytest.mark.invariant("I42")
@pytest.mark.parametrize(
    "point",
    [
        "spark.read-some",
        pytest.param("spark.before-prepare", marks=pytest.mark.long),
        "spark.before-decision",
        pytest.param("spark.after-decision", marks=pytest.mark.long),
    ],
)
def test_a_stream_from_and_to_a_shard_that_moves(
    spark: SparkSession, moving: Moving, tmp_path: Path, point: str
) -> None:
    topic, patient = f"out.{point}", {"timeout": PATIENT}
    run = lambda: write_stream(spark, moving.both, tmp_path / "check", topic, source=patient, sink=patient)  # noqa: E731
    with standing(spark, tmp_path / "told", point, moving.move):
        run()
    assert visible(moving.both, topic) == numbers(0, 40)
    run()  # the processes of tasks live on, with links that were made before
    assert visible(moving.both, topic) == numbers(0, 40)
    assert undecided(moving.both) == 0


def test_the_list_of_addresses_as_a_path(spark: SparkSession, moving: Moving) -> None:
    """Spark makes a path of what load() and save() are given."""
    written = rows(spark, 0, 5).write.format("escrow").mode("append").options(topic="path", timeout=PATIENT)
    written.save(moving.both)
    moving.move()
    read = spark.read.format("escrow").options(topic="path", timeout=PATIENT).load(moving.both)
    assert sorted(row["key"] for row in read.select("key").collect()) == numbers(0, 5)
