"""Read-only view of the log in a data folder. Takes no lock, appends no frame, cuts or repairs nothing.

A folder in use by a broker may be read too, up to the end that its frames, or the broker, report as durable: later
frames may still be lost in a crash. A frame records only the durability of earlier frames, so without the broker's
report the newest ones are not shown. In a folder not in use, every frame counts that the next opening would keep. All
files are mapped on opening: a consistent view, whatever retention deletes meanwhile.
"""

from __future__ import annotations

import bisect
import dataclasses
from contextlib import suppress
from typing import NamedTuple

import pyarrow as pa

from escrowmq.errors import Code, Misuse
from escrowmq.log import recovery, snapshots
from escrowmq.log.index import Segment
from escrowmq.log.reading import ReadableLog, Reader
from escrowmq.log.seam import Snapshot
from escrowmq.log.segments import Scan, SegmentHeader, scan, segment_name
from escrowmq.log.snapshots import SnapshotName
from escrowmq.platform.disk import Disk, map_file, read_file

_RETRIES = 5  # retries of opening if retention deletes a file between listing and mapping


class Durable(NamedTuple):
    """The durable end of a shard's log as reported by its ``epoch``-th opener: rows below ``position`` are durable."""

    shard: int
    epoch: int
    position: int


def open_offline(disk: Disk, *, in_use: bool, durable: Durable | None = None) -> OfflineLog:
    """Open the log in ``disk``'s folder for reading.
    ``in_use``: a broker has it open, so only durable frames count, as shown by the log's own frames and by ``durable``,
    which is used if it is of the same opener. Raises Misuse(NOT_A_DATA_FOLDER), Corrupt(DAMAGED, NEWER_FORMAT)."""
    for _ in range(_RETRIES):
        with suppress(FileNotFoundError):
            return _open(disk, in_use, durable)
    return _open(disk, in_use, durable)


def _open(disk: Disk, in_use: bool, durable: Durable | None) -> OfflineLog:
    listing = recovery.list_folder(disk)
    if listing.is_fresh:
        raise Misuse(Code.NOT_A_DATA_FOLDER, "the folder holds no log")
    recovery.check_chain_start(listing)
    headers = [recovery.read_segment_header(disk, sequence) for sequence in listing.segments]
    segments = [segment for segment, _, _ in recovery.sealed_segments(disk, headers, recovery.covered(listing))]
    floor = recovery.durable_floor(disk, listing, headers[-1].shard)
    segments.append(_last(disk, headers[-1], floor, in_use, durable))
    for segment in segments:
        segment.data = map_file(disk, segment.name, segment.size)
    return OfflineLog(disk, segments, listing.snapshots, is_mirror=listing.mirror)


def _last(disk: Disk, header: SegmentHeader, floor: int, in_use: bool, durable: Durable | None) -> Segment:
    name = segment_name(header.sequence)
    data = pa.py_buffer(read_file(disk, name))  # not mapped: its writer may cut its reserved tail at any time
    found = scan(data, header)
    if not in_use:
        recovery.check_durable(name, found, floor)
        recovery.torn_tail(name, data, header, found)
        return recovery.segment_of(name, header, found)
    if durable is not None and (header.shard, found.epoch) == (durable.shard, durable.epoch):
        floor = max(floor, header.sequence + bisect.bisect_left(found.positions, durable.position))
    return recovery.segment_of(name, header, _durable_part(found, header, max(found.synced, floor)))


def _durable_part(found: Scan, header: SegmentHeader, end: int) -> Scan:
    keep = min(max(end - header.sequence, 0), len(found.offsets))
    if keep == len(found.offsets):
        return found
    lists = {name: getattr(found, name)[:keep] for name in ("positions", "times", "offsets", "kinds")}
    sequence, position, end = header.sequence + keep, found.positions[keep], found.offsets[keep]
    return dataclasses.replace(found, sequence=sequence, position=position, end=end, what=None, **lists)


class OfflineLog(ReadableLog):
    """A :class:`escrowmq.log.seam.StoredLog` that never changes. ``is_mirror``: it is a copy of a log on Kafka."""

    def __init__(self, disk: Disk, segments: list[Segment], names: list[SnapshotName], *, is_mirror: bool) -> None:
        super().__init__(Reader(disk, segments))
        self.is_mirror, self._disk, self._snapshots = is_mirror, disk, names
        last = segments[-1]
        self.epoch, self.next_sequence, self.next_position = last.epoch, last.next_sequence, last.next_position
        self.last_time_us = recovery.last_time(segments)

    def save_indexes(self, disk: Disk) -> None:
        """Write the index files of the sealed segments, so that the next opening need not walk them."""
        for segment in self._reader.segments[:-1]:
            recovery.save_index(disk, segment)

    def load_snapshot(self) -> Snapshot | None:
        first, end = self._reader.segments[0].sequence, self.next_sequence
        found = snapshots.newest(self._disk, self.shard, self._snapshots, first, end)
        return None if found is None else found[1]
