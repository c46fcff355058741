"""Segment files: their names, their header, and the frame walk shared by recovery, checking and dumping."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import astuple, dataclass, field

import numpy as np
import pyarrow as pa
import xxhash

from escrowmq.log import frames
from escrowmq.log.frames import FrameHeader
from escrowmq.log.report import DamagedLog
from escrowmq.platform.disk import Disk, read_file
from escrowmq.schemas import Kind

FORMAT_VERSION = 1
HEADER_BYTES = 64
LARGEST_HEADER = 4096  # any version of any file: bytes to read before the version is known
CLOSED_NAME = "closed"
_MAGIC = b"EMQS"
_CLOSED_MAGIC = b"EMQC"
_HEADER = struct.Struct("<4sHHIIQQQQ8x")
_CLOSED = struct.Struct("<4sHHIIQQ")
_CHECKSUM = struct.Struct("<Q")
_SEGMENT = re.compile(r"(\d{20})\.segment")


def segment_name(sequence: int) -> str:
    """Return the file name of the segment that begins with frame ``sequence``."""
    return f"{sequence:020d}.segment"


def index_name(segment: str) -> str:
    """Return the file name of the index of a sealed segment."""
    return segment.removesuffix(".segment") + ".index"


def segment_base(name: str) -> int | None:
    """Return the first sequence of the segment with that file name; None if it is not a segment name."""
    match = _SEGMENT.fullmatch(name)
    return int(match[1]) if match else None


def seal_header(body: bytes) -> bytes:
    """Append the checksum (xxh3_64, no salt; 8 bytes) to a file header."""
    return body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))


def open_header(data: bytes | pa.Buffer, magic: bytes, size: int, file: str) -> bytes:
    """Check and return the header, of ``size`` bytes, of any of our files; ``data`` is its first LARGEST_HEADER bytes,
    or all of it. The first 8 bytes (magic, version u16, header bytes u16) and the checksum in the last 8 bytes of the
    header never change, so a newer version can be distinguished from damage. Raises Corrupt."""
    raw = bytes(memoryview(data)[:LARGEST_HEADER])
    if len(raw) < 8 or raw[:4] != magic:
        raise DamagedLog(file, 0, -1, "the file header is damaged")
    version, length = struct.unpack_from("<HH", raw, 4)
    body = raw[: length - 8]
    if length < 16 or len(raw) < length or raw[length - 8 : length] != seal_header(body)[-8:]:
        raise DamagedLog(file, 0, -1, "the file header is damaged")
    if version > FORMAT_VERSION or length != size:
        raise DamagedLog(file, 0, -1, f"the file is of format version {version}", newer=True)
    return body


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """The first 64 bytes of a segment. ``salt`` (uint64, random per log) seeds the checksums of its frames. So neither
    bytes of another log nor a producer's body can be mistaken for a frame of this one."""

    shard: int
    epoch: int
    sequence: int
    position: int
    created_us: int
    salt: int

    def pack(self) -> bytes:
        return seal_header(_HEADER.pack(_MAGIC, FORMAT_VERSION, HEADER_BYTES, *astuple(self)))

    @classmethod
    def unpack(cls, raw: bytes | pa.Buffer, file: str) -> SegmentHeader:
        """Decode the header from a file's first bytes; raise Corrupt with the place if it is invalid."""
        return cls(*_HEADER.unpack(open_header(raw, _MAGIC, HEADER_BYTES, file))[3:])


def pack_closed(shard: int, sequence: int, position: int) -> bytes:
    """Encode the file ``closed``: every frame below ``sequence`` is durable."""
    return seal_header(_CLOSED.pack(_CLOSED_MAGIC, FORMAT_VERSION, _CLOSED.size + 8, shard, 0, sequence, position))


def read_closed(disk: Disk) -> tuple[int, int]:
    """Return (shard, sequence) from the file ``closed``; raise Corrupt if it is invalid."""
    raw = read_file(disk, CLOSED_NAME, LARGEST_HEADER)
    fields = _CLOSED.unpack(open_header(raw, _CLOSED_MAGIC, _CLOSED.size + 8, CLOSED_NAME))
    return fields[3], fields[5]


@dataclass(slots=True)
class Scan:
    """The result of walking a segment: one entry per good frame in each list, and where and why the walk stopped."""

    sequence: int  # of the next frame
    position: int
    epoch: int
    end: int = HEADER_BYTES  # offset after the last good frame
    time_us: int = 0
    synced: int = 0  # every frame below this was known to be durable
    what: str | None = None  # why there is no good frame at ``end``; None: the data ends there
    newer: bool = False
    positions: list[int] = field(default_factory=list)
    times: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    damaged: list[int] = field(default_factory=list)  # sequences of frames that :func:`step_over` skipped


