"""The owner's channel: it numbers and sends records, and determines for each when it counts.

A record counts when it is acknowledged and no claim can lie between it and our previous record: its offset is the next
one, or the records between were read (``rule.prove``). An acknowledgement alone is not enough, as another node may have
claimed in between. A failure is final: an owner that cannot know what is stored does not continue under the same claim.

A caller waiting for a round processes acknowledgements for all: a thread for them would cost each round a thread
switch. The beat thread processes them while no caller waits.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Any, NamedTuple

import msgspec

from escrowmq.errors import Code, EscrowError, Misuse, error
from escrowmq.log import frames
from escrowmq.log.kafka import records
from escrowmq.log.kafka.fold import Fold, Standing, Taken, examine, judge_record
from escrowmq.log.kafka.partition import END, UNKNOWN_OFFSET, Partition
from escrowmq.log.kafka.records import LARGEST_PAYLOAD, Beat, Claim, Payload, RecordType
from escrowmq.log.kafka.rule import Verdict, prove
from escrowmq.platform.clock import uptime
from escrowmq.platform.failpoints import reach
from escrowmq.platform.logs import tell

PATIENCE = 60.0  # seconds for an acknowledgement; a leader change of a Kafka partition takes about ten
BEAT_SECONDS = 0.5
CLAIM_SECONDS = 30.0
_SLICE = 0.1  # maximum wait (s) of one poll of the partition, so that its own deadline is noticed


@dataclass(eq=False)
class Round:
    """The records of one send. For its sender it counts as a whole or not at all."""

    _channel: Channel
    number: int  # number of its last record
    standing: Standing | None = None  # the state right after it, once it counts

    def wait(self, timeout: float | None = None) -> Standing:
        """Wait until the round counts; return the state of the log right after it. Raises Fenced(FENCED) if another
        node claimed before it; Corrupt(LOG_FAILED), which ends the channel, if the outcome cannot be known or Kafka was
        silent for the channel's patience; Unknown(TIMED_OUT) after ``timeout`` seconds: the channel continues."""
        return self._channel._await(self, timeout)


class _Sent(NamedTuple):
    number: int
    at: float  # time of sending
    after: Standing  # state of the log after it, except for the offset
    ends: Round | None  # the round that it completes


_Record = tuple[RecordType, list[memoryview], Standing]  # the last is the state of the log after it


