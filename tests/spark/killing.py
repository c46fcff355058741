"""A broker, a topic of orders, and a streaming job in processes of its own that is killed wherever a test says."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import escrowmq as mq
from escrowmq.testing.servers.process import free_port

POINTS = (
    "spark.before-prepare",
    "spark.prepared-some",
    "spark.prepared",
    "spark.before-decision",
    "spark.after-decision",
)
PATIENCE = 240.0
JOB = Path(__file__).with_name("revenue_job.py")
ORDERS = 480


class Broker:
    """A served broker that can be killed and started again on the same port."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.url = folder, f"escrow://127.0.0.1:{free_port()}"
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "escrowmq", "serve", "--folder", str(self.folder), "--json"]
        self.process = subprocess.Popen(
            [*command, "--listen", self.url.removeprefix("escrow://")], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        assert json.loads(self.process.stdout.readline())["url"] == self.url

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def kill_and_start(self) -> None:
        self.kill()
        self.start()


def fill(url: str, orders: int = ORDERS, seed: int = 7) -> None:
    """Orders of a few countries, twelve a minute."""
    dice = random.Random(seed)
    messages = []
    for number in range(orders):
        at = f"2026-01-31T12:{number // 12:02}:{dice.randrange(60):02}Z"
        body = {"country": dice.choice(["France", "Norway", "Japan"]), "at": at, "cents": dice.randrange(1, 10_000)}
        messages.append(mq.Message("orders", json.dumps(body).encode(), key=f"o-{number}"))
    with mq.connect(url) as bus:
        assert bus.producer("shop").send_batch(messages).ok


class Job:
    """The streaming job: one driver after the other on one checkpoint."""

    def __init__(self, folder: Path, url: str, topic: str, master: str = "local[2,4]") -> None:
        self.folder, self.url, self.topic, self.master = folder, url, topic, master
        self.told = folder / f"told-{topic}"
        self.told.mkdir(parents=True)
        self.starts = 0

    def start(self, points: tuple[str, ...]) -> subprocess.Popen[bytes]:
        self.starts += 1
        environment = {**os.environ, "PYTHONPATH": str(JOB.parent)}
        if points:
            environment |= {"ESCROWMQ_FAILPOINT": ",".join(points), "ESCROWMQ_FAILPOINT_TELL": str(self.told)}
        checkpoint = str(self.folder / f"checkpoint-{self.topic}")
        with (self.folder / f"{self.topic}-{self.starts}.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, str(JOB), self.url, checkpoint, self.master, self.topic],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def run(self, points: tuple[str, ...] = (), act: Callable[[int, str], None] = lambda pid, point: None) -> None:
        """Run to the end, restarting whenever the driver ends badly. ``act`` is called when a process stands still at a
        point, with its number; after it the process may go on, if it lives."""
        waiting = list(points)
        deadline = time.monotonic() + PATIENCE
        while True:
            process = self.start(points)
            try:
                while process.poll() is None:
                    for point in list(waiting):
                        if (file := self.told / point).exists():
                            waiting.remove(point)
                            act(int(file.read_text()), point)
                            file.unlink()
                    assert time.monotonic() < deadline, f"no end; still to come: {waiting}"
                    time.sleep(0.02)
            finally:
                kill_session(process.pid)
                process.wait()
            if process.returncode == 0:
                break
            assert self.starts <= len(points) + 1, (self.folder / f"{self.topic}-{self.starts}.log").read_text()[-3000:]
            for point in list(waiting):  # told just before the driver died
                if (file := self.told / point).exists():
                    waiting.remove(point)
                    file.unlink()
        assert not waiting, f"never reached: {waiting}"

    def kill_driver(self, pid: int, point: str) -> None:
        """``kill -9`` for everything that belongs to the driver: Python, Java, and their children."""
        kill_session(os.getsid(pid))


def kill_session(session: int) -> None:
    """``kill -9`` for all processes of a session (Linux)."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if int((entry / "stat").read_text().rpartition(")")[2].split()[3]) == session:
                    os.kill(int(entry.name), signal.SIGKILL)
            except (OSError, ValueError):
                continue


def content(url: str, topic: str) -> Counter[tuple[str, bytes]]:
    """Everything in a topic, by id and content."""
    with mq.connect(url) as bus:
        rows = bus.admin.read(topic).read_all()
        assert bus.admin.transactions(state="undecided") == []
        return Counter(zip(rows["key"].to_pylist(), rows["body"].to_pylist(), strict=True))
