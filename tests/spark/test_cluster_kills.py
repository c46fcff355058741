"""Exactly once on a cluster of two workers, speculation on: executors, the broker and the driver killed, a task that
straggles.

The short form is part of the suite; the grid of everybody at every step is the long one (`make chaos`).
"""

import pytest
from killing import Job, Leg, content, losers, orders_broker, revenue
from killing_grid import BROKERS, COMMITTERS, DRIVERS, EXECUTORS, Grid, cells

pytestmark = [pytest.mark.spark, pytest.mark.timeout(2400)]

SETTINGS = {
    "spark.sql.shuffle.partitions": "2",
    "spark.executor.memory": "512m",
    "spark.executor.cores": "1",
    "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:-UsePerfData",
    "spark.locality.wait": "0",
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.multiplier": "1.1",
    "spark.speculation.quantile": "0.5",
    # so that what stands still elsewhere is not overtaken while it is looked at
    "spark.speculation.minTaskRuntime": "4s",
}
SOME = {
    "some": {"spark.prepared": "executor", "spark.before-decision": "broker", "spark.after-decision": "driver"},
}
GRID = EXECUTORS | BROKERS | COMMITTERS
HASTY = Leg("hasty", ("spark.before-decision",), what="hasty")
FORGETFUL = Leg("forgetful", ("spark.after-decision",), what="forgetful")
STRAGGLER = Leg(
    "straggler",
    ("spark.prepared-some",),
    lambda stop: lambda: bool(content(stop.job.url, "straggler")),
    "watched",
)
"""A task stands still in the middle of its rows until its batch is decided without it: that takes a second attempt of
it. It is a leg of its own, as Spark starts a second attempt only on a host that had none: not where an executor was
lost with the first.
"""


@pytest.fixture
def broker(tmp_path):
    with orders_broker(tmp_path / "data") as made:
        yield made


@pytest.fixture
def run(hands, broker, tmp_path):
    """Legs on the cluster, to their end."""

    def made(*legs):
        (tmp_path / legs[-1].topic).mkdir()
        job = Job(tmp_path / legs[-1].topic, broker.url, *legs, master=hands.url, settings=SETTINGS)
        job.run()
        return job

    return made


def overtaken(job, leg):
    """The attempts that began while another of the same task stood still and lived."""
    begun = [entry for entry in job.attempts(leg) if "standing" in entry]
    return [
        (first, second)
        for second in begun
        for first in begun
        if first["pid"] in second["standing"]
        and [first[name] for name in ("batch", "stage", "partition")]
        == [second[name] for name in ("batch", "stage", "partition")]
        and first["attempt"] < second["attempt"]
    ]


def check_straggler(broker, job):
    """It was overtaken, and lost."""
    assert overtaken(job, STRAGGLER)
    assert content(broker.url, "straggler") == revenue()
    assert losers(broker.url, "straggler") > 0


@pytest.mark.invariant("I42")
def test_an_executor_the_broker_and_the_driver_killed_and_a_task_that_straggles(hands, broker, run):
    grid = Grid(broker, hands)
    job = run(STRAGGLER, *grid.legs(SOME))
    grid.check(cells(SOME))
    assert job.starts == 2
    check_straggler(broker, job)
    assert content(broker.url, "some") == revenue()
    assert losers(broker.url, "some") > 0


@pytest.mark.invariant("I42")
@pytest.mark.long
def test_executors_and_the_broker_killed_at_every_step_a_straggler_and_planted_bugs(hands, broker, run):
    grid = Grid(broker, hands)
    job = run(STRAGGLER, *grid.legs(GRID), HASTY, FORGETFUL)
    assert job.starts == 1
    grid.check(cells(GRID))
    check_straggler(broker, job)
    for topic in GRID:
        assert content(broker.url, topic) == revenue()
    for topic in ("executors", "committers"):
        assert losers(broker.url, topic) > 0
    for topic in ("hasty", "forgetful"):
        found = content(broker.url, topic)
        assert set(found) == set(revenue())
        assert max(found.values()) > 1  # caught


@pytest.mark.invariant("I42")
@pytest.mark.long
def test_the_driver_killed_at_every_step(hands, broker, run):
    grid = Grid(broker, hands)
    job = run(*grid.legs(DRIVERS))
    grid.check(cells(DRIVERS))
    assert job.starts == len(DRIVERS["drivers"]) + 1
    assert content(broker.url, "drivers") == revenue()
    assert losers(broker.url, "drivers") > 0
