"""The file ``acts.journal`` of a data folder: records are appended, made durable before the act is done, and never
changed.

Beside it ``acts.last`` has the number and the hash of the last record, written after it. A line that a crash left
without its end was nobody's: it is cut off when the next record is written. No retention removes records. A data folder
without acts has neither file.
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
_PIECE, _FEW = 1 << 20, 4096
PAGE_BYTES = 8 << 20
"""Of one listing: an act of 100,000 ids takes some megabytes."""


@dataclass(frozen=True, slots=True)
class Listed:
    """An act with its end, if it has one. ``hash``: of the record of its begin."""

    begun: Record
    ended: Record | None
    hash: str


@dataclass(slots=True)
class Done:
    """The result of an operator action, set before the block that runs it ends."""

    ended: dict[str, Any] = field(default_factory=dict)


class Journal:
    """The acts of one shard. Thread-safe; ``clock`` gives microseconds since 1970.

    A journal that only reads (of a folder without a broker) has the same methods but for :meth:`act`.
    """

    def __init__(self, disk: Disk, shard: int) -> None:
        self._disk = disk
        self._shard = shard
        self._lock = threading.Lock()
        self._file: File | None = None
        self._acts = array("q")  # number of each act,
        self._begins = array("q")  # where its record begins,
        self._ends = array("q")  # and where that of its end begins; -1 without one
        self._size = 0
        self._torn = False
        self._hash = origin(shard)
        self._number = 0
        self._open: dict[int, Record] = {}
        self._under_way: set[int] = set()
        self._failure: EscrowError | None = None
        self.ship: Callable[[bytes], None] | None = None
        """Of a log that others follow: called with the line of a record, on the thread of the act, before the line is
        written here. It returns when the line is durable elsewhere; what it raises leaves that open, so nothing is
        recorded any more."""

    @property
    def failure(self) -> EscrowError | None:
        """Why nothing is recorded any more, so that no act is done until the shard is opened anew."""
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
        """Record an act, durably, before the block does it; and afterwards what came of it, which the block puts into
        the :class:`Done` that it is given, or the error that it raised.

        Raises Overloaded(DISK_FULL, OUT_OF_RESOURCES) or Unknown(SHARD_STOPPED) if the act cannot be recorded: the
        block is not entered. If only its end cannot be recorded the act stays open, and what became of it is found out
        when the shard is opened next.
        """
        with self._lock:
            begun = Record(self._next(), now_us(), act, cut(by), cut(why), dict(what))
            self._append(begun)
            self._under_way.add(begun.number)
        reach("acts.recorded")
        done = Done()
        try:
            yield done
        except EscrowError as problem:
            if problem.code is Code.SHARD_STOPPED:  # nobody knows
                raise
            done.ended = {"refused": problem.code.name}
            self._end(begun, done, now_us)
            raise
        else:
            reach("acts.done")
            self._end(begun, done, now_us)
        finally:
            with self._lock:
                self._under_way.discard(begun.number)

    def _end(self, begun: Record, done: Done, now_us: Callable[[], int]) -> None:
        with self._lock, suppress(EscrowError):
            self._append(Record(self._next(), now_us(), of=begun.number, ended=done.ended))

    def resolve(self, found: Callable[[Record], dict[str, Any]], now_us: int) -> int:
        """Give every act that a broker's end left without an end what ``found`` finds out about it; how many."""
        with self._lock:
            self._read()
            left = [record for number, record in self._open.items() if number not in self._under_way]
            for record in left:
                self._append(Record(self._next(), now_us, of=record.number, ended=found(record)))
            return len(left)

    def _next(self) -> int:
        self._read()
        return self._number + 1

    def _append(self, record: Record) -> None:
        if self._failure is not None:
            raise error(Code.SHARD_STOPPED, self._failure.message)
        line, digest = record.sealed(self._hash)
        try:
            if self._file is None:
                self._file = self._disk.open(NAME, create=True)
                self._disk.sync_folder()
            if self._torn:
                self._file.truncate(self._size)
            self._torn = True
            if self.ship is None:
                self._file.write_at(self._size, [line])
        except (OSError, MemoryError) as problem:
            raise disk_error(problem) from problem
        try:
            if self.ship is not None:
                self.ship(line)
                self._file.write_at(self._size, [line])
            self._file.sync()
        except (OSError, EscrowError) as problem:  # nobody knows what the record holds now
            self._failure = error(Code.SHARD_STOPPED, f"the record of acts failed: {problem}")
            logger.error("%s", self._failure.message)
            raise self._failure from problem
        self._torn = False
        self._took(record, len(line))
        self._number, self._hash = record.number, digest
        self._save_last()

    def save_last(self) -> None:
        """Make the file beside the record again: of a copy, it is derived."""
        with self._lock:
            self._read()
            if self._number:
                self._save_last()

    def _save_last(self) -> None:
        try:
            replace_file(self._disk, LAST, [[f"{self._number} {self._hash}\n".encode()]])
        except OSError as problem:  # the record stands; the file beside it says more with the next one
            logger.warning("the file %s could not be written: %s", LAST, problem)

    def follow(self, begin: int, lines: bytes | memoryview) -> None:
        """Take in whole lines that were recorded elsewhere, and begin at byte ``begin`` of the record. Corrupt(DAMAGED)
        if they do not follow what there is; Overloaded or Corrupt(LOG_FAILED) if they cannot be written."""
        with self._lock:
            self._read()
            if begin != self._size or bytes(lines[-1:]) != b"\n":
                what = f"the record of acts has {self._size} bytes, and lines at {begin} are to follow"
                raise error(Code.DAMAGED, what)
            try:
                if self._file is None:
                    self._file = self._disk.open(NAME, create=True)
                self._file.truncate(begin)
                self._file.write_at(begin, [lines])
                self._file.sync()
            except (OSError, MemoryError) as problem:
                raise disk_error(problem) from problem
            self._torn = False
            for line in bytes(lines).split(b"\n")[:-1]:
                self._took_line(line)
            self._save_last()

    def read_bytes(self, begin: int, size: int) -> bytes:
        """Return bytes of the whole lines, from ``begin`` on."""
        with self._lock:
            self._read()
            size = min(size, self._size - begin)
            try:
                with closing(self._disk.open(NAME)) as file:
                    return file.read_at(begin, size) if size > 0 else b""
            except FileNotFoundError:
                return b""
            except OSError as problem:
                raise disk_error(problem) from problem

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    # Reading

    def listed(self, after: int = 0, limit: int = 1000, *, newest: bool = False) -> list[Listed]:
        """Return the first acts with numbers above ``after``, or the ``newest``, in their order: at most ``limit``,
        and no more than :data:`PAGE_BYTES` bytes of them but for one act that is larger. What cannot be read as a
        record is left out: see :meth:`verify`."""
        found: list[Listed] = []
        size = 0
        with self._lock:
            self._read()
            start = bisect_right(self._acts, after)
            if newest:
                start = max(start, len(self._acts) - limit)
            places = list(zip(self._begins[start : start + limit], self._ends[start : start + limit], strict=True))
            for begin, end in reversed(places) if newest else places:
                lines = self._line_at(begin), self._line_at(end) if end >= 0 else b""
                size += sum(map(len, lines))
                if found and size > PAGE_BYTES:
                    break
                with suppress(ValueError):
                    record, _, digest = parse(lines[0])
                    found.append(Listed(record, parse(lines[1])[0] if end >= 0 else None, digest))
        return found[::-1] if newest else found

    def has_after(self, number: int) -> bool:
        """Return whether there are acts with higher numbers."""
        with self._lock:
            return bool(self._acts) and self._acts[-1] > number

    def extent(self) -> tuple[int, int, str]:
        """Return the bytes of the whole lines, the number of the last record and its hash, as far as a copy counts."""
        with self._lock:
            self._read()
            return self._size, self._number, self._hash

    def verify(self) -> tuple[int, str, list[Break]]:
        """Return how many records there are, the hash of the last one, and every place where the chain is broken."""
        with self._lock:
            self._read()
            count, breaks = verify(self._lines(0, self._size), self._shard, self._last())
            if self._file is not None and next(self._lines(self._size), None) is not None:
                breaks.append(Break(count + 1, None, "somebody put this behind the last record"))
            return count, self._hash, breaks

    def _line_at(self, begin: int) -> bytes:
        return next(self._lines(begin), b"")

    def _lines(self, begin: int, end: int = 1 << 62) -> Iterator[bytes]:
        """Yield the whole lines between two places, without their ends. Raises Overloaded or Corrupt if the disk
        fails."""
        rest, size = b"", _FEW if begin else _PIECE
        try:
            with closing(self._disk.open(NAME)) as file:
                while piece := file.read_at(begin, min(size, end - begin)):
                    begin, size = begin + len(piece), _PIECE
                    *whole, rest = (rest + piece).split(b"\n")
                    yield from whole
        except FileNotFoundError:
            return
        except OSError as problem:
            raise disk_error(problem) from problem

    def _last(self) -> tuple[int, str] | None:
        try:
            number, digest = read_file(self._disk, LAST).decode().split()
            return int(number), digest
        except (OSError, ValueError):
            return None

    def _read(self) -> None:
        """Read the lines behind the known ones: at first all; of a folder in use, what was added since."""
        try:
            if self._file is not None or NAME not in self._disk.list():
                return
        except OSError as problem:
            raise disk_error(problem) from problem
        last = self._last()
        lines = self._lines(self._size)
        ahead = next(lines, None)
        while ahead is not None:
            line, ahead = ahead, next(lines, None)
            if ahead is None and not is_sealed(line) and (last is None or last[0] <= self._number):
                break  # its write was under way when everything stopped, so nobody got an answer
            self._took_line(line)
        self._torn = True  # whatever stands behind the last whole line
        if last is not None and last[0] > self._number:  # somebody cut the end off: the gap is to be seen for ever
            logger.error("of %s records are missing: %d to %d", NAME, self._number + 1, last[0])
            self._number, self._hash = last

    def _took_line(self, line: bytes) -> None:
        """Take in the next whole line, which comes without its end."""
        self._hash = successor(line)
        self._number += 1
        with suppress(ValueError):
            record, _, _ = parse(line)
            self._number = record.number
            self._took(record, 0)
        self._size += len(line) + 1

    def _took(self, record: Record, size: int) -> None:
        """Note where a record stands, ``size`` bytes from the end of what is known on."""
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
