"""SQLite tables read by ranges of row ids."""

from __future__ import annotations

import itertools
import sqlite3
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from escrowmq.errors import Misuse
from escrowmq.pipeline.sql.source import read_sums, read_texts
from escrowmq.pipeline.sql.tables import even_cuts, readonly_url
from escrowmq.pipeline.sql.text_reads import Text, TextRead, reflect_texts


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40), st.integers(1, 5000), st.integers(1, 500))
def test_ranges_cover_every_row_id_once_and_are_no_more_than_needed(
    first: int, span: int, rows: int, size: int
) -> None:
    last = min(first + span, 2**63 - 1)
    cuts = even_cuts(first, last, rows, size)
    assert all(before < after for before, after in itertools.pairwise([first, *cuts, last + 1]))
    assert len(cuts) + 1 <= -(-rows // size)


def make(path: Path, rows: list[tuple[object, ...]]) -> Path:
    connection = sqlite3.connect(path)
    connection.execute('CREATE TABLE "some orders" (id, amount INTEGER, "a ""note" TEXT)')
    connection.executemany('INSERT INTO "some orders" VALUES (?, ?, ?)', rows)
    connection.commit()
    connection.close()
    return path


def reading(database: Path, *columns: str, **where: str) -> TextRead:
    wanted = tuple((name, "text", text) for name, text in where.items())
    wanted_columns = tuple(Text(name, "text", "text") for name in columns)
    return TextRead(readonly_url(database), "some orders", wanted_columns, wanted)


@pytest.mark.spark
@pytest.mark.xdist_group("spark")
def test_all_rows_of_all_tables_come_as_text_whatever_they_hold(spark: SparkSession, tmp_path: Path) -> None:
    rows: list[tuple[object, ...]] = [("a", 1, "ü"), (None, "not a number", None), (3, 2.5, b"\xff")]
    one, two = make(tmp_path / "x.db", rows), make(tmp_path / "y '?#%.db", [("b", 7, "")])
    reads = [reading(one, "id", "amount", 'a "note'), reading(two, "amount")]
    found = [tuple(row) for row in read_texts(spark, reads, partition_rows=1).collect()]
    wanted = [(0, "a", "1", "ü"), (0, None, "not a number", None), (0, "3", "2.5", "\ufffd"), (1, "7", None, None)]
    assert sorted(found, key=str) == sorted(wanted, key=str)


@pytest.mark.spark
@pytest.mark.xdist_group("spark")
def test_many_ranges_gaps_and_a_far_off_row_id(spark: SparkSession, tmp_path: Path) -> None:
    database = make(tmp_path / "x.db", [(f"o-{n}", n, "") for n in range(1000)])
    connection = sqlite3.connect(database)
    connection.execute('DELETE FROM "some orders" WHERE amount % 3 = 0')
    connection.execute('INSERT INTO "some orders" (rowid, id, amount) VALUES (9000000000000000000, ?, 0)', ("far",))
    connection.commit()
    connection.close()
    frame = read_texts(spark, [reading(database, "id")], partition_rows=100)
    assert 1 < frame.rdd.getNumPartitions() <= 7
    assert {row["c0"] for row in frame.collect()} == {f"o-{n}" for n in range(1000) if n % 3} | {"far"}


@pytest.mark.spark
@pytest.mark.xdist_group("spark")
def test_where_keeps_equal_rows_and_an_empty_table_is_empty(spark: SparkSession, tmp_path: Path) -> None:
    database = make(tmp_path / "x.db", [("a", 1, "x"), ("b", 2, "y'; --")])
    frame = read_texts(spark, [reading(database, "id", **{'a "note': "y'; --"})])
    assert [row["c0"] for row in frame.collect()] == ["b"]
    assert read_texts(spark, [reading(make(tmp_path / "empty.db", []), "id")]).count() == 0


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    database = make(tmp_path / "x.db", [])
    reflect_texts(readonly_url(database), "some orders", ["id"])
    with pytest.raises(Misuse, match=r"no database .*nothing\.db"):
        reflect_texts(readonly_url(tmp_path / "nothing.db"), "some orders", ["id"])
    with pytest.raises(Misuse, match="no table 'other'"):
        reflect_texts(readonly_url(database), "other", [])
    with pytest.raises(Misuse, match="has no column price, size, colour"):
        reflect_texts(readonly_url(database), "some orders", ["id", "price", "size", "colour"])
    (tmp_path / "text.db").write_text("hello, this is not a database at all, but long enough to be read as one" * 20)
    with pytest.raises(Misuse, match="cannot read"):
        reflect_texts(readonly_url(tmp_path / "text.db"), "t", ["id"])


@pytest.mark.spark
@pytest.mark.xdist_group("spark")
def test_a_plan_shows_no_password(spark: SparkSession) -> None:
    read = TextRead("postgresql://shop:hidden@127.0.0.1:1/shop", "orders", (Text("id", "text", "text"),))
    for frame in (read_texts(spark, [read]), read_sums(spark, [read])):
        plan = str(frame._jdf.queryExecution().analyzed().toString())
        assert "escrowmq-sql" in plan
        assert "hidden" not in plan
    assert "hidden" not in repr(read)
