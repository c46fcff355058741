"""The file ``acts.journal`` of a data folder: records are appended durably before the act is applied, and never
changed.

The file ``acts.last`` contains the number and the hash of the last record, and is written after it. An incomplete line
after a crash was never confirmed: the next record overwrites it. Retention removes no records. A data folder without
acts has neither file.
"""

from __future__ import annotations

import logging
import threading
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from escrowmq.acts.chain import Break, Record, cut, is_sealed, origin, parse, successor, verify
from escrowmq.errors import Code, EscrowError, error
from escrowmq.platform.disk import Disk, File, disk_error, read_file, replace_file
from escrowmq.platform.failpoints import reach

logger = logging.getLogger(__name__)

NAME = "acts.journal"
LAST = "acts.last"
_PIECE, _LINE_BYTES = 1 << 20, 4096
PAGE_BYTES = 8 << 20
"""Maximum bytes of one listing: an act of 100,000 ids takes some megabytes."""


@dataclass(frozen=True, slots=True)
class Listed:
    """An act with its end, if it has one. ``hash``: of the record of its start."""

    begun: Record
    ended: Record | None
    hash: str


@dataclass(slots=True)
class Done:
    """Outcome of an act, set before the block that applies it ends."""

    ended: dict[str, Any] = field(default_factory=dict)


@contextmanager
def _disk_errors(*, may_be_missing: bool = False) -> Iterator[None]:
    """Convert errors of the disk; with ``may_be_missing`` a missing file ends the block instead."""
    try:
        yield
    except (OSError, MemoryError) as problem:
        if not (may_be_missing and isinstance(problem, FileNotFoundError)):
            raise disk_error(problem) from problem


