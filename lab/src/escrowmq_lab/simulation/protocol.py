"""A small model of the decision protocol, explored to its end: prepare, check, decide, fence, crash, forget.

One transaction of one message, two processes of one producer name (sessions 1 and 2), one broker whose memory is ahead
of its disk. A request that could be sent once may arrive at any time from then on: late, again and again, in any order.
Answers and questions leave with the sync; a crash takes the broker back to its disk. Every state that can be reached is
looked at (:func:`explore`), and from each of them the transaction must still be able to come to rest.

The rules stand in :class:`Model`, one method for each command of the ledger that concerns decisions; :data:`COMMANDS`
and :data:`EVENTS` name all that there are, so that one that is added to the ledger must be thought of here.
:data:`ANSWER` is the table of ``ledger/transactions/ending.py`` in words.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

NONE, OPEN, COMMITTED, ROLLED_BACK, PARKED, EXPIRED, GONE = (
    "none", "open", "committed", "rolled back", "parked", "expired", "gone",
)  # fmt: skip
COMMIT, ROLLBACK, UNKNOWN = "commit", "rollback", "unknown"
CHECK_MAX = 2
RECHECKS = 1

OUTSIDE = "outside: it changes no decision"
COMMANDS = {
    "OpenSession": "open_session",
    "Prepare": "prepare",
    "End": "end",
    "AskChecks": "ask_checks",
    "Tick": "tick",
    "Park": "park",
    "Recheck": "recheck",
    "Retain": "retain",
    "Forget": "forget",
    "CommitBatch": "outside: several decisions in one event, which docs/decisions/0008 rules",
    "Configure": OUTSIDE,
    "CreateTopic": OUTSIDE,
    "AlterTopic": OUTSIDE,
    "DeleteTopic": OUTSIDE,
    "Cut": OUTSIDE,
    "AlterProducers": OUTSIDE,
    "Send": OUTSIDE,
    "Subscribe": OUTSIDE,
    "AlterGroup": OUTSIDE,
    "ResetGroup": OUTSIDE,
    "PauseGroup": OUTSIDE,
    "DeleteGroup": OUTSIDE,
    "Join": OUTSIDE,
    "Fence": OUTSIDE,
    "Receive": OUTSIDE,
    "Settle": OUTSIDE,
    "Bury": OUTSIDE,
    "SettleDead": OUTSIDE,
    "EditDead": OUTSIDE,
    "ForgetWriter": OUTSIDE,
}
"""Every command of the ledger, and the rule of the model that stands for it."""
EVENTS = {
    "SESSION": "open_session",
    "HALF": "prepare",
    "DECIDED": "end, retain, tick",
    "CHECKED": "ask_checks",
    "PARKED": "tick, park",
    "REOPENED": "recheck",
    "TRIMMED": "retain",
    "OWNED": "open_session",
    "FORGOTTEN": "forget",
    "BATCH_DECIDED": COMMANDS["CommitBatch"],
    **dict.fromkeys(
        (
            "OPENED", "RULES", "TOPIC", "PLAIN", "RELEASED", "GROUP", "LEASED", "ACKED", "RETRIED", "DEAD",
            "DEAD_SETTLED",
            "EXTENDED", "JOINED", "KEPT", "HANDED", "FENCED", "KEYED", "PRODUCERS", "ALTERED", "BURIED",
            "GROUP_RESET", "GROUP_PAUSED", "GROUP_DELETED", "TOPIC_ALTERED", "TOPIC_DELETED", "CUT", "EDITED", "FAILED",
        ),
        OUTSIDE,
    ),
}  # fmt: skip
"""Every event of the log, and the rules of the model that write it."""

ANSWER = {
    OPEN: {UNKNOWN: "noted", COMMIT: "ok", ROLLBACK: "ok"},
    COMMITTED: {UNKNOWN: "already committed", COMMIT: "already committed", ROLLBACK: "conflict"},
    ROLLED_BACK: {UNKNOWN: "already rolled back", COMMIT: "conflict", ROLLBACK: "already rolled back"},
    PARKED: {UNKNOWN: "noted", COMMIT: "ok", ROLLBACK: "ok"},
    EXPIRED: {UNKNOWN: "expired", COMMIT: "expired", ROLLBACK: "expired"},
}
"""By state and outcome; "ok": this one decides."""
PREPARED, OPENED = "prepared", "opened"
_PROMISES = frozenset({PREPARED, OPENED, COMMITTED, ROLLED_BACK})
_STANDS = {COMMIT: COMMITTED, ROLLBACK: ROLLED_BACK}
_SETTLED = frozenset({NONE, COMMITTED, ROLLED_BACK, PARKED, EXPIRED, GONE})
"""Nothing is left to be done; what is on the disk as open never becomes none again."""


class Ledger(NamedTuple):
    """What the broker knows: in memory, and on its disk."""

    state: str = NONE
    checks: int = 0
    rechecks: int = 0
    newest: int = 1
    """The newest session of the name."""
    known: frozenset[int] = frozenset({1})
    placed: int = 0
    """How often the message stands in its queue."""


class State(NamedTuple):
    """Everything."""

    memory: Ledger = Ledger()
    disk: Ledger = Ledger()
    local: str | None = None
    """What the producer's database has decided."""
    owed: frozenset[str] = frozenset()
    """Answers that leave with the sync. Refusals are not kept: they promise nothing."""
    told: frozenset[str] = frozenset()
    """Answers that somebody has."""
    asked: int = 0
    """Questions that have left."""
    owed_questions: int = 0
    wrong: str = ""
    """A promise that the last step itself broke."""


