"""What the monkey does follows from the seed, strikes every number of nodes, and stays within its rounds."""

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from escrowmq.errors import Code, Misuse
from escrowmq_lab.chaos.options import Options
from escrowmq_lab.chaos.plan import Blow, draw

OPTIONS = st.builds(
    Options,
    rounds=st.integers(1, 40),
    period=st.floats(0.1, 20),
    seed=st.integers(0, 1 << 40),
    producers=st.integers(1, 5),
    brokers=st.integers(1, 3),
    consumers=st.integers(1, 5),
    modes=st.just(("barrier",)),
)


def test_the_same_seed_strikes_the_same_nodes_in_the_same_way() -> None:
    assert draw(Options(seed=7)) == draw(Options(seed=7))
    assert draw(Options(seed=7)) != draw(Options(seed=8))


@given(OPTIONS)
def test_strikes_end_within_their_round_and_no_node_is_struck_twice_in_one(options: Options) -> None:
    rounds = draw(options)
    assert [one.number for one in rounds] == list(range(1, options.rounds + 1))
    for one in rounds:
        names = [strike.node for strike in one.strikes]
        assert len(names) == len(set(names)) >= 1
        assert set(names) <= set(options.nodes)
        for strike in one.strikes:
            assert strike.after >= 0
            assert strike.down > 0
            assert strike.after + strike.down <= options.period * (1 + 1e-9) + 0.02


@given(OPTIONS)
def test_every_number_of_nodes_is_struck_and_the_largest_always(options: Options) -> None:
    counts = [len(one.strikes) for one in draw(options)]
    nodes = len(options.nodes)
    assert nodes in counts
    if options.rounds >= nodes:
        assert set(counts) == set(range(1, nodes + 1))


@pytest.mark.parametrize("seed", range(40))
def test_ten_rounds_have_every_blow_and_kill_all_at_one_moment(seed: int) -> None:
    rounds = draw(Options(rounds=10, seed=seed))
    strikes = [strike for one in rounds for strike in one.strikes]
    times = Counter(strike.blow for strike in strikes)
    assert set(times) == set(Blow)
    assert times.most_common(1)[0][0] is Blow.KILL
    (all_of_them,) = [one.strikes for one in rounds if len(one.strikes) == 10]
    assert {(strike.blow, strike.after) for strike in all_of_them} == {(Blow.KILL, all_of_them[0].after)}


def test_some_nodes_are_killed_again_while_they_start() -> None:
    """From the end of a kill to the next one of the same node there is, at times, less than a start takes."""
    rounds, gaps = draw(Options(rounds=100)), []
    for one, two in itertools.pairwise(rounds):
        next_kills = {strike.node: strike.after for strike in two.strikes if strike.blow is Blow.KILL}
        for strike in one.strikes:
            if strike.blow is Blow.KILL and strike.node in next_kills:
                gaps.append(3.0 - strike.after - strike.down + next_kills[strike.node])
    assert min(gaps) < 0.3


def test_the_time_down_can_be_chosen() -> None:
    strikes = [strike for one in draw(Options(rounds=20, period=2.0, down=0.5)) for strike in one.strikes]
    assert {strike.down for strike in strikes} == {0.5}
    assert max(strike.after for strike in strikes) <= 1.5


def test_the_disk_of_a_database_server_is_not_filled() -> None:
    strikes = [s for one in draw(Options(database_url="postgresql://somewhere/x")) for s in one.strikes]
    filled = {strike.node.partition("-")[0] for strike in strikes if strike.blow is Blow.FILL}
    assert filled == {"broker"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"rounds": 0},
        {"producers": 0},
        {"period": 0.0},
        {"rate": 0.0},
        {"patience": 0.0},
        {"modes": ()},
        {"modes": ("telepathy",)},
        {"modes": ("no.such.module:Mode",)},
        {"down": -1.0},
        {"down": 4.0},
    ],
)
def test_what_cannot_be_run_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(Misuse) as refused:
        Options(**wrong)  # type: ignore[arg-type]
    assert refused.value.code is Code.BAD_ARGUMENT
