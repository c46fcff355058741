"""Encodes a few stored messages as Arrow does, as one IPC record batch message, but without arrays.

For a small batch Arrow has the fixed cost of a builder, buffers and a wrapper for each of 13 columns. The bytes
themselves are simple. Arrow's description of a batch of one schema has a fixed form in which only numbers differ: it is
taken once from a batch that Arrow wrote, and the numbers are inserted. The buffers follow, each padded to 8 bytes.
``tests/message/test_stored.py`` compares the bytes with Arrow's.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache
from itertools import accumulate, chain
from typing import Any

import pyarrow as pa

from escrowmq.schemas import STORED, Kind

_SCHEMA = STORED[Kind.HALF]
_INT = struct.Struct("<i")
_ZEROS = bytes(8)
_ONE = struct.Struct("<ii")
_MAX_CACHED = 1024  # maximum number of cached packers of numbers, by row count

Pairs = list[tuple[str, str]]


def message(
    names: Sequence[str],
    keys: Sequence[str | None],
    tags: Sequence[str | None],
    properties: Sequence[Pairs | None],
    bodies: Sequence[bytes],
    ids: bytes,
    *numbers: Sequence[int],
) -> tuple[bytes, int, int]:
    """Return the message, and the start and end of the bodies in it. The columns (at least one row) are those of
    ``STORED[Kind.HALF]``, ``ids`` is concatenated. Raises ValueError or OverflowError if a value does not fit its
    column."""
    size = len(names)
    lengths: list[int] = []
    parts: list[bytes] = []
    try:
        _texts(names, 0, lengths, parts)
        _texts(keys, no_key := keys.count(None), lengths, parts)
        _texts(tags, no_tag := tags.count(None), lengths, parts)
        no_properties, pairs = _properties(properties, lengths, parts)
        before = sum(map(len, parts))
        data = b"".join(bodies) if size > 1 else bodies[0]
        lengths += (0, 4 * size + 4, len(data))
        offsets = _offsets(list(map(len, bodies)))
        parts += (offsets, data, _ZEROS[: -len(data) % 8])
        form, fixed = _numbers(size)
        parts.append(form(ids, *chain.from_iterable(numbers)))
        lengths += fixed
        starts = list(accumulate([(length + 7) & ~7 for length in lengths], initial=0))
        buffers = chain.from_iterable(zip(starts, lengths, strict=False))
        described = _describe(starts[-1], size, buffers, (no_key, no_tag, no_properties, pairs))
    except struct.error as problem:
        raise OverflowError(f"a number does not fit its column: {problem}") from None
    start = len(described) + before + len(offsets)
    return b"".join((described, *parts)), start, start + len(data)


def _texts(texts: Sequence[str | None], missing: int, lengths: list[int], parts: list[bytes]) -> None:
    """Append a column of texts: validity (if some are missing), offsets and content."""
    size = len(texts)
    if missing == size:
        bits = (size + 7) // 8
        lengths += (bits, 4 * size + 4, 0)
        parts.append(bytes(((bits + 7) & ~7) + ((4 * size + 11) & ~7)))
        return
    _validity(texts, missing, lengths, parts)
    encoded = [b"" if text is None else text.encode() for text in texts]
    data = b"".join(encoded)
    lengths += (4 * size + 4, len(data))
    parts += (_offsets(list(map(len, encoded))), data, _ZEROS[: -len(data) % 8])


def _validity(values: Sequence[Any], missing: int, lengths: list[int], parts: list[bytes]) -> None:
    if not missing:
        lengths.append(0)
        return
    bits = sum(1 << row for row, value in enumerate(values) if value is not None)
    length = (len(values) + 7) // 8
    lengths.append(length)
    parts.append(bits.to_bytes((length + 7) & ~7, "little"))


def _offsets(sizes: list[int]) -> bytes:
    if len(sizes) == 1:
        return _ONE.pack(0, sizes[0])
    pad = 4 * (len(sizes) + 1) % 8
    return struct.pack(f"<{len(sizes) + 1}i{pad}x", 0, *accumulate(sizes))


def _properties(properties: Sequence[Pairs | None], lengths: list[int], parts: list[bytes]) -> tuple[int, int]:
    """Append the column of properties; return the number of rows without any (None), and of pairs."""
    size, missing = len(properties), properties.count(None)
    if missing == size:
        bits, offsets = (size + 7) // 8, 4 * size + 4
        lengths += (bits, offsets, 0, 0, offsets, 0, 0, offsets, 0)  # Arrow's null arrays share their offsets
        parts.append(bytes(((bits + 7) & ~7) + 3 * ((offsets + 7) & ~7)))
        return missing, 0
    _validity(properties, missing, lengths, parts)
    pairs = [pair for of_row in properties if of_row for pair in of_row]
    lengths += (4 * size + 4, 0)
    parts.append(_offsets([len(of_row) if of_row else 0 for of_row in properties]))
    for texts in ([name for name, _ in pairs], [value for _, value in pairs]):
        if texts:
            _texts(texts, 0, lengths, parts)
        else:
            lengths += (0, 4, 0)
            parts.append(bytes(8))
    return missing, len(pairs)


@lru_cache(_MAX_CACHED)
def _numbers(size: int) -> tuple[Callable[..., bytes], tuple[int, ...]]:
    """Return a packer of the columns from ``message_id`` on of ``size`` rows, and the lengths of their buffers."""
    form, lengths = [f"<{16 * size}s"], [0, 16 * size]
    for type_ in _SCHEMA.types[6:]:
        width = type_.bit_width // 8
        code = {"int32": "i", "int64": "q", "uint32": "I"}[str(type_)]
        form.append(f"{size}{code}{-size * width % 8}x")
        lengths += (0, size * width)
    return struct.Struct("".join(form)).pack, tuple(lengths)


def _describe(body: int, size: int, buffers: Iterable[int], nulls: tuple[int, int, int, int]) -> bytes:
    """Encode Arrow's description of a batch: start and length of each buffer, and how much is missing."""
    keys, tags, properties, pairs = nulls
    nodes = (size, 0, size, keys, size, tags, size, properties, pairs, 0, pairs, 0, pairs, 0, *(size, 0) * 9)
    pack, given = _description_packer()
    numbers = {"body": (body,), "rows": (size,), "buffers": buffers, "nodes": nodes}
    return pack(*chain.from_iterable([numbers[piece] if isinstance(piece, str) else piece for piece in given]))


