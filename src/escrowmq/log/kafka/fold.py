"""The fold of a partition: from its records, in their order, what counts. Pure: no clock, no network, no disk.

Every reader folds the same records and comes to the same frames, so nobody has to be asked who leads. The rule is in
``rule.py``; here are the bytes: headers, checksums, frames larger than a record. What cannot be read, and what is
missing, is an error at once: nothing is passed over that may have counted.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from escrowmq.errors import Code, error
from escrowmq.log import frames
from escrowmq.log.frames import FrameHeader
from escrowmq.log.kafka import records
from escrowmq.log.kafka.records import Claim, RecordHeader, RecordType, damaged
from escrowmq.log.kafka.rule import Owner, Verdict, judge
from escrowmq.schemas import Kind

LARGEST_CONTENT = frames.HEADER_BYTES + frames.LARGEST_PAYLOAD
"""Bytes that the parts of one frame or act may have together."""


class Standing(msgspec.Struct, frozen=True):
    """All that a fold knows at one offset: another continues from here and comes to the same."""

    offset: int = 0
    """Of the next record; everything before it was folded."""
    epoch: int = 0
    """How many claims counted. The epoch in the frames is another number: a log that was copied into a partition brings
    its own."""
    nonce: int = 0
    number: int = 0
    """Of the owner's next record."""
    sequence: int = 0
    """Of the log's next frame."""
    position: int = 0
    """Of its first row."""
    frame_epoch: int = 0
    """In the header of the last frame."""
    act_bytes: int = 0
    """Of the record of acts, so far."""
    shard: int = 0
    """Of the log; 0 before the first claim."""
    salt: int = 0
    url: str = ""
    """Where the owner answers."""
    released: bool = False
    """Whether the owner said that it stops."""
    silence: float = 0.0
    """Seconds without a sign of the owner before which no other may claim the log by the clock; 0: it did not say."""

    @property
    def owner(self) -> Owner:
        """Who owns the log, as ``rule.py`` has it."""
        return Owner(self.epoch, self.nonce, self.number)


class Taken(NamedTuple):
    """The result of folding one record."""

    offset: int
    verdict: Verdict
    header: RecordHeader
    content: memoryview
    """Of a FRAMES record that counts: its frames, whole, the parts before it included; of an ACT: its bytes; else the
    payload."""
    frames: list[tuple[int, FrameHeader]]
    """Where in ``content`` each frame begins. They are checked, their checksums too."""

    @property
    def type(self) -> RecordType:
        """Of the record, unless it is foreign."""
        return RecordType(self.header.type)

    @property
    def foreign(self) -> bool:
        """Whether it was made by another program."""
        return self.header is records.FOREIGN


_NOTHING = memoryview(b"")


def examine(offset: int, raw: bytes) -> tuple[RecordHeader, memoryview, Claim | None]:
    """Return the checked header and payload of a record, and what it claims if it does. Corrupt(DAMAGED,
    NEWER_FORMAT)."""
    header = records.read_header(raw, offset)
    payload = records.payload_of(raw, header, offset)
    return header, payload, records.read_claim(payload, offset) if header.type == RecordType.CLAIM else None


def judged(now: Standing, header: RecordHeader, claim: Claim | None) -> tuple[Verdict, Owner]:
    """Return the verdict on the next record, and the owner after it.

    A claim for another log, made by who did not know this one, does not count; its sender finds that out when it
    reads it.
    """
    ours = claim is not None and (not now.shard or (header.shard, claim.salt) == (now.shard, now.salt))
    return judge(now.owner, ours, header.nonce, header.number)


_NOT_OURS = (
    "it is no record of this program, and its owner was not heard of again: it may be what that one sent last; a topic "
    "of the log must have no "
    "other writers"
)


