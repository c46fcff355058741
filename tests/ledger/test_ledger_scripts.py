"""The ledger's behaviour as text: see tests/ledger/scripts, and tests/support/ledger_script.py for the commands."""

from __future__ import annotations

from pathlib import Path

import pytest

import golden
from ledger_script import LedgerScript

SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.txt"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_ledger_does_what_the_script_says(script: Path) -> None:
    golden.run(script, LedgerScript())
