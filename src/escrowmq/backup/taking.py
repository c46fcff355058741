"""Makes a backup, or brings one up to date: copies what is missing of a log's files, checks every frame, writes the
manifest last.

Rules:

1. What is copied is what was durable when the source listed its files: everything acknowledged before, and a prefix of
   the log.
2. A segment only grows. So what lies in the folder already, from a backup before or from one that was broken off, is
   checked and kept, if its last frame is the source's, too: two histories of a shard part for ever, and no frame behind
   the parting is the same.
3. Retention, a restart of the broker, an overload: the files are listed anew, and copying continues.
4. Until the new manifest is there, the one before holds, with all its files; those that it names alone are removed
   afterwards.
5. What does not check is no backup. Only where the caller says so, damage is copied as it is, and the manifest names
   its places.
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
"""Bytes that are asked of the source at a time: the fewest with a rate, and the most."""
STEPS = 25
"""With a rate: how many such questions a second, so that the broker is asked for little at a time."""
SYNC_BYTES = 32 << 20
"""Written to a file before it is synced: more at once would hold up whoever else syncs on that disk."""
PATIENCE = 60.0
"""Seconds without any progress after which a broker that does not answer is given up."""
MOST_LISTS = 1000
"""How often the files are listed anew before retention counts as faster than the backup."""

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
    """Copy the shard of ``source`` into the folder of ``disk``, at up to ``rate`` bytes per second; what it holds then.

    ``progress`` is called with the bytes copied and the bytes in all. Raises Misuse(FOLDER_IN_USE, BAD_ARGUMENT) for a
    folder that holds something else, Corrupt for a source that is damaged, Overloaded(DISK_FULL), and what the source
    raises. The folder then holds the backup that it held before, if there was one, and what was copied: another try
    continues from there.
    """
    disk.lock()
    try:
        return _Taking(source, disk, rate, damaged_too, patience, progress).run()
    except (OSError, MemoryError) as problem:
        raise disk_error(problem) from problem
    finally:
        disk.close()


class _Taking:
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
        """Until all that one list names is there."""
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
            found = self._snapshot(file, shard)
            if found is not None:
                files.append(found)
            self._count(file.size)
        walks: list[SegmentWalk] = []
        nexts = [segment_base(file.name) for file in listed.segments[1:]]
        for file, following in zip(listed.segments, [*nexts, listed.sequence], strict=True):
            copied, walk = self._segment(file, following, before, is_last=file is listed.segments[-1])
            files.append(copied)
            if walk is not None:
                walks.append(walk)
            self._count(file.size)
        _check_links(walks, shard)
        if listed.acts_bytes:
            files.append(self._acts(listed))
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

    def _segment(
        self, file: StoredFile, following: int | None, before: Manifest | None, *, is_last: bool
    ) -> tuple[CopiedFile, SegmentWalk | None]:
        """Copy what is missing of a segment; its walk, if it was walked."""
        done = self._done.get(file.name)
        if done is not None and done[0].bytes == file.size:
            return done
        if not is_last and before is not None and (kept := self._find_kept(file, before)) is not None:
            for place in before.damaged:
                if place.startswith(file.name):
                    self._damaged[file.name] = place
            return kept, None
        with closing(self._copies.open(file.name, create=True)) as target:
            walk = _walk(target, file.name, file.size)
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
        """Return the entry of the previous backup for a file that it holds completely."""
        known = next((one for one in before.files if one.name == file.name), None)
        return known if known is not None and known.bytes == file.size and self._has(file) else None

    def _has(self, file: StoredFile) -> bool:
        try:
            with closing(self._copies.open(file.name)) as copy:
                return copy.size() >= file.size
        except FileNotFoundError:
            return False

    def _snapshot(self, file: StoredFile, shard: int) -> CopiedFile | None:
        """Copy a snapshot, and read it. One that does not check is left out if the log can do without it."""
        (name,) = snapshots.listed([file.name])
        done = self._done.get(file.name)
        if done is not None:
            return done[0]
        copied = self._whole(file.name, file.size)
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

    def _acts(self, listed: LogFiles) -> CopiedFile:
        """Copy the record of acts. It only grows: one that does not continue from the copy that is here was edited."""
        with suppress(FileNotFoundError), closing(self._copies.open(journal.NAME)) as copy:
            size = min(copy.size(), listed.acts_bytes)
            begin = hashlib.sha256(copy.read_at(0, size)).digest()
            source = hashlib.sha256()
            for piece in self._pieces(journal.NAME, 0, size):
                source.update(piece)
            if source.digest() != begin or copy.size() > listed.acts_bytes:
                what = f"{journal.NAME} of {self._source.address} does not go on from the copy of it in this folder"
                hint = "somebody edited it: escrowmq acts verify; another folder takes the backup"
                raise error(Code.DAMAGED, what, hint)
        return self._whole(journal.NAME, listed.acts_bytes)

    def _whole(self, name: str, size: int) -> CopiedFile:
        """Copy a file whose beginning is not here yet, or is short; it takes the place of the one that is here when it
        is durable."""
        digest = hashlib.sha256()

        def parts() -> Iterator[list[bytes | memoryview | pa.Buffer]]:
            for piece in self._pieces(name, 0, size):
                digest.update(piece)
                yield [piece]

        replace_file(self._copies, name, parts())
        return CopiedFile(name, size, digest.hexdigest())

    def _pieces(self, name: str, start: int, end: int) -> Iterator[bytes]:
        """Yield the bytes of a file of the source, no faster than wanted."""
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
        """Wait until no more was read than ``rate`` allows. Time in which nothing came is not made up for: a broker
        that was busy is not asked for everything at once when it is less so."""
        early = self._began + self._fetched / rate - time.monotonic()
        if early > 0:
            time.sleep(early)
        else:
            self._began += max(-early - 1 / STEPS, 0.0)

    # What is here already

    def _check_history(self, listed: LogFiles) -> None:
        """Misuse if what is here is not the beginning of what the source has."""
        here = sorted(name for name in self._copies.list() if segment_base(name) is not None)
        if self._checked_history or not here:
            return
        newest, sizes = here[-1], dict(listed.segments)
        if newest > listed.segments[-1].name:
            _refuse_history("the source has less than the backup that it holds")
        if newest in sizes:
            with closing(self._copies.open(newest)) as copy:
                walk = _walk(copy, newest, copy.size())
            at, known = walk.last or (0, walk.header.pack() if walk.header is not None else b"")
            if walk.at > sizes[newest]:
                _refuse_history("the source has less than the backup that it holds")
            if known and b"".join(self._source.read(newest, at, at + len(known))) != known:
                _refuse_history("frames that it holds are others in the source")
        self._checked_history = True

    def _remove_others(self, wanted: set[str]) -> None:
        """Remove what only the backup before names."""
        for name in self._copies.list():
            if name not in wanted:
                with suppress(OSError):
                    self._copies.remove(name)


def _walk(file: File, name: str, size: int) -> SegmentWalk:
    """Return a walk over what is here of the first ``size`` bytes of a segment, as far as it checks."""
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
    """Corrupt unless these are the names of a log's files: they become names here."""
    names = [file.name for file in listed.segments]
    wrong = [name for name in names if segment_base(name) is None]
    wrong += [file.name for file in listed.snapshots if not snapshots.listed([file.name])]
    if wrong or not names or names != sorted(set(names)):
        raise error(
            Code.DAMAGED, f"the source does not list the files of a log: {(wrong or names)!r:.100}", "is that a broker?"
        )


def _check_links(walks: list[SegmentWalk], shard: int) -> None:
    """Corrupt unless the segments follow each other and are of one log."""
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
    """Misuse if there is anything but a backup."""
    known = {NAME, NAME + TEMPORARY, LOCK_NAME, "lost+found"}
    others = [name for name in disk.list() if name not in known and not name.endswith(COPY) and name[0] != "."]
    if others:
        raise Misuse(
            Code.BAD_ARGUMENT,
            f"the folder holds something else, such as {others[0]!r}",
            "give the backup a folder of its own",
        )


def _refuse_history(what: str) -> NoReturn:
    raise Misuse(Code.BAD_ARGUMENT, f"the folder holds a backup of another history: {what}", "take another folder")
