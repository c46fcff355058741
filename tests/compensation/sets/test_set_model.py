"""Any sequence of calls on any set store gives what the contract in plain Python says."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from escrowmq.testing.set_conformance import SetModel, Site

IDS = [bytes([n]) * 16 for n in range(12)]
SITES = ["memory", "sqlite", "postgresql", "mariadb", "redis"]

ids = st.lists(st.sampled_from(IDS), max_size=6)
times = st.integers(0, 20)
limits = st.integers(1, 6)
which = st.integers(0, 3)
calls = st.one_of(
    st.tuples(st.just("add_halves"), st.lists(st.tuples(st.sampled_from(IDS), times), max_size=8)),
    st.tuples(st.just("add_halves"), st.lists(st.tuples(st.sampled_from(IDS), times), max_size=8)),
    st.tuples(st.just("add_commits"), ids, times),
    st.tuples(st.just("take"), times, limits),
    st.tuples(st.just("take"), times, limits),
    st.tuples(st.just("adopt"), limits),
    st.tuples(st.just("expire"), which),
    st.tuples(st.just("renew"), which),
    st.tuples(st.just("left"), which, limits),
    st.tuples(st.just("settle"), which, ids),
    st.tuples(st.just("forget_commits"), times),
    st.tuples(st.just("check")),
)


def play(model: SetModel, played: list[tuple]) -> None:
    """Runs are meant by their number, the oldest first; a number that none has means a run that is gone."""
    for call, *arguments in played:
        if call in ("expire", "renew", "left", "settle"):
            arguments[0] = dict(enumerate(model.runs)).get(arguments[0], "gone")
        getattr(model, call)(*arguments)
    model.finish()


@pytest.mark.invariant("I48")
@pytest.mark.parametrize("kind", SITES)
def test_any_sequence_of_calls(kind: str, request: pytest.FixtureRequest) -> None:
    site: Site = request.getfixturevalue(f"{kind}_site")

    @settings(max_examples=200 if kind == "memory" else 8)
    @given(st.lists(calls, max_size=25))
    def search(played: list[tuple]) -> None:
        play(SetModel(site), played)

    search()
