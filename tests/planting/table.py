"""Runs every planted bug, and writes docs/reference/planted.md: ``python tests/planting/table.py`` (minutes); ``--only-new``
keeps the times that the page has and runs what it lacks. :func:`page` without times is what a test holds the page
against.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
if __name__ == "__main__":
    sys.path[:0] = [str(HERE), str(ROOT / "tests" / "simulation")]

import catalogue  # noqa: E402

from planting import Bug  # noqa: E402

PAGE = ROOT / "docs" / "reference" / "planted.md"
NO_TIME = "–"

HEAD = """# Planted bugs

For reviewers of the tests. At the end you know which planted bug which test notices, and how fast.

Tests are worth something only if they fail. So bugs are planted in the product one at a time, as somebody could really have written them, and the test that must notice each is
named here. Every row is run by CI; a bug that nothing notices, or that another test than the named one notices, fails it.

`python tests/planting/table.py` runs all of them and writes this page. The times are those of one run on two busy cores: seconds from the start of the test that notices the bug to its failure.

## Planted by `tests/planting`

{own} bugs over all rooms. Each takes the place of one function of the product (a few of them, of two that belong together). The named test is part of the suite, and green there
(`make chaos` sees that in the runner's process, too). The runner sees that with the bug the changed function was called, that the test fails, and that the failure has the word in the last column but one: so it is this bug that is noticed, and not that something else broke.
Rows of the audit and of reconciliation are planted in the Spark session of `tests/pipeline`.

| room | bug | caught by | by the word | seconds |
| --- | --- | --- | --- | --- |
"""
ELSEWHERE = """
## Planted beside the tests that notice them

{count} bugs. Each is planted and caught by the test that is named. Without a time are those that are part of a run of minutes.

| room | bug | caught by | seconds |
| --- | --- | --- | --- |
"""
SIMULATED = """
## Planted in the simulation

{count} bugs; [simulation.md](../simulation.md) has the seeds and turns. Each is looked for by checkers that do not know of it.

| room | bug | caught by |
| --- | --- | --- |
"""


def cell(text: str) -> str:
    """Text in a table."""
    return text.replace("|", "\\|")


def name_of(one: Bug | catalogue.Elsewhere) -> str:
    """What tells a row from the others."""
    return f"{one.room} | {one.title}"


def page(times: dict[str, str]) -> str:
    """The page, with these times by :func:`name_of`."""
    from planted import BUGS, KNOWN

    rooms = [file.__name__ for file in catalogue.FILES]
    own = sorted(catalogue.BUGS.values(), key=lambda one: rooms.index(one.plant.__module__))
    text = HEAD.format(own=len(own))
    for one in own:
        told = f"| {one.room} | {one.title} | {_link(one.test)} | `{cell(one.word)}` |"
        text += f"{told} {times.get(name_of(one), NO_TIME)} |\n"
    others = catalogue.elsewhere()
    text += ELSEWHERE.format(count=len(others))
    for other in others:
        text += f"| {other.room} | {other.title} | {_link(other.test)} | {times.get(name_of(other), NO_TIME)} |\n"
    text += SIMULATED.format(count=len(KNOWN))
    for name in KNOWN:
        text += (
            f"| {BUGS[name][0]} | {name.replace('_', ' ')} | "
            f"{_link('tests/simulation/test_simulation.py::test_a_planted_bug_is_found')} |\n"
        )
    return text


def _link(test: str) -> str:
    file, _, function = test.partition("::")
    return f"[`{cell(function)}`](../../{file})"


def without_times(text: str) -> str:
    """The page but for what another run says otherwise."""
    return re.sub(r"\| [\d.]+ \|$", f"| {NO_TIME} |", text, flags=re.MULTILINE)


def times_of(text: str) -> dict[str, str]:
    """The times that a page has."""
    rows = [line.split(" | ") for line in text.splitlines() if re.search(r"\| [\d.]+ \|$", line)]
    return {f"{row[0].removeprefix('| ')} | {row[1]}": row[-1].removesuffix(" |") for row in rows}


def planted(*names: str, clean: bool = True) -> list[dict[str, Any]]:
    """What a process of its own finds out about bugs of this room; of all, if none is named. ``clean``: also about all
    tests without a bug."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results"
        results.touch()
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
        command = [sys.executable, str(HERE / "planting.py"), str(results), "all" if clean else "long", *names]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        found = [json.loads(line) for line in results.read_text().splitlines()]
    assert found, done.stdout[-3000:] + done.stderr[-3000:]
    return found


def timed(tests: list[str]) -> dict[str, float]:
    """How long tests of other rooms take, by their node ids."""
    if not tests:
        return {}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--durations=0",
        "--durations-min=0",
        *tests,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    print(done.stdout.splitlines()[-1], file=sys.stderr)
    found = re.findall(r"^([\d.]+)s call +(\S.*)$", done.stdout, re.MULTILINE)
    return {test: float(seconds) for seconds, test in found}


def main(arguments: list[str]) -> None:
    """Write the page."""
    times = times_of(PAGE.read_text()) if "--only-new" in arguments and PAGE.exists() else {}
    new = [one for one in catalogue.BUGS.values() if name_of(one) not in times]
    if mine := [one.name for one in new if not one.spark]:
        for found in planted(*mine):
            if found["bug"] is not None:
                times[name_of(catalogue.BUGS[found["bug"]])] = f"{found['seconds']:.2f}"
    session = "tests/pipeline/test_comparisons_planted.py::test_a_planted_bug_is_caught"
    others = [other for other in catalogue.elsewhere() if other.runs and name_of(other) not in times]
    wanted = {f"{session}[{one.name}]": name_of(one) for one in new if one.spark}
    for test, seconds in timed([*wanted, *{_node(other) for other in others}]).items():
        for name in [wanted.get(test), *(name_of(other) for other in others if _is_of(test, other))]:
            if name is not None and name not in times:  # of its several forms the first
                times[name] = f"{seconds:.2f}"
    PAGE.write_text(page(times))


def _node(other: catalogue.Elsewhere) -> str:
    return other.test if other.entry is None else other.test.partition("::")[0]


def _is_of(test: str, other: catalogue.Elsewhere) -> bool:
    function, _, form = test.partition("[")
    return function == other.test and (other.entry is None or other.entry in form)


if __name__ == "__main__":
    main(sys.argv[1:])
