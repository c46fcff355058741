"""The stream of findings against plain Python: sightings out of order, repeated and late, the query killed and started
again.
"""

from __future__ import annotations

import json
import os
import random
from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

import escrowmq as mq
from escrowmq.errors import Misuse
from escrowmq.pipeline.reconcile import settled, start, stream_findings
from escrowmq.pipeline.reconcile.streaming import as_rows, from_messages
from escrowmq.spark.source import register
from forked import Forked

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]

EPOCH = datetime(2026, 1, 31, 12, tzinfo=UTC)
GRACE, LATENESS, SPAN, BATCHES = 10, 5, 60, 6
SCHEMA = pa.schema([("id", pa.utf8()), ("at", pa.timestamp("us", tz="UTC")), ("digest", pa.int64())])
Sighting = tuple[str, int, int, int]
"""id, side (1: half), second, digest."""
Told = tuple[str, str, int, int, int]
"""kind, id, halves, commits, first second."""


def histories(dice: random.Random, count: int) -> list[Sighting]:
    """Few ids in each, at random times on both sides, in any order, repeated, with two contents."""
    return [
        (f"{number}/{dice.randrange(3)}", dice.randrange(2), dice.randrange(SPAN), dice.choice([7, 7, 7, 8]))
        for number in range(count)
        for _ in range(dice.randrange(7))
    ]


def expected(sightings: list[Sighting]) -> list[Told]:
    """Sessions by hand: sightings of an id no more than the grace time apart."""
    by_id: dict[str, list[Sighting]] = defaultdict(list)
    for one in sorted(sightings, key=lambda one: one[2]):
        by_id[one[0]].append(one)
    told = []
    for id, all_of_it in by_id.items():
        sessions: list[list[Sighting]] = []
        for one in all_of_it:
            if sessions and one[2] - sessions[-1][-1][2] <= GRACE:
                sessions[-1].append(one)
            else:
                sessions.append([one])
        for session in sessions:
            halves, commits = sum(one[1] for one in session), sum(1 - one[1] for one in session)
            kind = "missing" if not commits else "alone" if not halves else None
            if kind is None and len({one[3] for one in session}) > 1:
                kind = "differing"
            if kind is not None:
                told.append((kind, id, halves, commits, session[0][2]))
    return sorted(told)


def write(folder: Path, sightings: list[Sighting], dice: random.Random, batches: int = BATCHES) -> None:
    """Files of both sides, one a micro-batch; every sighting comes late by less than what the watermark allows."""
    late = sorted(
        (at + dice.random() * (GRACE + LATENESS), (id, side, at, digest)) for id, side, at, digest in sightings
    )
    step = (SPAN + GRACE + LATENESS) / batches
    for number in range(batches + 1):
        for side in (0, 1):
            rows = [one for when, one in late if one[1] == side and number * step <= when < (number + 1) * step]
            if number == batches and side == 1:
                rows = [("the end", 1, 10**6, 0)]  # time goes on: whatever is still open is over
            columns = zip(*((id, EPOCH + timedelta(seconds=at), digest) for id, _, at, digest in rows), strict=True)
            arrays = [pa.array(c, k.type) for c, k in zip(list(columns) or [()] * 3, SCHEMA, strict=True)]
            file = folder / str(side) / f"{number}.parquet"
            file.parent.mkdir(exist_ok=True)
            pq.write_table(pa.Table.from_arrays(arrays, schema=SCHEMA), file)
            os.utime(file, (number + 1, number + 1))  # the order in which Spark reads them


def sides(spark: SparkSession, folder: Path) -> list[DataFrame]:
    reader = spark.readStream.schema("id STRING, at TIMESTAMP, digest BIGINT").option("maxFilesPerTrigger", 1)
    return [reader.option("latestFirst", False).parquet(str(folder / side)) for side in ("1", "0")]


