"""Values that may differ a little, columns that are not compared, samples, and the column that differs most."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as f
from test_canonical_text import backend, fill, on_spark, sqlite_value

import escrowmq as mq
from escrowmq.errors import Misuse
from escrowmq.pipeline.audit import Verdict, frames, run
from escrowmq.pipeline.audit.checking import check
from escrowmq.pipeline.audit.manifest import find_problems
from escrowmq.pipeline.audit.parts.sample import parse_sample
from escrowmq.pipeline.audit.rows import Role

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark"), pytest.mark.timeout(900)]

TYPES = {
    "sqlite": {"price": "DECIMAL(20,6)", "weight": "DOUBLE", "at": "TIMESTAMP", "note": "TEXT", "own": "TEXT"},
    "postgresql": {
        **{"price": "NUMERIC(20,6)", "weight": "DOUBLE PRECISION", "at": "TIMESTAMPTZ", "note": "TEXT"},
        **{"own": "TEXT"},
    },
    "mysql": {
        **{"price": "DECIMAL(20,6)", "weight": "DOUBLE", "at": "DATETIME(6)", "note": "VARCHAR(20)"},
        **{"own": "VARCHAR(20)"},
    },
}
TIME = datetime(2026, 1, 31, 12, tzinfo=UTC)
ROW: dict[str, Any] = {"price": Decimal("100.00"), "weight": 1.5, "at": TIME, "note": "n", "own": "not in messages"}
SAME = {"price": "100", "weight": "1.5", "at": "2026-01-31T12:00:00Z", "note": "n"}
EDITS: dict[str, tuple[dict[str, Any], str | None]] = {
    "price-1": ({"price": "100.01"}, None),
    "price-2": ({"price": "99.99"}, None),
    "price-3": ({"price": "100.010001"}, "price"),
    "price-4": ({"price": None}, "price"),
    "price-5": ({"price": "abc"}, "price"),
    "price-6": ({"price": "1e2"}, None),
    "price-7": ({"price": "-100"}, "price"),
    "weight-1": ({"weight": "1.501"}, None),
    "weight-2": ({"weight": "1.5010001"}, "weight"),
    "weight-3": ({"weight": "-1.5"}, "weight"),
    "at-1": ({"at": "2026-01-31T12:00:02Z"}, None),
    "at-2": ({"at": "2026-01-31T11:59:57.999999Z"}, "at"),
    "at-3": ({"at": "noon"}, "at"),
    "note-1": ({"note": "N", "price": "100.001"}, "note"),
    "all-1": ({"price": "99.995", "weight": "1.4995", "at": "2026-01-31 13:00:01+01:00"}, None),
}
"""By id: what its message has instead, and the column in which that differs."""
COMPARED = {"columns": ["*"], "exclude": ["own"], "tolerance": {"price": 0.01, "weight": 0.001}, "clock_skew": 2}
NOTE = {"columns": ["note"]}


def build(
    folder: Path,
    url: str,
    bodies: dict[str, dict[str, Any]],
    comparison: dict[str, Any] = COMPARED,
    other: dict[str, Any] = NOTE,
) -> Path:
    """A run whose table has ROW for every id, and whose log has these messages."""
    columns = TYPES[backend(url)]
    row = [sqlite_value(name, ROW[name]) if backend(url) == "sqlite" else ROW[name] for name in columns]
    fill(url, columns, [(id, *row) for id in bodies])
    with mq.connect(f"file:{folder / 'broker'}") as bus:
        producer = bus.producer("shop", checker=lambda _: mq.UNKNOWN)
        messages = [mq.Message("orders", json.dumps(body).encode(), key=id) for id, body in bodies.items()]
        receipts = producer.prepare_batch(messages)
        assert producer.end_batch(receipts.transactions, [mq.COMMIT] * len(messages)).ok
        producer.close()
    sides = {"expected": "table:t", "found": "topic:orders"}
    manifest = {
        "log": "broker",
        "tables": {"t": {"database": "${SHOP_DB}", "table": "t", "id": "id", "unique": True}},
        "topics": ["orders"],
        "comparisons": [{**sides, **comparison}, {**sides, **other}],
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def audit_both_ways(folder: Path, **options: Any) -> Verdict:
    """By checksums and by rows, with the same bytes."""
    verdict = run(folder, page=False, windows=16, **options)
    text = (folder / "verdict.json").read_bytes()
    assert run(folder, windows=0, **options) == verdict
    assert (folder / "verdict.json").read_bytes() == text
    return verdict


@pytest.mark.invariant("I43")
def test_values_may_differ_up_to_the_limit_and_no_further(
    spark: SparkSession, database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOP_DB", database_url)
    build(tmp_path, database_url, {id: {**SAME, **changed} for id, (changed, _) in EDITS.items()})
    assert check(tmp_path) == []
    verdict = audit_both_ways(tmp_path)
    wrong = {id for id, (_, column) in EDITS.items() if column}
    assert {(finding.kind, finding.id) for finding in verdict.findings} == {("altered", id) for id in wrong}
    first, second = verdict.differing
    assert (first.column, first.ids, first.examined) == ("price", 4, len(wrong))
    assert [(pair.id, pair.expected and Decimal(pair.expected), pair.found) for pair in first.pairs] == [
        ("price-3", 100, "100.010001"),
        ("price-4", 100, None),
        ("price-5", 100, "abc"),
    ]
    assert (second.column, second.ids, [pair.id for pair in second.pairs]) == ("note", 1, ["note-1"])
    assert "100.010001" in (tmp_path / "report.html").read_text()


@pytest.mark.invariant("I43")
def test_a_sample_has_the_same_ids_on_all_sides(
    spark: SparkSession, database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the ids are altered: those of the sample are found, all of them and no others. Their values are shown as
    a person writes them."""
    monkeypatch.setenv("SHOP_DB", database_url)
    ids = [f"o-{n}" for n in range(200)]
    bodies = [{**SAME, "weight": "-0.25"} if n % 2 else SAME for n in range(len(ids))]
    build(tmp_path, database_url, dict(zip(ids, bodies, strict=True)), other={"columns": ["weight"]})
    sampled = {id for id in ids if int(hashlib.md5(id.encode()).hexdigest()[:15], 16) % 1_000_000 < 250_000}
    verdict = audit_both_ways(tmp_path, sample="25%")
    assert {finding.id for finding in verdict.findings} == sampled & set(ids[1::2])
    assert {(one.column, pair.expected, pair.found) for one in verdict.differing for pair in one.pairs} == {
        ("weight", "1.5", "-0.25")
    }
    assert (verdict.ids, verdict.transactions, verdict.sample) == (len(sampled), len(sampled), "25%")
    assert {(side.ids, side.expected_rows) for side in verdict.comparisons} == {(len(sampled), len(sampled))}
    assert "25% of the ids" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("text", ["1", "0%", "101%", "0.00001%", "-1%", "x%", ""])
