"""Reading: without copies, from many threads while the writer goes on, and quickly after a restart."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from log_scripts import START_US, checked, content, messages, opened

from escrowmq.errors import Code, EscrowError
from escrowmq.log import commit_log, recovery
from escrowmq.log.seam import CommitLog
from escrowmq.platform.disk import RealDisk
from escrowmq.schemas import Kind
from escrowmq.testing.disks import MemoryDisk
from escrowmq.testing.memory_log import MemoryLog


def test_a_run_within_one_frame_is_not_copied(tmp_path: Path) -> None:
    log = opened(RealDisk(tmp_path / "d"), segment_bytes=1 << 20)
    position = log.append(Kind.PLAIN, messages(100, body=1000), START_US)
    log.sync()
    (frame,) = log.frames(kinds=[Kind.PLAIN])
    rows = log.read(np.arange(position + 10, position + 20))
    assert rows.column("body").buffers()[2].address == frame.batch.column("body").buffers()[2].address
    assert rows.column("body").to_pylist() == messages(100, body=1000).column("body").to_pylist()[10:20]
    log.close()


def test_rows_outlive_the_log_and_its_files(tmp_path: Path) -> None:
    log = opened(RealDisk(tmp_path / "d"), segment_bytes=4096)
    position = log.append(Kind.PLAIN, messages(3), START_US)
    log.sync()
    rows = log.read(np.arange(position, position + 3))
    log.close()
    for path in (tmp_path / "d").iterdir():
        path.unlink()
    assert rows.column("key").to_pylist() == [None, "k-1", "k-2"]


@given(st.lists(st.integers(1, 7), min_size=1, max_size=12), st.data())
def test_segments_read_as_the_memory_twin_does(sizes: list[int], data: st.DataObject) -> None:
    twins: list[CommitLog] = [opened(MemoryDisk(), segment_bytes=2048), MemoryLog()]
    for log in twins:
        rows = 0
        for number, size in enumerate(sizes):
            log.append(Kind.PLAIN, messages(size, rows), START_US + number)
            rows += size
            if number % 2:
                log.sync()
    positions = np.array(data.draw(st.lists(st.integers(1, sum(sizes)), max_size=40)), np.int64)
    first, second = (log.read(positions) for log in twins)
    assert first.equals(second)
    assert first.column("message_id").to_pylist() == [int(p - 1).to_bytes(16, "big") for p in positions]
    times = [log.time_at(positions).tolist() for log in twins]
    assert times[0] == times[1]


def test_many_readers_while_the_writer_appends_rolls_and_drops(tmp_path: Path) -> None:
    log = opened(RealDisk(tmp_path / "d"), segment_bytes=1 << 14)
    visible = [1]
    stop = threading.Event()
    problems: list[BaseException] = []
    reads = [0, 0, 0]

    def reader(number: int) -> None:
        chance = np.random.default_rng(number)
        try:
            while not stop.is_set() or not reads[number]:
                low, high = log.first_position, visible[0]
                positions = chance.integers(max(low, 1), high, 50) if high > max(low, 1) else np.empty(0, np.int64)
                try:
                    rows = log.read(positions)
                except EscrowError as refusal:
                    if refusal.code != Code.RANGE_PURGED:
                        raise
                    continue
                expected = [int(p - 1).to_bytes(16, "big") for p in positions]
                assert rows.column("message_id").to_pylist() == expected
                reads[number] += 1
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=reader, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for n in range(150):
        log.append(Kind.PLAIN, messages(10, 10 * n, body=100), START_US + n)
        if n % 3 == 0:
            log.sync()
            visible[0] = log.next_position
        if n % 40 == 39:
            log.sync()
            log.save_snapshot({}, log.next_sequence, log.next_position, log.last_time_us)
            log.drop_before(log.position_before(START_US + n - 30))
    stop.set()
    for thread in threads:
        thread.join()
    assert problems == []
    assert min(reads) > 0
    assert log.first_position > 0
    log.close()


def test_opening_walks_only_the_last_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restart time does not grow with what is sealed; sealed segments are told by their side files."""
    disk = MemoryDisk()
    log = opened(disk, segment_bytes=4096)
    for n in range(200):
        log.append(Kind.CHECKED, checked([n]), START_US)
    log.close()
    walked: list[int] = []
    real = recovery.scan

    def scan(data: Any, header: Any, *rest: Any) -> Any:
        walked.append(header.sequence)
        return real(data, header, *rest)

    monkeypatch.setattr(recovery, "scan", scan)
    log = opened(disk, segment_bytes=4096)
    assert len(walked) == 1
    assert walked[0] > 100
    assert len(list(log.frames())) == 202
    log.close()


def descriptors_below(folder: Path) -> int:
    """How many of this process are of files there; others come and go with other threads."""
    count = 0
    for one in Path("/proc/self/fd").iterdir() if Path("/proc/self/fd").exists() else ():
        with suppress(OSError):
            count += one.readlink().is_relative_to(folder.resolve())
    return count


def test_open_files_do_not_grow_with_segments(tmp_path: Path) -> None:
    """I35: a sealed segment costs no descriptor, read or not."""
    log = opened(RealDisk(tmp_path / "d"), segment_bytes=1024)
    for n in range(300):
        log.append(Kind.CHECKED, checked([n]), START_US)
    log.close()
    log = opened(RealDisk(tmp_path / "d"), segment_bytes=1024)
    before = descriptors_below(tmp_path)
    assert len([content(frame) for frame in log.frames()]) == 302
    assert descriptors_below(tmp_path) == before
    log.close()


def test_one_write_and_one_sync_for_all_frames_of_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    from escrowmq.testing.disks import FaultDisk

    disk = FaultDisk()
    log = opened(disk, segment_bytes=1 << 20)
    log.reserve(100_000)
    before = len(disk.journal)
    for n in range(50):
        log.append(Kind.PLAIN, messages(3, 3 * n), START_US)
    log.sync()
    log.sync()
    assert disk.journal[before:] == ["write", "sync"]
    log.close()


def test_reserve_finds_room_for_what_is_appended_next() -> None:
    """After ``reserve``, appends of that size touch nothing that can run out of space."""
    from escrowmq.log.frames import size_bound
    from escrowmq.testing.disks import FaultDisk

    disk = FaultDisk()
    log = commit_log.open_log(disk, segment_bytes=8192)
    for n in range(30):
        batches = [messages(5, 5 * n), checked([n, n]), messages(1, 5 * n, body=2000)]
        log.reserve(sum(size_bound(batch) for batch in batches))
        disk.budget = 1  # whatever asks for more space from here on fails
        for kind, batch in zip((Kind.PLAIN, Kind.CHECKED, Kind.HALF), batches, strict=True):
            log.append(kind, batch, max(START_US + n, log.last_time_us))
        log.sync()
        disk.budget = None
    log.close()
