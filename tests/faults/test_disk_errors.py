"""The table of docs/disk-errors.md, row by row: what may be over refuses, what nobody can know stops, what is derived
never does.
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shard_script
from shard_judge import judge
from shard_world import Memory, World

from escrowmq.errors import Code, EscrowError, Overloaded
from escrowmq.log.commit_log import SegmentLog, open_log
from escrowmq.platform import descriptors
from escrowmq.platform.disk import NO_SPACE, SHORTAGE, RealDisk, disk_error
from escrowmq.schemas import Kind
from escrowmq.testing.disks import FaultDisk
from escrowmq.testing.log_conformance import START_US, messages

PASSING = sorted(NO_SPACE | SHORTAGE)
LASTING = [errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT, errno.EINVAL]
STARVED = [errno.EMFILE, errno.ENFILE, errno.ENOMEM]


def sends(world: World, plain: int, what: str, count: int) -> list[Code]:
    """Send messages that fill several segments; the codes of those that were refused."""
    refused = []
    for n in range(count):
        try:
            world.send(f"{what} {n}", {"topic": "orders", "body": bytes(1500)}, session=plain)
        except EscrowError as problem:
            refused.append(problem.code)
    return refused


@pytest.mark.parametrize("number", [*PASSING, *LASTING])
def test_every_errno_has_its_meaning(number: int) -> None:
    problem = disk_error(OSError(number, os.strerror(number)))
    wanted = Code.DISK_FULL if number in NO_SPACE else Code.OUT_OF_RESOURCES if number in SHORTAGE else Code.LOG_FAILED
    assert problem.code is wanted
    assert isinstance(problem, Overloaded) == (number in PASSING)


def test_no_memory_is_a_shortage() -> None:
    assert disk_error(MemoryError()).code is Code.OUT_OF_RESOURCES


@pytest.mark.invariant("I33")
@pytest.mark.parametrize("number", STARVED)
def test_without_descriptors_messages_are_refused_and_with_them_all_goes_on(number: int) -> None:
    memory, disk = Memory(), FaultDisk(1)
    world = World(disk, memory)
    shop, plain = shard_script.opening(world)
    t1 = world.prepare("t1", shop, {"topic": "orders"})
    disk.starved = number
    refused = sends(world, plain, "starved", 20)
    assert refused
    assert set(refused) == {Code.OUT_OF_RESOURCES}
    assert world.engine.status == "full"
    disk.starved = None
    assert sends(world, plain, "fed", 20) == []
    assert world.engine.status == "ok"
    assert world.end("t1 commit", shop, 1, t1) == [Code.COMMITTED]
    judge(world)
    judge(World(disk.survivors("dropped", 1), memory))


def fill(log: SegmentLog, count: int) -> int:
    """Frames over several segments of 4 KiB; the position of the last one."""
    position = 0
    for _ in range(count):
        position = log.append(Kind.PLAIN, messages(4, body=200), START_US)
        log.sync()
    return position


@pytest.mark.invariant("I34")
@pytest.mark.parametrize("number", STARVED)
def test_a_segment_that_begins_needs_nothing_more_half_way(number: int) -> None:
    """From the moment the old segment is sealed, descriptors and memory may be gone."""
    disk = FaultDisk(1)
    log = open_log(disk, segment_bytes=4096)
    sealed: Any = log._active
    seal = sealed.seal

    def starving() -> Any:
        disk.starved = number
        return seal()

    sealed.seal = starving
    while disk.starved is None:
        last = fill(log, 1)
    assert log._active is not sealed, "it rolled, without a descriptor to be had"
    assert log.read(np.arange(last, last + 4)).num_rows == 4
    disk.starved = None
    fill(log, 10)
    log.close()


@pytest.mark.invariant("I34")
@pytest.mark.parametrize("number", [*PASSING, *LASTING])
def test_a_snapshot_that_cannot_be_stored_never_stops_the_log(number: int) -> None:
    log = open_log(FaultDisk(1), segment_bytes=1 << 16)
    disk: Any = log._disk
    end = log.append(Kind.PLAIN, messages(3), START_US)
    log.sync()
    for step in range(1, 6):  # create, resize, write, sync, rename
        disk.failures = {disk.operations + step: number}
        with pytest.raises(EscrowError) as caught:
            log.save_snapshot({}, log.next_sequence, log.next_position, START_US)
        assert isinstance(caught.value, Overloaded) == (number in PASSING)
        end = log.append(Kind.PLAIN, messages(3), START_US)
        log.sync()
    disk.failures = {}
    log.save_snapshot({}, log.next_sequence, log.next_position, START_US)
    assert log.read(np.arange(end, end + 3)).num_rows == 3
    log.close()


@pytest.mark.parametrize("number", [*PASSING, *LASTING])
def test_the_rename_of_a_base_that_fails_is_tried_again(number: int) -> None:
    log = open_log(FaultDisk(1), segment_bytes=4096)
    disk: Any = log._disk
    end = fill(log, 10)
    log.save_snapshot({}, log.next_sequence, log.next_position, START_US)
    disk.failures = {disk.operations + 1: number}
    with pytest.raises(EscrowError):
        log.drop_before(end)
    log.append(Kind.PLAIN, messages(1), START_US)
    log.sync()
    assert log.drop_before(end) > 0
    log.close()


def second_creation() -> int:
    """The operation that creates the file of the second segment."""
    disk = FaultDisk(1)
    fill(open_log(disk, segment_bytes=4096), 6)
    return [n for n, what in enumerate(disk.journal, 1) if what.startswith("create") and ".segment" in what][1]


@pytest.mark.parametrize("number", [*PASSING, *LASTING])
def test_a_failure_before_anything_was_written(number: int) -> None:
    disk = FaultDisk(1, failures={second_creation(): number})
    log = open_log(disk, segment_bytes=4096)
    with pytest.raises(EscrowError) as caught:
        fill(log, 6)
    if number in PASSING:
        assert caught.value.code is (Code.DISK_FULL if number in NO_SPACE else Code.OUT_OF_RESOURCES)
        fill(log, 6)
        log.close()
    else:
        for _ in range(2):
            with pytest.raises(EscrowError) as again:
                fill(log, 1)
            assert again.value.code is Code.LOG_FAILED


@pytest.mark.parametrize("number", [*STARVED, errno.EIO])
def test_a_segment_that_cannot_be_opened_is_refused_to_its_reader_alone(number: int) -> None:
    disk = FaultDisk(1)
    log = open_log(disk, segment_bytes=4096)
    end = fill(log, 6)
    log.close()
    log = open_log(disk, segment_bytes=4096)
    disk.starved = number
    with pytest.raises(EscrowError) as caught:
        log.read(np.arange(1, 3))
    assert caught.value.code is (Code.DAMAGED if number == errno.EIO else Code.OUT_OF_RESOURCES)
    disk.starved = None
    assert log.read(np.arange(end, end + 4)).num_rows == 4
    assert log.read(np.arange(1, 3)).num_rows == 2
    log.close()


@pytest.mark.parametrize("number", STARVED)
def test_a_start_without_descriptors_can_be_tried_again(number: int) -> None:
    disk = FaultDisk(1)
    open_log(disk).close()
    disk.starved = number
    with pytest.raises(Overloaded) as caught:
        open_log(disk)
    assert caught.value.code is Code.OUT_OF_RESOURCES
    disk.starved = None
    open_log(disk).close()


@pytest.fixture
def few_descriptors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave this process no free descriptor, and no reserve: a command run in it may have made one."""
    monkeypatch.setattr(descriptors, "_reserve", 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/dev/fd")))
    gaps = []  # free descriptors below one in use: a limit above them would leave them, one below them would count them
    while (free := os.dup(0)) <= highest:
        gaps.append(free)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for gap in gaps:
            os.close(gap)


@pytest.mark.invariant("I33")
def test_a_real_log_without_descriptors_refuses_and_goes_on(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    log = open_log(RealDisk(tmp_path / "d"), segment_bytes=1 << 14)
    first = log.append(Kind.PLAIN, messages(4, body=200), START_US)
    log.sync()
    request.getfixturevalue("few_descriptors")
    with pytest.raises(Overloaded) as caught:
        fill(log, 40)
    assert caught.value.code is Code.OUT_OF_RESOURCES
    with pytest.raises(Overloaded):
        log.save_snapshot({}, log.next_sequence, log.next_position, START_US)
    assert log.read(np.arange(first, first + 4)).num_rows == 4, "what is mapped is read"
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, soft))
    for _ in range(40):
        log.append(Kind.PLAIN, messages(4, body=200), START_US)
    log.sync()
    log.save_snapshot({}, log.next_sequence, log.next_position, START_US)
    log.close()
    assert open_log(RealDisk(tmp_path / "d")).next_position == log.next_position + 1


@pytest.mark.invariant("I33")
def test_the_log_has_descriptors_in_reserve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    log = open_log(RealDisk(tmp_path / "d"), segment_bytes=1 << 14)
    fill(log, 1)
    request.getfixturevalue("few_descriptors")
    monkeypatch.setattr(descriptors, "_reserve", 8)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    fill(log, 40)
    log.save_snapshot({}, log.next_sequence, log.next_position, START_US)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == limit, "lifted for the moment of an opening only"
    log.close()
