"""Tables of SQLite that are read as Arrow: the sums and rows are those that a cursor reads, whatever the values are."""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from escrowmq.pipeline.sql import text_reads
from escrowmq.pipeline.sql.arrow_reads import Refused, fetch_sqlite
from escrowmq.pipeline.sql.id_windows import NO_ID, find_window
from escrowmq.pipeline.sql.tables import BATCH_ROWS
from escrowmq.pipeline.sql.text_reads import Sum, Text, TextRead

COLUMNS = (Text("id", "text", "text"), Text("note", "text", "text"), Text("n", "integer", "number"))
SUMS = (Sum(0, True, (1, 2)), Sum(1, False, (2,)))
ANY = st.one_of(
    st.none(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.text(max_size=4),
    st.binary(max_size=4),
    st.sampled_from(["\0", b"\xff", 2.5, 1e300, 0.1 + 0.2, 2**53 + 1]),
)
TEXTS, INTEGERS = st.one_of(st.none(), st.text(max_size=4)), st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1))
ROWS = st.one_of(st.tuples(ANY, ANY, ANY), st.tuples(TEXTS, TEXTS, INTEGERS))


def fill(file: Path, rows: Sequence[tuple[Any, ...]], types: str = "id TEXT, note TEXT, n INTEGER") -> TextRead:
    file.unlink(missing_ok=True)
    with closing(sqlite3.connect(file)) as database:
        database.execute(f"CREATE TABLE t ({types})")
        database.executemany("INSERT INTO t VALUES (?, ?, ?)", rows)
        database.commit()
    return TextRead(f"sqlite:///{file}", "t", COLUMNS, windows=64, portable=False, sums=SUMS, is_summed_here=True)


def read_all(read: TextRead) -> tuple[list[pa.Array], list[tuple[Any, ...]]]:
    """Return the sums of all rows, and the rows of three windows."""
    some = replace(read, sums=(), only=(0, 1, 63))
    batches = some.batches("rowid", (None, None))
    rows = [row for batch in batches for row in zip(*[column.to_pylist() for column in batch], strict=True)]
    return [column.to_pylist() for column in read.read_sums("rowid", (None, None))], rows


def read_by_cursor(read: TextRead) -> tuple[list[pa.Array], list[tuple[Any, ...]]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "adbc_driver_sqlite", None)
        return read_all(read)


@pytest.mark.invariant("I43")
@settings(deadline=None)
@given(rows=st.lists(ROWS, max_size=30), typed=st.booleans(), repeated=st.booleans())
def test_sums_and_rows_are_those_of_a_cursor(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[Any, ...]], typed: bool, repeated: bool
) -> None:
    file = tmp_path_factory.getbasetemp() / "shop 100%#.db"
    types = "id TEXT, note TEXT, n INTEGER" if typed else "id, note, n"
    read = fill(file, [*rows, *[("o-1", "x", 1)] * (BATCH_ROWS * repeated), *rows], types)
    assert read_all(read) == read_by_cursor(read)


@pytest.mark.parametrize("encoding", ["UTF-8", "UTF-16le"])
def test_every_encoding_gives_the_same_texts(tmp_path: Path, encoding: str) -> None:
    with closing(sqlite3.connect(tmp_path / "x.db")) as database:
        database.execute(f"PRAGMA encoding = '{encoding}'")
        database.execute("CREATE TABLE t (id TEXT, note TEXT, n INTEGER)")
        database.executemany("INSERT INTO t VALUES (?, ?, ?)", [(f"é-{n}", "😀", n) for n in range(300)])
        database.commit()
    read = TextRead(f"sqlite:///{tmp_path / 'x.db'}", "t", COLUMNS, windows=64, portable=False, sums=SUMS)
    read = replace(read, is_summed_here=True)
    sums, rows = read_all(read)
    assert (sums, rows) == read_by_cursor(read)
    assert sum(sums[3]) == 2 * 300
    assert rows


