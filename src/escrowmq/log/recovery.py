"""Recovery when a data folder is opened: finds the end of the log and cuts off a torn tail.

Rules:

1. A segment that is not the last was synced before the next one got its name: any bad frame in it is damage.
2. In the last segment, the bytes after the last good frame are *reserved space* if they are all zeros; *damage* if
   anything shows that a frame had been durable there (a later frame's synced mark, the sequence of a snapshot or of the
   file ``closed``); else a *torn tail*: unacknowledged writes lost, torn or reordered by the crash. Only that is cut.
3. Damage raises Corrupt with its place, and nothing in the folder is changed.
4. Recovered frames are made durable before anything is appended. Frames that may never have reached the disk are
   written again first: after a failed sync, the system may consider their pages clean.
5. Every step can be repeated, so recovery also recovers from a crash during recovery.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from contextlib import closing, suppress
from dataclasses import dataclass, field

import pyarrow as pa

from escrowmq.errors import Code, Misuse
from escrowmq.log import index as side
from escrowmq.log import segments as files
from escrowmq.log import snapshots
from escrowmq.log.active import ActiveSegment
from escrowmq.log.index import FrameIndex, Segment
from escrowmq.log.lookups.runs import is_run
from escrowmq.log.report import DAMAGED_NAME, DamagedLog
from escrowmq.log.segments import Scan, SegmentHeader, later_frames, scan
from escrowmq.log.snapshots import SnapshotName
from escrowmq.platform.disk import TEMPORARY, Disk, is_neutral, map_file, read_file, replace_file

MIRROR_NAME = ".kafka.json"  # the file that marks a folder as the mirror of a log on Kafka (``log/kafka/marks.py``)
_TEMPORARY = re.compile(rf"(.*\.(segment|snapshot|index)|{files.CLOSED_NAME}|{DAMAGED_NAME}){re.escape(TEMPORARY)}")


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a folder, by type."""

    segments: list[int]  # first sequences of the log's segments, ascending
    dropped: list[int]  # first sequences of the segments before the base, to be removed
    snapshots: list[SnapshotName]  # newest first
    base: SnapshotName | None
    temporary: list[str]
    closed: bool
    mirror: bool
    foreign: list[str]

    @property
    def first(self) -> int:
        """The sequence of the first frame of the log, by the name of its base; 0 without one."""
        return self.base.first if self.base is not None else 0

    @property
    def is_fresh(self) -> bool:
        """Return whether no log was created here (an interrupted creation leaves only temporary files)."""
        return not (self.segments or self.dropped or self.snapshots or self.closed)


@dataclass(frozen=True, slots=True)
class Cut:
    """A torn tail that was cut off."""

    file: str
    offset: int
    size: int
    what: str


@dataclass(slots=True)
class Recovered:
    """A recovered log, ready for appending. ``snapshots`` newest first."""

    segments: list[Segment]
    snapshots: list[SnapshotName]
    epoch: int
    time_us: int
    cut: Cut | None
    damaged: list[int] = field(default_factory=list)  # damaged frames that a snapshot covers
    active: ActiveSegment | None = None  # the last segment of a new log, already open


def list_folder(disk: Disk) -> Listing:
    """Classify the files of a folder by name; read no content."""
    names = disk.list()
    found = snapshots.listed(names)
    base = snapshots.find_base(found)
    first = base.first if base is not None else 0
    segments = sorted(sequence for name in names if (sequence := files.segment_base(name)) is not None)
    known = {files.CLOSED_NAME, DAMAGED_NAME, *map(str, found), *map(files.segment_name, segments)}
    temporary = [n for n in names if _TEMPORARY.fullmatch(n)]
    # Look-up files, complete or not, are left to their writer.
    others = [n for n in names if n not in known and not is_neutral(n) and not is_run(n) and not n.endswith(".index")]
    return Listing(
        segments=[s for s in segments if s >= first],
        dropped=[s for s in segments if s < first],
        snapshots=found,
        base=base,
        temporary=temporary,
        closed=files.CLOSED_NAME in names,
        mirror=MIRROR_NAME in names,
        foreign=[n for n in others if n not in temporary],
    )


