"""The broker's log for Spark: topics and system views, streamed to Parquet through the same reads that anyone can make.

A first step: the log passes through this process once, batch by batch, never as a whole.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from escrowmq import schemas
from escrowmq.pipeline.audit.manifest import Manifest
from escrowmq.pipeline.audit.readings import HALF, OP
from escrowmq.wire import HALF_VIEW_NAME, OP_VIEW_NAME


def export_log(manifest: Manifest, folder: Path) -> None:
    """Write ``half.parquet``-like folders ``half``, ``op`` and ``topics/NAME`` of the run's broker under ``folder``.

    The broker's data folder must not be in use; a URL in the manifest is read from the running broker instead. Raises
    the errors of :func:`escrowmq.connect`.
    """
    url = manifest.log if "://" in manifest.log else f"file:{(manifest.folder / manifest.log).resolve()}"
    from escrowmq.connecting import connect

    with connect(url) as bus:
        _write(bus, HALF_VIEW_NAME, schemas.HALF_VIEW, folder / HALF)
        _write(bus, OP_VIEW_NAME, schemas.OP_VIEW, folder / OP)
        for name in manifest.topics:
            _write(bus, name, schemas.DELIVERY, folder / "topics" / name)


def _write(bus: Any, source: str, schema: pa.Schema, folder: Path) -> None:
    folder.mkdir(parents=True)
    with pq.ParquetWriter(folder / "part-0.parquet", schema, compression="zstd") as writer:
        for batch in bus.admin.read(source):
            writer.write_batch(batch)
