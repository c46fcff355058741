"""The jobs on a cluster whose workers have folders of their own, over brokers behind failover with their log on Kafka, PostgreSQL, and HDFS.

All of it is long (`make chaos`). The format itself there: tests/spark/test_kafka_cluster.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
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
from killing import kill_session
from sweeps_killing import EACH, once_cleanly
from sweeps_world import BOOKS, SHARDS, world

import escrowmq as mq
from apart import Apart, Shard, Talk, eventually
from escrowmq.testing.databases import databases

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


def test_an_audit_names_exactly_what_was_planted(aside: Apart, shard: Shard, driver: Talk) -> None:
    run = run_folder(aside.folder / "wrong", shard.url, f"{aside.hdfs}/orders", "orders")
    verdict = told(driver.ask("command", "audit", str(run), "--json"), 1)
    assert Counter((one["kind"], one["id"]) for one in verdict["findings"]) == Counter(jobs_world.WRONG)
    assert {kind: verdict[kind] for kind, _ in jobs_world.WRONG} == {kind: 1 for kind, _ in jobs_world.WRONG}


def test_reconcile_writes_to_hdfs_what_was_never_committed(aside: Apart, shard: Shard, driver: Talk) -> None:
    out = f"{aside.hdfs}/unconfirmed"
    words = ["-u", shard.url, "--half", "order-keys", "--commits", "orders", *LATE, "--out", out, "--json"]
    report = told(driver.ask("command", "reconcile", *words), 1)
    assert (report["missing"], report["unexpected"]) == (len(jobs_world.UNCONFIRMED), 0)
    assert driver.ask("found", f"{out}/findings") == sorted(["missing", id] for id in jobs_world.UNCONFIRMED)


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


def test_what_lies_in_a_folder_of_the_driver_is_refused_before_anything_is_done(
    aside: Apart, shard: Shard, driver: Talk
) -> None:
    place = jobs_world.make(aside.folder / "refused")
    before = jobs_world.left(place)
    data, out = f"file:{place / 'run' / 'broker'}", place / "deep" / "findings"
    logged = run_folder(place / "logged", data, f"{aside.hdfs}/orders", "orders")
    refuses(driver, "has no data folder", "audit", str(logged))
    manifest = json.loads((place / "run" / "manifest.json").read_text())
    tables = place / "tables"  # the same table, against a broker that all see
    tables.mkdir()
    (tables / "orders.db").write_bytes((place / "run" / "orders.db").read_bytes())
    (tables / "manifest.json").write_text(json.dumps({**manifest, "log": shard.url}))
    refuses(driver, "has no database", "audit", str(tables))
    both = ["--half", "order-keys", "--commits", "orders"]
    refuses(driver, "has no data folder", "reconcile", "-u", data, *both, *LATE, "--out", f"{aside.hdfs}/refused")
    refuses(driver, "do not see the folder", "reconcile", "-u", shard.url, *both, *LATE, "--out", str(out))
    stream = ["--stream", "--once", "--checkpoint", str(out), "--out-topic", "refused"]
    refuses(driver, "do not see the folder", "reconcile", "-u", shard.url, *both, *stream)
    refuses(driver, "has no data folder", "report", "-u", data, "--out", str(place / "pages"))
    shop = [f"sqlite:///{place / name}.db" for name in ("products", "orders_0", "orders_1")]
    refuses(driver, "has no database", "sweep", "--products", shop[0], "--orders", shop[1], "--orders", shop[2])
    assert jobs_world.left(place) == before
    assert not [path for path in (out.parent, place / "pages", *place.rglob("verdict.json")) if path.exists()]
    with mq.connect(shard.url) as bus:
        assert "refused" not in {topic["name"] for topic in bus.admin.topics()}


def refuses(driver: Talk, why: str, *words: str) -> None:
    """Exit code 2 and the reason, and nothing else."""
    answer = driver.ask("command", *words, "--json")
    assert (answer["code"], answer["printed"]) == (2, ""), answer
    assert why in " ".join(answer["said"].split()), answer


def test_a_stream_of_findings_whose_driver_is_killed_goes_on_from_hdfs(aside: Apart, driver: Talk) -> None:
    """The last: it ends the session of the others, which has all cores."""
    driver.end()
    url = aside.shard.url
    words = ["-u", url, "--half", "announced", "--commits", "done", "--out-topic", "missing"]
    words += ["--stream", "--checkpoint", f"{aside.hdfs}/reconciling", "--grace", "5s", "--lateness", "5s"]
    command = ["-m", "escrowmq", "reconcile", *words, "--master", aside.hands.url]
    wanted: Counter[tuple[str, str]] = Counter()
    with mq.connect(url) as bus:
        for name in ("before", "after"):  # it is killed
            send(bus, [f"{name}-{n}" for n in range(20)], lost=range(0, 20, 7))
            wanted.update(("missing", f"{name}-{n}") for n in range(0, 20, 7))
            running = aside.start(*command, stdout=subprocess.DEVNULL)
            try:
                goes_on(bus, running, lambda: findings(bus).total() >= wanted.total())
            finally:
                kill_session(running.pid)
                running.communicate()
            assert running.returncode == -signal.SIGKILL
            assert findings(bus) == wanted
        ended = aside.start(*command, "--once")
        said = ended.communicate()[1]
        assert ended.returncode == 0, said[-4000:]
        assert findings(bus) == wanted
        assert bus.admin.transactions(state="undecided") == []


def send(bus: mq.Bus, ids: list[str], lost: range = range(0)) -> None:
    """Announce ids, and commit them, but for those at some places."""
    announced = [mq.Message("announced", b"", key=id) for id in ids]
    done = [mq.Message("done", b"", key=id) for number, id in enumerate(ids) if number not in lost]
    assert bus.producer("shop").send_batch([*announced, *done]).ok


def goes_on(bus: mq.Bus, running: subprocess.Popen[str], what: Callable[[], bool]) -> None:
    """Wait until something holds, as long as a program runs. Meanwhile other ids come, one a second: they are the stream's clock."""
    sent = [time.monotonic()]

    def held() -> bool:
        assert running.poll() is None, running.communicate()[1][-4000:]
        if time.monotonic() > sent[-1] + 1:
            send(bus, [f"{running.pid}-{len(sent)}"])
            sent.append(time.monotonic())
        return what()

    eventually(held, lambda: f"only {findings(bus)}")


def findings(bus: mq.Bus) -> Counter[tuple[str, str]]:
    """Kinds and ids in the topic of findings."""
    if "missing" not in {topic["name"] for topic in bus.admin.topics()}:
        return Counter()
    rows = bus.admin.read("missing").read_all().to_pylist()
    return Counter((json.loads(row["body"])["kind"], row["key"]) for row in rows)
