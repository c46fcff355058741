"""The whole ledger against a naive model; ``HYPOTHESIS_PROFILE=long`` looks much longer."""

from dataclasses import replace

import pytest
from hypothesis import settings
from ledger_machine import RULES, LedgerMachine

LONG = settings.default.max_examples > 1000
ROUNDS = settings.default.max_examples if LONG else 30
STEPS = settings.default.stateful_step_count if LONG else 30


class RollbackMachine(LedgerMachine):
    """Exhausted checks roll back instead of parking."""

    ledger_rules = replace(RULES, exhausted_rollback=True, check_max=1)


TestLedger = pytest.mark.invariant("I3", "I4", "I5", "I8", "I9", "I14", "I17", "I18")(LedgerMachine.TestCase)
TestLedger.settings = settings(max_examples=ROUNDS, stateful_step_count=STEPS)
TestExhaustedRollback = RollbackMachine.TestCase
TestExhaustedRollback.settings = settings(max_examples=ROUNDS // 3, stateful_step_count=STEPS)
