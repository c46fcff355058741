"""Every commit log keeps the same promises (log/seam.py): segments on a fault disk, on a real one, and the memory
twin."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from escrowmq.log.commit_log import SegmentLog, open_log
from escrowmq.log.seam import CommitLog
from escrowmq.platform.disk import RealDisk, RealFile
from escrowmq.testing.disks import FaultDisk
from escrowmq.testing.log_conformance import LogConformance
from escrowmq.testing.memory_log import MemoryLog, MemoryStore

SEGMENT = 4096


class MemoryMaker:
    def __init__(self) -> None:
        self.store = MemoryStore()

    def open(self) -> MemoryLog:
        return MemoryLog(self.store, segment_bytes=SEGMENT, version="test")

    def crash(self, log: CommitLog) -> None:
        assert isinstance(log, MemoryLog)
        log.crash()

    def fail_next_sync(self, log: CommitLog) -> None:
        assert isinstance(log, MemoryLog)
        log.fail_next_sync = True

    def fill(self, log: CommitLog) -> Callable[[], None]:
        assert isinstance(log, MemoryLog)
        log.capacity = 2000

        def free() -> None:
            log.capacity = None

        return free


class FaultMaker:
    """Segments on a fault disk; ``compression`` and the crash's ``mode`` differ by test class."""

    def __init__(self, mode: str, compression: str) -> None:
        self.disk = FaultDisk(1)
        self.mode = mode
        self.compression = compression

    def open(self) -> SegmentLog:
        return open_log(self.disk, segment_bytes=SEGMENT, compression=self.compression, version="test")

    def crash(self, log: CommitLog) -> None:
        self.disk = self.disk.survivors(self.mode, 3)

    def fail_next_sync(self, log: CommitLog) -> None:
        self.disk.fail_next_sync = True

    def fill(self, log: CommitLog) -> Callable[[], None]:
        self.disk.budget = 10_000

        def free() -> None:
            self.disk.budget = None

        return free


class RealMaker:
    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.patch = patch

    def open(self) -> SegmentLog:
        return open_log(RealDisk(self.folder), segment_bytes=SEGMENT, version="test")

    def crash(self, log: CommitLog) -> None:
        log.close(clean=False)

    def fail_next_sync(self, log: CommitLog) -> None:
        real = RealFile.sync

        def failing(file: RealFile) -> None:
            self.patch.setattr(RealFile, "sync", real)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        self.patch.setattr(RealFile, "sync", failing)

    def fill(self, log: CommitLog) -> Callable[[], None]:
        real = RealFile.allocate

        def failing(file: RealFile, size: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        self.patch.setattr(RealFile, "allocate", failing)
        return lambda: self.patch.setattr(RealFile, "allocate", real)


class TestMemoryLog(LogConformance):
    @pytest.fixture
    def logs(self) -> MemoryMaker:
        return MemoryMaker()


class TestSegmentsOnAFaultDisk(LogConformance):
    @pytest.fixture(params=["dropped", "kept", "torn", "reordered"])
    def logs(self, request: pytest.FixtureRequest) -> FaultMaker:
        return FaultMaker(request.param, "none")


class TestCompressedSegments(LogConformance):
    @pytest.fixture
    def logs(self) -> FaultMaker:
        return FaultMaker("dropped", "lz4")


class TestSegmentsOnARealDisk(LogConformance):
    @pytest.fixture
    def logs(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RealMaker:
        return RealMaker(tmp_path / "data", monkeypatch)
