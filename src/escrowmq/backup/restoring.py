"""Makes a data folder of a backup. Nothing is visible before everything is there and checked; then the segment with
which the log begins gets its name last, and until then no broker opens the folder.

What a restored shard must not do is take itself for the one that continued. So it begins with three frames of its own:

- OPENED, under an epoch that the other cannot have come to: the second of the restoring. Nothing that it writes is a
  frame of the other's.
- SESSION and FORGOTTEN of a session that nobody has, whose number lies as far on: a producer's session of after the
  backup, and with it each transaction id, is unknown here, and never that of somebody else.

As a new shard it has a number of its own, too: then it can stand beside the one that lives. Its record of acts begins
anew, and the old one lies beside it.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import pyarrow as pa

from escrowmq.acts import journal
from escrowmq.acts.chain import Record, origin
from escrowmq.backup.manifest import CopiedFile, Manifest, read_manifest
from escrowmq.backup.sources import PIECE_BYTES
from escrowmq.backup.suffixed import COPY, UNFINISHED, SuffixedDisk
from escrowmq.backup.verifying import Contents, check_manifest, contents
from escrowmq.broker.writer.recovery import fold
from escrowmq.errors import Code, Misuse
from escrowmq.log import frames, snapshots
from escrowmq.log.offline import open_offline
from escrowmq.log.report import DamagedLog
from escrowmq.log.segments import (
    CLOSED_NAME,
    HEADER_BYTES,
    SegmentHeader,
    index_name,
    pack_closed,
    segment_base,
    segment_name,
)
from escrowmq.platform.disk import LOCK_NAME, Disk, disk_error, read_file, replace_file
from escrowmq.platform.failpoints import reach
from escrowmq.schemas import STORED, Kind
from escrowmq.wire.values import MAX_SESSION

SESSIONS_PASSED = 1 << 20
"""Producer sessions that the other may have opened after the backup."""
ACT = "restore"
"""What the record of acts says."""


@dataclass(frozen=True, slots=True)
class Restored:
    """A data folder that was made of a backup."""

    manifest: Manifest
    contents: Contents
    shard: int
    epoch: int
    """The number of its next opening is one more."""


def restore(
    backup: Disk,
    target: Disk,
    *,
    as_new_shard: bool = False,
    by: str | None = None,
    why: str | None = None,
    now_us: Callable[[], int] = lambda: time.time_ns() // 1000,
    progress: Callable[[int, int], None] = lambda done, all_: None,
) -> Restored:
    """Restore the backup in one folder into another, which is empty, or holds a restore that was broken off.

    Raises Misuse(BAD_ARGUMENT) for a folder that holds anything, or no whole backup, Corrupt(DAMAGED) for one that is
    not what was copied, Overloaded(DISK_FULL). The target is empty then, as it was; broken off by a kill it holds files
    that no broker opens.
    """
    try:
        manifest = read_manifest(backup)
        _refuse_others(target, manifest)  # before the lock, which makes a file
        target.lock()
        try:
            _refuse_others(target, manifest)
            return _Restoring(backup, target, manifest, as_new_shard, now_us(), progress).run(by, why)
        finally:
            target.close()
    except (OSError, MemoryError) as problem:
        raise disk_error(problem) from problem


class _Restoring:
    def __init__(
        self,
        backup: Disk,
        target: Disk,
        manifest: Manifest,
        as_new_shard: bool,
        now_us: int,
        progress: Callable[[int, int], None],
    ) -> None:
        self._copies = SuffixedDisk(backup, COPY)
        self._target = target
        self._new = SuffixedDisk(target, UNFINISHED)
        self._manifest = manifest
        self._as_new_shard = as_new_shard
        self._shard = manifest.shard
        while as_new_shard and self._shard == manifest.shard:
            self._shard = secrets.randbelow((1 << 32) - 1) + 1
        self._now_us = max(now_us, manifest.time_us)
        self._progress = progress
        self._done = 0

    def run(self, by: str | None, why: str | None) -> Restored:
        """Copy, check, make visible."""
        manifest = self._manifest
        try:
            self._clear()
            for file in manifest.files:
                if file.name != journal.NAME:
                    self._copy(file)
            check_manifest(self._new, manifest)
            if self._as_new_shard:
                self._renumber()
            epoch, sequence, position = self._begin()
            self._record(by, why, epoch)
            replace_file(self._new, CLOSED_NAME, [[pack_closed(self._shard, sequence, position)]])
            found = contents(self._new)
        except BaseException:
            with suppress(OSError):
                self._clear()
            raise
        reach("restore.checked")
        first = segment_name(manifest.first)
        for name in sorted(self._new.list(), key=lambda name: name == first):
            if name == first:
                self._target.sync_folder()
                reach("restore.before_last")
            self._new.reveal(name)
        self._target.sync_folder()
        return Restored(manifest, found, self._shard, epoch)

    def _clear(self) -> None:
        """Remove what a restore made that was broken off."""
        for name in self._target.list():
            if name not in (LOCK_NAME, "lost+found") and name[0] != ".":
                self._target.remove(name)

    def _copy(self, file: CopiedFile) -> None:
        """Copy a file, and compare its digest."""
        digest = hashlib.sha256()
        try:
            source = self._copies.open(file.name)
        except FileNotFoundError:
            raise DamagedLog(file.name, 0, -1, "the file is missing in the backup") from None
        with closing(source), closing(self._new.open(file.name, create=True)) as made:
            at = 0
            while at < file.bytes and (piece := source.read_at(at, min(PIECE_BYTES, file.bytes - at))):
                digest.update(piece)
                made.write_at(at, [piece])
                at += len(piece)
                self._progress(self._done + at, self._manifest.size)
            made.sync()
        self._done += file.bytes
        if at < file.bytes or digest.hexdigest() != file.sha256:
            raise DamagedLog(file.name, 0, -1, "the copy is not what was copied: its size or SHA-256 is another")
        reach("restore.copied")

    def _renumber(self) -> None:
        """Give the log another shard's number: the headers of its segments and snapshots have it, frames do not."""
        for name in self._new.list():
            if segment_base(name) is not None:
                with closing(self._new.open(name)) as file:
                    old = SegmentHeader.unpack(file.read_at(0, HEADER_BYTES), name)
                    fields = (self._shard, old.epoch, old.sequence, old.position, old.created_us, old.salt)
                    file.write_at(0, [SegmentHeader(*fields).pack()])
                    file.sync()
        for snapshot in snapshots.listed(self._new.list()):
            read = snapshots.load(self._new, snapshot, self._manifest.shard)
            replace_file(self._new, str(snapshot), snapshots.pack(self._shard, read))

    def _begin(self) -> tuple[int, int, int]:
        """Append the frames with which a restored log begins; its epoch, and the sequence and position behind them."""
        manifest = self._manifest
        name = max(file.name for file in manifest.files if segment_base(file.name) is not None)
        size = next(file.bytes for file in manifest.files if file.name == name)
        seconds = self._now_us // 1_000_000
        epoch = max(manifest.epoch + 1, seconds)
        log = open_offline(self._new, in_use=False)
        log.save_indexes(self._new)
        session = min(max(fold(log)[0].sessions.next_epoch + SESSIONS_PASSED, seconds), MAX_SESSION - 1)
        rows: list[tuple[Kind, dict[str, Any]]] = [
            (Kind.OPENED, {"shard": self._shard, "version": version("escrowmq")}),
            (
                Kind.SESSION,
                {"epoch": session, "group": f"restored-{session}", "instance": "nobody", "transactional": False},
            ),
            (Kind.FORGOTTEN, {"epoch": session}),
        ]
        sequence, position = manifest.sequence, manifest.position
        with closing(self._new.open(name)) as file:
            salt = SegmentHeader.unpack(file.read_at(0, HEADER_BYTES), name).salt
            for kind, row in rows:
                batch = pa.RecordBatch.from_pylist([row], STORED[kind])
                numbers = {"sequence": sequence, "position": position, "time_us": self._now_us, "epoch": epoch}
                chunks = frames.encode(kind, batch, **numbers, synced=manifest.sequence, salt=salt, lz4=False)
                file.write_at(size, chunks)
                size += sum(map(len, chunks))
                sequence, position = sequence + 1, position + 1
            file.sync()
        return epoch, sequence, position

    def _record(self, by: str | None, why: str | None, epoch: int) -> None:
        """Write the record of operator actions, with this action at its end."""
        manifest = self._manifest
        number, last = manifest.acts, manifest.acts_hash
        old = next((file for file in manifest.files if file.name == journal.NAME), None)
        kept = b""
        what: dict[str, Any] = {
            "shard": manifest.shard,
            "sequence": manifest.sequence,
            "position": manifest.position,
            "time_us": manifest.time_us,
            "source": manifest.source,
            "begun_us": manifest.begun_us,
        }
        if old is not None:
            self._copy(old)
        if self._as_new_shard:
            what |= {"new_shard": self._shard, "acts": manifest.acts, "acts_hash": manifest.acts_hash}
            number, last = 0, origin(self._shard)
            if old is not None:
                self._new.rename(journal.NAME, _read_acts(manifest))
        elif old is not None:
            kept = read_file(self._new, journal.NAME)
        begun = Record(number + 1, self._now_us, act=ACT, by=by, why=why, what=what)
        line, last = begun.sealed(last)
        ended = Record(number + 2, self._now_us, of=number + 1, ended={"epoch": epoch})
        end, last = ended.sealed(last)
        replace_file(self._new, journal.NAME, [[kept, line, end]])
        replace_file(self._new, journal.LAST, [[f"{number + 2} {last}\n".encode()]])


def _refuse_others(target: Disk, manifest: Manifest) -> None:
    """Misuse unless the folder is empty, or holds what a restore of this backup left that was broken off."""
    names = [name for name in target.list() if name not in (LOCK_NAME, "lost+found") and name[0] != "."]
    left = {name for name in names if name.endswith(UNFINISHED)}
    ours = {file.name for file in manifest.files} | {CLOSED_NAME, journal.NAME, journal.LAST}
    ours |= {index_name(file.name) for file in manifest.files} | {_read_acts(manifest)}
    others = [name for name in names if name not in left | ours or not left or segment_name(manifest.first) in names]
    if others:
        raise Misuse(
            Code.BAD_ARGUMENT,
            f"the folder is not empty: it holds {others[0]!r}",
            "restore into an empty folder, or a new one",
        )


def _read_acts(manifest: Manifest) -> str:
    """Return the file of the record of acts of the shard that a new one was made of."""
    return f"acts-of-{manifest.shard:08x}.journal"
