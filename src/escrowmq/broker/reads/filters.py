"""Filters and column selection of a read: rows by tag, key and time, only the requested columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from escrowmq.errors import Code, error
from escrowmq.ledger.columns.arrays import Bools, Int64s
from escrowmq.wire import DAMAGED_COLUMN, ReadRequest, read_schema

MAX_TAGS = 1000  # tags that one read may name


@dataclass(frozen=True, slots=True)
class Filter:
    """Rows with one of ``tags``, with ``key``, stored at ``from_us`` or later and before ``until_us``; None: any.
    ``group``: those of a consumer group, in views of groups."""

    tags: tuple[str, ...] | None = None
    key: str | None = None
    from_us: int | None = None
    until_us: int | None = None
    group: str | None = None

    @classmethod
    def of(cls, request: ReadRequest) -> Filter:
        """Return the filter of a read request. Raises Rejected(BAD_REQUEST) for an invalid number of tags."""
        tags = tuple(dict.fromkeys(request["tags"])) if "tags" in request else None
        if tags is not None and not 0 < len(tags) <= MAX_TAGS:
            raise error(Code.BAD_REQUEST, f"'tags' must be 1 to {MAX_TAGS} tags", "leave it out to get all messages")
        times = request.get("stored_from_us"), request.get("stored_until_us")
        return cls(tags, request.get("key"), *times, request.get("group"))

    @property
    def active(self) -> bool:
        """Return whether the filter can exclude any row."""
        return self != Filter()

    @property
    def timed(self) -> bool:
        """Return whether the filter selects by time."""
        return self.from_us is not None or self.until_us is not None

    @property
    def columns(self) -> list[str]:
        """The stored columns by which :meth:`content` selects."""
        return [name for name, value in (("tag", self.tags), ("key", self.key)) if value is not None]

    def times(self, stored_us: Int64s) -> Bools:
        """Return a mask of these times (microseconds): whether the filter selects rows stored then."""
        mask = np.ones(len(stored_us), bool)
        if self.from_us is not None:
            mask &= stored_us >= self.from_us
        if self.until_us is not None:
            mask &= stored_us < self.until_us
        return mask

    def content(self, rows: pa.RecordBatch) -> Bools:
        """Return a mask of these rows: whether they have one of the filter's tags, and its key. Time and group are not
        checked here."""
        mask = np.ones(rows.num_rows, bool)
        for name, values in (("tag", self.tags), ("key", None if self.key is None else (self.key,))):
            if values is not None:
                found = pc.is_in(rows.column(name), value_set=pa.array(values, pa.utf8()))
                mask &= found.to_numpy(zero_copy_only=False)
        return mask


def chosen_columns(source: str, columns: list[str] | None) -> pa.Schema:
    """Return the schema of the requested columns of a source (topic or view), in their order; None: all of its own.
    Raises Rejected(BAD_REQUEST) for unknown ones."""
    schema = read_schema(source, damaged=columns is not None and DAMAGED_COLUMN in columns)
    names = schema.names if columns is None else columns
    unknown = [name for name in names if name not in schema.names]
    if unknown:
        raise error(Code.BAD_REQUEST, f"no columns {unknown}", f"there are {', '.join(schema.names)}")
    return pa.schema([schema.field(name) for name in names])


def limited(batches: Iterator[pa.RecordBatch], most: int | None) -> Iterator[pa.RecordBatch]:
    """Yield batches with at most ``most`` rows in total (None: no limit); empty batches are left out."""
    left = most
    for batch in batches:
        if left is not None:
            batch = batch.slice(0, left)
            left -= batch.num_rows
        if batch.num_rows:
            yield batch
        if left == 0:
            return


def coalesced(batches: Iterator[pa.RecordBatch], rows: int, size: int) -> Iterator[pa.RecordBatch]:
    """Join small batches until they have ``rows`` rows or ``size`` bytes, and yield them; larger ones are yielded as
    they are."""
    waiting: list[pa.RecordBatch] = []
    count = held = 0
    for batch in batches:
        if waiting and count + batch.num_rows > rows:
            yield joined(waiting)
            waiting, count, held = [], 0, 0
        waiting.append(batch)
        count, held = count + batch.num_rows, held + int(batch.nbytes)
        if count >= rows or held >= size:
            yield joined(waiting)
            waiting, count, held = [], 0, 0
    if waiting:
        yield joined(waiting)


def joined(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """Concatenate batches (at least one) into one."""
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)
