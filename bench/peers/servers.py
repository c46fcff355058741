"""The peers: how each is started so that it syncs before it answers, and what its answer promises."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import java
from measuring import descendants
from seam import Missing, Peer, Running, Work

from escrowmq.testing.servers import kafka, postgres, redis
from escrowmq.testing.servers.process import Server, accepts, free_port
from escrowmq.testing.servers.seam import Absent

LOADS = Path(__file__).parent / "loads"
_OPENS = ("java.base/java.nio", "java.base/sun.nio.ch", "java.base/java.lang", "java.base/java.util")
JVM = ["-Xshare:auto", *(f"--add-opens={name}=ALL-UNNAMED" for name in _OPENS)]
JVM += ["--add-exports=java.base/jdk.internal.ref=ALL-UNNAMED"]


@dataclass
class Started:
    """Servers of ours, started in order; the last one is the peer's, and is the one that is killed and measured."""

    servers: list[Server]
    address: str
    pids: Callable[[], Sequence[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.pids = lambda: descendants(self.servers[-1].pid)

    def kill(self) -> None:
        """See :class:`seam.Running`."""
        self.servers[-1].kill()

    def restart(self) -> None:
        """See :class:`seam.Running`."""
        self.servers[-1].start()


@contextlib.contextmanager
def _started(servers: list[Server], address: str) -> Iterator[Running]:
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.callback(server.stop)
            server.start()
        yield Started(servers, address)


@contextlib.contextmanager
def _absent_is_missing() -> Iterator[None]:
    try:
        yield
    except Absent as problem:
        raise Missing(str(problem)) from None


def _python(name: str, address: str) -> list[str]:
    return [sys.executable, str(LOADS / f"{name}_load.py"), address]


class EscrowMQ:
    """This project, served."""

    name = "EscrowMQ"
    promise = "prepare and commit both synced and answered"

    def can(self, work: Work) -> bool:
        return True

    def prepare(self) -> None:
        """Nothing to fetch."""

    @contextlib.contextmanager
    def running(self, folder: Path) -> Iterator[Running]:
        port = free_port()
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "escrowmq", "serve", "-d", str(folder / "data"), "-l", f"127.0.0.1:{port}"]
        server = Server(
            url="", command=command, ready=lambda _: accepts(port), log=folder / "log", environment=_environment()
        )
        with _started([server], f"escrow://127.0.0.1:{port}") as running:
            yield running

    def load(self, address: str) -> list[str]:
        return _python("escrow", address)


def _environment() -> dict[str, str]:
    """This checkout's package for a process that starts in another folder."""
    given = os.environ.get("PYTHONPATH")
    return (
        {"PYTHONPATH": os.pathsep.join(str(Path(path).resolve()) for path in given.split(os.pathsep))} if given else {}
    )


class RocketMQ:
    """RocketMQ's own broker and Java client. ``flush``: SYNC_FLUSH or ASYNC_FLUSH."""

    def __init__(self, flush: str = "SYNC_FLUSH") -> None:
        self._flush = flush
        self.name = "RocketMQ" if flush == "SYNC_FLUSH" else "RocketMQ, not synced"
        synced = "prepare synced and answered" if flush == "SYNC_FLUSH" else "prepare answered from memory"
        self.promise = f"{synced}; the end is one-way"
        self._classes = ""

    def can(self, work: Work) -> bool:
        return work.kind not in ("flight", "batches")

    def prepare(self) -> None:
        java.program("java", "openjdk-17-jre-headless")
        jars = java.libraries(java.HERE / "rocketmq-pom.xml", "rocketmq")
        self._classes = java.compiled("RocketLoad.java", jars)

    @contextlib.contextmanager
    def running(self, folder: Path) -> Iterator[Running]:
        names, port = free_port(), free_port()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "names.conf").write_text(
            f"listenPort={names}\nbindAddress=127.0.0.1\n"
            f"kvConfigPath={folder}/kv.json\nconfigStorePath={folder}/names.properties\n"
        )
        (folder / "broker.conf").write_text(
            "brokerClusterName=bench\nbrokerName=bench\nbrokerId=0\n"
            f"namesrvAddr=127.0.0.1:{names}\nlistenPort={port}\nbindAddress=127.0.0.1\nbrokerIP1=127.0.0.1\n"
            f"haListenPort={free_port()}\nstorePathRootDir={folder}/store\nstorePathCommitLog={folder}/store/commitlog\n"
            f"flushDiskType={self._flush}\nautoCreateTopicEnable=true\ntransactionTimeOut=6000\n"
            "transactionCheckInterval=10000\nwaitTimeMillsInSendQueue=10000\n"
        )

        def start(memory: str, main: str, settings: str, at: int) -> Server:
            homes = [f"-Drocketmq.home.dir={folder}", f"-Duser.home={folder}"]
            command = ["java", *JVM, *memory.split(), *homes, "-cp", self._classes, main, "-c", str(folder / settings)]
            return Server(url="", command=command, ready=lambda _: accepts(at), log=folder / f"{settings}.log")

        servers = [
            start("-Xms128m -Xmx256m", "org.apache.rocketmq.namesrv.NamesrvStartup", "names.conf", names),
            start("-Xms1g -Xmx2g", "org.apache.rocketmq.broker.BrokerStartup", "broker.conf", port),
        ]
        with _started(servers, f"127.0.0.1:{names}") as running:
            yield running

    def load(self, address: str) -> list[str]:
        return ["java", *JVM, "-Xmx512m", "-XX:ActiveProcessorCount=2", "-cp", self._classes, "RocketLoad", address]


