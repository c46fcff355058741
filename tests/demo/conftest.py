"""One Spark session for the audits of these tests; starting one takes seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from enduring import keep_sessions
from escrowmq.pipeline.session import local_session
from kept_classes import lacks_classes


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    keep_sessions()
    with local_session("tests", cores=2, rows=1000, keeps_classes=lacks_classes()) as session:
        yield session
