"""The brokers of a run: one with its log in a folder, or a leader and a standby with their log in the demo's own Kafka.
Both kinds have one interface: the configuration of each broker, its addresses, and which one may be killed now."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from socket import create_server
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from escrowmq.demo.processes import ChildEvent
from escrowmq.errors import Code, Misuse, Unknown
from escrowmq.log.kafka.cluster.opening import create_topics, open_partitions
from escrowmq.log.kafka.copying import Copied, to_folder
from escrowmq.pipeline.java import find_java
from escrowmq.platform.disk import RealDisk
from escrowmq.platform.extras import missing_package

LOG = "broker"
"""Folder of the log in the run folder, after the run."""
KAFKA = "kafka"
"""Accepted value of ``--log``."""
_TOPIC = "demo"
_SETTINGS = {"broker.session.timeout.ms": "9000"}
"""Kafka's own default: it is not killed here, and on a busy machine it may be slow for seconds."""


class News(NamedTuple):
    """News for the user: an event of the diary (:mod:`escrowmq.pipeline.audit.events`), and a line (rich markup)."""

    event: str
    who: str
    line: str
    facts: dict[str, Any]


class OneBroker:
    """One broker, with its log in the run folder. ``victim`` is the broker that may be killed now, ``where`` describes
    the moment of the kill, and ``url`` is for the other processes."""

    names: tuple[str, ...] = ("broker",)
    description = "broker"
    victim: str | None = "broker"
    where = "while it ran"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = 0
        self.url = ""

    def is_ready(self, name: str) -> bool:
        """Decide whether it has listened once: other processes wait for an unreachable broker."""
        return bool(self.url)

    def config(self, name: str) -> dict[str, Any]:
        """Return a configuration with any free port at first, and the same port after a kill."""
        return {"folder": str(self._folder / LOG), "port": self._port}

    def on_killed(self, name: str, at_us: int) -> None:
        """Do nothing: the broker is started again."""

    def on_event(self, event: ChildEvent) -> News | None:
        """Store the address on which it listens."""
        if event.kind == "ready" and event.child.name in self.names:
            self.url = event.details["url"]
            self._port = int(self.url.rpartition(":")[2])
        return None


class LeaderAndStandby:
    """Two brokers that share a log at ``address`` in Kafka, with the interface of OneBroker. The leader is killed when
    the other one can take over. A failover ends when an order that began after the kill is placed: the new leader has
    answered it."""

    names: tuple[str, ...] = ("broker-a", "broker-b")
    description = "two brokers with their log on Kafka"
    where = "while it led"

    def __init__(self, folder: Path, address: str) -> None:
        self._folder, self._address = folder, address
        self._ports = dict(zip(self.names, _free_ports(), strict=True))
        self._leader: str | None = None
        self._epoch = 0
        self._listen: set[str] = set()
        self._killed: dict[str, int] = {}  # time of the kill, microseconds since 1970
        self._failover_us: int | None = None  # the kill that began the current failover
        self._orders = True  # whether more orders follow

    @property
    def url(self) -> str:
        """``escrow://A|B``: clients find the leader."""
        return "escrow://" + "|".join(f"127.0.0.1:{port}" for port in self._ports.values())

    def is_ready(self, name: str) -> bool:
        """Decide whether it follows or leads, and a leader exists."""
        return name in self._listen and self._leader is not None

    @property
    def victim(self) -> str | None:
        """The leader, if the other broker follows and the last failover is over."""
        return self._leader if self._failover_us is None and all(map(self.is_ready, self.names)) else None

    def config(self, name: str) -> dict[str, Any]:
        """Return the configuration for ``escrowmq serve --log ... --replicas ...``."""
        replicas = [f"escrow://127.0.0.1:{port}" for port in self._ports.values()]
        folder = str(self._folder / name)
        return {"folder": folder, "port": self._ports[name], "log": self._address, "replicas": replicas}

    def on_killed(self, name: str, at_us: int) -> None:
        """Record that the leader was killed."""
        self._listen.discard(name)
        self._leader, self._failover_us, self._killed[name] = None, at_us, at_us

    def on_event(self, event: ChildEvent) -> News | None:
        """Track which brokers listen, which one leads, and the first order after a failover."""
        name = event.child.name
        match event.kind:
            case "ready" if name in self.names:
                self._listen.add(name)
                if name in self._killed and name != self._leader:
                    return News("follows", name, f"{name} is back, and follows", {})
            case "leads":
                return self._on_leader(name, event)
            case "placed" if self._failover_us is not None and event.details["begun_us"] >= self._failover_us:
                seconds = self._seconds_since_kill(event.at_us)
                self._failover_us = None
                line = f"first order begun after the kill: placed [bold]{seconds:.2f} s[/] after it"
                return News("answered", self._leader or name, line, {"seconds": seconds})
            case "done":
                self._orders = False
                if self._leader is not None:
                    self._failover_us = None
        return None

    def _on_leader(self, name: str, event: ChildEvent) -> News | None:
        epoch = event.details["epoch"]
        if epoch < self._epoch:
            return None  # a late report: it no longer leads
        self._leader, self._epoch = name, epoch
        if self._failover_us is None:
            (other,) = (one for one in self.names if one != name)
            return News("leads", name, f"[bold]{name} leads[/], {other} follows", {"epoch": epoch})
        seconds = self._seconds_since_kill(event.at_us)
        if not self._orders:
            self._failover_us = None
        line = f"[bold]{name} leads[/] (epoch {epoch}), {seconds:.2f} s after the kill"
        return News("leads", name, line, {"epoch": epoch, "seconds": seconds})

    def _seconds_since_kill(self, at_us: int) -> float:
        return round((at_us - (self._failover_us or at_us)) / 1e6, 3)


