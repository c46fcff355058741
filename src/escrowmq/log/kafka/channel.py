"""The owner's channel: it numbers and sends records, and knows of each when it counts.

A record counts when its acknowledgement has come and nothing lies between it and our record before it that could be a
claim: its offset is the next one, or what lies between was read (``rule.prove``). "Acknowledged" alone is not enough:
another may have claimed in between. What failed once stays failed: who cannot know what is stored does not continue
under the same claim.

There is no thread that only waits for acknowledgements: who waits for a round takes them for all (a second thread would
cost each round a change of threads). The thread that beats takes them while nobody waits.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec

from escrowmq.errors import Code, EscrowError, Misuse, error
from escrowmq.log import frames
from escrowmq.log.kafka import records
from escrowmq.log.kafka.fold import Standing, examine, judged
from escrowmq.log.kafka.partition import END, UNKNOWN_OFFSET, Partition
from escrowmq.log.kafka.records import LARGEST_PAYLOAD, Beat, Payload, RecordType
from escrowmq.log.kafka.rule import Verdict, prove
from escrowmq.platform.clock import uptime
from escrowmq.platform.logs import tell

PATIENCE = 60.0
"""Seconds after which a record that is not acknowledged ends the channel. Kafka's own change of a partition's leader
takes about ten.
"""
BEAT_SECONDS = 0.5
_SLICE = 0.1
"""Seconds that a look at the partition waits at a time, so that it notices when its own time is over."""


class Round:
    """Frames that were sent together. It counts as a whole or, to its sender, not at all."""

    def __init__(self, channel: Channel, number: int) -> None:
        self._channel = channel
        self.number = number
        """Of its last record."""
        self.standing: Standing | None = None
        """Right behind it, once it counts."""

    def wait(self, timeout: float | None = None) -> Standing:
        """Wait until it counts; how the log stands right behind it.

        Fenced(FENCED) when another claimed before it; Corrupt(LOG_FAILED) when nobody can know, or Kafka was silent for
        as long as the channel's patience: nothing continues then. Unknown(TIMED_OUT) after ``timeout`` seconds, if it
        is given: the channel continues.
        """
        return self._channel._await(self, timeout)


class _Sent(NamedTuple):
    number: int
    at: float
    """When it was sent."""
    after: Standing
    """How the log stands behind it, but for the offset."""
    ends: Round | None
    """The round of which it is the last."""


class _Record(NamedTuple):
    """The next record to send."""

    type: RecordType
    payload: list[memoryview]
    after: Standing
    """How the log stands behind it, but for its own number."""


class Channel:
    """See the module. Made by :func:`escrowmq.log.kafka.claiming.claim`. Any thread may send and wait; ``standing`` is
    that of its claim."""

    def __init__(
        self,
        partition: Partition,
        standing: Standing,
        *,
        replicas: Callable[[], tuple[str, ...]] = tuple,
        patience: float = PATIENCE,
        beat_seconds: float = BEAT_SECONDS,
    ) -> None:
        self._partition = partition
        self._replicas = replicas
        self._patience = patience
        self._beat_seconds = beat_seconds
        self._owned = standing
        self._sending = threading.Lock()  # numbers are given, and records sent, in one order
        self._next = standing  # how the log stands behind what was sent, but for the offset
        self._last_sent = uptime()
        self._last_round: Round | None = None
        self._released = False
        self._polling = threading.Lock()  # held by whoever takes acknowledgements; it guards what follows
        self._number, self._offset = standing.number, standing.offset
        self._acknowledged: dict[int, int] = {}
        self._sent: deque[_Sent] = deque()
        self._standing = standing
        self._waiting = 0  # about how many wait: the thread that beats leaves acknowledgements to them
        self._failing = threading.Lock()
        self._failure: EscrowError | None = None
        self._stopped = threading.Event()
        self._beating: threading.Thread | None = None
        self.proved_at = self._last_sent
        """When the newest record was sent that is known to count: then, this node still owned the log."""
        self.gaps = 0
        """How often the offsets had a gap that was read."""
        self.failed = threading.Event()
        """Set with :attr:`failure`."""

    @property
    def standing(self) -> Standing:
        """Behind the newest round that counts."""
        return self._standing

    @property
    def failure(self) -> EscrowError | None:
        """Why nothing is sent any more: Fenced(FENCED), or Corrupt."""
        return self._failure

    # Sending

    def send_frames(self, data: Payload) -> Round:
        """Send whole frames, at least one, which must be those that come next in the log: Misuse(BAD_ARGUMENT) if not,
        and nothing is sent."""
        return self.send_chunks(_frames(memoryview(data)))

    def send_chunks(self, frames: Iterable[Sequence[memoryview]]) -> Round:
        """As :meth:`send_frames`, each of them in chunks, the first of which has the header: they are copied once, into
        their record."""
        with self._sending:
            self._check()
            *first, (type, payload, after) = self._pack_records(frames)
            for part in first:
                self._send(*part, None)
            return self._finish(type, payload, after)

    def send_act(self, data: bytes) -> Round:
        """Send bytes of the record of acts, which must be those that come next in it."""
        with self._sending:
            self._check()
            *parts, last = records.pieces(data)
            for part in parts:
                self._send(RecordType.PART, [part], self._next, None)
            after = msgspec.structs.replace(self._next, act_bytes=self._next.act_bytes + len(data))
            return self._finish(RecordType.ACT, [last], after)

    def beat(self) -> Round:
        """Say that the owner lives."""
        with self._sending:
            self._check()
            return self._beat()

    def release(self, timeout: float = 5.0) -> Standing:
        """Say that the owner stops, so that another claims at once; nothing can be sent afterwards. Raises as
        :meth:`Round.wait`."""
        with self._sending:
            self._check()
            last = self._finish(RecordType.RELEASE, [], self._next)
            self._released = True
        return last.wait(timeout)

    def confirm(self, timeout: float) -> None:
        """Return when a record that was sent after this call began is known to count: nobody had claimed the log when
        it began. Many callers at once share a record. Raises as :meth:`Round.wait`."""
        began = uptime()
        with self._sending:
            self._check()
            last = self._last_round
            if last is None or self._last_sent <= began:
                last = self._beat()
        last.wait(timeout)

    def _beat(self) -> Round:
        beat = Beat(self._owned.url, self._replicas())
        return self._finish(RecordType.BEAT, [msgspec.json.encode(beat)], self._next)

    def _pack_records(self, given: Iterable[Sequence[memoryview]]) -> list[_Record]:
        """Return frames as records: as many whole ones as go into each, and what is larger cut. With each record how
        the log
        stands behind it."""
        made: list[_Record] = []
        now, held, size = self._next, list[memoryview](), 0
        for chunks in given:
            frame = frames.read_header(chunks[0], 0)
            if (frame.sequence, frame.position) != (now.sequence, now.position):
                what = f"frame {frame.sequence}, position {frame.position}"
                raise Misuse(Code.BAD_ARGUMENT, f"{what}: the log stands at {now.sequence}, {now.position}")
            if held and size + frame.frame_bytes > LARGEST_PAYLOAD:
                made.append(_Record(RecordType.FRAMES, held, now))
                held, size = [], 0
            before = now
            now = msgspec.structs.replace(
                now, sequence=now.sequence + 1, position=now.position + frame.rows, frame_epoch=frame.epoch
            )
            held += chunks
            size += frame.frame_bytes
            if size > LARGEST_PAYLOAD:
                *parts, last = records.cut(held)
                made += [_Record(RecordType.PART, part, before) for part in parts]
                made.append(_Record(RecordType.FRAMES, last, now))
                held, size = [], 0
        if held:
            made.append(_Record(RecordType.FRAMES, held, now))
        if not made:
            raise Misuse(Code.BAD_ARGUMENT, "no frame to send")
        return made

    def _finish(self, type: RecordType, payload: Sequence[Payload], after: Standing) -> Round:
        """Send the last record of a round."""
        self._last_round = Round(self, self._next.number)
        self._send(type, payload, after, self._last_round)
        return self._last_round

    def _send(self, type: RecordType, payload: Sequence[Payload], after: Standing, ends: Round | None) -> None:
        """Send a record with the next number. ``after``: how the log stands behind it, but for its own number."""
        now = self._next
        raw = records.pack(
            type,
            *payload,
            shard=now.shard,
            epoch=now.epoch,
            nonce=now.nonce,
            number=now.number,
            sequence=now.sequence,
        )
        after = msgspec.structs.replace(after, number=now.number + 1)
        self._last_sent = uptime()
        self._sent.append(_Sent(now.number, self._last_sent, after, ends))  # before its acknowledgement can come
        try:
            self._partition.produce(now.number, raw)
        except BaseException as problem:  # whether it will be stored nobody knows
            raise self._fail(problem) from problem
        self._next = after

    # Waiting

    def _await(self, round: Round, timeout: float | None) -> Standing:
        deadline = uptime() + (self._patience if timeout is None else timeout)
        self._waiting += 1
        try:
            while round.standing is None:
                if self._failure is not None:
                    raise self._again(self._failure)
                left = deadline - uptime()
                if left <= 0:
                    late = f"{self._partition.name} has not acknowledged a record"
                    if timeout is None:
                        raise self._fail(error(Code.LOG_FAILED, f"{late} for {self._patience:g} s", _NOT_KNOWN))
                    raise error(Code.TIMED_OUT, f"{late} within {timeout:g} s")
                if self._polling.acquire(timeout=left):
                    try:
                        if round.standing is None and self._failure is None:
                            self._pump(left)
                    finally:
                        self._polling.release()
            return round.standing
        finally:
            self._waiting -= 1

    def _pump(self, timeout: float) -> None:
        """Take the acknowledgements, ``timeout`` seconds at most for the first, and see what they prove."""
        try:
            for number, offset in self._partition.acknowledged(min(timeout, _SLICE)):
                if number >= self._number:
                    self._acknowledged[number] = offset
            while True:
                step = prove(self._number, self._offset, self._acknowledged)
                while self._number < step.number:
                    self._settle()
                if step.unread is None:
                    return
                self._read_gap(step.unread)
        except Exception as problem:
            self._fail(problem)

    def _settle(self) -> None:
        """Note that our next record counts, at the next offset."""
        sent = self._sent.popleft()
        del self._acknowledged[sent.number]
        self._number, self._offset = self._number + 1, self._offset + 1
        self.proved_at = sent.at
        if sent.ends is not None:
            self._standing = sent.ends.standing = msgspec.structs.replace(sent.after, offset=self._offset)

    def _read_gap(self, unread: int) -> None:
        """Read what lies between our last record that counts and the next one: void records are passed over, a claim
        ends everything."""
        end = END if unread == UNKNOWN_OFFSET else unread
        if end < self._offset:
            raise error(Code.LOG_FAILED, f"a record was acknowledged at offset {end}, behind one at {self._offset - 1}")
        self.gaps += 1
        deadline = uptime() + self._patience
        while self._offset < end:
            found = self._partition.read(self._offset, end, _SLICE)
            if uptime() > deadline or (not found and self._stopped.is_set()):
                what = f"what lies from offset {self._offset} on could not be read for {self._patience:g} s"
                raise error(Code.LOG_FAILED, what, _NOT_KNOWN)
            for offset, raw in found:
                if records.is_foreign(raw):  # not ours: where ours are is known, or its number will be missing
                    self._offset = offset + 1
                    tell_foreign(self._partition.name, offset)
                    continue
                header, _, claim = examine(offset, raw)
                verdict, _ = judged(msgspec.structs.replace(self._owned, number=self._number), header, claim)
                if verdict is Verdict.CLAIMS and claim is not None:
                    raise fenced(offset, claim.url)
                if verdict is Verdict.BREAKS:
                    raise records.damaged(offset, f"records {self._number} to {header.number - 1} of ours are missing")
                if verdict is Verdict.COUNTS:  # the one of which Kafka did not say where it is
                    self._acknowledged[self._number] = end = offset
                    break
                self._offset = offset + 1
        self._partition.rest()

    # Beating

    def start(self) -> None:
        """Begin to beat whenever nothing else was sent for a while, in a thread of its own; nothing is read any more
        unless there is a gap."""
        self._partition.rest()
        self._beating = threading.Thread(target=self._keep_beating, name="escrowmq-beats", daemon=True)
        self._beating.start()

    def close(self) -> None:
        """Stop beating; who waits, or sends later, gets Unknown(CLOSED). The partition stays open. Idempotent."""
        self._stopped.set()
        if self._beating is not None and self._beating is not threading.current_thread():
            self._beating.join()
        self._fail(error(Code.CLOSED, "the log is closed"))

    def _keep_beating(self) -> None:
        while not self._stopped.wait(self._beat_seconds / 4) and self._failure is None:
            now = uptime()
            if not self._sent and now - self._last_sent >= self._beat_seconds * 3 / 4:
                with suppress(EscrowError):  # that it failed is noted
                    self.beat()
            if not self._sent or self._waiting:
                continue
            if self._polling.acquire(blocking=False):
                try:
                    self._pump(_SLICE)
                finally:
                    self._polling.release()
            if self._sent and now - self._sent[0].at > self._patience:
                late = f"{self._partition.name} has not acknowledged a record for {self._patience:g} s"
                self._fail(error(Code.LOG_FAILED, late, _NOT_KNOWN))

    # Failing

    def _check(self) -> None:
        if self._failure is not None:
            raise self._again(self._failure)
        if self._released:
            raise error(Code.CLOSED, "the log was released")

    def _fail(self, problem: BaseException) -> EscrowError:
        """Note why nothing continues, the first time; the error to raise."""
        if not isinstance(problem, EscrowError):
            problem = error(Code.LOG_FAILED, f"sending to {self._partition.name} broke off: {problem!r}", _NOT_KNOWN)
        elif problem.code is Code.RANGE_PURGED:  # only an owner deletes
            problem = fenced(self._offset, "another node")
        elif problem.code not in _AS_THEY_ARE:
            problem = error(Code.LOG_FAILED, f"{problem.code.name}: {problem.message}", _NOT_KNOWN)
        with self._failing:
            if self._failure is None:
                self._failure = problem
        self.failed.set()
        return self._again(self._failure)

    @staticmethod
    def _again(failure: EscrowError) -> EscrowError:
        return error(failure.code, failure.message, failure.hint)


def _frames(data: memoryview) -> Iterator[list[memoryview]]:
    """Yield the frames that lie in ``data`` one after the other. Misuse(BAD_ARGUMENT)."""
    at = 0
    while at < len(data):
        end = at + frames.read_header(data, at).frame_bytes if len(data) - at >= frames.HEADER_BYTES else at
        if not at < end <= len(data):
            raise Misuse(Code.BAD_ARGUMENT, "a frame that is not whole")
        yield [data[at:end]]
        at = end


def tell_foreign(partition: str, offset: int) -> None:
    """Tell operators of a record of another program that was passed over."""
    what = (
        f"the record at offset {offset} of {partition} was written by another program, and is passed over: see "
        "Kafka's access rights"
    )
    tell(logging.WARNING, "foreign_record", what, partition=partition, offset=offset)


def fenced(offset: int, url: str) -> EscrowError:
    """Return the error for who meets another's claim."""
    what = f"another node claimed the log, at offset {offset} of its partition: {url}"
    return error(Code.FENCED, what, "this node answers nothing any more; it can follow the other as a standby")


_NOT_KNOWN = "what was sent last may be stored, or not: open the log anew, and it tells"
_AS_THEY_ARE = frozenset({Code.FENCED, Code.DAMAGED, Code.NEWER_FORMAT, Code.LOG_FAILED, Code.CLOSED})
