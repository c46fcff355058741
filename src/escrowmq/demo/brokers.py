"""The brokers of a run: one with its log in a folder, or a leader and a standby whose log is kept by a Kafka of the
demo's own.

Both kinds answer the same questions: how each broker is started, where the others reach them, and which one may be
killed now.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from socket import create_server
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Protocol

from escrowmq.demo.processes import ChildEvent
from escrowmq.errors import Code, Misuse, Unknown
from escrowmq.log.kafka.cluster.opening import create_topics, open_partitions
from escrowmq.log.kafka.copying import Copied, to_folder
from escrowmq.pipeline.java import find_java
from escrowmq.platform.disk import RealDisk
from escrowmq.platform.extras import missing_package

LOG = "broker"
"""Where the log is, in the run folder, when the run is over."""
KAFKA = "kafka"
"""What ``--log`` takes."""
_TOPIC = "demo"
_PATIENT = {"broker.session.timeout.ms": "9000"}
"""Kafka's own default: it is not killed here, and a busy machine may let it wait for seconds."""


class News(NamedTuple):
    """An event to display: an event of the diary (see :mod:`escrowmq.pipeline.audit.events`), and a line
    (rich markup)."""

    event: str
    who: str
    line: str
    facts: dict[str, Any]


class Brokers(Protocol):
    """The director's interface to the brokers. Names are those of processes."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of all of them."""

    @property
    def said(self) -> str:
        """What they are, for people."""

    @property
    def url(self) -> str:
        """What everybody else connects to; empty while it is not known."""

    def stands(self, name: str) -> bool:
        """Return whether a broker is there, so that the next process can be started."""

    @property
    def victim(self) -> str | None:
        """The one to kill, if that may be done now."""

    @property
    def where(self) -> str:
        """At which point it is killed, for people."""

    def config(self, name: str) -> dict[str, Any]:
        """Return the configuration of a broker's process."""

    def killed(self, name: str, at_us: int) -> None:
        """Note that a broker was killed at this time (microseconds since 1970)."""

    def hear(self, event: ChildEvent) -> News | None:
        """Any event of a process that is not killed yet."""


class OneBroker:
    """One broker, with its log in the run folder."""

    names: tuple[str, ...] = ("broker",)
    said = "broker"
    victim: str | None = "broker"
    where = "in the midst of its work"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = 0
        self.url = ""

    def stands(self, name: str) -> bool:
        """Return whether it has listened once: the others wait for a broker that is away."""
        return bool(self.url)

    def config(self, name: str) -> dict[str, Any]:
        """Any free port at first, the same one after a kill."""
        return {"folder": str(self._folder / LOG), "port": self._port}

    def killed(self, name: str, at_us: int) -> None:
        """Start the broker again."""

    def hear(self, event: ChildEvent) -> News | None:
        """Return where it listens."""
        if event.kind == "ready" and event.child.name in self.names:
            self.url = event.details["url"]
            self._port = int(self.url.rpartition(":")[2])
        return None


