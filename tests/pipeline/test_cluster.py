"""Clusters by their names, sessions that disagree with what is asked, and Pythons that lack something: told at once,
and plainly.
"""

from __future__ import annotations

import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

import escrowmq as mq
from escrowmq.cli import submit
from escrowmq.errors import Code, EscrowError, Misuse, Unknown
from escrowmq.pipeline.cluster import check_master, is_here
from escrowmq.pipeline.failures import unwrap_errors
from escrowmq.pipeline.session import local_session
from escrowmq.pipeline.sql.source import SqlRange, SqlReader
from escrowmq.pipeline.sql.tables import KINDS, SqlRead, check, inode, readonly_url
from escrowmq.pipeline.sql.text_reads import Text, TextRead
from escrowmq.pipeline.sweeps import Databases
from escrowmq.pipeline.sweeps.databases import Connections
from escrowmq.spark import brokers
from escrowmq.spark.options import absolute, read_options
from escrowmq.spark.planning import OffsetRange
from escrowmq_lab.servers.process import free_port


@pytest.fixture
def listening() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made.getsockname()[1]


def test_a_master_that_does_not_answer_is_told_before_spark_starts(listening: int) -> None:
    away = free_port()
    with pytest.raises(Unknown, match=f"no Spark master at 127.0.0.1:{away}") as told:
        check_master(f"spark://127.0.0.1:{away}")
    assert told.value.code is Code.DISCONNECTED
    check_master(f"spark://127.0.0.1:{away},127.0.0.1:{listening}")  # the second is there


@pytest.mark.parametrize(
    "master", ["localhost", "spark:/host:1", "spark://host", "spark://host:0", "http://host:7077", ""]
)
def test_what_is_no_master_is_refused(master: str) -> None:
    with pytest.raises(Misuse, match="is no Spark master"):
        check_master(master)


@pytest.mark.parametrize("master", ["local", "local[2]", "local[*]", "yarn", "k8s://https://host:443"])
def test_masters_that_only_spark_knows_are_left_to_it(master: str) -> None:
    check_master(master)


@pytest.mark.parametrize(
    ("master", "here"),
    [
        ("local[2]", True),
        ("spark://127.0.0.2:7077", True),
        ("spark://localhost:1,[::1]:2", True),
        ("spark://localhost:1,10.0.0.7:2", False),
        ("spark://spark.example:7077", False),
        ("yarn", False),
    ],
)
def test_the_loopback_is_enough_only_for_this_machine(master: str, here: bool) -> None:
    assert is_here(master) is here


@pytest.mark.spark
@pytest.mark.xdist_group("spark")
def test_another_master_than_that_of_the_session_is_refused(spark: SparkSession) -> None:
    with local_session(master=spark.sparkContext.master) as same:
        assert same is spark
    with pytest.raises(Misuse, match="this process has a session on local"), local_session(master="spark://host:7077"):
        pass


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("...\n  File x\nModuleNotFoundError: No module named 'escrowmq'\n\n\tat org...", "no package escrowmq"),
        ("ModuleNotFoundError: No module named 'pymysql.cursors'", "no package pymysql"),
        ('java.io.IOException: Cannot run program "python9": error=2', "cannot start python9"),
        (
            "PySparkRuntimeError: [PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.9 than that in "
            "driver: 3.11, "
            "PySpark cannot run with different minor versions.\nPlease check",
            "is another: Python in worker has different version: 3.9",
        ),
    ],
)
def test_a_python_that_lacks_something_is_told_by_what_it_lacks(text: str, told: str) -> None:
    with pytest.raises(Misuse, match=told) as problem, unwrap_errors():
        raise PySparkException(text)
    assert problem.value.code is Code.MISSING_PACKAGE
    assert "PYSPARK_PYTHON" in problem.value.hint


