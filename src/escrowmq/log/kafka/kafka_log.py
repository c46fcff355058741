"""The commit log on one partition of Kafka, on the leading node: frames are sent, proved to count, then mirrored.

Rules:

1. Frames are sent by ``hand_over``, at once; the returned function waits for the proof of
   :mod:`escrowmq.log.kafka.channel`. Several rounds may be in flight; they finish in the order of sending. A proved
   round is durable: it is answered, then written to the mirror (``settle``, or reading the durable end).
2. Any failure (another node claimed the log, Kafka's producer ended, the mirror cannot be written) stops the log.
   Frames appended and not answered may or may not count; the next opening finds out.
3. A record is sent every half second, so that followers know that this node lives, and this node that it still leads.
4. Retention: the base is stored locally first, as in any folder, then sent to Kafka on a thread of its own. Then
   records are deleted, only up to a mark whose records were read, or acknowledged at exactly the next offset. A crash
   between two steps leaves more records, never fewer.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from itertools import chain
from typing import NamedTuple, cast

import pyarrow as pa

from escrowmq.errors import Code, EscrowError, Fenced, error
from escrowmq.log.commit_log import SegmentLog
from escrowmq.log.index import Segment
from escrowmq.log.kafka.bases import CHUNK_BYTES, Bases, Manifest, file_pieces
from escrowmq.log.kafka.channel import Channel
from escrowmq.log.kafka.fold import Fold, Standing
from escrowmq.log.kafka.mirror import Mirror
from escrowmq.log.kafka.partition import Partitions
from escrowmq.log.seam import Frame
from escrowmq.log.snapshots import SnapshotName, find_base
from escrowmq.platform.disk import Chunk, file_size
from escrowmq.platform.failpoints import reach

RELEASE_SECONDS = 5.0
"""Timeout for the last record of a clean close; without it the other nodes wait for the leader's silence."""

DELETE_SECONDS = 30.0  # timeout for deleting records in Kafka

logger = logging.getLogger(__name__)


class _UnmirroredRound(NamedTuple):
    """A round that counts and is not in the mirror yet."""

    segment: Segment
    write: Callable[[], pa.Buffer | None]
    end: int  # the sequence after its last frame
    size: int
    standing: Standing


