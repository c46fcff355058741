"""A Spark cluster as on machines of its own: workers that see no folder of the driver's or of each other, HDFS, and a
shard behind failover.

The driver's programs run in ``folder`` and with their temporary files in it; to the workers it is empty.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import escrowmq as mq
from escrowmq.errors import EscrowError
from escrowmq.log.kafka.cluster.opening import create_topics
from escrowmq_lab.servers import escrow, hdfs
from escrowmq_lab.servers.process import Server, free_port
from escrowmq_lab.servers.spark import Cluster, cluster

PATIENCE = 600.0
"""Seconds in which something must happen."""
SETTINGS = {
    "spark.sql.shuffle.partitions": "2",
    "spark.executor.memory": "512m",
    "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:-UsePerfData",
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",  # both workers, from the first job on
}


def eventually(what: Callable[[], bool], why: Callable[[], str]) -> None:
    """Wait until something holds; what cannot be asked in the middle of a failover is asked again."""
    deadline = time.monotonic() + PATIENCE
    while True:
        with contextlib.suppress(EscrowError):
            if what():
                return
        assert time.monotonic() < deadline, why()
        time.sleep(0.02)


class Shard:
    """Two served brokers of one log on Kafka; ``url`` names both."""

    def __init__(self, folder: Path, kafka: str, stack: contextlib.ExitStack) -> None:
        topic = f"{kafka}/log-{uuid.uuid4().hex[:12]}"
        create_topics(f"{topic}?replication=1")
        ports = [free_port(), free_port()]
        self.url = "escrow://" + "|".join(f"127.0.0.1:{port}" for port in ports)
        options = ("--log", f"{topic}/0?replication=1", "--replicas", self.url)
        self.nodes = [stack.enter_context(escrow.serving(folder / str(port), *options, port=port)) for port in ports]
        eventually(lambda: self.leader() is not None, lambda: "nobody leads")

    def leader(self) -> Server | None:
        """The node that leads."""
        return next((node for node in self.nodes if _role(node) == "leader"), None)

    def kill_leader(self) -> Server:
        """``kill -9``, when the other one stands by."""
        roles: dict[str, Server] = {}

        def are_two() -> bool:
            roles.clear()
            roles.update((_role(node), node) for node in self.nodes)
            return sorted(roles) == ["leader", "standby"]

        eventually(are_two, lambda: "they are not two")
        roles["leader"].kill()
        return roles["leader"]


def _role(node: Server) -> str:
    try:
        with mq.connect(f"{node.url}?replicas=listed") as bus:
            return str(bus.router.links[0].action("hello", {}, 2.0).get("role"))
    except EscrowError:
        return "away"


@dataclass
class Strangers:
    """The cluster, and a folder of the driver's that no worker sees."""

    folder: Path
    hands: Cluster

    def start(self, *words: str, folder: Path | None = None, **streams: Any) -> subprocess.Popen[str]:
        """A Python program of the driver's, in a session of its own: ``words`` are what follows ``python``;
        ``streams``: others than nothing to read, and pipes for what it writes."""
        here = folder or self.folder
        temporary = self.folder / "tmp"
        temporary.mkdir(exist_ok=True)
        return subprocess.Popen(
            [sys.executable, *words],
            cwd=here,
            env={**os.environ, **self._paths(), "TMPDIR": str(temporary)},
            text=True,
            start_new_session=True,
            **{"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams},
        )

    def _paths(self) -> Mapping[str, str]:
        support = Path(__file__).parent
        paths = [str(support), str(support.parent / "spark"), os.environ.get("PYTHONPATH", "")]
        return {"PYTHONPATH": os.pathsep.join(paths)}

    def in_worker(self, worker: int, *command: str) -> None:
        """Run something that sees what a worker sees."""
        pid = str(self.hands.workers[worker].pid)
        users = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        subprocess.run(["nsenter", "--target", pid, *users, "--mount", *command], check=True)


class Talk:
    """A program of the driver's with one Spark session for many questions; its other end is :func:`answer`. What it
    complains of is in a file."""

    def __init__(self, strangers: Strangers, *words: str) -> None:
        self.log = strangers.folder.parent / f"talk-{uuid.uuid4().hex[:8]}.log"
        with self.log.open("w") as log:
            self._process = strangers.start(*words, stdin=subprocess.PIPE, stderr=log)

    def ask(self, act: str, *words: str) -> Any:
        """A question, and its answer."""
        self.say(act, *words)
        return self.hear()

    def say(self, act: str, *words: str) -> None:
        """A question."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([act, *words]) + "\n")
        self._process.stdin.flush()

    def hear(self) -> Any:
        """The next line that it says."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, self.log.read_text(errors="replace")[-4000:]
        return json.loads(line)

    def end(self) -> None:
        """End the session, which has all cores of the cluster as long as it lasts; once more does nothing."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        assert self._process.wait() == 0, self.log.read_text(errors="replace")[-4000:]


def answer(acts: Mapping[str, Callable[..., object]], *first: object) -> None:
    """Answer questions, a line each, until there are no more: by these functions, called with ``first`` and the words
    of the question."""
    for line in sys.stdin:
        act, *words = json.loads(line)
        print(json.dumps(acts[act](*first, *words)), flush=True)


@dataclass
class Apart(Strangers):
    """The same, and what is around it."""

    hdfs: str
    shard: Shard


@contextlib.contextmanager
def strangers(folder: Path, workers: int = 2) -> Iterator[Strangers]:
    """The cluster alone. Raises Absent where it cannot be had."""
    driver, at = folder / "hidden" / "driver", folder / "hidden" / "cluster"
    driver.mkdir(parents=True)
    at.mkdir()
    with cluster(at, workers, hidden=folder / "hidden") as hands:
        yield Strangers(driver, hands)


@contextlib.contextmanager
def apart(folder: Path, kafka: str) -> Iterator[Apart]:
    """All of it. Raises Absent where one of it cannot be had."""
    with contextlib.ExitStack() as stack:
        made = stack.enter_context(strangers(folder))
        name_node = stack.enter_context(hdfs.serving(folder / "hidden" / "hdfs"))
        shard = Shard(folder / "hidden" / "shard", kafka, stack)
        yield Apart(made.folder, made.hands, name_node.url, shard)