class Channel:
    """The owner's channel, made by :func:`claim`. Any thread may send and wait."""

    def __init__(
        self,
        partition: Partition,
        standing: Standing,
        *,
        replicas: Callable[[], tuple[str, ...]] = tuple,
        patience: float = PATIENCE,
        beat_seconds: float = BEAT_SECONDS,
    ) -> None:
        self._partition, self._owned, self._replicas = partition, standing, replicas
        self._patience, self._beat_seconds = patience, beat_seconds
        self._send_lock = threading.Lock()  # records are sent in the order of their numbers
        self._next = standing  # state of the log after the sent records, except for the offset
        self._last_sent = uptime()
        self._last_round: Round | None = None
        self._released = False
        self._poll_lock = threading.Lock()  # held to process acknowledgements; guards the next fields
        self._number, self._offset = standing.number, standing.offset
        self._acknowledged: dict[int, int] = {}
        self._sent: deque[_Sent] = deque()
        self.standing = standing  # the state after the newest round that counts
        self._waiting = 0  # approximate number of waiting callers: they process acknowledgements, not the beat thread
        self._failure_lock = threading.Lock()
        self.failure: EscrowError | None = None  # why nothing is sent any more: Fenced(FENCED), or Corrupt
        self._stopped = threading.Event()
        self._beat_thread: threading.Thread | None = None
        self.proved_at = self._last_sent  # when the newest record known to count was sent: we still owned the log then
        self.gaps = 0  # number of offset gaps that were read

    # Sending

    def send_frames(self, frames: Iterable[Sequence[memoryview]]) -> Round:
        """Send whole frames, each in chunks, the first with the header; copied once. Raises Misuse(BAD_ARGUMENT),
        sending nothing, if they are not the next ones of the log."""
        with self._send_lock:
            self._check()
            *first, (type, payload, after) = self._arrange(frames)
            for part in first:
                self._send(*part, None)
            return self._finish(type, payload, after)

    def send_act(self, data: bytes) -> Round:
        """Send bytes of the record of operator actions, which must follow those sent before."""
        with self._send_lock:
            self._check()
            *parts, last = records.cut([memoryview(data)])
            for part in parts:
                self._send(RecordType.PART, part, self._next, None)
            after = msgspec.structs.replace(self._next, act_bytes=self._next.act_bytes + len(data))
            return self._finish(RecordType.ACT, last, after)

    def beat(self) -> Round:
        with self._send_lock:
            self._check()
            return self._beat()

    def release(self, timeout: float = 5.0) -> Standing:
        """Send a release: another node claims at once, nothing can be sent afterwards. Raises as :meth:`Round.wait`."""
        with self._send_lock:
            self._check()
            last = self._finish(RecordType.RELEASE, [], self._next)
            self._released = True
        return last.wait(timeout)

    def confirm(self, timeout: float) -> None:
        """Return once a record sent after this call began counts: no other node claimed the log before the call. Raises
        as :meth:`Round.wait`."""
        began = uptime()
        with self._send_lock:
            self._check()
            last = self._last_round if self._last_sent > began else None
            last = last or self._beat()
        last.wait(timeout)

    def _beat(self) -> Round:
        beat = Beat(self._owned.url, self._replicas())
        return self._finish(RecordType.BEAT, [msgspec.json.encode(beat)], self._next)

    def _arrange(self, source: Iterable[Sequence[memoryview]]) -> list[_Record]:
        """Group frames into records with the state after each: whole ones as they fit; larger ones are cut."""
        result: list[_Record] = []
        now, pending, size = self._next, list[memoryview](), 0
        for chunks in source:
            frame = frames.read_header(chunks[0], 0)
            if (frame.sequence, frame.position) != (now.sequence, now.position):
                message = f"frame {frame.sequence}, position {frame.position}"
                raise Misuse(Code.BAD_ARGUMENT, f"{message}: the log stands at {now.sequence}, {now.position}")
            if pending and size + frame.frame_bytes > LARGEST_PAYLOAD:
                result.append((RecordType.FRAMES, pending, now))
                pending, size = [], 0
            before = now
            sequence, position = now.sequence + 1, now.position + frame.rows
            now = msgspec.structs.replace(now, sequence=sequence, position=position, frame_epoch=frame.epoch)
            pending += chunks
            size += frame.frame_bytes
            if size > LARGEST_PAYLOAD:
                *parts, last = records.cut(pending)
                result += [(RecordType.PART, part, before) for part in parts]
                result.append((RecordType.FRAMES, last, now))
                pending, size = [], 0
        if pending:
            result.append((RecordType.FRAMES, pending, now))
        if not result:
            raise Misuse(Code.BAD_ARGUMENT, "no frame to send")
        return result

    def _finish(self, type: RecordType, payload: Sequence[Payload], after: Standing) -> Round:
        self._last_round = Round(self, self._next.number)
        self._send(type, payload, after, self._last_round)
        return self._last_round

    def _send(self, type: RecordType, payload: Sequence[Payload], after: Standing, ends: Round | None) -> None:
        """Send a record under the next number. ``after``: state of the log after it, except for its own number;
        ``ends``: the round that it completes, if any."""
        now = self._next
        place = {name: getattr(now, name) for name in ("shard", "epoch", "nonce", "number", "sequence")}
        raw = records.pack(type, *payload, **place)
        after = msgspec.structs.replace(after, number=now.number + 1)
        self._last_sent = uptime()
        self._sent.append(_Sent(now.number, self._last_sent, after, ends))  # before it can be acknowledged
        try:
            self._partition.produce(now.number, raw)
        except BaseException as problem:  # it is unknown whether it will be stored
            raise self._fail(problem) from problem
        self._next = after

    # Waiting

    def _await(self, round: Round, timeout: float | None) -> Standing:
        deadline = uptime() + (self._patience if timeout is None else timeout)
        self._waiting += 1
        try:
            while round.standing is None:
                if self.failure is not None:
                    raise self._copy_error(self.failure)
                left = deadline - uptime()
                if left <= 0 and timeout is None:
                    raise self._fail_late()
                if left <= 0:
                    raise error(Code.TIMED_OUT, f"{self._partition.name} {_LATE} within {timeout:g} s")
                if self._poll_lock.acquire(timeout=left):
                    try:
                        if round.standing is None and self.failure is None:
                            self._pump(left)
                    finally:
                        self._poll_lock.release()
            return round.standing
        finally:
            self._waiting -= 1

    def _pump(self, timeout: float) -> None:
        """Process acknowledgements, waiting up to ``timeout`` seconds for the first, and mark the records that these
        prove to count. An error ends the channel."""
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
        """Mark our next record as counting, at the next offset, and complete its round if it is the last one."""
        sent = self._sent.popleft()
        del self._acknowledged[sent.number]
        self._number, self._offset = self._number + 1, self._offset + 1
        self.proved_at = sent.at
        if sent.ends is not None:
            self.standing = sent.ends.standing = msgspec.structs.replace(sent.after, offset=self._offset)

    def _read_gap(self, unread: int) -> None:
        """Read the records between our last one that counts and the next, at offset ``unread`` (UNKNOWN_OFFSET: not
        known): skip void ones; a claim ends the channel."""
        end = END if unread == UNKNOWN_OFFSET else unread
        if end < self._offset:
            raise error(Code.LOG_FAILED, f"a record was acknowledged at offset {end}, after one at {self._offset - 1}")
        self.gaps += 1
        deadline = uptime() + self._patience
        while self._offset < end:
            found = self._partition.read(self._offset, end, _SLICE)
            if uptime() > deadline or (not found and self._stopped.is_set()):
                message = f"the records from offset {self._offset} on could not be read for {self._patience:g} s"
                raise error(Code.LOG_FAILED, message, _UNKNOWN)
            for offset, raw in found:
                if records.is_foreign(raw):  # not ours: our offsets are known, or a number will be missing
                    self._offset = offset + 1
                    warn_foreign(self._partition.name, offset)
                    continue
                header, _, claim = examine(offset, raw)
                verdict, _ = judge_record(msgspec.structs.replace(self._owned, number=self._number), header, claim)
                if verdict is Verdict.CLAIMS and claim is not None:
                    raise fenced_error(offset, claim.url)
                if verdict is Verdict.BREAKS:
                    message = f"records {self._number} to {header.number - 1} of ours are missing"
                    raise records.damage_error(offset, message)
                if verdict is Verdict.COUNTS:  # the one acknowledged without an offset
                    self._acknowledged[self._number] = end = offset
                    break
                self._offset = offset + 1
        self._partition.rest()

    # Beating

    def start(self) -> None:
        """Start the thread that sends a beat after a pause in sending; from now on only gaps are read."""
        self._partition.rest()
        self._beat_thread = threading.Thread(target=self._beat_loop, name="escrowmq-beats", daemon=True)
        self._beat_thread.start()

    def close(self) -> None:
        """Stop beating; waiting and later calls raise Unknown(CLOSED). The partition stays open. Idempotent."""
        self._stopped.set()
        if self._beat_thread is not None and self._beat_thread is not threading.current_thread():
            self._beat_thread.join()
        self._fail(error(Code.CLOSED, "the log is closed"))

    def _beat_loop(self) -> None:
        while not self._stopped.wait(self._beat_seconds / 4) and self.failure is None:
            now = uptime()
            if not self._sent and now - self._last_sent >= self._beat_seconds * 3 / 4:
                with suppress(EscrowError):  # the failure is recorded
                    self.beat()
            if not self._sent or self._waiting:
                continue
            if self._poll_lock.acquire(blocking=False):
                try:
                    self._pump(_SLICE)
                finally:
                    self._poll_lock.release()
            if self._sent and now - self._sent[0].at > self._patience:
                self._fail_late()

    # Failing

    def _check(self) -> None:
        if self.failure is not None:
            raise self._copy_error(self.failure)
        if self._released:
            raise error(Code.CLOSED, "the log was released")

    def _fail(self, problem: BaseException) -> EscrowError:
        """End the channel with ``problem``, unless it failed before; return a copy of the first failure."""
        if not isinstance(problem, EscrowError):
            problem = error(Code.LOG_FAILED, f"sending to {self._partition.name} broke off: {problem!r}", _UNKNOWN)
        elif problem.code is Code.RANGE_PURGED:  # only an owner deletes records
            problem = fenced_error(self._offset, "another node")
        elif problem.code not in _KEPT_CODES:
            problem = error(Code.LOG_FAILED, f"{problem.code.name}: {problem.message}", _UNKNOWN)
        with self._failure_lock:
            if self.failure is None:
                self.failure = problem
        return self._copy_error(self.failure)

    def _fail_late(self) -> EscrowError:
        message = f"{self._partition.name} {_LATE} for {self._patience:g} s"
        return self._fail(error(Code.LOG_FAILED, message, _UNKNOWN))

    @staticmethod
    def _copy_error(failure: EscrowError) -> EscrowError:
        return error(failure.code, failure.message, failure.hint)


