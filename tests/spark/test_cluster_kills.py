"""Exactly once on a cluster, speculation on: executors, the broker and the driver killed, and a task that straggles.

The long form of test_stream_kills.py (`make chaos`): minutes, and Spark must have time to speculate.
"""

import contextlib
import os
import signal

import pytest
from killing import POINTS, Job, Leg, content, losers, orders_broker, revenue

from escrowmq.testing.servers.seam import Absent
from escrowmq.testing.servers.spark import cluster

pytestmark = [pytest.mark.spark, pytest.mark.long, pytest.mark.timeout(900)]

SETTINGS = {
    "spark.sql.shuffle.partitions": "2",
    "spark.executor.memory": "512m",
    "spark.executor.cores": "1",
    "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:-UsePerfData",
    "spark.locality.wait": "0",
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.multiplier": "1.1",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.minTaskRuntime": "500ms",
}


@pytest.fixture
def hands(tmp_path):
    """Two workers."""
    try:
        with cluster(tmp_path) as made:
            yield made
    except Absent as absent:
        if os.environ.get("CI"):
            pytest.fail(str(absent))
        pytest.skip(str(absent))


def test_executors_the_broker_and_the_driver_killed_and_a_task_that_straggles(hands, tmp_path):
    """The first batch with rows meets everything: an executor dies before its task prepares anything; a task stands still in the
    middle of its rows until the batch is decided without it, which takes a second, speculative attempt; the broker dies when
    a task has prepared its rows; an executor dies before the decision, the driver after it."""

    def kill(pid, point):
        match point:
            case "spark.before-prepare":
                assert hands.kill_executor(pid)
                with contextlib.suppress(ProcessLookupError):  # it would notice its executor's death by itself, later
                    os.kill(pid, signal.SIGKILL)
            case "spark.prepared-some":
                return lambda: bool(content(broker.url, "revenue"))
            case "spark.prepared":
                broker.kill_and_start()
            case "spark.before-decision":
                assert hands.kill_executor()
            case "spark.after-decision":
                job.kill_driver()
        return None

    with orders_broker(tmp_path / "data") as broker:
        (tmp_path / "job").mkdir()
        job = Job(tmp_path / "job", broker.url, Leg("revenue", POINTS, kill), master=hands.url, settings=SETTINGS)
        job.run()
        assert job.starts == 2
        assert content(broker.url, "revenue") == revenue()
        assert losers(broker.url, "revenue") > 0
    told = "".join(log.read_text(errors="replace") for log in tmp_path.glob("work-*/*/*/stderr"))
    assert "another attempt succeeded" in told  # Spark did have tasks that ran twice at a time
