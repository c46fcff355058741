"""`escrowmq reconcile` over two served brokers and over a folder, in batches and as a stream: confirms lost, out of
order and late.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner

import escrowmq as mq
from escrowmq.cli.main import app
from escrowmq.errors import Code
from escrowmq.pipeline.reconcile import settled
from escrowmq.pipeline.reconcile.streaming import from_messages
from escrowmq.spark.source import register
from escrowmq_lab.servers import escrow
from forked import Forked

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]

IDS = [f"o-{number}" for number in range(24)]
LOST, LATE = {"o-3", "o-8", "o-17"}, {"o-5", "o-20"}
GRACE_US, LATENESS_US = 300_000, 100_000


@pytest.fixture(params=["two brokers", pytest.param("folder", marks=pytest.mark.long)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "folder":
        yield f"file:{tmp_path / 'data'}"
        return
    with ExitStack() as stack:
        there = [stack.enter_context(escrow.serving(tmp_path / name, launcher=Forked)).url for name in "ab"]
        yield ",".join([there[0], *(url.removeprefix("escrow://") for url in there[1:])])


def shop(url: str) -> None:
    """Every id is announced and committed, in any order, some twice; some commits are lost and some not yet there."""
    dice = random.Random(3)
    acts = [("order-keys", id) for id in [*IDS, "o-1", "o-2"]]
    acts += [("orders", id) for id in [*IDS, "o-2"] if id not in LOST | LATE]
    dice.shuffle(acts)
    with mq.connect(url) as bus:
        producer = bus.producer("shop", checker=lambda check: mq.UNKNOWN)
        halves = [producer.prepare("orders", b"book", key=id) for id in sorted(LOST)]  # in escrow, and never confirmed
        for topic, id in acts:
            if topic == "order-keys":
                bus.producer("keys").send(topic, b"", key=id)
            else:
                half = producer.prepare(topic, b"book", key=id)
                assert producer.commit(half.transaction_id) is Code.COMMITTED
    assert len(halves) == len(LOST)


def later(url: str, late: set[str]) -> None:
    """The late commits; then time goes on, on the clock of the brokers, until every session is over."""
    with mq.connect(url) as bus:
        producer = bus.producer("plain")
        for id in sorted(late):
            producer.send("orders", b"book", key=id)
        first = last = 0
        while last - first <= GRACE_US + LATENESS_US:
            producer.send("orders", b"", key="tick")
            producer.send("order-keys", b"", key="tick")
            ticks = [at for key, at in sightings(bus, "orders") if key == "tick"]
            first, last = first or max(ticks), max(ticks)


def sightings(bus: mq.Bus, topic: str) -> list[tuple[str, int]]:
    """Keys and when they were stored."""
    rows = bus.admin.read(topic).read_all()
    return list(zip(rows["key"].to_pylist(), rows["stored_us"].to_pylist(), strict=True))


def reconcile(url: str, *more: str) -> Any:
    words = ["reconcile", "--url", url, "--half", "order-keys", "--commits", "orders", *more]
    ran = CliRunner().invoke(app, words)
    assert ran.exit_code in (0, 1), ran.output
    return ran


def missing(url: str) -> set[str]:
    """What the batch says."""
    told = json.loads(reconcile(url, "--json", "--settled-before", "2100-01-01").stdout)
    assert {one["kind"] for one in told["named"]} <= {"missing"}
    return {one["id"] for one in told["named"]}


@pytest.mark.invariant("I43")
def test_lost_out_of_order_and_late(spark: SparkSession, url: str, tmp_path: Path) -> None:
    shop(url)
    assert missing(url) == LOST | LATE
    later(url, set())
    first = stream(spark, url, tmp_path)
    assert {id for kind, id in first if kind == "missing"} >= LOST | LATE
    later(url, LATE)
    assert missing(url) == LOST
    assert {("alone", id) for id in LATE} <= set(stream(spark, url, tmp_path))


def stream(spark: SparkSession, url: str, folder: Path) -> list[tuple[str, str]]:
    """Kind and id of all that the stream tells until it has read what is there: printed, or told to a topic exactly
    once."""
    times = ["--grace", f"{GRACE_US}us", "--lateness", f"{LATENESS_US}us"]
    options = ["--stream", "--once", "--checkpoint", str(folder / "checkpoint"), *times]
    if url.startswith("file:"):
        return [(one["kind"], one["id"]) for one in map(json.loads, reconcile(url, *options).stdout.splitlines())]
    reconcile(url, *options, "--out-topic", "lost-orders")
    register(spark)
    told = from_messages(spark.read.format("escrow").option("topic", "lost-orders").load(url))
    stands = {row["id"]: row["kind"] for row in settled(told).collect()}
    found = [(row["kind"], row["id"]) for row in told.select("kind", "id").collect()]
    assert {stands[id] for id in LOST} == {"missing"}
    assert {stands[id] for id in LATE} <= {"missing", "settled late"}
    return found
