"""Exactly once into a topic, the broker holding the mark: whoever is killed at whatever step, the topic ends as one clean run's."""

import json
import os
import time
from collections import Counter

import pytest
from killing import DECIDING, POINTS, Job, Leg, content, losers, orders_broker, revenue
from revenue_job import TABLE

import escrowmq as mq
from escrowmq.spark.checkback import CheckpointChecker

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]

CLEAN = Leg("clean")
WORKERS = Leg("workers", POINTS)
HASTY = Leg("hasty", DECIDING[:1], what="hasty")
FORGETFUL = Leg("forgetful", DECIDING[1:], what="forgetful")
TABLE_LEG = Leg("table", POINTS, what="table")
NAMELESS = Leg("nameless", DECIDING[:1], what="nameless", once=True)
DRIVER_POINTS = ("spark.before-prepare", "spark.prepared", *DECIDING)


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    with orders_broker(
        tmp_path_factory.mktemp("kills") / "data", "--check-interval", "1s", "--check-max", "1000"
    ) as made:
        yield made


@pytest.fixture(scope="module")
def brokers(broker):
    """The leg whose broker is killed."""
    return Leg("brokers", POINTS, broker.kill_and_start)


@pytest.fixture(scope="module")
def job(broker, brokers, tmp_path_factory):
    """All legs whose driver lives on, in one driver."""
    made = Job(
        tmp_path_factory.mktemp("job"), broker.url, CLEAN, WORKERS, brokers, HASTY, FORGETFUL, TABLE_LEG, NAMELESS
    )
    made.run()
    assert made.starts == 1
    return made


def test_a_clean_run_writes_what_a_plain_program_computes(broker, job):
    found = content(broker.url, "clean")
    assert found == revenue()
    assert len(found) > 80
    assert losers(broker.url, "clean") == 0


def test_python_processes_killed_at_every_step(broker, job):
    assert job.tries(WORKERS) == 3  # Spark repeats tasks; without its commit process a query fails
    assert content(broker.url, "workers") == content(broker.url, "clean")
    assert losers(broker.url, "workers") > 0


def test_the_broker_killed_at_every_step(broker, brokers, job):
    assert job.tries(brokers) == 1  # the patience of tasks and of the commit covers a restart
    assert content(broker.url, "brokers") == content(broker.url, "clean")


@pytest.mark.parametrize("leg", [HASTY, FORGETFUL], ids=lambda leg: leg.topic)
def test_a_planted_bug_is_caught(broker, job, leg):
    found = content(broker.url, leg.topic)
    assert set(found) == set(content(broker.url, "clean"))
    assert max(found.values()) > 1


def test_a_batch_write_under_a_name_happens_once_whoever_is_killed_and_however_often_it_is_tried(broker, job):
    assert job.tries(TABLE_LEG) == 3
    assert content(broker.url, "table") == Counter({(str(n), f"row {n}".encode()): 1 for n in range(TABLE)})
    assert losers(broker.url, "table") > 0


def test_a_batch_write_that_fails_leaves_nothing(broker, job):
    assert content(broker.url, "nameless") == Counter()
    assert losers(broker.url, "nameless") == TABLE


class Recording(CheckpointChecker):
    """Remembers what it answered."""

    def decide_batch(self, checks):
        self.said = super().decide_batch(checks)
        return self.said


def check_back(url, checkpoint):
    """The broker asks what became of a dead driver's rows, before and after its query moved on, as its checkpoint shows."""
    query = json.loads((checkpoint / "metadata").read_text())["id"]
    checker = Recording(str(checkpoint))
    with mq.connect(url) as bus:
        bus.producer(f"spark.{query}", checker=checker).wait_until_listening()
        for moved, outcome, left in [(False, mq.UNKNOWN, True), (True, mq.ROLLBACK, False)]:
            if moved:
                newest = max((checkpoint / "commits").glob("[0-9]*"), key=lambda file: int(file.name))
                os.utime(newest, (time.time() + 600,) * 2)
            checker.said = []
            assert bus.admin.transactions(state="undecided", group=f"spark.{query}")
            eventually(lambda: outcome in checker.said)
            eventually(lambda: bool(bus.admin.transactions(state="undecided", group=f"spark.{query}")) is left)


def eventually(holds, patience=60.0):
    deadline = time.monotonic() + patience
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.long  # four drivers, one after the other: each starts a Java process
def test_the_driver_killed_at_every_step_and_check_back_while_it_is_dead(broker, tmp_path):
    def kill(pid, point):
        killed.kill_driver()
        if point == "spark.prepared":
            check_back(broker.url, killed.checkpoint(leg))

    leg = Leg("drivers", DRIVER_POINTS, kill)
    killed = Job(tmp_path, broker.url, leg)
    killed.run()
    assert killed.starts == len(DRIVER_POINTS) + 1
    assert content(broker.url, "drivers") == revenue()
    assert losers(broker.url, "drivers") > 0
