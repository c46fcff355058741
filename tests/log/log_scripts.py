"""Short runs of a log that the tests crash, damage and compare. Everything about them is fixed: seed, clock,
content."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from escrowmq.log.commit_log import SegmentLog, open_log
from escrowmq.log.seam import Frame
from escrowmq.platform.disk import Disk
from escrowmq.schemas import STORED, Kind
from escrowmq.testing.clock import SimulatedClock
from escrowmq.testing.log_conformance import START_US, checked, messages

SEED = bytes(range(1, 13))
SEGMENT = 4096

Content = tuple[Any, ...]


def opened(disk: Disk, *, segment_bytes: int = SEGMENT, compression: str = "none") -> SegmentLog:
    """The log of ``disk`` with a fixed shard, salt and clock."""
    return open_log(
        disk,
        segment_bytes=segment_bytes,
        compression=compression,
        version="1",
        clock=SimulatedClock(START_US),
        seed=SEED,
    )


def content(frame: Frame) -> Content:
    """What must be the same about a frame, whoever reads it."""
    return (frame.kind, frame.sequence, frame.position, frame.time_us, frame.batch.to_pylist())


def group(name: str) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"name": name, "subscription": "{}"}], STORED[Kind.GROUP])


@dataclass
class Record:
    """What a run's caller was told: frames appended, and how many of them are durable."""

    appended: list[Content] = field(default_factory=list)
    durable: int = 0
    finished: bool = False

    def append(self, log: SegmentLog, kind: Kind, batch: pa.RecordBatch, time_us: int) -> None:
        sequence = log.next_sequence
        position = log.append(kind, batch, time_us)
        self.appended.append((kind, sequence, position, time_us, batch.to_pylist()))

    def sync(self, log: SegmentLog) -> None:
        log.sync()
        self.durable = len(self.appended)

    def opening(self, log: SegmentLog) -> None:
        """Note the OPENED frame."""
        (frame,) = log.frames(log.next_sequence - 1)
        self.appended.append(content(frame))
        self.durable = len(self.appended)


def run(disk: Disk, record: Record) -> None:
    """Batches of frames over several segments, two snapshots, retention, a clean close, a second opening."""
    log = opened(disk)
    record.opening(log)
    for n in range(7):
        record.append(log, Kind.PLAIN, messages(4, 4 * n, body=200), START_US + n)
        if n % 2:
            record.append(log, Kind.CHECKED, checked([n]), START_US + n)
        record.sync(log)
        if n in (2, 4):
            log.save_snapshot(
                {"at": pa.table({"sequence": [log.next_sequence]})},
                log.next_sequence,
                log.next_position,
                log.last_time_us,
            )
    log.drop_before(log.next_position)
    log.close()
    log = opened(disk)
    record.opening(log)
    record.append(log, Kind.GROUP, group("points"), START_US + 100)
    record.append(log, Kind.HALF, messages(3, 1000, transaction=5), START_US + 101)
    record.sync(log)
    record.finished = True


def assert_recovered(log: SegmentLog, record: Record) -> None:
    """Everything durable is there (or stands in the snapshot), the rest is a prefix of what was appended, then
    openings."""
    found = [content(frame) for frame in log.frames()]
    first = found[0][1]
    snapshot = log.load_snapshot()
    if first > 0:
        assert snapshot is not None
        assert snapshot.sequence >= first
    if snapshot is not None:
        assert snapshot.tables["at"].to_pylist() == [{"sequence": snapshot.sequence}]
        assert snapshot.sequence <= log.next_sequence
    assert [f[1] for f in found] == list(range(first, log.next_sequence))
    told = record.appended[first:]
    same = 0
    while same < min(len(told), len(found)) and found[same] == told[same]:
        same += 1
    assert first + same >= record.durable
    assert {f[0] for f in found[same:]} <= {Kind.OPENED}
    assert found[-1][0] == Kind.OPENED
