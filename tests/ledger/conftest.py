"""How hard Hypothesis looks: ``HYPOTHESIS_PROFILE=long`` for long runs, otherwise as much as a suite can spend."""

import os

import pytest
from hypothesis import HealthCheck, settings

from escrowmq.testing.ledgers import LedgerDriver

settings.register_profile(
    "suite", max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "long", max_examples=5000, stateful_step_count=80, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "suite"))


@pytest.fixture
def driver() -> LedgerDriver:
    """A ledger with the default rules, every decide watched."""
    return LedgerDriver()
