"""Manifests: all errors at once with their lines, and drafts from databases and topics."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st

import escrowmq as mq
from escrowmq import outbox
from escrowmq.errors import Misuse
from escrowmq.pipeline import audit
from escrowmq.pipeline.audit.checking import check
from escrowmq.pipeline.audit.drafting import draft, name_database
from escrowmq.pipeline.audit.manifest import Manifest, fill_in, find_problems

WRONG = """{
  "log": "broker",
  "tables": {
    "orders": {"database": "orders.db",
               "tabel": "orders", "id": "id"},
    "carts": {"database": 5, "table": "carts", "id": "id"}
  },
  "topics": ["orders"],
  "ids": {"points": "key"},
  "comparisons": [
    {"expected": "table:orders", "found": "topic:orders", "columns": ["units"]},
    {"expected": "topic:orders", "found": "table:nothing", "columns": [],
     "judges": ["lots"]}
  ],
  "consumers": {"cart": "carts"}
}
"""


def test_every_error_of_the_fields_is_reported_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(WRONG)
    found = {(problem.line, problem.field) for problem in check(tmp_path)}
    assert found == {
        (4, "tables.orders"),  # no field table
        (5, "tables.orders.tabel"),
        (6, "tables.carts.database"),
        (9, "ids.points"),
        (12, "comparisons.1.found"),
        (13, "comparisons.1.judges"),
        (15, "consumers.cart"),
    }
    assert any("did you mean 'table'" in problem.text for problem in check(tmp_path))


def test_json_that_is_none_has_a_line(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{\n  "log": "broker",\n}')
    [problem] = check(tmp_path)
    assert problem.line == 3 or problem.line == 2
    assert "not JSON" in problem.text


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=9,
)


@given(
    st.dictionaries(st.sampled_from(["log", "tables", "topics", "comparisons", "ids", "files", "consumers"]), VALUES)
)
def test_any_json_is_valid_or_has_errors(tmp_path_factory: pytest.TempPathFactory, raw: dict[str, Any]) -> None:
    """And what has none can be used."""
    folder = tmp_path_factory.mktemp("manifest")
    (folder / "manifest.json").write_text(json.dumps(raw, indent=1))
    if problems := find_problems(raw):
        lines = json.dumps(raw, indent=1).count("\n") + 1
        assert [1 <= problem.line <= lines for problem in check(folder)] == [True] * len(problems)
    else:
        Manifest.read(folder)


def make_shop(folder: Path, url: str | None = None) -> str:
    """A producer's and a consumer's table, and a topic with their ids."""
    with mq.connect(f"file:{folder / 'broker'}") as bus:
        producer = bus.producer("shop", checker=lambda _: mq.UNKNOWN)
        bodies = [json.dumps({"units": n, "customer": f"c-{n}", "more": 1}).encode() for n in range(5)]
        receipts = producer.prepare_batch([mq.Message("orders", body, key=f"o-{n}") for n, body in enumerate(bodies)])
        assert producer.end_batch(receipts.transactions, [mq.COMMIT] * 5).ok
        producer.close()
    url = url or f"sqlite:///{folder / 'shop.db'}"
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE shop (order_id VARCHAR(9) PRIMARY KEY, units INTEGER, own INTEGER)")
        connection.exec_driver_sql("CREATE TABLE unrelated (units INTEGER, customer VARCHAR(9))")
        connection.execute(
            sa.text("INSERT INTO shop VALUES (:id, :n, 7)"), [{"id": f"o-{n}", "n": n} for n in range(5)]
        )
    engine.dispose()
    with closing(sqlite3.connect(folder / "cart.db")) as database:
        database.execute("CREATE TABLE carts (ref TEXT, customer TEXT)")
        database.executemany("INSERT INTO carts VALUES (?, ?)", [(f"o-{n}", f"c-{n}") for n in range(5)])
        database.commit()
    return url


def test_a_draft_is_what_a_person_would_write(
    tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For tables in any database; and it has no errors. A password is not in it."""
    url = make_shop(tmp_path, database_url)
    raw, notes = draft(tmp_path / "run", f"file:{tmp_path / 'broker'}", ["orders"], [url, str(tmp_path / "cart.db")])
    assert [(c["expected"], c["found"], c["columns"]) for c in raw["comparisons"]] == [
        ("table:shop", "topic:orders", ["units"]),
        ("topic:orders", "table:carts", ["customer"]),
        ("half:orders", "topic:orders", ["message_id", "body"]),
    ]
    assert raw["tables"]["shop"]["unique"] is True
    assert (raw["tables"]["shop"]["id"], raw["tables"]["carts"]["id"]) == ("order_id", "ref")
    assert raw["consumers"] == {"carts": "carts"}
    text = (tmp_path / "run" / "manifest.json").read_text()
    if password := sa.make_url(url).password:
        assert str(password) not in text
        [note] = notes
        monkeypatch.setenv(note.split()[1], str(password))
    assert check(tmp_path / "run") == []
    with pytest.raises(Misuse, match="exists"):
        draft(tmp_path / "run", f"file:{tmp_path / 'broker'}", ["orders"], [url])


