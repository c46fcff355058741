"""Who is killed at which step of a batch, and what was true at that moment. A cell of the grid counts when both were
seen.

The steps are failpoints of the product, and one of the job: ``spark.committed`` is after the sink's commit has
returned, before Spark writes commits/N into the checkpoint.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from killing import POINTS, Broker, Leg, Stop

import escrowmq as mq
from escrowmq_lab.servers.spark import Cluster

STEPS = (*POINTS, "spark.committed")
LATE = ("spark.before-decision", "spark.after-decision", "spark.committed")
"""Where the process that stands still is the one that commits; at the others it is a task's."""
STATES = {int(state): state for state in mq.TransactionState}

EXECUTORS = {
    "executors": dict.fromkeys(STEPS[:4], "executor"),
    "executors-decided": {"spark.after-decision": "executor"},
    "executors-committed": {"spark.committed": "executor"},
}
"""Legs in which executors die. Those of a batch that die before its decision have no successors to kill after it."""
BROKERS = {"brokers": dict.fromkeys(STEPS, "broker")}
COMMITTERS = {"committers": dict.fromkeys(LATE, "committer")}
DRIVERS = {"drivers": dict.fromkeys(STEPS, "driver")}

Cell = tuple[str, str]
"""Who, and at which step."""


@dataclass(frozen=True)
class Seen:
    """How a batch stood when somebody was killed.

    ``planned`` and ``noted`` are the last of offsets/N and commits/N (-1: none), ``undecided`` how many rows of the
    query waited in escrow, ``visible`` how many rows of batch ``planned`` were to be seen in the topic, ``killed`` the
    processes that died.
    """

    planned: int
    noted: int
    undecided: int
    visible: int
    killed: tuple[int, ...] = ()

    def fits(self, step: str) -> bool:
        """Whether this is what must be true at a step."""
        running = self.planned > self.noted
        match step:
            case "spark.before-prepare":
                return running and not self.visible
            case "spark.prepared-some" | "spark.prepared" | "spark.before-decision":
                return running and not self.visible and self.undecided > 0
            case _:
                return running and self.visible > 0


class Grid:
    """The cells that were reached, by who and step."""

    def __init__(self, broker: Broker, cluster: Cluster | None = None) -> None:
        self.broker, self.cluster = broker, cluster
        self.reached: dict[Cell, Seen] = {}
        self._killers: Mapping[str, Callable[[Stop], list[int]]] = {
            "executor": self._executor,
            "driver": self._driver,
            "broker": self._broker,
            "committer": self._committer,
        }

    def legs(self, named: Mapping[str, Mapping[str, str]]) -> list[Leg]:
        """A leg for each topic."""
        return [self.leg(topic, who) for topic, who in named.items()]

    def leg(
        self, topic: str, who: Mapping[str, str], after: Callable[[Stop], None] | None = None, what: str = "watched"
    ) -> Leg:
        """A query in which, at each step in ``who``, the one named there is killed. ``after`` is called then, too."""

        def kill(stop: Stop) -> None:
            cell = (who[stop.point], stop.point)
            assert cell not in self.reached
            assert alive(stop.pid)
            seen = look(self.broker.url, stop)
            killed = self._killers[cell[0]](stop)
            assert killed, f"nobody to kill: {cell}"
            wait_until(lambda: not any(map(alive, killed)))
            self.reached[cell] = Seen(seen.planned, seen.noted, seen.undecided, seen.visible, tuple(killed))
            if after is not None:
                after(stop)

        return Leg(topic, tuple(who), kill, what)

    def check(self, cells: set[Cell]) -> None:
        """Exactly these cells were reached, each when it was that step's time."""
        assert set(self.reached) == cells
        wrong = {cell: seen for cell, seen in self.reached.items() if not seen.fits(cell[1])}
        assert not wrong, wrong

    def _executor(self, stop: Stop) -> list[int]:
        """Of the task that stands still; later, of the tasks of the batch, which have ended. Without a cluster: their
        Python processes."""
        tasks = [stop.pid]
        if stop.point in LATE:
            batch = last(stop.job.checkpoint(stop.leg) / "offsets")
            mine = [
                entry["pid"] for entry in stop.job.attempts(stop.leg) if entry["batch"] == batch and entry.get("ids")
            ]
            tasks = [pid for pid in mine if alive(pid)]
        if self.cluster is None:
            return kill(tasks)
        executors = [pid for pid in map(self.cluster.kill_executor, tasks) if pid]
        if executors or stop.point not in LATE:
            return executors + kill(tasks)  # these would notice its death by themselves, later
        return [pid for pid in [self.cluster.kill_executor()] if pid]  # the processes of the tasks have ended already

    def _driver(self, stop: Stop) -> list[int]:
        """All that belongs to it; on a cluster, executors that lose their driver end."""
        stop.job.kill_driver()
        if self.cluster is not None:
            wait_until(lambda: not self.cluster.executors)
            kill([stop.pid])  # its daemon would end it, later
        return [stop.job.driver.pid, stop.pid]

    def _broker(self, stop: Stop) -> list[int]:
        pid = self.broker.process.pid
        self.broker.kill_and_start()
        return [pid]

    def _committer(self, stop: Stop) -> list[int]:
        """The driver's Python process that commits."""
        assert stop.point in LATE
        return kill([stop.pid])


def cells(named: Mapping[str, Mapping[str, str]]) -> set[Cell]:
    """Of these legs."""
    return {(name, step) for who in named.values() for step, name in who.items()}


def look(url: str, stop: Stop) -> Seen:
    """How the batch stands that a process of it stands still in."""
    checkpoint = stop.job.checkpoint(stop.leg)
    planned, noted = last(checkpoint / "offsets"), last(checkpoint / "commits")
    of_batch = set(chain(*(entry.get("ids", []) for entry in stop.job.attempts(stop.leg) if entry["batch"] == planned)))
    with mq.connect(url) as bus:
        half = bus.admin.read("%half", columns=["topic", "transaction", "state"]).read_all()
    rows = zip(*(half[name].to_pylist() for name in ("topic", "transaction", "state")), strict=True)
    mine = [(identity.hex(), STATES[state]) for topic, identity, state in rows if topic == stop.leg.topic]
    undecided = sum(state is mq.TransactionState.OPEN for _, state in mine)
    visible = sum(state is mq.TransactionState.COMMITTED and identity in of_batch for identity, state in mine)
    return Seen(planned, noted, undecided, visible)


def last(folder: Path) -> int:
    """The number of the newest file of a checkpoint's log, -1 if it has none."""
    return max((int(file.name) for file in folder.glob("*") if file.name.isdecimal()), default=-1)


def kill(processes: list[int]) -> list[int]:
    """``kill -9``; those that lived."""
    living = [pid for pid in dict.fromkeys(processes) if alive(pid)]
    for pid in living:
        os.kill(pid, signal.SIGKILL)
    return living


def alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be buried does not (Linux)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def processes() -> str:
    """All that run, with parents and state, for whoever must find out why something did not end."""
    return subprocess.run(["ps", "-eo", "pid,ppid,stat,args", "--cols", "200"], capture_output=True, text=True).stdout


def wait_until(holds: Callable[[], bool], patience: float = 120.0) -> None:
    """Poll, with a deadline."""
    deadline = time.monotonic() + patience
    while not holds():
        assert time.monotonic() < deadline, processes()
        time.sleep(0.02)
