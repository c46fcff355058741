"""Base snapshots in Kafka: whole or not used, and there whoever deletes what, and however late."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress

import pytest

from escrowmq.errors import Code, EscrowError
from escrowmq.log.kafka.bases import CHUNK_BYTES, Bases, Manifest
from escrowmq.log.kafka.fold import Standing
from escrowmq.testing.disks import MemoryDisk
from escrowmq.testing.partitions import MemoryKafka


def manifest(rank: int, size: int, act_bytes: int = 0) -> Manifest:
    standing = Standing(offset=rank, shard=1, act_bytes=act_bytes)
    return Manifest(0, 1, 2, 3, rank, rank, 0, rank + 5, size, act_bytes, 0, 0, standing)


def content(rank: int, size: int) -> bytes:
    return random.Random(rank).randbytes(size)


def test_a_base_comes_back_whole() -> None:
    kafka = MemoryKafka()
    size, act_bytes = 2 * CHUNK_BYTES + 77, CHUNK_BYTES
    data = content(7, size + act_bytes)
    bases = Bases(kafka.partitions().base())
    assert bases.newest() is None
    sent = bases.send(manifest(7, size, act_bytes), [data[:size], data[size:]])
    bases.delete_old()
    found = Bases(kafka.partitions().base()).newest()
    assert found == sent
    disk = MemoryDisk()
    bases.fetch(found, disk)
    assert disk.files() == {f"base-{12:020d}-{7:020d}.snapshot": data[:size], "acts.journal": data[size:]}
    bases.fetch_snapshot(found, disk)
    assert disk.files()[f"snapshot-{12:020d}.snapshot"] == data[:size]


@pytest.mark.parametrize("record", range(5))
def test_a_base_that_does_not_check_is_not_used(record: int) -> None:
    kafka = MemoryKafka()
    bases = Bases(kafka.partitions().base())
    older = bases.send(manifest(3, 10), [content(3, 10)])
    bases.send(manifest(9, 3 * CHUNK_BYTES), [content(9, 3 * CHUNK_BYTES)])
    at = len(kafka.base.records) - 4 + min(record, 3)
    data = bytearray(kafka.base.records[at])
    data[random.Random(record).randrange(len(data))] ^= 4
    if record == 4:
        data = data[: len(data) // 2]
    found = Bases(kafka.partitions().base())
    kept = found.newest()
    kafka.base.records[at] = bytes(data)
    assert Bases(kafka.partitions().base()).newest() == older
    assert kept is not None  # read before it was damaged: that is noticed when it is fetched
    if record < 3:
        with pytest.raises(EscrowError) as caught:
            found.fetch(kept, MemoryDisk())
        assert caught.value.code is Code.DAMAGED


class Recording:
    """A partition that keeps what is sent for later."""

    name = "later"

    def __init__(self, records: list[bytes]) -> None:
        self._records = records
        self._numbers: list[int] = []

    def produce(self, number: int, record: bytes) -> None:
        self._records.append(record)
        self._numbers.append(number)

    def acknowledged(self, timeout: float) -> list[tuple[int, int]]:
        numbers, self._numbers = self._numbers, []
        return [(number, number) for number in numbers]

    def ends(self, timeout: float) -> tuple[int, int]:
        return 0, 0


class Sender:
    """A node that sends bases, step by step: each step may come at any time later."""

    def __init__(self, kafka: MemoryKafka) -> None:
        self.kafka = kafka
        self.partition = kafka.partitions().base()
        self.bases = Bases(self.partition)

    def steps(self, rank: int) -> Iterator[str]:
        """Send chunks one by one, and the manifest; then delete, with what was known before."""
        records: list[bytes] = []
        bases = Bases(Recording(records))
        with suppress(EscrowError):  # what was sent is not there yet
            bases.send(manifest(rank, 300), [content(rank, 300)])
        for number, record in enumerate(records):
            self.partition.produce(number, record)
            yield "sent"
        best = self.bases.newest()
        yield "read"
        assert best is not None
        self.kafka.log.first = max(self.kafka.log.first, best.manifest.rank)  # records below are deleted
        yield "deleted records"
        self.bases.delete_old()
        yield "deleted bases"


@pytest.mark.invariant("I1")
@pytest.mark.parametrize("seed", range(60))
def test_whoever_deletes_however_late_the_best_base_is_there(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("escrowmq.log.kafka.bases.CHUNK_BYTES", 100)
    chance = random.Random(seed)
    kafka = MemoryKafka()
    ranks = chance.sample(range(10, 100), 6)
    running = [(sender := Sender(kafka)).steps(rank) for rank in ranks[:3]]
    waiting = ranks[3:]
    while running:
        one = chance.choice(running)
        if next(one, None) is None:
            running.remove(one)
            if waiting:
                running.append(Sender(kafka).steps(waiting.pop()))
        found = Bases(kafka.partitions().base()).newest()
        if kafka.log.first:
            assert found is not None
            assert found.manifest.rank >= kafka.log.first  # what a reader goes on with is there
            sender.bases.fetch(found, disk := MemoryDisk())
            (stored,) = disk.files().values()
            assert stored == content(found.manifest.rank, 300)
