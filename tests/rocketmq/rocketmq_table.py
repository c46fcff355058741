"""The table of clients and features, docs/reference/rocketmq-clients.md: runs the cases of all clients and writes it.

``python tests/rocketmq/rocketmq_table.py`` needs all five tool chains and takes many minutes. With an expression of
``pytest -k`` (a language, say) it runs these cases only, and keeps the page's cells of the others.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
CASES = HERE / "test_rocketmq_clients.py"
PAGE = HERE.parents[1] / "docs" / "reference" / "rocketmq-clients.md"

FEATURES = {
    "test_it_sends_and_receives_with_keys_tags_and_properties": "messages with keys, tags and properties",
    "test_messages_of_a_group_come_in_order": "FIFO messages",
    "test_a_delayed_message_comes_later": "delays",
    "test_transactions_are_committed_and_rolled_back": "transactions",
    "test_another_process_answers_for_one_that_was_killed_before_its_commit": "check-back after the sender was killed",
    "test_what_is_not_acknowledged_comes_again_and_becomes_a_dead_letter": "redelivery and dead letters",
    "test_a_delayed_message_is_recalled": "recalls of delayed messages",
    "test_a_push_consumer_gets_a_message_again_that_it_failed": "push consumer, redelivery",
    "test_a_message_that_a_push_consumer_fails_becomes_a_dead_letter": "push consumer, dead letters",
    "test_it_goes_on_after_the_gateway_was_killed": "sending and receiving after the gateway was killed",
    "test_it_goes_on_after_the_broker_was_killed": "sending and receiving while the broker is killed",
    "test_it_answers_check_backs_after_the_gateway_was_killed": "check-back after the gateway was killed",
}
"""What each case shows."""
LIMITATIONS = {
    ("python", "test_a_delayed_message_is_recalled"): "limitation: a late recall raises nothing",
    ("go", "test_it_answers_check_backs_after_the_gateway_was_killed"): "limitation: after up to 5 minutes",
    ("rust", "test_it_answers_check_backs_after_the_gateway_was_killed"): "limitation: another process only",
}
"""Limitations of clients, which docs/rocketmq.md explains."""
MISSING = {
    ("rust", "test_a_delayed_message_is_recalled"): "not in this client",
    ("rust", "test_a_push_consumer_gets_a_message_again_that_it_failed"): "not in this client",
    ("rust", "test_a_message_that_a_push_consumer_fails_becomes_a_dead_letter"): "not in this client",
}
"""What has no case, and why."""
FAILS, NOT_RUN = "**fails**", "not run"
Outcomes = Mapping[tuple[str, str], bool]
"""Whether all cases of a language and a test passed."""


def versions() -> dict[str, str]:
    """Return the version of the client that each language's program uses."""
    texts = {
        "node": (HERE / "rocketmq_programs.py", r"nodejs@([\d.]+)"),
        "java": (HERE / "clients" / "java" / "pom.xml", r"<version>([\d.]+)"),
        "go": (HERE / "clients" / "go" / "go.mod", r"golang/v5 v([\d.]+)"),
        "rust": (HERE / "clients" / "rust" / "Cargo.toml", r'rocketmq = "=([\d.]+)'),
    }
    found = {"python": version("rocketmq-python-client")}
    for language, (file, pattern) in texts.items():
        match = re.search(pattern, file.read_text())
        assert match is not None, file
        found[language] = match[1]
    return found


def page(outcomes: Outcomes) -> str:
    """Return the page for the outcomes of a run."""
    clients = versions()
    lines = [
        "# RocketMQ clients: what works",
        "",
        "For teams with RocketMQ clients. At the end you know what works with each client.",
        "",
        "Written by `python tests/rocketmq/rocketmq_table.py`, which runs the cases of "
        "[tests/rocketmq/test_rocketmq_clients.py](../../tests/rocketmq/test_rocketmq_clients.py) with each client. "
        "[RocketMQ clients](../rocketmq.md) explains the limitations.",
        "",
        "| | " + " | ".join(f"{name.title()} {number}" for name, number in clients.items()) + " |",
        "| --- |" + " --- |" * len(clients),
    ]
    for test, text in FEATURES.items():
        cells = [_cell((name, test), outcomes) for name in clients]
        lines.append(f"| {text} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(case: tuple[str, str], outcomes: Outcomes) -> str:
    if case in MISSING:
        return MISSING[case]
    if case not in outcomes:
        return NOT_RUN
    return LIMITATIONS.get(case, "works") if outcomes[case] else FAILS


def outcomes_of(text: str) -> dict[tuple[str, str], bool]:
    """Return the outcomes that a page shows, of today's versions only."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    columns = {name: f"{name.title()} {number}" for name, number in versions().items()}
    tests = {text: test for test, text in FEATURES.items()}
    at = {name: rows[0].index(column) for name, column in columns.items() if column in rows[0]}
    found = [row for row in rows[2:] if row[0] in tests]
    cells = {(name, tests[row[0]]): row[place] for row in found for name, place in at.items()}
    return {case: cell != FAILS for case, cell in cells.items() if cell != NOT_RUN}


class Recorder:
    """A plugin of pytest that notes the outcome of each case."""

    def __init__(self) -> None:
        self.outcomes: dict[tuple[str, str], bool] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        test, _, case = report.nodeid.rpartition("::")[2].partition("[")
        for language in {*case.rstrip("]").split("-")} & {*versions()}:
            passed = report.passed and self.outcomes.get((language, test), True)
            self.outcomes[language, test] = passed


def main(expression: str = "") -> int:
    """Run the cases and write the page. Returns the exit code of pytest."""
    recorder = Recorder()
    words = ["-q", "-n", "0", "-p", "no:cacheprovider", "-k", expression, str(CASES)]
    code = pytest.main(words, plugins=[recorder])
    kept = outcomes_of(PAGE.read_text()) if expression else {}
    PAGE.write_text(page(kept | recorder.outcomes))
    return int(code)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
