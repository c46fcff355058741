"""Nodes of one shard in this process, over a Kafka in memory: each has a folder, a door and its partitions, whose
faults a test orders.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from escrowmq.broker.embedded import EmbeddedLink, lent_link
from escrowmq.broker.replicas.door import Door
from escrowmq.broker.replicas.node import Node
from escrowmq.client.bus import Bus
from escrowmq.log.kafka.replica import PartitionReplica
from escrowmq.log.seam import Replica
from escrowmq.platform.disk import RealDisk
from escrowmq.settings import BrokerSettings
from escrowmq.testing.partitions import MemoryKafka, MemoryPartitions

SILENCE = 1.0
PATIENCE = 60.0
"""Far more than anything here takes: a test waits for what happens, not for this."""


def until(what: Callable[[], bool], why: str = "") -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < deadline, why or "it did not happen"
        time.sleep(0.005)


class OneNode:
    """One node of a shard; ``partitions``: all that it opened, the newest last."""

    def __init__(self, name: str, folder: Path, kafka: MemoryKafka, settings: BrokerSettings, silence: float) -> None:
        self.url = f"escrow://{name}:7700"
        self.folder = folder / name
        self.kafka = kafka
        self.settings = settings
        self.partitions: list[MemoryPartitions] = []
        self.door = Door(settings, [], self.url)
        self.node = Node(
            self._open, self.door, settings, silence=silence, rng=random.Random(name), give_up=self._give_up
        )
        self.node.start()

    def _open(self) -> Replica:
        self.partitions.append(self.kafka.partitions())
        return PartitionReplica(
            RealDisk(self.folder),
            self.partitions[-1],
            url=self.url,
            segment_bytes=self.settings.segment_bytes,
            answer_seconds=PATIENCE,
        )

    def _give_up(self) -> None:
        for partitions in self.partitions[-1:]:
            partitions.close()

    def change(self, **faults: object) -> None:
        """Order faults of all that it has opened."""
        for partition in self.partitions[-1].opened:
            partition.change(**faults)

    @property
    def leads(self) -> bool:
        return self.door.engine is not None

    @property
    def position(self) -> int:
        return int(self.door.action("stats", {})["log_position"])

    @contextmanager
    def bus(self) -> Iterator[Bus]:
        """A client of this node alone."""
        with Bus([self.link()]) as bus:
            yield bus

    def link(self) -> EmbeddedLink:
        return lent_link(self.folder, self.door)

    def stop(self) -> None:
        self.node.stop()


class Shard:
    """Several nodes, and the Kafka that they share."""

    def __init__(
        self, folder: Path, *names: str, silence: float = SILENCE, kafka: MemoryKafka | None = None, **settings: object
    ) -> None:
        self.folder = folder
        self.kafka = kafka or MemoryKafka()
        self.settings = BrokerSettings(**settings)  # type: ignore[arg-type]
        self.silence = silence
        self.nodes: list[OneNode] = []
        for name in names:
            self.add(name)
            until(lambda: self.leader is not None, "nobody leads")

    def add(self, name: str) -> OneNode:
        self.nodes.append(OneNode(name, self.folder, self.kafka, self.settings, self.silence))
        return self.nodes[-1]

    @property
    def leader(self) -> OneNode | None:
        leading = [node for node in self.nodes if node.leads]
        return leading[-1] if leading else None

    def led_by(self, node: OneNode) -> None:
        """Wait until a node leads."""
        until(lambda: node.leads, f"{node.url} does not lead")

    def level(self) -> None:
        """Wait until all have followed all."""
        until(lambda: len({node.position for node in self.nodes}) == 1, "some are behind")

    def close(self) -> None:
        self.kafka.set_away(False)
        for node in self.nodes:
            for partitions in node.partitions:
                for partition in partitions.opened:
                    partition.change(cut_off=False, silent=False, held=False)
        for node in self.nodes:
            node.stop()


def threads_of_nodes() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("escrowmq-node")]
