"""When a standby claims the log, in virtual time."""

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from escrowmq.broker.replicas.candidate import (
    RANK_SECONDS,
    RELEASED_SECONDS,
    SPREAD,
    UNRANKED,
    Candidate,
    Step,
    rank_of,
)

SILENCE = 2.0


class World:
    """One standby, a clock, and what it hears. The partition ``answers`` whether there is more, None: nothing."""

    def __init__(self, seed: int = 1, holds_back: float = 0.0, rank: int | None = None, leaders: float = 0.0) -> None:
        self.rank, self.leaders = rank, leaders
        self.now, self.heard = 100.0, 100.0
        self.candidate = Candidate(SILENCE, Random(seed), self.now, holds_back)
        self.answers: bool | None = False
        self.released = False
        self.asked = 0

    def run(self, until: float, beats: float | None = None) -> float | None:
        """Follow until the time, or a claim: when it came. A leader beats every so many seconds."""
        while self.now < until:
            silent = math.inf if self.released else self.now - self.heard
            step, seconds = self.candidate.next(silent, self.now, self.leaders, self.rank)
            if step is Step.CLAIM:
                return self.now
            if step is Step.ASK:
                self.asked += 1
                assert self.asked < 10_000, "it asks without a pause"
                self.candidate.answered(self.answers, self.now)
                continue
            assert seconds > 0
            if beats is not None and self.heard + beats <= min(self.now + seconds, until):
                self.now = self.heard = self.heard + beats
            else:
                self.now += seconds
        return None


def test_it_claims_after_the_silence_and_not_before() -> None:
    claimed = {World(seed).run(200.0) for seed in range(50)}
    assert None not in claimed
    assert all(100 + SILENCE <= at <= 100 + (1 + UNRANKED) * SILENCE for at in claimed if at is not None)
    assert len(claimed) == 50, "standbys do not all claim at the same moment"


def test_standbys_that_have_a_rank_claim_one_after_the_other_and_the_first_at_once() -> None:
    claimed = [World(rank=rank).run(200.0) for rank in range(5)]
    assert claimed[0] == pytest.approx(100 + SILENCE)
    assert claimed[1] == pytest.approx(100 + SILENCE + RANK_SECONDS)
    assert claimed[2] == pytest.approx(100 + SILENCE + 2 * RANK_SECONDS)
    assert claimed[4] == pytest.approx(100 + SILENCE * (1 + SPREAD)), "nobody waits longer than a leader may think"


def test_the_rank_is_the_place_among_those_that_follow() -> None:
    urls = ["escrow://c", "escrow://a", "escrow://b"]
    assert [rank_of(url, urls, "escrow://a") for url in sorted(urls)] == [None, 0, 1]
    assert [rank_of(url, urls, None) for url in sorted(urls)] == [0, 1, 2]
    assert rank_of("escrow://elsewhere", urls, None) is None
    assert rank_of("escrow://a", [], None) is None


@pytest.mark.parametrize("rank", [None, 0, 1])
@pytest.mark.parametrize("leaders", [0.5, 2.0, 7.0])
def test_nobody_claims_by_the_clock_before_the_leaders_own_silence_is_over(leaders: float, rank: int | None) -> None:
    """Until half of it has passed the leader answers looks without a new proof."""
    claimed = World(rank=rank, leaders=leaders).run(200.0)
    assert claimed is not None
    assert claimed >= 100 + max(SILENCE, leaders)
    assert claimed <= 100 + max(SILENCE, leaders) + SPREAD * SILENCE


def test_a_released_log_does_not_wait_for_the_leaders_silence() -> None:
    world = World(leaders=60.0, rank=0)
    world.released = True
    assert world.run(200.0) == 100.0


def test_it_never_claims_while_a_leader_beats() -> None:
    world = World()
    assert world.run(1000.0, beats=0.5) is None
    assert world.asked == 0


def test_a_released_log_is_claimed_at_once() -> None:
    world = World()
    world.run(150.0, beats=0.5)
    world.released = True
    began = world.now
    claimed = world.run(1000.0)
    assert claimed is not None
    assert claimed - began <= RELEASED_SECONDS


def test_a_released_log_that_another_takes_is_left_to_it() -> None:
    world = World()
    world.released = True
    assert world.candidate.next(math.inf, world.now)[0] is Step.FOLLOW
    world.released, world.heard = False, world.now
    assert world.run(200.0, beats=0.5) is None


def test_silence_of_the_partition_is_not_the_leaders() -> None:
    world = World()
    world.answers = None
    assert world.run(200.0) is None
    assert 1 < world.asked <= 200
    world.answers = False
    came_back = world.now
    claimed = world.run(1000.0)
    assert claimed is not None
    assert claimed >= came_back + SILENCE, "the leader has its time to beat again"


def test_a_leader_that_comes_back_with_the_partition_keeps_the_log() -> None:
    world = World()
    world.answers = None
    world.run(200.0)
    world.answers, world.heard = False, world.now
    assert world.run(400.0, beats=0.5) is None


def test_who_is_behind_reads_on() -> None:
    world = World()
    world.answers = True
    assert world.run(120.0) is None
    world.answers = False
    assert world.run(200.0) is not None


@pytest.mark.parametrize("released", [True, False])
def test_who_stepped_down_leaves_it_to_others_for_a_while(released: bool) -> None:
    world = World(holds_back=30.0)
    world.released = released
    claimed = world.run(1000.0)
    assert claimed is not None
    assert 130.0 <= claimed <= 130.0 + 1.25 * SILENCE


@given(
    st.integers(0, 1000),
    st.lists(st.tuples(st.sampled_from([True, False, None]), st.booleans(), st.floats(0.1, 5.0)), max_size=20),
)
def test_a_claim_follows_an_answer_that_nothing_is_left_and_a_silence(seed: int, story: list) -> None:
    """Whatever happens: it claims only when, asked after the silence, the partition said that there is no more."""
    world = World(seed)
    for answers, beating, seconds in story:
        world.answers = answers
        claimed = world.run(world.now + seconds, beats=0.5 if beating else None)
        if claimed is not None:
            assert answers is False
            assert claimed - world.heard >= SILENCE
            return
