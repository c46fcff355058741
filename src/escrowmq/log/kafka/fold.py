"""The fold of a partition: determines from its records, in order, which count. Pure: no clock, no network, no disk.

Every reader folds the same records into the same frames, whoever leads. ``rule.py`` has the rule, this module the
bytes. Unreadable or missing records are errors at once: no record that may have counted is skipped.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from escrowmq.errors import Code, error
from escrowmq.log import frames
from escrowmq.log.frames import FrameHeader
from escrowmq.log.kafka import records
from escrowmq.log.kafka.records import Beat, Claim, RecordHeader, RecordType, damage_error
from escrowmq.log.kafka.rule import Owner, Verdict, judge
from escrowmq.schemas import Kind

LARGEST_CONTENT = frames.HEADER_BYTES + frames.LARGEST_PAYLOAD  # maximum total bytes of the parts of one frame or act


class Standing(msgspec.Struct, frozen=True):
    """The complete state of a fold at one offset: another fold can resume from it with the same result."""

    offset: int = 0  # offset of the next record; everything before was folded
    epoch: int = 0  # number of claims that counted; frames have another: a log copied into a partition keeps its own
    nonce: int = 0
    number: int = 0  # number of the owner's next record
    sequence: int = 0  # sequence of the log's next frame
    position: int = 0  # position of its first row
    frame_epoch: int = 0  # epoch of the last frame
    act_bytes: int = 0  # bytes of the record of acts so far
    shard: int = 0  # shard of the log; 0 before the first claim
    salt: int = 0
    url: str = ""  # URL of the owner
    released: bool = False  # whether the owner released the log
    silence: float = 0.0  # seconds without a sign of the owner before others may claim by the clock; 0: not stated

    @property
    def owner(self) -> Owner:
        return Owner(self.epoch, self.nonce, self.number)


class Taken(NamedTuple):
    """The result of folding one record."""

    offset: int
    verdict: Verdict
    header: RecordHeader
    content: memoryview
    """For FRAMES that count: its whole frames, including the parts before it; for ACT: its bytes; else the payload."""
    frames: list[tuple[int, FrameHeader]]
    """Offset in ``content`` and header of each frame; their checksums are verified."""

    @property
    def type(self) -> RecordType:
        return RecordType(self.header.type)

    @property
    def foreign(self) -> bool:  # written by another program: it has no type
        return self.header is records.FOREIGN


_NOTHING = memoryview(b"")


def examine(offset: int, raw: bytes) -> tuple[RecordHeader, memoryview, Claim | None]:
    """Return checked header and payload of a record, and its claim if any. Raises Corrupt(DAMAGED, NEWER_FORMAT)."""
    header = records.read_header(raw, offset)
    payload = records.payload_of(raw, header, offset)
    return header, payload, records.read(payload, Claim, offset) if header.type == RecordType.CLAIM else None


def judge_record(now: Standing, header: RecordHeader, claim: Claim | None) -> tuple[Verdict, Owner]:
    """Return the verdict on the next record, and the owner after it. A claim for another log does not count."""
    ours = claim is not None and (not now.shard or (header.shard, claim.salt) == (now.shard, now.salt))
    return judge(now.owner, ours, header.nonce, header.number)


_NOT_OURS = (
    "it was not written by this program, and no later record of its owner follows: it may be the owner's last record; "
    "a topic of the log must have no other writers"
)


class Fold:
    """One reader's fold. Not thread-safe."""

    def __init__(self, standing: Standing | None = None) -> None:
        self.standing = standing or Standing()  # the state after the last record
        self.whole = self.standing  # where another fold can resume: before incomplete parts and a record in doubt
        self._parts: list[bytes] = []
        self._part_bytes = 0
        self._doubt: int | None = None  # offset of a foreign record with no owner's record after it
        self.replicas: tuple[str, ...] = ()  # URLs of the nodes known to the owner, from its last beat

    def take(self, offset: int, raw: bytes) -> Taken:
        """Fold the next record of the partition.
        Corrupt(DAMAGED, NEWER_FORMAT) changes nothing. DAMAGED: offsets or records of the owner are missing, the record
        is invalid, or its frames are not the next ones. A foreign record is void but in doubt: it could be the owner's,
        with its first bytes damaged. The owner's next record ends the doubt, as its number is the next one or shows
        that one is missing. A claim before that is DAMAGED: the unreadable record may be the last one of the owner."""
        now = self.standing
        if offset != now.offset:
            missing = f"the records from offset {now.offset} on are missing"
            raise damage_error(offset, missing if offset > now.offset else "it was read before")
        if records.is_foreign(raw):
            if self._doubt is None and now.epoch and not now.released:
                self._doubt = offset
            self._skip(msgspec.structs.replace(now, offset=offset + 1))
            return Taken(offset, Verdict.VOID, records.FOREIGN, _NOTHING, [])
        header, payload, claim = examine(offset, raw)
        verdict, owner = judge_record(now, header, claim)
        after = msgspec.structs.replace(now, offset=offset + 1, **owner._asdict())
        if verdict is Verdict.BREAKS:
            raise damage_error(offset, f"records {now.number} to {header.number - 1} of its sender are missing")
        if verdict is Verdict.VOID:
            self._skip(after)
            return Taken(offset, verdict, header, _NOTHING, [])
        if verdict is Verdict.CLAIMS:
            assert claim is not None
            if self._doubt is not None:
                raise damage_error(self._doubt, _NOT_OURS)
            if not header.shard or not header.nonce:
                raise damage_error(offset, "it claims without a number of the shard or of its own")
            log = {"shard": header.shard, "salt": claim.salt, "url": claim.url, "silence": claim.silence}
            after = msgspec.structs.replace(after, released=False, **log)
            self._parts, self._part_bytes, self.replicas = [], 0, ()
            self.standing = self.whole = after
            return Taken(offset, verdict, header, payload, [])
        if (header.shard, header.epoch) != (now.shard, now.epoch):
            message = f"it says shard {header.shard}, epoch {header.epoch}; the log is {now.shard}, {now.epoch}"
            raise damage_error(offset, message)
        return self._counted(after, header, payload)

    def _counted(self, after: Standing, header: RecordHeader, payload: memoryview) -> Taken:
        offset, found = after.offset - 1, list[tuple[int, FrameHeader]]()
        self._doubt = None
        if header.sequence != after.sequence:
            raise damage_error(offset, f"it is of frame {header.sequence}, the log stands at {after.sequence}")
        if header.type == RecordType.PART:
            if self._part_bytes + len(payload) > LARGEST_CONTENT:
                raise damage_error(offset, f"the parts of one frame are more than {LARGEST_CONTENT} bytes")
            self._parts.append(bytes(payload))
            self._part_bytes += len(payload)
            self.standing = after  # ``whole`` stays before the first part
            return Taken(offset, Verdict.COUNTS, header, payload, found)
        content = payload
        if header.type in (RecordType.FRAMES, RecordType.ACT):
            content = memoryview(b"".join((*self._parts, payload))) if self._parts else payload
        elif self._parts:
            raise damage_error(offset, f"a {RecordType(header.type).name} record between the parts of a frame")
        replicas = self.replicas
        after = msgspec.structs.replace(after, released=header.type == RecordType.RELEASE)
        if header.type == RecordType.FRAMES:
            after = _walk(after, content, found)
        elif header.type == RecordType.ACT:
            after = msgspec.structs.replace(after, act_bytes=after.act_bytes + len(content))
        elif header.type == RecordType.BEAT:
            beat = records.read(payload, Beat, offset)
            after, replicas = msgspec.structs.replace(after, url=beat.url), beat.replicas
        self._parts, self._part_bytes, self.replicas = [], 0, replicas
        self.standing = self.whole = after
        return Taken(offset, Verdict.COUNTS, header, content, found)

    def _skip(self, after: Standing) -> None:
        if not self._parts and self._doubt is None:
            self.whole = after
        self.standing = after