Step = tuple[str, State]


class Model:
    """The rules. A subclass with another rule is a mistake that :func:`explore` must find."""

    def steps(self, state: State) -> Iterator[Step]:
        """Whatever can happen next: its name, and the state after it."""
        yield from self.database(state)
        yield from self.prepare(state, 1)
        if PREPARED in state.told:
            outcomes = [state.local] if state.local is not None else []
            outcomes += [UNKNOWN] * (state.asked > 0)  # the checker, before the database has decided
            for session in (1, 2) if OPENED in state.told else (1,):
                for outcome in outcomes:
                    yield from self.end(state, session, outcome)
        for rule in (self.open_session, self.ask_checks, self.tick, self.park, self.recheck, self.retain, self.forget):
            yield from rule(state)
        yield from self.sync(state)
        yield from self.crash(state)

    def database(self, state: State) -> Iterator[Step]:
        """Yield the producer's database decides, once; it commits only after the half message is known to be
        durable."""
        if state.local is None:
            yield "local rollback", state._replace(local=ROLLBACK)
            if PREPARED in state.told:
                yield "local commit", state._replace(local=COMMIT)

    # The broker's commands

    def open_session(self, state: State) -> Iterator[Step]:
        """Yield a newer process of the name: the older session is fenced. The request of either may come once more,
        late."""
        if state.memory.newest == 1:
            memory = state.memory._replace(newest=2, known=state.memory.known | {2})
            yield "OpenSession", self.answered(state._replace(memory=memory), OPENED)
        for process in sorted(state.memory.known):
            yield from self.open_again(state, process)

    def open_again(self, state: State, process: int) -> Iterator[Step]:
        """Yield a request of a process that has a session: it is given that one again, or is refused if a newer one
        has the name."""
        if process == state.memory.newest:
            yield "OpenSession", self.answered(state, OPENED) if process == 2 else state

    def refusal(self, ledger: Ledger, session: int) -> str | None:
        """Return why a session may not act."""
        if session not in ledger.known:
            return "unknown session"
        return "fenced" if session < ledger.newest else None

    def prepare(self, state: State, session: int) -> Iterator[Step]:
        """Yield a half message; a repeat changes nothing."""
        ledger = state.memory
        if self.refusal(ledger, session) is not None:
            return
        if ledger.state == NONE:
            changed = self.effect(state, session, ledger._replace(state=OPEN))
            yield "Prepare", self.answered(changed, PREPARED)
        else:
            yield "Prepare", self.answered(state, PREPARED)

    def end(self, state: State, session: int, outcome: str) -> Iterator[Step]:
        """Yield a decision, or an answer to a question. The first is final."""
        ledger = state.memory
        if self.refusal(ledger, session) is not None or ledger.state in (NONE, GONE):
            return
        if (answer := self.answer(ledger.state, outcome)) == "ok":
            changed = self.effect(state, session, self.decided(ledger, _STANDS[outcome]))
            yield "End", self.answered(changed, _STANDS[outcome])
        else:
            yield "End", self.answered(state, answer.removeprefix("already "))

    def answer(self, state: str, outcome: str) -> str:
        """Return the answer to an outcome."""
        return ANSWER[state][outcome]

    def decided(self, ledger: Ledger, state: str) -> Ledger:
        """Apply a decision, which gives the message its place."""
        return ledger._replace(state=state, placed=ledger.placed + (state == COMMITTED))

    def effect(self, state: State, session: int, ledger: Ledger) -> State:
        """Return a request of a session changes something durable."""
        late = session < 2 and OPENED in state.told
        return state._replace(memory=ledger, wrong="the fenced has acted" if late else state.wrong)

    def ask_checks(self, state: State) -> Iterator[Step]:
        """Somebody can be asked, and it is time: counted first, asked when that is durable."""
        ledger = state.memory
        if self.may_ask(ledger):
            counted = ledger._replace(checks=ledger.checks + 1)
            wrong = "the decided is asked" if ledger.state != OPEN else state.wrong
            yield "AskChecks", self.counted(state._replace(memory=counted, wrong=wrong))

    def may_ask(self, ledger: Ledger) -> bool:
        """Return whether a question is due."""
        return ledger.state == OPEN and ledger.checks < CHECK_MAX

    def counted(self, state: State) -> State:
        """Return a question that leaves with the sync."""
        return state._replace(owed_questions=state.owed_questions + 1)

    def tick(self, state: State) -> Iterator[Step]:
        """Yield the last question was not answered in time: park, or roll back where that is set."""
        if state.memory.state == OPEN and state.memory.checks == CHECK_MAX:
            yield "Tick", state._replace(memory=state.memory._replace(state=PARKED))
            if state.local != COMMIT:  # rolling back by time is chosen only where nobody commits so late
                yield "Tick", state._replace(memory=self.decided(state.memory, ROLLED_BACK))

    def park(self, state: State) -> Iterator[Step]:
        """Its half message is damaged, or it is too old."""
        if state.memory.state == OPEN:
            yield "Park", state._replace(memory=state.memory._replace(state=PARKED))

    def recheck(self, state: State) -> Iterator[Step]:
        """Yield an operator has it asked again."""
        ledger = state.memory
        if ledger.state in (OPEN, PARKED) and ledger.rechecks < RECHECKS:
            reopened = ledger._replace(state=OPEN, checks=0, rechecks=ledger.rechecks + 1)
            yield "Recheck", state._replace(memory=reopened)

    def retain(self, state: State) -> Iterator[Step]:
        """Remove the message from the log: undecided, it expires; decided, nothing of it is kept."""
        ledger = state.memory
        if ledger.state == PARKED:
            yield "Retain", state._replace(memory=ledger._replace(state=EXPIRED))
        elif ledger.state in (COMMITTED, ROLLED_BACK):
            yield "Retain", state._replace(memory=ledger._replace(state=GONE))

    def forget(self, state: State) -> Iterator[Step]:
        """Yield a session that nobody uses is forgotten, but not one with something undecided, nor the newest of
        its name."""
        ledger = state.memory
        if 1 in ledger.known and ledger.newest == 2 and self.may_forget(ledger):
            yield "Forget", state._replace(memory=ledger._replace(known=ledger.known - {1}))

    def may_forget(self, ledger: Ledger) -> bool:
        """Return whether the older session may go."""
        return ledger.state not in (OPEN, PARKED)

    # The machine

    def answered(self, state: State, fact: str) -> State:
        """Return an answer that leaves with the sync."""
        return state._replace(owed=state.owed | {fact}) if fact in _PROMISES - state.told else state

    def sync(self, state: State) -> Iterator[Step]:
        """Memory reaches the disk; then answers and questions leave."""
        if state.memory != state.disk or state.owed or state.owed_questions:
            yield (
                "sync",
                state._replace(
                    disk=state.memory,
                    told=state.told | state.owed,
                    owed=frozenset(),
                    asked=state.asked + state.owed_questions,
                    owed_questions=0,
                ),
            )

    def crash(self, state: State) -> Iterator[Step]:
        """Yield the broker starts again from its disk."""
        if state.memory != state.disk or state.owed or state.owed_questions:
            yield "crash", state._replace(memory=state.disk, owed=frozenset(), owed_questions=0)


