"""Base snapshots in Kafka: they replace the records that retention deletes from the partition.

A base is sent to the topic ``TOPIC.base`` in chunks, followed by a manifest; records are deleted only after that is
acknowledged. So a crash between two steps leaves more in Kafka than needed, never less. A former leader that does not
know yet that it was replaced may send one, too: a base of frames that count like any other; it may delete at any later
time. Therefore each base has a rank: the offset at which its reader resumes. Readers use the base of the highest rank,
whatever follows it. A sender deletes only records below the rank of its base, and only bases of a lower rank than a
complete one. So whatever is deleted, and however late, the base of the highest rank and all records after it remain.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Iterable, Iterator
from contextlib import closing
from time import monotonic
from typing import NamedTuple

import msgspec
import xxhash

from escrowmq.acts import journal
from escrowmq.errors import Code, EscrowError, error
from escrowmq.log.kafka.fold import Standing
from escrowmq.log.kafka.partition import Partition
from escrowmq.log.segments import SegmentHeader
from escrowmq.log.snapshots import SnapshotName
from escrowmq.message.hashes import checksum
from escrowmq.platform.disk import Chunk, Disk, disk_errors, read_pieces, replace_file
from escrowmq.platform.failpoints import reach

VERSION = 1
CHUNK_BYTES = 900_000
AHEAD = 16  # maximum number of unacknowledged chunks
_MAGIC = b"EMQB"
_HEADER = struct.Struct("<4sHHQQIIQ")
_CHUNK, _MANIFEST = 1, 2
_CHECKED_BYTES = _HEADER.size - 8


class Manifest(msgspec.Struct, frozen=True):
    """The description of a base; ``chunks`` hold the snapshot's file, then the record of acts."""

    id: int
    shard: int
    salt: int
    epoch: int  # epoch of the frame before the first one kept
    sequence: int  # sequence of the first frame kept
    position: int  # position of the first frame kept
    created_us: int  # time at which its segment was begun
    snapshot: int  # sequence of the snapshot
    snapshot_bytes: int
    act_bytes: int
    chunks: int
    digest: int  # digest of all chunks (xxh3_64)
    standing: Standing

    @classmethod
    def of(cls, header: SegmentHeader, snapshot: int, snapshot_bytes: int, standing: Standing) -> Manifest:
        """Create the manifest of a base that ends before the segment with this header, still without chunks.
        ``snapshot``: the sequence of its snapshot; ``standing``: where its readers resume."""
        h, acts = header, standing.act_bytes
        places = h.shard, h.salt, h.epoch, h.sequence, h.position, h.created_us, snapshot
        return cls(0, *places, snapshot_bytes, acts, 0, 0, standing)

    @property
    def rank(self) -> int:
        """The offset in the log's partition at which a reader of this base resumes."""
        return self.standing.offset

    @property
    def header(self) -> SegmentHeader:
        return SegmentHeader(self.shard, self.epoch, self.sequence, self.position, self.created_us, self.salt)


class Stored(NamedTuple):
    """A base in the partition: its manifest, and the offsets of its chunks and its manifest."""

    manifest: Manifest
    chunks: tuple[int, ...]
    offset: int


class Record(NamedTuple):
    """The content of one record of the base's partition."""

    type: int
    id: int
    rank: int
    number: int
    payload: memoryview


def pack(type: int, id: int, rank: int, number: int, payload: bytes | memoryview) -> bytes:
    """Encode one record of the base's partition: chunk ``number`` of the base ``id``, or its manifest."""
    head = _HEADER.pack(_MAGIC, VERSION, type, id, rank, number, len(payload), 0)[:_CHECKED_BYTES]
    return b"".join((head, struct.pack("<Q", checksum(head, payload)), payload))


def unpack(raw: bytes, offset: int) -> Record | None:
    """Decode a record; None if it is invalid: an incomplete base is not used. Raises Corrupt(NEWER_FORMAT)."""
    if len(raw) < _HEADER.size or raw[:4] != _MAGIC:
        return None
    _, version, type_, id_, rank, number, size, digest = _HEADER.unpack_from(raw)
    payload = memoryview(raw)[_HEADER.size :]
    if len(payload) != size or checksum(raw[:_CHECKED_BYTES], payload) != digest:
        return None
    if version > VERSION:
        raise error(Code.NEWER_FORMAT, f"the record of a base at offset {offset} is of format version {version}")
    return Record(type_, id_, rank, number, payload)


