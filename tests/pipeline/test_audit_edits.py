"""The audit of what a person edited and discarded for one consumer group: both sides agree if exactly what the group
was given has its effect, and whatever else is there is named with its own reason.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import escrowmq as mq
from escrowmq.errors import Code, Misuse
from escrowmq.pipeline.audit import Verdict, delivered_to
from escrowmq.pipeline.audit.events import Events
from escrowmq.pipeline.audit.manifest import Manifest
from escrowmq.pipeline.audit.page import page
from escrowmq.pipeline.audit.readings import Readings
from escrowmq.pipeline.audit.run import audit
from escrowmq.pipeline.log import BrokerLog

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark"), pytest.mark.timeout(900)]

COLUMNS = ("message_id", "price")
BY_KEY = {"expected": "group:cart/orders", "found": "table:carts", "columns": list(COLUMNS)}


def take(consumer: mq.Consumer, count: int) -> list[Any]:
    """That many messages, which are there."""
    taken: list[Any] = []
    while len(taken) < count:
        more = list(consumer.receive(count - len(taken), wait=60.0))
        assert more, f"only {len(taken)} of {count} came"
        taken += more
    return taken


def fail(bus: mq.Bus, count: int) -> None:
    with bus.consumer("cart", "orders", max_attempts=1, retry_backoff=0.001) as consumer:
        for message in take(consumer, count):
            message.nack(0.0, "poison")
        consumer.flush()


def handle(bus: mq.Bus, connection: sqlite3.Connection, count: int, poison: str = "") -> None:
    """All that there is: ``count`` messages, of which one may be the poison."""
    with bus.consumer("cart", "orders", max_attempts=1, retry_backoff=0.001) as consumer:
        for message in [*take(consumer, count), *consumer.receive(1, wait=0.3)]:
            if message.message_id.hex() == poison:
                message.nack(0.0, "again")
                continue
            row = (message.key, message.message_id.hex(), str(json.loads(message.body)["price"]))
            connection.execute("INSERT INTO carts VALUES (?, ?, ?)", row)
            message.ack()
        consumer.flush()
    connection.commit()


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run folder: of twelve messages the first seven died; three were edited, one edited twice, one got another key,
    one was discarded, one discarded and then brought back by a reset. ``made`` has the ids by name."""
    folder = tmp_path_factory.mktemp("edits")
    manifest = {
        "log": "broker",
        "topics": ["orders"],
        "tables": {"carts": {"database": "cart.db", "table": "carts", "id": "key"}},
        "comparisons": [BY_KEY],
        "consumers": {"cart": "carts"},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    connection = sqlite3.connect(folder / "cart.db")
    connection.execute("CREATE TABLE carts (key TEXT, message_id TEXT, price TEXT)")
    made: dict[str, Any] = {}
    with mq.connect(f"file:{folder / 'broker'}", auto_create_topics=True) as bus:
        admin = bus.admin
        admin.create_topic("orders", 1)
        batch = [mq.Message("orders", b'{"price": %d}' % n, key=f"k{n}") for n in range(12)]
        receipts = bus.producer("shop").send_batch(batch)
        made["ids"] = [receipt.message_id.hex() for receipt in receipts]
        fail(bus, 7)
        letters = list(admin.dead_letters("cart"))
        admin.settle_dead_letters("cart", letters[6:7], "discard")
        admin.reset_group("cart", offset=6, topic="orders", queue=0)
        admin.settle_dead_letters("cart", letters[3:4], "discard")
        made["k0"] = admin.edit_dead_letter("cart", letters[0], body=b'{"price": 100}')["message_id"]
        made["k4"] = admin.edit_dead_letter("cart", letters[4], body=b'{"price": 104}')["message_id"]
        made["k5"] = admin.edit_dead_letter("cart", letters[5], body=b'{"price": 105}')["message_id"]
        made["twice"] = admin.edit_dead_letter("cart", letters[1], body=b'{"price": 1}')["message_id"]
        made["moved"] = admin.edit_dead_letter("cart", letters[2], key="moved")["message_id"]
        handle(bus, connection, 11, poison=made["twice"])
        (letter,) = admin.dead_letters("cart")
        made["k1"] = admin.edit_dead_letter("cart", letter, body=b'{"price": 101}')["message_id"]
        handle(bus, connection, 1)
    connection.close()
    return folder, made


@pytest.fixture
def run(clean: tuple[Path, dict[str, Any]], tmp_path: Path) -> Path:
    return Path(shutil.copytree(clean[0], tmp_path / "run"))


def judge(spark: SparkSession, folder: Path, windows: int = 0) -> Verdict:
    found = Manifest.read(folder)
    return audit(found, Readings(spark, found, BrokerLog(spark, found.log_url)), Events(), windows=windows)[0]


def change(folder: Path, *statements: str) -> None:
    connection = sqlite3.connect(folder / "cart.db")
    for statement in statements:
        assert connection.execute(statement).rowcount == 1
    connection.commit()
    connection.close()


def named(verdict: Verdict) -> dict[tuple[str, str], str]:
    return {(one.kind, one.id): one.reason for one in verdict.findings}


@pytest.mark.invariant("I43")
def test_it_agrees_when_each_pair_has_its_one_effect(spark: SparkSession, clean: tuple[Path, dict[str, Any]]) -> None:
    folder, made = clean
    verdict = judge(spark, folder)
    assert named(verdict) == {}
    (side,) = verdict.comparisons
    assert (side.expected, side.ids, side.expected_rows, side.found_rows) == (
        "topic orders for consumer group cart",
        11,
        11,
        11,
    )
    assert verdict.agrees
    table = delivered_to(
        spark, f"file:{folder / 'broker'}", "cart", "orders", ["key", "message_id", "body", "transaction_id"]
    )
    rows = {row["key"]: (row["message_id"].hex(), bytes(row["body"])) for row in table.collect()}
    ids = made["ids"]
    assert rows == {
        "k0": (made["k0"], b'{"price": 100}'),
        "k1": (made["k1"], b'{"price": 101}'),
        "moved": (made["moved"], b'{"price": 2}'),
        "k4": (made["k4"], b'{"price": 104}'),
        "k5": (made["k5"], b'{"price": 105}'),
        **{f"k{n}": (ids[n], b'{"price": %d}' % n) for n in range(6, 12)},
    }


@pytest.mark.invariant("I43")
def test_whatever_is_planted_is_named_with_its_reason(
    spark: SparkSession, clean: tuple[Path, dict[str, Any]], run: Path
) -> None:
    made, (zero, one, two, three, four, five, *_) = clean[1], clean[1]["ids"]
    with mq.connect(f"file:{run / 'broker'}") as bus:
        bus.producer("shop").send("orders", b'{"price": 7}', key="late")
        fail(bus, 1)
    change(
        run,
        f"INSERT INTO carts VALUES ('k0', '{zero}', '0')",  # of both
        "DELETE FROM carts WHERE key = 'k1'",  # of neither
        f"UPDATE carts SET key = 'k2', message_id = '{two}' WHERE key = 'moved'",  # of the old one
        f"INSERT INTO carts VALUES ('k3', '{three}', '3')",  # of what was discarded
        f"UPDATE carts SET message_id = '{four}', price = '4' WHERE key = 'k4'",  # of the old one, under the same key
        "UPDATE carts SET price = '5000' WHERE key = 'k5'",
        "UPDATE carts SET message_id = 'ffff' WHERE key = 'k8'",  # of an edit that nobody made
        "INSERT INTO carts VALUES ('k99', 'eeee', '9')",
        "DELETE FROM carts WHERE key = 'k9'",
    )
    verdict = judge(spark, run)
    by, old = "for consumer group cart, by an edit by hand:", "the old one had its effect, and the new one did not"
    both = f"{made['k0']} stands in place of {zero} {by} both had their effect"
    assert named(verdict) == {
        ("repeated", "k0"): both,
        ("altered", "k0"): both,
        ("lost", "k1"): f"{made['k1']} stands in place of {one} {by} neither had its effect",
        ("leaked", "k2"): f"{made['moved']} stands in place of {two} {by} {old}",
        ("lost", "moved"): f"{made['moved']} stands in place of {two} {by} {old}",
        ("leaked", "k3"): f"{three} was discarded by hand for consumer group cart: it had its effect nevertheless",
        ("altered", "k4"): f"{made['k4']} stands in place of {four} {by} {old}",
        ("altered", "k5"): f"{made['k5']} stands in place of {five} {by} there is an effect that is of neither",
        ("altered", "k8"): "no edit by hand for consumer group cart explains it",
        ("leaked", "k99"): "neither topic orders nor an edit by hand for consumer group cart has it",
        ("lost", "k9"): "",
        ("lost", "late"): "it is a dead letter of consumer group cart and waits for a person",
    }
    assert not verdict.agrees
    assert both in page(verdict, *_nothing())


def _nothing() -> tuple[Any, Events]:
    from escrowmq.pipeline.audit.page import Pictures

    return Pictures(0, 1, {}, {}), Events()


def test_by_message_id_the_old_id_is_not_expected_and_the_new_one_is(
    spark: SparkSession, clean: tuple[Path, dict[str, Any]], run: Path
) -> None:
    made, ids = clean[1], clean[1]["ids"]
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["tables"]["carts"]["id"] = "message_id"
    manifest["ids"] = {"orders": "message_id"}
    manifest["comparisons"][0]["columns"] = []
    (run / "manifest.json").write_text(json.dumps(manifest))
    change(run, f"UPDATE carts SET message_id = '{ids[0]}' WHERE key = 'k0'")
    why = (
        f"{made['k0']} stands in place of {ids[0]} for consumer group cart, by an edit by hand: "
        "the old one had its effect, and the new one did not"
    )
    assert named(judge(spark, run, 4)) == {("leaked", ids[0]): why, ("lost", made["k0"]): why}


def test_a_group_that_nobody_touched_is_given_the_topic(
    spark: SparkSession, clean: tuple[Path, dict[str, Any]]
) -> None:
    folder, made = clean
    given = delivered_to(spark, f"file:{folder / 'broker'}", "nobody", "orders", ["message_id"])
    assert sorted(row["message_id"].hex() for row in given.collect()) == sorted(made["ids"])


@pytest.mark.parametrize("side", ["group:cart", "group:cart/returns", "group:/orders", "group:a b/orders"])
def test_a_group_s_side_names_a_group_and_a_topic(run: Path, side: str) -> None:
    raw = json.loads((run / "manifest.json").read_text())
    raw["comparisons"][0]["expected"] = side
    (run / "manifest.json").write_text(json.dumps(raw))
    with pytest.raises(Misuse, match="is not described") as caught:
        Manifest.read(run)
    assert caught.value.code is Code.BAD_ARGUMENT
    raw["comparisons"], raw["ids"] = [], {"orders": "offset"}
    (run / "manifest.json").write_text(json.dumps(raw))
    with pytest.raises(Misuse, match="ids are key or message_id"):
        Manifest.read(run)
