"""The jobs on a cluster whose workers have folders of their own, over brokers behind failover with their log on Kafka,
PostgreSQL, and HDFS.

All of it is long (`make chaos`). The format itself there: tests/spark/test_kafka_cluster.py.
"""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Any

import jobs_program
import jobs_world
import psycopg
import pytest
import sqlalchemy as sa
from sweeps_killing import EACH, once_cleanly
from sweeps_world import BOOKS, SHARDS, world

import escrowmq as mq
from apart import Apart, Shard, Talk, eventually
from escrowmq_lab.databases import databases

pytestmark = [pytest.mark.long, pytest.mark.spark, pytest.mark.timeout(2400)]

PLACED, BATCHES = 400, 20
"""Messages of topic ``placed``, and transactions that they were sent in."""
ORDERS = 200
"""Of topic ``orders``, which has a fault of each kind."""
LATE = ("--settled-before", "2100-01-01")


@pytest.fixture(scope="module")
def shard(aside: Apart, kafka_url: str) -> Iterator[Shard]:
    """A shard of this module's own: what is in it is only read."""
    with ExitStack() as stack:
        made = Shard(aside.folder.parent / "jobs-shard", kafka_url, stack)
        with mq.connect(made.url) as bus:
            jobs_world.fill(bus, ORDERS)
            producer = bus.producer("placing", checker=lambda check: mq.UNKNOWN)
            for first in range(0, PLACED, PLACED // BATCHES):
                with producer.transaction() as txn:
                    for n in range(first, first + PLACED // BATCHES):
                        txn.send("placed", json.dumps({"cents": n}).encode(), key=f"p-{n}")
        yield made


@pytest.fixture(scope="module")
def driver(aside: Apart, shard: Shard) -> Iterator[Talk]:
    made = Talk(aside, jobs_program.__file__, aside.hands.url)
    assert made.ask("placed", f"{aside.hdfs}/placed", "p-", str(PLACED)) == PLACED
    assert made.ask("placed", f"{aside.hdfs}/orders", "o-", str(ORDERS)) == ORDERS
    yield made
    made.end()


def run_folder(folder: Path, log: str, file: str, topic: str, halves: bool = False) -> Path:
    """A run whose expected rows are on HDFS; with ``halves`` the committed half messages are compared, too."""
    folder.mkdir()
    sides = [{"expected": "file:expected", "found": f"topic:{topic}", "columns": ["cents"]}]
    if halves:
        sides.append({"expected": f"half:{topic}", "found": f"topic:{topic}", "columns": ["message_id", "body"]})
    manifest = {
        "log": log,
        "files": {"expected": {"path": file, "id": "order_id"}},
        "tables": {},
        "topics": [topic],
        "comparisons": sides,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def told(answer: dict[str, Any], code: int) -> Any:
    """What a command printed as JSON."""
    assert answer["code"] == code, answer
    return json.loads(answer["printed"])


@pytest.mark.invariant("I43")
def test_an_audit_whose_leading_broker_is_killed_agrees(aside: Apart, shard: Shard, driver: Talk) -> None:
    run = run_folder(aside.folder / "agreeing", shard.url, f"{aside.hdfs}/placed", "placed", halves=True)
    eventually(lambda: shard.leader() is not None, lambda: "nobody leads")
    driver.say("watched", "audit", str(run), "--json")
    assert isinstance(driver.hear(), str)  # the name of a stage, of which tasks run
    executors, killed = aside.hands.executors, None
    try:
        for pid in executors:  # so that none of its tasks ends before there is no leader
            os.kill(pid, signal.SIGSTOP)
        killed = shard.kill_leader()
    finally:
        for pid in executors:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    try:
        verdict = told(driver.hear(), 0)
    finally:
        killed.start()
    assert len(executors) == 2
    assert (verdict["verdict"], verdict["findings"], verdict["orphaned"]) == ("agree", [], 0)
    rows = [(side["ids"], side["expected_rows"], side["found_rows"]) for side in verdict["comparisons"]]
    assert rows == [(PLACED, PLACED, PLACED)] * 2
    assert json.loads((run / "verdict.json").read_text()) == verdict
    assert (run / "report.html").is_file()


@pytest.mark.invariant("I43")
def test_an_audit_names_exactly_what_is_wrong(aside: Apart, shard: Shard, driver: Talk) -> None:
    run = run_folder(aside.folder / "wrong", shard.url, f"{aside.hdfs}/orders", "orders")
    verdict = told(driver.ask("command", "audit", str(run), "--json"), 1)
    assert Counter((one["kind"], one["id"]) for one in verdict["findings"]) == Counter(jobs_world.WRONG)
    assert {kind: verdict[kind] for kind, _ in jobs_world.WRONG} == {kind: 1 for kind, _ in jobs_world.WRONG}


@pytest.mark.invariant("I43")
def test_reconcile_writes_to_hdfs_what_was_never_committed(aside: Apart, shard: Shard, driver: Talk) -> None:
    out = f"{aside.hdfs}/unconfirmed"
    words = ["-u", shard.url, "--half", "order-keys", "--commits", "orders", *LATE, "--out", out, "--json"]
    report = told(driver.ask("command", "reconcile", *words), 1)
    assert (report["missing"], report["unexpected"]) == (len(jobs_world.UNCONFIRMED), 0)
    assert driver.ask("found", f"{out}/findings") == sorted(["missing", id] for id in jobs_world.UNCONFIRMED)


@pytest.mark.invariant("I43")
def test_a_table_of_postgresql_against_a_topic(
    aside: Apart,
    shard: Shard,
    driver: Talk,
    postgres_url: str,
    new_database: Callable[[str], AbstractContextManager[str]],
) -> None:
    with new_database(postgres_url) as url:
        plain = sa.make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
        with psycopg.connect(plain) as connection:
            connection.execute("CREATE TABLE orders (order_id TEXT PRIMARY KEY, cents BIGINT, placed TIMESTAMPTZ)")
            connection.execute(
                "INSERT INTO orders SELECT 'o-' || n, n, TIMESTAMPTZ '2026-01-31' FROM generate_series(0, %s) n",
                (ORDERS - 1,),
            )
        assert {tuple(one) for one in driver.ask("compared", url, shard.url, "orders")} == jobs_world.WRONG
        out = f"{aside.hdfs}/postgresql"
        report = driver.ask("reconciled", url, shard.url, "orders", out)
        assert (report["half_rows"], report["missing"], report["unexpected"]) == (ORDERS, 1, 1)
        assert driver.ask("found", f"{out}/findings") == [["missing", "o-17"], ["unexpected", "o-none"]]


def test_the_report(aside: Apart, shard: Shard, driver: Talk) -> None:
    pages = aside.folder / "pages"
    report = told(driver.ask("command", "report", "-u", shard.url, "--out", str(pages), "--json"), 0)
    assert (report["totals"]["committed"], report["totals"]["rolled_back"]) == (BATCHES + 3, 3)
    counts = {topic["topic"]: topic["messages"] for topic in report["topics"]}
    assert counts == {"placed": PLACED, "orders": ORDERS + 1, "order-keys": ORDERS + 2, "carts": 3}
    assert json.loads((pages / "report.json").read_text()) == report
    assert (pages / "report.html").is_file()


def test_sweeps_of_postgresql(aside: Apart, driver: Talk, postgres_url: str) -> None:
    names = ["apart_products", "apart_warehouse", *(f"apart_orders_{number}" for number in range(SHARDS))]
    with databases(names, aside.folder, postgres_url) as urls, world(urls) as shop:
        shop.fill(EACH)
        clean = once_cleanly(shop)
        before = shop.content()
        assert before != clean
        assert [one["failed"] for one in driver.ask("swept", urls[0], *urls[2:])] == [0, 0]
        assert shop.content() == clean
        assert shop.problems() == []
        words = ["--products", urls[0], *(word for url in urls[2:] for word in ("--orders", url))]
        done = told(driver.ask("command", "sweep", *words, "--shard-by", str(BOOKS.shard_by), "--json"), 0)
        assert [one["failed"] for one in done.values()] == [0, 0]
        assert shop.problems() == []
        assert shop.content() != clean  # by the clock of the databases the others are over, too