class LeaderAndStandby:
    """Two brokers that share a log at ``address`` in Kafka. The one that leads is killed, when the other one can take
    over.

    A change of leader is over with the first order that was begun after the kill and is placed: it had an answer of the
    new leader.
    """

    names: tuple[str, ...] = ("broker-a", "broker-b")
    said = "two brokers with their log on Kafka"
    where = "while it led"

    def __init__(self, folder: Path, address: str) -> None:
        self._folder, self._address = folder, address
        self._ports = dict(zip(self.names, _two_ports(), strict=True))
        self._leader: str | None = None
        self._epoch = 0
        self._listen: set[str] = set()
        self._killed: dict[str, int] = {}  # when, microseconds since 1970
        self._struck_us: int | None = None  # the kill that the change under way began with
        self._orders = True  # there are more to come

    @property
    def url(self) -> str:
        """``escrow://A|B``: who of them leads is for clients to find out."""
        return "escrow://" + "|".join(f"127.0.0.1:{port}" for port in self._ports.values())

    def stands(self, name: str) -> bool:
        """Return whether it follows or leads, and one of them leads."""
        return name in self._listen and self._leader is not None

    @property
    def victim(self) -> str | None:
        """The leader, if the other one follows and the last change is over."""
        return self._leader if self._struck_us is None and all(map(self.stands, self.names)) else None

    def config(self, name: str) -> dict[str, Any]:
        """Return the options of ``escrowmq serve --log ... --replicas ...``."""
        replicas = [f"escrow://127.0.0.1:{port}" for port in self._ports.values()]
        here = {"folder": str(self._folder / name), "port": self._ports[name]}
        return {**here, "log": self._address, "replicas": replicas}

    def killed(self, name: str, at_us: int) -> None:
        """Note that the leader was killed."""
        self._listen.discard(name)
        self._leader, self._struck_us, self._killed[name] = None, at_us, at_us

    def hear(self, event: ChildEvent) -> News | None:
        """Return who listens, who leads, and which order is the first of a new leader."""
        name = event.child.name
        match event.kind:
            case "ready" if name in self.names:
                self._listen.add(name)
                if name in self._killed and name != self._leader:
                    return News("follows", name, f"{name} is back, and follows", {})
            case "leads":
                return self._leads(name, event)
            case "placed" if self._struck_us is not None and event.details["begun_us"] >= self._struck_us:
                seconds = self._since(event.at_us)
                self._struck_us = None
                line = f"first order begun after the kill: placed [bold]{seconds:.2f} s[/] after it"
                return News("answered", self._leader or name, line, {"seconds": seconds})
            case "done":
                self._orders = False
                if self._leader is not None:
                    self._struck_us = None
        return None

    def _leads(self, name: str, event: ChildEvent) -> News | None:
        epoch = event.details["epoch"]
        if epoch < self._epoch:
            return None  # it led for a moment, and says so late
        self._leader, self._epoch = name, epoch
        if self._struck_us is None:
            (other,) = (one for one in self.names if one != name)
            return News("leads", name, f"[bold]{name} leads[/], {other} follows", {"epoch": epoch})
        seconds = self._since(event.at_us)
        if not self._orders:
            self._struck_us = None
        line = f"[bold]{name} leads[/] (epoch {epoch}), {seconds:.2f} s after the kill"
        return News("leads", name, line, {"epoch": epoch, "seconds": seconds})

    def _since(self, at_us: int) -> float:
        """Return seconds from the last kill."""
        return round((at_us - (self._struck_us or at_us)) / 1e6, 3)


def check_kafka() -> None:
    """Look for what a Kafka of our own needs, before anything is begun; Kafka itself is fetched if it is not there.

    Raises Misuse(MISSING_PACKAGE) that says what to install.
    """
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
        raise _missing(absent) from None


@contextmanager
def own_kafka(folder: Path) -> Iterator[str]:
    """Yield a Kafka of one node, with the topics of a log; the log's address. Its data are not kept; what it printed
    is, in ``nodes/kafka.log`` of the run folder.

    Raises Misuse(MISSING_PACKAGE), Unknown(DISCONNECTED) if it does not start.
    """
    from escrowmq_lab.servers import kafka
    from escrowmq_lab.servers.seam import Absent

    with TemporaryDirectory(prefix="escrowmq-kafka-") as data, ExitStack() as stack:
        # Not in the run folder: Kafka does not take every name of a folder.
        stack.callback(_keep, Path(data) / "kafka.log", folder / "nodes" / "kafka.log")
        try:
            server = stack.enter_context(kafka.serving(Path(data), settings=_PATIENT))
        except Absent as absent:
            raise _missing(absent) from None
        except RuntimeError as problem:
            raise Unknown(Code.DISCONNECTED, f"Kafka: {problem}", "the demo runs without it, too") from None
        address = f"{server.url}/{_TOPIC}?replication=1"
        create_topics(address)
        yield address


def bring_home(address: str, folder: Path) -> Copied:
    """Copy the log out of Kafka, once the brokers have ended, so that the run folder has it when Kafka is gone."""
    return to_folder(open_partitions(address), RealDisk(folder / LOG))


def _two_ports() -> tuple[int, int]:
    with create_server(("127.0.0.1", 0)) as one, create_server(("127.0.0.1", 0)) as other:
        return one.getsockname()[1], other.getsockname()[1]


def _missing(absent: Exception) -> Misuse:
    return Misuse(Code.MISSING_PACKAGE, str(absent), "without --log the demo runs on one broker, and needs no Kafka")


def _keep(printed: Path, kept: Path) -> None:
    if printed.exists():
        kept.parent.mkdir(exist_ok=True)
        shutil.copyfile(printed, kept)