def list_own_folder(disk: Disk) -> Listing:
    """List a folder for appending. Raises Misuse(NOT_A_DATA_FOLDER) if it holds other files and no log, or a mirror of
    another log: frames appended here would be in no other copy."""
    listing = list_folder(disk)
    if listing.is_fresh and listing.foreign:
        raise Misuse(Code.NOT_A_DATA_FOLDER, f"the folder holds no log but other files, such as {listing.foreign[0]!r}")
    if listing.mirror:
        hint = "serve it with --log, read it with read_only=True, or make it a separate log with `escrowmq log copy`"
        raise Misuse(Code.NOT_A_DATA_FOLDER, "the folder is a mirror of a log on Kafka", hint)
    return listing


def recover(disk: Disk, listing: Listing) -> Recovered | None:
    """Find the end of the log, cut a torn tail, make its frames durable and remove files that are no longer part of it;
    None for a folder without a log. Corrupt changes nothing."""
    if listing.is_fresh:
        remove(disk, listing.temporary)
        return None
    check_chain_start(listing)
    headers = [read_segment_header(disk, sequence) for sequence in listing.segments]
    sealed = sealed_segments(disk, headers, covered(listing))
    last, cut = _recover_last(disk, headers[-1], durable_floor(disk, listing, headers[-1].shard))
    for segment, is_indexed, _ in sealed:
        if not is_indexed:
            save_index(disk, segment)
    superseded = [s for s in listing.snapshots if s.first >= 0 and s != listing.base]
    dropped = [files.segment_name(s) for s in listing.dropped]
    remove(disk, [*listing.temporary, *map(str, superseded), *dropped, *map(files.index_name, dropped)])
    disk.sync_folder()
    segments = [*(segment for segment, _, _ in sealed), last]
    damaged = [sequence for _, _, skipped in sealed for sequence in skipped]
    kept = [s for s in listing.snapshots if s not in superseded]
    return Recovered(segments, kept, last.epoch, last_time(segments), cut, damaged)


def covered(listing: Listing) -> int:
    """Return the sequence below which a snapshot covers every frame, judging by file names.
    If that snapshot is damaged, the frames are replayed, and a damaged frame stops the replay."""
    return max((s.sequence for s in listing.snapshots), default=0)


def sealed_segments(disk: Disk, headers: list[SegmentHeader], covered: int) -> list[tuple[Segment, bool, list[int]]]:
    """Load all segments but the last, see :func:`sealed_segment`, and check that each continues with the next."""
    sealed = []
    for header, following in itertools.pairwise(headers):
        sealed.append(sealed_segment(disk, header, covered))
        check_link(sealed[-1][0], following)
    return sealed


def _recover_last(disk: Disk, header: SegmentHeader, floor: int) -> tuple[Segment, Cut | None]:
    """Load the last segment, cut its torn tail and make everything in it durable. Raises Corrupt if frames below
    ``floor``, which had been durable, are missing."""
    name = files.segment_name(header.sequence)
    with closing(disk.open(name)) as file:
        data = file.map(file.size())
        found = scan(data, header)
        check_durable(name, found, floor)
        cut = torn_tail(name, data, header, found)
        if cut is not None:
            file.truncate(found.end)
        doubtful = found.offsets[max(found.synced - header.sequence, floor - header.sequence, 0) :]
        if doubtful:
            file.write_at(doubtful[0], [file.read_at(doubtful[0], found.end - doubtful[0])])
        file.sync()
    return segment_of(name, header, found), cut


def segment_of(name: str, header: SegmentHeader, found: Scan) -> Segment:
    """Build the segment from the result of a walk of its file. Earlier segments were durable when it was created."""
    synced = max(found.synced, header.sequence)
    return Segment(name, header, FrameIndex.of(found), found.end, found.position, found.epoch, synced)


def last_time(segments: list[Segment]) -> int:
    """Return the time (µs) of the last frame, or the log's creation time if it has none."""
    for segment in reversed(segments):
        if segment.index.count:
            return int(segment.index.times[-1])
    return segments[-1].header.created_us


def remove(disk: Disk, names: Iterable[str]) -> None:
    """Delete these files; those that do not exist are skipped."""
    for name in names:
        with suppress(FileNotFoundError):
            disk.remove(name)


