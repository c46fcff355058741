"""Nodes of a log on a partition: they follow each other, take over, lose their folders or parts of them, and hold the
same log afterwards.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from log_makers import SEGMENT, follow_all

from escrowmq.errors import Code, EscrowError, Fenced, Overloaded, error
from escrowmq.log.commit_log import open_log
from escrowmq.log.kafka.kafka_log import KafkaLog
from escrowmq.log.kafka.partition import Partitions
from escrowmq.log.kafka.replica import PartitionReplica
from escrowmq.log.offline import open_offline
from escrowmq.log.seam import Frame, StoredLog
from escrowmq.platform import failpoints
from escrowmq.platform.failpoints import Failpoint
from escrowmq.schemas import Kind
from escrowmq.testing.disks import MODES, FaultDisk, MemoryDisk, Mode, SimulatedCrash
from escrowmq.testing.log_conformance import START_US, checked, messages
from escrowmq.testing.partitions import MemoryKafka

FOR_EVER = 1e6
"""Seconds: who waits so long for an answer does not end."""


def opened(kafka: MemoryKafka, disk: MemoryDisk, node: str = "a") -> PartitionReplica:
    return PartitionReplica(
        disk, kafka.partitions(), url=f"escrow://{node}:1", segment_bytes=SEGMENT, answer_seconds=60.0
    )


def leading(kafka: MemoryKafka, disk: MemoryDisk, node: str = "a") -> KafkaLog:
    return leading_on(kafka.partitions(), disk, node)


def leading_on(partitions: Partitions, disk: MemoryDisk, node: str = "a") -> KafkaLog:
    replica = PartitionReplica(disk, partitions, url=f"escrow://{node}:1", segment_bytes=SEGMENT)
    follow_all(replica)
    return replica.take_over("test")


def content(log: StoredLog, start: int = 0) -> list[tuple[Any, ...]]:
    return [(f.kind, f.sequence, f.position, f.time_us, f.epoch, f.batch.to_pylist()) for f in log.frames(start)]


def acts(log: StoredLog) -> tuple[int, str, list[Any]]:
    return log.acts.verify()


def act(log: StoredLog, size: int = 10) -> None:
    with log.acts.act("test.act", {"text": "x" * size}, lambda: START_US) as done:
        done.ended = {"done": True}


def grow(log: KafkaLog, count: int, start: int = 0) -> None:
    """Some frames of all sizes, several in the air at once, and acts between them."""
    finishes = []
    for n in range(start, start + count):
        time_us = max(START_US + n, log.last_time_us)
        log.append(Kind.PLAIN, messages(1 + n % 5, 5 * n, body=64 + 100 * (n % 7)), time_us)
        if n % 3 == 0:
            log.append(Kind.CHECKED, checked([n, n + 1]), time_us)
        if log._active.end > SEGMENT - 3000 or n % 4 == 3:
            finishes.append(log.hand_over())
            for finish in finishes:
                finish()
            finishes = []
        elif n % 2:
            finishes.append(log.hand_over())
        if n % 10 == 9:
            act(log, 50)
    for finish in finishes:
        finish()
    log.sync()


def retain(log: KafkaLog, position: int) -> int:
    log.save_snapshot({"t": pa.table({"n": [position]})}, log.next_sequence, log.next_position, log.last_time_us)
    dropped = log.drop_before(position)
    if log._base_upload is not None:
        log._base_upload.result()
    return dropped


@pytest.fixture
def kafka() -> MemoryKafka:
    return MemoryKafka()


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    failpoints.arm()


def code(act: Any) -> Code:
    with pytest.raises(EscrowError) as caught:
        act()
    return caught.value.code


@pytest.mark.invariant("I1")
def test_a_follower_has_what_the_leader_has_and_takes_over(kafka: MemoryKafka) -> None:
    leader = leading(kafka, MemoryDisk())
    disk = MemoryDisk()
    follower = opened(kafka, disk, "b")
    given: list[Frame] = []
    for n in range(0, 60, 20):
        grow(leader, 20, n)
        while follower.is_behind():
            given += follower.follow(1.0)
        assert content(follower.log) == content(leader)
        assert acts(follower.log) == acts(leader)
        assert follower.leader == "escrow://a:1"
        assert follower.silent_for() < 3600
    assert [frame.sequence for frame in given] == list(range(leader.next_sequence))
    assert content(open_offline(disk, in_use=True)) == content(leader)[: open_offline(disk, in_use=True).next_sequence]
    assert open_offline(disk, in_use=True).next_sequence > 40
    grow(leader, 7, 60)  # nobody followed that yet
    expected = content(leader)
    found = follower.log
    log = follower.take_over("test")
    assert log is found
    assert [f.sequence for f in log.caught_up()] == list(range(given[-1].sequence + 1, log.next_sequence))
    assert log.caught_up() == []
    assert content(log)[:-1] == expected
    assert (log.epoch, content(log)[-1][0]) == (2, Kind.OPENED)
    assert code(lambda: grow(leader, 1, 100)) is Code.LOG_FAILED  # by the sync, or before it by a beat
    assert leader.fenced
    assert not log.fenced
    assert code(lambda: leader.confirm(1.0)) is Code.LOG_FAILED
    log.confirm(60.0)
    grow(log, 5, 100)
    log.close()
    leader.close()
    log = leading(kafka, MemoryDisk(), "c")
    assert content(log)[: len(expected)] == expected
    log.close()


def test_a_clean_end_is_told_to_the_followers(kafka: MemoryKafka) -> None:
    leader = leading(kafka, MemoryDisk())
    follower = opened(kafka, MemoryDisk(), "b")
    assert follower.silent_for() == float("inf")  # as far as it knows
    follow_all(follower)
    assert follower.silent_for() < 3600
    leader.close()
    follow_all(follower)
    assert follower.silent_for() == float("inf")
    assert follower.leader is None
    follower.close()


def test_an_act_larger_than_a_record_is_followed(kafka: MemoryKafka) -> None:
    leader = leading(kafka, MemoryDisk())
    act(leader, 2_500_000)
    act(leader)
    assert acts(leader)[0] == 4
    leader.close()
    log = leading(kafka, MemoryDisk(), "b")
    act(log)
    assert (acts(log)[0], acts(log)[2]) == (6, [])
    log.close()


def test_of_two_first_openers_the_log_is_that_of_the_first_claim(kafka: MemoryKafka) -> None:
    first, second = opened(kafka, MemoryDisk(), "a"), opened(kafka, MemoryDisk(), "b")
    assert first.log.shard != second.log.shard
    one = first.take_over("test")
    other = second.take_over("test")
    assert (other.shard, other.epoch) == (one.shard, 2)
    assert content(other)[:1] == content(one)
    assert code(lambda: (one.append(Kind.CHECKED, checked([1]), START_US), one.sync())) is Code.LOG_FAILED
    other.close()
    one.close()


def test_who_is_overtaken_while_it_opens_is_fenced(kafka: MemoryKafka) -> None:
    late = opened(kafka, MemoryDisk(), "a")
    overtaken: list[KafkaLog] = []

    def overtake() -> None:
        failpoints.arm()
        overtaken.append(leading(kafka, MemoryDisk(), "b"))

    failpoints.arm(Failpoint("kafka.claimed", 1, overtake))
    with pytest.raises(Fenced):
        late.take_over("test")
    assert content(overtaken[0])[-1][4] == 2
    overtaken[0].close()


def history(kafka: MemoryKafka, disk: MemoryDisk) -> tuple[list[Any], Any]:
    """A log with several segments and acts; what is in it."""
    log = leading(kafka, disk)
    grow(log, 45)
    found = content(log), acts(log)
    log.close(clean=False)
    return found


@pytest.mark.invariant("I1")
@pytest.mark.parametrize("seed", range(40))
def test_a_torn_mirror_is_equal_after_it_was_opened(
    kafka: MemoryKafka, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = MemoryDisk()
    expected = history(kafka, disk)
    chance = random.Random(seed)
    files = disk.files()
    for _ in range(chance.randrange(1, 4)):
        name = chance.choice(sorted(files))
        data = files[name]
        match chance.randrange(4):
            case 0:
                del files[name]
            case 1:
                files[name] = data[: chance.randrange(len(data) + 1)]
            case 2 if data:
                flipped = bytearray(data)
                flipped[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
                files[name] = bytes(flipped)
            case _:
                files[name] = data[: len(data) // 2] + bytes(len(data) - len(data) // 2)
        if len(files) < 3:
            break
        files = {n: d for n, d in files.items() if n in disk.files()}
    if ".kafka.json" not in files:  # without it the folder would be taken for somebody's own log
        files[".kafka.json"] = b""
    damaged = MemoryDisk(files)
    monkeypatch.setattr("escrowmq.log.kafka.marks.boot_id", lambda: "the machine was started anew")
    log = leading(kafka, damaged, "b")
    assert content(log)[: len(expected[0])] == expected[0]
    assert acts(log) == expected[1]
    everything = content(log)
    log.close()
    assert content(open_offline(damaged, in_use=False)) == everything


def test_damage_that_was_met_is_followed_again(kafka: MemoryKafka) -> None:
    disk = MemoryDisk()
    expected = history(kafka, disk)
    names = sorted(name for name in disk.list() if name.endswith(".segment"))
    disk.flip(names[len(names) // 2], 8 * 200)
    replica = opened(kafka, disk)
    assert code(lambda: content(replica.log)) is Code.DAMAGED  # met by who read it
    replica.close()
    replica = opened(kafka, disk)
    assert content(replica.log) != expected[0]
    follow_all(replica)
    assert content(replica.log)[: len(expected[0])] == expected[0]
    assert not replica.log.damages()
    replica.close()


def followed(kafka: MemoryKafka, disk: MemoryDisk) -> tuple[list[Any], Any]:
    """What is in a node's folder that followed to the end, and was closed."""
    replica = opened(kafka, disk, "b")
    follow_all(replica)
    found = content(replica.log), acts(replica.log)
    replica.close()
    return found


