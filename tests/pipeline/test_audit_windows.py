"""Windows: proven equal without laying row beside row, and never wrongly so; what is left is named as ever."""

from __future__ import annotations

import random
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f

from escrowmq.errors import Misuse
from escrowmq.pipeline.audit import compare, windows
from escrowmq.pipeline.audit.rows import Role, Rows, Speaker, digest, once
from escrowmq.pipeline.audit.tables import is_unique
from escrowmq.pipeline.sql.tables import readonly_url
from escrowmq.pipeline.sql.text_reads import Text, TextRead

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark"), pytest.mark.timeout(900)]

Row = tuple[str | None, str | None]
Findings = set[tuple[str, str, int, int]]


def frame(spark: SparkSession, rows: list[Row]) -> DataFrame:
    return spark.createDataFrame(rows, "id string, amount string").coalesce(1)


def named(expected: DataFrame, found: DataFrame, count: int, unique: str | None = None) -> Findings:
    compared = compare(expected, found, id="id", windows=count, unique=unique)
    try:
        return {(row["kind"], row["id"], row["expected"], row["found"]) for row in compared.findings.collect()}
    finally:
        compared.close()


def plainly(expected: list[Row], found: list[Row]) -> Findings:
    """What a plain program would say."""
    result = set()
    for identity in {row[0] for row in [*expected, *found]}:
        left = [row[1] for row in expected if row[0] == identity]
        right = [row[1] for row in found if row[0] == identity]
        holds = {
            "lost": left and not right,
            "leaked": right and not left,
            "repeated": len(left) > 1 or len(right) > 1,
            "altered": left and right and len({*left, *right}) > 1,
        }
        result |= {(kind, identity or "(no id)", len(left), len(right)) for kind, yes in holds.items() if yes}
    return result


IDS = st.one_of(st.none(), st.sampled_from("abcdefgh"))
SIDE = st.lists(st.tuples(IDS, st.sampled_from(["x", "y", None])), max_size=10)


@pytest.mark.invariant("I43")
@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(same=SIDE, expected=SIDE, found=SIDE, count=st.sampled_from([1, 3, 64]))
def test_windows_and_rows_say_what_a_plain_program_says(
    spark: SparkSession, same: list[Row], expected: list[Row], found: list[Row], count: int
) -> None:
    """Mostly equal multisets, ids twice on both sides among them."""
    left, right = same + expected, list(reversed(same)) + found
    assert named(frame(spark, left), frame(spark, right), count) == plainly(left, right)


@pytest.mark.invariant("I43")
def test_what_is_twice_on_both_sides_is_found_though_the_multisets_are_equal(spark: SparkSession) -> None:
    rows: list[Row] = [("a", "1"), ("b", "2"), ("b", "2"), ("c", "3")]
    assert named(frame(spark, rows), frame(spark, rows), 16) == {("repeated", "b", 2, 2)}


def test_counts_of_both_sides_include_windows_that_were_proven(spark: SparkSession) -> None:
    rows: list[Row] = [(str(n), "x") for n in range(100)]
    compared = compare(frame(spark, rows), frame(spark, [*rows[1:], ("new", "x"), ("7", "x")]), id="id", windows=8)
    assert (compared.ids, compared.expected_rows, compared.found_rows, compared.wrong_ids) == (101, 100, 101, 3)
    assert compared.kinds == {"lost": 1, "repeated": 1, "altered": 0, "leaked": 1}
    assert not compared.agrees
    compared.close()