@cache
def _description_packer() -> tuple[Callable[..., bytes], tuple[tuple[bytes] | str, ...]]:
    """Return a packer of the description, and its template: constant bytes, and names of the numbers between them. It
    is found in a batch that Arrow wrote: a Message of FlatBuffers (format/Message.fbs), whose header is a
    RecordBatch."""
    raw = pa.RecordBatch.from_arrays([pa.nulls(1, type_) for type_ in _SCHEMA.types], _SCHEMA.names).serialize()
    data = raw.to_pybytes()
    root = 8 + _read_int(data, 8)
    batch = _follow_offset(data, _field(data, root, 2))
    nodes, buffers = (_follow_offset(data, _field(data, batch, number)) for number in (1, 2))
    places = sorted(
        [
            (_field(data, root, 3), 1, "body"),
            (_field(data, batch, 0), 1, "rows"),
            (nodes + 4, 2 * _read_int(data, nodes), "nodes"),
            (buffers + 4, 2 * _read_int(data, buffers), "buffers"),
        ]
    )
    end = 8 + _read_int(data, 4)
    form, given, at = ["<"], list[tuple[bytes] | str](), 0
    for place, count, name in places:
        form.append(f"{place - at}s{count}q")
        given += ((data[at:place],), name)
        at = place + 8 * count
    form.append(f"{end - at}s")
    return struct.Struct("".join(form)).pack, (*given, (data[at:end],))


def _read_int(data: bytes, place: int) -> int:
    number: int = _INT.unpack_from(data, place)[0]
    return number


def _follow_offset(data: bytes, place: int) -> int:
    return place + _read_int(data, place)


def _field(data: bytes, table: int, number: int) -> int:
    slot = table - _read_int(data, table) + 4 + 2 * number
    return table + int.from_bytes(data[slot : slot + 2], "little")
