"""The other peers: how each is started so that it syncs before it answers, and what its answer promises."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import java
from ours import Embedded, EscrowMQ, OneWay
from seam import Missing, Peer, Running, Work
from starting import Started, absent_is_missing, python_load, started

from escrowmq_lab.servers import kafka, postgres, redis
from escrowmq_lab.servers.process import Server, accepts, free_port

_OPENS = ("java.base/java.nio", "java.base/sun.nio.ch", "java.base/java.lang", "java.base/java.util")
JVM = ["-Xshare:auto", *(f"--add-opens={name}=ALL-UNNAMED" for name in _OPENS)]
JVM += ["--add-exports=java.base/jdk.internal.ref=ALL-UNNAMED"]
KILL = signal.SIGKILL
"""How servers of Java end whose own way to an end takes many seconds: their data goes with them."""
KAFKA_JVM = ["-Xms1g", "-Xmx1g", "-Xshare:auto"]
"""As it is started for tests, it comes up quickly and runs slowly."""


class RocketMQ:
    """RocketMQ's own broker and Java client. ``flush``: SYNC_FLUSH or ASYNC_FLUSH.

    Two threads of its broker 5.5.0 do nothing, busily: one in the first ten seconds (its issue 10515), one whenever no
    transaction has ended for three seconds (its issue 10966). So it is measured after the first, and never runs beside
    another peer.
    """

    settles_s = 11.0
    remark = (
        "5.5.0; two threads of its broker turn idly for some time after its start and after the last transaction (its "
        "issues 10515 and "
        "10966), so no other peer runs beside it, and it is measured after the first of them"
    )

    def __init__(self, flush: str = "SYNC_FLUSH") -> None:
        self._flush = flush
        self._synced = flush == "SYNC_FLUSH"
        self.name = self.server = "RocketMQ" if self._synced else "RocketMQ, not synced"
        synced = "the prepare is synced and answered" if self._synced else "the prepare is answered before it is synced"
        self.promise = f"{synced}; the end is one-way: whether it came is not known"
        self.reference = not self._synced
        self.recovers = "" if self._synced else "as RocketMQ"
        self._classes = ""

    def lacks(self, work: Work) -> str:
        if work.kind == "flight":
            return "its transactional send takes a thread for each message in flight"
        if work.kind == "batches":
            return "it has no transactional batches"
        if not self._synced and (work.processes > 1 or work.callers > 64 or work.callers == 16):
            return "a reference, measured with one caller and 64"
        if self._synced and work.kind == "queue":
            return "as RocketMQ, not synced"
        return ""

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
            return Server(
                url="", command=command, ready=lambda _: accepts(at), log=folder / f"{settings}.log", stop_signal=KILL
            )

        servers = [
            start("-Xms128m -Xmx256m", "org.apache.rocketmq.namesrv.NamesrvStartup", "names.conf", names),
            start("-Xms1g -Xmx2g", "org.apache.rocketmq.broker.BrokerStartup", "broker.conf", port),
        ]
        with started(servers, f"127.0.0.1:{names}") as running:
            yield running

    def load(self, address: str) -> list[str]:
        return ["java", *JVM, "-Xmx512m", "-XX:ActiveProcessorCount=2", "-cp", self._classes, "RocketLoad", address]


class FastMiniMQ:
    """FastMiniMQ's broker and Java client, from a checkout of its source."""

    name = server = "FastMiniMQ"
    reference = False
    settles_s = 0.0
    remark = ""
    promise = "prepare and end are synced and answered; the prepare carries neither topic nor body"
    recovers = "its broker does not ask about undecided messages"

    def __init__(self, checkout: Path | None) -> None:
        self._checkout = checkout
        self._classes = ""

    def lacks(self, work: Work) -> str:
        if work.kind == "seen":
            return "no receive of it waits at the broker: its consumers ask again and again"
        return "it has no transactional batches" if work.kind == "batches" else ""

    def prepare(self) -> None:
        if self._checkout is None:
            raise Missing("no checkout of its source was given; --fastminimq names one")
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
        server = Server(url="", command=command, ready=lambda _: accepts(port), log=folder / "log", stop_signal=KILL)
        with started([server], f"127.0.0.1:{port}") as running:
            yield running

    def load(self, address: str) -> list[str]:
        return ["java", *JVM, "-Xmx1g", "-XX:MaxDirectMemorySize=2g", "-cp", self._classes, "MiniLoad", address]


class Kafka:
    """Kafka's transactions, one producer per caller; the log is synced after every batch."""

    name = server = "Kafka"
    reference = True
    settles_s = 0.0
    remark = ""
    promise = (
        "one transaction of one producer is synced and answered, all rows of a batch or none; nobody is asked "
        "about undecided ones"
    )
    recovers = "its broker does not ask: it aborts after a time"

    def lacks(self, work: Work) -> str:
        if work.kind == "flight":
            return "a producer has one transaction at a time"
        if work.beside:
            return "its single transactions do not come to 4,000/s"
        many = work.callers * work.processes > 16
        return "a caller needs a producer of its own; more than 16 were not tried" if many else ""

    def prepare(self) -> None:
        with absent_is_missing():
            kafka.libraries()

    @contextlib.contextmanager
    def running(self, folder: Path) -> Iterator[Running]:
        with (
            absent_is_missing(),
            mock.patch.object(kafka, "JVM", KAFKA_JVM),
            kafka.serving(folder, durable=True) as server,
        ):
            yield Started([server], server.url)

    def load(self, address: str) -> list[str]:
        return python_load("kafka", address)


class Postgres:
    """An outbox table: one row per message, inserted and committed; nothing relays it here."""

    name = server = "PostgreSQL outbox"
    reference = False
    settles_s = 0.0
    remark = ""
    promise = "the row is committed and synced; it must still be relayed"
    recovers = "a row is there or not"

    def lacks(self, work: Work) -> str:
        if work.kind == "seen":
            return "nothing relays the rows here"
        if work.kind == "flight":
            return "a connection has one transaction at a time"
        return "it takes at most 200 connections here" if work.callers * work.processes > 128 else ""

    def prepare(self) -> None:
        with absent_is_missing():
            postgres.find_binaries()

    @contextlib.contextmanager
    def running(self, folder: Path) -> Iterator[Running]:
        with absent_is_missing(), postgres.serving(folder, durable=True) as server:
            yield Started([server], server.url)

    def load(self, address: str) -> list[str]:
        return python_load("postgres", address)


class Redis:
    """A Redis stream, appended to; no transaction with anything else."""

    name = server = "Redis Streams"
    reference = True
    settles_s = 0.0
    remark = ""
    promise = "one XADD, synced and answered; nothing is held in escrow"
    recovers = "an entry is there or not"

    def lacks(self, work: Work) -> str:
        return "its blocking client has one call in flight per connection" if work.kind == "flight" else ""

    def prepare(self) -> None:
        java.program("redis-server", "redis-server")

    @contextlib.contextmanager
    def running(self, folder: Path) -> Iterator[Running]:
        with absent_is_missing(), redis.serving(folder, durable=True) as server:
            yield Started([server], server.url)

    def load(self, address: str) -> list[str]:
        return python_load("redis", address)


def peers(fastminimq: Path | None) -> list[Peer]:
    """All that there are, in the order of a table."""
    ours: list[Peer] = [EscrowMQ(), OneWay(), Embedded()]
    return [*ours, RocketMQ(), RocketMQ("ASYNC_FLUSH"), FastMiniMQ(fastminimq), Kafka(), Postgres(), Redis()]
