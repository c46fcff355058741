"""Makes a data folder from a backup. Nothing is visible before everything is copied and checked; the first segment of
the log gets its name last, and until then no broker opens the folder.

A restored shard must not be mistaken for the original that continued. So it begins with three frames of its own:

- OPENED, with an epoch that the original cannot have reached: the time of the restore in seconds. So no frame of it is
  a frame of the original.
- SESSION and FORGOTTEN of an unused session whose number is equally far ahead: sessions opened after the backup, and
  their transaction ids, are unknown here and never reused.

A new shard also gets its own number, so that it can run beside the original, and a new record of acts; the old one is
kept beside it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import pyarrow as pa

from escrowmq.acts import journal
from escrowmq.acts.chain import Record, origin
from escrowmq.backup.manifest import COPY, UNFINISHED, CopiedFile, Manifest, SuffixedDisk, read_manifest
from escrowmq.backup.sources import Progress
from escrowmq.backup.verifying import Contents, check_manifest, contents, read_copy
from escrowmq.broker.writer.recovery import fold
from escrowmq.errors import Code, Misuse
from escrowmq.log import frames, segments, snapshots
from escrowmq.log.offline import open_offline
from escrowmq.log.segments import SegmentHeader
from escrowmq.platform.disk import Disk, disk_errors, is_neutral, read_file, replace_file
from escrowmq.platform.failpoints import reach
from escrowmq.schemas import STORED, Kind
from escrowmq.wire.values import MAX_SESSION

SESSIONS_PASSED = 1 << 20  # producer sessions that the original may have opened after the backup
ACT = "restore"  # name of the action in the record of acts


@dataclass(frozen=True, slots=True)
class Restored:
    """A data folder made from a backup."""

    manifest: Manifest
    contents: Contents
    shard: int
    epoch: int  # the next opening has this number plus one


@disk_errors()
def restore(
    backup: Disk,
    target: Disk,
    *,
    as_new_shard: bool = False,
    by: str | None = None,
    why: str | None = None,
    now_us: Callable[[], int] = lambda: time.time_ns() // 1000,
    progress: Progress = lambda done, all_: None,
) -> Restored:
    """Restore the backup in one folder into another, which is empty, or holds an interrupted restore. Raises
    Misuse(BAD_ARGUMENT) for a target with other content or an incomplete backup, Corrupt(DAMAGED) for a changed one,
    Overloaded(DISK_FULL). The target is empty then, as before; after a kill it holds files that no broker opens."""
    manifest = read_manifest(backup)
    _refuse_others(target, manifest)  # before the lock, which creates a file
    target.lock()
    try:
        _refuse_others(target, manifest)
        return _RestoreRun(backup, target, manifest, as_new_shard, now_us(), progress).run(by, why)
    finally:
        target.close()


class _RestoreRun:
    def __init__(
        self, backup: Disk, target: Disk, manifest: Manifest, as_new_shard: bool, now_us: int, progress: Progress
    ) -> None:
        self._copies = SuffixedDisk(backup, COPY)
        self._target, self._new = target, SuffixedDisk(target, UNFINISHED)
        self._manifest, self._as_new_shard, self._shard = manifest, as_new_shard, manifest.shard
        while as_new_shard and self._shard == manifest.shard:
            self._shard = secrets.randbelow((1 << 32) - 1) + 1
        self._now_us = max(now_us, manifest.time_us)
        self._progress, self._done = progress, 0

    def run(self, by: str | None, why: str | None) -> Restored:
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
            self._write_acts(by, why, epoch)
            replace_file(self._new, segments.CLOSED_NAME, [[segments.pack_closed(self._shard, sequence, position)]])
            found = contents(self._new)
        except BaseException:
            with suppress(OSError):
                self._clear()
            raise
        reach("restore.checked")
        first = segments.segment_name(manifest.first)
        for name in sorted(self._new.list(), key=lambda name: name == first):
            if name == first:
                self._target.sync_folder()
                reach("restore.before_last")
            self._new.reveal(name)
        self._target.sync_folder()
        return Restored(manifest, found, self._shard, epoch)

    def _clear(self) -> None:
        for name in self._target.list():
            if not is_neutral(name):
                self._target.remove(name)

    def _copy(self, file: CopiedFile) -> None:
        with closing(self._new.open(file.name, create=True)) as made:
            at = 0
            for piece in read_copy(self._copies, file):
                made.write_at(at, [piece])
                at += len(piece)
                self._progress(self._done + at, self._manifest.size)
            made.sync()
        self._done += file.bytes
        reach("restore.copied")

    def _renumber(self) -> None:
        """Change the shard's number: it is in the headers of segments and snapshots, not in frames."""
        for name in self._new.list():
            if segments.segment_base(name) is not None:
                with closing(self._new.open(name)) as file:
                    old = SegmentHeader.unpack(file.read_at(0, segments.HEADER_BYTES), name)
                    file.write_at(0, [replace(old, shard=self._shard).pack()])
                    file.sync()
        for snapshot in snapshots.listed(self._new.list()):
            read = snapshots.load(self._new, snapshot, self._manifest.shard)
            replace_file(self._new, str(snapshot), snapshots.pack(self._shard, read))

    def _begin(self) -> tuple[int, int, int]:
        """Append the first frames of a restored log; return its epoch, and the sequence and position after them."""
        manifest = self._manifest
        stored = [(file.name, file.bytes) for file in manifest.files]
        name, size = max(file for file in stored if segments.segment_base(file[0]) is not None)
        seconds = self._now_us // 1_000_000
        epoch = max(manifest.epoch + 1, seconds)
        log = open_offline(self._new, in_use=False)
        log.save_indexes(self._new)
        session = min(max(fold(log).ledger.sessions.next_epoch + SESSIONS_PASSED, seconds), MAX_SESSION - 1)
        unused = {"epoch": session, "group": f"restored-{session}", "instance": "nobody", "transactional": False}
        rows: list[tuple[Kind, dict[str, Any]]] = [
            (Kind.OPENED, {"shard": self._shard, "version": version("escrowmq")}),
            (Kind.SESSION, unused),
            (Kind.FORGOTTEN, {"epoch": session}),
        ]
        sequence, position = manifest.sequence, manifest.position
        with closing(self._new.open(name)) as file:
            salt = SegmentHeader.unpack(file.read_at(0, segments.HEADER_BYTES), name).salt
            for kind, row in rows:
                batch = pa.RecordBatch.from_pylist([row], STORED[kind])
                numbers = {"sequence": sequence, "position": position, "time_us": self._now_us, "epoch": epoch}
                chunks = frames.encode(kind, batch, **numbers, synced=manifest.sequence, salt=salt, lz4=False)
                file.write_at(size, chunks)
                size += sum(map(len, chunks))
                sequence, position = sequence + 1, position + 1
            file.sync()
        return epoch, sequence, position

    def _write_acts(self, by: str | None, why: str | None, epoch: int) -> None:
        manifest = self._manifest
        number, last = manifest.acts, manifest.acts_hash
        old = next((file for file in manifest.files if file.name == journal.NAME), None)
        kept = b""
        fields = ("shard", "sequence", "position", "time_us", "source", "begun_us")
        details = {name: getattr(manifest, name) for name in fields}
        if old is not None:
            self._copy(old)
        if self._as_new_shard:
            details |= {"new_shard": self._shard, "acts": manifest.acts, "acts_hash": manifest.acts_hash}
            number, last = 0, origin(self._shard)
            if old is not None:
                self._new.rename(journal.NAME, _old_acts_name(manifest))
        elif old is not None:
            kept = read_file(self._new, journal.NAME)
        begun = Record(number + 1, self._now_us, act=ACT, by=by, why=why, what=details)
        line, last = begun.sealed(last)
        ended = Record(number + 2, self._now_us, of=number + 1, ended={"epoch": epoch})
        end, last = ended.sealed(last)
        replace_file(self._new, journal.NAME, [[kept, line, end]])
        replace_file(self._new, journal.LAST, [[f"{number + 2} {last}\n".encode()]])


def _refuse_others(target: Disk, manifest: Manifest) -> None:
    """Raise Misuse unless the folder is empty, or holds an interrupted restore of this backup."""
    names = [name for name in target.list() if not is_neutral(name)]
    left = {name for name in names if name.endswith(UNFINISHED)}
    ours = {file.name for file in manifest.files} | {segments.CLOSED_NAME, journal.NAME, journal.LAST}
    ours |= {segments.index_name(file.name) for file in manifest.files} | {_old_acts_name(manifest)}
    first = segments.segment_name(manifest.first)
    others = [name for name in names if name not in left | ours or not left or first in names]
    if others:
        message = f"the folder is not empty: it holds {others[0]!r}"
        raise Misuse(Code.BAD_ARGUMENT, message, "restore into an empty folder, or a new one")


def _old_acts_name(manifest: Manifest) -> str:
    return f"acts-of-{manifest.shard:08x}.journal"
