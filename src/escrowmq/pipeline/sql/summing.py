"""Checksums of windows, computed by the process that reads the rows, so that only sums go on to Java. Imports no Spark.

If a server takes part, a row is hashed as databases do it: the MD5 of ``length:text`` of its id and cells, ``N`` for
null (see :func:`escrowmq.pipeline.sql.texts.digest`). Otherwise each value is hashed, and the hashes of a row are mixed
in their order: texts by xxHash64, integers, ids of 16 bytes and mixtures without a loop over the rows. Cells are
canonical bytes. One that cannot be converted here as Spark does it is *marked*: it equals only a marked cell of the
same bytes. So equal sums hide no difference, and a needless one costs only a comparison row by row.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from escrowmq.pipeline.sql.id_windows import NO_ID

STORED = "stored"
"""The kind of columns of messages between two sides of messages: compared as they are stored, which is cheaper."""
KINDS = (STORED, "text", "number", "boolean")
"""The kinds that are converted here."""
DIGEST = 2
"""The version of the hashes, which earlier sums must have to be comparable."""
SUMS = "comparison INT, window INT, expected BIGINT, rows BIGINT, sum0 BIGINT, sum1 BIGINT"
"""The columns of a read of checksums."""
SUM_KINDS: tuple[pa.DataType, ...] = (pa.int32(), pa.int32(), *[pa.int64()] * 4)
"""The types of these columns."""
INTEGER = re.compile(rb"0|-?[1-9][0-9]{0,399}")
_SEED = 42  # Spark's
_ID = pa.binary(16)
_NULL = np.uint64(0x6E756C6C)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_TRIED, _FEW = 256, 64
"""A column of which so many cells have at most so many different values has few."""
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

    def add(
        self, ids: pa.Array, columns: Sequence[tuple[pa.Array, str]], sums: Mapping[int, Sequence[int]], part: Any = 0
    ) -> None:
        """Add at most 2^21 rows. ``ids`` are binary. ``columns``: plain texts (binary) or integers, each with its kind;
        ``sums``: the columns of each sum, both by number; ``part``: the group of the rows, or of each."""
        ids = pc.fill_null(ids, NO_ID.encode())
        if self._portable:
            place, begin = find_windows(ids, self._windows, True), _measure(ids)
            measured = [_measure(to_canonical(*column)) for column in columns]
            hashes = {
                number: _hash_md5(pc.binary_join_element_wise(begin, *[measured[n] for n in its], b""))
                for number, its in sums.items()
            }
        else:
            first = hash_ids(ids)
            place, hashed = first % self._windows, [_hash_cells(*column) for column in columns]
            hashes = {number: _mix(first.view(np.uint64), [hashed[n] for n in its]) for number, its in sums.items()}
        place, size = place + part * self._windows, self._sums.shape[2]
        for number, hashed_rows in hashes.items():
            self._sums[number][0] += np.bincount(place, minlength=size)
            for n, half in enumerate((hashed_rows & np.uint64(0xFFFF_FFFF), hashed_rows >> np.uint64(32)), 1):
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
    """Return the window of each id (binary; NO_ID for null): :func:`escrowmq.pipeline.sql.id_windows.find_window`."""
    hashed = _hash_md5(pc.fill_null(ids, NO_ID.encode())) >> np.uint64(4) if portable else hash_ids(ids)
    return hashed.view(np.int64) % count  # Spark's number is signed


def hash_ids(ids: pa.Array) -> np.ndarray:
    """Return the hashes of ids (binary; NO_ID for null), 64 bits with a sign, as Spark's ``xxhash64``."""
    return _hash_texts(pc.fill_null(ids, NO_ID.encode()), _SEED).view(np.int64)


def _measure(cell: pa.Array) -> pa.Array:
    if cell.null_count == len(cell):
        return pa.scalar(b"N")
    length = pc.binary_length(cell).cast(pa.utf8()).cast(pa.binary())
    measured = pc.binary_join_element_wise(length, cell, b":")
    return pc.fill_null(measured, b"N") if cell.null_count else measured


