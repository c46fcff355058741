"""Progress of the runs of a plan: an append-only journal, synced before and after each step, and one result per row.

A line of ``progress.journal`` is a checksum (CRC-32, 8 hex digits), a space, and JSON. A crash can damage only the last
line; such a line is discarded. Rows are processed in order, so one number describes the progress; at most the batch
begun last is in doubt. ``results`` has one byte per row: the number of its :class:`~escrowmq.plans.outcomes.Outcome`.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from escrowmq.errors import Code, Corrupt
from escrowmq.plans.outcomes import Outcome, Outcomes, add_counts, count_failures, count_outcomes
from escrowmq.platform.disk import Disk, File, disk_error, read_file
from escrowmq.platform.failpoints import reach

NAME = "progress.journal"
RESULTS = "results"


@dataclass(slots=True)
class History:
    """The content of the journal. Its entries: ``run`` (a run starts), ``begin`` (of a batch, before it is sent),
    ``done`` (its results), ``undone`` (certainly not applied), ``again`` (rows that were done and have failed again),
    ``end`` (of the run)."""

    next: int = 0
    """Number of the next row; all rows before it are processed."""
    outcomes: dict[str, int] = field(default_factory=dict)
    """Number of these rows by outcome."""
    doubt: tuple[int, int] | None = None
    """First row and number of rows of a batch with unknown result."""
    again: int = 0
    """Rows that were done, and failed again soon after."""
    runs: list[Mapping[str, Any]] = field(default_factory=list)
    ended: Mapping[str, Any] | None = None
    """The entry of the last run's end; None while it runs, or if it was killed."""
    size: int = 0
    """Bytes of the intact part of the journal."""

    @property
    def failures(self) -> int:
        """Rows that were not done, plus rows that failed again."""
        return count_failures(self.outcomes) + self.again

    def take(self, entry: Mapping[str, Any]) -> None:
        """Apply one entry."""
        match entry:
            case {"run": _}:
                self.runs.append(entry)
                self.ended = None
            case {"begin": first, "rows": rows}:
                self.doubt = first, rows
            case {"done": first, "rows": rows, "outcomes": outcomes}:
                self.doubt, self.next = None, first + rows
                self.outcomes = add_counts(self.outcomes, outcomes)
            case {"undone": _}:
                self.doubt = None
            case {"again": rows}:
                self.again += rows
            case {"end": _}:
                self.ended = entry


def read(disk: Disk) -> History:
    """Read the history of a plan, also during a run. Raises Corrupt(DAMAGED) if the journal was changed."""
    history = History()
    try:
        content = read_file(disk, NAME)
    except FileNotFoundError:
        return history
    except OSError as problem:
        raise disk_error(problem) from problem
    lines = content.split(b"\n")
    for number, line in enumerate(lines[:-1], 1):
        entry = _parse(line)
        if entry is None:
            if number == len(lines) - 1:  # a crash interrupted its write
                break
            raise Corrupt(Code.DAMAGED, f"line {number} of {NAME} was changed", "make a new plan for the other rows")
        history.take(entry)
        history.size += len(line) + 1
    return history


def _parse(line: bytes) -> dict[str, Any] | None:
    if line[8:9] != b" " or line[:8] != _checksum(line[9:]):
        return None
    with suppress(ValueError):
        entry = json.loads(line[9:])
        return entry if isinstance(entry, dict) else None
    return None


def _checksum(content: bytes) -> bytes:
    return b"%08x" % zlib.crc32(content)


class Progress:
    """Writes the journal and the results of one run, which holds the plan's lock."""

    def __init__(self, disk: Disk, rows: int) -> None:
        self.history = read(disk)
        try:
            self._results: File = disk.open(RESULTS, create=True)
            self._journal: File = disk.open(NAME, create=True)
            if rows:  # a lack of space for all results shows now
                self._results.allocate(rows)
            self._journal.truncate(self.history.size)
            disk.sync_folder()
        except OSError as problem:
            raise disk_error(problem) from problem

    def close(self) -> None:
        """Close the files."""
        self._journal.close()
        self._results.close()

    def record_begin(self, first: int, rows: int) -> None:
        """Record a batch before it is sent. Raises before anything is sent if that fails."""
        self.append({"begin": first, "rows": rows})
        reach("plans.begun")

    def record_done(self, first: int, outcomes: Outcomes, at_us: int) -> None:
        """Record the results of a batch."""
        try:
            self._results.write_at(first, [outcomes.tobytes()])
            self._results.sync()
        except OSError as problem:
            raise disk_error(problem) from problem
        reach("plans.results-written")
        self.append({"done": first, "rows": len(outcomes), "outcomes": count_outcomes(outcomes), "at_us": at_us})
        reach("plans.done")

    def append(self, entry: dict[str, Any]) -> None:
        """Append an entry durably, and apply it to the history; see :class:`History` for the entries."""
        content = json.dumps(entry, ensure_ascii=False).encode()
        line = _checksum(content) + b" " + content + b"\n"
        try:
            self._journal.truncate(self.history.size)  # remove the rest of a failed write
            self._journal.write_at(self.history.size, [line])
            self._journal.sync()
        except OSError as problem:
            raise disk_error(problem) from problem
        self.history.take(entry)
        self.history.size += len(line)


def results(disk: Disk, first: int, rows: int, history: History) -> Outcomes:
    """Return the outcomes of these rows; NONE for rows without a journal entry."""
    found = np.zeros(rows, np.uint8)
    known = max(min(history.next - first, rows), 0)
    if known:
        try:
            with closing(disk.open(RESULTS)) as file:
                stored = file.read_at(first, known)
        except OSError as problem:
            raise Corrupt(Code.DAMAGED, f"the file {RESULTS} of the plan cannot be read: {problem}") from problem
        codes = np.frombuffer(stored, np.uint8)
        if len(codes) < known or (codes > max(Outcome)).any():
            text = f"the file {RESULTS} of the plan was changed"
            raise Corrupt(Code.DAMAGED, text, "the record of acts also has them")
        found[:known] = codes
    return found