def test_a_sample_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(Misuse, match="a percentage"):
        parse_sample(text)


VALUE = st.decimals(-5, 5, places=2).map(str) | st.sampled_from(["x", None])
PLAIN = [None, "x"]


def differs(values: Sequence[str | None], limit: Decimal) -> bool:
    numbers = [Decimal(value) for value in values if value not in PLAIN]
    if len(numbers) < len(values):
        return len(set(values)) > 1
    return max(numbers) - min(numbers) > limit


@pytest.mark.invariant("I43")
@settings(max_examples=4, deadline=None)
@given(
    sides=st.lists(st.tuples(VALUE, st.lists(VALUE, min_size=1, max_size=3)), min_size=1, max_size=40),
    limit=st.sampled_from([Decimal("0.01"), Decimal("0.5"), Decimal("3")]),
)
def test_limits_mean_what_a_plain_program_means(
    spark: SparkSession, sides: list[tuple[str | None, list[str | None]]], limit: Decimal
) -> None:
    key = "number amount"
    rows = [(f"{n}", True, one) for n, (one, _) in enumerate(sides)]
    rows += [(f"{n}", False, one) for n, (_, others) in enumerate(sides) for one in others]
    canonical = dict(on_spark(spark, ["number"], [(text, text) for text in {one or "" for _, _, one in rows}]))
    shown = [(id, is_expected, None if one is None else canonical[one]) for id, is_expected, one in rows]
    frame = spark.createDataFrame(shown, f"id string, is_expected boolean, `{key}` string")

    def quoted(name: str) -> Column:
        return f.col(f"`{name}`")

    made = [
        frames.witnesses(
            frame.where(f.col("is_expected") == is_expected),
            f.col("id"),
            f.array(
                frames.make_witness(Role(0, is_expected, (key,), ((key, limit),)), lambda name: f.col(f"`{name}`"), 2)
            ),
        )
        for is_expected in (True, False)
    ]
    tallies = frames.tally(made, {0: [limit], 1: [limit, limit]}).collect()
    wanted = {f"{n}" for n, (one, others) in enumerate(sides) if differs([one, *others], limit)}
    assert {row["id"] for row in tallies if not row["same"]} == wanted


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"columns": ["price"], "tolerance": {"weight": 1}}, "comparisons.0.tolerance.weight"),
    ({"columns": ["price"], "tolerance": {"price": -1}}, "comparisons.0.tolerance.price"),
    ({"columns": ["price"], "tolerance": {"price": "1"}}, "comparisons.0.tolerance.price"),
    ({"columns": ["price"], "tolerance": {"price": float("nan")}}, "comparisons.0.tolerance.price"),
    ({"columns": ["at"], "clock_skew": -1}, "comparisons.0.clock_skew"),
    ({"columns": ["at"], "clock_skew": True}, "comparisons.0.clock_skew"),
    ({"columns": ["at"], "exclude": ["att"]}, "comparisons.0.exclude.0"),
    ({"columns": ["*", "at"]}, "comparisons.0.columns"),
    ({"columns": ["*"], "expected": "half:orders"}, "comparisons.0.columns"),
    # only the types of the columns show these:
    ({"columns": ["note"], "tolerance": {"note": 1}}, "comparisons.0.tolerance.note"),
    ({"columns": ["at"], "tolerance": {"at": 1}}, "comparisons.0.tolerance.at"),
    ({"columns": ["*"], "tolerance": {"prize": 1}}, "comparisons.0.tolerance.prize"),
    ({"columns": ["*"], "exclude": ["owns"]}, "comparisons.0.exclude"),
    ({"columns": ["price"], "clock_skew": 1}, "comparisons.0.clock_skew"),
    ({"columns": ["note"], "tolerance": {"note": 1}, "expected": "file:e"}, "comparisons.0.tolerance.note"),
    ({"columns": ["*"], "found": "file:e"}, "comparisons.0.columns"),
]


