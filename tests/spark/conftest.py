"""The one Spark session of a test process: the pipeline's tests have it too, and Spark runs in one JVM a process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from enduring import keep_sessions
from escrowmq.pipeline.session import local_session
from escrowmq.spark.source import register
from kept_classes import lacks_classes
from standing import Stage


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    keep_sessions()
    with local_session("tests", cores=2, rows=1000, keeps_classes=lacks_classes()) as session:
        Stage(tmp_path_factory.mktemp("stage")).prepare(session)
        register(session)
        yield session
