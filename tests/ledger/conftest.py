"""``HYPOTHESIS_PROFILE=long`` makes the ledger's searches and walks as long as a night allows."""

import os

import pytest
from hypothesis import settings

from escrowmq.testing.ledgers import LedgerDriver

settings.register_profile("long", parent=settings.default, max_examples=5000, stateful_step_count=80)
if os.environ.get("HYPOTHESIS_PROFILE") == "long":
    settings.load_profile("long")


@pytest.fixture
def driver() -> LedgerDriver:
    """A ledger with the default rules, every decide watched."""
    return LedgerDriver()
