"""Rows as Arrow tables, for the parts of a snapshot that are no columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa


def table_of(schema: pa.Schema, rows: Sequence[Sequence[Any]]) -> pa.Table:
    """A table with these rows, values in the order of the schema; there may be none."""
    columns = zip(*rows, strict=True) if rows else ((),) * len(schema)
    return pa.table([pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)], schema=schema)
