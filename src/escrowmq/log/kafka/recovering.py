"""Recovery of a mirror, which was never synced: invalid parts are cut off, as the partition holds them.

Rules:

1. A prefix of the log is kept: up to the first frame, segment or link that is invalid, whatever followed.
2. Sealed segments are loaded from their index files, unless the machine rebooted or damage was found in one: then every
   frame is walked.
3. A mirror without its beginning, or with an invalid base, is started over.
4. Frames of a newer version are refused; nothing is cut there.
"""

from __future__ import annotations

from bisect import bisect_right
from contextlib import closing, suppress

from escrowmq.acts import journal
from escrowmq.acts.chain import is_sealed, origin, parse
from escrowmq.log import recovery, snapshots
from escrowmq.log.commit_log import MOST_DAMAGED
from escrowmq.log.index import Segment
from escrowmq.log.lookups.runs import is_run
from escrowmq.log.recovery import MIRROR_NAME, Cut, Listing, Recovered, remove
from escrowmq.log.report import DAMAGED_NAME, DamagedLog, unpack_damaged
from escrowmq.log.segments import CLOSED_NAME, SegmentHeader, index_name, is_zero, scan, segment_name
from escrowmq.log.snapshots import SnapshotName
from escrowmq.platform.disk import TEMPORARY, Disk, map_file, read_file, read_pieces


def recover_mirror(disk: Disk, *, sound: bool) -> Recovered | None:
    """Recover the longest valid prefix of the log in a mirror and remove the rest; None if it must be started over.
    ``sound``: no write was lost by a reboot. Corrupt(NEWER_FORMAT) changes nothing."""
    listing = recovery.list_folder(disk)
    try:
        recovery.check_chain_start(listing)
    except DamagedLog:
        return None
    walked = listing.segments if not sound else _damaged_segments(disk, listing)
    remove(disk, [index_name(segment_name(sequence)) for sequence in walked])
    kept, cut = _valid_prefix(disk, listing)
    if not kept:
        return None
    last = kept[-1]
    base = listing.base
    if base is not None and not _is_sound(disk, base, last):
        return None
    behind = [segment_name(sequence) for sequence in listing.segments if sequence > last.sequence]
    remove(disk, [*reversed(behind), *map(index_name, [*behind, last.name])])
    with closing(disk.open(last.name)) as file:
        file.truncate(last.size)
    superseded = [s for s in listing.snapshots if (s.first >= 0 and s != base) or s.sequence > last.next_sequence]
    dropped = [segment_name(sequence) for sequence in listing.dropped]
    derived = [*map(index_name, dropped), CLOSED_NAME, DAMAGED_NAME]
    remove(disk, [*listing.temporary, *map(str, superseded), *dropped, *derived])
    left = [s for s in listing.snapshots if s not in superseded]
    return Recovered(kept, left, last.epoch, recovery.last_time(kept), cut)


def wipe(disk: Disk) -> None:
    """Remove all of a mirror except the file that identifies it."""
    names = disk.list()
    listing = recovery.list_folder(disk)
    known = {*listing.temporary, *map(str, listing.snapshots), CLOSED_NAME, DAMAGED_NAME}
    known |= {journal.NAME, journal.LAST, journal.LAST + TEMPORARY, MIRROR_NAME + TEMPORARY}
    known |= {name for name in names if is_run(name) or name.endswith((".segment", ".index"))}
    segments = [segment_name(sequence) for sequence in (*listing.dropped, *listing.segments)]
    remove(disk, reversed(segments))
    remove(disk, [name for name in names if name in known and name not in segments])


def sound_acts(disk: Disk, shard: int) -> int:
    """Return the bytes of the record of operator actions up to the first line that is invalid or out of order."""
    size, number, previous = 0, 0, origin(shard)
    with suppress(FileNotFoundError), closing(disk.open(journal.NAME)) as file:
        rest = b""
        for piece in read_pieces(file, file.size()):
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                try:
                    record, before, digest = parse(line)
                except ValueError:
                    return size
                if before != previous or record.number != number + 1 or not is_sealed(line):
                    return size
                size, number, previous = size + len(line) + 1, record.number, digest
    return size


def cut_acts(disk: Disk, size: int) -> None:
    """Cut the record of operator actions to ``size`` bytes; the file that names its last record is removed."""
    remove(disk, [journal.LAST])
    with suppress(FileNotFoundError), closing(disk.open(journal.NAME)) as file:
        file.truncate(size)


def _damaged_segments(disk: Disk, listing: Listing) -> list[int]:
    with suppress(FileNotFoundError):
        damaged = unpack_damaged(read_file(disk, DAMAGED_NAME, MOST_DAMAGED))
        places = {bisect_right(listing.segments, sequence) - 1 for sequence in damaged}
        return [listing.segments[place] for place in places if place >= 0]
    return []


def _valid_prefix(disk: Disk, listing: Listing) -> tuple[list[Segment], Cut | None]:
    """Return the segments up to the first invalid part, and what is cut off the last one."""
    kept: list[Segment] = []
    for sequence in listing.segments:
        try:
            header = recovery.read_segment_header(disk, sequence)
            if kept:
                recovery.check_link(kept[-1], header)
            is_last = sequence == listing.segments[-1]
            if not is_last:
                with suppress(DamagedLog):
                    kept.append(recovery.sealed_segment(disk, header, 0)[0])
                    continue
            segment, cut = _valid_part(disk, header)
        except (DamagedLog, FileNotFoundError) as problem:
            if isinstance(problem, DamagedLog) and problem.damage.newer:
                raise
            break
        kept.append(segment)
        return kept, cut
    return kept, None


def _valid_part(disk: Disk, header: SegmentHeader) -> tuple[Segment, Cut | None]:
    """Return a segment up to its last valid frame, and the torn tail after it (None: only zeros). Cuts nothing."""
    name = segment_name(header.sequence)
    data = map_file(disk, name)
    found = scan(data, header)
    if found.newer:
        raise DamagedLog(name, found.end, found.sequence, found.what or "", newer=True)
    torn = found.what is not None and not is_zero(data, found.end)
    cut = Cut(name, found.end, data.size - found.end, found.what or "") if torn else None
    return recovery.segment_of(name, header, found), cut


def _is_sound(disk: Disk, base: SnapshotName, last: Segment) -> bool:
    """Return whether a base is valid and can replace what precedes the mirror."""
    if base.sequence > last.next_sequence:
        return False
    try:
        snapshots.load(disk, base, last.header.shard)
    except FileNotFoundError:
        return False
    except DamagedLog as damaged:
        if damaged.damage.newer:
            raise
        return False
    return True
