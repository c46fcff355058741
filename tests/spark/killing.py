"""A broker, a topic of orders, and Spark jobs in processes of their own that are killed wherever a test says."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import escrowmq as mq
from escrowmq_lab.servers.process import free_port
from forked import Forked

PREPARING = ("spark.before-prepare", "spark.prepared-some", "spark.prepared")
DECIDING = ("spark.before-decision", "spark.after-decision")
POINTS = PREPARING + DECIDING
PATIENCE = 1200.0
"""Seconds in which something must happen: a point reached, a leg at its end, a driver started."""
JOB = Path(__file__).with_name("revenue_job.py")
PATH = [str(JOB.parent), str(JOB.parents[1] / "support")]
"""Where the job finds what it imports."""
ORDERS = 240
LOCAL = {"spark.sql.shuffle.partitions": "2", "spark.speculation": "true"}
"""Speculation is on, but a local master never speculates."""

Content = Counter[tuple[str, bytes]]


class Broker:
    """A served broker that can be killed and started again on the same port."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder, self.url, self.options = folder, f"escrow://127.0.0.1:{free_port()}", options
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "escrowmq", "serve", "--folder", str(self.folder), "--json", *self.options]
        self.process = Forked(
            [*command, "--listen", self.url.removeprefix("escrow://")], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        assert json.loads(self.process.stdout.readline())["url"] == self.url

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def kill_and_start(self, *_: object) -> None:
        self.kill()
        self.start()


@contextlib.contextmanager
def orders_broker(folder: Path, *options: str) -> Iterator[Broker]:
    """A broker with the orders in it."""
    broker = Broker(folder, *options)
    try:
        messages = [mq.Message("orders", json.dumps(body).encode(), key=f"o-{n}") for n, body in enumerate(orders())]
        with mq.connect(broker.url) as bus:
            assert bus.producer("shop").send_batch(messages).ok
        yield broker
    finally:
        broker.kill()


def orders(seed: int = 7) -> list[dict[str, str | int]]:
    """Orders of a few countries, six a minute, in the order of their times."""
    dice = random.Random(seed)
    return [
        {
            "country": dice.choice(["France", "Norway", "Japan"]),
            "at": f"2026-01-31T12:{number // 6:02}:{number % 6 * 10:02}Z",
            "cents": dice.randrange(1, 10_000),
        }
        for number in range(ORDERS)
    ]


def revenue() -> Content:
    """What the job must make of the orders, by a plain program: all minutes that were over for its watermark."""
    found: dict[tuple[str, str], list[int]] = {}
    for order in orders():
        found.setdefault((str(order["country"]), str(order["at"])[11:16]), []).append(int(order["cents"]))
    last = max(minute for _, minute in found)
    return Counter(
        (f"{country}|{minute}", json.dumps(body, separators=(",", ":")).encode())
        for (country, minute), cents in found.items()
        if int(minute[3:]) < int(last[3:]) - 1
        for body in [{"country": country, "cents": sum(cents), "orders": len(cents)}]
    )


@dataclass(frozen=True)
class Stop:
    """A process (its number) of a leg stands still at a point."""

    job: Job
    leg: Leg
    point: str
    pid: int


def kill_who_stands_there(stop: Stop) -> None:
    """``kill -9``."""
    os.kill(stop.pid, signal.SIGKILL)


@dataclass(frozen=True)
class Leg:
    """One run of a query: its topic, where its processes are killed and how, and what it is (see revenue_job.WHATS).

    ``kill`` is called when a process stands still at a point; after it the process may go on, if it lives, as soon as
    what ``kill`` returned (if that is a function) holds. ``once``: it is not tried again when it fails.
    """

    topic: str
    points: tuple[str, ...] = ()
    kill: Callable[[Stop], Callable[[], bool] | None] = kill_who_stands_there
    what: str = "stream"
    once: bool = False


class Job:
    """Legs one after the other: one driver, or one driver after the other on the same checkpoints."""

    def __init__(
        self,
        folder: Path,
        url: str,
        *legs: Leg,
        master: str = "local[2,4]",
        settings: Mapping[str, str] = LOCAL,
    ) -> None:
        self.folder, self.url, self.legs, self.starts = folder, url, legs, 0
        self.spec = folder / "spec.json"
        self._standing: list[tuple[Path, Callable[[], bool]]] = []
        told = []
        for leg in legs:
            self.told(leg).mkdir(parents=True)
            told.append({"topic": leg.topic, "points": leg.points, "told": str(self.told(leg))})
            told[-1] |= {"what": leg.what, "once": leg.once}
        spec = {"url": url, "folder": str(folder), "master": master, "settings": settings, "legs": told}
        self.spec.write_text(json.dumps(spec))

    def told(self, leg: Leg) -> Path:
        """Where the processes of a leg say that they stand still, and what they did."""
        return self.folder / f"told-{leg.topic}"

    def attempts(self, leg: Leg) -> list[dict[str, Any]]:
        """What the tasks of a watched leg noted, in order: an entry when an attempt began, one when all its rows were
        prepared."""
        file = self.told(leg) / "attempts.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def checkpoint(self, leg: Leg) -> Path:
        """Where Spark keeps how far a leg's query is."""
        return self.folder / f"checkpoint-{leg.topic}"

    def tries(self, leg: Leg) -> int:
        """How often the leg was tried by its last driver."""
        return int((self.folder / f"tries-{leg.topic}").read_text())

    def run(self) -> None:
        """To the end, with a new driver whenever one died. Fails if nothing happens for long, or a point was never
        reached."""
        waiting = [(leg, point) for leg in self.legs for point in leg.points]
        while True:
            self._start()
            try:
                self._watch(waiting)
            finally:
                self.kill_driver()
            if self.driver.returncode == 0:
                break
            assert self.driver.returncode == -signal.SIGKILL, self.log()
            self._let_go(lambda: True)
            self._forget(waiting)
        assert not waiting, f"never reached: {waiting}\n{self.log()}"

    def log(self) -> str:
        """The end of what the last driver printed."""
        return self._log().read_text(errors="replace")[-4000:]

    def kill_driver(self) -> None:
        """``kill -9`` for everything that belongs to the driver: Python, Java, and their children."""
        kill_session(self.driver.pid)
        self.driver.wait()

    def _log(self) -> Path:
        return self.folder / f"driver-{self.starts}.log"

    def _start(self) -> None:
        self.starts += 1
        with self._log().open("wb") as log:
            self.driver = subprocess.Popen(
                [sys.executable, str(JOB), str(self.spec)],
                env={**os.environ, "PYTHONPATH": os.pathsep.join([*PATH, os.environ.get("PYTHONPATH", "")])},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _watch(self, waiting: list[tuple[Leg, str]]) -> None:
        """Until the driver is dead."""
        seen, deadline = None, 0.0
        while self.driver.poll() is None:
            for leg, point in list(waiting):
                if (file := self.told(leg) / point).exists():
                    waiting.remove((leg, point))
                    holds = leg.kill(Stop(self, leg, point, int(file.read_text())))
                    self._standing.append((file, holds or (lambda: True)))
                    break  # if that was the driver, who else stands still has gone with it
            self._let_go(None)
            if (now := self._progress(waiting)) != seen:
                seen, deadline = now, time.monotonic() + PATIENCE
            assert time.monotonic() < deadline, f"no end; still to come: {waiting}\n{self.log()}"
            time.sleep(0.02)

    def _progress(self, waiting: list[tuple[Leg, str]]) -> tuple[int, ...]:
        """Changes whenever something happens: a point reached, a batch done, a leg at its end."""
        return (
            len(waiting),
            len(self._standing),
            *(len(list(self.folder.glob(of))) for of in ("tries-*", "*/commits/*")),
        )

    def _let_go(self, always: Callable[[], bool] | None) -> None:
        """Those that stood still long enough."""
        for file, holds in list(self._standing):
            if (always or holds)():
                self._standing.remove((file, holds))
                file.unlink()

    def _forget(self, waiting: list[tuple[Leg, str]]) -> None:
        """Processes that stood still, too, when their driver was killed: the next driver's shall come to the same
        places."""
        for leg, point in waiting:
            if (file := self.told(leg) / point).exists():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(file.read_text()), signal.SIGKILL)
                file.unlink()
            (self.told(leg) / f"{point}.told").unlink(missing_ok=True)


def kill_session(session: int) -> None:
    """``kill -9`` for all processes of a session (Linux)."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if int((entry / "stat").read_text().rpartition(")")[2].split()[3]) == session:
                    os.kill(int(entry.name), signal.SIGKILL)
            except (OSError, ValueError):
                continue


def content(url: str, topic: str) -> Content:
    """Everything in a topic, by id and content."""
    with mq.connect(url) as bus:
        rows = bus.admin.read(topic, columns=["key", "body"]).read_all()
        return Counter(zip(rows["key"].to_pylist(), rows["body"].to_pylist(), strict=True))


def losers(url: str, topic: str) -> int:
    """How many rows of a topic were put into escrow in vain; all that were not, are decided too."""
    with mq.connect(url) as bus:
        assert bus.admin.transactions(state="undecided") == []
        half = bus.admin.read("%half", columns=["topic", "transaction"]).read_all()
        op = bus.admin.read("%op", columns=["transaction", "state"]).read_all()
    state = dict(zip(op["transaction"].to_pylist(), op["state"].to_pylist(), strict=True))
    mine = [
        one for one, of in zip(half["transaction"].to_pylist(), half["topic"].to_pylist(), strict=True) if of == topic
    ]
    return sum(state[one] == mq.TransactionState.ROLLED_BACK for one in mine)
