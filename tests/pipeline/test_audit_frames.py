"""The comparison on small frames: each kind of disagreement is planted and must be named, alone."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from escrowmq.pipeline.audit import frames
from escrowmq.pipeline.audit.manifest import KINDS
from escrowmq.pipeline.audit.rows import Role

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]

COLUMNS = ("who", "amount")
Rows = list[tuple[str | None, str | None, str | None]]


def frame(spark: SparkSession, rows: Rows) -> DataFrame:
    return spark.createDataFrame(rows, "id string, who string, amount string")


def witnesses(side: DataFrame, *roles: Role) -> DataFrame:
    return frames.witnesses(side, f.col("id"), f.array(*map(frames.make_witness, roles)))


def compare(spark: SparkSession, expected: Rows, found: Rows) -> set[tuple[str, str]]:
    """(kind, id) of all findings."""
    sides = [
        witnesses(frame(spark, expected), Role(0, True, COLUMNS)),
        witnesses(frame(spark, found), Role(0, False, COLUMNS)),
    ]
    wrong = frames.findings(frames.tally(sides), [KINDS]).collect()
    return {(row["kind"], row["id"]) for row in wrong}


ORDERS: Rows = [("o-1", "ann", "10"), ("o-2", "bob", "20"), ("o-3", None, "30")]


def test_equal_sides_have_no_findings(spark: SparkSession) -> None:
    assert compare(spark, ORDERS, list(reversed(ORDERS))) == set()


@pytest.mark.invariant("I43")
def test_one_lost_and_one_repeated_cancel_out_in_counts_and_are_both_named(spark: SparkSession) -> None:
    found = [ORDERS[0], ORDERS[0], ORDERS[2]]
    assert len(found) == len(ORDERS)
    assert compare(spark, ORDERS, found) == {("lost", "o-2"), ("repeated", "o-1")}


@pytest.mark.invariant("I43")
def test_a_changed_amount_is_altered(spark: SparkSession) -> None:
    assert compare(spark, ORDERS, [*ORDERS[:2], ("o-3", None, "31")]) == {("altered", "o-3")}


@pytest.mark.invariant("I43")
def test_an_id_that_nobody_expected_is_leaked(spark: SparkSession) -> None:
    assert compare(spark, ORDERS, [*ORDERS, ("C-9", "eve", "-5")]) == {("leaked", "C-9")}


def test_a_repeat_with_another_content_is_both(spark: SparkSession) -> None:
    assert compare(spark, ORDERS, [*ORDERS, ("o-1", "ann", "11")]) == {("repeated", "o-1"), ("altered", "o-1")}


def test_a_repeat_on_the_expected_side_is_named_too(spark: SparkSession) -> None:
    assert compare(spark, [*ORDERS, ORDERS[1]], ORDERS) == {("repeated", "o-2")}


def test_an_id_that_became_null_is_lost_and_what_is_there_instead_leaked(spark: SparkSession) -> None:
    assert compare(spark, ORDERS, [*ORDERS[:2], (None, None, "30")]) == {("lost", "o-3"), ("leaked", "(no id)")}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("x", "ab", "c"), ("x", "a", "bc")),  # text that moves over a border
        (("x", None, "a"), ("x", "a", None)),  # a null that changes places
        (("x", "", "a"), ("x", None, "a")),
        (("x", "10", "a"), ("x", "010", "a")),
    ],
)
def test_contents_that_look_alike_differ(spark: SparkSession, one: Rows, other: Rows) -> None:
    assert compare(spark, [one], [other]) == {("altered", "x")}  # type: ignore[list-item]


def test_a_comparison_reports_only_the_kinds_that_it_judges(spark: SparkSession) -> None:
    sides = [
        witnesses(frame(spark, ORDERS[:2]), *(Role(n, True, ("amount",)) for n in (0, 1))),
        witnesses(frame(spark, [("o-1", "ann", "99")]), *(Role(n, False, ("amount",)) for n in (0, 1))),
    ]
    wrong = frames.findings(frames.tally(sides), [("altered",), ("lost",)]).collect()
    assert {(row["comparison"], row["kind"], row["id"]) for row in wrong} == {(0, "altered", "o-1"), (1, "lost", "o-2")}


def test_an_id_wrong_in_two_places_counts_once(spark: SparkSession) -> None:
    wrong = spark.createDataFrame(
        [("lost", "a"), ("lost", "a"), ("lost", "b"), ("leaked", "a")], "kind string, id string"
    )
    assert frames.count_ids(wrong, "kind") == {"lost": 2, "leaked": 1}


def test_what_is_open_or_parked_is_orphaned(spark: SparkSession) -> None:
    half = spark.createDataFrame(
        [("a", "committed"), ("b", "open"), ("b", "rolled_back"), ("c", "parked"), ("d", "expired")],
        "id string, state string",
    )
    assert {(row["kind"], row["id"]) for row in frames.undecided(half).collect()} == {
        ("orphaned", "b"),
        ("orphaned", "c"),
    }


def test_consumed_are_the_ids_that_every_consumer_has(spark: SparkSession) -> None:
    rows = [(1, "a", 1), (1, "b", 2), (2, "b", 1), (2, "c", 1), (1, "c", 0), (3, "a", 1)]
    tallies = spark.createDataFrame(rows, "comparison int, id string, found long")
    assert [row["id"] for row in frames.find_common_ids(tallies, [1, 2]).collect()] == ["b"]


IDS = st.sampled_from(["a", "b", "c", "d"])
SIDE = st.lists(st.tuples(IDS, st.sampled_from(["x", "y", None]), st.just("1")), max_size=6)


@pytest.mark.invariant("I43")
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pairs=st.lists(st.tuples(SIDE, SIDE), min_size=20, max_size=20))
def test_any_two_sides_as_a_plain_program_would_judge_them(spark: SparkSession, pairs: list[tuple[Rows, Rows]]) -> None:
    """Twenty small worlds at once: the ids of each begin with its number."""
    sides: tuple[Rows, Rows] = ([], [])
    wanted = set()
    for number, (expected, found) in enumerate(pairs):
        for side, rows in zip(sides, (expected, found), strict=True):
            side.extend((f"{number}-{row[0]}", *row[1:]) for row in rows)
        for identity in {row[0] for row in [*expected, *found]}:
            left = [row for row in expected if row[0] == identity]
            right = [row for row in found if row[0] == identity]
            wanted |= {
                (kind, f"{number}-{identity}")
                for kind, holds in {
                    "lost": left and not right,
                    "leaked": right and not left,
                    "repeated": len(left) > 1 or len(right) > 1,
                    "altered": left and right and len({*left, *right}) > 1,
                }.items()
                if holds
            }
    assert compare(spark, *sides) == wanted


def test_two_hundred_thousand_ids_with_one_of_each_kind(spark: SparkSession) -> None:
    rows = 200_000
    every = spark.range(rows).select(
        f.format_string("order-%d", "id").alias("id"),
        f.lit("ann").alias("who"),
        (f.col("id") % 97).cast("string").alias("amount"),
    )
    number = f.substring_index("id", "-", -1).cast("long")
    extra = every.where(number == 5).unionByName(every.where(number == 6).withColumn("id", f.lit("order-none")))
    found = (
        every.where(number != 17)
        .withColumn("amount", f.when(number == 4, "?").otherwise(f.col("amount")))
        .unionByName(extra)
    )
    sides = [
        witnesses(every, Role(0, True, COLUMNS)),
        witnesses(found, Role(0, False, COLUMNS)),
    ]
    wrong = frames.findings(frames.tally(sides), [KINDS]).collect()
    assert {(row["kind"], row["id"]) for row in wrong} == {
        ("lost", "order-17"),
        ("repeated", "order-5"),
        ("altered", "order-4"),
        ("leaked", "order-none"),
    }
