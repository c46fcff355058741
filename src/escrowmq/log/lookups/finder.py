"""Look-ups by message id or key over runs and newer frames, and the thread that writes and merges runs.

Rules:

1. Only durable frames are processed, beside the writer: a frame just written is passed on in memory as long as these
   are few; otherwise it is read from the log.
2. Frames without a run are searched themselves, so every result is complete: the *tail* in memory; a *gap* (files
   missing, damaged or not writable) frame by frame, until the thread has written runs for it.
3. Runs of about equal size are merged, ``fanout`` at a time: their number, and how often a message is rewritten, grow
   with the logarithm of the messages.
4. An invalid run is deleted and rebuilt. No failure here is a failure of the log: it is logged and retried later.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from heapq import merge as in_order

import numpy as np

from escrowmq.errors import Code, EscrowError
from escrowmq.log.lookups.entries import MOST_POSITIONS, Query
from escrowmq.log.lookups.parts import Gap, Part, Sizes, StoredFrames, Tail, choose_merge, extent_of, order_parts
from escrowmq.log.lookups.runs import Extent, Run, UnsoundRun, is_run, open_run
from escrowmq.log.lookups.writing import merge, write_run
from escrowmq.log.report import DamagedLog
from escrowmq.log.seam import Frame, Match
from escrowmq.platform.disk import Disk

PAUSE_SECONDS = 10.0  # retry interval (s) after a failure
FROZEN = 4  # maximum number of full tails waiting to be written; with more, the oldest becomes a gap

logger = logging.getLogger(__name__)


class _Stopped(Exception):
    """The log is closing: abort the current work."""


class Lookups:
    """The look-ups of one log. Without ``writes``, existing files are used and not changed."""

    def __init__(
        self, disk: Disk, frames: StoredFrames, shard: int, *, writes: bool, sizes: Sizes | None = None
    ) -> None:
        self._disk, self._frames, self._shard, self._writes = disk, frames, shard, writes
        self._sizes = sizes or Sizes()
        self._tail_lock = threading.Lock()  # held to extend or search the tail
        self._changed = threading.Condition()  # guards the fields below
        self._tail = Tail(0, 0)
        self._parts: tuple[Part, ...] = ()  # in order, with gaps, up to the tail
        self._recent: deque[Frame] = deque()
        self._recent_rows = self._recent_bytes = 0
        self._durable = 0
        self._paused = self._stopping = self._busy = False
        self._thread: threading.Thread | None = None

    # Opening and closing

    def begin(self, end: int) -> None:
        """Load the files that match the log, whose frames are durable below sequence ``end``; the last frames form the
        tail. Starts the thread if there is work."""
        runs = self._load_runs(end)
        first, _ = self._frames.stored_from()
        done = runs[-1].extent.next_sequence if runs else first
        start = self._tail_start(max(done, first), end)
        self._tail = Tail(start, self._frames.place(start)[0])
        self._durable = end
        self._set_parts(runs)
        frames = len(self._frames.message_frames(start, end))
        rows = self._frames.place(end)[0] - self._tail.first_position
        if frames > self._sizes.late_frames or rows > self._sizes.late_rows:  # else the first look-up does it
            with suppress(EscrowError, OSError, MemoryError), self._tail_lock:  # a failed read is retried later
                self._grow(end)
        if self._has_work():
            self._wake()

    def _tail_start(self, done: int, end: int) -> int:
        """Return the sequence at which the tail begins, limited in frames and rows, if runs cover the frames below
        ``done`` and the log ends before ``end``."""
        sequences = self._frames.message_frames(done, end)[-self._sizes.run_frames :].tolist()
        lowest = self._frames.place(end)[0] - self._sizes.run_rows
        first = bisect_left(sequences, lowest, key=lambda sequence: self._frames.place(sequence)[0])
        if not first and len(sequences) < self._sizes.run_frames:
            return done
        return sequences[first] if first < len(sequences) else end

    def _load_runs(self, end: int) -> list[Run]:
        """Open the valid runs that fit a log which ends before ``end`` and do not overlap; delete the others."""
        found, refused = list[Run](), list[str]()
        first, _ = self._frames.stored_from()
        for name in self._disk.list():
            if not is_run(name):
                continue
            try:
                run = open_run(self._disk, name, self._shard)
                at = run.extent
                if not first < at.next_sequence <= end:
                    raise DamagedLog(name, 0, -1, "frames that the log does not have")
                if self._frames.place(at.next_sequence) != (at.next_position, at.last_us):
                    raise DamagedLog(name, 0, -1, "a look-up file of other frames")
                found.append(run)
            except (EscrowError, OSError, MemoryError) as problem:
                logger.info("a look-up file is rebuilt: %s", problem)
                refused.append(name)
        found.sort(key=lambda run: (run.extent.first_sequence, -run.extent.next_sequence))
        runs: list[Run] = []
        for run in found:
            if runs and run.extent.first_sequence < runs[-1].extent.next_sequence:
                refused.append(run.name)  # merged into the other before a crash prevented its removal
            else:
                runs.append(run)
        for name in refused:
            self._remove(name)
        return runs

    def close(self, *, clean: bool) -> None:
        """Stop the thread. ``clean``: write the tail if rebuilding it would take long."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if clean and self._writes:
            with suppress(Exception), self._tail_lock:
                self._grow(self._durable)
                if self._tail.frames >= self._sizes.wake_frames or self._tail.count >= self._sizes.wake_rows:
                    self._write(self._tail)

    # Events of the log

    def on_durable(self, frames: list[Frame], size: int, end: int) -> None:
        """Note that these message frames became durable (``size`` bytes, with frames of other kinds), and so did all
        frames below sequence ``end``."""
        with self._changed:
            self._durable = end
            if not frames:
                return
            if self._recent_bytes + size > self._sizes.recent_bytes:
                self._recent.clear()  # they will be read from the log
                self._recent_bytes = 0
            if size <= self._sizes.recent_bytes:
                self._recent.extend(frames)
                self._recent_bytes += size
            self._recent_rows += sum(frame.count for frame in frames)
            many = self._recent_rows >= self._sizes.wake_rows or len(self._recent) >= self._sizes.wake_frames
            if many or 4 * self._recent_bytes >= self._sizes.recent_bytes:
                self._wake()

    def on_dropped(self) -> None:
        """Remove runs that cover only segments that retention dropped."""
        first, _ = self._frames.stored_from()
        with self._changed:
            gone = [part for part in self._parts if extent_of(part)[1] <= first]
            self._set_parts([part for part in self._parts if part not in gone])
            if self._has_work():
                self._wake()
        for part in gone:
            if isinstance(part, Run):
                self._remove(part.name)

    # Finding

    def find(self, query: Query, end: int, position: int) -> Iterator[Match]:
        """Find rows below sequence ``end`` and log ``position``, newest first, frame by frame; also unreadable frames,
        of which any row may match."""
        below = position
        while True:
            try:
                for match in self._matches(query, end, below):
                    below = int(match.positions[-1])
                    yield match
                return
            except UnsoundRun as problem:
                self._discard(problem.run)
            except EscrowError as problem:
                if problem.code is not Code.RANGE_PURGED:
                    raise
                return  # removed by retention meanwhile, like everything older

    def _matches(self, query: Query, end: int, below: int) -> Iterator[Match]:
        """Find as :meth:`find`, over the current parts."""
        with self._tail_lock:
            self._grow(end)
            with self._changed:
                parts: list[Part] = [self._tail, *reversed(self._parts)]
            of_tail = self._tail.positions(query)
            to_tail = Tail(self._tail.first_sequence, self._tail.first_position)
            to_tail.next_sequence, to_tail.holes = self._tail.next_sequence, list(self._tail.holes)
        parts[0] = to_tail
        damaged = self._frames.damaged_frames()
        sequence, start, rows = -1, below, list[int]()
        whole = False
        for part in parts:
            positions = of_tail if part is to_tail else iter(()) if isinstance(part, Gap) else part.positions(query)
            for position, whole_frame in self._candidates(positions, part, damaged):
                if position >= below and not whole_frame:
                    continue
                if position < start or sequence < 0:
                    if sequence >= 0 and (match := self._match_frame(query, sequence, None if whole else rows, below)):
                        yield match
                    sequence, start = self._frames.frame_at(position)
                    rows, whole = [], False
                rows.append(position)
                whole |= whole_frame
        if sequence >= 0 and (match := self._match_frame(query, sequence, None if whole else rows, below)):
            yield match

    def _candidates(self, positions: Iterator[int], part: Part, damaged: list[int]) -> Iterator[tuple[int, bool]]:
        """Return the positions of a part's entries, and the last row of each frame without entries, which must be
        searched whole: the frames of a gap and unreadable ones. Newest first."""
        first, end = extent_of(part)
        if isinstance(part, Gap):
            sequences = self._frames.message_frames(first, end).tolist()
        else:
            unindexed = {*damaged[bisect_left(damaged, first) : bisect_left(damaged, end)], *part.holes}
            sequences = [one for one in sorted(unindexed) if len(self._frames.message_frames(one, one + 1))]
        found = ((position, False) for position in positions)
        ends = ((self._frames.place(sequence + 1)[0] - 1, True) for sequence in reversed(sequences))
        return in_order(found, ends, reverse=True)

    def _match_frame(self, query: Query, sequence: int, rows: list[int] | None, below: int) -> Match | None:
        """Return which of the rows (positions, newest first; None: all) of a frame match the query and lie below
        position ``below``; None if none does."""
        lost = False
        if (columns := self._frames.columns(sequence)) is not None:
            batch, start = columns.batch, columns.position
        else:
            frame = self._frames.frame(sequence)
            batch, start = frame.batch, frame.position
            lost = frame.damage is not None and not frame.damage.bodies_only
        among = None if rows is None else np.array(rows[::-1], np.int64) - start
        found = np.arange(batch.num_rows) if lost else query.rows(batch, among)
        positions = found[::-1] + start
        positions = positions[positions < below]
        return Match(positions, lost) if len(positions) else None

    # Adding frames

    def _grow(self, end: int) -> None:
        """Add the durable frames below ``end`` to the tail, from memory where possible. Requires ``_tail_lock``."""
        with self._changed:
            recent = [frame for frame in self._recent if self._tail.next_sequence <= frame.sequence < end]
            self._recent = deque(frame for frame in self._recent if frame.sequence >= end)
            self._recent_rows = sum(frame.count for frame in self._recent)
            if not self._recent:
                self._recent_bytes = 0
        if end <= self._tail.next_sequence:
            return
        from_log = self._frames.message_frames(self._tail.next_sequence, recent[0].sequence if recent else end)
        step = self._sizes.wake_frames
        for start in range(0, len(from_log), step):
            self._add([self._frames.frame(int(sequence), keep=False) for sequence in from_log[start : start + step]])
        for start in range(0, len(recent), step):
            self._add(recent[start : start + step])
        self._tail.next_sequence = end

    def _add(self, frames: Sequence[Frame]) -> None:
        last = frames[-1]
        if last.position + last.count - self._tail.first_position > MOST_POSITIONS:
            self._cut(frames[0].sequence)
        self._tail.add(frames)
        self._tail.next_sequence = last.sequence + 1
        if self._tail.count >= self._sizes.run_rows or self._tail.frames >= self._sizes.run_frames:
            self._cut(last.sequence + 1)

    def _cut(self, sequence: int) -> None:
        """Freeze the full tail and begin a new one with the frame ``sequence``."""
        full, self._tail = self._tail, Tail(sequence, self._frames.place(sequence)[0])
        if not full.count and not full.holes:
            return
        full.next_sequence = sequence
        with self._changed:
            parts = [part for part in self._parts if not isinstance(part, Gap)]
            frozen = [part for part in parts if isinstance(part, Tail)]
            if self._writes and len(frozen) >= FROZEN:
                parts.remove(frozen[0])
            self._set_parts([*parts, full])
            self._wake()

    def _set_parts(self, parts: Sequence[Part]) -> None:
        with self._changed:
            self._parts = order_parts(parts, self._tail.first_sequence, self._frames)

    def _replace(self, old: Sequence[Part], new: Run | None) -> bool:
        """Replace parts by the run ``new`` (None: by nothing). If ``old`` parts no longer exist, delete the file of
        ``new`` and return False."""
        with self._changed:
            if all(one in self._parts for one in old):
                left = [part for part in self._parts if part not in old]
                self._set_parts(left if new is None else [*left, new])
                return True
        if new is not None:
            self._remove(new.name)
        return False

    def _discard(self, run: Run) -> None:
        logger.warning("a look-up file is damaged, it is rebuilt from the log: %s", run.name)
        if self._replace([run], None):
            self._remove(run.name)
            self._wake()

    def _remove(self, name: str) -> None:
        if self._writes:
            with suppress(OSError):
                self._disk.remove(name)

    # The thread

    def _wake(self) -> None:
        if not self._sizes.threaded or not self._writes:
            return
        with self._changed:
            if self._stopping:
                return
            self._busy = True
            if self._thread is None:
                try:
                    thread = threading.Thread(target=self._run, name="escrowmq-lookups", daemon=True)
                    thread.start()
                except RuntimeError as problem:  # no thread available: look-ups take longer
                    logger.warning("no thread for look-up files: %s", problem)
                    return
                self._thread = thread
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._paused:
                    self._changed.wait_for(lambda: self._stopping, PAUSE_SECONDS)
                    self._paused = False
                self._changed.wait_for(lambda: self._stopping or self._busy)
                if self._stopping:
                    return
                self._busy = False
            try:
                while self.work():
                    pass
            except _Stopped:
                return
            except Exception as problem:  # no failure here is a failure of the log
                self._on_failure(problem)

    def _on_failure(self, problem: Exception) -> None:
        """Turn full tails into gaps after a failure, and retry after a pause."""
        logger.warning("look-up files are delayed: %r", problem)
        with self._changed:
            self._paused = self._busy = True
            self._set_parts([part for part in self._parts if not isinstance(part, Tail)])
            self._changed.notify_all()

    def settle(self, timeout: float | None = None) -> bool:
        """Wait up to ``timeout`` seconds until durable frames are processed and nothing is left to be written or
        merged. Returns whether that is so, or the log is closing."""
        with self._tail_lock:
            self._grow(self._durable)
        with self._changed:
            if self._has_work():
                self._wake()
            return self._changed.wait_for(lambda: self._stopping or not self._has_work(), timeout)

    def _has_work(self) -> bool:
        return any(not isinstance(part, Run) for part in self._parts) or self._choose_merge() is not None

    def work(self) -> bool:
        """Process durable frames, then write, fill or merge one part; return False if there was nothing to do."""
        self._catch_up()
        with self._changed:
            parts, runs = self._parts, self._choose_merge()
        if tail := next((part for part in parts if isinstance(part, Tail)), None):
            self._write(tail)
        elif runs is not None:
            self._merge(runs)
        elif gap := next((part for part in parts if isinstance(part, Gap)), None):
            self._fill(gap)
        else:
            with self._changed:
                self._changed.notify_all()
            return False
        return True

    def _catch_up(self) -> None:
        if self._stopping:
            raise _Stopped
        with self._tail_lock:
            self._grow(self._durable)

    def _write(self, tail: Tail) -> None:
        self._replace([tail] if tail in self._parts else [], self._build_run(tail))

    def _build_run(self, tail: Tail) -> Run:
        self._check_space(16 * tail.count)
        extent = tail.extent(*self._frames.place(tail.next_sequence))
        return write_run(self._disk, self._shard, extent, tail.sorted_columns(), tail.holes, durable=False)

    def _fill(self, gap: Gap) -> None:
        """Write a run of the first part of a gap, as many frames and rows as one run may have."""
        sequences = self._frames.message_frames(*gap).tolist()
        first = gap.first_sequence
        reach = self._frames.place(sequences[0] + 1)[0] - self._frames.place(first)[0]
        if reach > MOST_POSITIONS:  # too many other rows before its first message for one run
            first = sequences[0]
        tail = Tail(first, self._frames.place(first)[0])
        for sequence in sequences:
            frame = self._frames.frame(sequence, keep=False)
            if frame.position + frame.count - tail.first_position > MOST_POSITIONS:
                break
            tail.add([frame])
            tail.next_sequence = sequence + 1
            if tail.count >= self._sizes.run_rows or tail.frames >= self._sizes.run_frames:
                break
            if tail.frames % self._sizes.wake_frames == 0:
                self._catch_up()
        self._replace([gap], self._build_run(tail))

    def _merge(self, runs: list[Run]) -> None:
        self._check_space(sum(run.file_bytes for run in runs))
        first, position = self._frames.stored_from()
        floor = Extent(first, first, position, position, 0)
        try:
            run = merge(self._disk, self._shard, runs, floor, self._catch_up, self._sizes.chunk)
        except UnsoundRun as problem:
            self._discard(problem.run)
            return
        if self._replace(runs, run):
            for name in {old.name for old in runs} - {run.name}:
                self._remove(name)

    def _check_space(self, size: int) -> None:
        """Raise OSError if a file of ``size`` bytes would leave too little space to the log."""
        if self._disk.free_bytes() < size + self._sizes.spare_bytes:
            raise OSError(f"{size} bytes more would leave too little of the disk to the log")

    def _choose_merge(self) -> list[Run] | None:
        return choose_merge(self._parts, self._frames.stored_from()[1], self._sizes)
