"""Snapshot files: a ledger's tables at one sequence, so that restart time does not grow with history.

``snapshot-<sequence>.snapshot`` is optional while the frames before it exist. When the first segments are dropped, the
newest snapshot is renamed to ``base-<sequence>-<first>.snapshot``: from then on it is part of the log. It also plans
the removal: segments before frame ``<first>`` are no longer part of the log. A rename needs no space, so retention
works on a full disk.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa

from escrowmq.errors import Code, error
from escrowmq.log.report import DamagedLog
from escrowmq.log.seam import Snapshot
from escrowmq.log.segments import FORMAT_VERSION, open_header, seal_header
from escrowmq.message.hashes import checksum
from escrowmq.platform.disk import Chunk, Disk, map_file, replace_file

_MAGIC = b"EMQP"
_HEADER = struct.Struct("<4sHHIIQQQ16x")
HEADER_BYTES = _HEADER.size + 8
_SECTION = struct.Struct("<IIQQ")
STEP_BYTES = 2 << 20  # bytes after which a snapshot is synced: rounds of the log on the same disk wait for these syncs
_NAME = re.compile(r"snapshot-(\d{20})\.snapshot|base-(\d{20})-(\d{20})\.snapshot")


@dataclass(frozen=True, slots=True, order=True)
class SnapshotName:
    """A snapshot's file name: its sequence and, for a base, the first frame kept (else -1)."""

    sequence: int
    first: int = -1

    def __str__(self) -> str:
        if self.first < 0:
            return f"snapshot-{self.sequence:020d}.snapshot"
        return f"base-{self.sequence:020d}-{self.first:020d}.snapshot"


def listed(names: list[str]) -> list[SnapshotName]:
    """Return the snapshots among file names, newest first."""
    matches = [match for name in names if (match := _NAME.fullmatch(name))]
    return sorted((SnapshotName(int(m[1] or m[2]), int(m[3] or -1)) for m in matches), reverse=True)


def find_base(names: Iterable[SnapshotName]) -> SnapshotName | None:
    """Return the base of a log among its snapshots."""
    return max((s for s in names if s.first >= 0), key=lambda s: (s.first, s.sequence), default=None)


def save(disk: Disk, shard: int, snapshot: Snapshot) -> SnapshotName:
    """Store a snapshot durably under its name. OSError leaves nothing behind."""
    name = SnapshotName(snapshot.sequence)
    replace_file(disk, str(name), pack(shard, snapshot), step=STEP_BYTES)
    return name


def load(disk: Disk, name: SnapshotName, shard: int) -> Snapshot:
    """Load a snapshot; its tables lie in the mapped file. Raises Corrupt with the place, FileNotFoundError."""
    file = str(name)
    data = map_file(disk, file)
    fields = _HEADER.unpack(open_header(data, _MAGIC, HEADER_BYTES, file))[3:]
    if fields[0] != shard or fields[2] != name.sequence:
        raise DamagedLog(file, 0, -1, "a snapshot of another log or place")
    tables, at = dict[str, pa.Table](), HEADER_BYTES
    for _ in range(fields[1]):
        at = _unpack_section(data, at, file, tables)
    if at != data.size:
        raise DamagedLog(file, at, -1, "bytes after the last section")
    return Snapshot(fields[2], fields[3], fields[4], tables)


def pack(shard: int, snapshot: Snapshot) -> Iterator[list[Chunk]]:
    """Yield the encoded snapshot file of a shard, piece by piece."""
    fields = (shard, len(snapshot.tables), snapshot.sequence, snapshot.position, snapshot.time_us)
    yield [seal_header(_HEADER.pack(_MAGIC, FORMAT_VERSION, HEADER_BYTES, *fields))]
    for name, table in snapshot.tables.items():
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        stream = sink.getvalue()
        raw = name.encode()
        title = raw + bytes(-len(raw) % 8)
        head = _SECTION.pack(len(raw), 0, stream.size, _section_checksum(len(raw), title, stream))
        yield [head + title, stream, bytes(-stream.size % 8)]


def _section_checksum(name_bytes: int, title: bytes | memoryview, stream: pa.Buffer) -> int:
    return checksum(struct.pack("<IIQ", name_bytes, 0, stream.size), title, stream)


def _unpack_section(data: pa.Buffer, at: int, file: str, tables: dict[str, pa.Table]) -> int:
    """Add the table of the section at byte ``at`` to ``tables``; return the offset after it. Raises Corrupt."""
    if data.size - at < _SECTION.size:
        raise DamagedLog(file, at, -1, "the file ends within a section")
    name_bytes, reserved, size, digest = _SECTION.unpack_from(data, at)
    start = at + _SECTION.size
    stream = start + name_bytes + -name_bytes % 8
    end = stream + size + -size % 8
    if reserved or end > data.size:
        raise DamagedLog(file, at, -1, "the section is longer than the file")
    title = memoryview(data)[start:stream]
    payload = data.slice(stream, size)
    if _section_checksum(name_bytes, title, payload) != digest or any(memoryview(data)[stream + size : end]):
        raise DamagedLog(file, at, -1, "the checksum of a section is wrong")
    try:
        tables[bytes(title[:name_bytes]).decode()] = pa.ipc.open_stream(payload).read_all()
    except MemoryError as problem:  # Arrow's error is also an ArrowException; the snapshot is intact
        raise error(Code.OUT_OF_RESOURCES, f"no memory to read a snapshot: {problem}") from problem
    except (pa.ArrowException, OSError, ValueError) as problem:
        raise DamagedLog(file, at, -1, f"a section does not decode: {problem}") from problem
    return int(end)


def newest(
    disk: Disk, shard: int, names: list[SnapshotName], first: int, end: int
) -> tuple[SnapshotName, Snapshot] | None:
    """Load the newest valid snapshot from which the log can continue (``first`` <= sequence <= ``end``).
    Returns None if replay can start from frame 0; otherwise raises Corrupt with the place of the newest damage."""
    problem: DamagedLog | None = None
    for name in names:
        if not first <= name.sequence <= end:
            continue
        try:
            return name, load(disk, name, shard)
        except DamagedLog as damaged:
            if damaged.code is Code.NEWER_FORMAT:
                raise
            problem = problem or damaged
        except FileNotFoundError:
            continue
    if first == 0:
        return None
    if problem is not None:
        raise problem
    message = f"the log begins at frame {first} and the snapshot that replaces the earlier frames is missing"
    raise error(Code.DAMAGED, message)
