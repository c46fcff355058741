"""One Spark session for all tests of the pipeline; starting one takes seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from escrowmq.pipeline.session import local_session


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    with local_session("tests", cores=2, rows=1000) as session:
        yield session
