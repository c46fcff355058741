"""Logs on a partition, opened again and again: what the conformance suite and the crash tests of the mirror share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from escrowmq.errors import Code, EscrowError, error
from escrowmq.log.kafka.kafka_log import KafkaLog
from escrowmq.log.kafka.partition import Partitions
from escrowmq.log.kafka.replica import PartitionReplica
from escrowmq.log.seam import CommitLog
from escrowmq.testing.disks import FaultDisk
from escrowmq.testing.partitions import MemoryKafka

SEGMENT = 4096


def follow_all(replica: PartitionReplica) -> None:
    """Follow to the end of the partition."""
    while replica.is_behind():
        replica.follow(1.0)


class PartitionMaker:
    """A log on a partition, and the folder of the node that opens it. ``lost``: the folder is a new one at every
    opening."""

    def __init__(self, partitions: Callable[[], Partitions], *, lost: bool, mode: str = "kept") -> None:
        self.partitions = partitions
        self.lost = lost
        self.mode = mode
        self.disk = FaultDisk(1)
        self.opened: KafkaLog | None = None

    def __enter__(self) -> PartitionMaker:
        return self

    def __exit__(self, *_: object) -> None:
        if self.opened is not None:
            self.opened.close(clean=False)

    def replica(self) -> PartitionReplica:
        return PartitionReplica(self.disk, self.partitions(), url="escrow://a:1", segment_bytes=SEGMENT)

    def open(self) -> KafkaLog:
        if self.lost and (self.opened is None or self.opened._closed):
            self.disk = FaultDisk(1)
        replica = self.replica()
        try:
            follow_all(replica)
            self.opened = replica.take_over("test")
        except BaseException:
            replica.close()
            raise
        return self.opened

    def crash(self, log: CommitLog) -> None:
        with suppress(EscrowError):
            log.close(clean=False)
        self.disk = FaultDisk(1) if self.lost else self.disk.survivors(self.mode, 3)

    def fail_next_sync(self, log: CommitLog) -> None:
        """What is sent next ends Kafka's producer."""

        def ended(number: int, record: bytes) -> None:
            raise error(Code.LOG_FAILED, "the producer has ended, as told")

        log._channel._partition.produce = ended

    def fill(self, log: CommitLog) -> Callable[[], None]:
        self.disk.budget = 10_000

        def free() -> None:
            self.disk.budget = None

        return free


class MemoryMaker(PartitionMaker):
    def __init__(self, *, lost: bool, mode: str = "kept") -> None:
        self.kafka = MemoryKafka()
        super().__init__(self.kafka.partitions, lost=lost, mode=mode)
