"""Checks the frames of a segment while its bytes come, piece by piece, and makes its digest."""

from __future__ import annotations

import hashlib
import struct

import pyarrow as pa

from escrowmq.log import frames
from escrowmq.log.report import Damage, DamagedLog
from escrowmq.log.segments import HEADER_BYTES, LARGEST_HEADER, Scan, SegmentHeader, scan

_LENGTH_AT = 6
_CHECKSUM_AT = 48
_CHECKSUM = struct.Struct("<Q")
_LENGTH = struct.Struct("<H")


def _header_bytes(data: bytes) -> int:
    """Return how much of a file must be there before its header can be read: that of a newer version may be longer."""
    if len(data) < HEADER_BYTES:
        return HEADER_BYTES
    length: int = _LENGTH.unpack_from(data, _LENGTH_AT)[0]
    return min(max(length, HEADER_BYTES), LARGEST_HEADER)


class SegmentWalk:
    """A walk over the ``size`` bytes of the segment ``name``. ``passes``: damage is noted, and what follows it is taken
    as it is."""

    def __init__(self, name: str, sequence: int, size: int, *, passes: bool = False) -> None:
        self.name = name
        self.size = size
        self.at = 0
        """Bytes that were taken in: whole frames."""
        self.damage: Damage | None = None
        self.header: SegmentHeader | None = None
        self.last: tuple[int, bytes] | None = None
        """Where the last frame begins, and its header."""
        self._sequence = sequence
        self.passes = passes
        self._rest = b""
        self._found: Scan | None = None
        self._digest = hashlib.sha256()

    def feed(self, piece: bytes) -> None:
        """Take in what follows. Corrupt with the place, unless damage is passed."""
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
        """Return where the last whole frame ends."""
        before, header = self._found, self.header
        assert before is not None
        assert header is not None
        found = Scan(
            before.sequence, before.position, before.epoch, end=start, time_us=before.time_us, synced=before.synced
        )
        scan(pa.py_buffer(data), header, found)
        if found.offsets:
            at = found.offsets[-1]
            self.last = self.at + at, data[at : at + frames.HEADER_BYTES]
        self._found = found
        if found.what is not None and not self._may_go_on(data, found):
            damage = Damage(self.name, self.at + found.end, found.sequence, found.what, found.newer)
            if not self.passes or found.newer:
                raise DamagedLog(damage.file, damage.offset, damage.sequence, damage.what, newer=damage.newer)
            self.damage = damage
        return found.end

    def _may_go_on(self, data: bytes, found: Scan) -> bool:
        """Return whether what stopped the walk may be no more than the end of this piece."""
        left = len(data) - found.end
        if left < frames.HEADER_BYTES:
            return self.at + len(data) < self.size
        frame = frames.read_header(memoryview(data), found.end)
        end = found.end + frame.frame_bytes
        fits = frame.magic == frames.MAGIC and frame.sequence == found.sequence
        return fits and end > len(data) and self.at + end <= self.size

    def drop_rest(self) -> None:
        """Pass over what came of a frame that is not whole: it comes again."""
        self._rest = b""

    def finish(self, sequence: int | None) -> None:
        """All bytes came. Corrupt if they do not end with a whole frame, the one before ``sequence``."""
        found = self._found
        if found is None or self.at != self.size or self._rest:
            where = found.sequence if found is not None else self._sequence
            self._refuse(self.at, where, "the file ends within a frame")
        elif self.damage is None and sequence is not None and found.sequence != sequence:
            self._refuse(self.at, found.sequence, f"the segment ends here, and the next frame should be {sequence}")

    def _refuse(self, offset: int, sequence: int, what: str) -> None:
        damage = Damage(self.name, offset, sequence, what)
        if not self.passes or self.at != self.size:
            raise DamagedLog(damage.file, damage.offset, damage.sequence, damage.what)
        self.damage = damage

    @property
    def end(self) -> Scan:
        """Sequence, position, epoch and time behind the last frame."""
        if self._found is None:
            raise DamagedLog(self.name, 0, self._sequence, "the file is too short for its header")
        return self._found

    @property
    def checksum(self) -> str:
        """That of the last frame, in hex; nothing if there is none."""
        return "" if self.last is None else f"{_CHECKSUM.unpack_from(self.last[1], _CHECKSUM_AT)[0]:016x}"

    @property
    def sha256(self) -> str:
        """Of what was taken in."""
        return self._digest.hexdigest()
