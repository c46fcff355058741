"""deploy/: alerts that fire when they should, by Prometheus' own tool, and a dashboard whose metrics exist."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from escrowmq.broker.serving.metrics import COUNTER, LABELLED, METRICS
from escrowmq.compensation.statistics import METRICS as COMPENSATION
from escrowmq.compensation.statistics import metric_name
from escrowmq.outbox.relay.metrics import BACKLOG
from escrowmq.outbox.relay.metrics import METRICS as RELAY

DEPLOY = Path(__file__).parent.parent / "deploy"
RULES = DEPLOY / "prometheus" / "escrowmq.rules.yml"
BOARD = DEPLOY / "grafana" / "escrowmq.json"
KNOWN = (
    {f"escrowmq_{metric.name}{'_total' if metric.kind == COUNTER else ''}" for metric in (*METRICS, *LABELLED)}
    | {f"{metric_name(number)}{'_total' if kind == COUNTER else ''}" for number, (kind, _) in COMPENSATION.items()}
    | {f"escrowmq_relay_{name}{'_total' if kind == COUNTER else ''}" for name, (kind, _) in RELAY.items()}
    | {f"escrowmq_outbox_{name}" for name in BACKLOG}
)  # fmt: skip


@pytest.fixture(scope="module")
def promtool() -> str:
    """Prometheus' tool: skipped without it on a laptop, failed in CI."""
    found = shutil.which("promtool")
    if found is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("promtool is not installed (Debian: prometheus)")
    return str(found)


def run(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, cwd=RULES.parent)
    assert done.returncode == 0, done.stdout + done.stderr


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(BOARD.read_text())["panels"]
    return found


def expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def test_every_alert_fires_when_it_should_and_not_before(promtool: str) -> None:
    run(promtool, "check", "rules", RULES.name)
    run(promtool, "test", "rules", "escrowmq.test.yml")
    alerts = set(re.findall(r"alert: (\w+)", RULES.read_text()))
    tested = set(re.findall(r"alertname: (\w+)\n\s+exp_alerts:\n", (RULES.parent / "escrowmq.test.yml").read_text()))
    assert alerts == tested, "each alert has a test in which it fires"


def test_every_metric_that_is_watched_exists() -> None:
    watched = set(re.findall(r"\bescrowmq_\w+", RULES.read_text() + " ".join(expressions())))
    assert len(watched) > 15
    assert watched <= KNOWN, watched - KNOWN


def test_the_dashboard_s_questions_can_be_asked(promtool: str, tmp_path: Path) -> None:
    rules = [{"record": f"panel:{number}", "expr": expr} for number, expr in enumerate(expressions())]
    file = tmp_path / "panels.json"  # JSON is YAML
    file.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    run(promtool, "check", "rules", file)


def test_no_panel_lies_over_another() -> None:
    assert len({panel["id"] for panel in panels()}) == len(panels())
    for one, two in combinations([panel["gridPos"] for panel in panels()], 2):
        beside = one["x"] + one["w"] <= two["x"] or two["x"] + two["w"] <= one["x"]
        assert beside or one["y"] + one["h"] <= two["y"] or two["y"] + two["h"] <= one["y"]
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels())
