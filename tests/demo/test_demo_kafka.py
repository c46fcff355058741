"""The demo on a leader and a standby, small: a Kafka of its own, the leader killed, the audit; then what is left when
Kafka is gone.
"""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from rich.console import Console

from escrowmq.demo import DemoOptions, run
from escrowmq.pipeline import audit
from escrowmq.pipeline.audit.events import Events

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark"), pytest.mark.usefixtures("kafka_jars")]


@pytest.mark.timeout(600)
def test_the_leader_is_killed_and_nothing_is_lost(spark: SparkSession, tmp_path: Path) -> None:
    folder = tmp_path / "a run, für sich"  # a name that Kafka's settings would not take
    screen = Console(record=True, width=120)
    options = DemoOptions(
        folder=folder, count=60, shop_kills=1, broker_kills=1, service_kills=1, threads=4, log="kafka"
    )
    verdict = run(options, screen)

    assert verdict is not None
    assert verdict.settled, verdict.findings
    assert verdict.ids == 60
    assert verdict.consumers == {"cart": verdict.committed, "points": verdict.committed}
    assert verdict.kills == 4

    events = Events.read(folder / "events.jsonl")
    (kill,) = [event for event in events.kills if event["who"].startswith("broker-")]
    before = [event for event in events.of("leads") if event["at_us"] < kill["at_us"]]
    after = [event for event in events.of("leads") if event["at_us"] > kill["at_us"]]
    (answered,) = events.of("answered")
    assert before[-1]["who"] == kill["who"]
    assert after[0]["epoch"] > before[-1]["epoch"]
    assert 0 < after[0]["seconds"] < answered["seconds"]
    told = screen.export_text()
    assert f"kill -9 {kill['who']} while it led" in told
    assert f"{after[0]['who']} leads (epoch {after[0]['epoch']}), {after[0]['seconds']:.2f} s after the kill" in told
    assert f"placed {answered['seconds']:.2f} s after it" in told
    assert "Changes of leader" in (folder / "report.html").read_text()

    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["log"] == "broker"  # Kafka is gone, and both brokers
    with sqlite3.connect(folder / "cart.db") as cart:
        (identity,) = cart.execute("SELECT order_id FROM cleared_carts LIMIT 1").fetchone()
        cart.execute("DELETE FROM cleared_carts WHERE order_id = ?", (identity,))
    cart.close()
    again = audit.run(folder, spark=spark, page=False)
    assert [(finding.kind, finding.id) for finding in again.findings] == [("lost", identity)]
