"""What all tests share: how Hypothesis searches, and that tests with a Java runtime run in one process, one JVM."""

import os

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("here", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", parent=settings.get_profile("here"), derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "here")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep all Spark tests in one xdist worker: a second JVM costs more than it brings."""
    for item in items:
        if item.get_closest_marker("spark"):
            item.add_marker(pytest.mark.xdist_group("spark"))
