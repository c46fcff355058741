"""Incremental audits: whatever changes, the verdict is that of a whole audit; only new messages are summed."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from pyspark.sql import SparkSession
from test_canonical_text import backend

import escrowmq as mq
from escrowmq.errors import Misuse
from escrowmq.pipeline.audit import Verdict, run
from escrowmq.pipeline.audit.parts import state as states
from escrowmq.pipeline.audit.parts.state import State
from escrowmq.pipeline.audit.rows import SETTLED, Grown

ON_SERVERS = [pytest.param(name, marks=pytest.mark.long) for name in ("postgresql", "mariadb")]
"""In the long suite: tests/pipeline/test_audit_databases.py has each edit on them."""
pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark"), pytest.mark.timeout(900)]

ORDERS = 80
MANIFEST = {
    "log": "broker",
    "tables": {
        name: {"database": "${SHOP_DB}", "table": name, "id": "id", "unique": name == "t"} for name in ("t", "effects")
    },
    "topics": ["orders"],
    "comparisons": [
        {"expected": "table:t", "found": "topic:orders", "columns": ["units"]},
        {"expected": "half:orders", "found": "topic:orders", "columns": ["message_id", "body"]},
        {"expected": "topic:orders", "found": "table:effects", "columns": ["units"], "tolerance": {"units": 1}},
    ],
    "consumers": {"cart": "effects"},
}


class Shop:
    """A run whose tables and log the tests change."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.engine = sa.create_engine(url)
        self.open: list[Any] = []
        kind = "NUMERIC(10, 2)" if backend(url) == "postgresql" else "DECIMAL(10,2)"
        with self.engine.begin() as connection:
            connection.exec_driver_sql(f"CREATE TABLE t (id VARCHAR(40) PRIMARY KEY, units {kind})")
            connection.exec_driver_sql(f"CREATE TABLE effects (id VARCHAR(40), units {kind})")
        (folder / "manifest.json").write_text(json.dumps(MANIFEST))
        self.place([f"o-{n}" for n in range(ORDERS)])

    def place(self, ids: list[str], *, commit: bool = True, stored: bool = True) -> None:
        """Send messages; with ``stored``, their rows are in both tables."""
        with mq.connect(f"file:{self.folder / 'broker'}") as bus:
            producer = bus.producer("shop", checker=lambda _: mq.UNKNOWN)
            made = producer.prepare_batch([mq.Message("orders", b'{"units": 5}', key=id) for id in ids])
            if commit:
                assert producer.end_batch(made.transactions, [mq.COMMIT] * len(ids)).ok
            else:
                self.open += made.transactions.to_pylist()
            producer.close()
        if stored:
            for id in ids:
                self.execute("INSERT INTO t VALUES (:id, 5)", id=id)
                self.execute("INSERT INTO effects VALUES (:id, 5)", id=id)

    def decide(self) -> None:
        with mq.connect(f"file:{self.folder / 'broker'}") as bus:
            producer = bus.producer("shop", checker=lambda _: mq.UNKNOWN)
            assert producer.end_batch(self.open, [mq.COMMIT] * len(self.open)).ok
            producer.close()
        self.open = []

    def execute(self, statement: str, **values: Any) -> None:
        with self.engine.begin() as connection:
            assert connection.execute(sa.text(statement), values).rowcount == 1

    def audit(self) -> Verdict:
        """With the state."""
        return run(self.folder, page=False, windows=32, state=self.folder / "state")

    def audit_both_ways(self) -> Verdict:
        """With the state, and as a whole: with the same bytes."""
        verdict = self.audit()
        text = (self.folder / "verdict.json").read_bytes()
        assert run(self.folder, page=False, windows=32) == verdict
        assert (self.folder / "verdict.json").read_bytes() == text
        return verdict


