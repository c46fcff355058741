"""Format "escrow" in sessions that registered nothing: Spark finds package ``pyspark_escrow``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from bad_runs import numbers, read_stream, send, visible
from killing import Broker
from pyspark.sql import SparkSession

from escrowmq.spark.source import EscrowSource, register

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]


def test_a_session_reads_and_writes_in_python_and_sql(spark: SparkSession, tmp_path: Path) -> None:
    fresh = spark.newSession()
    broker = Broker(tmp_path / "data")
    try:
        send(broker.url, 0, 5)
        where = f"USING escrow OPTIONS (url '{broker.url}', topic 'in')"
        fresh.sql(f"CREATE TEMPORARY VIEW arrived {where}")
        assert fresh.sql("SELECT count(*), max(key) FROM arrived").collect() == [(5, "4")]
        fresh.table("arrived").select("key", "body").write.format("escrow").option("topic", "out").mode("append").save(
            broker.url
        )
        assert visible(broker.url, "out") == numbers(0, 5)
        assert read_stream(fresh, broker.url, tmp_path / "check") == [list("01234")]
        register(fresh)  # as before
        assert fresh.sql("SELECT count(*) FROM arrived").collect() == [(5,)]
    finally:
        broker.kill()


def test_the_package_is_light() -> None:
    """Every session with any Python source imports it."""
    program = """
import sys
import pyspark.sql.datasource
before = set(sys.modules)
from pyspark_escrow import DefaultSource
loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
assert loaded == {"escrowmq", "pyspark_escrow"}, loaded
assert DefaultSource.name() == "escrow"
assert len([name for name in sys.modules if name.startswith("escrowmq")]) < 8
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_it_is_the_same_source() -> None:
    from pyspark_escrow import DefaultSource

    assert DefaultSource is EscrowSource
