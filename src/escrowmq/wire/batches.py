"""A stream of record batches: what a read returns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa


class BatchStream(Iterator[pa.RecordBatch]):
    """Record batches of one schema, to be iterated once.

    It offers what most users need of ``pyarrow.RecordBatchReader``, which it replaces because that one calls Python
    from C++ for every batch: if the interpreter ends while a daemon thread waits in such a call, the process aborts.
    Libraries that read Arrow streams (``pyarrow.table``, DuckDB, Polars) accept it through ``__arrow_c_stream__``.
    """

    def __init__(self, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
        self.schema = schema
        self._batches = iter(batches)

    def __next__(self) -> pa.RecordBatch:
        return next(self._batches)

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self.to_reader().__arrow_c_stream__(requested_schema)

    def read_all(self) -> pa.Table:
        """Return the remaining batches as one table. Raises EscrowError like iterating."""
        return pa.Table.from_batches(list(self), self.schema)

    def to_reader(self) -> pa.RecordBatchReader:
        """Return the remaining batches as a ``pyarrow.RecordBatchReader``."""
        return pa.RecordBatchReader.from_batches(self.schema, self)

    def close(self) -> None:
        """Give up the remaining batches."""
        self._batches = iter(())
