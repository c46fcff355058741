"""The jobs on a cluster whose workers have folders of their own: they agree, find what was planted, and refuse what only the driver has."""

from __future__ import annotations

import json
import sqlite3
import subprocess
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jobs_program
import pyarrow as pa
import pyspark
import pytest
from pyarrow import parquet
from sweeps_world import BOOKS, SHARDS, world

import escrowmq as mq
from apart import Apart
from escrowmq.pipeline.java import find_java
from escrowmq.testing.databases import databases

pytestmark = [pytest.mark.long, pytest.mark.spark, pytest.mark.timeout(2400)]

COUNT = 200
WRONG = {("lost", "o-17"), ("repeated", "o-5"), ("altered", "o-4"), ("leaked", "o-none")}
Told = tuple[int, str, str]
"""Exit code, output, and what was printed to standard error."""


def told(aside: Apart, *commands: Sequence[str]) -> list[Told]:
    """What the commands say, run on the cluster in the driver's folder."""
    file = aside.folder / "commands.json"
    file.write_text(json.dumps(commands))
    with aside.start(jobs_program.__file__, aside.hands.url, str(file)) as program:
        printed, problems = program.communicate()
    assert program.returncode == 0, problems[-4000:]
    return [(code, out, said) for code, out, said in json.loads(printed.splitlines()[-1])]


def hadoop(aside: Apart, *words: str) -> None:
    """Hadoop's own command for files; it asks for a file of settings, empty or not."""
    settings = aside.folder / "hadoop"
    settings.mkdir(exist_ok=True)
    (settings / "core-site.xml").write_text("<configuration></configuration>")
    classes = f"{settings}:{Path(pyspark.__file__).parent / 'jars' / '*'}"
    command = [str(find_java().program), "-cp", classes, "org.apache.hadoop.fs.FsShell", "-fs", aside.hdfs]
    subprocess.run([*command, *words], check=True, capture_output=True)


def send(url: str) -> None:
    """Orders that are all right, the same with one of each kind of fault, and their ids as they were announced."""
    right = [(f"o-{n}", n) for n in range(COUNT)]
    wrong = [(key, -1 if key == "o-4" else n) for key, n in right if key != "o-17"] + [("o-5", 5), ("o-none", 0)]
    sent = [("agreed", key, n) for key, n in right] + [("faulty", key, n) for key, n in wrong]
    messages = [mq.Message(topic, json.dumps({"cents": n}).encode(), key=key) for topic, key, n in sent]
    messages += [mq.Message("announced", b"", key=key) for key, _ in right]
    with mq.connect(url) as bus:
        assert bus.producer("jobs").send_batch(messages).ok


def run_folder(aside: Apart, name: str, topic: str, **more: Any) -> str:
    """A run folder that compares what was placed, a file on HDFS, with a topic; ``more`` replaces fields."""
    folder = aside.folder / name
    folder.mkdir()
    manifest = {
        "log": aside.shard.url,
        "files": {"placed": {"path": f"{aside.hdfs}/placed.parquet", "id": "order_id"}},
        "tables": {},
        "topics": [topic],
        "comparisons": [{"expected": "file:placed", "found": f"topic:{topic}", "columns": ["cents"]}],
    }
    (folder / "manifest.json").write_text(json.dumps(manifest | more))
    return name


