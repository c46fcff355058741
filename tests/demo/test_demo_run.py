"""The demo, small: real processes, killed and started again, then the audit; then rows edited by hand."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from rich.console import Console

from escrowmq.demo import DemoOptions, run
from escrowmq.errors import Misuse
from escrowmq.pipeline import audit

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]


@pytest.mark.invariant("I24", "I43")
@pytest.mark.timeout(600)
def test_nothing_is_lost_and_every_edit_by_hand_is_found(spark: SparkSession, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    screen = Console(record=True, width=120)
    options = DemoOptions(folder=folder, count=60, shop_kills=2, broker_kills=1, service_kills=1, threads=4)
    verdict = run(options, screen)

    assert verdict is not None
    assert verdict.settled, verdict.findings
    placed = verdict.committed
    assert verdict.ids == 60
    assert verdict.committed + verdict.rolled_back == verdict.transactions >= 60
    assert verdict.consumed == placed
    assert verdict.consumers == {"cart": placed, "points": placed}
    assert verdict.kills == 5
    assert verdict.checks >= 2  # each order that the shop was killed over was asked about

    written = json.loads((folder / "verdict.json").read_text())
    assert {name: written[name] for name in ("ids", "lost", "repeated", "altered", "leaked", "kills")} == {
        "ids": 60,
        "lost": 0,
        "repeated": 0,
        "altered": 0,
        "leaked": 0,
        "kills": 5,
    }
    assert "All sides agree" in (folder / "report.html").read_text()
    assert "all sides agree" in screen.export_text()

    victims = edit_by_hand(folder)
    again = audit.run(folder, spark=spark, page=False)
    assert {(finding.kind, finding.id) for finding in again.findings} == victims
    assert not again.agrees


def edit_by_hand(folder: Path) -> set[tuple[str, str]]:
    """One row of another order in each database; what the audit must say."""
    victims = set()
    statements = {
        "orders.db": ("altered", "UPDATE orders SET amount_cents = amount_cents + 1 WHERE order_id = ?"),
        "cart.db": ("lost", "DELETE FROM cleared_carts WHERE order_id = ?"),
        "points.db": ("repeated", "INSERT INTO points_earned SELECT * FROM points_earned WHERE order_id = ?"),
    }
    for number, (database, (kind, statement)) in enumerate(statements.items()):
        with sqlite3.connect(folder / "orders.db") as orders:
            (identity,) = orders.execute("SELECT order_id FROM orders LIMIT 1 OFFSET ?", (number,)).fetchone()
        orders.close()
        with sqlite3.connect(folder / database) as connection:
            assert connection.execute(statement, (identity,)).rowcount == 1
        connection.close()
        victims.add((kind, identity))
    return victims


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("")
    with pytest.raises(Misuse, match="not an empty folder"):
        run(DemoOptions(folder=tmp_path, count=1, audit=False), Console(quiet=True))


@pytest.mark.parametrize("options", [{"count": 0}, {"threads": 0}, {"limit": 0}, {"shop_kills": -1}])
def test_numbers_that_make_no_sense_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(Misuse):
        DemoOptions(**options)  # type: ignore[arg-type]
