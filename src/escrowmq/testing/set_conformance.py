"""The contract of every set store as a test suite: subclass :class:`SetConformance` with a fixture ``site``.
:class:`SetModel` predicts the result of any sequence of calls; tests compare stores with it on generated sequences."""

from __future__ import annotations

import itertools
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import pytest

from escrowmq.compensation.sets.seam import MAX_IDS, Run, SetStore, Sizes
from escrowmq.errors import EscrowError, Misuse
from escrowmq.testing.memory_sets import count_sizes

LEASE = 600.0
"""Lease in seconds, longer than any test: leases expire by the site, never by the clock."""
FAR_US = 1 << 52
"""A time after all announcements."""
_names = itertools.count(secrets.randbits(40))


class Site(Protocol):
    """A place that stores pairs of sets."""

    def open(self, name: str) -> SetStore:
        """Open the pair of this name with its own connections."""

    def expire(self, name: str, run: str) -> None:
        """Make a run's lease expire now."""

    def empty(self) -> None:
        """Lose everything, as ``FLUSHALL`` or dropped tables do."""


def new_store_name() -> str:
    """Return a name that no other pair of sets has."""
    return f"sets-{next(_names)}"


def new_ids(count: int) -> list[bytes]:
    """Return ids that no other test has."""
    return [secrets.token_bytes(16) for _ in range(count)]


def taken_by(store: SetStore, limit: int = 100) -> list[Run]:
    """Take everything available, run by run."""
    return list(iter(lambda: store.take(FAR_US, limit, LEASE), None))


def take_run(store: SetStore, before_us: int = FAR_US, limit: int = 10) -> Run:
    """Take a run, which must have ids."""
    run = store.take(before_us, limit, LEASE)
    assert run is not None
    return run


def at_once(*works: Callable[[], object]) -> None:
    """Run each function on its own thread, started together; raises an exception of any of them."""
    start = threading.Barrier(len(works))

    def run(work: Callable[[], object]) -> None:
        start.wait()
        work()

    with ThreadPoolExecutor(len(works)) as threads:
        for done in [threads.submit(run, work) for work in works]:
            done.result()


