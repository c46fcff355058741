"""A query with a pattern of topics, limits of bytes and rows, and purged ranges: whoever is killed at whatever step,
each row comes once, or is named as skipped.

At the first kill of each query a topic of it loses all but its newest message, and another topic comes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from killing import Broker, Job, Leg, Stop, content, losers
from killing_grid import BROKERS, COMMITTERS, DRIVERS, EXECUTORS, Grid, cells

import escrowmq as mq

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]

ROWS = 60
WHO = {"executors": EXECUTORS["executors"], **BROKERS, **COMMITTERS}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    made = Broker(tmp_path_factory.mktemp("kills") / "data", "--check-interval", "1s", "--check-max", "1000")
    try:
        yield made
    finally:
        made.kill()


def fill(url: str, topic: str) -> None:
    """Rows of ten bytes, each of a time of its own, in one queue: key and offset are the same number."""
    with mq.connect(url) as bus:
        bus.admin.create_topic(topic, 1)
        producer = bus.producer("filler")
        for number in range(ROWS):
            producer.send(topic, b"%010d" % number, key=str(number))


def leg(grid: Grid, topic: str, who: dict[str, str]) -> Leg:
    def change(stop: Stop) -> None:
        if len(grid.reached) == 1:
            with mq.connect(grid.broker.url) as bus:
                bus.admin.alter_topic(f"{topic}.lossy", retention_size=1)
            fill(grid.broker.url, f"{topic}.new")

    for name in ("lossy", "whole"):
        fill(grid.broker.url, f"{topic}.{name}")
    return grid.leg(topic, who, change, "copy")


def check(grid: Grid, job: Job, made: Leg, who: dict[str, str]) -> None:
    grid.check(cells({made.topic: who}))
    found = content(grid.broker.url, made.topic)
    assert set(found.values()) == {1}
    lost, total = skipped(job.checkpoint(made))
    assert 0 < total == sum(lost.values()) < ROWS
    every = {f"{made.topic}.{name}/{number}" for name in ("lossy", "whole", "new") for number in range(ROWS)}
    assert {key for key, _ in found} | set(lost) == every
    assert {key for key, _ in found}.isdisjoint(lost)
    assert all(body == b"%010d" % int(key.rpartition("/")[2]) for key, body in found)
    losers(grid.broker.url, made.topic)


def skipped(checkpoint: Path) -> tuple[Counter[str], int]:
    """What the checkpoint names as skipped, as keys of rows, and what it counts."""
    ends = [json.loads(file.read_text().splitlines()[-1]) for file in (checkpoint / "offsets").glob("[0-9]*")]
    notes = {(*name.split(" skipped "), at) for end in ends for name, at in end.items() if " skipped " in name}
    keys = Counter(f"{name.split('/')[0]}/{at}" for name, first, stop in notes for at in range(int(first), stop))
    return keys, max(end.get(" skipped", 0) for end in ends)


def test_one_is_killed_at_each_step(broker: Broker, tmp_path: Path) -> None:
    grids = {f"copy-{who}": Grid(broker) for who in WHO}
    legs = [leg(grids[f"copy-{who}"], f"copy-{who}", steps) for who, steps in WHO.items()]
    job = Job(tmp_path, broker.url, *legs)
    job.run()
    assert job.starts == 1
    for made, steps in zip(legs, WHO.values(), strict=True):
        check(grids[made.topic], job, made, steps)


@pytest.mark.long  # seven drivers, one after the other
def test_the_driver_is_killed_at_each_step(broker: Broker, tmp_path: Path) -> None:
    grid, steps = Grid(broker), DRIVERS["drivers"]
    made = leg(grid, "copy-drivers", steps)
    job = Job(tmp_path, broker.url, made)
    job.run()
    assert job.starts == len(steps) + 1
    check(grid, job, made, steps)
