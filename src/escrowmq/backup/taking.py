"""Creates or updates a backup: copies the missing parts of a log's files, checks every frame, writes the manifest last.

Rules:

1. The copy is what was durable when the source listed its files: everything acknowledged before; a prefix of the log.
2. A segment only grows. So copies in the folder, of an earlier or interrupted backup, are checked and kept if their
   last frame is also the source's: after two histories of a shard diverge, no later frame is the same.
3. After retention, a broker restart or an overload, the files are listed again and copying continues.
4. Until the new manifest exists, the previous one and all its files remain valid; its unneeded files are removed later.
5. Damaged data is not a backup. Only on request is damage copied as it is; the manifest then names its places.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

from escrowmq.acts import journal
from escrowmq.backup.manifest import COPY, NAME, CopiedFile, Manifest, SuffixedDisk, find_manifest, write_manifest
from escrowmq.backup.sources import BrokerSource, Progress, Source
from escrowmq.backup.walking import CopiedSegment, check_copy, valid_part
from escrowmq.client.bus import Bus
from escrowmq.errors import Code, Misuse, Overloaded, Rejected, Unknown, error
from escrowmq.log import snapshots
from escrowmq.log.report import DamagedLog
from escrowmq.log.seam import LogFiles, StoredFile
from escrowmq.log.segments import segment_base
from escrowmq.platform.backoff import Backoff
from escrowmq.platform.disk import (
    TEMPORARY,
    Chunk,
    Disk,
    RealDisk,
    disk_errors,
    is_neutral,
    replace_file,
)
from escrowmq.platform.failpoints import reach

LEAST_BYTES, READ_BYTES = 64 << 10, 8 << 20  # bytes per read from the source: the minimum with a rate, and the maximum
STEPS = 25  # with a rate: requests per second, so that each request to the broker is small
SYNC_BYTES = 32 << 20  # bytes written to a file before it is synced: larger syncs would delay other users of the disk
PATIENCE = 60.0  # timeout (s) without any progress, after which the backup fails
MOST_LISTS = 1000  # maximum number of listings before retention is considered faster than the backup


def back_up(
    bus: Bus,
    folder: str | Path,
    *,
    rate: float | None = None,
    damaged_too: bool = False,
    progress: Progress = lambda done, all_: None,
) -> Manifest:
    """Copy the shard of the single broker of ``bus`` into a folder, as :func:`take`. Blocks."""
    links = bus.router.links
    if len(links) > 1:
        raise error(Code.BAD_ARGUMENT, f"these are {len(links)} brokers", "each one is a backup of its own")
    return take(BrokerSource(links[0]), RealDisk(folder), rate=rate, damaged_too=damaged_too, progress=progress)


@disk_errors()
def take(
    source: Source,
    disk: Disk,
    *,
    rate: float | None = None,
    damaged_too: bool = False,
    patience: float = PATIENCE,
    progress: Progress = lambda done, all_: None,
) -> Manifest:
    """Copy the shard of ``source`` into the folder of ``disk``, which may hold an earlier backup, at up to ``rate``
    bytes per second. ``progress`` gets the bytes copied and their total. Raises Misuse(FOLDER_IN_USE, BAD_ARGUMENT) for
    a folder with other content, Corrupt for a damaged source, Overloaded(DISK_FULL), and the errors of the source.
    After an error the folder holds its previous backup, and the copied data: another attempt resumes from there."""
    disk.lock()
    try:
        return _BackupRun(source, disk, rate, damaged_too, patience, progress).run()
    finally:
        disk.close()


class _BackupRun:
    def __init__(
        self, source: Source, disk: Disk, rate: float | None, damaged_too: bool, patience: float, progress: Progress
    ) -> None:
        self._source, self._disk, self._copies = source, disk, SuffixedDisk(disk, COPY)
        self._rate, self._damaged_too, self._patience, self._progress = rate, damaged_too, patience, progress
        self._done: dict[str, tuple[CopiedFile, CopiedSegment | None]] = {}
        self._damaged: dict[str, str] = {}
        self._began = time.monotonic()
        self._fetched = self._begun_us = self._counted = self._total = 0
        self._checked_history = False

    def run(self) -> Manifest:
        """Copy until all files of one listing are there."""
        _refuse_others(self._disk)
        before = find_manifest(self._disk)
        backoff, quiet_since, fetched = Backoff(0.1, 5.0), time.monotonic(), 0
        for _ in range(MOST_LISTS):
            try:
                self._begun_us = time.time_ns() // 1000
                shard, listed = self._source.files()
                if before is not None and before.shard != shard:
                    _refuse_history(f"it holds a backup of shard {before.shard:08x}, and this is shard {shard:08x}")
                return self._copy_all(shard, listed, before)
            except (Unknown, Overloaded, Rejected) as problem:
                purged = problem.code is Code.RANGE_PURGED
                if problem.code is Code.DISK_FULL or (isinstance(problem, Rejected) and not purged):
                    raise
                if self._fetched > fetched:
                    fetched, quiet_since = self._fetched, time.monotonic()
                    backoff.worked()
                if time.monotonic() - quiet_since > self._patience:
                    raise
                if not purged:
                    time.sleep(backoff.failed())
        hint = "give it a higher --rate, or give the topics more retention"
        raise error(Code.RANGE_PURGED, "retention takes segments away faster than they are copied", hint)

    def _copy_all(self, shard: int, listed: LogFiles, before: Manifest | None) -> Manifest:
        _check_names(listed)
        self._check_history(listed)
        self._counted = 0
        self._total = sum(file.size for file in (*listed.snapshots, *listed.segments)) + listed.acts_bytes
        files, walks = list[CopiedFile](), list[CopiedSegment]()
        for file in listed.snapshots:
            if (found := self._copy_snapshot(file, shard)) is not None:
                files.append(found)
            self._count(file.size)
        nexts = [segment_base(file.name) for file in listed.segments[1:]]
        for file, following in zip(listed.segments, [*nexts, listed.sequence], strict=True):
            copied, walk = self._copy_segment(file, following, before, is_last=file is listed.segments[-1])
            files.append(copied)
            if walk is not None:
                walks.append(walk)
            self._count(file.size)
        _check_links(walks, shard)
        if listed.acts_bytes:
            files.append(self._copy_acts(listed))
        reach("backup.copied")
        self._disk.sync_folder()
        last = walks[-1]
        manifest = Manifest(
            shard=shard,
            first=segment_base(listed.segments[0].name) or 0,
            sequence=listed.sequence,
            position=last.end.position,
            time_us=last.end.time_us or last.header.created_us,
            epoch=last.end.epoch,
            checksum=last.checksum,
            acts=listed.acts,
            acts_hash=listed.acts_hash,
            begun_us=self._begun_us,
            made_us=time.time_ns() // 1000,
            source=self._source.address,
            version=version("escrowmq"),
            files=tuple(files),
            damaged=tuple(self._damaged[file.name] for file in files if file.name in self._damaged),
        )
        write_manifest(self._disk, manifest)
        reach("backup.written")
        for name in {*self._copies.list()} - {file.name for file in files}:  # only the previous backup names it
            with suppress(OSError):
                self._copies.remove(name)
        return manifest

    def _count(self, size: int) -> None:
        self._counted += size
        self._progress(self._counted, self._total)

    # Files

    def _copy_segment(
        self, file: StoredFile, following: int | None, before: Manifest | None, *, is_last: bool
    ) -> tuple[CopiedFile, CopiedSegment | None]:
        """Copy the missing part of a segment; return its walk if it was walked."""
        done = self._done.get(file.name)
        if done is not None and done[0].bytes == file.size:
            return done
        if not is_last and before is not None and (kept := self._find_kept(file, before)) is not None:
            for place in before.damaged:
                if place.startswith(file.name):
                    self._damaged[file.name] = place
            return kept, None
        with closing(self._copies.open(file.name, create=True)) as target:
            at = synced = valid_part(self._copies, file.name, file.size)[0]
            if at != target.size():
                target.truncate(at)
            for piece in self._pieces(file.name, at, file.size):
                target.write_at(at, [piece])
                at += len(piece)
                if at - synced >= SYNC_BYTES:
                    target.sync()
                    synced = at
            target.sync()
        walk = check_copy(self._copies, *file, following, passes=self._damaged_too and not is_last)
        if walk.damage is not None:
            self._damaged[file.name] = str(walk.damage)
        copied = CopiedFile(file.name, file.size, walk.sha256)
        self._done[file.name] = copied, walk
        reach("backup.segment")
        return copied, walk

    def _find_kept(self, file: StoredFile, before: Manifest) -> CopiedFile | None:
        known = next((one for one in before.files if (one.name, one.bytes) == file), None)
        with suppress(FileNotFoundError), closing(self._copies.open(file.name)) as copy:
            return known if copy.size() >= file.size else None
        return None

    def _copy_snapshot(self, file: StoredFile, shard: int) -> CopiedFile | None:
        """Copy and verify a snapshot. A damaged one is omitted if the log does not need it."""
        (name,) = snapshots.listed([file.name])
        if file.name in self._done:
            return self._done[file.name][0]
        copied = self._copy_whole(file.name, file.size)
        try:
            snapshots.load(self._copies, name, shard)
        except DamagedLog as damaged:
            if damaged.damage.newer:
                raise
            if name.first < 0:
                self._copies.remove(file.name)
                return None
            if not self._damaged_too:
                raise
            self._damaged[file.name] = str(damaged.damage)
        self._done[file.name] = copied, None
        return copied

    def _copy_acts(self, listed: LogFiles) -> CopiedFile:
        """Copy the record of acts. It only grows: one that does not continue the copy here was edited."""
        with suppress(FileNotFoundError), closing(self._copies.open(journal.NAME)) as copy:
            size = min(copy.size(), listed.acts_bytes)
            begin, source = (hashlib.sha256(copy.read_at(0, size)), hashlib.sha256())
            for piece in self._pieces(journal.NAME, 0, size):
                source.update(piece)
            if source.digest() != begin.digest() or copy.size() > listed.acts_bytes:
                message = f"{journal.NAME} of {self._source.address} does not continue the copy of it in this folder"
                hint = "it was edited: run escrowmq acts verify, or use another folder for the backup"
                raise error(Code.DAMAGED, message, hint)
        return self._copy_whole(journal.NAME, listed.acts_bytes)

    def _copy_whole(self, name: str, size: int) -> CopiedFile:
        """Copy a file from its beginning; it replaces the existing one once durable."""
        digest = hashlib.sha256()

        def parts() -> Iterator[list[Chunk]]:
            for piece in self._pieces(name, 0, size):
                digest.update(piece)
                yield [piece]

        replace_file(self._copies, name, parts())
        return CopiedFile(name, size, digest.hexdigest())

    def _pieces(self, name: str, start: int, end: int) -> Iterator[bytes]:
        """Read the bytes of a source file, limited to the rate."""
        step = READ_BYTES if self._rate is None else int(min(max(self._rate / STEPS, LEAST_BYTES), READ_BYTES))
        while start < end:
            before = start
            for piece in self._source.read(name, start, min(start + step, end)):
                yield piece
                start += len(piece)
                self._fetched += len(piece)
                self._progress(self._counted + start, self._total)
                if self._rate is not None:
                    self._pace(self._rate)
            if start == before:
                raise DamagedLog(name, start, -1, f"the file ends here, and it should have {end} bytes")

    def _pace(self, rate: float) -> None:
        """Sleep to keep within ``rate``. Idle time earns no credit: a broker that was busy is not flooded
        afterwards."""
        early = self._began + self._fetched / rate - time.monotonic()
        if early > 0:
            time.sleep(early)
        else:
            self._began += max(-early - 1 / STEPS, 0.0)

    # Existing copies

    def _check_history(self, listed: LogFiles) -> None:
        """Raise Misuse if the existing copies are not the beginning of the source's log."""
        here = sorted(name for name in self._copies.list() if segment_base(name) is not None)
        if self._checked_history or not here:
            return
        newest, sizes = here[-1], dict(listed.segments)
        end, at, known = valid_part(self._copies, newest, 1 << 62) if newest in sizes else (0, 0, b"")
        if newest > listed.segments[-1].name or end > sizes.get(newest, 0):
            _refuse_history("the source has less than the backup that it holds")
        if known and b"".join(self._source.read(newest, at, at + len(known))) != known:
            _refuse_history("frames that it holds are others in the source")
        self._checked_history = True


