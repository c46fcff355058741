"""The page of clients and features is that of a run in which all cases pass."""

from __future__ import annotations

import re

from rocketmq_table import CASES, FAILS, FEATURES, LIMITATIONS, MISSING, PAGE, outcomes_of, page, versions


def test_the_page_is_current() -> None:
    text = PAGE.read_text()
    assert page(outcomes_of(text)) == text, "write it anew: python tests/rocketmq/rocketmq_table.py"
    assert FAILS not in text


def test_each_case_is_a_row_and_each_limitation_is_of_a_case() -> None:
    assert {*re.findall(r"^def (test_\w+)", CASES.read_text(), re.MULTILINE)} == {*FEATURES}
    assert {test for _, test in {*LIMITATIONS} | {*MISSING}} <= {*FEATURES}


def test_cells_of_cases_that_were_not_run_are_kept() -> None:
    passed = {(language, test): True for language in versions() for test in FEATURES}
    failed = {**passed, ("go", next(iter(FEATURES))): False}
    assert page(outcomes_of(page(failed))) == page(failed)


def test_a_case_that_fails_shows() -> None:
    failed = {(language, test): False for language in versions() for test in FEATURES}
    assert page(failed).count(FAILS) == len(FEATURES) * len(versions()) - len(MISSING)