def test_conditions_hold(tmp_path: Path) -> None:
    read = fill(tmp_path / "x.db", [(f"o-{n}", "it's 100%% :x" if n % 2 else "y", n) for n in range(400)])
    read = replace(read, where=(("note", "text", "it's 100%% :x"),))
    sums, rows = read_all(read)
    assert sum(sums[3]) == 2 * 200
    assert {note for _, note, _ in rows} == {"it's 100%% :x"}
    assert (sums, rows) == read_by_cursor(read)


@pytest.mark.parametrize("place", [0, BATCH_ROWS - 1, BATCH_ROWS, 2 * BATCH_ROWS + 1])
@pytest.mark.parametrize("value", [2.5, "x", b"5"])
def test_a_value_of_another_type_is_refused_not_converted(tmp_path: Path, place: int, value: Any) -> None:
    rows: list[tuple[Any, ...]] = [("o", "x", n) for n in range(2 * BATCH_ROWS + 2)]
    rows[place] = ("o", "x", value)
    read = fill(tmp_path / "x.db", rows, "id, note, n")
    with pytest.raises(Refused):
        list(fetch_sqlite(str(tmp_path / "x.db"), "SELECT n FROM t", [True]))
    assert read_all(read) == read_by_cursor(read)


def test_integers_and_bytes_come_as_they_are(tmp_path: Path) -> None:
    fill(tmp_path / "x.db", [("a\0b", None, -(2**63)), (b"\xff", "", None), (None, "é", 2**63 - 1)])
    found = list(fetch_sqlite(str(tmp_path / "x.db"), "SELECT id, note, n FROM t", [False, False, True]))
    assert [[column.to_pylist() for column in batch] for batch in found] == [
        [[b"a\0b", b"\xff", None], [None, b"", "é".encode()], [-(2**63), None, 2**63 - 1]]
    ]


def test_plain_values_need_neither_the_cursor_nor_a_function_of_sqlite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = fill(tmp_path / "x.db", [(f"o-{n}", "x", n) for n in range(100)])
    expected = read_by_cursor(read)[0]
    with monkeypatch.context() as patch:
        patch.setattr(TextRead, "batches", None)
        assert [column.to_pylist() for column in read.read_sums("rowid", (None, None))] == expected
    called: list[object] = []
    monkeypatch.setattr(text_reads, "find_window", lambda *given: called.append(given) or 0)
    list(replace(read, sums=(), only=(0, 1)).batches("rowid", (None, None)))
    assert len(called) < 20, "for each row"


def test_many_rows_of_one_window_are_not_fetched_by_their_row_ids(tmp_path: Path) -> None:
    read = fill(tmp_path / "x.db", [(None, "x", n) for n in range(3 * BATCH_ROWS)])
    window = find_window(NO_ID, 64, False)
    rows = [row for batch in replace(read, sums=(), only=(window,)).batches("rowid", (None, None)) for row in batch[2]]
    assert len(rows) == 3 * BATCH_ROWS


def test_a_column_with_the_name_of_row_ids_hides_no_row(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "x.db")) as database:
        database.execute("CREATE TABLE t (id TEXT, note TEXT, n INTEGER, RowId INTEGER)")
        database.executemany("INSERT INTO t VALUES (?, 'x', 1, ?)", [("a", None), ("b", 7), ("c", 7), ("d", 9)])
        database.commit()
    read = TextRead(f"sqlite:///{tmp_path / 'x.db'}", "t", COLUMNS)
    found = [id.as_py() for key, bounds in read.ranges(1) for batch in read.batches(key, bounds) for id in batch[0]]
    assert sorted(found) == ["a", "b", "c", "d"]


def test_a_missing_file_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(Refused):
        list(fetch_sqlite(str(tmp_path / "x.db"), "SELECT 1", [True]))
    assert not (tmp_path / "x.db").exists()