def _check_names(listed: LogFiles) -> None:
    """Raise Corrupt unless these are file names of a log: they become file names here."""
    names = [file.name for file in listed.segments]
    wrong = [name for name in names if segment_base(name) is None]
    wrong += [file.name for file in listed.snapshots if not snapshots.listed([file.name])]
    if wrong or not names or names != sorted(set(names)):
        message = f"the source does not list the files of a log: {(wrong or names)!r:.100}"
        raise error(Code.DAMAGED, message, "is that a broker?")


def _check_links(walks: list[CopiedSegment], shard: int) -> None:
    """Raise Corrupt unless the segments follow each other and belong to one log."""
    before: CopiedSegment | None = None
    for walk in walks:
        header = walk.header
        if (header.shard, header.salt) != (shard, walks[0].header.salt):
            raise DamagedLog(walk.name, 0, header.sequence, "a segment of another log")
        end = before.end if before is not None and before.damage is None else None
        follows = end is None or (end.position == header.position and end.epoch <= header.epoch)
        if end is not None and end.sequence == header.sequence and not follows:
            raise DamagedLog(walk.name, 0, header.sequence, "the segment does not follow the one before")
        before = walk


def _refuse_others(disk: Disk) -> None:
    """Raise Misuse if the folder holds anything but a backup."""
    ours = (NAME, NAME + TEMPORARY)
    others = [name for name in disk.list() if name not in ours and not name.endswith(COPY) and not is_neutral(name)]
    if others:
        message = f"the folder holds something else, such as {others[0]!r}"
        raise Misuse(Code.BAD_ARGUMENT, message, "give the backup a folder of its own")


def _refuse_history(message: str) -> NoReturn:
    raise Misuse(Code.BAD_ARGUMENT, f"the folder holds a backup of another history: {message}", "take another folder")