@pytest.fixture
def shop(tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    monkeypatch.setenv("SHOP_DB", database_url)
    made = Shop(tmp_path, database_url)
    yield made
    made.engine.dispose()


@pytest.fixture
def summed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """How many messages each audit with a state sums, and how many of them it remembers."""
    found: list[tuple[int, int]] = []

    def count(self: Grown, lines: Any, add: Callable[..., Any] = Grown.add) -> Any:
        rows = self.read_fresh().groupBy(SETTLED).count().collect()
        found.append((sum(row["count"] for row in rows), sum(row["count"] for row in rows if row[SETTLED])))
        return add(self, lines)

    monkeypatch.setattr(Grown, "add", count)
    return found


CHANGES: dict[str, Callable[[Shop, str], None]] = {
    "an old row is altered": lambda shop, id: shop.execute("UPDATE t SET units = 7 WHERE id = :id", id=id),
    "an old row is deleted": lambda shop, id: shop.execute("DELETE FROM t WHERE id = :id", id=id),
    "an old effect is deleted": lambda shop, id: shop.execute("DELETE FROM effects WHERE id = :id", id=id),
    "an old effect is repeated": lambda shop, id: shop.execute("INSERT INTO effects VALUES (:id, 5)", id=id),
    "an effect is within the tolerance": lambda shop, id: shop.execute(
        "UPDATE effects SET units = 6 WHERE id = :id", id=id
    ),
    "an effect of nothing": lambda shop, id: shop.execute("INSERT INTO effects VALUES (:id, 5)", id=f"x-{id}"),
    "an old message is sent again": lambda shop, id: shop.place([id], stored=False),
    "new messages": lambda shop, id: shop.place([f"{id}-new-{n}" for n in range(9)]),
    "a new message without a row": lambda shop, id: shop.place([f"{id}-alone"], stored=False),
    "an undecided message": lambda shop, id: shop.place([f"{id}-open"], commit=False),
    "a late decision": lambda shop, _: shop.decide() if shop.open else None,
}


@pytest.mark.invariant("I2", "I43")
@pytest.mark.parametrize("database_url", ["sqlite", *ON_SERVERS], indirect=True)
def test_whatever_changes_the_verdict_is_that_of_a_whole_audit(spark: SparkSession, shop: Shop) -> None:
    """Several changes at a time, in any order, in old windows and new ones; all in one pass of each kind."""
    dice = random.Random(backend(str(shop.engine.url)))
    ids = iter(dice.sample([f"o-{n}" for n in range(ORDERS)], ORDERS))
    assert shop.audit().settled
    names = [*CHANGES, "an undecided message", "a late decision", "new messages"]
    dice.shuffle(names)
    kinds = set()
    for n in range(0, len(names), 5):
        for name in names[n : n + 5]:
            CHANGES[name](shop, next(ids))
        verdict = shop.audit_both_ways()
        kinds |= {finding.kind for finding in verdict.findings}
    assert kinds >= {"lost", "repeated", "altered", "leaked"}


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_only_new_messages_and_undecided_half_messages_are_summed_again(
    spark: SparkSession, shop: Shop, summed: list[tuple[int, int]]
) -> None:
    shop.place(["open"], commit=False)
    shop.place(["after-1", "after-2"])
    shop.audit()
    assert summed == [(82, 82), (82, 80)]  # messages; half messages, of which two are after the first undecided one
    summed.clear()
    shop.place([f"n-{n}" for n in range(5)])
    shop.audit()
    assert summed == [(5, 5), (7, 0)]
    summed.clear()
    shop.decide()
    shop.audit()
    assert summed == [(1, 1), (8, 8)]
    summed.clear()
    assert shop.audit_both_ways().agrees
    assert summed == [(0, 0), (0, 0)]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_state_of_another_log_or_other_comparisons_is_not_used(
    spark: SparkSession, shop: Shop, summed: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A log with as many messages, as after a restored backup; and columns that were not compared before."""
    shop.audit()
    other = Shop(tmp_path_factory.mktemp("other"), f"sqlite:///{tmp_path_factory.mktemp('db') / 'other.db'}")
    state = json.loads((shop.folder / "state").read_text())
    theirs = State.read(shop.folder / "state")
    theirs.path = other.folder / "state"
    [shard] = {name.split("/")[1] for name in theirs.parts}
    other.audit()
    [own] = {name.split("/")[1] for name in State.read(theirs.path).parts}
    theirs.parts = {name.replace(shard, own): part for name, part in theirs.parts.items()}  # the same shard, otherwise
    theirs.write()
    summed.clear()
    other.audit_both_ways()
    other.engine.dispose()
    assert [count for count, _ in summed] == [ORDERS, ORDERS]
    summed.clear()
    raw = json.loads((shop.folder / "manifest.json").read_text())
    raw["comparisons"][0]["columns"] = []
    (shop.folder / "manifest.json").write_text(json.dumps(raw))
    shop.audit_both_ways()
    assert [count for count, _ in summed] == [ORDERS, ORDERS]
    assert json.loads((shop.folder / "state").read_text())["state"]["key"] != state["state"]["key"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text.replace('"format": 1', '"format": 99'),
        lambda text: text.replace("true", "false", 1),
        lambda _: "[]",
        lambda _: "",
        lambda _: '{"format": 1, "sha256": "", "state": {}}',
    ],
)
def test_a_broken_state_is_a_clear_error(tmp_path: Path, damage: Callable[[str], str]) -> None:
    state = State(tmp_path / "state", "key", {}, {(0, True, 3): (1, 2, 3)})
    state.write()
    assert State.read(state.path) == state
    state.path.write_text(damage(state.path.read_text()))
    with pytest.raises(Misuse, match=r"is not a state of an audit.*remove it"):
        State.read(state.path)


@pytest.mark.parametrize(
    "changed",
    [
        {"key": 7},
        {"parts": {"orders/0000/0": {"head": "0", "through": 3}}},
        {"parts": {"orders/0000/0": {"head": 0}}},
        {"parts": []},
        {"sums": [[0, True, 3, "1", 2, 3]]},
        {"sums": [[0, True, 3, 1, 2]]},
        {"sums": {}},
    ],
)
def test_a_state_whose_checksum_was_computed_again_is_checked_too(tmp_path: Path, changed: dict[str, Any]) -> None:
    state = State(tmp_path / "state", "key", {}, {(0, True, 3): (1, 2, 3)})
    state.write()
    body = json.loads(state.path.read_text())["state"] | changed
    checksum = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    state.path.write_text(json.dumps({"format": 1, "sha256": checksum, "state": body}))
    with pytest.raises(Misuse, match=r"is not a state of an audit.*remove it"):
        State.read(state.path)


def test_a_state_that_cannot_be_kept_is_an_error_before_the_audit(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps(MANIFEST))
    with pytest.raises(Misuse, match="cannot be used as a state"):
        run(tmp_path, state=tmp_path / "nowhere" / "state")
    with pytest.raises(Misuse, match="reads all rows has no state"):
        run(tmp_path, state=tmp_path / "state", windows=0)
    assert states.FORMAT == 1