def _hash_texts(texts: pa.Array, seed: int = 0) -> np.ndarray:
    return np.fromiter(map(xxhash.xxh64_intdigest, texts.to_pylist(), repeat(seed)), np.uint64, len(texts))


def _hash_cells(cells: pa.Array, kind: str) -> np.ndarray:
    """Return a hash of each cell of a column of :meth:`WindowSums.add`. Equal canonical cells have equal ones."""
    if cells.null_count == len(cells):
        return np.full(len(cells), _NULL)
    is_null = cells.is_null().to_numpy(zero_copy_only=False) if cells.null_count else None
    if kind == STORED and cells.type == _ID:
        hashed = _hash_stored_ids(cells)
    elif kind == "number":
        hashed = _hash_numbers(cells)
    else:
        hashed = _hash_few(to_canonical(cells, kind))
    return hashed if is_null is None else np.where(is_null, _NULL, hashed)


def _hash_few(cells: pa.Array) -> np.ndarray:
    """Return the hashes of texts (0 for null); each different one is hashed once, if they seem to be few."""
    cells = pc.fill_null(cells, b"")
    if len(cells[:_TRIED].dictionary_encode().dictionary) > _FEW:
        return _hash_texts(cells)
    encoded = cells.dictionary_encode()
    hashed: np.ndarray = np.take(_hash_texts(encoded.dictionary), encoded.indices.to_numpy())
    return hashed


def _hash_numbers(cells: pa.Array) -> np.ndarray:
    """Return the hashes of numbers: of an integer of 64 bits that of its value, of another number that of its text."""
    if cells.type == pa.int64():
        values = cells
    elif _are_plain_integers(cells):
        values = cells.cast(pa.utf8()).cast(pa.int64())
    else:
        return _hash_unlike(to_canonical(cells, "number").to_pylist())
    return _mix(pc.fill_null(values, 0).to_numpy().view(np.uint64), [])


def _hash_unlike(texts: Sequence[bytes | None]) -> np.ndarray:
    """Return the hashes of canonical numbers one by one."""
    values = [int(text) if text is not None and INTEGER.fullmatch(text) else 1 << 63 for text in texts]
    are_integers = np.array([-(1 << 63) <= value < 1 << 63 for value in values])
    integers = np.where(are_integers, np.array(values, object), 0).astype(np.int64)
    hashed = _hash_texts(pa.array([text or b"" for text in texts], pa.binary()))
    return np.where(are_integers, _mix(integers.view(np.uint64), []), hashed)


def _hash_stored_ids(cells: pa.Array) -> np.ndarray:
    filled = pc.fill_null(cells, pa.scalar(bytes(16), _ID))
    halves = np.frombuffer(filled.buffers()[1], np.uint64, 2 * len(filled), 16 * filled.offset)
    return _mix(halves[::2], [halves[1::2]])


def _mix(first: np.ndarray, others: Sequence[np.ndarray]) -> np.ndarray:
    """Return a 64-bit hash of the numbers of each row, in their order (the finalizer of SplitMix64 after each)."""
    mixed = first
    for number in (None, *others):
        mixed = mixed * _GOLDEN + (_GOLDEN if number is None else number)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    return mixed


def _hash_md5(texts: pa.Array) -> np.ndarray:
    digests = b"".join([hashlib.md5(text, usedforsecurity=False).digest() for text in texts.to_pylist()])
    return np.frombuffer(digests, ">u8")[::2].astype(np.uint64)


def mark(text: bytes) -> bytes:
    """Return the bytes of a cell that cannot be converted."""
    return _MARK + text


def to_canonical(cells: pa.Array, kind: str) -> pa.Array:
    """Convert plain texts (binary), integers or ids to canonical texts of a kind, as
    :mod:`escrowmq.pipeline.sql.canonical` does, or marked ones; all are binary."""
    if cells.type != pa.binary():
        cells = (cells.cast(pa.utf8()) if cells.type == pa.int64() else cells).cast(pa.binary())
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