def claim(
    partition: Partition,
    fold: Fold,
    *,
    url: str,
    version: str = "",
    silence: float = 0.0,
    seed: tuple[int, int] | None = None,
    on_record: Callable[[Taken], object] = lambda _: None,
    timeout: float = CLAIM_SECONDS,
    **options: Any,
) -> Channel:
    """Claim the log of ``partition`` and fold up to the claim; ``on_record`` gets each record read, the claim last.
    ``url``: address of this node. ``silence``: seconds without a sign of it after which others may claim. ``seed``:
    shard and salt for a new log, random by default; if another node created it first, its own apply. ``options``: those
    of :class:`Channel`. Raises Unknown(TIMED_OUT), Corrupt(DAMAGED, NEWER_FORMAT, LOG_FAILED). After an error the
    partition must be closed: the claim may still arrive."""
    deadline = monotonic() + timeout
    seed = seed or (secrets.randbits(32) or 1, secrets.randbits(64))
    if not fold.standing.shard:  # the log's creator chose shard and salt; a claim with others would be void
        _, end = partition.ends(timeout)
        _follow(partition, fold, 0, end, on_record, deadline)
    while True:
        nonce = secrets.randbits(64) or 1
        known = fold.standing
        shard, salt = (known.shard, known.salt) if known.shard else seed
        request = Claim(salt=salt, url=url, version=version, silence=silence)
        partition.produce(0, records.pack_claim(request, shard=shard, nonce=nonce, sequence=known.sequence))
        reach("kafka.claim_sent")
        offset = _acknowledged(partition, deadline)
        if offset != UNKNOWN_OFFSET and offset < fold.standing.offset:
            message = f"it is the claim, but records up to {fold.standing.offset} were read: {partition.name} lost some"
            raise records.damage_error(offset, message)
        _follow(partition, fold, nonce, END if offset == UNKNOWN_OFFSET else offset + 1, on_record, deadline)
        if fold.standing.nonce == nonce:
            reach("kafka.claimed")
            return Channel(partition, fold.standing, **options)
        if known.shard:  # void only if another node chose the same number
            raise fenced_error(fold.standing.offset - 1, fold.standing.url)


