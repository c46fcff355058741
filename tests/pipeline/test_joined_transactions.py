"""Half messages and decisions, joined in ranges of the log: however they are cut, all transactions are counted once."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession

from escrowmq.message.ids import transaction_id
from escrowmq.pipeline import timeline
from escrowmq.pipeline.sql.summing import hash_ids
from escrowmq.pipeline.transactions import (
    DECISION_COLUMNS,
    ROWS,
    TransactionRead,
    count_ids,
    find_times,
    join_loose,
    join_range,
)
from escrowmq.spark.columns import HALF, OP, arrow_schema

READ = TransactionRead({}, ("orders", "points"))
START_US = 1_700_000_000_000_000


@dataclass
class Log:
    """Positions of a log: half messages (``halves``) and decisions (``decisions``), each by its position."""

    halves: dict[int, dict[str, Any]]
    decisions: dict[int, dict[str, Any]]

    def read(self, spark: SparkSession, *cuts: int) -> DataFrame:
        """The rows of :meth:`join` as a frame. Of a table in several chunks Spark would drop rows."""
        return spark.createDataFrame(pa.Table.from_batches(self.join(*cuts)).combine_chunks(), ROWS)

    def join(self, *cuts: int) -> list[pa.RecordBatch]:
        """All rows, joined in ranges between these positions."""
        size, rows = len(self.halves) + len(self.decisions), []
        half = arrow_schema([column for column in HALF if column.name in READ.columns])
        op = arrow_schema([column for column in OP if column.name in DECISION_COLUMNS])
        edges = [0, *sorted({cut for cut in cuts if 0 < cut < size}), size]
        for start, stop in pairwise(edges):
            parts = [
                [pa.RecordBatch.from_pylist([its[n]], schema=schema) for n in range(start, stop) if n in its]
                for its, schema in ((self.halves, half), (self.decisions, op))
            ]
            rows += list(join_range(READ, *parts, start))
        return rows


def make_log(steps: list[tuple[int, str]]) -> Log:
    """A log of steps: the number of a transaction, and whether a message of a topic is added to it, or it ends."""
    log, first, states = Log({}, {}), dict[int, int](), dict[int, str]()
    for number, what in steps:
        position = len(log.halves) + len(log.decisions)
        ends = what in ("committed", "rolled_back")
        if number in states or (ends and number not in first):
            continue
        id = transaction_id(7, 1 + number % 2, first.setdefault(number, position))
        if ends:
            states[number] = what
            by = {"state": what, "decided_by": "check" if number % 3 else "producer"}
            log.decisions[position] = {"transaction_id": id, "decided": START_US + position, **by}
        else:
            row = {"topic": what, "key": f"o-{number % 5}", "checks": number % 2, "stored": START_US + position}
            log.halves[position] = {"transaction_id": id, "state": "open", **row}
    for row in log.halves.values():
        number = next(n for n, at in first.items() if row["transaction_id"] == transaction_id(7, 1 + n % 2, at))
        row["state"] = states.get(number, "open")
    return log


def count_directly(log: Log) -> dict[str, Any]:
    """The totals, one by one."""
    begun: dict[bytes, list[dict[str, Any]]] = {}
    for row in log.halves.values():
        if row["topic"] in ("orders", "points"):
            begun.setdefault(row["transaction_id"], []).append(row)
    ended = {row["transaction_id"]: row for row in log.decisions.values()}
    states = Counter(ended[id]["state"] if id in ended else "undecided" for id in begun)
    first = {id: min(row["stored"] for row in rows) for id, rows in begun.items()}
    times = [*first.values(), *(ended[id]["decided"] for id in begun if id in ended)]
    undecided = [at for id, at in first.items() if id not in ended]
    checks = [max(row["checks"] for row in rows) for rows in begun.values()]
    return {
        "transactions": len(begun),
        **{name: states[name] for name in ("committed", "rolled_back", "expired", "undecided")},
        "asked": sum(checks),
        "asked_about": sum(one > 0 for one in checks),
        "first_us": min(first.values(), default=None),
        "last_us": max(times, default=None),
        "oldest_us": min(undecided, default=None),
    }


def random_log(seed: int) -> Log:
    random = np.random.default_rng(seed)
    whats = ["orders", "points", "other", "committed", "committed", "rolled_back"]
    steps = zip(random.integers(0, 300, 1500).tolist(), random.choice(whats, 1500).tolist(), strict=True)
    return make_log(list(steps))


@pytest.mark.spark
@pytest.mark.xdist_group("spark")
@pytest.mark.parametrize("cuts", [(), (200, 201, 500), tuple(range(0, 1500, 37))])
def test_totals_charts_and_ids_do_not_depend_on_the_ranges(spark: SparkSession, cuts: tuple[int, ...]) -> None:
    log = random_log(5)
    rows = log.read(spark, *cuts)
    transactions = join_loose(rows)
    wanted = count_directly(log)
    assert timeline.count_totals(transactions) == wanted
    over_time, latencies = timeline.count_charts(transactions, START_US, 100, ended_by="state", latency_by="decided_by")
    assert sum(over_time["prepared"].values()) == wanted["transactions"]
    assert sum(over_time["committed"].values()) == wanted["committed"]
    assert sum(sum(steps.values()) for steps in latencies.values()) == wanted["committed"] + wanted["rolled_back"]
    unpacked = timeline.unpack(transactions).collect()
    assert Counter(row["state"] or "undecided" for row in unpacked) == {
        name: count for name in ("committed", "rolled_back", "undecided") if (count := wanted[name])
    }
    mine = [row for row in log.halves.values() if row["topic"] != "other"]
    assert count_ids(rows) == len({row["key"] for row in mine})
    hashes = hash_ids(pa.array([b"o-1", b"o-4"])).tolist()
    first = {key: min(row["stored"] for row in mine if row["key"] == key) for key in ("o-1", "o-4")}
    found = find_times(rows, hashes).groupBy("hashed").min("stored_us").collect()
    assert sorted(row[1] for row in found) == sorted(first.values())
    assert find_times(rows).groupBy("hashed").min("stored_us").count() == 5
    undecided = rows.where("state IS NOT NULL").select("id").collect()
    assert Counter(row["id"] for row in undecided) == Counter(row["key"] for row in mine if row["state"] == "open")


@pytest.mark.spark
@pytest.mark.xdist_group("spark")
def test_a_log_without_transactions_has_totals_of_zero(spark: SparkSession) -> None:
    rows = make_log([]).read(spark)
    assert timeline.count_totals(join_loose(rows)) == count_directly(make_log([]))
    assert count_ids(rows) == 0


WHATS = st.sampled_from(["orders", "points", "other", "committed", "rolled_back"])


@given(st.lists(st.tuples(st.integers(0, 6), WHATS), max_size=40), st.lists(st.integers(1, 40), max_size=4))
@settings(deadline=None)
def test_each_transaction_is_joined_once_or_loose(steps: list[tuple[int, str]], cuts: list[int]) -> None:
    """A transaction within one range is joined there. All of what is loose belongs to the others."""
    log = make_log(steps)
    batches = log.join(*cuts)
    size = len(log.halves) + len(log.decisions)
    edges = [0, *sorted({cut for cut in cuts if 0 < cut < size})]

    def find_range(position: int) -> int:
        return int(np.searchsorted(edges, position, side="right"))

    whole = 0
    for id, end in {row["transaction_id"]: at for at, row in log.decisions.items()}.items():
        its = [at for at, row in log.halves.items() if row["transaction_id"] == id]
        mine = any(log.halves[at]["topic"] != "other" for at in its)
        whole += mine and find_range(min(its)) == find_range(end)
    packed = [value for batch in batches for value in batch.column("packed").to_pylist() if value is not None]
    assert sum(len(value) // 24 for value in packed) == whole
