"""The one Spark session of a test process: the pipeline's tests have it too, and Spark runs in one JVM a process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from escrowmq.pipeline.session import local_session
from escrowmq.spark.source import register


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    with local_session("tests", cores=2, rows=1000) as session:
        register(session)
        yield session
