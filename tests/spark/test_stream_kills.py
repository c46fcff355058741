"""Exactly once into a topic, the broker holding the mark: whoever is killed at whatever step, the topic ends as one
clean run's.

The suite has every step at which a process of a task, the process that commits, or the broker is at work. Long (`make
chaos`) are the driver killed at every step, and the processes of tasks killed after the decision, when they only wait
for the next task.
"""

import json
import os
import time
from collections import Counter

import pytest
from killing import DECIDING, POINTS, Job, Leg, content, losers, orders_broker, revenue
from killing_grid import BROKERS, COMMITTERS, DRIVERS, EXECUTORS, LATE, Grid, cells, last, look, wait_until
from revenue_job import TABLE

import escrowmq as mq
from escrowmq.spark.checkback import CheckpointChecker

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]

CLEAN = Leg("clean")
WORKING = {"executors": EXECUTORS["executors"]}
WAITING = {topic: who for topic, who in EXECUTORS.items() if topic not in WORKING}
GRID = WORKING | BROKERS | COMMITTERS
HASTY = Leg("hasty", DECIDING[:1], what="hasty")
FORGETFUL = Leg("forgetful", DECIDING[1:], what="forgetful")
TABLE_LEG = Leg("table", POINTS, what="table")
NAMELESS = Leg("nameless", DECIDING[:1], what="nameless", once=True)


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    with orders_broker(
        tmp_path_factory.mktemp("kills") / "data", "--check-interval", "1s", "--check-max", "1000"
    ) as made:
        yield made


@pytest.fixture(scope="module")
def grid(broker):
    """Who is killed where."""
    return Grid(broker)


@pytest.fixture(scope="module")
def killed(grid):
    """The legs of the grid."""
    return {leg.topic: leg for leg in grid.legs(GRID)}


@pytest.fixture(scope="module")
def job(broker, killed, tmp_path_factory):
    """All legs whose driver lives on, in one driver."""
    legs = [CLEAN, *killed.values(), HASTY, FORGETFUL, TABLE_LEG, NAMELESS]
    made = Job(tmp_path_factory.mktemp("job"), broker.url, *legs)
    made.run()
    assert made.starts == 1
    return made


@pytest.mark.invariant("I42")
def test_a_clean_run_writes_what_a_plain_program_computes(broker, job):
    found = content(broker.url, "clean")
    assert found == revenue()
    assert len(found) > 80
    assert losers(broker.url, "clean") == 0


@pytest.mark.invariant("I42")
def test_every_step_was_reached_and_somebody_killed_there(job, grid):
    grid.check(cells(GRID))


@pytest.mark.invariant("I42")
def test_the_processes_of_tasks_killed_at_every_step(broker, job):
    assert content(broker.url, "executors") == content(broker.url, "clean")
    assert losers(broker.url, "executors") > 0


@pytest.mark.invariant("I42")
def test_the_process_that_commits_killed_around_the_decision(broker, job, killed):
    assert job.tries(killed["committers"]) == len(LATE) + 1  # without it a query fails
    assert content(broker.url, "committers") == content(broker.url, "clean")
    assert losers(broker.url, "committers") > 0


@pytest.mark.invariant("I42")
def test_the_broker_killed_at_every_step(broker, job, killed):
    assert job.tries(killed["brokers"]) == 1  # the patience of tasks and of the commit covers a restart
    assert content(broker.url, "brokers") == content(broker.url, "clean")


@pytest.mark.invariant("I42")
@pytest.mark.parametrize("leg", [HASTY, FORGETFUL], ids=lambda leg: leg.topic)
def test_a_planted_bug_is_caught(broker, job, leg):
    found = content(broker.url, leg.topic)
    assert set(found) == set(content(broker.url, "clean"))
    assert max(found.values()) > 1


@pytest.mark.invariant("I42")
def test_a_batch_write_under_a_name_happens_once_whoever_is_killed_and_however_often_it_is_tried(broker, job):
    assert job.tries(TABLE_LEG) == 3
    assert content(broker.url, "table") == Counter({(str(n), f"row {n}".encode()): 1 for n in range(TABLE)})
    assert losers(broker.url, "table") > 0


@pytest.mark.invariant("I42")
def test_a_batch_write_that_fails_leaves_nothing(broker, job):
    assert content(broker.url, "nameless") == Counter()
    assert losers(broker.url, "nameless") == TABLE


class Recording(CheckpointChecker):
    """Remembers what it answered."""

    def decide_batch(self, checks):
        self.said = super().decide_batch(checks)
        return self.said


def check_back(url, checkpoint):
    """The broker asks what became of a dead driver's rows, before and after its query moved on, as its checkpoint
    shows."""
    query = json.loads((checkpoint / "metadata").read_text())["id"]
    checker = Recording(str(checkpoint))
    with mq.connect(url) as bus:
        bus.producer(f"spark.{query}", checker=checker).wait_until_listening()
        for moved, outcome, left in [(False, mq.UNKNOWN, True), (True, mq.ROLLBACK, False)]:
            if moved:
                newest = checkpoint / "commits" / str(last(checkpoint / "commits"))
                was = newest.stat().st_mtime
                os.utime(newest, (time.time() + 600,) * 2)
            checker.said = []
            assert bus.admin.transactions(state="undecided", group=f"spark.{query}")
            wait_until(lambda: outcome in checker.said)
            wait_until(lambda: bool(bus.admin.transactions(state="undecided", group=f"spark.{query}")) is left)
        os.utime(newest, (was,) * 2)


@pytest.mark.long
def test_the_processes_of_tasks_killed_after_the_decision(broker, tmp_path):
    grid = Grid(broker)
    job = Job(tmp_path, broker.url, *grid.legs(WAITING))
    job.run()
    assert job.starts == 1
    grid.check(cells(WAITING))
    for topic in WAITING:
        assert content(broker.url, topic) == revenue()


@pytest.mark.invariant("I42")
@pytest.mark.long  # eight drivers, one after the other: each starts a Java process
def test_the_driver_killed_at_every_step_and_check_back_while_it_is_dead(broker, tmp_path):
    """And once when Spark could not write commits/N, though the broker has decided batch N: the last moment before it
    is there."""

    def ask(stop):
        if stop.point == "spark.prepared":
            check_back(broker.url, stop.job.checkpoint(stop.leg))

    def no_commits(stop):
        commits, kept = (stop.job.checkpoint(stop.leg) / name for name in ("commits", "kept"))
        if stop.point == "spark.after-decision":
            commits.rename(kept)
            commits.write_text("no folder")
        else:
            commits.unlink()
            kept.rename(commits)
            seen = look(broker.url, stop)
            assert seen.fits("spark.committed")
            unwritten.append(seen.planned)
            stop.job.kill_driver()

    unwritten = []
    grid = Grid(broker)
    full = Leg("full", ("spark.after-decision", "job.failed"), no_commits, "watched")
    job = Job(tmp_path, broker.url, grid.leg("drivers", DRIVERS["drivers"], ask), full)
    job.run()
    grid.check(cells(DRIVERS))
    assert job.starts == len(DRIVERS["drivers"]) + 1 + 1
    assert last(job.checkpoint(full) / "commits") > unwritten[0]
    for topic in ("drivers", "full"):
        assert content(broker.url, topic) == revenue()
        assert losers(broker.url, topic) > 0
