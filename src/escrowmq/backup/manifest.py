"""The file ``backup.json``, which describes a backup. It is written last, so a backup that has one is complete.

JSON, keys sorted. ``digest`` is SHA-256 over the same JSON without it (no spaces, ASCII). A file may be longer than its
``bytes``: the rest belongs to a later, unfinished backup into the same folder.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from contextlib import closing
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from escrowmq.errors import Code, Misuse, error
from escrowmq.log.report import DamagedLog
from escrowmq.log.segments import segment_base
from escrowmq.platform.disk import Disk, File, WrappedDisk, check_file_name, replace_file

NAME = "backup.json"
COPY = ".copy"  # suffix of the files of a backup
UNFINISHED = ".restoring"  # suffix of the files of a data folder being restored
FORMAT = 1
MOST_BYTES = 64 << 20  # maximum size of a manifest: 400,000 files
Number = Annotated[int, Meta(ge=0, lt=1 << 61)]
TimeUs = Annotated[int, Meta(ge=0, lt=1 << 53)]  # up to the year 2255


@dataclass(frozen=True, slots=True)
class CopiedFile:
    """A file of the log: the bytes copied, and their SHA-256 in hex."""

    name: str
    bytes: Number
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The description of a backup: a shard's log from frame ``first`` to before ``sequence`` and ``position``."""

    shard: Annotated[int, Meta(gt=0, lt=1 << 32)]
    first: Number
    sequence: Number
    position: Number
    time_us: TimeUs  # time of the last frame, by the broker's clock
    epoch: Number
    checksum: str  # checksum of the last frame, in hex; empty if the last segment has no frame yet
    acts: Number  # number of records in the record of acts
    acts_hash: str
    begun_us: TimeUs  # by the clock of the machine that made the backup: it contains everything acknowledged before
    made_us: TimeUs
    source: str
    version: str
    files: tuple[CopiedFile, ...]
    damaged: tuple[str, ...] = ()  # damaged places of the log, copied as they were

    @property
    def size(self) -> int:
        return sum(file.bytes for file in self.files)

    def pack(self) -> bytes:
        fields: dict[str, Any] = {"format": FORMAT, **dataclasses.asdict(self)}
        return json.dumps({**fields, "digest": _digest(fields)}, sort_keys=True, indent=1).encode() + b"\n"

    @classmethod
    def unpack(cls, raw: bytes) -> Manifest:
        """Decode a file's content. Raises Corrupt(DAMAGED, NEWER_FORMAT)."""
        try:
            fields: dict[str, Any] = json.loads(raw)
            written = fields.pop("digest")
            format_ = fields["format"]
            if written != _digest(fields):
                raise ValueError("its digest is wrong")
            if format_ > FORMAT:
                raise DamagedLog(NAME, 0, -1, f"the backup is of format {format_}", newer=True)
            del fields["format"]
            if unknown := fields.keys() - {field.name for field in dataclasses.fields(cls)}:
                raise ValueError(f"it has a field {min(unknown)!r}")
            found = msgspec.convert(fields, cls)
            found.check()
            return found
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, Misuse) as problem:
            raise DamagedLog(NAME, 0, -1, f"the manifest is damaged: {problem!r:.200}") from None

    def check(self) -> None:
        """Raise ValueError or Misuse for impossible names: a digest only detects accidental changes."""
        names = [check_file_name(file.name) for file in self.files]
        if len(set(names)) < len(names) or NAME in names:
            raise ValueError("a file is named twice")
        if not any(segment_base(name) == self.first for name in names):
            raise ValueError(f"no segment begins with frame {self.first}")


def _digest(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_manifest(disk: Disk) -> Manifest:
    """Read the manifest of a backup. Raises Misuse(BAD_ARGUMENT) if there is none, Corrupt(DAMAGED, NEWER_FORMAT)."""
    found = find_manifest(disk)
    if found is None:
        hint = "an interrupted backup has none: repeat it with the same folder, and it resumes"
        raise Misuse(Code.BAD_ARGUMENT, f"there is no complete backup: {NAME} is missing", hint)
    return found


def find_manifest(disk: Disk) -> Manifest | None:
    """Read as :func:`read_manifest`; None if there is none."""
    try:
        with closing(disk.open(NAME)) as file:
            if file.size() > MOST_BYTES:
                raise error(Code.DAMAGED, f"{NAME} is larger than any manifest")
            return Manifest.unpack(file.read_at(0, MOST_BYTES))
    except FileNotFoundError:
        return None


def write_manifest(disk: Disk, manifest: Manifest) -> None:
    """Write the manifest durably, which completes the backup."""
    replace_file(disk, NAME, [[manifest.pack()]])


class SuffixedDisk(WrappedDisk):
    """A :class:`~escrowmq.platform.disk.Disk` with only the files that have ``suffix``, named without it."""

    def __init__(self, disk: Disk, suffix: str) -> None:
        super().__init__(disk)
        self._suffix = suffix

    def open(self, name: str, *, create: bool = False) -> File:
        return self._disk.open(name + self._suffix, create=create)

    def list(self) -> list[str]:
        return [name.removesuffix(self._suffix) for name in self._disk.list() if name.endswith(self._suffix)]

    def rename(self, old: str, new: str) -> None:
        self._disk.rename(old + self._suffix, new + self._suffix)

    def reveal(self, name: str) -> None:
        """Remove the suffix from a file's name, which removes the file from this disk."""
        self._disk.rename(name + self._suffix, name)

    def remove(self, name: str) -> None:
        self._disk.remove(name + self._suffix)
