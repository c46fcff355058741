"""Starts a single-node Kafka server (KRaft) for tests. Debian packages: ``maven`` and ``openjdk-17-jre-headless``.

Debian has no Kafka, so Maven fetches what ``kafka-pom.xml`` names, once, into the user's cache folder.
"""

from __future__ import annotations

import base64
import uuid
from contextlib import AbstractContextManager
from pathlib import Path

from escrowmq.errors import Misuse
from escrowmq.pipeline.java import find_java
from escrowmq.testing.servers import maven
from escrowmq.testing.servers.process import Server, accepts, free_port, run, started
from escrowmq.testing.servers.seam import Absent

POM = Path(__file__).with_name("kafka-pom.xml")
JVM = ["-Xms128m", "-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto"]
"""Quick to start rather than quick in the long run."""
ASK_VERSIONS = bytes.fromhex("0000000a 0012 0000 00000001 ffff")
"""An ApiVersions request, version 0, without a client id."""
ANY = bytes(range(256))


def serving(
    folder: Path, *, durable: bool = False, beside: tuple[str, int] | None = None
) -> AbstractContextManager[Server]:
    """A server with its data in ``folder``; ``url`` is ``kafka://HOST:PORT``.

    ``durable`` syncs the log after every batch (Kafka's own default leaves that to replicas). ``beside``: it listens on this port of 127.0.0.1, too, and
    tells those who come there that it is at this host: a proxy's, so that what goes through it can be cut off. Raises :class:`Absent`.
    """
    try:
        java = str(find_java().program)
    except Misuse:
        raise Absent("Kafka needs Java 17; on Debian: apt-get install openjdk-17-jre-headless") from None
    classes = f"{libraries()}/*"
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    settings = _write_settings(folder, port, durable, beside)
    cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=").replace("-", "A")
    tool = [java, *JVM, *_logging("error"), "-cp", classes, "kafka.tools.StorageTool"]
    run([*tool, "format", "--config", str(settings), "--cluster-id", cluster, "--ignore-formatted"])
    return started(
        Server(
            url=f"kafka://127.0.0.1:{port}",
            command=[java, *JVM, *_logging("warn"), "-cp", classes, "kafka.Kafka", str(settings)],
            ready=lambda _: accepts(port, say=ASK_VERSIONS, hear=ANY),
            log=folder / "kafka.log",
        )
    )


def libraries() -> Path:
    """The folder of Kafka's jar files; see :func:`escrowmq.testing.servers.maven.libraries`."""
    return maven.libraries(POM, "Kafka")


def _logging(level: str) -> list[str]:
    return [f"-Dorg.slf4j.simpleLogger.defaultLogLevel={level}", "-Dlog4j2.level=ERROR"]


def _write_settings(folder: Path, port: int, durable: bool, beside: tuple[str, int] | None) -> Path:
    controller = free_port()
    also, told = "", ""
    if beside is not None:
        also, told = f",BESIDE://127.0.0.1:{beside[1]}", f",BESIDE://{beside[0]}:{beside[1]}"
    settings = {
        "process.roles": "broker,controller",
        "node.id": "1",
        "controller.quorum.voters": f"1@127.0.0.1:{controller}",
        "controller.listener.names": "CONTROLLER",
        "listeners": f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}{also}",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port}{told}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,BESIDE:PLAINTEXT",
        "inter.broker.listener.name": "PLAINTEXT",
        "log.dirs": str(folder / "kafka"),
        "offsets.topic.replication.factor": "1",
        "offsets.topic.num.partitions": "1",
        "transaction.state.log.replication.factor": "1",
        "transaction.state.log.min.isr": "1",
        "transaction.state.log.num.partitions": "1",
        "share.coordinator.state.topic.replication.factor": "1",
        "share.coordinator.state.topic.min.isr": "1",
        "group.initial.rebalance.delay.ms": "0",
        "num.partitions": "4",
        "controlled.shutdown.enable": "false",
        "broker.heartbeat.interval.ms": "200",
        "broker.session.timeout.ms": "1000",  # a killed node may come back after this
        **({"log.flush.interval.messages": "1"} if durable else {}),
    }
    path = folder / "kafka.properties"
    path.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    return path