@pytest.mark.invariant("I43")
@pytest.mark.parametrize("unique", ["expected", None])
def test_one_of_each_kind_in_one_window_of_a_hundred_thousand(spark: SparkSession, unique: str | None) -> None:
    """Distinct ids agree in all windows. Rows do, too, where the repeated id is twice on both sides; with a unique
    expected side that cannot be: one lost and one leaked cancel out, one repeated is a row too many."""
    count, rows = 64, 100_000
    dice = random.Random(str(unique))
    every = spark.range(rows).select(
        f.concat(f.lit(f"{unique}-"), f.col("id")).alias("id"), (f.col("id") * 7919 % 97).alias("amount")
    )
    number = dice.randrange(count)
    lost, twice, altered = _in_window(every, number, count, 3)
    made = spark.range(10_000).select(f.concat(f.lit("none-"), f.col("id")).alias("id"))
    [leaked] = _in_window(made, number, count, 1)
    again = every.where(f.col("id") == twice)
    extra = again.unionByName(every.where(f.col("id") == lost).withColumn("id", f.lit(leaked)))
    found = every.where(f.col("id") != lost).withColumn(
        "amount", f.when(f.col("id") == altered, -1).otherwise(f.col("amount"))
    )
    found = found.unionByName(extra)
    expected = every if unique else every.unionByName(again)
    wanted = {("lost", lost, 1, 0), ("altered", altered, 1, 1), ("leaked", leaked, 0, 1)}
    assert named(expected, found, count, unique) == wanted | {("repeated", twice, 1 if unique else 2, 2)}
    left, right = (_counts(side, number, count) for side in (expected, found))
    assert left["ids"] == right["ids"]
    assert right["rows"] - left["rows"] == (1 if unique else 0)


def _counts(side: DataFrame, number: int, count: int) -> dict[str, int]:
    inside = side.where(windows.window(f.col("id"), count) == number)
    return inside.agg(f.count("*").alias("rows"), f.countDistinct("id").alias("ids")).collect()[0].asDict()


def _in_window(every: DataFrame, number: int, count: int, most: int) -> list[str]:
    inside = every.where(windows.window(f.col("id"), count) == number).orderBy("id").limit(most)
    return [row["id"] for row in inside.collect()]


LEFT: list[Row] = [("a", "1"), ("b", "2"), ("c", "3"), ("d", "4")]


def balanced(spark: SparkSession, expected: list[Row], found: list[Row]) -> bool:
    """Whether the only window is proven equal."""
    sides = [
        Rows(once(frame(spark, rows)), f.col("id"), (Speaker((Role(0, is_expected, ("amount",)),)),))
        for rows, is_expected in ((expected, True), (found, False))
    ]
    [line] = windows.compare_windows(sides, 1).collect()
    return bool(line["equal"])


PAIRS: dict[str, tuple[list[Row], list[Row]]] = {
    "by count": (LEFT, [*LEFT[1:], ("e", "1")]),
    "without content": (LEFT, [*LEFT[1:], ("a", "9")]),
    "by xor": ([("a", "1"), ("a", "1"), ("c", "3")], [("b", "2"), ("b", "2"), ("c", "3")]),
}


