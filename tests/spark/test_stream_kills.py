"""Exactly once into a topic, the broker holding the mark: whoever is killed at whatever step, the topic ends as one clean run's."""

import os
import signal

import pytest
from killing import POINTS, Broker, Job, content, fill


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    made = Broker(tmp_path_factory.mktemp("kills") / "data")
    fill(made.url)
    yield made
    made.kill()


@pytest.fixture(scope="module")
def clean(broker, tmp_path_factory):
    """What a run without any kill writes."""
    Job(tmp_path_factory.mktemp("clean"), broker.url, "clean").run()
    found = content(broker.url, "clean")
    assert len(found) > 30
    return found


def test_python_workers_killed_at_every_step(broker, clean, tmp_path):
    job = Job(tmp_path, broker.url, "workers")
    job.run(POINTS, lambda pid, point: os.kill(pid, signal.SIGKILL))
    assert content(broker.url, "workers") == clean


def test_the_broker_killed_at_every_step(broker, clean, tmp_path):
    job = Job(tmp_path, broker.url, "brokers")
    job.run(POINTS, lambda pid, point: broker.kill_and_start())
    assert content(broker.url, "brokers") == clean


def test_the_driver_killed_at_every_step(broker, clean, tmp_path):
    job = Job(tmp_path, broker.url, "drivers")
    job.run(POINTS, job.kill_driver)
    assert job.starts == len(POINTS) + 1
    assert content(broker.url, "drivers") == clean
