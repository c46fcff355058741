"""A cluster whose workers have folders of their own, brokers behind failover, checkpoints on HDFS: every row once,
whoever is killed.

All of it is long (`make chaos`).
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable

import cluster_program
import pytest
import revenue_job
from killing import content, kill_session, orders, revenue

import escrowmq as mq
from apart import Apart, eventually
from escrowmq_lab.servers.process import Server

pytestmark = [pytest.mark.spark, pytest.mark.timeout(2400)]


def started(aside: Apart, act: str, *words: str) -> subprocess.Popen[str]:
    return aside.start(cluster_program.__file__, aside.hands.url, act, *words)


def ended(driver: subprocess.Popen[str]) -> dict[str, object]:
    """What the program printed at its end."""
    printed, problems = driver.communicate()
    assert driver.returncode == 0, problems[-4000:]
    found: dict[str, object] = json.loads(printed.splitlines()[-1])
    return found


def soon(driver: subprocess.Popen[str], what: Callable[[], bool]) -> None:
    """Wait until something holds, as long as the program runs."""

    def said() -> str:
        driver.kill()
        return driver.communicate()[1][-4000:]

    def held() -> bool:
        assert driver.poll() is None, said()
        return what()

    eventually(held, said)


def topics(url: str) -> set[str]:
    with mq.connect(url) as bus:
        return {topic["name"] for topic in bus.admin.topics()}


def rows(url: str, topic: str) -> int:
    return content(url, topic).total() if topic in topics(url) else 0


def undecided(url: str) -> int:
    with mq.connect(url) as bus:
        return len(bus.admin.transactions(state="undecided"))


@pytest.mark.invariant("I42")
@pytest.mark.long
def test_a_stream_whose_broker_and_driver_are_killed_goes_on_from_its_checkpoint_on_hdfs(aside: Apart) -> None:
    url, checkpoint = aside.shard.url, f"{aside.hdfs}/checkpoint"
    with mq.connect(url) as bus:
        bus.admin.create_topic(
            "orders", 1
        )  # of several queues, small batches would have some orders too late for the watermark
        sent = [mq.Message("orders", json.dumps(body).encode(), key=f"o-{n}") for n, body in enumerate(orders())]
        assert bus.producer("shop").send_batch(sent).ok
    driver = started(aside, "stream", url, checkpoint, "revenue")
    killed: Server | None = None
    try:
        soon(driver, lambda: rows(url, "revenue") > 0)
        killed = aside.shard.kill_leader()
        before = content(url, "revenue")
        soon(driver, lambda: rows(url, "revenue") > before.total())  # it has followed
        kill_session(driver.pid)
        driver.communicate()
        assert driver.returncode == -signal.SIGKILL
        assert content(url, "revenue") < revenue()
        assert int(str(ended(started(aside, "stream", url, checkpoint, "revenue"))["noted"])) > 0
        assert content(url, "revenue") == revenue()
        assert undecided(url) == 0
    finally:
        kill_session(driver.pid)
        if killed is not None:
            killed.start()


@pytest.mark.invariant("I42")
@pytest.mark.long
def test_a_write_and_a_read_whose_broker_is_killed_have_every_row_once(aside: Apart) -> None:
    url = aside.shard.url
    driver = started(aside, "batches", url, "table")
    killed: Server | None = None
    try:
        for step in ("write", "read"):
            soon(driver, lambda step=step: f"{step}-passed" in topics(url))  # type: ignore[misc]
            killed = aside.shard.kill_leader()
            with mq.connect(url) as bus:
                bus.admin.create_topic(f"{step}-go")
            if step == "write":
                killed.start()
                killed = None
        assert ended(driver) == {"rows": revenue_job.TABLE, "different": revenue_job.TABLE}
        found = content(url, "table")
        assert (len(found), found.total()) == (revenue_job.TABLE, revenue_job.TABLE)
        assert undecided(url) == 0
    finally:
        kill_session(driver.pid)
        if killed is not None:
            killed.start()


PLANT = """\
import pathlib, sqlite3, sys
import escrowmq as mq
here = pathlib.Path(sys.argv[1])
here.mkdir(parents=True)
with mq.connect(f"file:{here / 'data'}") as bus:
    assert bus.producer("shop").send_batch([mq.Message("orders", b"", key=f"o-{n}") for n in range(9)]).ok
database = sqlite3.connect(here / "orders.db")
database.execute("CREATE TABLE orders (id TEXT PRIMARY KEY)")
database.execute(f"INSERT INTO orders VALUES ('o-1')")
database.commit()
"""


@pytest.mark.long
def test_what_lies_in_a_folder_of_the_driver_is_refused(aside: Apart) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    here = aside.folder / "sources"
    plant = [sys.executable, "-c", PLANT, str(here)]
    subprocess.run(plant, check=True)
    parquet.write_table(pa.table({"id": ["o-1"]}), here / "orders.parquet")
    words = [str(here / name) for name in ("data", "orders.db", "orders.parquet")]
    words.append(str(aside.folder / "found"))
    said = ended(started(aside, "refused", *words))
    lacks(said["data"], "NOT_A_DATA_FOLDER: .* has no data folder ", words[0])
    lacks(said["database"], "BAD_ARGUMENT: .* has no database ", words[1])
    lacks(said["file"], "BAD_ARGUMENT: a worker of the cluster has no file:/*", words[2])
    for worker in range(len(aside.hands.workers)):  # now each has its own, of the same name and with as much in it
        aside.in_worker(worker, *plant)
    said = ended(started(aside, "refused", *words))
    lacks(said["data"], "BAD_URL: file:", f"{words[0]} as .* for the driver it is")
    lacks(said["database"], "BAD_ARGUMENT: ", f"{words[1]} of .* is another file than that of the driver")


def lacks(said: object, begins: str, names: str) -> None:
    assert re.match(begins + names, str(said)), said