def broken(state: State) -> str | None:
    """Return the promise that a state breaks; None: none."""
    told = state.told
    disk, memory = state.disk, state.memory
    if state.wrong:
        return state.wrong
    if {COMMITTED, ROLLED_BACK} <= told:
        return "I5: both outcomes were told"
    if COMMITTED in told and disk.state not in (COMMITTED, GONE):
        return "I1: a commit that was told is not on the disk"
    if ROLLED_BACK in told and disk.state not in (ROLLED_BACK, GONE):
        return "I1: a rollback that was told is not on the disk"
    if PREPARED in told and disk.state == NONE:
        return "I1: a prepare that was told is not on the disk"
    if max(disk.placed, memory.placed) > 1:
        return "I8: the message has two places"
    if memory.placed and memory.state not in (COMMITTED, GONE):
        return "I3: visible, and not committed"
    if memory.placed and state.local != COMMIT:
        return "visible, and the database has not committed"
    if memory.state == COMMITTED and not memory.placed:
        return "I8: committed without a place"
    if state.asked > disk.checks + CHECK_MAX * disk.rechecks:
        return "I11: a question has left that is not counted on the disk"
    if memory.newest > 2:
        return "I7: a process was fenced by a request that came late"
    if OPENED in told and disk.newest < 2:
        return "I7: a session that was told is not on the disk"
    return None


