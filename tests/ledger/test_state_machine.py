"""The whole ledger against a naive model; ``HYPOTHESIS_PROFILE=long`` looks much longer."""

from dataclasses import replace

from hypothesis import settings
from ledger_machine import RULES, LedgerMachine

_ROUNDS = settings.default.max_examples // 2  # of the profile


class RollbackMachine(LedgerMachine):
    """Exhausted checks roll back instead of parking."""

    ledger_rules = replace(RULES, exhausted_rollback=True, check_max=1)


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=_ROUNDS)
TestExhaustedRollback = RollbackMachine.TestCase
TestExhaustedRollback.settings = settings(max_examples=_ROUNDS // 3)