@pytest.mark.invariant("I1")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("part", range(4))
def test_a_node_may_die_at_any_step_of_following(
    kafka: MemoryKafka, mode: Mode, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = leading(kafka, MemoryDisk())
    grow(log, 20)
    log.close()
    disk = FaultDisk(1)
    expected = followed(kafka, disk)
    steps = disk.operations
    for at in range(1 + part, steps, 4 * 5):
        disk = FaultDisk(at, crash_at=at)
        with pytest.raises(SimulatedCrash):
            followed(kafka, disk)
        left = disk.survivors(mode, at)
        if ".kafka.json" not in left.list():
            assert not [name for name in left.list() if name.endswith(".segment")]
            left = FaultDisk(at)
        if mode != "kept":  # not the process died, but the machine
            monkeypatch.setattr("escrowmq.log.kafka.marks.boot_id", lambda at=at: f"boot {at}")
        assert followed(kafka, left) == expected


@pytest.mark.invariant("I1")
@pytest.mark.parametrize(
    "step",
    ["base.chunks_sent", "base.manifest_sent", "base.sent", "base.records_deleted", "base.old_deleted"],
)
@pytest.mark.parametrize("pass_", [1, 2])
def test_a_leader_may_die_at_any_step_of_retention(kafka: MemoryKafka, step: str, pass_: int) -> None:
    log = leading(kafka, MemoryDisk())
    grow(log, 40)
    act(log)
    if pass_ == 2:  # there is a base already
        assert retain(log, log.position_before(START_US + 15)) > 0
        grow(log, 20, 40)

    def die() -> None:
        raise SimulatedCrash

    failpoints.arm(Failpoint(step, 1, die))
    limit = log.position_before(log.last_time_us - 12)
    with pytest.raises(SimulatedCrash):
        retain(log, limit)
    failpoints.arm()
    expected, records = content(log, log._reader.stored_from()[0]), acts(log)
    log.close(clean=False)
    for _ in range(2):
        log = leading(kafka, MemoryDisk(), "b")
        assert log.first_position <= limit
        assert content(log, expected[0][1])[: len(expected)] == expected
        assert acts(log) == records
        if log.first_position:
            snapshot = log.load_snapshot()
            assert snapshot is not None
            assert snapshot.sequence > 0
        assert retain(log, limit) >= 0  # what was left undone is done
        assert log.first_position == limit
        log.close()
    log = leading(kafka, MemoryDisk(), "c")
    assert log.first_position == limit
    log.close()


@pytest.mark.invariant("I1")
def test_lost_followed_retention_lost_again(kafka: MemoryKafka) -> None:
    log = leading(kafka, MemoryDisk())
    grow(log, 30)
    expected = content(log)
    for n in range(30, 150, 30):
        log.close()
        log = leading(kafka, MemoryDisk(), f"n{n}")  # followed: its marks are those of a follower
        grow(log, 30, n)
        expected += content(log, len(expected))
        limit = log.position_before(START_US + n - 10)
        assert retain(log, limit) > 0
        first = log._reader.stored_from()[0]
        assert content(log, first) == expected[first:]
        assert log.first_position == limit
    assert kafka.log.first > 0
    log.close()
    replica = opened(kafka, MemoryDisk(), "z")
    follow_all(replica)
    assert content(replica.log, first) == expected[first:]
    assert code(partial(replica.log.read, np.array([limit - 1]))) is Code.RANGE_PURGED
    replica.close()


def test_a_follower_drops_what_the_leader_dropped(kafka: MemoryKafka, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("escrowmq.log.kafka.replica.BASE_SECONDS", -1.0)
    leader = leading(kafka, MemoryDisk())
    disk = MemoryDisk()
    follower = opened(kafka, disk, "b")
    for n in (0, 40):
        grow(leader, 40, n)
        follow_all(follower)
        assert retain(leader, leader.position_before(START_US + n + 20)) > 0
        grow(leader, 3, n + 40)
        follow_all(follower)
        follower.follow(0.0)
        assert 0 < follower.log.first_position <= leader.first_position
        first = leader._reader.stored_from()[0]
        assert content(follower.log, first) == content(leader, first)
    follower.close()
    follower = opened(kafka, disk, "b")  # its base is local
    assert follower.log.load_snapshot() is not None
    assert not follower.restarted()
    follower.close()
    leader.close()


@pytest.mark.invariant("I1")
def test_a_follower_follows_and_leads_while_the_partition_of_bases_is_silent(
    kafka: MemoryKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("escrowmq.log.kafka.replica.BASE_SECONDS", 0.0)
    monkeypatch.setattr("escrowmq.log.kafka.replica.BASE_POLL_SECONDS", 0.001)
    leader = leading(kafka, MemoryDisk())
    partitions = kafka.partitions()
    follower = PartitionReplica(
        MemoryDisk(), partitions, url="escrow://b:1", segment_bytes=SEGMENT, answer_seconds=FOR_EVER
    )
    grow(leader, 40)
    follow_all(follower)
    assert retain(leader, leader.position_before(START_US + 20)) > 0
    partitions.opened[-1].change(silent=True)
    grow(leader, 10, 40)
    follow_all(follower)
    first = leader._reader.stored_from()[0]
    expected = content(leader, first)
    assert content(follower.log, first) == expected
    log = follower.take_over("test")
    assert content(log, first)[: len(expected)] == expected
    assert code(leader.close) is Code.LOG_FAILED  # another one leads
    log.close()


@pytest.mark.invariant("I1")
@pytest.mark.parametrize("purged", [False, True], ids=["silent", "deleted"])
@pytest.mark.parametrize("reads", [0, 1], ids=["at-the-look", "at-the-fetch"])
def test_a_base_that_is_gone_while_it_is_fetched_is_fetched_later(
    kafka: MemoryKafka, monkeypatch: pytest.MonkeyPatch, reads: int, purged: bool
) -> None:
    monkeypatch.setattr("escrowmq.log.kafka.replica.BASE_SECONDS", 0.0)
    monkeypatch.setattr("escrowmq.log.kafka.replica.BASE_FETCH_SECONDS", 0.01)
    leader = leading(kafka, MemoryDisk())
    partitions = kafka.partitions()
    follower = PartitionReplica(
        MemoryDisk(), partitions, url="escrow://b:1", segment_bytes=SEGMENT, answer_seconds=FOR_EVER
    )
    grow(leader, 40)
    follow_all(follower)
    assert retain(leader, leader.position_before(START_US + 20)) > 0
    base, at = partitions.opened[-1], follower.log.first_position
    read = base.read
    looked: list[int] = []

    def soon_gone(start: int, end: int, timeout: float) -> list[tuple[int, bytes]]:
        looked.append(start)
        if len(looked) <= reads:
            return read(start, end, timeout)
        if purged:
            raise error(Code.RANGE_PURGED, "a newer base stands for it")
        return []

    monkeypatch.setattr("escrowmq.log.kafka.replica.BASE_POLL_SECONDS", 60.0)
    monkeypatch.setattr(base, "read", soon_gone)
    follower.follow(0.0)
    assert len(looked) > reads
    assert follower.log.first_position == at
    monkeypatch.setattr(base, "read", read)
    follower.follow(0.0)
    assert follower.log.first_position > at
    follower.close()
    leader.close()


def test_a_large_base_is_read_between_what_is_followed(kafka: MemoryKafka, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("escrowmq.log.kafka.replica.BASE_SECONDS", 0.0)
    leader = leading(kafka, MemoryDisk())
    partitions = kafka.partitions()
    follower = PartitionReplica(MemoryDisk(), partitions, url="escrow://b:1", segment_bytes=SEGMENT)
    grow(leader, 40)
    follow_all(follower)
    retain(leader, leader.position_before(START_US + 20))
    base, at = partitions.opened[-1], follower.log.first_position
    read, clock = base.read, [0.0]

    def one_record_a_second(start: int, end: int, timeout: float) -> list[tuple[int, bytes]]:
        clock[0] += 1.0
        return read(start, end, timeout)[:1]

    monkeypatch.setattr(base, "read", one_record_a_second)
    monkeypatch.setattr("escrowmq.log.kafka.bases.monotonic", lambda: clock[0])
    looks = 0
    while follower.log.first_position == at:
        grow(leader, 1, 100 + looks)
        assert len(follower.follow(0.0)) >= 1
        looks += 1
        assert looks < 100
    assert looks > 1
    follower.close()
    leader.close()


def test_a_follower_behind_the_cut_begins_anew(kafka: MemoryKafka) -> None:
    leader = leading(kafka, MemoryDisk())
    grow(leader, 10)
    disk = MemoryDisk()
    follower, closed = opened(kafka, disk, "b"), opened(kafka, other := MemoryDisk(), "c")
    follower.follow(0.0)
    closed.follow(0.0)
    closed.close()
    grow(leader, 60, 10)
    assert retain(leader, leader.position_before(START_US + 60)) > 0
    first = leader._reader.stored_from()[0]
    for node in (follower, opened(kafka, other, "c")):
        follow_all(node)
        assert node.restarted()
        assert not node.restarted()
        assert content(node.log, first) == content(leader, first)
        assert acts(node.log) == acts(leader)
        node.close()
    leader.close()


def test_a_full_disk_loses_no_frame(kafka: MemoryKafka) -> None:
    leader = leading(kafka, MemoryDisk())
    grow(leader, 40)
    disk = FaultDisk(1)
    follower = opened(kafka, disk, "b")
    disk.budget = 20_000
    given: list[Frame] = []
    refusals = 0
    while follower.is_behind():
        try:
            given += follower.follow(1.0)
        except Overloaded:
            refusals += 1
            disk.budget += 4_000
    assert refusals > 3
    assert [frame.sequence for frame in given] == list(range(leader.next_sequence))
    assert content(follower.log) == content(leader)
    follower.close()
    leader.close()


def test_a_mirror_ahead_of_the_partition_is_refused(kafka: MemoryKafka) -> None:
    disk = MemoryDisk()
    leader = leading(kafka, disk)
    grow(leader, 20)
    leader.close(clean=False)
    before = disk.files()
    kafka.lose(6)
    replica = opened(kafka, disk)
    assert code(lambda: (follow_all(replica), replica.follow(0.0), replica.take_over("test"))) is Code.DAMAGED
    replica.close()
    segments = {name: data for name, data in disk.files().items() if name.endswith(".segment")}
    assert {name: data[: len(before[name])] for name, data in segments.items()} == {
        name: before[name][: len(data)] for name, data in segments.items()
    }


def test_folders_are_not_mixed_up(kafka: MemoryKafka) -> None:
    own = MemoryDisk()
    open_log(own).close()
    before = own.files()
    assert code(lambda: opened(kafka, own)) is Code.NOT_A_DATA_FOLDER
    assert own.files() == before
    mirror = MemoryDisk()
    leading(kafka, mirror).close()
    assert code(lambda: open_log(mirror)) is Code.NOT_A_DATA_FOLDER
    assert code(lambda: opened(MemoryKafka("other/0"), mirror)) is Code.BAD_SETTING
    open_log(own).close()  # the folders were given back
    leading(kafka, mirror).close()


def test_what_counts_is_durable_before_it_is_in_the_mirror(kafka: MemoryKafka) -> None:
    leader = PartitionReplica(disk := FaultDisk(1), kafka.partitions(), url="escrow://a:1").take_over("test")
    before = leader.durable_sequence
    leader.append(Kind.PLAIN, messages(2, 0), START_US)
    leader.sync()
    assert leader.durable_sequence == leader.next_sequence > before
    written = len(disk.journal)
    leader.append(Kind.PLAIN, messages(2, 500), START_US + 50)
    leader.hand_over()()  # it counts, and may be answered
    leader.append(Kind.PLAIN, messages(1, 502), START_US + 51)
    in_the_air = leader.hand_over()
    assert len(disk.journal) == written
    assert content(leader)[-2:][0][5] == messages(2, 500).to_pylist()  # read from memory meanwhile
    assert leader.durable_sequence == leader.next_sequence - 1  # who asks has it written
    assert disk.journal[written:] == ["write"]
    shown = open_offline(disk, in_use=True).next_sequence
    assert shown == leader.durable_sequence - 1  # the last one when a later frame says so
    in_the_air()
    leader.settle()
    leader.settle()
    assert disk.journal[written:] == ["write", "write"]
    expected = content(leader)
    leader.close()
    assert content(leading(kafka, MemoryDisk(), "b"))[: len(expected)] == expected


@pytest.mark.invariant("I1")
def test_a_mirror_that_cannot_be_written_loses_nothing_that_counts(kafka: MemoryKafka) -> None:
    leader = PartitionReplica(disk := FaultDisk(1), kafka.partitions(), url="escrow://a:1").take_over("test")
    leader.append(Kind.PLAIN, messages(2, 500), START_US + 50)
    finish = leader.hand_over()
    disk.failures = {disk.operations + 1: errno.EIO}
    finish()  # it counts, whatever the mirror does
    expected = content(leader)
    assert code(leader.settle) is Code.LOG_FAILED
    assert leader.durable_sequence == leader.next_sequence - 1  # and nothing is raised
    assert code(leader.settle) is Code.LOG_FAILED
    assert code(lambda: leader.append(Kind.CHECKED, checked([1]), START_US + 51)) is Code.LOG_FAILED
    leader.close(clean=False)
    log = leading(kafka, disk)  # the half that was written is cut off, and followed again
    assert content(log)[: len(expected)] == expected
    log.close()


def test_kafka_away_at_the_end_takes_a_bounded_time(kafka: MemoryKafka) -> None:
    leader = leading(kafka, disk := MemoryDisk())
    grow(leader, 10)
    leader.append(Kind.CHECKED, checked([1]), START_US + 100)
    finish = leader.hand_over
    kafka.set_away(True)
    finish()
    leader.close(clean=False)
    assert code(finish) is Code.CLOSED
    kafka.set_away(False)
    log = leading(kafka, disk)
    log.close()
