"""Copies a whole log from a data folder into a partition, or back into its own folder; verifies it by digest."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import chain, pairwise
from typing import NamedTuple

import msgspec

from escrowmq.acts import journal
from escrowmq.errors import Code, Misuse, error
from escrowmq.log.kafka.bases import Bases, Manifest, file_pieces
from escrowmq.log.kafka.channel import Channel, Round, claim
from escrowmq.log.kafka.fold import Fold
from escrowmq.log.kafka.partition import Partition, Partitions
from escrowmq.log.kafka.records import RecordType
from escrowmq.log.kafka.replica import ANSWER_SECONDS, PartitionReplica
from escrowmq.log.kafka.rule import Verdict
from escrowmq.log.offline import open_offline
from escrowmq.log.recovery import MIRROR_NAME
from escrowmq.log.report import DamagedLog
from escrowmq.log.seam import StoredFile
from escrowmq.log.segments import HEADER_BYTES, SegmentHeader, scan
from escrowmq.platform.disk import Disk, disk_errors, map_file, read_file

GROUP_BYTES = 4 << 20  # bytes of frames sent at once
AHEAD = 4  # maximum number of such groups in flight
_EMPTY_FIRST = "copy into topics that were made for it: `escrowmq log create`"


Frames = Iterator[tuple[int, memoryview]]  # sequence and bytes


class Copied(NamedTuple):
    """A copied log: frames from ``first`` to before ``end``, their bytes and digest, and the number of acts."""

    first: int
    end: int
    bytes: int
    sha256: str
    acts: int


@disk_errors()
def to_partition(disk: Disk, partitions: Partitions, *, version: str) -> Copied:
    """Copy the log of ``disk``'s folder, locked meanwhile and unchanged, into an empty partition, and verify the copy.
    Raises Misuse(FOLDER_IN_USE, BAD_ARGUMENT), Corrupt(DAMAGED); later failures leave topics that must be deleted."""
    disk.lock()
    try:
        with closing(partitions.log()) as partition, closing(partitions.base()) as base:
            partitions.check(ANSWER_SECONDS)
            for part in (partition, base):
                if part.ends(ANSWER_SECONDS)[1]:
                    raise Misuse(Code.BAD_ARGUMENT, f"{part.name} has records already", _EMPTY_FIRST)
            acts, sent = _send(disk, partition, base, version)
    finally:
        disk.close()
    with closing(partitions.log()) as partition, closing(partitions.base()) as base:
        _compare(sent, _digest_partition(partition, base, partition.ends(ANSWER_SECONDS)[1]))
    return sent._replace(acts=acts)


@disk_errors()
def to_folder(partitions: Partitions, disk: Disk) -> Copied:
    """Copy a partition into ``disk``'s folder, which must be empty (or hold an earlier attempt), and verify the copy: a
    separate log that no longer follows. Raises Misuse(NOT_A_DATA_FOLDER), Rejected(NOT_FOUND) if there is no log,
    Corrupt(DAMAGED)."""
    replica = PartitionReplica(disk, partitions, url="")
    try:
        with closing(partitions.log()) as partition, closing(partitions.base()) as base:
            end = partition.ends(ANSWER_SECONDS)[1]
            while replica.offset < end:
                replica.follow(1.0)
            expected = _digest_partition(partition, base, end)
            acts = replica.log.acts.extent()[1]
    finally:
        replica.close()
    if not expected.end:
        raise error(Code.NOT_FOUND, f"{partitions.name} holds no log")
    disk.lock()
    try:
        for name in disk.list():
            with suppress(FileNotFoundError), closing(disk.open(name)) as file:
                file.sync()
        disk.sync_folder()
        disk.remove(MIRROR_NAME)  # makes it an ordinary log
        disk.sync_folder()
        stored = _stored_frames(disk, open_offline(disk, in_use=False).files().segments)
        _compare(expected, _digest(stored, expected.first, expected.end))
    finally:
        disk.close()
    return expected._replace(acts=acts)


def _send(disk: Disk, partition: Partition, base: Partition, version: str) -> tuple[int, Copied]:
    log = open_offline(disk, in_use=False)
    files = log.files()
    first = SegmentHeader.unpack(read_file(disk, files.segments[0].name, HEADER_BYTES), files.segments[0].name)
    channel = claim(partition, Fold(), url="", version=version, seed=(log.shard, first.salt))
    try:
        acts = file_pieces(disk, journal.NAME, files.acts_bytes)
        if first.sequence:
            begin = {"sequence": first.sequence, "position": first.position, "frame_epoch": first.epoch}
            after = msgspec.structs.replace(channel.standing, act_bytes=files.acts_bytes, **begin)
            snapshot = max(files.snapshots, key=lambda stored: stored.name.startswith("base-"))
            sequence = int(snapshot.name.split("-")[1][:20])
            manifest = Manifest.of(first, sequence, snapshot.size, after)
            Bases(base).send(manifest, chain(file_pieces(disk, *snapshot), acts))
            channel.close()
            channel = Channel(partition, after)
            partition.delete_before(after.offset)
        else:
            for lines in _lines(acts):
                channel.send_act(lines).wait()
        frames = _send_frames(channel, _stored_frames(disk, files.segments))
        sent = _digest(frames, first.sequence, log.next_sequence)
        channel.release(ANSWER_SECONDS)
    finally:
        channel.close()
    return files.acts, sent


def _stored_frames(disk: Disk, segments: tuple[StoredFile, ...]) -> Frames:
    """Yield sequence and bytes of each checked frame of these segment files. Raises Corrupt with the place."""
    for name, size in segments:
        data = map_file(disk, name, size)
        header = SegmentHeader.unpack(data, name)
        found = scan(data, header)
        if found.what is not None:
            raise DamagedLog(name, found.end, found.sequence, found.what, newer=found.newer)
        for sequence, (start, end) in enumerate(pairwise([*found.offsets, found.end]), header.sequence):
            yield sequence, memoryview(data)[start:end]


def _send_frames(channel: Channel, frames: Frames) -> Frames:
    """Yield the frames on, and send them through ``channel``, many at once; at the end wait until all count."""
    waiting, group, size = deque[Round](), list[list[memoryview]](), 0
    for sequence, frame in frames:
        group.append([frame])
        size += len(frame)
        if size >= GROUP_BYTES:
            waiting.append(channel.send_frames(group))
            group, size = [], 0
            if len(waiting) > AHEAD:
                waiting.popleft().wait()
        yield sequence, frame
    if group:
        waiting.append(channel.send_frames(group))
    for left in waiting:
        left.wait()


def _digest_partition(partition: Partition, base_partition: Partition, end: int) -> Copied:
    """Return range, size and digest of the frames that a reader finds in a partition below offset ``end``."""
    fold, first = Fold(), 0
    if (base := Bases(base_partition).newest()) is not None:
        fold, first = Fold(base.manifest.standing), base.manifest.sequence

    def frames() -> Frames:
        while fold.standing.offset < end:
            for offset, raw in partition.read(fold.standing.offset, end, 1.0):
                taken = fold.take(offset, raw)
                if taken.verdict is Verdict.COUNTS and taken.type is RecordType.FRAMES:
                    for at, header in taken.frames:
                        yield header.sequence, taken.content[at : at + header.frame_bytes]

    return _digest(frames(), first, 1 << 62)


def _digest(frames: Frames, first: int, end: int) -> Copied:
    digest, size, following = hashlib.sha256(), 0, first
    for sequence, frame in frames:
        if first <= sequence < end:
            digest.update(frame)
            size, following = size + len(frame), sequence + 1
    return Copied(first, following, size, digest.hexdigest(), 0)


def _compare(expected: Copied, found: Copied) -> None:
    if expected != found:
        message = f"the copy holds frames {found.first} to {found.end} with the digest {found.sha256}"
        raise error(Code.DAMAGED, f"{message}, not {expected.first} to {expected.end} with {expected.sha256}")


def _lines(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Regroup the bytes into parts that end with a whole line."""
    rest = b""
    for piece in pieces:
        whole, end, rest = (rest + piece).rpartition(b"\n")
        if end:
            yield whole + end
