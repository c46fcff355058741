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
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from importlib.metadata import version
from typing import NoReturn

import pyarrow as pa

from escrowmq.acts import journal
from escrowmq.backup.manifest import NAME, CopiedFile, Manifest, find_manifest, write_manifest
from escrowmq.backup.sources import PIECE_BYTES, Source
from escrowmq.backup.suffixed import COPY, SuffixedDisk
from escrowmq.errors import Code, Misuse, Overloaded, Rejected, Unknown, error
from escrowmq.log import snapshots
from escrowmq.log.copying.walking import SegmentWalk
from escrowmq.log.report import DamagedLog
from escrowmq.log.seam import LogFiles, StoredFile
from escrowmq.log.segments import segment_base
from escrowmq.platform.backoff import Backoff
from escrowmq.platform.disk import LOCK_NAME, TEMPORARY, Disk, File, disk_error, replace_file
from escrowmq.platform.failpoints import reach

LEAST_BYTES, READ_BYTES = 64 << 10, 8 << 20
"""Bytes per read from the source: the minimum with a rate, and the maximum."""
STEPS = 25
"""With a rate: requests per second, so that each request to the broker is small."""
SYNC_BYTES = 32 << 20
"""Bytes written to a file before it is synced: larger syncs would delay other users of the disk."""
PATIENCE = 60.0
"""Timeout (s) without any progress, after which the backup fails."""
MOST_LISTS = 1000
"""Maximum number of listings before retention is considered faster than the backup."""

Progress = Callable[[int, int], None]


def take(
    source: Source,
    disk: Disk,
    *,
    rate: float | None = None,
    damaged_too: bool = False,
    patience: float = PATIENCE,
    progress: Progress = lambda done, all_: None,
) -> Manifest:
    """Copy the shard of ``source`` into the folder of ``disk``, at up to ``rate`` bytes per second; return its
    manifest. ``progress`` gets the bytes copied and their total. Raises Misuse(FOLDER_IN_USE, BAD_ARGUMENT) for a
    folder with other content, Corrupt for a damaged source, Overloaded(DISK_FULL), and the errors of the source. After
    an error the folder holds its previous backup, if any, and the copied data: another attempt resumes from there."""
    disk.lock()
    try:
        return _BackupRun(source, disk, rate, damaged_too, patience, progress).run()
    except (OSError, MemoryError) as problem:
        raise disk_error(problem) from problem
    finally:
        disk.close()