class Bases:
    """The bases of one shard. One thread."""

    def __init__(self, partition: Partition, timeout: float = 30.0) -> None:
        self._partition = partition
        self._timeout = timeout
        self._at = 0  # the next offset to read
        self._chunks: dict[int, dict[int, int]] = {}  # chunk offsets by id and number, without a manifest yet
        self._ranks: dict[int, int] = {}  # ranks by id
        self.best: Stored | None = None  # the complete base of the highest rank read so far
        self._number = 0

    def newest(self) -> Stored | None:
        """Read all records of the base's partition; return the complete base of the highest rank, None without one.
        Raises Unknown(TIMED_OUT) if the partition does not respond."""
        end = self._begin(self._timeout)
        deadline = monotonic() + self._timeout
        while self._at < end:
            self._take(self._read(self._at, end, deadline))
        return self.best

    def poll(self, seconds: float) -> bool:
        """Read new records for at most ``seconds``; return whether more are available.
        If the partition is silent, or a part of it was just deleted, a later call continues."""
        deadline = monotonic() + seconds
        try:
            end = self._begin(seconds)
            while self._at < end and (left := deadline - monotonic()) > 0:
                if not (found := self._partition.read(self._at, end, left)):
                    return False
                self._take(found)
        except EscrowError as problem:
            if problem.code not in (Code.TIMED_OUT, Code.RANGE_PURGED):
                raise
            return False
        return self._at < end

    def _begin(self, seconds: float) -> int:
        """Return the partition's end, and restart at its first record if records not yet read were deleted."""
        first, end = self._partition.ends(seconds)
        if self._at < first:
            self._at, self._chunks, self._ranks = first, {}, {}
        return end

    def _take(self, found: list[tuple[int, bytes]]) -> None:
        for offset, raw in found:
            self._note(offset, raw)
            self._at = offset + 1

    @disk_errors()
    def fetch(self, base: Stored, disk: Disk) -> None:
        """Write the snapshot, as a base, and the record of operator actions into a folder. Raises Corrupt(DAMAGED)."""
        pieces, rest = self._contents(base, self._timeout), list[bytes]()
        snapshot = _first(pieces, base.manifest.snapshot_bytes, rest)
        replace_file(disk, str(SnapshotName(base.manifest.snapshot, base.manifest.sequence)), snapshot)
        if base.manifest.act_bytes:
            replace_file(disk, journal.NAME, ([piece] for piece in (*rest, *pieces)))

    @disk_errors()
    def fetch_snapshot(self, base: Stored, disk: Disk, patience: float = 30.0) -> None:
        """Write only the snapshot into a folder, as an ordinary one. ``patience``: timeout (s) of each read."""
        snapshot = _first(self._contents(base, patience), base.manifest.snapshot_bytes, [])
        replace_file(disk, str(SnapshotName(base.manifest.snapshot)), snapshot)

    def send(self, manifest: Manifest, content: Iterable[bytes | memoryview]) -> Stored:
        """Send a base and return it once acknowledged; id, chunks and digest of the manifest are filled in here.
        Unknown(TIMED_OUT) and Corrupt(LOG_FAILED) leave unused chunks."""
        self.newest()
        id_ = secrets.randbits(63) | 1
        digest = xxhash.xxh3_64()
        waiting, count = set[int](), 0
        for piece in _pieces(content):
            digest.update(piece)
            self._send(pack(_CHUNK, id_, manifest.rank, count, piece), waiting)
            count += 1
            self._settle(waiting, AHEAD)
        self._settle(waiting, 0)
        reach("base.chunks_sent")
        whole = msgspec.structs.replace(manifest, id=id_, chunks=count, digest=digest.intdigest())
        self._send(pack(_MANIFEST, id_, whole.rank, 0, msgspec.json.encode(whole)), waiting)
        self._settle(waiting, 0)
        reach("base.manifest_sent")
        found = self.newest()
        if found is None or found.manifest.rank < whole.rank:
            raise error(Code.DAMAGED, f"a base was sent to {self._partition.name} and is not there")
        return found

    def delete_old(self) -> None:
        """Delete records before the best base and before chunks that may still become a better one."""
        if (best := self.best) is not None:
            better = [id_ for id_ in self._chunks if self._ranks[id_] > best.manifest.rank]
            needed = (*best.chunks, best.offset, *(min(self._chunks[id_].values()) for id_ in better))
            self._partition.delete_before(min(needed), self._timeout)
            reach("base.old_deleted")

    def _send(self, record: bytes, waiting: set[int]) -> None:
        self._number += 1
        self._partition.produce(self._number, record)
        waiting.add(self._number)

    def _settle(self, waiting: set[int], most: int) -> None:
        deadline = monotonic() + self._timeout
        while len(waiting) > most:
            found = self._partition.acknowledged(max(min(deadline - monotonic(), 1.0), 0.0))
            waiting -= {number for number, _ in found}
            if not found and monotonic() > deadline:
                raise error(Code.TIMED_OUT, f"{self._partition.name} did not acknowledge within {self._timeout:g} s")

    def _read(self, start: int, end: int, deadline: float) -> list[tuple[int, bytes]]:
        left = deadline - monotonic()
        found = self._partition.read(start, end, max(min(left, 1.0), 0.0))
        if not found and left <= 0:
            raise error(Code.TIMED_OUT, f"{self._partition.name} did not answer in time")
        return found

    def _note(self, offset: int, raw: bytes) -> None:
        if (record := unpack(raw, offset)) is None:
            return
        if record.type == _CHUNK:
            self._chunks.setdefault(record.id, {})[record.number] = offset
            self._ranks[record.id] = record.rank
            return
        chunks = self._chunks.pop(record.id, {})
        try:
            manifest = msgspec.json.decode(record.payload, type=Manifest)
        except msgspec.DecodeError:
            return
        if sorted(chunks) != list(range(manifest.chunks)):
            return
        if self.best is None or manifest.rank > self.best.manifest.rank:
            self.best = Stored(manifest, tuple(chunks[number] for number in range(manifest.chunks)), offset)

    def _contents(self, base: Stored, patience: float) -> Iterator[bytes]:
        """Yield the contents of the chunks of ``base``, each read within ``patience`` seconds. Raises Corrupt(DAMAGED),
        at the latest at the end, if their digest is wrong."""
        digest, at, expected = xxhash.xxh3_64(), min((*base.chunks, base.offset)), 0
        deadline = monotonic() + patience
        while expected < len(base.chunks):
            for offset, raw in self._read(at, base.offset, deadline):
                at, deadline = offset + 1, monotonic() + patience
                if expected == len(base.chunks) or offset != base.chunks[expected]:
                    continue
                if (record := unpack(raw, offset)) is None:
                    raise self._damage_error(base)
                digest.update(record.payload)
                expected += 1
                if expected == len(base.chunks) and digest.intdigest() != base.manifest.digest:
                    raise self._damage_error(base)
                yield bytes(record.payload)

    def _damage_error(self, base: Stored) -> EscrowError:
        return error(Code.DAMAGED, f"the base at offset {base.offset} of {self._partition.name} is damaged")


def _first(pieces: Iterator[bytes], size: int, rest: list[bytes]) -> Iterator[list[Chunk]]:
    """Yield the first ``size`` bytes of ``pieces``; add the excess of the last piece used to ``rest``. Raises
    Corrupt(DAMAGED) if they are shorter."""
    while size > 0:
        piece = next(pieces, None)
        if piece is None:
            raise error(Code.DAMAGED, "a base in Kafka is shorter than its manifest says")
        if len(piece) > size:
            rest.append(piece[size:])
        yield [piece[:size]]
        size -= len(piece)


def _pieces(content: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
    """Split each part into pieces of at most CHUNK_BYTES."""
    for part in content:
        view = memoryview(part).cast("B")
        for start in range(0, len(view), CHUNK_BYTES):
            yield view[start : start + CHUNK_BYTES]


def file_pieces(disk: Disk, name: str, size: int) -> Iterator[bytes]:
    """Yield the first ``size`` bytes of a file in pieces. Raises OSError."""
    if size:
        with closing(disk.open(name)) as file:
            yield from read_pieces(file, size, most=CHUNK_BYTES)
