"""What all tests share: how Hypothesis searches, and that tests with a Java runtime run in one process, one JVM."""

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

settings.register_profile("here", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", parent=settings.get_profile("here"), derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "here")

WITH_SPARK = ("tests/pipeline/", "tests/demo/")


class OneJvm(LoadScopeScheduling):
    """Tests go one by one to whichever process is free, but those with Spark all to the same: a second JVM costs more
    than it brings."""

    def _split_scope(self, nodeid: str) -> str:
        return "spark" if nodeid.startswith(WITH_SPARK) else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> OneJvm:
    """How ``pytest -n`` shares tests out."""
    return OneJvm(config, log)