@pytest.mark.invariant("I43")
@pytest.mark.parametrize("name", list(PAIRS))
def test_a_planted_weak_digest_would_be_caught(spark: SparkSession, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Each pair is unequal, and each weak digest takes its pair for equal."""
    expected, found = PAIRS[name]
    assert Counter(expected) != Counter(found)
    assert not balanced(spark, expected, found)

    def no_content(_: list[Column], *before: Column) -> Column:
        return digest([], *before)

    if name == "by count":
        monkeypatch.setattr(windows, "_split", lambda hashed: (f.lit(0), f.lit(0)))
    elif name == "without content":
        monkeypatch.setattr(windows, "digest", no_content)
    else:
        monkeypatch.setattr(windows, "_sum_half", f.bit_xor)
    assert balanced(spark, expected, found)


def test_large_sums_do_not_overflow(spark: SparkSession) -> None:
    every = spark.range(300_000).select(f.col("id").cast("string").alias("id"), f.lit("x").alias("amount"))
    compared = compare(every, every.orderBy(f.desc("id")), id="id", windows=1, unique="expected")
    assert (compared.agrees, compared.ids) == (True, 300_000)
    compared.close()


def test_sides_that_cannot_be_compared_are_refused(spark: SparkSession) -> None:
    one = frame(spark, LEFT)
    other = one.withColumn("amount", f.col("amount").cast("int"))
    with pytest.raises(Misuse, match=r"no column 'amout' \(did you mean 'amount'"):
        compare(one, one, id="id", columns=["amout"])
    with pytest.raises(Misuse, match="'amount' is string on the expected side, int"):
        compare(one, other, id="id")
    with pytest.raises(Misuse, match="no kind 'lots'"):
        compare(one, one, id="id", kinds=["lots"])
    with pytest.raises(Misuse, match="unique = 'both'"):
        compare(one, one, id="id", unique="both")


@pytest.mark.parametrize(
    ("schema", "rows", "where", "unique"),
    [
        ("id TEXT PRIMARY KEY", [("a",), ("b",)], {}, True),
        ("id INTEGER PRIMARY KEY", [(1,), (2,)], {}, True),
        ("id TEXT UNIQUE", [("a",), (None,), (None,)], {}, False),  # nulls are all different to an index
        ("id UNIQUE", [(1,), ("1",)], {}, False),  # and these are the same text
        ("id TEXT", [("a",)], {}, False),
        ("id TEXT, who TEXT, PRIMARY KEY (who, id)", [("a", "x")], {"who": "x"}, True),
        ("id TEXT, who TEXT, PRIMARY KEY (who, id)", [("a", "x")], {}, False),
    ],
)
def test_a_database_s_own_index_says_whether_ids_are_unique(
    tmp_path: Path, schema: str, rows: list[tuple[object, ...]], where: dict[str, str], unique: bool
) -> None:
    with closing(sqlite3.connect(tmp_path / "x.db")) as database:
        database.execute(f"CREATE TABLE t ({schema})")
        database.executemany(f"INSERT INTO t VALUES ({', '.join('?' * len(rows[0]))})", rows)
        database.commit()
    assert is_unique(id_of(readonly_url(tmp_path / "x.db"), where)) is unique


def id_of(url: str, where: dict[str, str]) -> TextRead:
    wanted = tuple((name, "text", text) for name, text in where.items())
    return TextRead(url, "t", (Text("id", "text", "text"),), wanted)


def test_a_partial_index_says_nothing(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "x.db")) as database:
        database.execute("CREATE TABLE t (id TEXT, gone INTEGER)")
        database.execute("CREATE UNIQUE INDEX some ON t (id) WHERE gone = 0")
        database.execute("INSERT INTO t VALUES ('a', 1), ('a', 1)")
        database.commit()
    assert not is_unique(id_of(readonly_url(tmp_path / "x.db"), {}))


SERVED = [
    ("id VARCHAR(9) PRIMARY KEY", {}, True),
    ("id VARCHAR(9) NOT NULL UNIQUE", {}, True),
    ("id VARCHAR(9) UNIQUE", {}, False),  # nulls are all different to an index
    ("id VARCHAR(9) NOT NULL", {}, False),
    ("id VARCHAR(9), who VARCHAR(9), PRIMARY KEY (who, id)", {"who": "x"}, True),
    ("id VARCHAR(9), who VARCHAR(9), PRIMARY KEY (who, id)", {}, False),
]


def test_a_server_s_own_index_says_whether_ids_are_unique(database_url: str) -> None:
    if database_url.startswith("sqlite"):
        return
    engine = sa.create_engine(database_url)
    partial = [] if engine.dialect.name != "postgresql" else ["CREATE UNIQUE INDEX zeros ON t (id) WHERE n = 0"]
    partial += [] if engine.dialect.name != "postgresql" else ["CREATE UNIQUE INDEX made ON t (lower(id))"]
    for schema, where, unique in [*SERVED, ("id VARCHAR(9) NOT NULL, n INTEGER", {}, False)]:
        with engine.begin() as connection:
            connection.exec_driver_sql("DROP TABLE IF EXISTS t")
            connection.exec_driver_sql(f"CREATE TABLE t ({schema})")
            for statement in partial if " n INTEGER" in schema else []:
                connection.exec_driver_sql(statement)
        assert is_unique(id_of(database_url, where)) is unique, schema
    engine.dispose()


def test_what_is_unique_is_learnt_from_equal_windows_and_no_others(spark: SparkSession) -> None:
    """Three sides in a row, the first of them unique: the others are known where their windows are equal."""
    some = frame(spark, LEFT)
    sides = [
        Rows(once(some), f.col("id"), (Speaker((Role(0, True, ()),), unique=True),)),
        Rows(once(some), f.col("id"), (Speaker((Role(0, False, ()), Role(1, True, ()))),)),
        Rows(once(some), f.col("id"), (Speaker((Role(1, False, ()),)),)),
    ]
    assert windows.find_suspects(sides, {0: {0, 1, 2}, 1: {0, 1, 3}}, 4) == {0: {3}, 1: {2, 3}}
