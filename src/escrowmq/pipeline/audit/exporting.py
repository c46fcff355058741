"""The broker's log for Spark: topics and system views, streamed to Parquet through the same reads that anyone can make.

A first step: the log passes through this process once, batch by batch, never as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from escrowmq.connecting import connect
from escrowmq.pipeline.audit.manifest import Manifest
from escrowmq.pipeline.audit.readings import HALF, LOG_SCHEMAS, MESSAGE, OP
from escrowmq.wire import HALF_VIEW_NAME, OP_VIEW_NAME

if TYPE_CHECKING:
    from escrowmq.client.bus import Bus

GROUP_ROWS, GROUP_BYTES = 128 * 1024, 32 << 20
"""Rows and bytes of one Parquet row group, about."""

_FOR_EVER = 1000 * 365 * 86400.0
"""Seconds."""


def export_log(manifest: Manifest, folder: Path) -> int:
    """Write the folders ``half``, ``op`` and ``topics/NAME`` of the run's broker under ``folder``; rows in all.

    The broker's data folder must not be in use; a URL in the manifest is read from the running broker instead. Raises
    the errors of :func:`escrowmq.connect`.
    """
    with _open(manifest) as bus:
        rows = _write(bus, HALF_VIEW_NAME, _columns(LOG_SCHEMAS[HALF]), folder / HALF)
        rows += _write(bus, OP_VIEW_NAME, _columns(LOG_SCHEMAS[OP]), folder / OP)
        for name in manifest.topics:
            rows += _write(bus, name, _columns(MESSAGE), folder / "topics" / name)
    return rows


def _open(manifest: Manifest) -> Bus:
    if "://" in manifest.log:
        return connect(manifest.log)
    # The broker that serves the reads would also do its housekeeping: an audit must not make an old log forget.
    return connect(f"file:{(manifest.folder / manifest.log).resolve()}", retention=_FOR_EVER, half_retention=_FOR_EVER)


def _write(bus: Bus, source: str, columns: list[str], folder: Path) -> int:
    folder.mkdir(parents=True)
    reader = bus.admin.read(source, columns=columns)
    with pq.ParquetWriter(folder / "part-0.parquet", reader.schema, compression="lz4") as writer:
        rows = 0
        for table in _large(reader):
            writer.write_table(table)
            rows += table.num_rows
    return rows


def _large(reader: pa.RecordBatchReader) -> Iterator[pa.Table]:
    """The same rows in row groups worth the name: batches can be as small as one request to the broker was."""
    waiting: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in reader:
        waiting.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
        if rows >= GROUP_ROWS or size >= GROUP_BYTES:
            yield pa.Table.from_batches(waiting).combine_chunks()
            waiting, rows, size = [], 0, 0
    if waiting:
        yield pa.Table.from_batches(waiting).combine_chunks()


def _columns(schema: str) -> list[str]:
    """The column names of a Spark schema text: words before types, outside of brackets."""
    return [column.split()[0] for column in re.sub(r"<[^>]*>", "", schema).split(", ")]
