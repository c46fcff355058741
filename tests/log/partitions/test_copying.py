"""A log is copied from a folder into a partition and back, and is the same afterwards."""

from __future__ import annotations

import pyarrow as pa
import pytest
from test_mirror import act, acts, code, content, leading

from escrowmq.errors import Code, EscrowError
from escrowmq.log.commit_log import SegmentLog, open_log
from escrowmq.log.kafka.copying import to_folder, to_partition
from escrowmq.schemas import Kind
from escrowmq.testing.disks import MemoryDisk
from escrowmq.testing.log_conformance import START_US, messages
from escrowmq.testing.partitions import MemoryKafka


@pytest.fixture
def kafka() -> MemoryKafka:
    return MemoryKafka()


def opened(disk: MemoryDisk) -> SegmentLog:
    return open_log(disk, segment_bytes=4096)


@pytest.fixture(params=[False, True], ids=["whole", "behind retention"])
def folder(request: pytest.FixtureRequest) -> MemoryDisk:
    """A folder with a log of several segments and openers, and acts."""
    disk = MemoryDisk()
    for opener in range(3):
        log = opened(disk)
        for n in range(15):
            log.append(Kind.PLAIN, messages(3, n, body=200), START_US + 20 * opener + n)
            log.sync()
        act(log)
        log.close()
    if request.param:
        log = opened(disk)
        log.save_snapshot({"t": pa.table({"n": [7]})}, log.next_sequence, log.next_position, log.last_time_us)
        assert log.drop_before(log.position_before(START_US + 25)) > 0
        log.append(Kind.PLAIN, messages(2, body=1_000_000), START_US + 60)  # larger than a record
        log.close()
    return disk


@pytest.mark.invariant("I1")
def test_there_and_back(kafka: MemoryKafka, folder: MemoryDisk) -> None:
    before = folder.files()
    there = to_partition(folder, kafka.partitions(), version="test")
    assert folder.files() == before
    log = opened(folder.copy())
    first = log._reader.stored_from()[0]
    expected, records, snapshot = content(log, first)[:-1], acts(log), log.load_snapshot()
    assert (there.first, there.end, there.acts) == (first, log.next_sequence - 1, records[0])
    log.close()

    back = MemoryDisk()
    assert to_folder(kafka.partitions(), back) == there
    copy = opened(back)  # a log like any other
    assert content(copy, first)[:-1] == expected
    assert (acts(copy), copy.load_snapshot()) == (records, snapshot)
    copy.close()

    leader = leading(kafka, MemoryDisk())  # and a log that others follow
    assert content(leader, first)[: len(expected)] == expected
    assert content(leader)[-1][4] == expected[-1][4] + 1  # the next opener
    assert acts(leader) == records
    act(leader)
    leader.close()
    assert to_folder(kafka.partitions(), MemoryDisk()).end == there.end + 1


def test_only_into_what_is_empty(kafka: MemoryKafka, folder: MemoryDisk) -> None:
    to_partition(folder, kafka.partitions(), version="test")
    assert code(lambda: to_partition(folder, kafka.partitions(), version="test")) is Code.BAD_ARGUMENT
    assert code(lambda: to_folder(kafka.partitions(), folder)) is Code.NOT_A_DATA_FOLDER
    assert code(lambda: to_folder(MemoryKafka().partitions(), MemoryDisk())) is Code.NOT_FOUND
    log = opened(folder)
    assert code(lambda: to_partition(folder, MemoryKafka().partitions(), version="test")) is Code.FOLDER_IN_USE
    log.close()


def test_damage_is_not_copied(folder: MemoryDisk) -> None:
    names = [name for name in folder.list() if name.endswith(".segment")]
    folder.flip(names[0], 8 * 300)
    for name in [name for name in folder.list() if name.endswith(".index")]:
        folder.remove(name)
    with pytest.raises(EscrowError) as caught:
        to_partition(folder, MemoryKafka().partitions(), version="test")
    assert caught.value.code is Code.DAMAGED


def test_what_kafka_does_not_have_is_noticed(
    kafka: MemoryKafka, folder: MemoryDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def losing(*args: object) -> object:
        kafka.lose(2)
        return stored(*args[:2], kafka.log.next)

    from escrowmq.log.kafka import copying

    stored = copying._digest_partition
    monkeypatch.setattr(copying, "_digest_partition", losing)
    assert code(lambda: to_partition(folder, kafka.partitions(), version="test")) is Code.DAMAGED
