"""Repeated audits and their metrics."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import sys
import threading
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from prometheus_client import CollectorRegistry, generate_latest

import escrowmq as mq
from escrowmq.errors import Code, Misuse, Unknown
from escrowmq.pipeline.audit.verdict import Side, Verdict
from escrowmq.pipeline.audit.watching import METRICS, Watched, collector, keep_auditing

COUNTS = ("ids", "transactions", "committed", "rolled_back", "consumed", "repeated", "leaked", "orphaned", "kills")


def verdict(lost: int = 0, altered: int = 0) -> Verdict:
    counts: dict[str, Any] = dict.fromkeys((*COUNTS, "checks", "findings_in_all"), 0)
    sides = (Side("shop.db orders", "topic orders", 7, 7, 7, lost + altered),)
    return Verdict(**counts, lost=lost, altered=altered, consumers={}, comparisons=sides, findings=())


def scrape(watched: Watched) -> str:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector(watched))
    return generate_latest(registry).decode()


def test_the_last_result_is_a_metric_and_an_error_does_not_end_the_watch() -> None:
    stop, watched, shown = threading.Event(), Watched(), list[Verdict]()
    assert 'escrowmq_audit_runs_total{result="agree"} 0.0' in scrape(watched)
    assert "escrowmq_audit_wrong_ids" not in scrape(watched), "nothing is known yet: not 0"
    broken = Unknown(Code.DISCONNECTED, "the broker is unavailable")
    results: list[Verdict | Exception] = [
        verdict(),
        broken,
        Misuse(Code.FOLDER_IN_USE, "in use"),
        sa.exc.OperationalError("SELECT 1", {}, Exception("the database is away")),
        verdict(lost=2, altered=1),
    ]

    def audit() -> Verdict:
        result = results.pop(0)
        if not results:
            stop.set()
        if isinstance(result, Exception):
            raise result
        return result

    keep_auditing(audit, 1e-9, stop, watched, shown.append)
    assert [one.lost for one in shown] == [0, 2]
    text = scrape(watched)
    for line in (
        'runs_total{result="agree"} 1.0',
        'runs_total{result="disagree"} 1.0',
        "broken_off_total 3.0",
        'wrong_ids{kind="lost"} 2.0',
        'wrong_ids{kind="orphaned"} 0.0',
        'differing_ids{comparison="shop.db orders → topic orders"} 3.0',
        'compared_ids{comparison="shop.db orders → topic orders"} 7.0',
    ):
        assert f"escrowmq_audit_{line}" in text
    assert set(METRICS) == set(watched.list_samples())


@pytest.mark.parametrize("problem", [TypeError("a bug"), Misuse(Code.BAD_ARGUMENT, "no manifest")])
def test_an_error_in_the_program_or_the_manifest_ends_the_watch(problem: Exception) -> None:
    def audit() -> Verdict:
        raise problem

    with pytest.raises(type(problem)):
        keep_auditing(audit, 1, threading.Event(), Watched())


def test_an_error_after_the_signal_to_stop_is_none() -> None:
    """The signal of `timeout` and systemd ends Spark's Java process too, in the middle of an audit."""
    stop, watched = threading.Event(), Watched()

    def audit() -> Verdict:
        stop.set()
        raise RuntimeError("the gateway of Java has ended")

    keep_auditing(audit, 1, stop, watched)
    assert "broken_off_total 0.0" in scrape(watched)


@pytest.mark.spark
@pytest.mark.verify
@pytest.mark.xdist_group("spark")
def test_the_command_audits_until_it_is_stopped(tmp_path: Path) -> None:
    """A row that is deleted between two audits is in the metrics of the second."""
    with mq.connect(f"file:{tmp_path / 'broker'}") as bus:
        bus.producer("shop").send("orders", b'{"units": 5}', key="o-1")
    with closing(sqlite3.connect(tmp_path / "shop.db")) as database:
        database.executescript("CREATE TABLE t (id TEXT PRIMARY KEY, units INT); INSERT INTO t VALUES ('o-1', 5)")
        manifest = {"log": "broker", "topics": ["orders"], "tables": {"t": {"database": "shop.db", "table": "t"}}}
        manifest["tables"]["t"] |= {"id": "id"}  # type: ignore[index]
        manifest["comparisons"] = [{"expected": "topic:orders", "found": "table:t", "columns": ["units"]}]  # type: ignore[assignment]
        (tmp_path / "manifest.json").write_text(json.dumps(manifest))
        words = ["audit", str(tmp_path), "--watch", "1s", "--metrics", "127.0.0.1:0", "--json", "--no-page"]
        running = subprocess.Popen(
            [sys.executable, "-m", "escrowmq", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            assert running.stdout is not None
            assert running.stderr is not None
            at = next(line for line in running.stderr if "metrics at" in line).partition("metrics at ")[2].split(";")[0]
            assert json.loads(running.stdout.readline())["verdict"] == "agree"
            database.execute("DELETE FROM t")
            database.commit()
            while json.loads(running.stdout.readline())["verdict"] == "agree":
                pass
            with urllib.request.urlopen(f"{at}/metrics") as answer:
                assert 'escrowmq_audit_wrong_ids{kind="lost"} 1.0' in answer.read().decode()
        finally:
            running.send_signal(signal.SIGTERM)
            running.communicate()
        assert running.returncode == 0
