"""A small model of who may answer, explored to its end: openers that claim one partition, frames on the way,
acknowledgements that come late.

The rules are the product's own: ``judge`` says what counts for every reader, ``prove`` what its sender may believe. The
model is around them: records of one opener land in the order in which they were sent, at any time, also long after it
was fenced; each acknowledgement comes at any time after that, in any order, or never; what lies in a gap is read. A
crash is an opener that does nothing any more, so every state is also one after crashes.

A frame that is sent and has not landed is the same to everybody as one that was not sent: so "sent" is no step of its
own. Openers differ by their number only: they are numbered by the order in which their claims land.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from escrowmq.log.kafka.rule import Owner, Verdict, judge, prove

CLAIM = 0
"""The number of an opener's claim; its frames are 1, 2 ..."""
UNKNOWN = -1


class Landed(NamedTuple):
    """A record in the partition."""

    opener: int
    number: int
    counts: bool


class Opener(NamedTuple):
    """What one opener knows."""

    acknowledged: tuple[tuple[int, int], ...] = ()
    """Number and offset, of what it does not know to count yet."""
    heard: int = 0
    """The numbers whose acknowledgements came, as bits."""
    number: int = 0
    """Every frame of its own below this counts, as it believes: these it has answered. 0: it does not own the log yet.
    """
    offset: int = 0
    fenced: bool = False


class State(NamedTuple):
    """The partition, and what each opener knows."""

    partition: tuple[Landed, ...]
    owner: Owner
    openers: tuple[Opener, ...]


@dataclass
class Explored:
    """What was found. ``way``: the steps to the first state that breaks a promise."""

    states: int = 0
    steps: int = 0
    void: int = 0
    """States with a void frame in the partition."""
    past: int = 0
    """States in which an owner has answered a frame behind somebody else's void one."""
    fenced: int = 0
    problem: str | None = None
    way: list[str] = field(default_factory=list)


class Model:
    """The openers' rules; a planted mistake overrides one."""

    def __init__(self, openers: int = 3, frames: int = 2, *, unknown: bool = False) -> None:
        self.start = State((), Owner(), (Opener(),) * openers)
        self.frames = frames
        self.unknown = unknown

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        """What can happen next."""
        landed = [0] * len(state.openers)
        offsets: dict[tuple[int, int], int] = {}
        for offset, record in enumerate(state.partition):
            landed[record.opener] += 1
            offsets[record.opener, record.number] = offset
        for i, opener in enumerate(state.openers):
            if landed[i] == CLAIM:
                yield f"{i} claims", self.land(state, i, CLAIM)
                break  # whoever claims next has the next number
            if opener.number and landed[i] <= self.frames:
                yield f"{i}.{landed[i]} lands", self.land(state, i, landed[i])
        for (i, number), offset in offsets.items():
            if not state.openers[i].heard & 1 << number and not state.openers[i].fenced:
                yield f"{i} hears {number}", self.hear(state, i, number, offset)
                if self.unknown and number != CLAIM:
                    yield f"{i} hears {number}, not where", self.hear(state, i, number, UNKNOWN)

    def land(self, state: State, i: int, number: int) -> State:
        """A record is stored, and every reader judges it."""
        verdict, owner = self.judge(state.owner, number == CLAIM, i + 1, number)
        assert verdict is not Verdict.BREAKS
        record = Landed(i, number, verdict is Verdict.COUNTS)
        return State((*state.partition, record), owner, state.openers)

    def hear(self, state: State, i: int, number: int, offset: int) -> State:
        """An acknowledgement comes."""
        before = state.openers[i]
        heard = before._replace(heard=before.heard | 1 << number)
        if number == CLAIM:  # it reads everything up to there
            after = heard._replace(number=1, offset=self.base(offset))
        else:
            after = self.believe(state, i, heard._replace(acknowledged=(*heard.acknowledged, (number, offset))))
        return state._replace(openers=(*state.openers[:i], after, *state.openers[i + 1 :]))

    def judge(self, owner: Owner, claims: bool, nonce: int, number: int) -> tuple[Verdict, Owner]:
        return judge(owner, claims, nonce, number)

    def base(self, claim: int) -> int:
        return claim + 1

    def believe(self, state: State, i: int, opener: Opener) -> Opener:
        """What an opener knows to count, by what was acknowledged; it reads the gaps."""
        known = dict(opener.acknowledged)
        number, offset, fenced = opener.number, opener.offset, False
        while True:
            step = prove(number, offset, known)
            number, offset = step.number, step.offset
            if step.unread is None:
                break
            gap = range(offset, len(state.partition) if step.unread == UNKNOWN else step.unread)
            verdict, offset = self.read(state, i, number, gap)
            if verdict is Verdict.CLAIMS:
                fenced = True
                break
            if verdict is Verdict.COUNTS:
                known[number] = offset
        left = tuple(sorted((n, o) for n, o in known.items() if n >= number))
        return Opener(() if fenced else left, opener.heard, number, offset, fenced)

    def read(self, state: State, i: int, number: int, gap: range) -> tuple[Verdict, int]:
        """The first record of a gap that is not void, and its offset; else the gap's end."""
        for offset in gap:
            record = state.partition[offset]
            verdict, _ = judge(Owner(1, i + 1, number), record.number == CLAIM, record.opener + 1, record.number)
            if verdict is not Verdict.VOID:
                return verdict, offset
        return Verdict.VOID, gap.stop


def problem(state: State) -> str | None:
    """What a state breaks."""
    for record in state.partition:
        if not record.counts and record.number != CLAIM and record.number < state.openers[record.opener].number:
            return f"opener {record.opener} answered its frame {record.number}, which is void"
    return None


def stuck(state: State) -> str | None:
    """What is wrong when nothing more can happen: whoever was not fenced has answered all, and the last owner was never
    fenced."""
    last = max((record.opener for record in state.partition if record.number == CLAIM), default=-1)
    for i, opener in enumerate(state.openers):
        mine = sum(record.opener == i and record.counts for record in state.partition)
        if not opener.fenced and opener.number - 1 != mine:
            return f"opener {i} answered {opener.number - 1} of {mine} frames that count"
        if opener.fenced and i == last:
            return f"opener {i} was fenced by nobody"
    return None


def explore(model: Model) -> Explored:
    """Every state that can be reached, once."""
    found = Explored()
    came: dict[State, tuple[State, str] | None] = {model.start: None}
    waiting = deque([model.start])
    while waiting:
        state = waiting.popleft()
        found.states += 1
        found.void += any(not record.counts and record.number != CLAIM for record in state.partition)
        found.fenced += any(opener.fenced for opener in state.openers)
        found.past += went_past(state)
        wrong, moved = problem(state), False
        if wrong is None:
            for name, after in model.steps(state):
                moved = True
                found.steps += 1
                if after not in came:
                    came[after] = (state, name)
                    waiting.append(after)
            wrong = None if moved else stuck(state)
        if wrong is not None:
            found.problem = wrong
            while (step := came[state]) is not None:
                state, name = step
                found.way.insert(0, name)
            return found
    return found


def went_past(state: State) -> bool:
    """Whether an owner answered a frame that lies behind an earlier owner's void one."""
    void = False
    for record in state.partition:
        void = void or (not record.counts and record.number != CLAIM)
        if void and record.counts and record.number < state.openers[record.opener].number:
            return True
    return False