def scan(data: pa.Buffer, header: SegmentHeader, found: Scan | None = None) -> Scan:
    """Walk the frames of a segment to the first bad byte, from its header, or on from ``found``, which is extended."""
    found = found or Scan(header.sequence, header.position, header.epoch)
    found.what = None
    view = memoryview(data)
    while found.end < len(view):
        if len(view) - found.end < frames.HEADER_BYTES:
            found.what = "the file ends within a frame's header"
            break
        frame = frames.read_header(view, found.end)
        found.what = _problem(frame, found, view, header.salt)
        if found.what is not None:
            break
        if frame.is_newer:
            found.what, found.newer = "a frame of a newer version", True
            break
        _accept(frame, found)
    return found


def step_over(data: pa.Buffer, header: SegmentHeader, found: Scan) -> bool:
    """Include the frame at which a walk stopped although its checksum is wrong; return whether that is possible: its
    header must be the expected one, and the data must end after it or continue with the expected valid frame."""
    view = memoryview(data)
    if (frame := _whole_frame(view, found.end)) is None or frame.is_newer or frame.time_us < found.time_us:
        return False
    if (frame.sequence, frame.position, frame.epoch) != (found.sequence, found.position, found.epoch):
        return False
    end = found.end + frame.frame_bytes
    if end < len(view):
        following = _whole_frame(view, end)
        if following is None or not frames.is_intact(view, end, following, header.salt):
            return False
        expected = (found.sequence + 1, found.position + frame.rows)
        if (following.sequence, following.position) != expected or following.time_us < frame.time_us:
            return False
    found.damaged.append(found.sequence)
    synced = found.synced
    _accept(frame, found)
    found.synced = synced
    return True


def _whole_frame(view: memoryview, offset: int) -> FrameHeader | None:
    """Return the frame header at ``offset``, not checked; None if the data holds no whole frame there."""
    if len(view) - offset < frames.HEADER_BYTES:
        return None
    frame = frames.read_header(view, offset)
    return frame if frame.magic == frames.MAGIC and offset + frame.frame_bytes <= len(view) else None


def _problem(frame: FrameHeader, found: Scan, view: memoryview, salt: int) -> str | None:
    """Return why this is not the next expected frame; None if it is."""
    if frame.magic != frames.MAGIC:
        return "no frame begins here"
    if found.end + frame.frame_bytes > len(view):
        return "the frame is longer than the file"
    if not frames.is_intact(view, found.end, frame, salt):
        return "the checksum is wrong"
    if frame.payload_bytes % 8:
        return "the frame's length is not a multiple of 8"
    if frame.sequence != found.sequence or frame.position != found.position:
        return f"a frame out of place: sequence {frame.sequence}, position {frame.position}"
    if frame.epoch < found.epoch or (frame.epoch > found.epoch and frame.kind != Kind.OPENED):
        return f"a frame of opener {frame.epoch} among those of {found.epoch}"
    return None


def _accept(frame: FrameHeader, found: Scan) -> None:
    found.positions.append(found.position)
    found.times.append(frame.time_us)
    found.offsets.append(found.end)
    found.kinds.append(frame.kind)
    found.end += frame.frame_bytes
    found.sequence += 1
    found.position += frame.rows
    found.epoch = frame.epoch
    found.time_us = frame.time_us
    found.synced = max(found.synced, frame.synced)


def later_frames(data: pa.Buffer, start: int, salt: int, sequence: int) -> Iterator[tuple[int, FrameHeader]]:
    """Yield (offset, header) of valid frames with a sequence above ``sequence`` anywhere after byte ``start``."""
    view = memoryview(data)
    raw = data.slice(start).to_pybytes()
    at = 0
    while (at := raw.find(frames.MAGIC, at)) >= 0:
        offset = start + at
        at += 1
        if offset % 8 or (frame := _whole_frame(view, offset)) is None or frame.sequence <= sequence:
            continue
        if frames.is_intact(view, offset, frame, salt):
            yield offset, frame
            at = offset - start + frame.frame_bytes


def is_zero(data: pa.Buffer, start: int) -> bool:
    """Return whether only zeros follow byte ``start`` (a multiple of 8): space reserved and never used."""
    words = (data.size - start) // 8
    rest = memoryview(data)[start + 8 * words :]
    return not np.frombuffer(data, np.uint64, words, start).any() and not any(rest)
