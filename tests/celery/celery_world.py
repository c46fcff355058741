"""A broker for Celery, and real workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kombu import Connection

from escrowmq.broker.calls import Calls
from escrowmq.broker.serving.listening import listen_tcp
from escrowmq.broker.serving.server import Server
from escrowmq.broker.writer.engine import Engine
from escrowmq.log.commit_log import open_log
from escrowmq.platform.clock import now_us
from escrowmq.platform.disk import RealDisk
from escrowmq.settings import BrokerSettings
from escrowmq.testing.clock import SimulatedClock

HERE = Path(__file__).parent
PATIENT = 120.0
"""Seconds after which something that should happen has surely not happened."""


def until(ready: Callable[[], object], what: str) -> None:
    """Look until something is so."""
    ended = threading.Event()
    for _ in range(int(PATIENT * 50)):
        if ready():
            return
        ended.wait(0.02)
    raise AssertionError(f"it did not come to that: {what}")


class Workers:
    """Worker processes of ``tasks_app``, and what they have told."""

    def __init__(self, folder: Path, url: str, **options: Any) -> None:
        self.folder, self.url, self.options = folder, url, options
        self.told_file = folder / "told"
        self.told_file.touch()
        self.running: list[subprocess.Popen[bytes]] = []

    def environment(self, **conf: Any) -> dict[str, str]:
        conf = {"broker_transport_options": self.options, "broker_connection_timeout": PATIENT, **conf}
        paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
        own = {"PYTHONPATH": os.pathsep.join(paths), "BROKER_URL": self.url, "TOLD": str(self.told_file)}
        return {**os.environ, **own, "CELERY_CONF": json.dumps(conf)}

    def start(self, pool: str = "solo", concurrency: int = 1, *more: str, **conf: Any) -> subprocess.Popen[bytes]:
        name = f"w{len(self.running)}@here"
        command = [sys.executable, "-m", "celery", "-A", "tasks_app", "worker", "-n", name, "-P", pool, "-l", "INFO"]
        with (self.folder / f"{name}.log").open("wb") as log:
            worker = subprocess.Popen(
                [*command, "-c", str(concurrency), *more],
                env=self.environment(**conf),
                cwd=self.folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.running.append(worker)
        return worker

    def log(self, number: int = 0) -> str:
        return (self.folder / f"w{number}@here.log").read_text()

    def wait_until_ready(self, number: int = 0) -> None:
        until(lambda: " ready." in self.log(number), "a worker that is ready")

    def kill(self, worker: subprocess.Popen[bytes]) -> None:
        """Kill a worker with its pool."""
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()

    def told(self) -> list[str]:
        return self.told_file.read_text().splitlines()

    def wait_for(self, *lines: str) -> None:
        until(lambda: set(lines) <= set(self.told()), f"{lines} of {self.told()}")

    def close(self) -> None:
        for worker in self.running:
            if worker.poll() is None:
                self.kill(worker)


class TimedBroker:
    """A served broker in the test's process, whose time the test moves on."""

    def __init__(self, folder: Path) -> None:
        self.clock = SimulatedClock(now_us())
        settings = BrokerSettings(segment_bytes=1 << 22)
        log = open_log(RealDisk(folder), segment_bytes=settings.segment_bytes, clock=self.clock)
        self.engine = Engine(log, self.clock, settings)
        self.engine.start()
        self.calls = Calls(self.engine)
        listener = listen_tcp("127.0.0.1", 0)
        self.url = f"escrow://127.0.0.1:{listener.getsockname()[1]}"
        self.server = Server(self.calls, [listener], "test")
        self.server.start()

    def deadlines(self, group: str) -> list[int]:
        """When the leases of a group end, in microseconds."""
        members = self.calls.action("groups.members", {"group": group})["members"]
        return [held["deadline_us"] for member in members for held in member["held"]]

    def stop(self) -> None:
        self.engine.stop()
        self.calls.close()
        self.server.stop(0.25)


@contextmanager
def connected(url: str, **options: Any) -> Iterator[Connection]:
    with Connection(url, transport_options=options) as connection:
        yield connection
