"""Who may answer, in every order of events: nothing that was answered is void, each mistake in the rules is found, and
the code does what the model does.
"""

from __future__ import annotations

import random
import time
from contextlib import suppress

import partition_model
import pytest
from partition_model import CLAIM, Explored, Model, Opener, State
from partition_scripts import SALT, SHARD, frame, send_frames

from escrowmq.errors import Code, EscrowError
from escrowmq.log.kafka.channel import Channel, Round, claim
from escrowmq.log.kafka.fold import Fold
from escrowmq.log.kafka.rule import Verdict
from escrowmq.testing.partitions import MemoryKafka, MemoryPartition


def explored(model: Model, states: int) -> Explored:
    found = partition_model.explore(model)
    print(found)
    assert found.problem is None, (found.problem, found.way)
    assert found.states > states
    assert min(found.void, found.past, found.fenced) > found.states // 10, "it went where it matters"
    return found


def test_no_state_breaks_a_promise() -> None:
    """Three openers, two frames of each on the way, acknowledgements as late as they like."""
    explored(Model(3, 2), 30_000)


def test_no_state_breaks_a_promise_where_kafka_does_not_say_where_a_record_is() -> None:
    explored(Model(2, 3, unknown=True), 2_000)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("openers", "frames", "unknown"), [(3, 2, True), (2, 4, True)])
def test_no_state_of_a_larger_model_breaks_a_promise(openers: int, frames: int, unknown: bool) -> None:
    """Three openers with three frames each are too many states: that walk was never seen to end."""
    explored(Model(openers, frames, unknown=unknown), 50_000)


class AcknowledgedIsEnough(Model):
    def believe(self, state: State, i: int, opener: Opener) -> Opener:
        number = opener.number
        while opener.heard & 1 << number:
            number += 1
        return opener._replace(number=number)


class OnlyTheEndOfAGap(Model):
    def read(self, state: State, i: int, number: int, gap: range) -> tuple[Verdict, int]:
        return super().read(state, i, number, gap[-1:])


class AClaimInAGapIsPassedOver(Model):
    def read(self, state: State, i: int, number: int, gap: range) -> tuple[Verdict, int]:
        return Verdict.VOID, gap.stop


class AnyGapFences(Model):
    def read(self, state: State, i: int, number: int, gap: range) -> tuple[Verdict, int]:
        return Verdict.CLAIMS, gap.start


class AGapIsWaitedOut(Model):
    def believe(self, state: State, i: int, opener: Opener) -> Opener:
        offset = dict(opener.acknowledged).get(opener.number)
        return super().believe(state, i, opener) if offset == opener.offset else opener


PLANTED = {
    AcknowledgedIsEnough: "which is void",
    OnlyTheEndOfAGap: "which is void",
    AClaimInAGapIsPassedOver: "which is void",
    AnyGapFences: "fenced by nobody",
    AGapIsWaitedOut: "answered",
}


@pytest.mark.parametrize("mistake", PLANTED)
def test_a_mistake_in_the_rules_is_found(mistake: type[Model]) -> None:
    found = partition_model.explore(mistake(2, 2))
    print(found)
    assert found.problem is not None
    assert PLANTED[mistake] in found.problem


def test_acknowledged_is_not_enough_for_this_reason() -> None:
    """The shortest way to it, for who reads this: the frame is acknowledged, and lies behind another's claim."""
    found = partition_model.explore(AcknowledgedIsEnough())
    assert found.way == ["0 claims", "1 claims", "0 hears 0", "0.1 lands", "0 hears 1"]


# The code does what the model does


class Real:
    """The model's openers as real channels over one partition in memory, each step by step."""

    def __init__(self, openers: int, frames: int) -> None:
        self.kafka = MemoryKafka()
        self.frames = frames
        self.partitions: list[MemoryPartition] = [self.kafka.opener() for _ in range(openers)]
        self.channels: list[Channel | None] = [None] * openers
        self.rounds: list[list[Round]] = [[] for _ in range(openers)]
        self.heard: list[set[int]] = [set() for _ in range(openers)]
        self.kept: list[list[tuple[int, int]]] = [[] for _ in range(openers)]
        for i, partition in enumerate(self.partitions):
            partition.order = lambda reports, i=i: self.allowed(i, reports)  # type: ignore[misc]

    def allowed(self, i: int, reports: list[tuple[int, int]]) -> list[tuple[int, int]]:
        self.kept[i] += reports
        ready = [report for report in self.kept[i] if report[0] in self.heard[i] or report[0] == CLAIM]
        self.kept[i] = [report for report in self.kept[i] if report not in ready]
        return ready

    def claim(self, i: int) -> None:
        partition = self.partitions[i]
        channel = claim(partition, Fold(), url=f"escrow://{i}", seed=(SHARD, SALT))
        partition.change(slow=True)
        now = channel.standing
        for n in range(self.frames):
            data = frame(now.sequence + n, now.position + n, epoch=0)
            self.rounds[i].append(send_frames(channel, data))
        self.channels[i] = channel

    def land(self, i: int) -> None:
        assert self.partitions[i].land(1) == 1

    def hear(self, i: int, number: int) -> None:
        self.heard[i].add(number)
        with self.kafka.changed:  # what was kept back comes with the next look
            self.partitions[i]._reports += [r for r in self.kept[i] if r[0] == number]
            self.kept[i] = [r for r in self.kept[i] if r[0] != number]
        self.look(i)

    def look(self, i: int) -> None:
        """Take in what has come for an opener."""
        with suppress(EscrowError):
            self.rounds[i][-1].wait(0.001)

    def comes_to(self, i: int, wanted: tuple[int, bool]) -> tuple[int, bool]:
        """Return what was answered to an opener and whether it is fenced, once that is as wanted: a look takes time."""
        deadline = time.monotonic() + 60
        while (found := (self.answered(i), self.fenced(i))) != wanted and time.monotonic() < deadline:
            self.look(i)
        return found

    def answered(self, i: int) -> int:
        return sum(round.standing is not None for round in self.rounds[i])

    def fenced(self, i: int) -> bool:
        channel = self.channels[i]
        return channel is not None and channel.failure is not None and channel.failure.code is Code.FENCED

    def counted(self) -> int:
        fold = Fold()
        for offset in range(self.kafka.log.next):
            fold.take(offset, self.kafka.log[offset])
        return fold.standing.sequence


@pytest.mark.parametrize("seed", range(60))
def test_channels_do_what_the_model_does(seed: int) -> None:
    choose = random.Random(seed)
    model = Model(3, 2)
    real, state = Real(3, 2), model.start
    while steps := list(model.steps(state)):
        name, state = choose.choice(steps)
        i = int(name[0])
        if name.endswith("claims"):
            real.claim(i)
            state = dict(model.steps(state))[f"{i} hears 0"]
        elif name.endswith("lands"):
            real.land(i)
        else:
            real.hear(i, int(name[-1]))
        for i, opener in enumerate(state.openers):
            wanted = max(opener.number - 1, 0), opener.fenced
            assert real.comes_to(i, wanted) == wanted, (name, i)
        assert real.counted() == sum(record.counts for record in state.partition if record.number != CLAIM)