@dataclass(slots=True)
class Explored:
    """What there is. ``problem``: the promise that is broken, with the shortest way there."""

    states: int
    steps: int
    names: set[str]
    problem: str | None = None
    way: tuple[str, ...] = ()


def explore(model: Model) -> Explored:
    """Every state that can be reached, nearest first; ends at the first that breaks a promise. At last: from each of
    them the transaction can come to rest (I14)."""
    first = State()
    before: dict[State, tuple[State, str] | None] = {first: None}
    backwards: dict[State, list[State]] = {}
    queue, steps, names = deque([first]), 0, set[str]()

    def way(state: State) -> tuple[str, ...]:
        names: list[str] = []
        while (found := before[state]) is not None:
            state, name = found
            names.append(name)
        return tuple(reversed(names))

    while queue:
        state = queue.popleft()
        for name, after in model.steps(state):
            steps += 1
            names.add(name)
            backwards.setdefault(after, []).append(state)
            if after in before:
                continue
            before[after] = state, name
            if (problem := broken(after)) is not None:
                return Explored(len(before), steps, names, problem, way(after))
            queue.append(after)
    rests = {state for state in before if state.disk.state in _SETTLED and state.memory == state.disk}
    reaches, queue = set(rests), deque(rests)
    while queue:
        for state in backwards.get(queue.popleft(), ()):
            if state not in reaches:
                reaches.add(state)
                queue.append(state)
    if stuck := next((state for state in before if state not in reaches), None):
        return Explored(len(before), steps, names, "I14: the transaction can never come to rest", way(stuck))
    return Explored(len(before), steps, names)