class _BackupRun:
    def __init__(
        self, source: Source, disk: Disk, rate: float | None, damaged_too: bool, patience: float, progress: Progress
    ) -> None:
        self._source = source
        self._disk = disk
        self._copies = SuffixedDisk(disk, COPY)
        self._rate = rate
        self._damaged_too = damaged_too
        self._patience = patience
        self._progress = progress
        self._done: dict[str, tuple[CopiedFile, SegmentWalk | None]] = {}
        self._damaged: dict[str, str] = {}
        self._began = time.monotonic()
        self._fetched = 0
        self._begun_us = 0
        self._checked_history = False
        self._counted = self._total = 0  # for the progress

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
                if isinstance(problem, Rejected) and problem.code is not Code.RANGE_PURGED:
                    raise
                if isinstance(problem, Overloaded) and problem.code is Code.DISK_FULL:
                    raise
                if self._fetched > fetched:
                    fetched, quiet_since = self._fetched, time.monotonic()
                    backoff.worked()
                if time.monotonic() - quiet_since > self._patience:
                    raise
                if problem.code is not Code.RANGE_PURGED:
                    time.sleep(backoff.failed())
        hint = "give it a higher --rate, or give the topics more retention"
        raise error(Code.RANGE_PURGED, "retention takes segments away faster than they are copied", hint)

    def _copy_all(self, shard: int, listed: LogFiles, before: Manifest | None) -> Manifest:
        _check_names(listed)
        self._check_history(listed)
        self._counted = 0
        self._total = sum(file.size for file in (*listed.snapshots, *listed.segments)) + listed.acts_bytes
        files: list[CopiedFile] = []
        for file in listed.snapshots:
            found = self._copy_snapshot(file, shard)
            if found is not None:
                files.append(found)
            self._count(file.size)
        walks: list[SegmentWalk] = []
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
        end = walks[-1]
        manifest = Manifest(
            shard=shard,
            first=segment_base(listed.segments[0].name) or 0,
            sequence=listed.sequence,
            position=end.end.position,
            time_us=end.end.time_us or (end.header.created_us if end.header is not None else 0),
            epoch=end.end.epoch,
            checksum=end.checksum,
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
        self._remove_others({file.name for file in files})
        return manifest

    def _count(self, size: int) -> None:
        self._counted += size
        self._progress(self._counted, self._total)

    # Files

    def _copy_segment(
        self, file: StoredFile, following: int | None, before: Manifest | None, *, is_last: bool
    ) -> tuple[CopiedFile, SegmentWalk | None]:
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
            walk = _walk_copy(target, file.name, file.size)
            walk.passes = self._damaged_too and not is_last
            if walk.at != target.size():
                target.truncate(walk.at)
            at = synced = walk.at
            for piece in self._pieces(file.name, at, file.size):
                target.write_at(at, [piece])
                at += len(piece)
                walk.feed(piece)
                if at - synced >= SYNC_BYTES:
                    target.sync()
                    synced = at
            walk.finish(following)
            target.sync()
        if walk.damage is not None:
            self._damaged[file.name] = str(walk.damage)
        copied = CopiedFile(file.name, file.size, walk.sha256)
        self._done[file.name] = copied, walk
        reach("backup.segment")
        return copied, walk

    def _find_kept(self, file: StoredFile, before: Manifest) -> CopiedFile | None:
        """Return the entry of the previous backup for a file that is complete."""
        known = next((one for one in before.files if one.name == file.name), None)
        return known if known is not None and known.bytes == file.size and self._has(file) else None

    def _has(self, file: StoredFile) -> bool:
        try:
            with closing(self._copies.open(file.name)) as copy:
                return copy.size() >= file.size
        except FileNotFoundError:
            return False

    def _copy_snapshot(self, file: StoredFile, shard: int) -> CopiedFile | None:
        """Copy and verify a snapshot. A damaged one is omitted if the log does not need it."""
        (name,) = snapshots.listed([file.name])
        done = self._done.get(file.name)
        if done is not None:
            return done[0]
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
            begin = hashlib.sha256(copy.read_at(0, size)).digest()
            source = hashlib.sha256()
            for piece in self._pieces(journal.NAME, 0, size):
                source.update(piece)
            if source.digest() != begin or copy.size() > listed.acts_bytes:
                message = f"{journal.NAME} of {self._source.address} does not continue the copy of it in this folder"
                hint = "it was edited: run escrowmq acts verify, or use another folder for the backup"
                raise error(Code.DAMAGED, message, hint)
        return self._copy_whole(journal.NAME, listed.acts_bytes)

    def _copy_whole(self, name: str, size: int) -> CopiedFile:
        """Copy a file from its beginning; it replaces the existing one once durable."""
        digest = hashlib.sha256()

        def parts() -> Iterator[list[bytes | memoryview | pa.Buffer]]:
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
        """Sleep to keep within ``rate``.
        Idle time earns no credit, so a broker that was busy is not flooded afterwards."""
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
        if newest > listed.segments[-1].name:
            _refuse_history("the source has less than the backup that it holds")
        if newest in sizes:
            with closing(self._copies.open(newest)) as copy:
                walk = _walk_copy(copy, newest, copy.size())
            at, known = walk.last or (0, walk.header.pack() if walk.header is not None else b"")
            if walk.at > sizes[newest]:
                _refuse_history("the source has less than the backup that it holds")
            if known and b"".join(self._source.read(newest, at, at + len(known))) != known:
                _refuse_history("frames that it holds are others in the source")
        self._checked_history = True

    def _remove_others(self, wanted: set[str]) -> None:
        """Remove files that only the previous backup names."""
        for name in self._copies.list():
            if name not in wanted:
                with suppress(OSError):
                    self._copies.remove(name)


def _walk_copy(file: File, name: str, size: int) -> SegmentWalk:
    """Walk the valid part of the existing copy, up to ``size`` bytes of a segment."""
    sequence = segment_base(name)
    assert sequence is not None
    here = min(file.size(), size)
    while True:
        walk, at = SegmentWalk(name, sequence, size), 0
        try:
            while at < here:
                piece = file.read_at(at, min(PIECE_BYTES, here - at))
                walk.feed(piece)
                at += len(piece)
        except DamagedLog as damaged:
            if damaged.damage.newer:
                raise
            here = damaged.damage.offset
            continue
        walk.drop_rest()
        return walk


def _check_names(listed: LogFiles) -> None:
    """Raise Corrupt unless these are file names of a log: they become file names here."""
    names = [file.name for file in listed.segments]
    wrong = [name for name in names if segment_base(name) is None]
    wrong += [file.name for file in listed.snapshots if not snapshots.listed([file.name])]
    if wrong or not names or names != sorted(set(names)):
        raise error(
            Code.DAMAGED, f"the source does not list the files of a log: {(wrong or names)!r:.100}", "is that a broker?"
        )


def _check_links(walks: list[SegmentWalk], shard: int) -> None:
    """Raise Corrupt unless the segments follow each other and belong to one log."""
    salt = None
    for walk in walks:
        assert walk.header is not None
        if walk.header.shard != shard or walk.header.salt != (walk.header.salt if salt is None else salt):
            raise DamagedLog(walk.name, 0, walk.header.sequence, "a segment of another log")
        salt = walk.header.salt
    for one, other in itertools.pairwise(walks):
        assert other.header is not None
        follows = one.damage is None and one.end.sequence == other.header.sequence
        if follows and (one.end.position != other.header.position or one.end.epoch > other.header.epoch):
            raise DamagedLog(other.name, 0, other.header.sequence, "the segment does not follow the one before")


def _refuse_others(disk: Disk) -> None:
    """Raise Misuse if the folder holds anything but a backup."""
    known = {NAME, NAME + TEMPORARY, LOCK_NAME, "lost+found"}
    others = [name for name in disk.list() if name not in known and not name.endswith(COPY) and name[0] != "."]
    if others:
        raise Misuse(
            Code.BAD_ARGUMENT,
            f"the folder holds something else, such as {others[0]!r}",
            "give the backup a folder of its own",
        )


def _refuse_history(message: str) -> NoReturn:
    raise Misuse(Code.BAD_ARGUMENT, f"the folder holds a backup of another history: {message}", "take another folder")
