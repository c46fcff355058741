"""Checksums of windows, computed by the process that reads the rows, so that only sums go on to Java. Imports no Spark.

A row is hashed as ``length:text`` of its id and cells, ``N`` for null: by MD5 as databases compute it (see
:func:`escrowmq.pipeline.sql.texts.digest`), or by xxHash64 if no server takes part. Cells are canonical bytes. One that
cannot be converted here as Spark does it is *marked*: it equals only a marked cell of the same bytes. So equal sums
hide no difference, and a needless one costs only a comparison row by row.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from escrowmq.pipeline.sql.texts import NO_ID

KINDS = ("stored", "text", "number", "boolean")
"""The kinds that are converted here."""
SUM_KINDS: tuple[pa.DataType, ...] = (pa.int32(), pa.int32(), *[pa.int64()] * 4)
"""The types of the columns of checksums: comparison, window, expected, rows, and both sums."""
INTEGER = re.compile(rb"0|-?[1-9][0-9]{0,399}")
_SEED = 42  # Spark's
_MARK = b"\xff"  # begins no text in UTF-8
_DECIMAL = re.compile(rb"[+-]?[0-9]{1,400}([.][0-9]{0,400})?")
_BOOLEANS = {b"1": b"true", b"0": b"false"}


class WindowSums:
    """Counts of rows, and sums of both halves of their digests, by window, for some sums. ``parts`` is the number of
    groups of rows that are summed apart."""

    def __init__(self, windows: int, sums: int, *, portable: bool, parts: int = 1) -> None:
        self._windows = windows
        self._portable = portable
        self._sums = np.zeros((sums, 3, parts * windows), np.int64)

    def add(self, ids: pa.Array, cells: Mapping[int, Sequence[pa.Array]], part: Any = 0) -> None:
        """Add at most 2^21 rows. ``ids`` and the cells of each sum, by its number, are binary; ``part`` is the group of
        the rows, or of each."""
        place = find_windows(ids, self._windows, self._portable) + part * self._windows
        begin = _measure(pc.fill_null(ids, NO_ID.encode()))
        hash_, size = _hash_md5 if self._portable else _hash_xx, self._sums.shape[2]
        known = {id(cell): cell for its in cells.values() for cell in its}
        measured = {key: _measure(cell) for key, cell in known.items()}
        for number, its in cells.items():
            hashed = hash_(pc.binary_join_element_wise(begin, *[measured[id(cell)] for cell in its], b""))
            self._sums[number][0] += np.bincount(place, minlength=size)
            for n, half in enumerate((hashed & np.uint64(0xFFFF_FFFF), hashed >> np.uint64(32)), 1):
                # doubles are exact below 2^53
                self._sums[number][n] += np.bincount(place, half.astype(np.float64), size).astype(np.int64)

    def lines(self, number: int) -> Iterator[tuple[int, ...]]:
        """Yield ``part, window, rows, low, high`` of a sum for each window that has rows."""
        rows = self._sums[number]
        for place in np.flatnonzero(rows[0]).tolist():
            yield (*divmod(place, self._windows), *map(int, rows[:, place]))


def make_columns(lines: Iterable[tuple[int, ...]], kinds: Sequence[pa.DataType]) -> list[pa.Array]:
    """Convert lines to Arrow columns of these types."""
    every = list(lines)
    return [pa.array([line[n] for line in every], kind) for n, kind in enumerate(kinds)]


def find_windows(ids: pa.Array, count: int, portable: bool) -> np.ndarray:
    """Return the windows of ids (binary; NO_ID for null): :func:`escrowmq.pipeline.sql.texts.find_window` of each."""
    ids = pc.fill_null(ids, NO_ID.encode())
    hashed = _hash_md5(ids) >> np.uint64(4) if portable else _hash_xx(ids)
    return hashed.view(np.int64) % count  # Spark's number is signed


def _measure(cell: pa.Array) -> pa.Array:
    if cell.null_count == len(cell):
        return pa.scalar(b"N")
    length = pc.binary_length(cell).cast(pa.utf8()).cast(pa.binary())
    measured = pc.binary_join_element_wise(length, cell, b":")
    return pc.fill_null(measured, b"N") if cell.null_count else measured


def _hash_xx(texts: pa.Array) -> np.ndarray:
    hash_ = xxhash.xxh64_intdigest
    return np.fromiter((hash_(text, _SEED) for text in texts.to_pylist()), np.uint64, len(texts))


def _hash_md5(texts: pa.Array) -> np.ndarray:
    digests = b"".join([hashlib.md5(text, usedforsecurity=False).digest() for text in texts.to_pylist()])
    return np.frombuffer(digests, ">u8")[::2].astype(np.uint64)


def mark(text: bytes) -> bytes:
    """Return the bytes of a cell that cannot be converted."""
    return _MARK + text


def to_canonical(cells: pa.Array, kind: str) -> pa.Array:
    """Convert plain texts (binary) to canonical ones of a kind, as :mod:`escrowmq.pipeline.sql.canonical` does, or
    marked ones."""
    convert = _CONVERT.get(kind)
    if convert is None or (kind == "number" and _are_plain_integers(cells)):
        return cells
    return pa.array([None if cell is None else convert(cell) for cell in cells.to_pylist()], pa.binary())


def _are_plain_integers(cells: pa.Array) -> bool:
    """Return whether all texts are those of integers of 64 bits, so that they are canonical."""
    try:
        texts = cells.cast(pa.utf8())
        return bool(texts.cast(pa.int64()).cast(pa.utf8()).equals(texts))
    except pa.ArrowInvalid:
        return False


def _to_number(text: bytes) -> bytes:
    if INTEGER.fullmatch(text):
        return text
    if not _DECIMAL.fullmatch(text):  # an exponent, or no number
        return text if text.startswith(_MARK) else mark(text)
    sign, digits = (b"-", text[1:]) if text[:1] == b"-" else (b"", text.removeprefix(b"+"))
    whole, _, fraction = digits.partition(b".")
    whole, fraction = whole.lstrip(b"0") or b"0", fraction.rstrip(b"0")
    number = whole + b"." + fraction if fraction else whole
    return number if number == b"0" else sign + number


_CONVERT: dict[str, Callable[[bytes], bytes]] = {
    "number": _to_number,
    "boolean": lambda text: _BOOLEANS.get(text) or (text.lower() if text.lower() in (b"true", b"false") else text),
}
