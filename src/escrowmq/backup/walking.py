"""Checks and digests the frames of a segment while its bytes arrive, piece by piece."""

from __future__ import annotations

import hashlib

import pyarrow as pa

from escrowmq.log import frames
from escrowmq.log.report import Damage, DamagedLog
from escrowmq.log.segments import HEADER_BYTES, LARGEST_HEADER, Scan, SegmentHeader, scan


def _header_bytes(data: bytes) -> int:
    """Return how many bytes are needed to read the header: a newer version may have a longer one."""
    length = int.from_bytes(data[6:8], "little") if len(data) >= HEADER_BYTES else 0
    return min(max(length, HEADER_BYTES), LARGEST_HEADER)


class SegmentWalk:
    """A walk over the ``size`` bytes of a segment. With ``passes``, damage is recorded and the rest is accepted."""

    def __init__(self, name: str, sequence: int, size: int, *, passes: bool = False) -> None:
        self.name, self.size, self.passes = name, size, passes
        self.at = 0  # bytes accepted so far: whole frames
        self.damage: Damage | None = None
        self.header: SegmentHeader | None = None
        self.last: tuple[int, bytes] | None = None  # offset and header of the last frame
        self._sequence, self._rest = sequence, b""
        self._found: Scan | None = None
        self._digest = hashlib.sha256()

    def feed(self, piece: bytes) -> None:
        """Process the next bytes. Raises Corrupt with the place, unless damage is accepted."""
        data = self._rest + piece
        taken = 0
        if self.header is None:
            if len(data) < min(_header_bytes(data), self.size):
                self._rest = data
                return
            self.header = SegmentHeader.unpack(data[:LARGEST_HEADER], self.name)
            if self.header.sequence != self._sequence:
                raise DamagedLog(self.name, 0, self._sequence, f"this is the segment of frame {self.header.sequence}")
            self._found = Scan(self.header.sequence, self.header.position, self.header.epoch)
            taken = HEADER_BYTES
        if self.damage is None:
            taken = self._walk(data, taken)
        if self.damage is not None:
            taken = len(data)
        self._digest.update(memoryview(data)[:taken])
        self.at += taken
        self._rest = data[taken:]

    def _walk(self, data: bytes, start: int) -> int:
        """Check whole frames from ``start`` on; return the end of the last one."""
        before, header = self._found, self.header
        assert before is not None
        assert header is not None
        found = Scan(before.sequence, before.position, before.epoch, start, before.time_us, before.synced)
        scan(pa.py_buffer(data), header, found)
        if found.offsets:
            at = found.offsets[-1]
            self.last = self.at + at, data[at : at + frames.HEADER_BYTES]
        self._found = found
        if found.what is not None and not self._may_continue(data, found):
            damage = Damage(self.name, self.at + found.end, found.sequence, found.what, found.newer)
            if not self.passes or found.newer:
                raise DamagedLog.of(damage)
            self.damage = damage
        return found.end

    def _may_continue(self, data: bytes, found: Scan) -> bool:
        """Return whether the walk may have stopped only because this piece ends."""
        left = len(data) - found.end
        if left < frames.HEADER_BYTES:
            return self.at + len(data) < self.size
        frame = frames.read_header(memoryview(data), found.end)
        end = found.end + frame.frame_bytes
        fits = frame.magic == frames.MAGIC and frame.sequence == found.sequence
        return fits and end > len(data) and self.at + end <= self.size

    def drop_rest(self) -> None:
        """Discard the bytes of an incomplete frame; they will be sent again."""
        self._rest = b""

    def finish(self, sequence: int | None) -> None:
        """Check that all bytes arrived, and end with the frame before ``sequence``. Raises Corrupt."""
        found = self._found
        if found is None or self.at != self.size or self._rest:
            where = found.sequence if found is not None else self._sequence
            self._refuse(self.at, where, "the file ends within a frame")
        elif self.damage is None and sequence is not None and found.sequence != sequence:
            self._refuse(self.at, found.sequence, f"the segment ends here, and the next frame should be {sequence}")

    def _refuse(self, offset: int, sequence: int, message: str) -> None:
        damage = Damage(self.name, offset, sequence, message)
        if not self.passes or self.at != self.size:
            raise DamagedLog.of(damage)
        self.damage = damage

    @property
    def end(self) -> Scan:
        """Sequence, position, epoch and time after the last frame."""
        if self._found is None:
            raise DamagedLog(self.name, 0, self._sequence, "the file is too short for its header")
        return self._found

    @property
    def checksum(self) -> str:
        """Checksum of the last frame, in hex; empty if there is none."""
        return "" if self.last is None else f"{frames.read_header(memoryview(self.last[1]), 0).checksum:016x}"

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()