def test_a_draft_leaves_out_the_receive_log_and_other_kinds_of_ids(tmp_path: Path) -> None:
    """A consumer that claims each message has the ids of messages beside its own; its effects have the keys."""
    url = make_shop(tmp_path)
    cart = sa.create_engine(f"sqlite:///{tmp_path / 'cart.db'}")
    outbox.migrate(cart)
    with cart.begin() as connection, mq.connect(f"file:{tmp_path / 'broker'}") as bus:
        connection.exec_driver_sql("CREATE TABLE seen (message TEXT)")
        for _, message in zip(range(5), bus.consumer("cart", ["orders"]), strict=False):
            assert outbox.claim_tx(connection, message, group="cart")
            connection.execute(sa.text("INSERT INTO seen VALUES (:id)"), {"id": message.message_id.hex()})
    cart.dispose()
    raw, notes = draft(tmp_path / "run", f"file:{tmp_path / 'broker'}", ["orders"], [url, str(tmp_path / "cart.db")])
    assert set(raw["tables"]) == {"shop", "carts"}
    assert "ids" not in json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert notes == ["left out: table seen has message_id of topic orders, not its id"]
    assert check(tmp_path / "run") == []


def test_what_a_manifest_names_and_is_not_there_is_reported_together(tmp_path: Path) -> None:
    make_shop(tmp_path)
    tables = {
        "shop": {"database": "shop.db", "table": "shop", "id": "order_id", "unique": True},
        "carts": {"database": "cart.db", "table": "carts", "id": "ref", "unique": True},
        "gone": {"database": "gone.db", "table": "t", "id": "id"},
        "away": {"database": "postgresql://u:secret@127.0.0.1:1/x", "table": "t", "id": "id"},
        "unset": {"database": "${NOT_SET_AT_ALL}", "table": "t", "id": "id"},
    }
    comparison = {"expected": "table:shop", "found": "topic:orders", "columns": ["units", "prize"]}
    raw = {"log": "nowhere", "tables": tables, "topics": ["orders"], "comparisons": [comparison]}
    raw["files"] = {"placed": {"path": "orders.parquet", "id": "id"}}
    (tmp_path / "manifest.json").write_text(json.dumps(raw, indent=2))
    found = {problem.field: problem.text for problem in check(tmp_path)}
    assert set(found) == {
        *("tables.shop", "tables.carts.unique", "tables.gone", "tables.away", "tables.unset", "files.placed", "log")
    }
    assert "no column prize" in found["tables.shop"]
    assert "NOT_SET_AT_ALL" in found["tables.unset"]
    assert "secret" not in str(found)


def test_no_secret_of_an_address_is_in_a_drafted_manifest(tmp_path: Path) -> None:
    """Whether it is the password of its user or a value of its query; each comes from the environment."""
    url = "postgresql+psycopg://u:one@h/shop?password=two&sslmode=require&sslpassword=three"
    written, note = name_database(url, tmp_path)
    assert not [secret for secret in ("one", "two", "three") if secret in written]
    secrets = {"SHOP_PASSWORD": "one", "SHOP_QUERY_PASSWORD": "two", "SHOP_QUERY_SSLPASSWORD": "three"}
    assert note == f"export {' '.join(secrets)} as written in the URL of shop"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in secrets.items():
            patch.setenv(name, value)
        assert fill_in(written) == url
    assert name_database("${SHOP_URL}", tmp_path) == ("${SHOP_URL}", "")


def test_a_missing_variable_is_named_before_spark_starts(tmp_path: Path) -> None:
    tables = {"orders": {"database": "${NOBODY_SETS_THIS}", "table": "orders", "id": "id"}}
    given = {"log": "no folder", "topics": [], "tables": tables, "comparisons": []}
    (tmp_path / "manifest.json").write_text(json.dumps(given))
    with pytest.raises(Misuse, match="NOBODY_SETS_THIS"):  # before the log is opened, too
        audit.run(tmp_path)