Brokers = OneBroker | LeaderAndStandby


def check_kafka() -> None:
    """Check the requirements of the demo's own Kafka before anything starts; Kafka itself is downloaded if needed.
    Raises Misuse(MISSING_PACKAGE) that names what to install."""
    if find_spec("confluent_kafka") is None:
        raise missing_package("confluent_kafka", "a log in Kafka")
    try:
        find_java()
    except Misuse as problem:
        raise Misuse(Code.MISSING_PACKAGE, f"Kafka: {problem.message}", problem.hint) from None
    if find_spec("escrowmq_lab") is None:
        raise missing_package("escrowmq_lab", "a Kafka of the demo's own")
    from escrowmq_lab.servers import kafka
    from escrowmq_lab.servers.seam import Absent

    try:
        kafka.libraries()
    except Absent as absent:
        raise _missing_package(absent) from None


@contextmanager
def run_kafka(folder: Path) -> Iterator[str]:
    """Run a Kafka of one node with the topics of a log; yields the log's address. Its data are deleted; its output is
    kept in ``nodes/kafka.log`` of the run folder. Raises Misuse(MISSING_PACKAGE), Unknown(DISCONNECTED) if it does not
    start."""
    from escrowmq_lab.servers import kafka
    from escrowmq_lab.servers.seam import Absent

    with TemporaryDirectory(prefix="escrowmq-kafka-") as data, ExitStack() as stack:
        # Not in the run folder: Kafka does not accept every folder name.
        stack.callback(_copy_output, Path(data) / "kafka.log", folder / "nodes" / "kafka.log")
        try:
            server = stack.enter_context(kafka.serving(Path(data), settings=_SETTINGS))
        except Absent as absent:
            raise _missing_package(absent) from None
        except RuntimeError as problem:
            raise Unknown(Code.DISCONNECTED, f"Kafka: {problem}", "the demo runs without it, too") from None
        address = f"{server.url}/{_TOPIC}?replication=1"
        create_topics(address)
        yield address


def copy_log(address: str, folder: Path) -> Copied:
    """Copy the log out of Kafka after the brokers have ended, so that the run folder contains it."""
    return to_folder(open_partitions(address), RealDisk(folder / LOG))


def _free_ports() -> tuple[int, int]:
    with create_server(("127.0.0.1", 0)) as one, create_server(("127.0.0.1", 0)) as other:
        return one.getsockname()[1], other.getsockname()[1]


def _missing_package(absent: Exception) -> Misuse:
    return Misuse(Code.MISSING_PACKAGE, str(absent), "without --log the demo runs on one broker, and needs no Kafka")


def _copy_output(printed: Path, kept: Path) -> None:
    if printed.exists():
        kept.parent.mkdir(exist_ok=True)
        shutil.copyfile(printed, kept)
