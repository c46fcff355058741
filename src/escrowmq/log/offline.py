"""A log as it lies in a folder: read, and never changed. No lock is taken, no frame appended, nothing cut or repaired.

A folder that a broker is using may be read too, up to what its own frames say is durable: what comes behind may still be lost in
a crash, and must not be shown. Of a folder that is not in use everything counts that the next opening would keep. All files
are mapped when the folder is opened, so a reader has one view of the log, whatever retention deletes meanwhile.
"""

from __future__ import annotations

import dataclasses

import pyarrow as pa

from escrowmq.errors import Code, Misuse
from escrowmq.log import snapshots
from escrowmq.log.reading import ReadableLog, Reader, Segment
from escrowmq.log.recovery import (
    check_chain_start,
    check_durable,
    durable_floor,
    list_folder,
    read_segment_header,
    sealed_segments,
    segment_of,
    torn_tail,
)
from escrowmq.log.seam import Snapshot
from escrowmq.log.segments import Scan, SegmentHeader, scan, segment_name
from escrowmq.log.snapshots import SnapshotName
from escrowmq.platform.disk import Disk

_RETRIES = 5
"""How often opening begins anew when retention deletes a file between listing and mapping."""


def open_offline(disk: Disk, *, in_use: bool) -> OfflineLog:
    """The log in ``disk``'s folder, for reading. ``in_use``: a broker has it open, so only what is durable counts.

    Raises Misuse(NOT_A_DATA_FOLDER), Corrupt(DAMAGED, NEWER_FORMAT).
    """
    for _ in range(_RETRIES):
        try:
            return _open(disk, in_use)
        except FileNotFoundError:
            continue
    return _open(disk, in_use)


def _open(disk: Disk, in_use: bool) -> OfflineLog:
    listing = list_folder(disk)
    if listing.is_fresh:
        raise Misuse(Code.NOT_A_DATA_FOLDER, "the folder holds no log")
    check_chain_start(listing)
    headers = [read_segment_header(disk, sequence) for sequence in listing.segments]
    segments, _ = sealed_segments(disk, headers)
    segments.append(_last(disk, headers[-1], durable_floor(disk, listing, headers[-1].shard), in_use))
    for segment in segments:
        _map(disk, segment)
    return OfflineLog(disk, segments, listing.snapshots)


def _last(disk: Disk, header: SegmentHeader, floor: int, in_use: bool) -> Segment:
    name = segment_name(header.sequence)
    file = disk.open(name)
    try:
        # Read, not mapped: its writer may cut its reserved tail at any time.
        data = pa.py_buffer(file.read_at(0, file.size()))
    finally:
        file.close()
    found = scan(data, header)
    if not in_use:
        check_durable(name, found, floor)
        torn_tail(name, data, header, found)
        return segment_of(name, header, found)
    return segment_of(name, header, _durable_part(found, header, max(found.synced, floor)))


def _durable_part(found: Scan, header: SegmentHeader, end: int) -> Scan:
    """Only the frames below sequence ``end``."""
    keep = min(max(end - header.sequence, 0), len(found.offsets))
    if keep == len(found.offsets):
        return found
    lists = {name: getattr(found, name)[:keep] for name in ("positions", "times", "offsets", "kinds")}
    position = found.positions[keep]
    return dataclasses.replace(
        found, sequence=header.sequence + keep, position=position, end=found.offsets[keep], what=None, **lists
    )


def _map(disk: Disk, segment: Segment) -> None:
    file = disk.open(segment.name)
    try:
        segment.data = file.map(segment.size)
    finally:
        file.close()


class OfflineLog(ReadableLog):
    """A :class:`escrowmq.log.seam.StoredLog` whose answers never change."""

    def __init__(self, disk: Disk, segments: list[Segment], names: list[SnapshotName]) -> None:
        super().__init__(Reader(disk, segments))
        self._disk = disk
        self._snapshots = names

    @property
    def epoch(self) -> int:
        """How often the log was opened for writing."""
        return self._reader.segments[-1].epoch

    @property
    def next_sequence(self) -> int:
        """Sequence behind the last frame that counts."""
        return self._reader.segments[-1].next_sequence

    @property
    def next_position(self) -> int:
        """Position behind the last row that counts."""
        return self._reader.segments[-1].next_position

    @property
    def last_time_us(self) -> int:
        """Time of the last frame; the log's own beginning if it has none."""
        for segment in reversed(self._reader.segments):
            if segment.index.count:
                return int(segment.index.times[-1])
        return self._reader.segments[0].header.created_us

    def load_snapshot(self) -> Snapshot | None:
        """The newest snapshot that checks and is not ahead of what counts; None: replay from the beginning."""
        first, end = self._reader.segments[0].sequence, self.next_sequence
        found = snapshots.newest(self._disk, self.shard, self._snapshots, first, end)
        return None if found is None else found[1]