class KafkaLog(Mirror):
    """A :class:`escrowmq.log.seam.ReplicatedLog`: a mirror whose node leads."""

    @classmethod
    def lead(
        cls, mirror: Mirror, channel: Channel, partitions: Partitions, version: str, now_us: int, frames: list[Frame]
    ) -> KafkaLog:
        """Turn a mirror, which holds all that counts before the claim made by ``channel``, into the leading log: the
        same object, so that its readers keep it. ``frames``: those of the mirror that its reader has not got. Raises
        Fenced(FENCED) if another node has already claimed the log, Corrupt(LOG_FAILED)."""
        log = cast(KafkaLog, mirror)
        cls._prepare(log, channel, partitions)
        mirror.__class__ = cls
        log.acts.ship = log._ship_act
        log.epoch = max(channel.standing.epoch - 1, log.epoch)
        begin = log.next_sequence
        try:
            log._begin_epoch(version, max(now_us, log.last_time_us))
        except EscrowError:
            if log.fenced:
                raise error(Code.FENCED, "another node claimed the log at the same moment") from None
            raise
        log._caught_up = [*frames, *log.frames(begin)]
        log.note(channel.standing)
        channel.start()
        return log

    def _prepare(self, channel: Channel, partitions: Partitions) -> None:
        self._mirror_lock = threading.Lock()  # guards the next field and the mirror's end
        self._unmirrored = deque[_UnmirroredRound]()
        self._channel, self._partitions = channel, partitions
        self._caught_up: list[Frame] = []
        self._unsent: list[list[memoryview]] = []  # frames, in chunks
        self._unsent_bytes = self.bytes_written = 0
        self._last_turn = threading.Event()  # set when the last hand-over is finished; they finish in order
        self._last_turn.set()
        self._base_thread = ThreadPoolExecutor(1, "escrowmq-base")
        self._base_upload: Future[None] | None = None
        self._sent_base: SnapshotName | None = None
        self._released = False

    @property
    def fenced(self) -> bool:
        return isinstance(self._channel.failure, Fenced)

    @property
    def ended(self) -> EscrowError | None:
        return self._channel.failure

    @property
    def proved_at(self) -> float:
        return self._channel.proved_at

    def caught_up(self) -> list[Frame]:
        found, self._caught_up = self._caught_up, []
        return found

    def confirm(self, timeout: float) -> None:
        self._check_usable()
        with self._stop_on_error():
            self._channel.confirm(timeout)

    def _check_usable(self) -> None:
        if self._failure is None and (problem := self._channel.failure):
            if problem.code is Code.CLOSED:
                raise problem
            self._fail(self._stop_error(problem))
        super()._check_usable()

    def _stop_error(self, problem: EscrowError) -> EscrowError:
        message = "another node leads the log now" if isinstance(problem, Fenced) else problem.message
        return error(Code.LOG_FAILED, message, "this broker now follows the log, or is restarted")

    # Appending

    reserve = SegmentLog.reserve

    def _put(self, chunks: list[Chunk], size: int) -> None:
        super()._put(chunks, size)
        self._unsent.append([memoryview(chunk) for chunk in chunks])
        self._unsent_bytes += size

    def sync(self) -> None:
        super().sync()
        self.settle()

    def hand_over(self) -> Callable[[], None]:
        """Send the buffered frames; return a function that waits until they count. :meth:`settle` mirrors them."""
        self._check_usable()
        segment, end, write = self._segment, self.next_sequence, self._active.take()
        unsent, self._unsent = self._unsent, []
        size, self._unsent_bytes = self._unsent_bytes, 0
        with self._stop_on_error():
            sent = self._channel.send_frames(unsent) if unsent else None
        before, self._last_turn = self._last_turn, threading.Event()
        done = self._last_turn

        def finish() -> None:
            try:
                with self._stop_on_error():
                    standing = sent.wait() if sent is not None else None
                    reach("kafka_log.proved")
                before.wait()
                self._check_usable()
                if standing is not None:
                    self._unmirrored.append(_UnmirroredRound(segment, write, end, size, standing))
            finally:
                before.wait()
                done.set()

        return finish

    def settle(self) -> None:
        """Write the rounds that count to the mirror; do not wait for rounds in flight. A failed write stops the log."""
        with self._mirror_lock:
            while self._unmirrored:
                self._check_usable()
                pending = self._unmirrored[0]
                with self._stop_on_error():
                    self._mark_durable(pending.segment, pending.write(), pending.end)
                self._unmirrored.popleft()
                self.add_bytes(pending.size, pending.standing)

    @property
    def durable_sequence(self) -> int:
        """Write the rounds that count to the mirror, then return the sequence below which every frame is durable,
        readable and in the mirror. A failed write stops the log; it is not raised here."""
        if self._unmirrored:
            with suppress(EscrowError):  # the failure has stopped the log
                self.settle()
        return self._durable

    def _roll(self, size: int) -> None:
        self.sync()  # every appended frame must count
        super()._roll(size)
        self.note(self._channel.standing, keep=True)

    def _ship_act(self, line: bytes) -> None:
        self._check_usable()
        with self._stop_on_error():
            self._channel.send_act(line).wait()

    @contextmanager
    def _stop_on_error(self) -> Iterator[None]:
        """Context manager: any exception inside stops the log."""
        try:
            yield
        except (OSError, MemoryError) as problem:
            raise self._fail(error(Code.LOG_FAILED, f"writing the mirror failed: {problem}")) from problem
        except EscrowError as problem:
            if problem.code is Code.TIMED_OUT:
                raise
            raise self._fail(self._stop_error(problem)) from problem
        except BaseException as problem:
            self._fail(error(Code.LOG_FAILED, f"sending was interrupted: {problem!r}"))
            raise

    # Retention

    def drop_before(self, position: int) -> int:
        """Drop whole segments below ``position``; return the number of segments dropped. A thread then sends the base,
        the snapshot that stands for them, to Kafka, and deletes the records that it replaces."""
        dropped = super().drop_before(position)
        if (self._base_upload is None or self._base_upload.done()) and self._base_to_send() is not None:
            self._base_upload = self._base_thread.submit(self._upload_base)
        return dropped

    def _base_to_send(self) -> SnapshotName | None:
        with self._reader.lock:
            base = find_base(self._snapshots)
        return base if base is not None and base != self._sent_base else None

    def _upload_base(self) -> None:
        """Send the base to Kafka, then delete the records it replaces. A failure is retried with the next drop."""
        while (base := self._base_to_send()) is not None:
            try:
                mark = self.marks.at(base.first)
                if mark is None:
                    return  # no mark proves how much may be deleted
                with closing(self._partitions.base()) as partition:
                    self._send_base(Bases(partition), base, mark)
            except (EscrowError, OSError, MemoryError) as problem:
                logger.warning("a base could not be brought to Kafka: %s", problem)
                return

    def _send_base(self, bases: Bases, base: SnapshotName, mark: Standing) -> None:
        with self._reader.lock:
            first = self._reader.segments[0].header
        if first.sequence != base.first:
            return  # retention is dropping more: a newer base will follow
        kept = bases.newest()
        if kept is None or kept.manifest.rank < mark.offset:
            size = file_size(self._disk, str(base))
            starts = range(0, mark.act_bytes, CHUNK_BYTES)
            acts = (self.acts.read_bytes(at, min(CHUNK_BYTES, mark.act_bytes - at)) for at in starts)
            content = chain(file_pieces(self._disk, str(base), size), acts)
            kept = bases.send(Manifest.of(first, base.sequence, size, mark), content)
        reach("base.sent")
        standing = kept.manifest.standing
        with closing(self._partitions.log()) as partition:
            first_kept, _ = partition.ends(DELETE_SECONDS)
            if first_kept < standing.offset:
                for offset, raw in partition.read(standing.offset, standing.offset + 1, 1.0):
                    # Corrupt(DAMAGED) if this record does not follow the mark: then nothing is deleted
                    Fold(standing).take(offset, raw)
                partition.delete_before(standing.offset, DELETE_SECONDS)
        reach("base.records_deleted")
        bases.delete_old()
        self.marks.drop_below(standing.sequence)
        self.marks.save()
        self._sent_base = base

    # Closing

    def release(self) -> None:
        """Send all appended frames and then a release record, so that another node takes over at once."""
        if self._released:
            return
        self.sync()
        self._released = True
        with self._stop_on_error():
            self._channel.release(RELEASE_SECONDS)
        self.note(self._channel.standing)

    def close(self, *, clean: bool = True) -> None:
        """Close as any log; ``clean``: release it before, so that another node takes over at once."""
        if self._closed:
            return
        try:
            if clean and self._failure is None:
                self.release()
                if self._base_upload is not None:
                    self._base_upload.result()  # any former leader may send a base: its rank decides if it is used
        finally:
            self._channel.close()
            self._base_thread.shutdown(wait=False, cancel_futures=True)
            try:
                super().close(clean=clean)
            finally:
                self.on_close()

    def _write_last(self) -> None:
        """Do nothing on closing: :meth:`release` has sent and written everything."""
