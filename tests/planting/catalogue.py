"""All planted bugs: those of this room, by importing them, and those that stand beside the tests that notice them, by
reference.

A reference is read from its file: every test whose name says that something is planted is a row, and every entry of the
lists that such a test goes through. So a bug that is planted elsewhere later comes into the list by itself.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

import bugs_barrier
import bugs_broker
import bugs_client
import bugs_clock
import bugs_consumers
import bugs_gateway
import bugs_jobs
import bugs_modes
import bugs_relay
import bugs_rights
import bugs_spark
import bugs_wire

from planting import BUGS, ROOT

__all__ = ["BUGS", "FILES", "Elsewhere", "elsewhere"]

FILES = [
    bugs_client,
    bugs_consumers,
    bugs_wire,
    bugs_relay,
    bugs_barrier,
    bugs_modes,
    bugs_broker,
    bugs_gateway,
    bugs_rights,
    bugs_spark,
    bugs_jobs,
    bugs_clock,
]


@dataclass(frozen=True)
class Elsewhere:
    """A bug that is planted by a test outside this room. ``entry``: which one of the list that the test goes
    through."""

    room: str
    title: str
    test: str
    entry: str | None = None
    runs: bool = True
    """Whether the table runs it to see how long that takes; those in Spark jobs of many minutes are not run for a
    table."""


ROOMS = {
    "ledger": "tests/ledger/",
    "log": "tests/log/",
    "shard": "tests/faults/",
    "broker": "tests/broker/",
    "barrier": "tests/outbox/barrier/",
    "relay": "tests/outbox/relay/",
    "modes": "tests/outbox/modes/",
    "set store": "tests/compensation/sets/",
    "compensation": "tests/compensation/",
    "Spark": "tests/spark/",
    "audit": "tests/pipeline/",
    "whole system": "tests/system/",
    "chaos": "tests/chaos/",
}
PREFIXES = ("test_planted_", "test_a_planted_", "test_")
LISTS = {
    "tests/ledger/test_planted.py::test_every_planted_bug_is_caught": "@planted",
    "tests/compensation/test_compensation_planted.py::test_a_planted_bug_is_caught": "PLANTED",
    "tests/compensation/sets/test_sets_planted.py::test_the_model_sees_it": "BUGS",
}
"""Tests that go through a list: its name, or the decorator that enters functions into it."""
TITLES = {
    "tests/compensation/sets/test_sets_planted.py::test_the_suite_sees_what_takes_many_calls_to_come_to": [
        "a run that is adopted again while its lease runs",
        "a run that stays when all of it is settled",
    ],
    "tests/pipeline/test_audit_windows.py::test_a_planted_weak_digest_would_be_caught": [
        "windows compared by count",
        "windows compared without their content",
        "windows compared by xor",
    ],
    "tests/spark/test_stream_kills.py::test_a_planted_bug_is_caught": [
        "each task commits what it has prepared",
        "a batch is committed without its number",
    ],
    "tests/chaos/test_run.py::test_a_mode_that_is_wrong_is_found": [
        "an effect without a mark",
        "an ack before the effect",
        "a send without a decision",
    ],
    "tests/system/test_counted_work.py::test_a_planted_regression_breaks_its_guard": [
        "a sync more for each round",
        "a change of threads more for each request",
        "a thread more for each request",
        "requests that are not merged",
        "one request a round",
        "calls of Python for each row",
        "each message of a client goes by another thread",
        "a client that combines nothing",
        "a client that keeps objects of each message",
        "calls of Python for each message of a client",
    ],
}
"""Tests whose entries have no names of their own."""
WHOLE = ("tests/faults/test_planted_bugs.py", "tests/compensation/sets/test_sets_planted.py")
"""Files all of whose tests plant something."""
NO_BUG = ("without_a_planted_bug", "the_real_code_is_sound", "a_sound_store", "executors_and_the_broker_killed")
LONG = ("tests/chaos/", "tests/spark/", "tests/outbox/modes/test_modes_kills.py", "tests/pipeline/", "tests/system/")
HERE = ("tests/planting/", "tests/simulation/", "tests/pipeline/test_comparisons_planted.py")
"""Rows of their own in the page."""


def elsewhere() -> list[Elsewhere]:
    """In the order of the rooms, then of the files."""
    files = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py"))
    rows = [row for file in files if not file.startswith(HERE) for row in _rows(file)]
    return sorted(rows, key=lambda row: list(ROOMS).index(row.room))


def _rows(file: str) -> Iterator[Elsewhere]:
    text = (ROOT / file).read_text()
    if not any(word in text for word in ("planted", "is_caught", "that_is_wrong")):
        return
    room = next((room for room, folder in ROOMS.items() if file.startswith(folder)), None)
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
            continue
        test = f"{file}::{node.name}"
        about = "planted" in node.name or node.name.endswith("_is_caught") or file in WHOLE or test in TITLES
        if room is None or not about or any(word in node.name for word in NO_BUG):
            continue
        runs = not file.startswith(LONG)
        if (listed := LISTS.get(test)) is not None:
            entries = _decorated(tree, listed[1:]) if listed.startswith("@") else _listed(tree, listed)
            for name in entries:
                yield Elsewhere(room, _words(name), test, name, runs)
        else:
            for title in TITLES.get(test, [_title(node.name)]):
                yield Elsewhere(room, title, test, None, runs)


def _title(name: str) -> str:
    prefix = next(one for one in PREFIXES if name.startswith(one))
    return name.removeprefix(prefix).removesuffix("_is_caught").removesuffix("_would_be_caught").replace("_", " ")


def _decorated(tree: ast.Module, decorator: str) -> Iterator[str]:
    """Functions that ``@decorator(...)`` enters into a list."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            calls = [one.func for one in node.decorator_list if isinstance(one, ast.Call)]
            if any(isinstance(call, ast.Name) and call.id == decorator for call in calls):
                yield node.name


def _listed(tree: ast.Module, name: str) -> Iterator[str]:
    """The names in a list of names, or of tuples that begin with one."""
    for node in tree.body:
        target = (
            node.target
            if isinstance(node, ast.AnnAssign)
            else node.targets[0]
            if isinstance(node, ast.Assign)
            else None
        )
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and target.id == name and isinstance(value, ast.List):
            firsts = [one.elts[0] if isinstance(one, ast.Tuple) else one for one in value.elts]
            yield from (first.id for first in firsts if isinstance(first, ast.Name))


def _words(name: str) -> str:
    """``snake_case`` or ``CamelCase`` as words."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])|_", " ", name).lower()
