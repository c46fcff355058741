"""docs/reconcile.md, docs/sweeps.md and docs/report.md run; the commands over a real broker whose producer lost some of
its confirms.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from sweeps_world import SHARDS, world
from typer.testing import CliRunner

import escrowmq as mq
from escrowmq.cli.main import app

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]

DOCS = Path(__file__).parents[2] / "docs"
LOST = {"o-3", "o-7"}


def blocks(page: str, kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def run(line: str, *more: str):
    words = shlex.split(line.replace("\\\n", " "))
    assert words[0] == "escrowmq"
    done = CliRunner().invoke(app, [*words[1:], *more])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


def one_way(url: str) -> None:
    """Ten orders; the unique key of each goes to a second topic, but the confirm of two is lost."""
    with mq.connect(url) as bus:
        producer, keys = bus.producer("shop", checker=lambda check: mq.UNKNOWN), bus.producer("keys")
        for number in range(10):
            half = producer.prepare("orders", b"book", key=f"o-{number}")
            if f"o-{number}" not in LOST:
                producer.commit(half.transaction_id)
            keys.send("order-keys", half.message_id.hex().encode(), key=f"o-{number}")
        back = producer.prepare("orders", b"pen", key="o-10")
        producer.rollback(back.transaction_id)


@pytest.mark.invariant("I43")
def test_reconcile(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    one_way("file:./data")
    batch, stream = (text.strip() for text in blocks("reconcile.md", "sh"))
    done = run(batch, "--json")
    assert (done.exit_code, json.loads(done.stdout)["missing"]) == (0, 0)  # all within the grace time
    for more in (("--half-id", "body", "--id", "message_id"), ("--half", "%half")):
        done = run(batch, "--json", "--settled-before", "2100-01-01", "--out", str(tmp_path / "out"), *more)
        told = json.loads(done.stdout)
        assert (done.exit_code, told["missing"], told["unexpected"]) == (1, 2, 0)
    assert {one["id"] for one in told["named"]} == LOST
    assert spark.read.parquet(str(tmp_path / "out" / "findings")).count() == 2
    done = run(batch, "--settled-before", "2100-01-01")
    assert done.exit_code == 1
    assert "o-3" in done.stdout
    [program] = blocks("reconcile.md", "python")
    exec(program, {})
    assert capsys.readouterr().out == "['o-3', 'o-7']\n2\n"
    done = run(stream, "--url", "file:./data", "--once")
    assert (done.exit_code, "many processes cannot write to one folder" in done.stderr) == (2, True)


def test_report(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    one_way("file:./data")
    [program] = blocks("report.md", "python")
    exec(program, {})
    assert capsys.readouterr().out == "11 [('order-keys', 10), ('orders', 8)]\n"
    [command] = blocks("report.md", "sh")
    done = run(command, "--url", "file:./data")
    assert (done.exit_code, (tmp_path / "pages" / "report.html").is_file()) == (0, True), done.output


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--commits", "nowhere"], "UNKNOWN_TOPIC"),
        (["--id", "keys"], "did you mean 'key'"),
        (["--stream"], "--stream needs --checkpoint"),
        (["--out-topic", "t"], "--out-topic is of --stream"),
        (["--settled-before", "noon"], "--settled-before: 'noon'"),
        (["--grace", "soon"], "--grace"),
    ],
)
def test_bad_options(spark: SparkSession, tmp_path: Path, more: list[str], told: str) -> None:
    one_way(f"file:{tmp_path / 'data'}")
    done = run(f"escrowmq reconcile --url file:{tmp_path / 'data'} --half order-keys --commits orders", *more)
    assert done.exit_code not in (0, 1), done.output
    assert told in done.output


def test_sweeps(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    names = ["products", "warehouse", *(f"orders_{number}" for number in range(SHARDS))]
    with world([f"sqlite:///{name}.db" for name in names]) as shop:
        shop.fill(1)
        command, scheduled = blocks("sweeps.md", "sh")
        done = run(command, "--json")
        assert (done.exit_code, done.stderr) == (0, "")
        told = json.loads(done.stdout)
        assert told["orders"]["acts"] == {"released as sold": 1, "timed out, stock given back": 2}
        assert told["freezes"]["acts"] == {"no order, stock given back": 3}
        assert shop.problems() == []
        [program] = blocks("sweeps.md", "python")
        exec(program, {})
        assert capsys.readouterr().out == "{} ()\n{} ()\n"
    for words in (command, scheduled):
        done = run(words, "--only", "both")
        assert (done.exit_code, "one of orders, freezes" in done.output) == (2, True)
    done = run(command, "--shard-by", "customer")
    assert (done.exit_code, "has no column customer" in done.output) == (2, True)