def test_a_file_that_a_worker_does_not_see_is_told() -> None:
    text = (
        "org.apache.spark.SparkException: [FAILED_READ_FILE.CANNOT_READ_FILE_FOOTER] Encountered error while reading "
        "file ...\n"
        "Caused by: java.io.FileNotFoundException: File file:/runs/1/placed.parquet does not exist\n\tat org.apache..."
    )
    with (
        pytest.raises(Misuse, match=r"a worker of the cluster has no file:/runs/1/placed\.parquet \("),
        unwrap_errors(),
    ):
        raise PySparkException(text)


def test_other_failures_of_spark_stay_what_they_are() -> None:
    with pytest.raises(PySparkException, match="disk is full"), unwrap_errors():
        raise PySparkException("the disk is full")


def test_a_database_file_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(EscrowError, match=r"has no database .*orders\.db"):
        check(f"sqlite:///{tmp_path / 'orders.db'}", "orders", ())
    assert list(tmp_path.iterdir()) == []


def test_a_worker_that_does_not_see_a_file_says_so_and_makes_none(tmp_path: Path) -> None:
    missing = str(tmp_path / "there.db")
    reader = SqlReader([SqlRead(f"sqlite:///{missing}", "t", ("a",))], ["string"], 10)
    with pytest.raises(Misuse, match=f"has no database {missing}"):
        list(reader.read(SqlRange(0, "a", (None, None))))
    with pytest.raises(Misuse, match=f"has no database {missing}"):
        list(TextRead(readonly_url(Path(missing)), "t", (Text("a", "text", "text"),)).batches("rowid", (0, 9)))
    with pytest.raises(Misuse, match=str(tmp_path / "data")):
        brokers.open_links(f"file:{tmp_path / 'data'}")
    with Connections(Databases((f"sqlite:///{missing}",), f"sqlite:///{missing}2")) as opened:
        with pytest.raises(Misuse, match=f"has no database {missing}"):
            opened.orders(0)
        with pytest.raises(Misuse, match=f"has no database {missing}2"):
            _ = opened.products
    assert list(tmp_path.iterdir()) == []


@pytest.mark.invariant("I43")
def test_what_has_the_same_path_elsewhere_and_is_another_is_refused(tmp_path: Path) -> None:
    """What a worker finds there is its own."""
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
        with mq.connect(f"file:{tmp_path / name / 'data'}") as bus:
            assert bus.producer("p").send_batch([mq.Message("t", b"", key="k")]).ok
        with closing(sqlite3.connect(tmp_path / name / "orders.db")) as database:
            database.execute("CREATE TABLE orders (id TEXT PRIMARY KEY)")
    path = tmp_path / "path"
    path.symlink_to(tmp_path / "ours")
    [link] = brokers.open_links(f"file:{path / 'data'}")
    options = read_options({"url": f"file:{path / 'data'}", "topic": "t"})
    wanted = [OffsetRange(one, one.head, one.end) for one in brokers.topic_partitions([link], options)]
    link.close()
    read = SqlRead(f"sqlite:///{path / 'orders.db'}", "orders", ("id",), inode=inode(f"sqlite:///{path / 'orders.db'}"))
    known = Databases((read.url,), f"sqlite:///{tmp_path / 'ours' / 'orders.db'}")
    path.unlink()
    path.symlink_to(tmp_path / "theirs")
    with pytest.raises(Misuse, match="for the driver it is") as told:
        list(brokers.read(wanted[0], ["key"], {}, 5.0))
    assert told.value.code is Code.BAD_URL
    with pytest.raises(Misuse, match="is another file than that of the driver"):
        list(read.batches("id", (None, None), [KINDS["string"]]))
    with Connections(known) as opened, pytest.raises(Misuse, match="is another file than that of the driver"):
        opened.orders(0)


def test_a_relative_folder_is_sent_as_a_full_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for url in ("file:data", "file:./data", f"file:{tmp_path}/data"):
        assert absolute(url) == read_options({"url": url, "topic": "t"}).url == f"file:{tmp_path}/data"
    assert absolute("escrow://host:7700") == "escrow://host:7700"


def test_the_program_for_spark_submit_says_where_it_is() -> None:
    command = [sys.executable, "-m", "escrowmq.cli.submit"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == submit.__file__