def _walk(after: Standing, content: memoryview, found: list[tuple[int, FrameHeader]]) -> Standing:
    """Return the state after the frames in ``content``, which must be the next ones of the log; add (offset in
    ``content``, header) of each to ``found``. Raises Corrupt(DAMAGED, NEWER_FORMAT)."""
    offset, at = after.offset - 1, 0
    sequence, position, epoch = after.sequence, after.position, after.frame_epoch
    while at < len(content):
        if len(content) - at < frames.HEADER_BYTES:
            raise damage_error(offset, "it ends within a frame's header")
        frame = frames.read_header(content, at)
        if frame.magic != frames.MAGIC or at + frame.frame_bytes > len(content):
            raise damage_error(offset, f"frame {sequence} is not where it should begin, or not whole")
        if not frames.is_intact(content, at, frame, after.salt):
            raise damage_error(offset, f"the checksum of frame {sequence} is wrong")
        if frame.is_newer:
            message = f"frame {sequence}, at offset {offset} of the partition, is of a newer version"
            raise error(Code.NEWER_FORMAT, message)
        if (frame.sequence, frame.position) != (sequence, position):
            message = f"a frame out of place: sequence {frame.sequence}, position {frame.position}"
            raise damage_error(offset, f"{message}; the log stands at {sequence}, {position}")
        if frame.epoch < epoch or (frame.epoch > epoch and frame.kind != Kind.OPENED):
            raise damage_error(offset, f"a frame of opener {frame.epoch} among those of {epoch}")
        found.append((at, frame))
        at += frame.frame_bytes
        sequence, position, epoch = sequence + 1, position + frame.rows, frame.epoch
    if not found:
        raise damage_error(offset, "it holds no frame")
    return msgspec.structs.replace(after, sequence=sequence, position=position, frame_epoch=epoch)
