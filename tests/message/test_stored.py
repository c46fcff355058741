"""Stored messages packed without Arrow are, byte for byte, the record batch message that Arrow makes of them."""

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from escrowmq.message import stored
from escrowmq.message.columns import optional
from escrowmq.message.ids import column_of
from escrowmq.schemas import STORED, Kind

SCHEMA = STORED[Kind.HALF]
PLAIN = ("orders", None, None, None, b"body", bytes(16), 0, 3, 17, 0, 23, 5, 2)

texts = st.text(max_size=9)
rows = st.tuples(
    texts,
    st.none() | texts,
    st.none() | texts,
    st.none() | st.lists(st.tuples(texts, texts), max_size=3),
    st.binary(max_size=20),
    st.binary(min_size=16, max_size=16),
    *[st.integers(-(1 << 31), (1 << 31) - 1)] * 2,
    *[st.integers(-(1 << 63), (1 << 63) - 1)] * 4,
    st.integers(0, (1 << 32) - 1),
)


def by_arrow(*given: tuple[Any, ...]) -> bytes:
    columns = list(zip(*given, strict=True))
    columns[5] = column_of(b"".join(columns[5]))
    arrays = [
        c if isinstance(c, pa.Array) else optional(c, type_) for c, type_ in zip(columns, SCHEMA.types, strict=True)
    ]
    raw: bytes = pa.RecordBatch.from_arrays(arrays, schema=SCHEMA).serialize().to_pybytes()
    return raw


def packed(*given: tuple[Any, ...]) -> tuple[bytes, int, int]:
    names, keys, tags, pairs, bodies, ids, *numbers = zip(*given, strict=True)
    return stored.message(names, keys, tags, pairs, bodies, b"".join(ids), *numbers)


@given(st.lists(rows, min_size=1, max_size=20))
@example([PLAIN])
@example([PLAIN] * 9)
@example([("", "", "", [], b"", bytes(16), 0, 0, 0, 0, 0, 0, 0)])
@example([PLAIN, ("orders", "k", "t", [("a", "b"), ("", "")], bytes(1000), bytes(16), 0, 0, 0, 0, 0, 0, 0)])
@settings(max_examples=60, deadline=None)
def test_the_bytes_are_arrows(given: list[tuple[Any, ...]]) -> None:
    raw, start, end = packed(*given)
    assert raw == by_arrow(*given)
    assert raw[start:end] == b"".join(row[4] for row in given)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        (0, "\ud800"),
        (1, "\ud800"),
        (3, [("\ud800", "")]),
        (6, 1 << 31),
        (8, 1 << 63),
        (8, -(1 << 63) - 1),
        (12, -1),
        (12, 1 << 32),
    ],
)
def test_a_value_that_fits_no_column_is_refused(column: int, value: Any) -> None:
    bad = (*PLAIN[:column], value, *PLAIN[column + 1 :])
    with pytest.raises((ValueError, OverflowError)):
        packed(PLAIN, bad)
