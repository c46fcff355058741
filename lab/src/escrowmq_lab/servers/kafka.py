"""Kafka (KRaft) for tests: one node, or a cluster. Debian packages: ``maven`` and ``openjdk-17-jre-headless``. Debian
has no Kafka, so Maven downloads the packages of ``kafka-pom.xml`` once, into the user's cache folder."""

from __future__ import annotations

import base64
import contextlib
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from escrowmq.errors import Misuse
from escrowmq.pipeline.java import find_java
from escrowmq_lab.servers import maven
from escrowmq_lab.servers.process import Server, accepts, free_port, run, started
from escrowmq_lab.servers.seam import Absent

POM = Path(__file__).with_name("kafka-pom.xml")
JVM = ["-Xms128m", "-Xmx512m", "-XX:+UseSerialGC", "-Xshare:auto", "-XX:TieredStopAtLevel=1"]
"""A small Java: fast starts rather than long-term speed."""
ASK_VERSIONS = bytes.fromhex("0000000a 0012 0000 00000001 ffff")
"""An ApiVersions request, version 0, without a client id."""
ANY = bytes(range(256))


@dataclass(frozen=True, slots=True)
class Cluster:
    """Several nodes, each a broker and a controller. ``url`` names them all; node *n* has Kafka's number *n* + 1."""

    url: str
    nodes: list[Server]


def serving(
    folder: Path,
    *,
    durable: bool = False,
    beside: Sequence[tuple[str, int]] = (),
    settings: Mapping[str, str] | None = None,
) -> AbstractContextManager[Server]:
    """Run a server with its data in ``folder``; ``url`` is ``kafka://HOST:PORT``. ``durable`` syncs the log after every
    batch (by default Kafka relies on replicas). ``beside``: for each host and port it also listens on this port of
    127.0.0.1, and advertises this host there: a proxy's, whose traffic can be cut off. ``settings``: further properties
    of Kafka. Raises :class:`Absent`."""
    java, classes = _java(), libraries()
    node = _Node(1, folder, free_port(), free_port())
    node.write(
        {
            "controller.quorum.voters": node.voter,
            **_internal_topics(1),
            **({"log.flush.interval.messages": "1"} if durable else {}),
            **(settings or {}),
        },
        beside,
    )
    node.format(java, classes)
    return started(node.server(java, classes))


@contextlib.contextmanager
def cluster(
    folder: Path, nodes: int = 3, settings: Mapping[str, str] | None = None, jvm: Sequence[str] = JVM
) -> Iterator[Cluster]:
    """Run nodes with their data in ``folder``, started together. ``settings``: further Kafka properties for all of
    them. ``jvm``: Java's options. Topics get three replicas, of which two acknowledge, unless created otherwise.
    Timeouts are long, because a busy machine may delay nodes for seconds: tests set shorter ones themselves. At the end
    all nodes are killed. Raises :class:`Absent`."""
    java, classes = _java(), libraries()
    ports = _free_ports(2 * nodes)
    made = [_Node(n + 1, folder / f"node-{n + 1}", ports[2 * n], ports[2 * n + 1]) for n in range(nodes)]
    shared = {
        "controller.quorum.voters": ",".join(node.voter for node in made),
        **_internal_topics(nodes),
        "default.replication.factor": str(nodes),
        "min.insync.replicas": str(min(2, nodes)),
        "controller.quorum.fetch.timeout.ms": "6000",
        "controller.quorum.election.timeout.ms": "2000",
        **(settings or {}),
    }
    for node in made:
        node.write(shared, ())
    made[0].format(java, classes)
    for node in made[1:]:
        node.format_like(made[0])
    servers = [node.server(java, classes, jvm) for node in made]
    try:
        for server in servers:
            server.begin()
        for server in servers:
            server.wait()
        yield Cluster("kafka://" + ",".join(server.url.removeprefix("kafka://") for server in servers), servers)
    finally:
        for server in servers:
            server.kill()  # a stopping node waits for a quorum, which the last ones do not have