def collected(found: DataFrame) -> list[Told]:
    start_us = int(EPOCH.timestamp() * 1e6)
    rows = as_rows(found).collect()
    return sorted(
        (r["kind"], r["id"], r["halves"], r["commits"], (r["first_seen_us"] - start_us) // 10**6) for r in rows
    )


@pytest.mark.invariant("I43")
def test_as_sessions_in_plain_python_though_the_query_dies(spark: SparkSession, tmp_path: Path) -> None:
    dice = random.Random(11)
    sightings = histories(dice, 300)
    write(tmp_path, sightings, dice)
    found = stream_findings(*sides(spark, tmp_path), grace_seconds=GRACE, lateness_seconds=LATENESS)
    told: dict[int, list[Told]] = {}
    deaths = []

    def each(batch: DataFrame, number: int) -> None:
        rows = collected(batch)
        assert told.setdefault(number, rows) == rows  # a batch that is repeated says the same
        if number in (2, 4) and number not in deaths:
            deaths.append(number)
            raise RuntimeError("killed")

    for number in (2, 4):
        with pytest.raises(Exception, match="killed"):
            start(found, checkpoint=str(tmp_path / "checkpoint"), each=each, once=True).awaitTermination()
        assert deaths[-1] == number
    start(found, checkpoint=str(tmp_path / "checkpoint"), each=each, once=True).awaitTermination()
    wanted = expected(sightings)
    assert sorted(one for rows in told.values() for one in rows) == wanted
    assert len([rows for rows in told.values() if rows]) > 2  # and not all at the end
    assert {kind for kind, *_ in wanted} == {"missing", "alone", "differing"}


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[str]:
    import subprocess
    import sys

    command = [sys.executable, "-m", "escrowmq", "serve", "--folder", str(tmp_path / "data"), "--json"]
    process = Forked([*command, "--listen", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield json.loads(process.stdout.readline())["url"]
    process.terminate()
    process.communicate()


@pytest.mark.invariant("I43")
def test_into_a_topic_once_and_a_late_commit_settles(spark: SparkSession, tmp_path: Path, broker: str) -> None:
    sightings: list[Sighting] = [
        ("lost", 1, 0, 0),
        ("late", 1, 1, 0),
        ("fine", 1, 2, 0),
        ("fine", 0, 1, 0),  # before its half
        ("stray", 0, 3, 0),
        ("late", 0, 50, 0),
        ("other", 1, 4, 1),
        ("other", 0, 4, 2),
    ]
    write(tmp_path, sightings, random.Random(1), batches=2)
    found = stream_findings(*sides(spark, tmp_path), grace_seconds=GRACE, lateness_seconds=LATENESS)
    checkpoint = str(tmp_path / "checkpoint")
    for _ in range(2):  # the second finds nothing to do
        start(found, checkpoint=checkpoint, url=broker, topic="found", once=True).awaitTermination()
    with mq.connect(broker) as bus:
        assert bus.admin.read("found").read_all().num_rows == 5
    register(spark)
    told = from_messages(spark.read.format("escrow").option("topic", "found").load(broker))
    assert collected(told) == expected(sightings)
    stands = {row["id"]: row["kind"] for row in settled(told).collect()}
    assert stands == {"lost": "missing", "late": "settled late", "stray": "unexpected", "other": "differing"}
    assert settled(told).where(f.col("id") == "late").first()["commits"] == 1  # type: ignore[index]


def test_bad_goals(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "1").mkdir()
    half, commits = sides(spark, tmp_path)
    with pytest.raises(Misuse, match="grace = 0"):
        stream_findings(half, commits, grace_seconds=0)
    found = stream_findings(half, commits)
    with pytest.raises(Misuse, match="either to a topic at a URL or to a function"):
        start(found, checkpoint=str(tmp_path / "c"), topic="found")
    with pytest.raises(Misuse, match="the half side has no column at"):
        stream_findings(half.drop("at"), commits)