@pytest.mark.parametrize(("comparison", "field"), WRONG, ids=[str(n) for n in range(len(WRONG))])
def test_every_error_of_the_columns_is_reported_and_nothing_is_audited(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch, comparison: dict[str, Any], field: str
) -> None:
    url = f"sqlite:///{tmp_path / 'database.db'}"
    monkeypatch.setenv("SHOP_DB", url)
    build(tmp_path, url, {"a": SAME}, comparison)
    raw = json.loads((tmp_path / "manifest.json").read_text())
    raw["files"] = {"e": {"path": "e.parquet", "id": "id"}}
    pq.write_table(pa.table({"id": ["a"], "note": ["n"]}), tmp_path / "e.parquet")
    (tmp_path / "manifest.json").write_text(json.dumps(raw, indent=1))
    assert [problem.field for problem in check(tmp_path)] == [field]
    with pytest.raises(Misuse):
        run(tmp_path, page=False)


def test_a_tolerance_makes_a_field_of_messages_a_number(spark: SparkSession, tmp_path: Path) -> None:
    """On both sides, none of which has types."""
    bodies = {"a": {**SAME, "price": "1.00"}}
    url = f"sqlite:///{tmp_path / 'database.db'}"
    build(tmp_path, url, bodies)
    raw = json.loads((tmp_path / "manifest.json").read_text())
    del raw["tables"]
    raw["tables"] = {}
    raw["comparisons"] = [
        {"expected": "half:orders", "found": "topic:orders", "columns": ["price"], "tolerance": {"price": 0.1}}
    ]
    assert find_problems(raw) == []
    (tmp_path / "manifest.json").write_text(json.dumps(raw))
    assert audit_both_ways(tmp_path).agrees


def test_times_are_shown_with_their_zone(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"sqlite:///{tmp_path / 'database.db'}"
    monkeypatch.setenv("SHOP_DB", url)
    later = (TIME + timedelta(seconds=1)).isoformat()
    build(tmp_path, url, {"a": {**SAME, "at": later}}, {"columns": ["at"]})
    [one] = run(tmp_path, page=False).differing
    assert [(pair.expected, pair.found) for pair in one.pairs] == [(TIME.isoformat(), later)]
