"""Bugs over the whole product, planted one at a time: each is noticed by the test that must notice it, and told in
docs/reference/planted.md.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import catalogue
import pytest
import table

from planting import Bug

OWN = [one for one in catalogue.BUGS.values() if not one.spark]
PARTS = (
    ("bugs_client", "bugs_consumers", "bugs_wire"),
    ("bugs_relay", "bugs_barrier", "bugs_modes"),
    ("bugs_broker", "bugs_gateway", "bugs_rights", "bugs_clock", "bugs_spark", "bugs_jobs"),
)


def wrong(one: Bug, runs: dict[str, dict[str, Any]]) -> str | None:
    """Why a run does not show that a bug is caught."""
    if (run := runs.get(one.name)) is None:
        return "the test was not run: is there one of this name?"
    if not run["called"]:
        return "nothing called what was planted"
    if run["outcome"] != "call failed":
        return f"the test {run['outcome']}"
    if one.word not in run["told"]:
        return f"it failed otherwise: {run['told']}"
    return None


@pytest.mark.timeout(900)  # dozens of tests, of which some see their bug by waiting in vain
@pytest.mark.parametrize("clean", [False, pytest.param(True, marks=pytest.mark.long)], ids=["planted", "and-clean"])
@pytest.mark.parametrize("files", PARTS, ids=lambda files: files[0].removeprefix("bugs_"))
def test_every_planted_bug_is_caught_by_its_test(files: tuple[str, ...], clean: bool) -> None:
    """One process for many: what a test needs for longer than itself is made once. That the tests are green without a
    bug is seen by the suite, which runs them, too; the long form sees it in this process."""
    mine = [one for one in OWN if one.plant.__module__ in files]
    found = table.planted(*(one.name for one in mine), clean=clean)
    green = {run["test"]: run for run in found if run["bug"] is None}
    runs = {run["bug"]: run for run in found if run["bug"] is not None}
    assert {test: run["told"] for test, run in green.items() if run["outcome"] != "passed"} == {}
    assert not clean or green.keys() == {one.test for one in mine}
    assert {one.name: why for one in mine if (why := wrong(one, runs))} == {}


def test_every_file_is_in_a_part() -> None:
    assert sorted(file for files in PARTS for file in files) == sorted(file.__name__ for file in catalogue.FILES)


def test_the_runner_tells_what_is_not_caught() -> None:
    """What is not called, passes, fails in its set-up or fails otherwise is not called caught."""
    one = OWN[0]
    caught = {"called": 1, "outcome": "call failed", "told": f"call: assert -> {one.word}"}
    assert wrong(one, {one.name: caught}) is None
    assert wrong(one, {})
    for change in (
        {"called": 0},
        {"outcome": "passed"},
        {"outcome": "setup failed"},
        {"told": "call: assert -> KeyError"},
    ):
        assert wrong(one, {one.name: caught | change})


def test_bugs_of_all_rooms_are_planted() -> None:
    rooms = Counter(one.room for one in catalogue.BUGS.values())
    wanted = {
        "client",
        "consumers",
        "wire",
        "relay",
        "barrier",
        "modes",
        "check-back",
        "gateway",
        "rights",
        "Spark",
        "audit",
        "clock",
    }
    assert {room for room, count in rooms.items() if count >= 4} >= wanted
    assert sum(rooms.values()) >= 40


def test_what_is_planted_elsewhere_is_found_in_its_files() -> None:
    rooms = Counter(one.room for one in catalogue.elsewhere())
    assert rooms["ledger"] >= 45
    assert rooms["log"] + rooms["shard"] >= 15
    assert rooms["compensation"] + rooms["set store"] >= 22
    assert rooms.keys() == catalogue.ROOMS.keys()


def test_the_page_is_that_of_the_catalogue() -> None:
    """``python tests/planting/table.py --only-new`` writes it anew."""
    assert table.without_times(table.PAGE.read_text()) == table.without_times(table.page({}))
