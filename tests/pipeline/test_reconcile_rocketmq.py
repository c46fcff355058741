"""A copy of a RocketMQ topic as a side, and the comparison of contents with their counts."""

from __future__ import annotations

import random
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from pyspark.sql import SparkSession

from escrowmq.gateway.rocketmq.copying import SCHEMA
from escrowmq.pipeline.reconcile import reconcile
from escrowmq.pipeline.reconcile.rocketmq import read_copy

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]

EPOCH = datetime(2026, 1, 31, 12, tzinfo=UTC)
LATER = EPOCH + timedelta(days=1)


def row(offset: int, *, queue: int = 0, attempt: int = 1, message: str = "", key: str | None = None) -> dict[str, Any]:
    return {
        "key": key or f"k{offset}",
        "message_id": message or f"{queue}/{offset}",
        "stored": EPOCH + timedelta(seconds=offset),
        "digest": "d",
        "broker": "b",
        "queue": queue,
        "offset": offset,
        "attempt": attempt,
    }


def write(folder: Path, *parts: list[dict[str, Any]]) -> None:
    for number, rows in enumerate(parts):
        parquet.write_table(pa.Table.from_pylist(rows, SCHEMA), folder / f"{number}.parquet")


def test_a_message_that_was_delivered_again_is_one(spark: SparkSession, tmp_path: Path) -> None:
    again = row(900, queue=7, attempt=2, message="0/1", key="k1")
    write(tmp_path, [row(0), row(1)], [again, row(2)], [row(901, queue=7, attempt=3, message="0/1", key="k1")])
    side, limits = read_copy(spark, tmp_path, "orders")
    assert sorted(one["id"] for one in side.collect()) == ["k0", "k1", "k2"]
    assert (limits.beginnings, limits.incomplete) == ((), "")


def test_a_message_that_was_stored_twice_is_two(spark: SparkSession, tmp_path: Path) -> None:
    write(tmp_path, [row(0, message="same"), row(1, message="same", key="k0")])
    side, _ = read_copy(spark, tmp_path, "orders")
    assert [one["id"] for one in side.collect()] == ["k0", "k0"]


def test_what_only_came_again_fills_its_place_in_the_queue(spark: SparkSession, tmp_path: Path) -> None:
    rows = [row(0), row(3), row(900, queue=7, attempt=2, message="0/1"), row(901, queue=7, attempt=2, message="0/2")]
    write(tmp_path, rows)
    side, limits = read_copy(spark, tmp_path, "orders")
    assert (side.count(), limits.incomplete) == (4, "")
    (tmp_path / "0.parquet").unlink()
    write(tmp_path, rows[:-1])
    assert read_copy(spark, tmp_path, "orders")[1].incomplete.startswith("1 messages between others")


def test_a_queue_that_begins_later_is_named(spark: SparkSession, tmp_path: Path) -> None:
    write(tmp_path, [row(0), row(5, queue=1), row(6, queue=1)])
    _, limits = read_copy(spark, tmp_path, "orders")
    [beginning] = limits.beginnings
    assert str(beginning) == "RocketMQ orders at b/1 begins at 5"
    assert beginning.since_us == round((EPOCH + timedelta(seconds=5)).timestamp() * 1e6)


def test_an_empty_topic_is_an_empty_side(spark: SparkSession, tmp_path: Path) -> None:
    side, limits = read_copy(spark, tmp_path, "orders")
    assert (side.count(), limits.beginnings, limits.incomplete) == (0, (), "")


@settings(max_examples=3, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate])
@given(seed=st.integers(0, 2**32))
def test_contents_are_compared_with_their_counts(spark: SparkSession, seed: int) -> None:
    dice = random.Random(seed)
    sides = [[(dice.randrange(300), dice.randrange(3)) for _ in range(600)] for _ in range(2)]
    frames = [
        spark.createDataFrame([(str(id), EPOCH, d) for id, d in side], "id STRING, at TIMESTAMP, digest LONG")
        for side in sides
    ]
    report = reconcile(*frames, settled_before=LATER, copies=True, most=10**6)
    expected = set()
    for id in {id for side in sides for id, _ in side}:
        theirs, ours = (Counter(d for one, d in side if one == id) for side in sides)
        if not ours or not theirs:
            expected.add(("unexpected" if ours else "missing", str(id)))
        elif set(theirs) != set(ours):
            expected.add(("differing", str(id)))
        elif theirs != ours:
            expected.add(("repeated", str(id)))
    assert {(one.kind, one.id) for one in report.named} == expected
    assert report.repeated == sum(kind == "repeated" for kind, _ in expected)
