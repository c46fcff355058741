"""Checks the frames of a copied segment, and digests it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import pyarrow as pa

from escrowmq.log import frames
from escrowmq.log.report import Damage, DamagedLog
from escrowmq.log.segments import HEADER_BYTES, Scan, SegmentHeader, scan, segment_base
from escrowmq.platform.disk import Disk, map_file


@dataclass(frozen=True, slots=True)
class CopiedSegment:
    """A segment, walked to its end, or to damage: ``end`` has what comes after the last good frame."""

    name: str
    header: SegmentHeader
    end: Scan
    checksum: str  # of the last frame, in hex; empty if there is none
    sha256: str
    damage: Damage | None


def check_copy(disk: Disk, name: str, size: int, following: int | None, *, passes: bool) -> CopiedSegment:
    """Check that the first ``size`` bytes of a segment are whole frames, the last one before frame ``following``.
    Raises Corrupt with the place; with ``passes``, the damage is returned unless it is a newer format."""
    header, found, data = _walk(disk, name, size)
    damage, last, checksum = None, _last_header(found, data)[0], ""
    if found.what is not None:
        damage = Damage(name, found.end, found.sequence, found.what, found.newer)
    elif following is not None and found.sequence != following:
        message = f"the segment ends here, and the next frame should be {following}"
        damage = Damage(name, size, found.sequence, message)
    if damage is not None and (damage.newer or not passes):
        raise DamagedLog.of(damage)
    if found.offsets:
        checksum = f"{frames.read_header(data, last).checksum:016x}"
    return CopiedSegment(name, header, found, checksum, hashlib.sha256(data).hexdigest(), damage)


def valid_part(disk: Disk, name: str, size: int) -> tuple[int, int, bytes]:
    """Return how many bytes of a copy are valid, up to ``size``, and offset and bytes of the last header in them.
    Raises Corrupt(NEWER_FORMAT)."""
    try:
        _, found, data = _walk(disk, name, size)
    except DamagedLog as damaged:
        if damaged.damage.newer:
            raise
        return 0, 0, b""
    if found.newer:
        raise DamagedLog(name, found.end, found.sequence, found.what or "", newer=True)
    return found.end, *_last_header(found, data)


def _walk(disk: Disk, name: str, size: int) -> tuple[SegmentHeader, Scan, pa.Buffer]:
    data = map_file(disk, name)
    data = data.slice(0, min(size, data.size))
    header = SegmentHeader.unpack(data, name)
    if header.sequence != segment_base(name):
        raise DamagedLog(name, 0, segment_base(name) or 0, f"this is the segment of frame {header.sequence}")
    return header, scan(data, header), data


def _last_header(found: Scan, data: pa.Buffer) -> tuple[int, bytes]:
    """Return offset and bytes of the header of the last frame, or of the segment."""
    at, size = (found.offsets[-1], frames.HEADER_BYTES) if found.offsets else (0, HEADER_BYTES)
    return at, data.slice(at, size).to_pybytes()