class SetModel:
    """The contract in plain Python: each method calls the store and compares the result with the model."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self.name = new_store_name()
        self.store = site.open(self.name)
        self.half: dict[bytes, int] = {}
        self.commits: dict[bytes, int] = {}
        self.runs: dict[str, dict[bytes, int]] = {}
        self.expired: set[str] = set()

    def add_halves(self, pairs: list[tuple[bytes, int]]) -> None:
        """Announce ids at times."""
        self.store.add_halves([identity for identity, _ in pairs], [us for _, us in pairs])
        for identity, us in pairs:
            self.half[identity] = min(us, self.half.get(identity, us))

    def add_commits(self, ids: list[bytes], now_us: int) -> None:
        """Add ids to the commit set."""
        self.store.add_commits(ids, now_us)
        for identity in ids:
            self.commits.setdefault(identity, now_us)

    def take(self, before_us: int, limit: int) -> None:
        """Take a run: a store may stop anywhere, but what it has passed follows the rules, earliest first."""
        early = sorted((us, identity) for identity, us in self.half.items() if us < before_us)
        run = self.store.take(before_us, limit, LEASE)
        passed = early[: len(self.half) - self.store.sizes().half]
        held = {identity for ids in self.runs.values() for identity in ids}
        rest = {i: us for us, i in passed if i not in self.commits and i not in held}
        for _, identity in passed:
            del self.half[identity]
            self.commits.pop(identity, None)
        if run is None:
            assert not rest, "ids have gone"
            assert len(passed) == len(early), "it said that nothing is left over"
        else:
            assert list(run.ids) == list(rest)
            assert 0 < len(run.ids) <= limit
            assert run.name not in self.runs
            self.runs[run.name] = rest

    def expire(self, run: str) -> None:
        """Make a lease expire."""
        if run in self.runs:
            self._site.expire(self.name, run)
            self.expired.add(run)

    def adopt(self, limit: int) -> None:
        """Take over an expired lease, and no other."""
        run = self.store.adopt(LEASE, limit)
        if run is None:
            assert not self.expired
            return
        assert run.name in self.expired
        self.expired.discard(run.name)
        assert run.ids == self._left(run.name, limit)

    def left(self, run: str, limit: int) -> None:
        """Compare the unsettled ids, earliest first."""
        assert self.store.left(run, limit) == self._left(run, limit)

    def renew(self, run: str) -> None:
        """Renew a lease: even an expired one, unless it was adopted."""
        assert self.store.renew(run, LEASE) == (run in self.runs)
        self.expired.discard(run)

    def settle(self, run: str, ids: list[bytes]) -> None:
        """Settle ids: only those of this run are removed."""
        self.store.settle(run, ids)
        held = self.runs.get(run, {})
        for identity in ids:
            held.pop(identity, None)
        if ids and not held:
            self.runs.pop(run, None)
            self.expired.discard(run)

    def forget_commits(self, before_us: int) -> None:
        """Forget old entries, except those with an announcement."""
        old = {i for i, us in self.commits.items() if us < before_us and i not in self.half}
        assert self.store.forget_commits(before_us) == len(old)
        for identity in old:
            del self.commits[identity]

    def check(self) -> None:
        """Compare the sizes."""
        assert self.store.sizes() == count_sizes(self.half, self.commits, self.runs)

    def finish(self) -> None:
        """Compare every run, take all remaining ids, and close the store."""
        self.check()
        for run in self.runs:
            self.left(run, MAX_IDS)
        self.take(FAR_US, MAX_IDS)
        self.check()
        self.store.close()

    def _left(self, run: str, limit: int) -> tuple[bytes, ...]:
        ids = sorted((us, identity) for identity, us in self.runs.get(run, {}).items())
        return tuple(identity for _, identity in ids[:limit])


class SetConformance:
    """The contract of :mod:`escrowmq.compensation.sets.seam`, line by line."""

    @pytest.fixture
    def name(self) -> str:
        """Return the name of an empty pair of sets."""
        return new_store_name()

    @pytest.fixture
    def store(self, site: Site, name: str) -> Iterator[SetStore]:
        """Provide that pair, closed afterwards."""
        store = site.open(name)
        yield store
        store.close()

    def test_an_empty_store_has_nothing(self, store: SetStore, name: str) -> None:
        assert store.name == name
        assert store.sizes() == Sizes(0, 0, 0, 0, None)
        assert store.take(FAR_US, 10, LEASE) is None
        assert store.adopt(LEASE, 10) is None
        assert store.left("nothing", 10) == ()
        assert not store.renew("nothing", LEASE)
        assert store.forget_commits(FAR_US) == 0
        store.settle("nothing", new_ids(2))
        store.add_halves([], [])
        store.add_commits([], 1)
        store.settle("nothing", [])
        assert store.sizes() == Sizes(0, 0, 0, 0, None)

    def test_what_was_announced_and_not_done_is_taken_the_earliest_first(self, store: SetStore) -> None:
        ids = new_ids(5)
        store.add_halves(ids, [50, 40, 30, 20, 10])
        store.add_commits([ids[1]], 99)
        run = take_run(store, 50)
        assert run.ids == (ids[4], ids[3], ids[2]), "announced before 50, and not done"
        assert store.sizes() == Sizes(1, 0, 3, 1, 10)
        assert store.left(run.name, 2) == run.ids[:2]

    def test_ids_of_one_time_go_by_their_bytes(self, store: SetStore) -> None:
        ids = new_ids(20)
        store.add_halves(ids, [7] * 20)
        runs = taken_by(store, 4)
        assert [identity for run in runs for identity in run.ids] == sorted(ids)
        assert all(len(run.ids) <= 4 for run in runs)

    def test_a_limit_is_kept_and_the_rest_is_for_the_next_run(self, store: SetStore) -> None:
        ids = new_ids(10)
        store.add_halves(ids, range(10))
        first = take_run(store, FAR_US, 4)
        assert first.ids == tuple(ids[:4])
        others = taken_by(store, 4)
        assert [identity for run in others for identity in run.ids] == ids[4:]
        assert len({first.name, *(run.name for run in others)}) == len(others) + 1

    def test_what_is_in_both_sets_leaves_both(self, store: SetStore) -> None:
        ids = new_ids(2500)
        store.add_commits(ids[:1200], 5)
        store.add_halves(ids, range(2500))
        store.add_commits(ids[1200:], 6)
        assert store.take(FAR_US, 100, LEASE) is None, "more than one step's ids, and nothing is left over"
        assert store.sizes() == Sizes(0, 0, 0, 0, None)

    def test_an_entry_waits_for_its_announcement(self, store: SetStore) -> None:
        early, other = new_ids(2)
        store.add_commits([early], 5)
        store.add_halves([other], [1])
        assert [run.ids for run in taken_by(store)] == [(other,)]
        assert store.sizes().commits == 1
        store.add_halves([early], [2])
        assert store.take(FAR_US, 10, LEASE) is None
        assert store.sizes().commits == 0

    def test_again_changes_nothing_and_the_earlier_time_stays(self, store: SetStore) -> None:
        ids = new_ids(2)
        store.add_halves(ids, [10, 20])
        store.add_halves([ids[1], ids[0], ids[1]], [30, 30, 5])
        store.add_commits([ids[0], ids[0]], 5)
        store.add_commits([ids[0]], 50)
        assert store.sizes() == Sizes(2, 1, 0, 0, 5)
        run = take_run(store, 6)
        assert run.ids == (ids[1],)
        assert store.forget_commits(6) == 0, "its announcement is there"
        assert store.take(11, 10, LEASE) is None
        assert store.sizes().commits == 0

    def test_announced_again_while_in_a_run(self, store: SetStore) -> None:
        """No id is ever in two runs: it stays in the first."""
        ids = new_ids(3)
        store.add_halves(ids[:2], [1, 2])
        first = take_run(store)
        store.add_halves(ids, [3, 3, 3])
        assert [run.ids for run in taken_by(store)] == [(ids[2],)]
        assert store.left(first.name, 10) == tuple(ids[:2])
        assert store.sizes() == Sizes(0, 0, 3, 2, 1)
        store.settle(first.name, ids)
        store.add_halves(ids[:1], [4])
        assert [run.ids for run in taken_by(store)] == [(ids[0],)], "settled, so it is announced anew"

    def test_a_run_is_settled_by_and_by(self, store: SetStore) -> None:
        ids = new_ids(6)
        store.add_halves(ids, range(6))
        run, other = take_run(store, 3), take_run(store)
        store.settle(run.name, [ids[0], ids[5], *new_ids(1)])
        assert store.left(run.name, 10) == (ids[1], ids[2])
        assert store.left(other.name, 10) == tuple(ids[3:]), "of another run nothing goes"
        store.settle(run.name, ids)
        assert store.left(run.name, 10) == ()
        assert not store.renew(run.name, LEASE)
        assert store.sizes() == Sizes(0, 0, 3, 1, 3)

    def test_a_run_is_adopted_when_its_lease_has_ended_and_once(self, site: Site, store: SetStore, name: str) -> None:
        ids = new_ids(5)
        store.add_halves(ids, range(5))
        run = take_run(store)
        assert store.adopt(LEASE, 10) is None, "its lease runs"
        site.expire(name, run.name)
        assert store.adopt(LEASE, 2) == Run(run.name, tuple(ids[:2]))
        assert store.adopt(LEASE, 10) is None, "it has been adopted"
        store.settle(run.name, ids[:2])
        assert store.left(run.name, 10) == tuple(ids[2:])
        site.expire(name, run.name)
        assert store.renew(run.name, LEASE)
        assert store.adopt(LEASE, 10) is None, "its scheduler holds it again"

    def test_all_that_is_left_lying_is_adopted(self, site: Site, store: SetStore, name: str) -> None:
        store.add_halves(new_ids(9), range(9))
        runs = [take_run(store, at) for at in (3, 6, 9)]
        for run in runs:
            site.expire(name, run.name)
        adopted = list(iter(lambda: store.adopt(LEASE, 10), None))
        assert {run.name: run.ids for run in adopted} == {run.name: run.ids for run in runs}

    def test_old_entries_that_nobody_announced_are_forgotten(self, store: SetStore) -> None:
        ids = new_ids(2300)
        store.add_commits(ids[:2200], 10)
        store.add_commits(ids[2200:], 20)
        store.add_halves(ids[:1100], [1] * 1100)
        assert store.forget_commits(10) == 0
        assert store.forget_commits(20) == 1100
        assert store.sizes() == Sizes(1100, 1200, 0, 0, 1)
        assert store.take(FAR_US, 10, LEASE) is None

    def test_names_are_apart(self, site: Site, store: SetStore) -> None:
        other = site.open(new_store_name())
        [identity] = new_ids(1)
        store.add_halves([identity], [1])
        other.add_commits([identity], 1)
        assert other.take(FAR_US, 10, LEASE) is None
        run = take_run(store)
        assert other.left(run.name, 10) == ()
        assert not other.renew(run.name, LEASE)
        other.settle(run.name, [identity])
        assert store.left(run.name, 10) == (identity,)
        assert other.sizes() == Sizes(0, 1, 0, 0, None)
        other.close()

    def test_the_epoch_is_the_stores_own_and_changes_when_it_is_emptied(
        self, site: Site, store: SetStore, name: str
    ) -> None:
        first = store.epoch()
        assert 0 < len(first) <= 127
        again = site.open(name)
        assert again.epoch() == store.epoch() == first
        store.add_halves(new_ids(1), [1])
        assert again.epoch() == first
        site.empty()
        second = again.epoch()
        assert second != first
        assert store.epoch() == second
        assert store.sizes() == Sizes(0, 0, 0, 0, None)
        store.add_halves(new_ids(1), [1])
        assert again.sizes().half == 1, "it is used as before"
        again.close()

    def test_what_is_no_id_time_or_limit_is_misuse_and_leaves_no_trace(self, store: SetStore) -> None:
        good = new_ids(1)
        calls: list[Callable[[], Any]] = [
            lambda: store.add_halves([b"short"], [1]),
            lambda: store.add_halves([*good, "text"], [1, 1]),  # type: ignore[list-item]
            lambda: store.add_halves(good, []),
            lambda: store.add_halves(good, [-1]),
            lambda: store.add_halves(good, [1 << 53]),
            lambda: store.add_halves(good, [1.5]),  # type: ignore[list-item]
            lambda: store.add_halves(new_ids(1) * (MAX_IDS + 1), [1] * (MAX_IDS + 1)),
            lambda: store.add_commits([bytes(17)], 1),
            lambda: store.add_commits(good, -1),
            lambda: store.add_commits(good * (MAX_IDS + 1), 1),
            lambda: store.take(-1, 1, LEASE),
            lambda: store.take(1, 0, LEASE),
            lambda: store.take(1, MAX_IDS + 1, LEASE),
            lambda: store.take(1, 1, 0),
            lambda: store.take(1, 1, float("nan")),
            lambda: store.take(1, 1, float("inf")),
            lambda: store.adopt(-1.0, 1),
            lambda: store.adopt(LEASE, 0),
            lambda: store.left("run", 0),
            lambda: store.renew("run", -1.0),
            lambda: store.settle("run", [b""]),
            lambda: store.forget_commits(-1),
        ]
        for call in calls:
            with pytest.raises(Misuse):
                call()
        assert store.sizes() == Sizes(0, 0, 0, 0, None)

    def test_names_of_pairs_are_names_of_groups(self, site: Site) -> None:
        for name in ("", ".", "a b", "a{b}", "x" * 128):
            with pytest.raises(EscrowError):
                site.open(name)
        long = site.open("x" * 127)
        long.add_halves(new_ids(1), [1])
        assert taken_by(long)
        long.close()

    def test_as_many_ids_as_a_call_may_have(self, store: SetStore) -> None:
        ids = sorted(new_ids(MAX_IDS))
        store.add_halves(ids, [1] * MAX_IDS)
        store.add_commits(ids[::2], 1)
        runs = taken_by(store, MAX_IDS)
        assert sorted(identity for run in runs for identity in run.ids) == ids[1::2]
        for run in runs:
            store.settle(run.name, run.ids)
        assert store.sizes() == Sizes(0, 0, 0, 0, None)

    def test_closing_twice_is_closing(self, site: Site, name: str) -> None:
        store = site.open(name)
        store.add_halves(new_ids(1), [1])
        store.close()
        store.close()
        with pytest.raises(Misuse):
            store.sizes()

    def test_schedulers_at_once_share_no_id_and_lose_none(self, site: Site, name: str) -> None:
        """Three threads take, two announce and enter; afterwards each id is in one run, or was in both sets."""
        stores = [site.open(name) for _ in range(5)]
        waiting, late = new_ids(150), new_ids(100)
        stores[0].add_halves(waiting, range(150))
        done = waiting[::3] + late[::2]
        runs: list[Run] = []

        def take(store: SetStore) -> None:
            while (run := store.take(FAR_US, 5, LEASE)) is not None:
                runs.append(run)

        def announce() -> None:
            for at in range(0, 100, 10):
                stores[3].add_halves(late[at : at + 10], [at] * 10)

        def enter() -> None:
            for at in range(0, len(done), 10):
                stores[4].add_commits(done[at : at + 10], at)

        at_once(announce, enter, *(lambda store=store: take(store) for store in stores[:3]))
        runs += taken_by(stores[0])
        counts = Counter(identity for run in runs for identity in run.ids)
        assert set(counts.values()) == {1}, "an id is in two runs"
        assert {i for i in waiting + late if i not in done} <= counts.keys(), "an id that was not done is in no run"
        assert counts.keys() <= set(waiting + late)
        sizes = stores[0].sizes()
        assert (sizes.half, sizes.taken, sizes.runs) == (0, len(counts), len(runs))
        assert sizes.commits == sum(i in counts for i in done), "an entry is gone whose id was taken before it came"
        for store in stores:
            store.close()

    def test_of_all_who_would_adopt_one_does(self, site: Site, name: str) -> None:
        stores = [site.open(name) for _ in range(3)]
        stores[0].add_halves(new_ids(8), range(8))
        runs = {run.name: run.ids for run in taken_by(stores[0], 2)}
        for run in runs:
            site.expire(name, run)
        adopted: list[Run] = []

        def adopt(store: SetStore) -> None:
            while (run := store.adopt(LEASE, 10)) is not None:
                adopted.append(run)

        at_once(*(lambda store=store: adopt(store) for store in stores))
        assert Counter(run.name for run in adopted) == Counter(dict.fromkeys(runs, 1))
        assert {run.name: run.ids for run in adopted} == runs
        for store in stores:
            store.close()

    def test_settled_by_two_at_once(self, site: Site, name: str) -> None:
        """The former owner of a run continues with it: nothing is lost, and in the end the run is gone."""
        stores = [site.open(name) for _ in range(2)]
        ids = new_ids(40)
        stores[0].add_halves(ids, range(40))
        run = take_run(stores[0], FAR_US, 40)

        def settle(store: SetStore, order: Iterable[bytes]) -> None:
            for identity in order:
                store.settle(run.name, [identity])

        at_once(lambda: settle(stores[0], ids[:30]), lambda: settle(stores[1], ids[29:9:-1]))
        assert stores[0].left(run.name, 40) == tuple(ids[30:])
        at_once(lambda: stores[0].settle(run.name, ids), lambda: stores[1].settle(run.name, ids))
        assert stores[1].sizes() == Sizes(0, 0, 0, 0, None)
        for store in stores:
            store.close()
