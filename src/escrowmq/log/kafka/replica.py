"""A node of the log on Kafka: it follows the partition into its mirror, and can take over the log.

Rules:

1. The folder is a copy. Invalid parts are cut off and followed again; an unusable mirror is wiped and started over,
   from the base in Kafka if retention has deleted the beginning. A folder with a log of its own is never touched.
2. Marks (``marks.py``) determine where to resume. Frames already in the mirror are compared, not written again.
3. A mirror that is ahead of the partition at the claim means that Kafka lost acknowledged records: Corrupt(DAMAGED),
   and nothing is changed.
"""

from __future__ import annotations

import os
from collections import deque
from time import monotonic

import pyarrow as pa

from escrowmq.errors import Code, EscrowError, Misuse, error
from escrowmq.log.commit_log import SEED, create_log
from escrowmq.log.kafka.bases import Bases, Stored
from escrowmq.log.kafka.channel import claim, warn_foreign
from escrowmq.log.kafka.fold import Fold, Standing, Taken
from escrowmq.log.kafka.kafka_log import KafkaLog
from escrowmq.log.kafka.marks import Marks, is_mirror
from escrowmq.log.kafka.mirror import Differs, Mirror, UnsyncedDisk
from escrowmq.log.kafka.partition import Partition, Partitions
from escrowmq.log.kafka.records import RecordType
from escrowmq.log.kafka.recovering import cut_acts, recover_mirror, sound_acts, wipe
from escrowmq.log.kafka.rule import Verdict
from escrowmq.log.lookups.parts import Sizes
from escrowmq.log.recovery import Recovered
from escrowmq.log.seam import Frame
from escrowmq.log.segments import SegmentHeader
from escrowmq.log.snapshots import SnapshotName
from escrowmq.platform.clock import Clock, SystemClock
from escrowmq.platform.disk import Disk, disk_errors, is_neutral
from escrowmq.platform.failpoints import reach

BASE_SECONDS = 10.0  # interval at which a follower checks for a newer base, to drop what the leader dropped
BASE_POLL_SECONDS = 0.25
"""Timeout of one such check. Meanwhile nothing is followed and no take-over runs, and the base's partition may be
silent while that of the log is not."""
BASE_FETCH_SECONDS = 2.0  # timeout for each piece of a snapshot found by such a check
CHECK_SECONDS = 4.0  # timeout for Kafka's first responses; after it the opener reports that there was none, and retries
ANSWER_SECONDS = 30.0  # timeout for a response of Kafka, after which the node fails
_COPY_HINT = "copy the log from {} into a new topic: `escrowmq log copy`"


