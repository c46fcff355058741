"""A process that has a session reads a checkpoint as Spark does, wherever Spark can have it."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from escrowmq.spark.checkback import find_last_commit

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


def test_a_file_system_that_only_java_knows(spark: SparkSession, tmp_path: Path) -> None:
    """viewfs is Hadoop's alone; here it shows a local folder."""
    made = tmp_path / "my query" / "commits"
    made.mkdir(parents=True)
    for name, second in (("9", 0), ("10", 5), ("notes", 9)):
        (made / name).touch()
        os.utime(made / name, (NOON.timestamp() + second,) * 2)
    link = "fs.viewfs.mounttable.checkpoints.link./queries"
    hadoop = spark.sparkContext._jsc.hadoopConfiguration()
    hadoop.set(link, tmp_path.as_uri())
    try:
        assert find_last_commit("viewfs://checkpoints/queries/my query/") == NOON.replace(second=5)
        assert find_last_commit(str(tmp_path / "my query")) == NOON.replace(second=5)
        assert find_last_commit((tmp_path / "my query").as_uri()) == NOON.replace(second=5)
        assert find_last_commit("viewfs://checkpoints/queries/nothing") is None
    finally:
        hadoop.unset(link)
