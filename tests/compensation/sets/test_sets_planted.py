"""Bugs that a set store could have, planted one by one: the conformance suite or the model must see each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from set_sites import MemorySite, RedisSite
from test_set_model import calls, play

from escrowmq.compensation import RedisSets
from escrowmq.compensation.sets.seam import Run, SetStore
from escrowmq.compensation.sets.server import Command, Link
from escrowmq.platform.failpoints import Failpoint, arm
from escrowmq.testing import set_conformance
from escrowmq.testing.memory_sets import MemorySets
from escrowmq.testing.set_conformance import SetConformance, SetModel, at_once, new_store_name


class Together(Failpoint):
    """Whoever comes to a place waits for a second one to come there, too: what is not one step falls apart for sure.

    A store without the bug lets nobody come there beside another whose step counts. Who is the last of those that run
    at once goes on alone.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name, 1, lambda: None)
        self._news = threading.Condition()
        self._going = 0
        self._waits = False
        self._meetings = 0

    def at_once(self, *works: Callable[[], object]) -> None:
        """As that of the suite, and it is known here who still goes on."""

        def counted(work: Callable[[], object]) -> None:
            try:
                work()
            finally:
                with self._news:
                    self._going -= 1
                    self._news.notify_all()

        self._going = len(works)
        at_once(*(partial(counted, work) for work in works))

    def reached(self) -> None:
        with self._news:
            if self._waits:
                self._waits = False
                self._meetings += 1
                self._news.notify_all()
                return
            self._waits, before = True, self._meetings
            self._news.wait_for(lambda: self._meetings > before or self._going <= 1)
            if self._meetings == before:
                self._waits = False


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    def begin(place: str) -> None:
        point = Together(place)
        monkeypatch.setattr(set_conformance, "at_once", point.at_once)
        arm(point)

    yield begin
    arm()