class Journal:
    """The acts of one shard. Thread-safe; ``clock`` returns microseconds since 1970. A read-only journal (of a folder
    without a broker) has the same methods except :meth:`act`."""

    def __init__(self, disk: Disk, shard: int) -> None:
        self._disk = disk
        self._shard = shard
        self._lock = threading.Lock()
        self._file: File | None = None
        self._acts = array("q")  # number of each act
        self._begins = array("q")  # position of its record
        self._ends = array("q")  # position of the record of its end; -1 without one
        self._size = 0
        self._torn = False
        self._hash = origin(shard)
        self._number = 0
        self._open: dict[int, Record] = {}
        self._in_progress: set[int] = set()
        self._failure: EscrowError | None = None
        self.ship: Callable[[bytes], None] | None = None
        """For a log with followers: called with the line of a record before it is written here; returns when it is
        durable elsewhere. After an exception that is unknown, so recording stops. Runs on the thread of the act."""

    @property
    def failure(self) -> EscrowError | None:
        """Reason why recording stopped; no act is applied until the shard is reopened."""
        return self._failure

    # Writing

    @contextmanager
    def act(
        self,
        act: str,
        what: Mapping[str, Any],
        now_us: Callable[[], int],
        by: str | None = None,
        why: str | None = None,
    ) -> Iterator[Done]:
        """Record an act durably before the block applies it, and afterwards its outcome from the :class:`Done`, or its
        error.

        Raises Overloaded(DISK_FULL, OUT_OF_RESOURCES) or Unknown(SHARD_STOPPED) if the act cannot be recorded: the
        block is not entered. If only its end cannot be recorded the act stays open, and its outcome is determined when
        the shard is opened next.
        """
        with self._lock:
            begun = Record(self._next_number(), now_us(), act, cut(by), cut(why), dict(what))
            self._append(begun)
            self._in_progress.add(begun.number)
        reach("acts.recorded")
        done = Done()
        try:
            yield done
            reach("acts.done")
            self._end(begun, done.ended, now_us)
        except EscrowError as problem:
            if problem.code is not Code.SHARD_STOPPED:  # then the outcome is unknown
                done.ended = {"refused": problem.code.name}
                self._end(begun, done.ended, now_us)
            raise
        finally:
            with self._lock:
                self._in_progress.discard(begun.number)

    def _end(self, begun: Record, ended: dict[str, Any], now_us: Callable[[], int]) -> None:
        with self._lock, suppress(EscrowError):
            self._append(Record(self._next_number(), now_us(), of=begun.number, ended=ended))

    def resolve(self, found: Callable[[Record], dict[str, Any]], now_us: int) -> int:
        """Record the outcome, from ``found``, of every act that a broker crash left open; return their number."""
        with self._lock:
            self._read_new_lines()
            left = [record for number, record in self._open.items() if number not in self._in_progress]
            for record in left:
                self._append(Record(self._next_number(), now_us, of=record.number, ended=found(record)))
            return len(left)

    def _next_number(self) -> int:
        self._read_new_lines()
        return self._number + 1

    def _append(self, record: Record) -> None:
        if self._failure is not None:
            raise error(Code.SHARD_STOPPED, self._failure.message)
        line, digest = record.sealed(self._hash)
        with _disk_errors():
            if self._file is None:
                self._file = self._disk.open(NAME, create=True)
                self._disk.sync_folder()
            if self._torn:
                self._file.truncate(self._size)
            self._torn = True
            if self.ship is None:
                self._file.write_at(self._size, [line])
        try:
            if self.ship is not None:
                self.ship(line)
                self._file.write_at(self._size, [line])
            self._file.sync()
        except (OSError, EscrowError) as problem:  # the content of the record is unknown now
            self._failure = error(Code.SHARD_STOPPED, f"the record of acts failed: {problem}")
            logger.error("%s", self._failure.message)
            raise self._failure from problem
        self._torn = False
        self._index(record, len(line))
        self._number, self._hash = record.number, digest
        self._save_last()

    def save_last(self) -> None:
        """Rewrite the file beside the record; in a copy it is derived."""
        with self._lock:
            self._read_new_lines()
            if self._number:
                self._save_last()

    def _save_last(self) -> None:
        try:
            replace_file(self._disk, LAST, [[f"{self._number} {self._hash}\n".encode()]])
        except OSError as problem:  # the record is safe; the next one updates the file beside it
            logger.warning("the file %s could not be written: %s", LAST, problem)

    def follow(self, begin: int, lines: bytes | memoryview) -> None:
        """Append complete lines that were recorded elsewhere, at byte ``begin`` of the record. Raises Corrupt(DAMAGED)
        if they do not follow the existing ones; Overloaded or Corrupt(LOG_FAILED) if they cannot be written."""
        with self._lock:
            self._read_new_lines()
            if begin != self._size or bytes(lines[-1:]) != b"\n":
                what = f"the record of acts has {self._size} bytes, but new lines start at {begin}"
                raise error(Code.DAMAGED, what)
            with _disk_errors():
                if self._file is None:
                    self._file = self._disk.open(NAME, create=True)
                self._file.truncate(begin)
                self._file.write_at(begin, [lines])
                self._file.sync()
            self._torn = False
            for line in bytes(lines).split(b"\n")[:-1]:
                self._index_line(line)
            self._save_last()

    def read_bytes(self, begin: int, size: int) -> bytes:
        """Return bytes of complete lines, from ``begin`` on."""
        with self._lock:
            self._read_new_lines()
            size = min(size, self._size - begin)
            with _disk_errors(may_be_missing=True), closing(self._disk.open(NAME)) as file:
                return file.read_at(begin, size) if size > 0 else b""
            return b""

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    # Reading

    def listed(self, after: int = 0, limit: int = 1000, *, newest: bool = False) -> list[Listed]:
        """Return acts with numbers above ``after``, or the ``newest``, in order: at most ``limit``, and at most
        :data:`PAGE_BYTES` unless the first is larger. Unreadable records are omitted: see :meth:`verify`."""
        found: list[Listed] = []
        size = 0
        with self._lock:
            self._read_new_lines()
            start = bisect_right(self._acts, after)
            if newest:
                start = max(start, len(self._acts) - limit)
            places = list(zip(self._begins[start : start + limit], self._ends[start : start + limit], strict=True))
            for begin, end in reversed(places) if newest else places:
                lines = [next(self._lines(at), b"") if at >= 0 else b"" for at in (begin, end)]
                size += sum(map(len, lines))
                if found and size > PAGE_BYTES:
                    break
                with suppress(ValueError):
                    record, _, digest = parse(lines[0])
                    found.append(Listed(record, parse(lines[1])[0] if end >= 0 else None, digest))
        return found[::-1] if newest else found

    def has_after(self, number: int) -> bool:
        """Decide whether there are acts with higher numbers."""
        with self._lock:
            return bool(self._acts) and self._acts[-1] > number

    def extent(self) -> tuple[int, int, str]:
        """Return the bytes of the complete lines, and number and hash of the last record: the valid part for a copy."""
        with self._lock:
            self._read_new_lines()
            return self._size, self._number, self._hash

    def verify(self) -> tuple[int, str, list[Break]]:
        """Return the number of records, the hash of the last one, and every place where the chain is broken."""
        with self._lock:
            self._read_new_lines()
            count, breaks = verify(self._lines(0, self._size), self._shard, self._read_last())
            if self._file is not None and next(self._lines(self._size), None) is not None:
                breaks.append(Break(count + 1, None, "it was appended after the last record"))
            return count, self._hash, breaks

    def _lines(self, begin: int, end: int = 1 << 62) -> Iterator[bytes]:
        """Yield complete lines between two positions, without newlines. Raises the errors of a failed disk."""
        rest, size = b"", _LINE_BYTES if begin else _PIECE
        with _disk_errors(may_be_missing=True), closing(self._disk.open(NAME)) as file:
            while piece := file.read_at(begin, min(size, end - begin)):
                begin, size = begin + len(piece), _PIECE
                *whole, rest = (rest + piece).split(b"\n")
                yield from whole

    def _read_last(self) -> tuple[int, str] | None:
        try:
            number, digest = read_file(self._disk, LAST).decode().split()
            return int(number), digest
        except (OSError, ValueError):
            return None

    def _read_new_lines(self) -> None:
        """Process lines after the known ones: at first all of them; in a folder in use the new ones."""
        with _disk_errors():
            if self._file is not None or NAME not in self._disk.list():
                return
        last = self._read_last()
        lines = self._lines(self._size)
        ahead = next(lines, None)
        while ahead is not None:
            line, ahead = ahead, next(lines, None)
            if ahead is None and not is_sealed(line) and (last is None or last[0] <= self._number):
                break  # a crash interrupted its write, so it was never confirmed
            self._index_line(line)
        self._torn = True  # due to bytes after the last complete line
        if last is not None and last[0] > self._number:  # the end was removed: keep the gap visible
            logger.error("records of %s are missing: %d to %d", NAME, self._number + 1, last[0])
            self._number, self._hash = last

    def _index_line(self, line: bytes) -> None:
        """Process the next complete line, without its newline."""
        self._hash = successor(line)
        self._number += 1
        with suppress(ValueError):
            record, _, _ = parse(line)
            self._number = record.number
            self._index(record, 0)
        self._size += len(line) + 1

    def _index(self, record: Record, size: int) -> None:
        """Index a record that starts ``size`` bytes before the end of the known part."""
        if record.of is None:
            self._acts.append(record.number)
            self._begins.append(self._size)
            self._ends.append(-1)
            self._open[record.number] = record
        else:
            self._open.pop(record.of, None)
            at = bisect_right(self._acts, record.of) - 1
            if at >= 0 and self._acts[at] == record.of:
                self._ends[at] = self._size
        self._size += size
