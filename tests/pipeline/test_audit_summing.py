"""Checksums that a process computes from what it reads: equal only where Spark finds equal values."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from escrowmq.pipeline.audit.windows import window
from escrowmq.pipeline.bodies import Bodies
from escrowmq.pipeline.sql.canonical import canonical
from escrowmq.pipeline.sql.id_windows import find_window
from escrowmq.pipeline.sql.summing import WindowSums, find_windows, mark, to_canonical

FIELDS = {"a b": "text", "n": "number"}
TOKENS = ["1.50", "-0", "0", "007", "1E5", "1e-3", "0.1234567890123456789", "12345678901234567890", "1" * 500, "NaN"]
TOKENS += ["true", "null", '""', '"1.50"', '"+5"', '"05"', '"\\u00e9"', '"\\ud800"', '{"x": 1}', "[1,2]", '"x', ""]
NUMBERS = ["5", "05", "+5", "5.00", "-0", "-0.0", "1e2", "1.5E-1", "x", "0.10", "-00.5", "1e30", "5.", ".5", "", "5\n"]
FLAGS = ["TRUE", "0", "1", "fAlse", "yes"]


def binary(*cells: str | bytes | None) -> pa.Array:
    return pa.array([cell.encode() if isinstance(cell, str) else cell for cell in cells], pa.binary())


def assert_equal_only_where_equal(mine: list[bytes | None], theirs: list[str | None]) -> None:
    """Cells are those of Spark, or marked; equal ones are equal there, too."""
    seen: dict[bytes | None, str | None] = {}
    for cell, other in zip(mine, theirs, strict=True):
        if cell is None or not cell.startswith(mark(b"")):
            assert (None if cell is None else cell.decode()) == other
        assert seen.setdefault(cell, other) == other, cell


def make_bodies() -> st.SearchStrategy[bytes]:
    plain = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5))
    token = st.one_of(st.sampled_from(TOKENS), plain.map(json.dumps), plain.map(lambda one: json.dumps([one])))
    objects = st.tuples(token, token).map(lambda two: f'{{"a b": {two[0]}, "n": {two[1]}, "more": 1}}'.encode())
    partial = token.map(lambda one: f'{{"n": {one}, "n": 2}}'.encode())
    bare = token.map(str.encode)  # no object: its text is not that of a field
    return st.one_of(
        objects, partial, bare, st.sampled_from([b"", b"[]", b"null", b"nope", b'{"n": "\xff"}', b'{"n":1}x'])
    )


@pytest.mark.spark
@pytest.mark.xdist_group("spark")
@pytest.mark.invariant("I43")
@settings(max_examples=3, deadline=None, phases=(Phase.explicit, Phase.generate))  # Spark takes seconds: no shrinking
@given(st.lists(make_bodies(), min_size=40, max_size=80))
@example([b"", b'{"n": ""}', b"1e5", b'{"n": 1e5}'])
def test_fields_of_bodies_are_equal_only_where_spark_finds_equal_ones(spark: SparkSession, bodies: list[bytes]) -> None:
    frame = spark.createDataFrame(list(enumerate(map(bytearray, bodies))), "number INT, body BINARY").coalesce(1)
    shape = ", ".join(f"`{name}` STRING" for name in FIELDS)
    parsed = frame.select("number", f.from_json(f.col("body").cast("string"), shape).alias("fields"))
    plain = parsed.select("number", *[f.col("fields")[name].alias(name) for name in FIELDS])
    rows = plain.select("number", *[canonical(name, kind).alias(name) for name, kind in FIELDS.items()]).collect()
    together, *alone = [Bodies(FIELDS).read(some) for some in (bodies, *([body] for body in bodies))]
    for place, (name, kind) in enumerate(FIELDS.items()):  # beside an unusual body, all are read in another way
        mine = [cell for read in (together, *alone) for cell in to_canonical(read[place], kind).to_pylist()]
        assert_equal_only_where_equal(mine, 2 * [row[name] for row in sorted(rows)])


@pytest.mark.spark
@pytest.mark.xdist_group("spark")
@pytest.mark.invariant("I43")
def test_texts_are_equal_only_where_spark_finds_equal_ones_and_windows_are_those_of_spark(spark: SparkSession) -> None:
    values, kinds = [*NUMBERS, *FLAGS], ("number", "boolean")
    frame = spark.createDataFrame([(value,) for value in values], "v STRING").coalesce(1)
    made = [window(f.col("v"), 7, portable).alias(f"w{portable}") for portable in (False, True)]
    rows = frame.select(*[canonical("v", kind).alias(kind) for kind in kinds], *made).collect()
    for kind in kinds:
        assert_equal_only_where_equal(to_canonical(binary(*values), kind).to_pylist(), [row[kind] for row in rows])
    for portable in (False, True):
        found = find_windows(binary(*values), 7, portable).tolist()
        assert found == [row[f"w{portable}"] for row in rows]
        assert found == [find_window(value, 7, portable) for value in values]


@pytest.mark.parametrize("portable", [False, True])
def test_sums_are_those_of_each_row(portable: bool) -> None:
    """Of windows and parts, with nulls; in any order, and in any number of batches."""
    rows: list[Any] = [(f"o-{n % 40}" if n % 9 else None, f"x{n % 3}", str(n) if n % 4 else None) for n in range(200)]
    parts = np.array([n % 2 for n in range(len(rows))])
    whole = WindowSums(8, 2, portable=portable, parts=2)
    for batch in (range(150), range(150, 200)):
        ids, *cells = (binary(*column) for column in zip(*[rows[n] for n in batch], strict=True))
        whole.add(ids, [(cell, "text") for cell in cells], {0: range(len(cells))}, parts[list(batch)])
    backwards = WindowSums(8, 1, portable=portable, parts=2)
    ids, *cells = (binary(*column) for column in zip(*reversed(rows), strict=True))
    backwards.add(ids, [(cell, "text") for cell in cells], {0: range(len(cells))}, parts[::-1])
    lines = list(whole.lines(0))
    assert lines == list(backwards.lines(0))
    assert sum(line[2] for line in lines) == len(rows)
    assert not list(whole.lines(1))
    if portable:  # as a database computes it
        digests = [0, 0]
        for row in rows:
            marked = [f"{len(text)}:{text}" if text is not None else "N" for text in (row[0] or "(no id)", *row[1:])]
            digest = hashlib.md5("".join(marked).encode()).hexdigest()
            digests = [digests[0] + int(digest[8:16], 16), digests[1] + int(digest[:8], 16)]
        assert [sum(line[n] for line in lines) for n in (3, 4)] == digests


def test_borders_between_cells_count() -> None:
    pairs: list[tuple[str | bytes | None, ...]] = [("ab", "c"), ("a", "bc"), ("abc", None), (None, "abc"), ("1:a", "b")]
    pairs += [("abc", ""), ("", "abc"), ("N", "abc"), (mark(b"ab"), "c")]
    found = set()
    for pair in pairs:
        sums = WindowSums(1, 1, portable=False)
        sums.add(binary("id"), [(binary(cell), "text") for cell in pair], {0: [0, 1]})
        found.add(tuple(sums.lines(0)))
    assert len(found) == len(pairs)


def sum_each(column: pa.Array, kind: str) -> list[tuple[int, ...]]:
    """The checksums of rows of one column, each alone."""
    found = []
    for n in range(len(column)):
        sums = WindowSums(1, 1, portable=False)
        sums.add(binary("id"), [(column[n : n + 1], kind)], {0: [0]})
        found += [line[3:] for line in sums.lines(0)]
    return found


def sum_together(column: pa.Array, kind: str) -> list[int]:
    """The checksums of all rows, read at once."""
    sums = WindowSums(1, 1, portable=False)
    sums.add(binary(*["id"] * len(column)), [(column, kind)], {0: [0]})
    return list(next(sums.lines(0))[3:])


def test_a_value_is_hashed_alike_however_and_beside_whatever_it_is_read() -> None:
    """As an integer, as text, among integers, and among other numbers; only different values have different hashes."""
    values = [0, 5, -5, 2**63 - 1, -(2**63)]
    texts = binary(*map(str, values))
    assert len(set(sum_each(texts, "number"))) == len(values)
    assert sum_each(pa.array(values), "number") == sum_each(texts, "number")
    assert sum_each(pa.array(values), "text") == sum_each(texts, "text") != sum_each(texts, "number")
    strange = ["5", "05", "+5.0", "5.5", "5.50", str(2**63), mark(b"5"), None, "", "x"]
    alone = sum_each(binary(*strange), "number")
    assert alone[0] == alone[1] == alone[2] != alone[3] == alone[4]
    assert len(set(alone)) == len(strange) - 3
    assert sum_together(binary(*strange), "number") == list(map(sum, zip(*alone, strict=True)))
    ids = pa.array([*(bytes([n]) * 16 for n in range(3)), None], pa.binary(16))
    assert len(set(sum_each(ids, "stored"))) == len(ids)
    assert sum_each(ids[1:], "stored") == sum_each(ids, "stored")[1:]
    assert sum_together(ids[1:], "stored") == list(map(sum, zip(*sum_each(ids, "stored")[1:], strict=True)))


@given(st.lists(st.one_of(st.none(), st.text(max_size=3)), min_size=1, max_size=400))
@settings(max_examples=40, deadline=None)
def test_few_and_many_different_texts_have_the_same_hashes(values: list[str | None]) -> None:
    """Of a column that seems to have few different texts each is hashed once."""
    assert sum_together(binary(*values), "text") == list(map(sum, zip(*sum_each(binary(*values), "text"), strict=True)))


def test_a_process_that_reads_the_log_loads_little() -> None:
    """Spark plans and reads every source in processes of their own."""
    loaded = "import sys, escrowmq.pipeline.log_rows; print(*sys.modules)"
    names = subprocess.run([sys.executable, "-c", loaded], check=True, capture_output=True, text=True).stdout.split()
    assert "escrowmq.pipeline.log_rows" in names
    assert not {"sqlalchemy", "escrowmq.pipeline.audit"}.intersection(names)