class FastMiniMQ:
    """FastMiniMQ's broker and Java client, from a checkout of its source."""

    name = "FastMiniMQ"
    promise = "prepare (without the body) and commit synced and answered"

    def __init__(self, checkout: Path) -> None:
        self._checkout = checkout
        self._classes = ""

    def can(self, work: Work) -> bool:
        return work.kind in ("threads", "flight")

    def prepare(self) -> None:
        self._classes = java.compiled("MiniLoad.java", java.built(self._checkout))

    @contextlib.contextmanager
    def running(self, folder: Path) -> Iterator[Running]:
        port = free_port()
        folder.mkdir(parents=True, exist_ok=True)
        settings = {
            "broker.id": "bench",
            "broker.host": f"127.0.0.1:{port}",
            "data.dir": f"{folder}/data",
            "flush.sync": "true",
            "data.segment.length": str(1 << 30),
            "out.log.level": "warn",
        }
        flags = [f"-D{name}={value}" for name, value in settings.items()]
        main = "org.nopasserby.fastminimq.FastMiniMQBroker"
        command = ["java", *JVM, "-Xms1g", "-Xmx2g", "-XX:MaxDirectMemorySize=3g", *flags, "-cp", self._classes, main]
        server = Server(url="", command=command, ready=lambda _: accepts(port), log=folder / "log")
        with _started([server], f"127.0.0.1:{port}") as running:
            yield running

    def load(self, address: str) -> list[str]:
        return ["java", *JVM, "-Xmx1g", "-XX:MaxDirectMemorySize=2g", "-cp", self._classes, "MiniLoad", address]


class Kafka:
    """Kafka's transactions, one producer per caller; the log is synced after every batch."""

    name = "Kafka"
    promise = "a transaction of one producer, synced; it has no check-back"

    def can(self, work: Work) -> bool:
        return work.kind in ("batches", "seen") or (work.kind == "threads" and work.callers * work.processes <= 64)

    def prepare(self) -> None:
        with _absent_is_missing():
            kafka.libraries()

    @contextlib.contextmanager
    def running(self, folder: Path) -> Iterator[Running]:
        with _absent_is_missing(), kafka.serving(folder, durable=True) as server:
            yield Started([server], server.url)

    def load(self, address: str) -> list[str]:
        return _python("kafka", address)


class Postgres:
    """An outbox table: one row per message, inserted and committed; nothing relays it here."""

    name = "PostgreSQL outbox"
    promise = "one synced commit of the row; it must still be relayed"

    def can(self, work: Work) -> bool:
        return work.kind in ("threads", "batches") and work.callers * work.processes <= 128

    def prepare(self) -> None:
        with _absent_is_missing():
            postgres.find_binaries()

    @contextlib.contextmanager
    def running(self, folder: Path) -> Iterator[Running]:
        with _absent_is_missing(), postgres.serving(folder, durable=True) as server:
            yield Started([server], server.url)

    def load(self, address: str) -> list[str]:
        return _python("postgres", address)


class Redis:
    """A Redis stream, appended to; no transaction with anything else."""

    name = "Redis Streams"
    promise = "XADD, synced before the answer; one step, nothing is held in escrow"

    def can(self, work: Work) -> bool:
        return work.kind in ("threads", "batches", "seen")

    def prepare(self) -> None:
        java.program("redis-server", "redis-server")

    @contextlib.contextmanager
    def running(self, folder: Path) -> Iterator[Running]:
        with _absent_is_missing(), redis.serving(folder, durable=True) as server:
            yield Started([server], server.url)

    def load(self, address: str) -> list[str]:
        return _python("redis", address)


def peers(fastminimq: Path | None) -> list[Peer]:
    """All that there are; FastMiniMQ where a checkout is given."""
    given: list[Peer] = [EscrowMQ(), RocketMQ(), RocketMQ("ASYNC_FLUSH")]
    if fastminimq is not None:
        given.append(FastMiniMQ(fastminimq))
    return [*given, Kafka(), Postgres(), Redis()]
