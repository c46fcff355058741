"""Folder checker: walks every segment of a folder without opening it, reports all findings, changes and locks nothing.

The folder may be in use: its last segment is read rather than mapped, because its writer may cut it meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import pyarrow as pa

from escrowmq.errors import Corrupt
from escrowmq.log import frames as codec
from escrowmq.log import index as side
from escrowmq.log import recovery, segments, snapshots
from escrowmq.log.recovery import Listing
from escrowmq.log.report import Damage, DamagedLog
from escrowmq.log.segments import Scan, SegmentHeader
from escrowmq.platform.disk import Disk, map_file, read_file

_PATIENCE = 5


@dataclass(frozen=True, slots=True)
class FrameRun:
    """Consecutive frames of one segment, and the damage after them, if any. ``data`` is the whole file."""

    header: SegmentHeader
    name: str
    data: pa.Buffer
    found: Scan
    damage: Damage | None


def check(disk: Disk) -> Iterator[Damage]:
    """Yield all findings: segments, snapshots, index files. A torn tail is none, as the next opening cuts it."""
    listing = recovery.list_folder(disk)
    if listing.is_fresh:
        return
    yield from _damage_of(lambda: recovery.check_chain_start(listing))
    yield from _check_segments(disk, listing)
    yield from _check_snapshots(disk, listing)
    if listing.closed:
        yield from _damage_of(lambda: segments.read_closed(disk))


def _damage_of(check: Callable[[], object]) -> Iterator[Damage]:
    """Yield the damage that a check raises; a file that is gone was replaced meanwhile."""
    try:
        check()
    except DamagedLog as damaged:
        yield damaged.damage
    except FileNotFoundError:
        return


def frame_runs(disk: Disk, listing: Listing, sequence: int) -> Iterator[FrameRun]:
    """Yield the runs of valid frames in the segment that begins with frame ``sequence``, each with the damage that ends
    it. The walk continues with the next valid frame. Raises Corrupt if the segment's header is damaged."""
    header = recovery.read_segment_header(disk, sequence)
    is_last = sequence == listing.segments[-1]
    name = segments.segment_name(sequence)
    found: Scan | None = None
    while True:
        data, found = _walk(disk, name, header, found, is_last)
        damage = _damage(disk, listing, name, data, header, found, is_last)
        yield FrameRun(header, name, data, found, damage)
        resumed = next(segments.later_frames(data, found.end, header.salt, found.sequence), None) if damage else None
        if resumed is None:
            return
        offset, frame = resumed
        found = Scan(frame.sequence, frame.position, frame.epoch, end=offset)


def _walk(disk: Disk, name: str, header: SegmentHeader, found: Scan | None, is_last: bool) -> tuple[pa.Buffer, Scan]:
    """Scan the frames of a segment from the end of ``found`` (None: from its beginning); repeat while a segment that
    may be written meanwhile grows. Returns the file's data and the result."""
    for _ in range(_PATIENCE):
        data = pa.py_buffer(read_file(disk, name)) if is_last else map_file(disk, name)
        before = -1 if found is None else found.end
        found = segments.scan(data, header, found)
        if not is_last or found.what is None or found.end == before:
            break
    assert found is not None
    return data, found


def _damage(
    disk: Disk, listing: Listing, name: str, data: pa.Buffer, header: SegmentHeader, found: Scan, is_last: bool
) -> Damage | None:
    if not is_last:
        return None if found.what is None else Damage(name, found.end, found.sequence, found.what, found.newer)
    try:
        recovery.check_durable(name, found, recovery.durable_floor(disk, listing, header.shard))
        recovery.torn_tail(name, data, header, found)
    except DamagedLog as damaged:
        return damaged.damage
    return None


def _check_segments(disk: Disk, listing: Listing) -> Iterator[Damage]:
    previous: FrameRun | None = None
    for sequence in listing.segments:
        name = segments.segment_name(sequence)
        try:
            last: FrameRun | None = None
            sound = True
            for last in frame_runs(disk, listing, sequence):
                yield from _check_run(last)
                if last.damage is not None:
                    sound = False
                    yield last.damage
            assert last is not None
            if previous is not None:
                recovery.check_link(recovery.segment_of(previous.name, previous.header, previous.found), last.header)
            if sound and sequence != listing.segments[-1]:
                yield from _check_index(disk, last)
            previous = last if sound else None
        except DamagedLog as damaged:
            previous = None
            yield damaged.damage
        except FileNotFoundError:
            if sequence >= recovery.list_folder(disk).first:  # else retention has dropped it meanwhile
                yield Damage(name, 0, sequence, "the segment is missing")


def _check_run(run: FrameRun) -> Iterator[Damage]:
    """Yield the damage of each frame that has a valid checksum and content that does not decode."""
    view = memoryview(run.data)
    for offset in run.found.offsets:
        header = codec.read_header(view, offset)
        yield from _damage_of(partial(codec.decode, run.data, offset, header, run.name))


def _check_index(disk: Disk, run: FrameRun) -> Iterator[Damage]:
    """Yield a damage if the index file exists and is not the one that its segment gives. It is derived: the next
    opening repairs it."""
    name = segments.index_name(run.name)
    with suppress(FileNotFoundError):
        if read_file(disk, name) != side.pack(recovery.segment_of(run.name, run.header, run.found)):
            yield Damage(name, 0, -1, "the index does not fit its segment; delete it, and it is rebuilt")


def _check_snapshots(disk: Disk, listing: Listing) -> Iterator[Damage]:
    with suppress(Corrupt, FileNotFoundError, IndexError):  # reported with the segments
        shard = recovery.read_segment_header(disk, listing.segments[0]).shard
        for name in listing.snapshots:
            yield from _damage_of(partial(snapshots.load, disk, name, shard))
