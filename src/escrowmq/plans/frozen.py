"""The frozen set of a plan: an Arrow file, written once, in batches, and the digest over the identity of its rows.

The digest is SHA-256 over one line of JSON (the act, its settings, and the names of the identity columns), then batch
by batch: the number of rows as 8 bytes, and of each identity column its values: integers as 8 bytes each; texts as
their lengths in bytes, 8 bytes each (-1: null), then their UTF-8. All numbers are little-endian. The order of the rows
counts.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from escrowmq.errors import Code, Corrupt, EscrowError, error
from escrowmq.platform.disk import disk_error

NAME = "set.arrow"
PLACE = "place"
"""Column with the place of a row: the shard of its broker. All rows of a batch have one place."""
BATCH_ROWS = 4096
"""Rows per batch of the file. An act on a full batch is a record of some hundred kilobytes."""


class Digest:
    """Computes the digest of a set, batch by batch."""

    def __init__(self, act: str, settings: Mapping[str, Any], identity: Sequence[str]) -> None:
        self._identity = tuple(identity)
        header = {"act": act, "settings": dict(settings), "identity": list(identity)}
        self._hash = hashlib.sha256(json.dumps(header, sort_keys=True, ensure_ascii=False).encode() + b"\n")

    def add(self, batch: pa.RecordBatch) -> None:
        """Add the next batch of the set."""
        self._hash.update(batch.num_rows.to_bytes(8, "little"))
        for name in self._identity:
            column = batch.column(name)
            if pa.types.is_integer(column.type):
                self._hash.update(np.asarray(column).astype("<i8").tobytes())
                continue
            texts = column.cast(pa.large_string())
            lengths = pc.fill_null(pc.binary_length(texts), -1)
            self._hash.update(np.asarray(lengths).astype("<i8").tobytes())
            self._hash.update("".join(text for text in texts.to_pylist() if text is not None).encode())

    def hex(self) -> str:
        """Return 64 hex digits."""
        return self._hash.hexdigest()


def write(folder: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Write a set durably; yield each written batch, of one place, with at most :data:`BATCH_ROWS` rows. ``batches``
    may be of any size, each of one place. Raises Overloaded(DISK_FULL) and similar errors."""
    path = folder / NAME
    options = pa.ipc.IpcWriteOptions(compression="lz4" if pa.Codec.is_available("lz4") else None)
    try:
        with path.open("xb") as file:
            with pa.ipc.new_file(file, schema, options=options) as writer:
                for batch in _pack(batches, schema):
                    writer.write_batch(batch)
                    yield batch
            file.flush()
            os.fsync(file.fileno())
    except OSError as problem:
        raise disk_error(problem) from problem


def _pack(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the same rows, regrouped into full batches per place, except its last; buffers at most one batch per
    place."""
    pending_by_place: dict[int, list[pa.RecordBatch]] = {}
    for batch in batches:
        if not batch.num_rows:
            continue
        place = batch.column(PLACE)[0].as_py()
        pending = pending_by_place.setdefault(place, [])
        pending.append(batch)
        if sum(one.num_rows for one in pending) >= BATCH_ROWS:
            joined = _join(pending, schema)
            whole = joined.num_rows - joined.num_rows % BATCH_ROWS
            yield from (joined.slice(first, BATCH_ROWS) for first in range(0, whole, BATCH_ROWS))
            pending_by_place[place] = [joined.slice(whole)] if whole < joined.num_rows else []
    yield from (_join(pending, schema) for pending in pending_by_place.values() if pending)


def _join(batches: list[pa.RecordBatch], schema: pa.Schema) -> pa.RecordBatch:
    return pa.Table.from_batches(batches, schema).combine_chunks().to_batches()[0]


class FrozenSet:
    """Reads a set. Rows are numbered from 0, in the order of the file."""

    def __init__(self, path: Path) -> None:
        try:
            self._map = pa.memory_map(str(path), "r")
            self._file = pa.ipc.open_file(self._map)
            counts = [self._file.get_batch(number).num_rows for number in range(self._file.num_record_batches)]
        except FileNotFoundError:
            raise _unreadable(path, "the file is missing") from None
        except (pa.ArrowException, OSError) as problem:
            raise _unreadable(path, str(problem)) from problem
        self._path = path
        self.schema: pa.Schema = self._file.schema
        self._starts = np.concatenate([[0], np.cumsum(np.array(counts, np.int64))])
        self._held: tuple[int, pa.RecordBatch] | None = None

    def __len__(self) -> int:
        return int(self._starts[-1])

    def close(self) -> None:
        """Close the file."""
        self._held = None
        self._map.close()

    def batch_from(self, first: int, most: int) -> pa.RecordBatch:
        """Return at most ``most`` rows from ``first`` on, all from one batch of the file, so of one place."""
        number = int(np.searchsorted(self._starts, first, side="right")) - 1
        return self._batch(number).slice(first - int(self._starts[number]), most)

    def batches(self, first: int = 0, end: int | None = None) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield the rows from ``first`` to before ``end``: the number of each batch's first row, and the batch."""
        last = len(self) if end is None else min(end, len(self))
        while first < last:
            batch = self.batch_from(first, last - first)
            yield first, batch
            first += batch.num_rows

    def digest(self, act: str, settings: Mapping[str, Any], identity: Sequence[str]) -> str:
        """Compute the digest of the current file content."""
        digest = Digest(act, settings, identity)
        for number in range(self._file.num_record_batches):
            digest.add(self._batch(number))
        return digest.hex()

    def _batch(self, number: int) -> pa.RecordBatch:
        if self._held is None or self._held[0] != number:
            try:
                batch = self._file.get_batch(number)
                batch.validate(full=True)
            except (pa.ArrowException, OSError) as problem:
                raise _unreadable(self._path, str(problem)) from problem
            self._held = number, batch
        return self._held[1]


@contextmanager
def open_set(folder: Path) -> Iterator[FrozenSet]:
    """Open the set in a plan's folder. Raises Corrupt(DAMAGED) if it cannot be read."""
    with closing(FrozenSet(folder / NAME)) as found:
        yield found


def file_hash(folder: Path) -> str:
    """Return the SHA-256 of the whole file, 64 hex digits."""
    try:
        with (folder / NAME).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as problem:
        raise _unreadable(folder / NAME, str(problem)) from problem


def _unreadable(path: Path, reason: str) -> EscrowError:
    return Corrupt(Code.DAMAGED, f"the frozen set {path} cannot be read: {reason:.300}", "make a new plan")


def changed_error(plan: str) -> EscrowError:
    """Return the error for a set that differs from the frozen one."""
    text = f"the frozen set of plan {plan} was changed after the plan was made: its digest differs"
    return error(Code.DAMAGED, text, "nothing was done; make a new plan")
