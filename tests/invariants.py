"""Which tests show which promise of GUARANTEES.md: collects the marks ``invariant``, and writes
docs/reference/guarantees-tests.md.

``python tests/invariants.py`` writes the page anew (``make docs`` does it, too).
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "reference" / "guarantees-tests.md"
CONFORMANCE = "src/escrowmq/testing/target_conformance.py"
SUITES = {
    "I2": ["test_content_arrives_byte_for_byte"],
    "I21": ["test_delays_are_kept_or_refused"],
    "I38": ["test_killed_while_sending_loses_nothing_that_was_ok"],
    "I39": ["test_keys_keep_their_order", "test_a_silent_server_is_unknown_and_nothing_overtakes"],
}
"""Of the conformance suite, which users run, too, where the mark is not known."""

WHOLE_RUNS = """\
## Whole runs

Most tests look at one promise. Four look at many at once:

| what | what runs | under which faults | what is compared |
| --- | --- | --- | --- |
| [simulation](../simulation.md): `escrowmq-lab simulate` | brokers, clients, network, disks and clocks in one thread, in the order that a seed draws | crashes that lose what was not synced, torn and reordered writes, full disks, failed syncs, clocks that jump, cut and one-way connections, killed clients, every order of threads | the whole history, at every event and at the end |
| [chaos](../chaos.md): `escrowmq-lab chaos` | producers, brokers and consumers as processes with databases, in every delivery mode | SIGKILL, SIGSTOP, cut and silent connections, full disks; of one node, of some, of all at once | every id and its content over all databases |
| [the model](../simulation.md#a-small-model-of-the-decisions) | the rules of one transaction between two processes and a broker | crashes, late and repeated requests, in every order there is | every state that can be reached |
| [planted bugs](planted.md): [`test_every_planted_bug_is_caught_by_its_test`](../../tests/planting/test_whole_product.py) | each machine, and many tests, with one mistake put into the code | – | that the mistake is noticed, by the test that is named beside it and by which word |

What none of them shows: several machines, a disk that is lost, days of running, a database that forgets what it committed.
"""


@cache
def sections() -> dict[str, str]:
    """The titles of all promises, by number."""
    return dict(re.findall(r"^### (I\d+) (.+)$", (ROOT / "GUARANTEES.md").read_text(), re.MULTILINE))


@cache
def marked() -> dict[str, list[tuple[str, str]]]:
    """The tests of each promise: name and path."""
    found: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for number, names in SUITES.items():
        found[number] += [(name, CONFORMANCE) for name in names]
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text()
        if "mark.invariant" not in text:
            continue
        for name, numbers in _marks(ast.parse(text)):
            for number in numbers:
                found[number].append((name, path.relative_to(ROOT).as_posix()))
    return dict(found)


def _marks(tree: ast.Module) -> list[tuple[str, list[str]]]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found += [(node.name, numbers) for one in node.decorator_list if (numbers := _numbers(one))]
        elif (
            isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and isinstance(node.targets[0], ast.Name)
        ):
            found += [(node.targets[0].id, numbers)] if (numbers := _numbers(node.value.func)) else []
    return found


def _numbers(node: ast.expr) -> list[str]:
    """The arguments of ``pytest.mark.invariant(...)``."""
    if not isinstance(node, ast.Call) or ast.unparse(node.func) != "pytest.mark.invariant":
        return []
    return [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]


def page() -> str:
    """The text of the page."""
    parts = [
        "# Which tests show which promise\n\n"
        "For reviewers. At the end you know the tests of each guarantee.\n\n"
        "Written by `make docs` from the marks of the tests (`@pytest.mark.invariant`); edits are lost. What is "
        "promised, and when it does not hold,\n"
        "is in [GUARANTEES.md](../../GUARANTEES.md).\n",
        WHOLE_RUNS,
    ]
    for number, title in sections().items():
        tests = "".join(f"- [`{name}`](../../{path})\n" for name, path in sorted(marked().get(number, []), key=_order))
        parts.append(f"## {number} {title}\n\n{tests}")
    return "\n".join(parts)


def _order(test: tuple[str, str]) -> tuple[str, str]:
    return test[1], test[0]


if __name__ == "__main__":
    PAGE.write_text(page())