class PartitionReplica:
    """A :class:`escrowmq.log.seam.Replica`: a node at ``url`` that follows the log in ``partitions`` into ``disk``'s
    folder, which it locks. ``seed`` (12 bytes) fixes the shard id and salt if it is the first to claim the log. Raises
    Misuse(FOLDER_IN_USE, NOT_A_DATA_FOLDER, BAD_SETTING), Rejected(UNKNOWN_TOPIC), Denied, Corrupt(DAMAGED,
    NEWER_FORMAT), Unknown(TIMED_OUT, CLOSED), Overloaded(DISK_FULL, OUT_OF_RESOURCES); the folder is released then."""

    @disk_errors()
    def __init__(
        self,
        disk: Disk,
        partitions: Partitions,
        *,
        url: str,
        segment_bytes: int = 256 << 20,
        compression: str = "none",
        clock: Clock | None = None,
        seed: bytes | None = None,
        lookups: Sizes | None = None,
        answer_seconds: float = ANSWER_SECONDS,
    ) -> None:
        self._disk, self._mirrored = disk, UnsyncedDisk(disk)
        self._partitions, self._url, self._clock, self._seed = partitions, url, clock or SystemClock(), seed
        self._segment_bytes, self._lz4, self._sizes = segment_bytes, compression == "lz4", lookups
        self.answer_seconds = answer_seconds
        self._fold = Fold()
        self._resume_point = Standing()  # where a fold can resume before the next record
        # folded records not yet in the mirror, with the state before
        self._pending: deque[tuple[Taken, Standing]] = deque()
        self._followed: list[Frame] = []  # in the mirror, not yet returned to the caller
        self._last_record_at = monotonic()
        self._restarted = self._closed = False
        self._log: Mirror | None = None
        self._opened: tuple[Partition, ...] = ()
        disk.lock()
        try:
            self._begin()
        except BaseException:
            self.close()
            raise

    def _begin(self) -> None:
        if not is_mirror(self._disk) and not all(map(is_neutral, self._disk.list())):
            message = "the folder is no mirror of a log on Kafka, and not empty"
            hint = "name an empty folder; `escrowmq log copy` brings a log that is in a folder to Kafka"
            raise Misuse(Code.NOT_A_DATA_FOLDER, message, hint)
        self._cluster = self._partitions.check(min(self.answer_seconds, CHECK_SECONDS))
        self._partition = self._partitions.log()
        base = self._partitions.base()
        self._opened = (self._partition, base)
        self._bases = Bases(base, self.answer_seconds)
        self._base_checked_at = monotonic()
        found = Marks.load(self._disk, self._partitions.name, self._cluster)
        marks, sound = found or (self._new_marks(), True)
        recovered = recover_mirror(self._mirrored, sound=sound) if found is not None else None
        if recovered is None or not self._resume(marks, recovered):
            self._start_over()
            self._restarted = False

    @property
    def log(self) -> Mirror:
        if self._log is None:
            raise error(Code.CLOSED, "the mirror could not be started over; open the node again")
        return self._log

    @property
    def leader(self) -> str | None:
        standing = self._fold.standing
        return standing.url if standing.epoch and not standing.released else None

    @property
    def leaders_silence(self) -> float:
        return self._fold.standing.silence

    @property
    def replicas(self) -> tuple[str, ...]:
        """The URLs of the nodes known to the leader, itself included."""
        return self._fold.replicas

    @property
    def offset(self) -> int:
        """Offset of the next record to follow; everything before is in the mirror, unless the disk is full."""
        return self._fold.whole.offset

    def silent_for(self) -> float:
        return monotonic() - self._last_record_at if self.leader is not None else float("inf")

    def is_behind(self) -> bool | None:
        try:
            return self._partition.ends(1.0)[1] > self._fold.standing.offset or bool(self._pending)
        except EscrowError as problem:
            if problem.code is not Code.TIMED_OUT:
                raise
            return None

    def is_whole(self) -> bool:
        return self.log.reaches_base()

    def restarted(self) -> bool:
        restarted, self._restarted = self._restarted, False
        return restarted

    # Following

    def follow(self, timeout: float) -> list[Frame]:
        """Return new valid frames once they are in the mirror. After Overloaded(DISK_FULL, OUT_OF_RESOURCES) a later
        call returns them."""
        self._check_open()
        if self._pending:
            self._write_pending()
        if monotonic() - self._base_checked_at > BASE_SECONDS:
            self._retain()
        try:
            found = self._partition.read(self._fold.standing.offset, timeout=timeout)
        except EscrowError as problem:
            if problem.code is not Code.RANGE_PURGED:
                raise
            self._start_over()
            return []
        for offset, raw in found:
            self._on_record(self._fold.take(offset, raw))
        self._write_pending()
        followed, self._followed = self._followed, []
        return followed

    def _on_record(self, taken: Taken) -> None:
        before, self._resume_point = self._resume_point, self._fold.whole
        if taken.verdict is Verdict.VOID:
            if taken.foreign:
                warn_foreign(self._partition.name, taken.offset)
            return
        self._last_record_at = monotonic()
        if taken.verdict is Verdict.CLAIMS:
            self._adopt()
        elif taken.type in (RecordType.FRAMES, RecordType.ACT):
            self._pending.append((taken, before))

    def _write_pending(self) -> None:
        log, size = self.log, 0
        try:
            while self._pending:
                taken, before = self._pending[0]
                if taken.type is RecordType.ACT:
                    log.acts.follow(before.act_bytes, taken.content)
                else:
                    self._followed += log.take(taken.content, taken.frames, before)
                size += len(taken.content)
                self._pending.popleft()
            log.settle()
        except Differs:
            self._start_over()
            return
        log.add_bytes(size, self._fold.whole)

    def _adopt(self) -> None:
        """If the log's claim has another shard and salt than the mirror, which was created before it, start the mirror
        over with these. Raises Corrupt(DAMAGED) if that mirror has frames."""
        standing, log = self._fold.standing, self.log
        if (log.shard, log.salt) == (standing.shard, standing.salt):
            return
        if log.next_sequence:
            raise error(Code.DAMAGED, f"the partition is of shard {standing.shard}, the mirror of {log.shard}")
        self._close_mirror()
        wipe(self._mirrored)
        self._create(SegmentHeader(standing.shard, 1, 0, 0, self._clock.now_us(), standing.salt), None)

    def _retain(self) -> None:
        """Drop from the mirror what the leader dropped: everything that its newest base in Kafka replaces."""
        if self._bases.poll(BASE_POLL_SECONDS):
            return  # more to read: follow the log first
        self._base_checked_at, base, log = monotonic(), self._bases.best, self.log
        if base is None or base.manifest.position <= log.first_position or base.manifest.snapshot > log.next_sequence:
            return
        fetched = None
        if log.newest_snapshot_sequence() < base.manifest.sequence:
            try:
                self._bases.fetch_snapshot(base, self._mirrored, BASE_FETCH_SECONDS)
            except EscrowError as problem:
                if problem.code not in (Code.TIMED_OUT, Code.RANGE_PURGED):
                    raise
                return  # silent, or replaced by a newer base: a later check finds out
            fetched = SnapshotName(base.manifest.snapshot)
        log.follow_base(base.manifest.position, fetched)

    # Opening

    def _resume(self, marks: Marks, recovered: Recovered) -> bool:
        """Resume at the newest mark that matches a recovered mirror; without one, change nothing and return False."""
        last, header = recovered.segments[-1], recovered.segments[0].header
        mark = marks.at(last.next_sequence, sound_acts(self._disk, header.shard))
        if mark is None or (mark.shard and (mark.shard, mark.salt) != (header.shard, header.salt)):
            return False
        cut_acts(self._disk, mark.act_bytes)
        self._open(recovered, marks)
        marks.drop_above(mark.offset)
        self._set_fold(Fold(mark))
        return True

    def _new_marks(self) -> Marks:
        return Marks(self._disk, self._partitions.name, self._cluster)

    def _set_fold(self, fold: Fold) -> None:
        self._fold, self._resume_point = fold, fold.whole

    def _start_over(self) -> None:
        self._close_mirror()
        self._restarted = True
        self._pending.clear()
        self._followed.clear()
        marks = self._new_marks()
        marks.save(durable=True)  # first: this marks the folder as a copy
        reach("mirror.begun_anew")
        wipe(self._mirrored)
        reach("mirror.wiped")
        base = self._bases.newest()
        if base is not None:
            self._bases.fetch(base, self._mirrored)
            reach("mirror.base_fetched")
            self._set_fold(Fold(base.manifest.standing))
            self._create(base.manifest.header, base)
            return
        first, _ = self._partition.ends(self.answer_seconds)
        if first:
            message = f"{self._partition.name} begins at offset {first}, and no base replaces the earlier records"
            raise error(Code.DAMAGED, message, _COPY_HINT.format("a node's folder"))
        self._set_fold(Fold())
        shard, salt = SEED.unpack(self._seed or os.urandom(SEED.size))
        self._create(SegmentHeader(shard or 1, 1, 0, 0, self._clock.now_us(), salt), None)

    def _create(self, header: SegmentHeader, base: Stored | None) -> None:
        recovered = create_log(self._mirrored, header, self._segment_bytes)
        if base is not None:
            recovered.snapshots = [SnapshotName(base.manifest.snapshot, base.manifest.sequence)]
            recovered.epoch, recovered.time_us = header.epoch, header.created_us
        self._open(recovered, self._new_marks()).note(self._fold.whole, keep=True)

    def _open(self, recovered: Recovered, marks: Marks) -> Mirror:
        log = Mirror(self._mirrored, self._segment_bytes, self._lz4, recovered, marks, self._sizes)
        self._log = log
        log.acts.save_last()
        return log

    # Taking over and closing

    def take_over(self, version: str, silence: float = 0.0) -> KafkaLog:
        """Become the leader; others may replace it after ``silence`` seconds without a sign. Fenced(FENCED),
        Corrupt(DAMAGED, LOG_FAILED) and Unknown(TIMED_OUT) close this replica."""
        self._check_open()
        try:
            return self._lead(version, silence)
        except BaseException:
            self.close()
            raise

    def _lead(self, version: str, silence: float) -> KafkaLog:
        before, self._restarted = self._restarted, False
        channel = claim(
            self._partition,
            self._fold,
            url=self._url,
            version=version,
            silence=silence,
            seed=(self.log.shard, self.log.salt),
            on_record=self._on_record,
            timeout=self.answer_seconds,
        )
        try:
            self._write_pending()
            if self._restarted:
                message = "the mirror did not match the partition, and is started over"
                raise error(Code.LOG_FAILED, message, "open the log again")
            self._restarted = before
            mirror, sequence, now_us = self.log, self._fold.standing.sequence, self._clock.now_us()
            if mirror.next_sequence > sequence:
                message = f"the mirror has {mirror.next_sequence} frames, {self._partition.name} only {sequence}"
                raise error(
                    Code.DAMAGED, f"{message}: Kafka lost acknowledged records", _COPY_HINT.format("this folder")
                )
            mirror.on_close = self._release
            log = KafkaLog.lead(mirror, channel, self._partitions, version, now_us, self._followed)
        except BaseException:
            channel.close()
            raise
        self._closed, self._log = True, None
        return log

    def save_snapshot(self, tables: dict[str, pa.Table], sequence: int, position: int, time_us: int) -> None:
        self.log.save_snapshot(tables, sequence, position, time_us)

    def bytes_since_snapshot(self) -> int:
        return self.log.bytes_since_snapshot()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._log is not None and not self._pending:
            self._log.note(self._fold.whole)
        self._close_mirror()
        self._release()

    def _release(self) -> None:
        for partition in self._opened:
            partition.close()
        self._disk.close()

    def _close_mirror(self) -> None:
        log, self._log = self._log, None
        if log is not None:
            log.close()

    def _check_open(self) -> None:
        if self._closed:
            raise error(Code.CLOSED, "the replica is closed")