class Fold:
    """One reader's fold. Not thread-safe."""

    def __init__(self, standing: Standing | None = None) -> None:
        self._standing = standing or Standing()
        self._whole = self._standing
        self._parts: list[bytes] = []
        self._part_bytes = 0
        self._doubt: int | None = None  # the offset of a foreign record behind which no record of the owner came
        self.replicas: tuple[str, ...] = ()
        """Where the nodes answer that the owner knows of, by its last beat."""

    @property
    def standing(self) -> Standing:
        """After the last record taken."""
        return self._standing

    @property
    def whole(self) -> Standing:
        """Where another fold can continue: :attr:`standing`, but before the parts of something that is not whole yet,
        and before a record in doubt."""
        return self._whole

    def take(self, offset: int, raw: bytes) -> Taken:
        """Fold the next record of the partition. Corrupt(DAMAGED, NEWER_FORMAT) changes nothing.

        DAMAGED: offsets or records of the owner are missing, the record does not check, or its frames are not those
        that come next.

        A foreign record is void, in doubt: it could be one of the owner's whose first bytes are damaged. The owner's
        next record ends the doubt, for its number is the next one or shows that one is missing. A claim before that is
        DAMAGED: what the owner sent last may be what cannot be read.
        """
        now = self._standing
        if offset != now.offset:
            what = (
                f"the records from offset {now.offset} on are missing" if offset > now.offset else "it was read before"
            )
            raise damaged(offset, what)
        if records.is_foreign(raw):
            if self._doubt is None and now.epoch and not now.released:
                self._doubt = offset
            self._move_to(msgspec.structs.replace(now, offset=offset + 1))
            return Taken(offset, Verdict.VOID, records.FOREIGN, _NOTHING, [])
        header, payload, claim = examine(offset, raw)
        verdict, owner = judged(now, header, claim)
        after = msgspec.structs.replace(
            now, offset=offset + 1, epoch=owner.epoch, nonce=owner.nonce, number=owner.number
        )
        if verdict is Verdict.BREAKS:
            raise damaged(offset, f"records {now.number} to {header.number - 1} of its sender are missing")
        if verdict is Verdict.VOID:
            self._move_to(after)
            return Taken(offset, verdict, header, _NOTHING, [])
        if verdict is Verdict.CLAIMS:
            assert claim is not None
            if self._doubt is not None:
                raise damaged(self._doubt, _NOT_OURS)
            if not header.shard or not header.nonce:
                raise damaged(offset, "it claims without a number of the shard or of its own")
            after = msgspec.structs.replace(
                after, shard=header.shard, salt=claim.salt, url=claim.url, released=False, silence=claim.silence
            )
            self._parts, self._part_bytes, self.replicas = [], 0, ()
            self._standing = self._whole = after
            return Taken(offset, verdict, header, payload, [])
        if (header.shard, header.epoch) != (now.shard, now.epoch):
            raise damaged(
                offset, f"it says shard {header.shard}, epoch {header.epoch}; the log is {now.shard}, {now.epoch}"
            )
        return self._count(after, header, payload)

    def _count(self, after: Standing, header: RecordHeader, payload: memoryview) -> Taken:
        offset, found = after.offset - 1, list[tuple[int, FrameHeader]]()
        self._doubt = None
        if header.sequence != after.sequence:
            raise damaged(offset, f"it is of frame {header.sequence}, the log stands at {after.sequence}")
        if header.type == RecordType.PART:
            if self._part_bytes + len(payload) > LARGEST_CONTENT:
                raise damaged(offset, f"the parts of one frame are more than {LARGEST_CONTENT} bytes")
            self._parts.append(bytes(payload))
            self._part_bytes += len(payload)
            self._standing = after  # and ``whole`` stays before the first part
            return Taken(offset, Verdict.COUNTS, header, payload, found)
        content = payload
        if header.type in (RecordType.FRAMES, RecordType.ACT):
            content = memoryview(b"".join((*self._parts, payload))) if self._parts else payload
        elif self._parts:
            raise damaged(offset, f"a {RecordType(header.type).name} record between the parts of a frame")
        replicas = self.replicas
        after = msgspec.structs.replace(after, released=header.type == RecordType.RELEASE)
        if header.type == RecordType.FRAMES:
            after = _walk(after, content, found)
        elif header.type == RecordType.ACT:
            after = msgspec.structs.replace(after, act_bytes=after.act_bytes + len(content))
        elif header.type == RecordType.BEAT:
            beat = records.read_beat(payload, offset)
            after, replicas = msgspec.structs.replace(after, url=beat.url), beat.replicas
        self._parts, self._part_bytes, self.replicas = [], 0, replicas
        self._standing = self._whole = after
        return Taken(offset, Verdict.COUNTS, header, content, found)

    def _move_to(self, after: Standing) -> None:
        if not self._parts and self._doubt is None:
            self._whole = after
        self._standing = after


def _walk(after: Standing, content: memoryview, found: list[tuple[int, FrameHeader]]) -> Standing:
    """Return the standing behind the frames in ``content``, each of which must be the one that comes next; where
    they begin goes to ``found``."""
    offset, at = after.offset - 1, 0
    sequence, position, epoch = after.sequence, after.position, after.frame_epoch
    while at < len(content):
        if len(content) - at < frames.HEADER_BYTES:
            raise damaged(offset, "it ends within a frame's header")
        frame = frames.read_header(content, at)
        if frame.magic != frames.MAGIC or at + frame.frame_bytes > len(content):
            raise damaged(offset, f"frame {sequence} is not where it should begin, or not whole")
        if not frames.checks(content, at, frame, after.salt):
            raise damaged(offset, f"the checksum of frame {sequence} is wrong")
        if frame.is_newer:
            raise error(
                Code.NEWER_FORMAT, f"frame {sequence}, at offset {offset} of the partition, is of a newer version"
            )
        if (frame.sequence, frame.position) != (sequence, position):
            what = f"a frame out of place: sequence {frame.sequence}, position {frame.position}"
            raise damaged(offset, f"{what}; the log stands at {sequence}, {position}")
        if frame.epoch < epoch or (frame.epoch > epoch and frame.kind != Kind.OPENED):
            raise damaged(offset, f"a frame of opener {frame.epoch} among those of {epoch}")
        found.append((at, frame))
        at += frame.frame_bytes
        sequence, position, epoch = sequence + 1, position + frame.rows, frame.epoch
    if not found:
        raise damaged(offset, "it holds no frame")
    return msgspec.structs.replace(after, sequence=sequence, position=position, frame_epoch=epoch)
