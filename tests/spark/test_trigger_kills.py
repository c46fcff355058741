"""Queries with each option that chooses what a micro-batch has: their driver is killed at each step of a batch, and
started again on the same checkpoints. Each row comes once, or is named as skipped.

While the driver is dead, new rows, a new topic of the pattern and a purge change what the next batch finds.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from killing import PATH, PATIENCE, Broker, content, kill_session, losers
from killing_grid import last
from option_streams import QUERIES, STEPS

import escrowmq as mq
from escrowmq.platform.failpoints import TELL_VARIABLE, VARIABLE

pytestmark = [pytest.mark.spark, pytest.mark.long, pytest.mark.timeout(1800)]

PROGRAM = Path(__file__).with_name("option_streams.py")
RUNNING = ("planned", "reading", "prepared", "deciding")
"""Steps at which a batch is in offsets/N, but neither decided nor in commits/N."""


class Drivers:
    """One driver after the other, each killed at a step; ``sent`` counts the rows of each topic."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url, folder
        self.sent: defaultdict[str, int] = defaultdict(int)
        self.stood: dict[tuple[str, str], tuple[int, int, int]] = {}
        """By step and query: the last of offsets/N, commits/N, and of the batches that the broker has decided."""
        self.twice: Counter[str] = Counter()
        """Rows that left the log between the decision of their batch and its repeat."""

    def send(self, bus: mq.Bus, topic: str, rows: int) -> None:
        """Send rows one by one to a topic with one queue: key and offset are the same number."""
        bus.admin.create_topic(topic, 1, may_exist=True)
        for _ in range(rows):
            number = self.sent[topic]
            bus.producer("filler").send(topic, b"%010d" % number, key=str(number))
            self.sent[topic] += 1

    def change(self, number: int) -> None:
        """Send rows to every query, and purge all but one row of "purged.in"."""
        with mq.connect(self.url) as bus:
            for topic, rows in ("rows.in", 7), ("bytes.in", 12), ("pattern.0", 2), (f"pattern.{number}", 3):
                self.send(bus, topic, rows)
            self.send(bus, "purged.in", 4)
            if number:
                bus.admin.alter_topic("purged.in", retention_size=1)
                bus.admin.alter_topic("purged.in", retention_size="broker")
                [queue] = bus.admin.offsets("purged.in")
                assert queue["head"] == queue["end"] - 1
                self.note_decided(queue["head"])
            self.send(bus, "purged.in", 4)

    def note_decided(self, head: int) -> None:
        """Note the purged rows of a batch that the broker has decided, and Spark will repeat."""
        offsets = self.folder / "purged" / "offsets"
        if (number := last(offsets)) == last(offsets.parent / "commits") or "decided" not in next(
            reversed(self.stood), ""
        ):
            return
        first, stop = (read_end(offsets / str(at)) for at in (number - 1, number))
        self.twice.update(f"purged.in/{at}" for at in range(first, min(stop, head)))

    def start(self, step: str | None) -> subprocess.Popen[bytes]:
        """Start a driver that stands still at a step, in each query; None: it finishes."""
        told = self.folder / f"told-{step}"
        told.mkdir()
        points = {VARIABLE: ",".join(f"{step}.{query}" for query in QUERIES), TELL_VARIABLE: str(told)}
        path = os.pathsep.join([*PATH, os.environ.get("PYTHONPATH", "")])
        with (self.folder / f"driver-{step}.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, str(PROGRAM), self.url, str(self.folder), "" if step else "finish"],
                env={**os.environ, **(points if step else {}), "PYTHONPATH": path},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def kill_at(self, step: str) -> None:
        """Run a driver until each query stands at a step, and kill all its processes."""
        driver = self.start(step)
        log, deadline = self.folder / f"driver-{step}.log", time.monotonic() + PATIENCE
        try:
            with mq.connect(self.url) as bus:
                while missing := [
                    one for one in QUERIES if not (self.folder / f"told-{step}" / f"{step}.{one}").exists()
                ]:
                    assert driver.poll() is None, log.read_text(errors="replace")[-4000:]
                    assert time.monotonic() < deadline, f"{missing}: {log.read_text(errors='replace')[-4000:]}"
                    self.send(bus, "rows.in", 1)  # the query waits for some rows
                    time.sleep(0.1)
            for query in QUERIES:
                self.stood[step, query] = self.look(query)
        finally:
            kill_session(driver.pid)
            driver.wait()

    def finish(self) -> None:
        """Run a driver until all rows are copied."""
        driver = self.start(None)
        try:
            assert driver.wait(PATIENCE) == 0, (self.folder / "driver-None.log").read_text(errors="replace")[-4000:]
        finally:
            kill_session(driver.pid)

    def look(self, query: str) -> tuple[int, int, int]:
        checkpoint = self.folder / query
        name = json.loads((checkpoint / "metadata").read_text())["id"]
        with mq.connect(self.url) as bus:
            batches = [one["batch"] for one in bus.admin.writers() if one["group"] == f"spark.{name}"]
        return last(checkpoint / "offsets"), last(checkpoint / "commits"), max(batches, default=-1)


def read_end(file: Path) -> int:
    """The end of a batch of query "purged"; where the topic begins, before the first."""
    if not file.exists():
        return 0
    end = json.loads(file.read_text().splitlines()[-1])
    return next((at for name, at in end.items() if " " not in name), 0)


@pytest.fixture(scope="module")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drivers]:
    folder = tmp_path_factory.mktemp("kills")
    broker = Broker(folder / "data", "--check-interval", "1s", "--check-max", "1000")
    try:
        made = Drivers(broker.url, folder)
        for number, step in enumerate(STEPS):
            made.change(number)
            made.kill_at(step)
        made.change(len(STEPS))
        made.finish()
        yield made
    finally:
        broker.kill()


