"""Plants bugs in the product, one at a time, and runs the tests of the suite that must notice them.

``python planting.py RESULTS CLEAN ROOM...`` is one process of pytest. Of each test that is named by a bug it says how
the test ends with each of the bugs that it must notice, in lines of JSON; with ``all`` for CLEAN, also how it ends
without a bug. With ``long``, that is said only of tests of the long form: the others are part of the suite, which is
red where one of them is.

- ``called``: how often the changed function ran: a bug that nothing ran was not planted.
- ``told``: the statement of the test that failed, and what it failed with. The bug's ``word`` must be in it.

A bug is in the processes of the product that the test itself is; so the tests that are named here start none for what
is changed.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


class Plant:
    """Puts wrong functions in the place of right ones, and counts their calls."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self._calls: list[int] = []  # of each function that was put somewhere

    @property
    def called(self) -> int:
        """How often that of the functions ran which ran least; 0 if there is none."""
        return min(self._calls, default=0)

    def instead(self, owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
        """The decorated function takes the place of ``owner.name``, which must be there; of a property, it is the
        getter; of a function of a module, wherever it was imported by its name."""
        stood, at = vars(owner)[name], len(self._calls)
        self._calls.append(0)

        def put(function: Callable[..., Any]) -> None:
            @wraps(function)
            def counted(*given: Any, **named: Any) -> Any:
                self._calls[at] += 1
                return function(*given, **named)

            kind = type(stood) if isinstance(stood, (staticmethod, classmethod, property)) else None
            for place in _places(owner, name, stood):
                self._patch.setattr(place, name, counted if kind is None else kind(counted))

        return put


def _places(owner: Any, name: str, stood: Any) -> list[Any]:
    if not isinstance(owner, ModuleType):
        return [owner]
    return [module for module in list(sys.modules.values()) if vars(module).get(name) is stood]


@dataclass(frozen=True)
class Bug:
    """One bug: where it is, what plants it, which test must notice it, and a word of how it does. ``spark``: the test
    needs a Spark session, and so the bug is planted by a test of tests/pipeline, which has one."""

    name: str
    room: str
    plant: Callable[[Plant], None]
    test: str
    word: str
    spark: bool = False

    @property
    def title(self) -> str:
        """What somebody did, in words."""
        return self.name.replace("_", " ")


BUGS: dict[str, Bug] = {}


def bug(
    room: str, test: str, word: str, *, spark: bool = False
) -> Callable[[Callable[[Plant], None]], Callable[[Plant], None]]:
    """Enters what is decorated into the list. ``test`` is a node id of pytest, from ``tests/`` on."""

    def enter(plant: Callable[[Plant], None]) -> Callable[[Plant], None]:
        assert plant.__name__ not in BUGS, f"two bugs are called {plant.__name__}"
        BUGS[plant.__name__] = Bug(plant.__name__, room, plant, f"tests/{test}", word, spark)
        return plant

    return enter


class Planter:
    """The part of pytest that runs each test once as it is (``clean``: also those that the suite runs), and once with
    each bug that it must notice."""

    def __init__(self, bugs: list[Bug], results: Path, *, clean: bool) -> None:
        self._clean = clean
        self._by_test: dict[str, list[Bug]] = {}
        for one in bugs:
            self._by_test.setdefault(one.test, []).append(one)
        self._results = results
        self._told = ""

    @property
    def tests(self) -> list[str]:
        """Node ids."""
        return list(self._by_test)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        """What fails is not made small: that it fails is enough."""
        from hypothesis import Phase, settings  # here, because pytest wants to import it first

        phases = [Phase.explicit, Phase.generate]
        settings.register_profile("planted", parent=settings.get_profile("ci"), phases=phases)
        settings.load_profile("planted")

    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        if self._clean or item.get_closest_marker("long"):
            self._run(item, None)
        for one in self._by_test.get(item.nodeid, []):
            self._run(item, one)
        return True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        report = yield
        if call.excinfo is not None and report.failed:
            own = [entry for entry in call.excinfo.traceback if Path(entry.path) == item.path]
            statement = " ".join(str(own[-1].statement).split()) if own else ""
            self._told += f"{report.when}: {statement} -> {call.excinfo.exconly()}\n"
        return report

    def _run(self, item: pytest.Item, planted: Bug | None) -> None:
        self._told = ""
        begun, worked = time.perf_counter(), time.process_time()
        with pytest.MonkeyPatch.context() as patch:
            plant = Plant(patch)
            if planted is not None:
                planted.plant(plant)
            # What lives as long as a module may have been spoilt; what lives as long as the session is kept.
            reports = runtestprotocol(item, log=False, nextitem=item.session)  # type: ignore[arg-type]
        outcomes = {report.when: report.outcome for report in reports}
        found = {
            "test": item.nodeid,
            "bug": None if planted is None else planted.name,
            "outcome": next((f"{when} {told}" for when, told in outcomes.items() if told != "passed"), "passed"),
            "told": self._told,
            "called": plant.called,
            "seconds": round(time.perf_counter() - begun, 3),
            "processor_seconds": round(time.process_time() - worked, 3),
        }
        with self._results.open("a") as file:
            file.write(json.dumps(found) + "\n")


def main(results: str, clean: str, *rooms: str) -> int:
    """Run the bugs of these rooms (all, if none is named)."""
    import catalogue

    bugs = [
        one
        for one in catalogue.BUGS.values()
        if not one.spark and (not rooms or one.room in rooms or one.name in rooms)
    ]
    planter = Planter(bugs, Path(results), clean=clean == "all")
    options = ["-q", "--rootdir", str(ROOT), "-o", "addopts="]
    # What a bug does to a thread of its own is no matter of the next test.
    for plugin in ("cacheprovider", "xdist", "threadexception", "unraisableexception"):
        options += ["-p", f"no:{plugin}"]
    # The catalogue needs the product, and this some of what pytest would have liked to import first.
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    return int(pytest.main([*options, *planter.tests], plugins=[planter]))


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    import planting  # under its own name, for the catalogue

    sys.exit(planting.main(*sys.argv[1:]))
