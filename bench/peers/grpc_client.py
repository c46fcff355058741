"""RocketMQ's gRPC client in Java as the load, before RocketMQ and before EscrowMQ's gateway for it: ``--grpc``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import java
from ours import OURS, environment
from seam import Peer, Running, Work
from servers import JVM
from starting import Started, absent_is_missing, started

from escrowmq_lab.servers import maven, rocketmq
from escrowmq_lab.servers.process import Server, accepts, free_port

CLIENT_POM = Path(__file__).parents[2] / "tests" / "rocketmq" / "clients" / "java" / "pom.xml"
"""The version of the client that tests use, too."""


class _Grpc:
    """What both have in common: the load."""

    reference = False
    remark = ""
    recovers = ""
    _classes = ""

    def lacks(self, work: Work) -> str:
        """See :class:`seam.Peer`."""
        return ""

    def prepare(self) -> None:
        """Fetch the client and compile the load. Raises Missing."""
        with absent_is_missing():
            self._classes = java.compiled("GrpcLoad.java", maven.libraries(CLIENT_POM, "rocketmq-client"))

    def load(self, address: str) -> list[str]:
        """See :class:`seam.Peer`."""
        return ["java", *JVM, "-Xmx1g", "-XX:ActiveProcessorCount=2", "-cp", self._classes, "GrpcLoad", address]


class Gateway(_Grpc):
    """``escrowmq serve --rocketmq``."""

    name = server = OURS
    promise = "prepare and end are synced and answered"
    settles_s = 0.0

    @contextlib.contextmanager
    def running(self, folder: Path) -> Iterator[Running]:
        """See :class:`seam.Peer`."""
        port, clients = free_port(), free_port()
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "escrowmq", "serve", "-d", str(folder / "data"), "-l", f"127.0.0.1:{port}"]
        server = Server(
            url="",
            command=[*command, "--rocketmq", f"127.0.0.1:{clients}"],
            ready=lambda _: accepts(clients),
            log=folder / "log",
            environment=environment(),
        )
        with started([server], f"127.0.0.1:{clients}") as running:
            yield running


class Proxy(_Grpc):
    """RocketMQ 5.5.0, broker and proxy in one process."""

    settles_s = 11.0

    def __init__(self, name: str, promise: str, settings: Mapping[str, str], remark: str = "") -> None:
        self.name = self.server = name
        self.promise = promise
        self.remark = remark
        self._settings = settings
        self.reference = name != ROCKET
        self.recovers = "as RocketMQ" if settings["flushDiskType"] == "ASYNC_FLUSH" else ""

    def prepare(self) -> None:
        """Fetch RocketMQ, and the load. Raises Missing."""
        with absent_is_missing():
            rocketmq.libraries()
        super().prepare()

    @contextlib.contextmanager
    def running(self, folder: Path) -> Iterator[Running]:
        """See :class:`seam.Peer`."""
        timing = {"transactionTimeOut": "6000", "transactionCheckInterval": "10000"}
        patience = {"waitTimeMillsInSendQueue": "10000"}
        with absent_is_missing(), rocketmq.serving(folder, settings={**timing, **patience, **self._settings}) as server:
            server.create_topic("bench", "TRANSACTION")
            yield Started([server], server.url)


ROCKET = "RocketMQ"
_SYNCED = {"flushDiskType": "SYNC_FLUSH"}
_IN_ROCKSDB = {"transRocksDBEnable": "true", "transWriteOriginTransHalfEnable": "false"}
"""The first alone changes nothing: half messages still go to the topic that the second one switches off."""


def peers() -> list[Peer]:
    """Return all that there are, in the order of a table."""
    answered = "prepare and end are synced and answered"
    return [
        Gateway(),
        Proxy(ROCKET, answered, _SYNCED, "5.5.0 with SYNC_FLUSH, broker and proxy in one process (local mode)"),
        Proxy(
            "RocketMQ, half messages in RocksDB",
            answered,
            _SYNCED | _IN_ROCKSDB,
            "SYNC_FLUSH, transRocksDBEnable=true, and transWriteOriginTransHalfEnable=false, which it needs",
        ),
        Proxy(
            "RocketMQ, not synced",
            "prepare and end are answered before they are synced",
            {"flushDiskType": "ASYNC_FLUSH"},
            "ASYNC_FLUSH, which is its default",
        ),
    ]