def _acknowledged(partition: Partition, deadline: float) -> int:
    """Wait for the acknowledgement of the claim, the only record sent; return its offset."""
    while monotonic() < deadline:
        for _, offset in partition.acknowledged(_SLICE):
            return offset
    raise _timeout_error(partition)


def _follow(
    partition: Partition, fold: Fold, nonce: int, end: int, on_record: Callable[[Taken], object], deadline: float
) -> None:
    """Fold records up to offset ``end``, or to the claim with that nonce if it is earlier; ``on_record`` gets each.
    Raises Unknown(TIMED_OUT)."""
    while fold.standing.offset < end:
        found = partition.read(fold.standing.offset, end, _SLICE)
        if not found and monotonic() > deadline:
            raise _timeout_error(partition)
        for at, raw in found:
            taken = fold.take(at, raw)
            on_record(taken)
            if taken.header.nonce == nonce and taken.type == RecordType.CLAIM:
                return


def _timeout_error(partition: Partition) -> Exception:
    hint = "is Kafka up, and are enough replicas in sync?"
    return error(Code.TIMED_OUT, f"{partition.name} did not answer in time", hint)


def warn_foreign(partition: str, offset: int) -> None:
    """Warn operators of a skipped record of another program."""
    message = f"offset {offset} of {partition} was written by another program and is skipped: see Kafka's access rights"
    tell(logging.WARNING, "foreign_record", message, partition=partition, offset=offset)


def fenced_error(offset: int, url: str) -> EscrowError:
    """Return the error Fenced(FENCED) for a claim of the node at ``url``, found at ``offset``."""
    message = f"another node claimed the log, at offset {offset} of its partition: {url}"
    return error(Code.FENCED, message, "this node rejects requests; it can follow the other as a standby")


_LATE = "has not acknowledged a record"
_UNKNOWN = "the last records may or may not be stored: reopen the log to find out"
_KEPT_CODES = frozenset({Code.FENCED, Code.DAMAGED, Code.NEWER_FORMAT, Code.LOG_FAILED, Code.CLOSED})