class RedisBugs(RedisSite):
    """Stores that watch nothing: what is read before a step may be old when it runs."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.opened: list[SetStore] = []

    def open(self, name: str) -> SetStore:
        self.opened.append(_Unwatched(self.url, name))
        return self.opened[-1]


@pytest.fixture
def redis_bugs(redis_site: RedisSite) -> Iterator[RedisBugs]:
    """Its stores are closed here: the suite does not come to it."""
    site = RedisBugs(redis_site.url)
    yield site
    for store in site.opened:
        store.close()


class _Unwatched(RedisSets):
    def _open(self) -> Any:
        return _links(super()._open())


def _links(opened: Any) -> Any:
    class Opened:
        def __enter__(self) -> Link:
            link = opened.__enter__()
            execute = link.execute

            def forgetful(*commands: Command) -> list[Any]:
                answers = execute(*commands)
                if commands and commands[0][0] == "WATCH":
                    execute(("UNWATCH",))
                return answers

            link.execute = forgetful
            return link

        def __exit__(self, *problem: Any) -> Any:
            return opened.__exit__(*problem)

    return Opened()


@pytest.mark.invariant("I48")
def test_difference_and_removal_that_are_not_one_step(
    redis_site: RedisSite, redis_bugs: RedisBugs, together: Callable[[str], None]
) -> None:
    suite = SetConformance()
    suite.test_schedulers_at_once_share_no_id_and_lose_none(redis_site, new_store_name())
    together("sets.taking")
    with pytest.raises(AssertionError):
        suite.test_schedulers_at_once_share_no_id_and_lose_none(redis_bugs, new_store_name())


@pytest.mark.invariant("I48")
def test_a_run_that_is_adopted_twice(
    redis_site: RedisSite, redis_bugs: RedisBugs, together: Callable[[str], None]
) -> None:
    suite = SetConformance()
    suite.test_of_all_who_would_adopt_one_does(redis_site, new_store_name())
    together("sets.adopting")
    with pytest.raises(AssertionError):
        suite.test_of_all_who_would_adopt_one_does(redis_bugs, new_store_name())


# In one thread


class LatestTimeStays(MemorySets):
    def add_halves(self, ids: Sequence[bytes], announced_us: Sequence[int]) -> None:
        super().add_halves(ids, announced_us)
        self.half.update(zip(ids, announced_us, strict=True))


class EntriesStayBehind(MemorySets):
    """The difference is right, and the commit set keeps what was taken out of the half set."""

    def take(self, before_us: int, limit: int, lease: float) -> Run | None:
        entries = dict(self.commits)
        run = super().take(before_us, limit, lease)
        self.commits = entries
        return run


class RemovedByTime(MemorySets):
    """All announced before a time are removed, however many of them the run was given."""

    def take(self, before_us: int, limit: int, lease: float) -> Run | None:
        run = super().take(before_us, limit, lease)
        for identity in [i for i, us in self.half.items() if us < before_us]:
            del self.half[identity]
        return run


class BeforeAndAt(MemorySets):
    def take(self, before_us: int, limit: int, lease: float) -> Run | None:
        return super().take(before_us + 1, limit, lease)


class InTwoRuns(MemorySets):
    """What is in a run already is taken again."""

    def take(self, before_us: int, limit: int, lease: float) -> Run | None:
        runs, self.runs = self.runs, {}
        run = super().take(before_us, limit, lease)
        self.runs = {**runs, **self.runs}
        return run


class AdoptedWhileLeased(MemorySets):
    def adopt(self, lease: float, limit: int) -> Run | None:
        for run in self.leases:
            return Run(run, self.left(run, limit))
        return None


class AdoptedAgain(MemorySets):
    def adopt(self, lease: float, limit: int) -> Run | None:
        before = dict(self.leases)
        run = super().adopt(lease, limit)
        self.leases.update(before)
        return run


class SettledElsewhere(MemorySets):
    def settle(self, run: str, ids: Sequence[bytes]) -> None:
        for each in list(self.runs):
            super().settle(each, ids)


class RunsStay(MemorySets):
    def settle(self, run: str, ids: Sequence[bytes]) -> None:
        for identity in ids:
            self.runs.get(run, {}).pop(identity, None)


class ForgetsTheAnnounced(MemorySets):
    def forget_commits(self, before_us: int) -> int:
        half, self.half = self.half, {}
        count = super().forget_commits(before_us)
        self.half = half
        return count


class LaterEntryStays(MemorySets):
    def add_commits(self, ids: Sequence[bytes], now_us: int) -> None:
        super().add_commits(ids, now_us)
        self.commits.update(dict.fromkeys(ids, now_us))


BUGS = [LatestTimeStays, EntriesStayBehind, RemovedByTime, BeforeAndAt, InTwoRuns, AdoptedWhileLeased, SettledElsewhere,
    ForgetsTheAnnounced, LaterEntryStays]  # fmt: skip


class BuggySite(MemorySite):
    def __init__(self, bug: type[MemorySets]) -> None:
        super().__init__()
        self._bug = bug

    def open(self, name: str) -> SetStore:
        self._stores.setdefault(name, self._bug(name))
        return super().open(name)


@pytest.mark.parametrize("bug", BUGS, ids=[bug.__name__ for bug in BUGS])
def test_the_model_sees_it(bug: type[MemorySets]) -> None:
    @settings(max_examples=1000, phases=[Phase.generate], derandomize=True, database=None)
    @given(st.lists(calls, min_size=5, max_size=25))
    def search(played: list[tuple]) -> None:
        play(SetModel(BuggySite(bug)), played)

    with pytest.raises(AssertionError):
        search()


def test_the_suite_sees_what_takes_many_calls_to_come_to() -> None:
    suite, name = SetConformance(), new_store_name()
    site = BuggySite(AdoptedAgain)
    with pytest.raises(AssertionError):
        suite.test_a_run_is_adopted_when_its_lease_has_ended_and_once(site, site.open(name), name)
    with pytest.raises(AssertionError):
        suite.test_a_run_is_settled_by_and_by(BuggySite(RunsStay).open(name))