def check_chain_start(listing: Listing) -> None:
    """Raise Corrupt if the first segment of the log is missing."""
    if not listing.segments:
        raise DamagedLog(files.segment_name(listing.first), 0, listing.first, "every segment is missing")
    if listing.segments[0] != listing.first:
        raise _missing_segment(listing.first, listing.segments[0])


def _missing_segment(sequence: int, following: int) -> DamagedLog:
    message = f"the segment is missing; the log goes on with frame {following}"
    return DamagedLog(files.segment_name(sequence), 0, sequence, message)


def read_segment_header(disk: Disk, sequence: int) -> SegmentHeader:
    """Read and check the header of the segment named by ``sequence``. Raises Corrupt with the place."""
    name = files.segment_name(sequence)
    header = SegmentHeader.unpack(read_file(disk, name, files.LARGEST_HEADER), name)
    if header.sequence != sequence:
        raise DamagedLog(name, 0, sequence, f"this is the segment of frame {header.sequence}")
    return header


def sealed_segment(disk: Disk, header: SegmentHeader, covered: int) -> tuple[Segment, bool, list[int]]:
    """Load a segment that is not the last; it is walked if its index file does not match.
    Returns it, whether its index file was used, and the damaged frames below ``covered`` that the walk could skip."""
    name = files.segment_name(header.sequence)
    data = map_file(disk, name)
    with suppress(FileNotFoundError):
        known = side.unpack(map_file(disk, files.index_name(name)), header)
        if known is not None and known.size == data.size:
            return known, True, []
    found = scan(data, header)
    while found.what is not None and not found.newer and found.sequence < covered:
        if not files.step_over(data, header, found):
            break
        found = scan(data, header, found)
    if found.what is not None:
        raise DamagedLog(name, found.end, found.sequence, found.what, newer=found.newer)
    return segment_of(name, header, found), False, found.damaged


def save_index(disk: Disk, segment: Segment) -> None:
    """Write the index file of a sealed segment. It is derived: nothing is synced, and a full disk is not an error."""
    with suppress(OSError):
        replace_file(disk, files.index_name(segment.name), [[side.pack(segment)]], durable=False)


def check_link(segment: Segment, following: SegmentHeader) -> None:
    """Raise Corrupt unless the next segment begins where this one ends and belongs to the same log."""
    name = files.segment_name(following.sequence)
    if segment.next_sequence != following.sequence:
        raise _missing_segment(segment.next_sequence, following.sequence)
    if (segment.header.shard, segment.header.salt) != (following.shard, following.salt):
        raise DamagedLog(name, 0, following.sequence, "a segment of another log")
    if segment.next_position != following.position or following.epoch < segment.epoch:
        raise DamagedLog(name, 0, following.sequence, "the segment does not follow the one before")


def durable_floor(disk: Disk, listing: Listing, shard: int) -> int:
    """Return a sequence below which all frames had been durable, by evidence outside the segments."""
    floor = covered(listing)
    with suppress(DamagedLog, FileNotFoundError):  # the file ``closed`` only adds to the evidence in the log
        marked, sequence = files.read_closed(disk)
        return max(floor, sequence) if marked == shard else floor
    return floor


def check_durable(name: str, found: Scan, floor: int) -> None:
    """Raise Corrupt if frames below ``floor``, which had been durable, are missing in a walked segment, or if a newer
    version wrote the next frame."""
    if found.newer:
        raise DamagedLog(name, found.end, found.sequence, found.what or "", newer=True)
    if found.sequence < floor:
        message = f"{found.what or 'the log ends here'}, though frames below {floor} were durable"
        raise DamagedLog(name, found.end, found.sequence, message)


def torn_tail(name: str, data: pa.Buffer, header: SegmentHeader, found: Scan) -> Cut | None:
    """Return the torn tail after the last good frame, None if only zeros follow; Corrupt if it had been durable."""
    if found.what is None or files.is_zero(data, found.end):
        return None
    for offset, frame in later_frames(data, found.end, header.salt, found.sequence):
        if frame.synced > found.sequence:
            message = f"{found.what}, and frame {frame.sequence} at byte {offset} shows that it was durable"
            raise DamagedLog(name, found.end, found.sequence, message)
    return Cut(name, found.end, data.size - found.end, found.what)
