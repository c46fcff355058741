"""Limits of one message, and the check of whole batches against them.

``row.py`` checks single messages by the same rules; ``tests/message/test_limits.py`` compares both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from escrowmq.errors import Code
from escrowmq.platform.times import to_us

_SHORT = 256  # maximum bytes of a text that is searched in every row of a column

Int64s = npt.NDArray[np.int64]
UInt8s = npt.NDArray[np.uint8]

MAX_QUEUE = (1 << 31) - 1  # largest number of a queue: it is an int32 on the wire

MAX_CAUSE = 1024  # stored characters of the cause of a nack: enough for an exception's line, not for a core dump


class RowLimits(Protocol):
    """Limits of one message, common to :class:`Limits` and the ledger's rules. Bytes, or microseconds."""

    @property
    def max_body_bytes(self) -> int: ...
    @property
    def max_key_bytes(self) -> int: ...
    @property
    def max_tag_bytes(self) -> int: ...
    @property
    def max_properties_bytes(self) -> int: ...
    @property
    def max_delay_us(self) -> int: ...
    @property
    def half_retention_us(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits from the broker's ``hello`` or settings, or the defaults until they are known."""

    max_body_bytes: int = 4 << 20
    max_key_bytes: int = 1024
    max_tag_bytes: int = 128
    max_properties_bytes: int = 32 << 10
    max_batch_rows: int = 65_536
    max_batch_bytes: int = 64 << 20
    max_delay_us: int = 40 * 86_400_000_000
    half_retention_us: int = 40 * 86_400_000_000

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Limits:
        """Select the limits among settings by name, times in seconds; missing ones get their defaults."""
        given = {name: value for name, value in settings.items() if value is not None}
        given |= {f"{name}_us": to_us(given[name]) for name in ("max_delay", "half_retention") if name in given}
        return cls(**{name: given[name] for name in cls.__slots__ if name in given})


def byte_lengths(column: pa.Array) -> Int64s:
    """Return the bytes of each row of a binary or utf8 column; 0 for null."""
    if not len(column):
        return np.zeros(0, np.int64)  # such a column may have no offsets
    return _without_nulls(np.diff(_offsets(column)).astype(np.int64), column)


def common_text(column: pa.Array) -> str | None:
    """Return the text of all rows of a utf8 column; None if they differ, are long, or one is null."""
    size = len(column)
    if not size or column.null_count:
        return None
    offsets = _offsets(column)
    start, length = int(offsets[0]), int(offsets[1] - offsets[0])
    if not 0 < length <= _SHORT or int(offsets[-1]) - start != size * length:
        return None
    if np.count_nonzero(offsets[1:] - offsets[:-1] == length) != size:
        return None
    texts = column.buffers()[2].slice(start, size * length).to_pybytes()
    return texts[:length].decode() if texts[length:] == texts[:-length] else None


def property_lengths(column: pa.Array) -> Int64s:
    """Return the bytes of the names and values of each row's properties; 0 for null."""
    if column.null_count == len(column):
        return np.zeros(len(column), np.int64)
    bounds = _offsets(column)
    # keys and items are the whole child arrays, also outside a slice, so the offsets address them
    sizes = byte_lengths(column.keys) + byte_lengths(column.items)
    sums = np.concatenate(([0], np.cumsum(sizes)))
    return _without_nulls(sums[bounds[1:]] - sums[bounds[:-1]], column)


def has_null_texts(properties: pa.Array) -> bool:
    """Return whether any row's properties have a null name or value, which Arrow allows and the broker does not."""
    if properties.null_count == len(properties):
        return False
    bounds = _offsets(properties)
    first, last = int(bounds[0]), int(bounds[-1])
    return any(texts.slice(first, last - first).null_count for texts in (properties.keys, properties.items))


def _offsets(column: pa.Array) -> npt.NDArray[np.int32]:
    return np.frombuffer(column.buffers()[1], np.int32, len(column) + 1, 4 * column.offset)


def _without_nulls(lengths: Int64s, column: pa.Array) -> Int64s:
    if column.null_count:
        lengths[~column.is_valid().to_numpy(zero_copy_only=False)] = 0
    return lengths


def refusals(batch: pa.RecordBatch, limits: RowLimits) -> UInt8s:
    """Return one code per row of schema OUTGOING: the first exceeded limit, else OK (0). Topics are not checked."""
    codes = np.zeros(batch.num_rows, np.uint8)

    def refuse(rows: npt.NDArray[np.bool_], refusal: Code) -> None:
        if np.count_nonzero(rows):  # several times faster than any()
            codes[rows & (codes == 0)] = refusal

    refuse(byte_lengths(batch.column("body")) > limits.max_body_bytes, Code.BODY_TOO_LARGE)
    key, tag, properties = (batch.column(name) for name in ("key", "tag", "properties"))
    if key.null_count < len(key):
        refuse(byte_lengths(key) > limits.max_key_bytes, Code.KEY_TOO_LARGE)
    if tag.null_count < len(tag):
        refuse(byte_lengths(tag) > limits.max_tag_bytes, Code.TAG_TOO_LARGE)
    if properties.null_count < len(properties):
        refuse(property_lengths(properties) > limits.max_properties_bytes, Code.PROPERTIES_TOO_LARGE)
    for name, longest in (("delay_us", limits.max_delay_us), ("immunity_us", limits.half_retention_us)):
        times = batch.column(name).to_numpy()
        refuse((times < 0) | (times > longest), Code.BAD_DELAY)
    return codes