@dataclass(frozen=True, slots=True)
class _Node:
    """One node: its number, folder, and ports."""

    number: int
    folder: Path
    port: int
    controller: int

    @property
    def voter(self) -> str:
        return f"{self.number}@127.0.0.1:{self.controller}"

    @property
    def settings(self) -> Path:
        return self.folder / "kafka.properties"

    @property
    def data(self) -> Path:
        return self.folder / "kafka"

    def server(self, java: str, classes: Path, jvm: Sequence[str] = JVM) -> Server:
        return Server(
            url=f"kafka://127.0.0.1:{self.port}",
            command=[java, *jvm, *_logging("warn"), "-cp", f"{classes}/*", "kafka.Kafka", str(self.settings)],
            ready=lambda _: accepts(self.port, say=ASK_VERSIONS, hear=ANY),
            log=self.folder / "kafka.log",
        )

    def format(self, java: str, classes: Path) -> None:
        """Create the data folder."""
        cluster_id = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=").replace("-", "A")
        tool = [java, *JVM, *_logging("error"), "-cp", f"{classes}/*", "kafka.tools.StorageTool"]
        run([*tool, "format", "--config", str(self.settings), "--cluster-id", cluster_id, "--ignore-formatted"])

    def format_like(self, other: _Node) -> None:
        """Copy the data folder of another node with a new number and folder id: saves a start of Java."""
        shutil.copytree(other.data, self.data)
        properties = self.data / "meta.properties"
        text = re.sub(r"(?m)^node\.id=.*$", f"node.id={self.number}", properties.read_text())
        own = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=").replace("-", "A")
        properties.write_text(re.sub(r"(?m)^directory\.id=.*$", f"directory.id={own}", text))

    def write(self, more: Mapping[str, str], beside: Sequence[tuple[str, int]]) -> None:
        """Write the node's properties."""
        names = [f"BESIDE{n}" for n in range(len(beside))]
        listeners = "".join(f",{name}://127.0.0.1:{port}" for name, (_, port) in zip(names, beside, strict=True))
        advertised = "".join(f",{name}://{host}:{port}" for name, (host, port) in zip(names, beside, strict=True))
        settings = {
            "process.roles": "broker,controller",
            "node.id": str(self.number),
            "controller.listener.names": "CONTROLLER",
            "listeners": f"PLAINTEXT://127.0.0.1:{self.port},CONTROLLER://127.0.0.1:{self.controller}{listeners}",
            "advertised.listeners": f"PLAINTEXT://127.0.0.1:{self.port}{advertised}",
            "listener.security.protocol.map": ",".join(
                f"{name}:PLAINTEXT" for name in ("PLAINTEXT", "CONTROLLER", *names)
            ),
            "inter.broker.listener.name": "PLAINTEXT",
            "log.dirs": str(self.data),
            "group.initial.rebalance.delay.ms": "0",
            "num.partitions": "4",
            "controlled.shutdown.enable": "false",
            "broker.heartbeat.interval.ms": "500",
            # A killed node may return after this. On a busy machine Kafka itself delays heartbeats by seconds, and
            # would take its only node for dead.
            "broker.session.timeout.ms": "6000",
            **more,
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        self.settings.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))


def _java() -> str:
    try:
        return str(find_java().program)
    except Misuse:
        raise Absent("Kafka needs Java 17; on Debian: apt-get install openjdk-17-jre-headless") from None


def _free_ports(count: int) -> list[int]:
    """Return different free ports."""
    ports: dict[int, None] = {}
    while len(ports) < count:
        ports[free_port()] = None
    return list(ports)


def _internal_topics(nodes: int) -> dict[str, str]:
    """Return settings for one partition each, on all nodes, of which most acknowledge."""
    copies, acknowledge = str(min(3, nodes)), str(min(2, nodes))
    return {
        "offsets.topic.replication.factor": copies,
        "offsets.topic.num.partitions": "1",
        "transaction.state.log.replication.factor": copies,
        "transaction.state.log.min.isr": acknowledge,
        "transaction.state.log.num.partitions": "1",
        "share.coordinator.state.topic.replication.factor": copies,
        "share.coordinator.state.topic.min.isr": acknowledge,
    }


def libraries() -> Path:
    """Return the folder of Kafka's jar files; see :func:`escrowmq_lab.servers.maven.libraries`."""
    return maven.libraries(POM, "Kafka")


def _logging(level: str) -> list[str]:
    return [f"-Dorg.slf4j.simpleLogger.defaultLogLevel={level}", "-Dlog4j2.level=ERROR"]