@pytest.mark.parametrize("query", QUERIES)
def test_each_step_was_reached_and_the_driver_killed_there(drivers: Drivers, query: str) -> None:
    for step in STEPS:
        planned, noted, decided = drivers.stood[step, query]
        expected = (1, 0) if step in RUNNING else (1, 1) if step == "decided" else (0, 0)
        assert (planned - noted, decided - noted) == expected, step
        assert planned >= 0


@pytest.mark.parametrize("query", QUERIES)
def test_each_row_comes_once_or_is_named(drivers: Drivers, query: str) -> None:
    """What is purged between the decision of a batch and its repeat is named, and was delivered. What a repeated batch
    lacked is in the next one's end, or in the log of the driver that repeated it."""
    found = content(drivers.url, f"{query}-copy")
    assert set(found.values()) == {1}
    topics = [topic for topic in drivers.sent if topic.startswith(f"{query}.")]
    assert len(topics) == (len(STEPS) + 1 if query == "pattern" else 1)
    every = {f"{topic}/{number}" for topic in topics for number in range(drivers.sent[topic])}
    came = {key for key, _ in found}
    assert all(body == b"%010d" % int(key.rpartition("/")[2]) for key, body in found)
    named = named_in_checkpoint(drivers.folder / query) | named_in_logs(drivers.folder, query)
    twice = came & set(drivers.twice) if query == "purged" else set()  # others had left before their batch was planned
    assert bool(named) == (query == "purged")
    assert came | named == every
    assert came & named == twice
    losers(drivers.url, f"{query}-copy")


def named_in_checkpoint(checkpoint: Path) -> set[str]:
    ends = [json.loads(file.read_text().splitlines()[-1]) for file in (checkpoint / "offsets").glob("[0-9]*")]
    notes = {(*name.split(" skipped "), at) for end in ends for name, at in end.items() if " skipped " in name}
    return {f"{name.split('/')[0]}/{at}" for name, first, stop in notes for at in range(int(first), stop)}


def named_in_logs(folder: Path, query: str) -> set[str]:
    text = "".join(file.read_text(errors="replace") for file in folder.glob("driver-*.log"))
    found = re.findall(rf"({query}\.\w+)/\S+: skipped \d+ offsets, (\d+) to (\d+):", text)
    return {f"{topic}/{at}" for topic, first, final in found for at in range(int(first), int(final) + 1)}
