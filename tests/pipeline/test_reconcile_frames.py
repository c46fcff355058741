"""Half ⟕ commit against sets in plain Python, on many random histories in one Spark job."""

from __future__ import annotations

import json
import random
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from escrowmq.errors import Misuse
from escrowmq.pipeline.reconcile import differing, missing, read_side, reconcile, unexpected

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]

EPOCH = datetime(2026, 1, 31, 12, tzinfo=UTC)
SETTLED = 5
"""Seconds after EPOCH: who is first seen later is still within the grace time."""
SCHEMA = "id STRING, at TIMESTAMP, digest BIGINT"


class Seen(NamedTuple):
    """One sighting."""

    id: int
    at: int
    digest: int | None


Side = list[Seen]


def histories_of(dice: random.Random, count: int) -> list[tuple[Side, Side]]:
    """Few ids, few times, few contents: so they meet. A Spark job judges all histories at once."""

    def side() -> Side:
        return [
            Seen(dice.randrange(5), dice.randrange(10), dice.choice([None, 0, 1])) for _ in range(dice.randrange(8))
        ]

    return [(side(), side()) for _ in range(count)]


def seconds(number: int) -> datetime:
    return EPOCH + timedelta(seconds=number)


def frame(spark: SparkSession, sides: list[Side]):
    rows = [(f"{number}/{one.id}", seconds(one.at), one.digest) for number, side in enumerate(sides) for one in side]
    return spark.createDataFrame(rows, SCHEMA)


def expected(half: Side, commits: Side) -> set[tuple[str, int]]:
    """What is wrong, by sets."""
    announced, committed = {one.id for one in half}, {one.id for one in commits}
    first = {one.id: one.at for one in sorted([*half, *commits], key=lambda one: -one.at)}
    content = {
        name: {one.digest for one in [*half, *commits] if one.id == name and one.digest is not None} for name in first
    }
    return (
        {("missing", name) for name in announced - committed if first[name] < SETTLED}
        | {("unexpected", name) for name in committed - announced if first[name] < SETTLED}
        | {("differing", name) for name in announced & committed if len(content[name]) > 1}
    )


@pytest.mark.invariant("I43")
@settings(max_examples=3, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate])
@given(seed=st.integers(0, 2**32), count=st.sampled_from([0, 1, 1000]))
@example(seed=1, count=1000)
@example(seed=0, count=0)
def test_the_findings_are_those_of_sets_in_plain_python(spark: SparkSession, seed: int, count: int) -> None:
    histories = histories_of(random.Random(seed), count)
    half, commits = (frame(spark, [history[side] for history in histories]) for side in (0, 1))
    report = reconcile(half, commits, settled_before=seconds(SETTLED), most=10**6)
    wanted = {(kind, f"{n}/{id}") for n, history in enumerate(histories) for kind, id in expected(*history)}
    assert {(one.kind, one.id) for one in report.named} == wanted
    assert Counter(kind for kind, _ in wanted) == Counter(
        missing=report.missing, unexpected=report.unexpected, differing=report.differing
    )
    sightings = Counter(f"{n}/{one.id}" for n, history in enumerate(histories) for side in history for one in side)
    assert (report.ids, report.half_rows + report.commit_rows) == (len(sightings), sightings.total())
    assert all(one.halves + one.commits == sightings[one.id] for one in report.named if one.id)


def test_each_kind_as_a_function_names_first_and_last_sight(spark: SparkSession) -> None:
    half = frame(spark, [[Seen(1, 3, 7), Seen(1, 1, 7), Seen(2, 0, 7), Seen(3, 0, None)]])
    commits = frame(spark, [[Seen(2, 1, 8), Seen(3, 0, 1), Seen(4, 2, 1), Seen(5, 9, 1)]])
    before = seconds(SETTLED)
    found = missing(half, commits, settled_before=before).selectExpr("*", "unix_seconds(last_seen) AS last").first()
    assert found is not None
    assert (found["id"], found["halves"], found["last"]) == ("0/1", 2, seconds(3).timestamp())
    assert [row["id"] for row in unexpected(half, commits, settled_before=before).collect()] == ["0/4"]
    assert [row["id"] for row in differing(half, commits).collect()] == ["0/2"]


@pytest.mark.invariant("I43")
def test_everything_is_written_and_a_second_run_says_the_same(spark: SparkSession, tmp_path: Path) -> None:
    half = frame(spark, [[Seen(id, id % 5, None) for id in range(300)]])
    commits = frame(spark, [[Seen(id, 0, None) for id in range(0, 300, 2)]])
    reports = [
        reconcile(half, commits, settled_before=seconds(SETTLED), out=str(tmp_path / "out"), most=3) for _ in range(2)
    ]
    assert reports[0] == reports[1]
    assert [one.id for one in reports[0].named] == ["0/105", "0/115", "0/125"]  # the first seen, then by id
    assert (reports[0].missing, reports[0].half_rows, reports[0].commit_rows) == (150, 300, 150)
    assert spark.read.parquet(str(tmp_path / "out" / "findings")).count() == 150
    assert json.loads((tmp_path / "out" / "report.json").read_text())["verdict"] == "disagree"


def test_bad_sides(spark: SparkSession) -> None:
    good = frame(spark, [[Seen(1, 0, None)]])
    with pytest.raises(Misuse, match="the half side has no column id and no at"):
        missing(good.select("digest"), good, settled_before=EPOCH)
    with pytest.raises(Misuse, match="the commits side's column at is string"):
        missing(good, good.selectExpr("id", "CAST(at AS STRING) AS at"), settled_before=EPOCH)
    with pytest.raises(Misuse, match="did you mean 'key'"):
        read_side(spark, "file:nowhere", "orders", "keys")
    nameless = spark.createDataFrame([(None, EPOCH, None)] * 2, SCHEMA)
    report = reconcile(nameless.union(good), good, settled_before=seconds(SETTLED))
    assert (report.nameless, report.missing, report.ids, report.agrees) == (2, 0, 1, False)
    empty = frame(spark, [])
    report = reconcile(empty, empty, settled_before=EPOCH)
    assert report.agrees
    assert report.half_rows == 0
