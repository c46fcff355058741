"""Where failover.py strikes: Kafka, of one node or of three, and the served brokers of one log in it."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient
from failover_program import eventually, said

import escrowmq as mq
from escrowmq.log.kafka.cluster.opening import create_topics
from escrowmq_lab.chaos.proxy import Proxy, Route
from escrowmq_lab.servers import kafka
from escrowmq_lab.servers.escrow import serving
from escrowmq_lab.servers.process import Server, accepts, free_port

QUICK = {
    "broker.session.timeout.ms": "3000",
    "controller.quorum.fetch.timeout.ms": "2000",
    "controller.quorum.election.timeout.ms": "1000",
}
"""With these Kafka notices soon that one of its nodes is dead; the first is 9000 by default, the others are as they are
by default.
"""
PROXIES = {"a": "127.0.0.2", "b": "127.0.0.3"}
"""By a broker's name: where it finds Kafka, if it is to be cut off from it."""


@dataclass
class Kafka:
    """A running Kafka. ``through``: by a broker's name, the URL at which ``proxy`` can cut it off."""

    url: str
    nodes: list[Server]
    through: Mapping[str, str] = field(default_factory=dict)
    proxy: Proxy | None = None

    def leader(self, topic: str) -> Server:
        """The node that leads the topic's only partition."""
        found: list[int] = []

        def known() -> bool:
            with suppress(KafkaException):
                found[:] = [self._admin().list_topics(topic, timeout=5).topics[topic].partitions[0].leader]
            return found > [0]

        eventually(known, "the partition has no leader")
        return self.nodes[found[0] - 1]

    def is_whole(self, topics: Sequence[str]) -> bool:
        """Whether every node is an in-sync replica of these topics' only partitions."""
        with suppress(KafkaException, KeyError):
            known = self._admin().list_topics(timeout=5).topics
            return all(len(known[topic].partitions[0].isrs) == len(self.nodes) for topic in topics)
        return False

    def _admin(self) -> AdminClient:
        """One that knows of all nodes, whichever of them were dead when another one was made."""
        return AdminClient({"bootstrap.servers": self.url.removeprefix("kafka://"), "log_level": 0})


@contextmanager
def one_node(folder: Path) -> Iterator[Kafka]:
    """One node, which each broker can reach through the proxy, too."""
    ports = {name: free_port() for name in PROXIES}
    beside = [(PROXIES[name], port) for name, port in ports.items()]
    routes = [Route(name, PROXIES[name], "kafka", port) for name, port in ports.items()]
    with kafka.serving(folder / "kafka", beside=beside) as server, Proxy(routes, folder / "proxy.log") as proxy:
        for port in ports.values():
            eventually(lambda port=port: accepts(port), "a listener of Kafka does not answer")  # type: ignore[misc]
        yield Kafka(server.url, [server], {n: f"kafka://{PROXIES[n]}:{port}" for n, port in ports.items()}, proxy)


@contextmanager
def three_nodes(folder: Path, settings: Mapping[str, str] | None = None) -> Iterator[Kafka]:
    """Three nodes; of a log's topics each has a replica, and two acknowledge."""
    with kafka.cluster(folder, 3, QUICK if settings is None else settings) as made:
        yield Kafka(made.url, made.nodes)


class Shard:
    """Served brokers of one log. ``proxied``: each of them finds Kafka through the proxy."""

    def __init__(
        self, folder: Path, place: Kafka, names: str, stack: ExitStack, options: Sequence[str] = (), *, proxied: bool
    ) -> None:
        self.place = place
        topic = f"log-{uuid.uuid4().hex[:12]}"
        where = f"{topic}?replication={len(place.nodes)}"
        self.log = f"{place.url}/{where}"
        self.topics = create_topics(self.log)
        ports = [free_port() for _ in names]
        self.url = "escrow://" + "|".join(f"127.0.0.1:{port}" for port in ports)
        self.nodes: list[Server] = []
        self.names: dict[str, str] = {}
        """By a node's URL."""
        self._links: dict[str, Any] = {}
        more = ["--replicas", self.url, "--half-retention", "1h", "--transaction-timeout", "2s", *options]
        more += ["--lease-seconds", "2s"]  # what the struck consumer held comes again soon
        for name, port in zip(names, ports, strict=True):
            at = place.through[name] if proxied else place.url
            made = serving(folder / name, "--log", f"{at}/{where}", *more, port=port)
            self.nodes.append(stack.enter_context(made))
            self.names[self.nodes[-1].url] = name
            bus = stack.enter_context(mq.connect(f"{self.nodes[-1].url}?replicas=listed"))
            self._links[self.nodes[-1].url] = bus.router.links[0]
        eventually(lambda: self.leader() is not None, "nobody leads")

    def ask(self, node: Server, action: str) -> dict[str, Any]:
        """What a node says of itself; empty if it does not answer."""
        return said(self._links[node.url], action)

    def leader(self) -> Server | None:
        """The node that leads: of several that say so, the one that leads since last."""
        said = {node.url: self.ask(node, "hello") for node in self.nodes}
        leading = [node for node in self.nodes if said[node.url].get("role") == "leader"]
        return max(leading, key=lambda node: int(said[node.url]["epoch"]), default=None)

    def epoch(self) -> int:
        """How often the log was claimed, as the leader says."""
        found: list[int] = []

        def known() -> bool:
            leader = self.leader()
            found[:] = [] if leader is None else [int(self.ask(leader, "hello").get("epoch", 0))]
            return found > [0]

        eventually(known, "nobody leads")
        return found[0]

    def settle(self) -> Server:
        """Wait until one leads, and all others follow and have what the leader had a moment ago; the leader."""
        while True:
            eventually(lambda: self._roles() == {"leader": 1, "standby": len(self.nodes) - 1}, self._why)
            leader = self.leader()
            if leader is None:
                continue
            goal = self.ask(leader, "stats").get("log_position")
            if goal is None:
                continue
            for node in self.nodes:
                eventually(lambda node=node: self._position(node) >= goal, self._why)  # type: ignore[misc]
            if self.leader() is leader:
                return leader

    def _roles(self) -> dict[str, int]:
        roles = [str(self.ask(node, "hello").get("role")) for node in self.nodes]
        return {role: roles.count(role) for role in roles}

    def _position(self, node: Server) -> int:
        return int(self.ask(node, "stats").get("log_position", -1))

    def _why(self) -> str:
        states = {self.names[node.url]: self.ask(node, "hello") for node in self.nodes}
        logs = {self.names[node.url]: node.log.read_text(errors="replace")[-1500:] for node in self.nodes}
        return f"the brokers do not settle: {states}\n{logs}"


def temporary() -> tempfile.TemporaryDirectory[str]:
    """A folder for a run; what still writes there when it is removed is no matter."""
    return tempfile.TemporaryDirectory(prefix="failover-", ignore_cleanup_errors=True)