def test_audit_reconcile_and_report_of_a_shard_behind_failover(aside: Apart) -> None:
    url, here = aside.shard.url, aside.folder
    send(url)
    placed = pa.table({"order_id": [f"o-{n}" for n in range(COUNT)], "cents": [*range(COUNT)]})
    parquet.write_table(placed, here / "placed.parquet")
    hadoop(aside, "-put", str(here / "placed.parquet"), "/placed.parquet")
    with closing(sqlite3.connect(here / "orders.db")) as database:
        database.execute("CREATE TABLE orders (order_id TEXT PRIMARY KEY, cents INTEGER)")
        database.commit()
    local = {"placed": {"path": "../placed.parquet", "id": "order_id"}}
    table = {"orders": {"database": "../orders.db", "table": "orders", "id": "order_id"}}
    of_table = [{"expected": "table:orders", "found": "topic:agreed", "columns": ["cents"]}]
    with mq.connect(f"file:{here / 'data'}") as bus:
        assert bus.producer("jobs").send_batch([mq.Message("agreed", b"{}", key="o-1")]).ok
    ids = ["reconcile", "-u", url, "--half", "announced", "--settled-before", "2100-01-01", "--json"]
    agreed, faulty, data, file, sqlite, on_hdfs, on_driver, stream, report = told(
        aside,
        ["audit", run_folder(aside, "right", "agreed"), "--json"],
        ["audit", run_folder(aside, "wrong", "faulty"), "--json"],
        ["audit", run_folder(aside, "data-run", "agreed", log="../data"), "--json"],
        ["audit", run_folder(aside, "file-run", "agreed", files=local), "--json"],
        ["audit", run_folder(aside, "sqlite-run", "agreed", files={}, tables=table, comparisons=of_table), "--json"],
        [*ids, "--commits", "faulty", "--out", f"{aside.hdfs}/findings"],
        [*ids, "--commits", "faulty", "--out", "findings"],
        ["reconcile", "-u", url, "--half", "announced", "--commits", "faulty", "--stream", "--checkpoint", "memory", "--once"],
        ["report", "-u", url, "--out", "pages", "--json"],
    )  # fmt: skip
    assert agreed[0] == 0, agreed
    assert faulty[0] == 1, faulty
    assert {(one["kind"], one["id"]) for one in json.loads(faulty[1])["findings"]} == WRONG
    refused(data, "NOT_A_DATA_FOLDER", "has no data folder")
    refused(file, "BAD_ARGUMENT", "a worker of the cluster has no file:")
    refused(sqlite, "BAD_ARGUMENT", "has no database")
    assert on_hdfs[0] == 1, on_hdfs
    hadoop(aside, "-get", "/findings/findings", str(here / "got"))
    found = pa.concat_tables([parquet.read_table(part) for part in (here / "got").glob("*.parquet")])
    assert sorted(found["id"].to_pylist()) == ["o-17", "o-none"]
    refused(on_driver, "BAD_ARGUMENT", "do not see the folder")
    assert not (here / "findings" / "findings").exists()
    refused(stream, "BAD_ARGUMENT", "the checkpoint: workers of the cluster")
    assert report[0] == 0, report
    counted = {
        one["topic"]: one["messages"] for one in json.loads((here / "pages" / "report.json").read_text())["topics"]
    }
    assert (counted["agreed"], counted["faulty"]) == (COUNT, COUNT + 1)


def test_sweeps_on_database_servers_and_not_on_files_of_the_driver(aside: Apart, postgres_url: str) -> None:
    names = ["apart_products", "apart_warehouse", *(f"apart_orders_{number}" for number in range(SHARDS))]
    tables = aside.folder / "tables.json"
    tables.write_text(json.dumps({one: value for one, value in asdict(BOOKS).items() if value is not None}))

    def sweep(urls: Sequence[str]) -> list[str]:
        orders = [word for url in urls[2:] for word in ("--orders", url)]
        return ["sweep", "--products", urls[0], *orders, "--tables", str(tables), "--json"]

    with (
        databases(names, aside.folder, postgres_url) as served,
        databases(names, aside.folder) as files,
        world(served) as shop,
        world(files) as other,
    ):
        shop.fill()
        other.fill()
        before = other.content()
        done, of_files = told(aside, sweep(served), sweep(files))
        assert done[0] == 0, done
        assert shop.problems() == []
        refused(of_files, "BAD_ARGUMENT", "has no database")
        assert other.content() == before


def refused(said: Told, code: str, words: str) -> None:
    assert said[0] == 2, said
    assert code in said[2], said
    assert words in said[2], said
