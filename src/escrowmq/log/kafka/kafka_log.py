"""The commit log on one partition of Kafka, as the node has it that leads: what is appended is sent, proved to count,
and only then written to the mirror.

Rules:

1. Frames leave with ``hand_over``, at once; the function returned waits for the proof of
   :mod:`escrowmq.log.kafka.channel`. Several may be in the air; they finish in the order in which they left. What is
   proved is durable, so it is answered first, and written to the mirror then (``settle``); the caller how far the log
   is durable has it written before.
2. Whatever goes wrong (another node claimed the log, Kafka's producer ended, the mirror cannot be written) stops the
   log. What was appended and not answered may count, or not; the next opening finds out.
3. A record goes out every half second, so that followers know that this node lives, and this node that it still leads.
4. Retention: the base is local first, as in any folder; then it goes to Kafka, on a thread of its own; then records are
   deleted, and only up to a mark whose records were read, or acknowledged at exactly the next offset. A crash between
   two steps leaves more, never less.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from itertools import chain
from typing import NamedTuple

import pyarrow as pa

from escrowmq.errors import Code, EscrowError, Fenced, Misuse, error
from escrowmq.log.frames import Chunk
from escrowmq.log.index import Segment
from escrowmq.log.kafka.bases import CHUNK_BYTES, Bases, Manifest, file_pieces
from escrowmq.log.kafka.channel import Channel
from escrowmq.log.kafka.fold import Fold, Standing
from escrowmq.log.kafka.mirror import Mirror
from escrowmq.log.kafka.partition import Partitions
from escrowmq.log.seam import Frame
from escrowmq.log.snapshots import SnapshotName
from escrowmq.platform.disk import Disk
from escrowmq.platform.failpoints import reach

RELEASE_SECONDS = 5.0
"""For the last record of a clean end; without it the others wait until they notice the silence."""

DELETE_SECONDS = 30.0
"""For Kafka to delete records."""

logger = logging.getLogger(__name__)


class _Owed(NamedTuple):
    """A round that counts, and is not in the mirror yet."""

    segment: Segment
    write: Callable[[], pa.Buffer | None]
    end: int
    """Its frames have a lower sequence."""
    size: int
    standing: Standing


class KafkaLog(Mirror):
    """A :class:`escrowmq.log.seam.ReplicatedLog` once :meth:`lead` was called; before that a mirror that others may
    read."""

    _channel: Channel | None = None
    _sent_base: SnapshotName | None = None
    _released = False

    def lead(
        self,
        channel: Channel,
        partitions: Partitions,
        version: str,
        now_us: int,
        caught_up: list[Frame],
        end: Callable[[], None],
    ) -> None:
        """Append from now on, as the opener whose claim ``channel`` made: the mirror holds all that counts before it.
        ``end`` is called when the log is closed. Fenced(FENCED) if another one has claimed the log already,
        Corrupt(LOG_FAILED)."""
        self._settling = threading.Lock()  # around what follows, and the mirror's end
        self._owed = deque[_Owed]()
        self._channel, self._partitions, self._end = channel, partitions, end
        self._unsent: list[list[memoryview]] = []  # frames, in chunks
        self._unsent_bytes = 0
        self._turns = threading.Condition()
        self._handed = self._finished = 0  # hand-overs, each of which finishes when those before it have
        self._keeper = ThreadPoolExecutor(1, "escrowmq-base")
        self._keeping: Future[None] | None = None
        self.bytes_written = 0
        self.acts.ship = self._ship_act
        self.epoch = max(channel.standing.epoch - 1, self.epoch)
        begin = self.next_sequence
        try:
            self._begin_epoch(version, max(now_us, self.last_time_us))
        except EscrowError:
            if self.fenced:
                raise error(Code.FENCED, "another node claimed the log at the same moment") from None
            raise
        self._caught_up = [*caught_up, *self.frames(begin)]
        self.note(channel.standing)
        channel.start()

    # What a replicated log tells

    @property
    def fenced(self) -> bool:
        """Whether another node was seen to have taken the log over."""
        return self._channel is not None and isinstance(self._channel.failure, Fenced)

    @property
    def ended(self) -> EscrowError | None:
        """Why nothing is sent any more."""
        return self._channel.failure if self._channel is not None else None

    @property
    def proved_at(self) -> float:
        """By :func:`escrowmq.platform.clock.uptime`, when the last record was sent that counts."""
        return self._led().proved_at

    def caught_up(self) -> list[Frame]:
        """Return frames that the take-over found, for a ledger that was kept warm."""
        found, self._caught_up = self._caught_up, []
        return found

    def confirm(self, timeout: float) -> None:
        """Return when a record counts that was sent after this call began."""
        self._check_usable()
        with self._failing():
            self._led().confirm(timeout)

    def _check_usable(self) -> None:
        if self._channel is not None and self._failure is None and (problem := self._channel.failure):
            if problem.code is Code.CLOSED:
                raise problem
            self._fail(self._stopped(problem))
        super()._check_usable()

    def _stopped(self, problem: EscrowError) -> EscrowError:
        what = "another node leads the log now" if isinstance(problem, Fenced) else problem.message
        return error(Code.LOG_FAILED, what, "this broker follows the log from now on, or is started anew")

    # Appending

    def _check_leads(self) -> None:
        if self._channel is None:
            super()._check_leads()

    def _led(self) -> Channel:
        if self._channel is None:
            raise Misuse(Code.BAD_ARGUMENT, "this node follows the log, and does not lead it")
        return self._channel

    def _put(self, chunks: list[Chunk], size: int) -> None:
        super()._put(chunks, size)
        self._unsent.append([memoryview(chunk) for chunk in chunks])
        self._unsent_bytes += size

    def sync(self) -> None:
        """Send what is buffered, wait until it counts, write the mirror. Corrupt(LOG_FAILED)."""
        super().sync()
        self.settle()

    def hand_over(self) -> Callable[[], None]:
        """Send what is buffered; the function returned waits until it counts. :meth:`settle` writes the mirror.
        Corrupt(LOG_FAILED)."""
        self._check_usable()
        channel = self._led()
        segment, end, write = self._segment, self.next_sequence, self._active.take()
        unsent, self._unsent = self._unsent, []
        size, self._unsent_bytes = self._unsent_bytes, 0
        with self._failing():
            sent = channel.send_chunks(unsent) if unsent else None
        with self._turns:
            turn = self._handed
            self._handed += 1

        def finish() -> None:
            try:
                with self._failing():
                    standing = sent.wait() if sent is not None else None
                    reach("kafka_log.proved")
                with self._turns:
                    self._turns.wait_for(lambda: self._finished == turn)
                self._check_usable()
                if standing is not None:
                    self._owed.append(_Owed(segment, write, end, size, standing))
            finally:
                with self._turns:
                    self._turns.wait_for(lambda: self._finished == turn)
                    self._finished += 1
                    self._turns.notify_all()

        return finish

    def settle(self) -> None:
        """Write to the mirror what counts and is not there yet; a round that is in the air is not waited for.
        Corrupt(LOG_FAILED)."""
        if self._channel is None:
            super().settle()
            return
        with self._settling:
            while self._owed:
                self._check_usable()
                owed = self._owed[0]
                with self._failing():
                    self._settle(owed.segment, owed.write(), owed.end)
                self._owed.popleft()
                self.noted(owed.size, owed.standing)

    @property
    def durable_sequence(self) -> int:
        """Every frame below this is durable, and can be read; it is in the mirror, too."""
        if self._channel is not None and self._owed:
            with suppress(EscrowError):  # the log has stopped, and knows it
                self.settle()
        return self._durable

    def _roll(self, size: int) -> None:
        """All that was appended counts, before a segment is sealed."""
        if self._channel is None:
            super()._roll(size)
            return
        self.sync()
        super()._roll(size)
        self.note(self._channel.standing, keep=True)

    def _ship_act(self, line: bytes) -> None:
        self._check_usable()
        with self._failing():
            self._led().send_act(line).wait()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Context manager: any exception inside stops the log."""
        try:
            yield
        except (OSError, MemoryError) as problem:
            raise self._fail(error(Code.LOG_FAILED, f"writing the mirror failed: {problem}")) from problem
        except EscrowError as problem:
            if problem.code is Code.TIMED_OUT:
                raise
            raise self._fail(self._stopped(problem)) from problem
        except BaseException as problem:
            self._fail(error(Code.LOG_FAILED, f"sending broke off: {problem!r}"))
            raise

    # Retention

    def newest_snapshot_sequence(self) -> int:
        """Of the newest snapshot here; -1 without one."""
        with self._reader.lock:
            return self._snapshots[0].sequence if self._snapshots else -1

    def reaches_base(self) -> bool:
        """Return whether it has the frames up to the snapshot of its base, if there is one."""
        with self._reader.lock:
            return all(s.sequence <= self.next_sequence for s in self._snapshots if s.first >= 0)

    def adopt_snapshot(self, name: SnapshotName) -> None:
        """Accept a snapshot that was put into the folder as one of this log."""
        with self._reader.lock:
            self._snapshots = sorted({*self._snapshots, name}, reverse=True)

    def drop_before(self, position: int) -> int:
        """Drop whole segments as any log does; then send the base to Kafka and delete there what it stands for, on
        another thread."""
        dropped = super().drop_before(position)
        if self._channel is None:
            self.marks.drop_below(self._reader.stored_from()[0])
            return dropped
        if (self._keeping is None or self._keeping.done()) and self._base_to_send() is not None:
            self._keeping = self._keeper.submit(self._keep_base)
        return dropped

    def _base_to_send(self) -> SnapshotName | None:
        """Return the base of this folder, if it is not known to be in Kafka."""
        with self._reader.lock:
            base = max((s for s in self._snapshots if s.first >= 0), default=None, key=lambda s: (s.first, s.sequence))
        return base if base is not None and base != self._sent_base else None

    def _keep_base(self) -> None:
        """Bring the base to Kafka, then delete what it stands for there. What fails is tried again when retention drops
        something next."""
        while (base := self._base_to_send()) is not None:
            try:
                mark = self.marks.at(base.first)
                if mark is None:
                    return  # nothing proves how much may be deleted
                with closing(self._partitions.base()) as partition:
                    self._send_base(Bases(partition), base, mark)
            except (EscrowError, OSError, MemoryError) as problem:
                logger.warning("a base could not be brought to Kafka: %s", problem)
                return

    def _send_base(self, bases: Bases, base: SnapshotName, mark: Standing) -> None:
        with self._reader.lock:
            first = self._reader.segments[0].header
        if first.sequence != base.first:
            return  # retention continues just now: there will be a newer base
        kept = bases.newest()
        if kept is None or kept.manifest.rank < mark.offset:
            manifest = Manifest(
                0, self.shard, self.salt, first.epoch, first.sequence, first.position, first.created_us, base.sequence,
                _size(self._disk, str(base)), mark.act_bytes, 0, 0, mark,
            )  # fmt: skip
            acts = (
                self.acts.read_bytes(at, min(CHUNK_BYTES, mark.act_bytes - at))
                for at in range(0, mark.act_bytes, CHUNK_BYTES)
            )
            kept = bases.send(manifest, chain(file_pieces(self._disk, str(base)), acts))
        reach("base.sent")
        standing = kept.manifest.standing
        with closing(self._partitions.log()) as partition:
            first_kept, _ = partition.ends(DELETE_SECONDS)
            if first_kept < standing.offset:
                for offset, raw in partition.read(standing.offset, standing.offset + 1, 1.0):
                    Fold(standing).take(
                        offset, raw
                    )  # Corrupt(DAMAGED) if what lies there does not continue from the mark: then nothing is deleted
                partition.delete_before(standing.offset, DELETE_SECONDS)
        reach("base.records_deleted")
        bases.delete_old()
        self.marks.drop_below(standing.sequence)
        self.marks.save()
        self._sent_base = base

    # The end

    def release(self) -> None:
        """Send what was appended, and then that this node stops, so that another takes over at once."""
        if self._channel is None or self._released:
            return
        self.sync()
        self._released = True
        with self._failing():
            self._channel.release(RELEASE_SECONDS)
        self.note(self._channel.standing)

    def close(self, *, clean: bool = True) -> None:
        """As any log; ``clean``: what was appended is sent, and then that this node stops, so that another takes over
        at once."""
        if self._channel is None or self._closed:
            super().close(clean=clean)
            return
        try:
            if clean and self._failure is None:
                self.release()
                if self._keeping is not None:  # a base may be sent by whoever led once: its rank says what it is worth
                    self._keeping.result()
        finally:
            self._channel.close()
            self._keeper.shutdown(wait=False, cancel_futures=True)
            try:
                super().close(clean=clean)
            finally:
                self._end()

    def _settle_last(self) -> None:
        if self._channel is None:  # else all was sent and written before the log was released
            super()._settle_last()


def _size(disk: Disk, name: str) -> int:
    with closing(disk.open(name)) as file:
        return file.size()
