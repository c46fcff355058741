"""A small model of the decision protocol, explored exhaustively: prepare, check, decide, fence, crash, forget.

One transaction of one message, two processes of one producer name (sessions 1 and 2), one broker whose memory is ahead
of its disk. A request that could be sent once may arrive at any later time: late, repeatedly, in any order. Responses
and check-backs leave with the sync; a crash returns the broker to its disk. :func:`explore` checks every reachable
state, and that the transaction can still settle from each of them.

The rules are in :class:`Model`, one method for each command of the ledger that concerns decisions; :data:`COMMANDS` and
:data:`EVENTS` list all commands and events, so that a new one in the ledger must be considered here. :data:`ANSWER` is
the table of ``ledger/transactions/ending.py`` in words.
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
    "LimitGroup": OUTSIDE,
    "DeleteGroup": OUTSIDE,
    "Join": OUTSIDE,
    "Fence": OUTSIDE,
    "Receive": OUTSIDE,
    "Settle": OUTSIDE,
    "Bury": OUTSIDE,
    "Recall": OUTSIDE,
    "SettleDead": OUTSIDE,
    "EditDead": OUTSIDE,
    "ForgetWriter": OUTSIDE,
}
"""Every command of the ledger, and its rule in the model."""
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
            "DEAD_SETTLED", "EXTENDED", "JOINED", "KEPT", "HANDED", "FENCED", "KEYED", "PRODUCERS", "ALTERED", "BURIED",
            "GROUP_RESET", "GROUP_PAUSED", "GROUP_DELETED", "TOPIC_ALTERED", "TOPIC_DELETED", "CUT", "EDITED", "FAILED",
            "GROUP_LIMITED", "RECALLED",
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
"""States without pending work; a transaction stored as open never becomes none again."""


class Ledger(NamedTuple):
    """The broker's state, in memory or on its disk."""

    state: str = NONE
    checks: int = 0
    rechecks: int = 0
    newest: int = 1
    """The newest session of the name."""
    known: frozenset[int] = frozenset({1})
    placed: int = 0
    """Number of times that the message is in its queue."""


class State(NamedTuple):
    """The whole state."""

    memory: Ledger = Ledger()
    disk: Ledger = Ledger()
    local: str | None = None
    """The decision of the producer's database."""
    unsent: frozenset[str] = frozenset()
    """Responses that leave with the sync. Rejections are not kept: they promise nothing."""
    reported: frozenset[str] = frozenset()
    """Responses that were received."""
    checks_sent: int = 0
    """Check-backs that were sent."""
    unsent_checks: int = 0
    wrong: str = ""
    """A promise broken by the last step itself."""


Step = tuple[str, State]


class Model:
    """The rules. A subclass with another rule is a mistake that :func:`explore` must find."""

    def steps(self, state: State) -> Iterator[Step]:
        """Iterate over possible next steps: name, and the state after it."""
        yield from self.database(state)
        yield from self.prepare(state, 1)
        if PREPARED in state.reported:
            outcomes = [state.local] if state.local is not None else []
            outcomes += [UNKNOWN] * (state.checks_sent > 0)  # the checker, before the database has decided
            for session in (1, 2) if OPENED in state.reported else (1,):
                for outcome in outcomes:
                    yield from self.end(state, session, outcome)
        for rule in (self.open_session, self.ask_checks, self.tick, self.park, self.recheck, self.retain, self.forget):
            yield from rule(state)
        yield from self.sync(state)
        yield from self.crash(state)

    def database(self, state: State) -> Iterator[Step]:
        """Decide in the producer's database, once; it commits only after the half message is known to be durable."""
        if state.local is None:
            yield "local rollback", state._replace(local=ROLLBACK)
            if PREPARED in state.reported:
                yield "local commit", state._replace(local=COMMIT)

    # The broker's commands

    def open_session(self, state: State) -> Iterator[Step]:
        """Open a session of a newer process, which fences the older one. Either request may come again, late."""
        if state.memory.newest == 1:
            memory = state.memory._replace(newest=2, known=state.memory.known | {2})
            yield "OpenSession", self.add_response(state._replace(memory=memory), OPENED)
        for process in sorted(state.memory.known):
            yield from self.open_again(state, process)

    def open_again(self, state: State, process: int) -> Iterator[Step]:
        """Repeat a process's session request: it gets the same session, or is rejected if a newer one exists."""
        if process == state.memory.newest:
            yield "OpenSession", self.add_response(state, OPENED) if process == 2 else state

    def refusal(self, ledger: Ledger, session: int) -> str | None:
        """Return why a session may not act."""
        if session not in ledger.known:
            return "unknown session"
        return "fenced" if session < ledger.newest else None

    def prepare(self, state: State, session: int) -> Iterator[Step]:
        """Prepare a half message; a repeat changes nothing."""
        ledger = state.memory
        if self.refusal(ledger, session) is not None:
            return
        if ledger.state == NONE:
            changed = self.effect(state, session, ledger._replace(state=OPEN))
            yield "Prepare", self.add_response(changed, PREPARED)
        else:
            yield "Prepare", self.add_response(state, PREPARED)

    def end(self, state: State, session: int, outcome: str) -> Iterator[Step]:
        """Decide, or answer a check-back. The first decision is final."""
        ledger = state.memory
        if self.refusal(ledger, session) is not None or ledger.state in (NONE, GONE):
            return
        if (answer := self.answer(ledger.state, outcome)) == "ok":
            changed = self.effect(state, session, self.apply_decision(ledger, _STANDS[outcome]))
            yield "End", self.add_response(changed, _STANDS[outcome])
        else:
            yield "End", self.add_response(state, answer.removeprefix("already "))

    def answer(self, state: str, outcome: str) -> str:
        """Return the response to an outcome."""
        return ANSWER[state][outcome]

    def apply_decision(self, ledger: Ledger, state: str) -> Ledger:
        """Apply a decision, which gives the message its position."""
        return ledger._replace(state=state, placed=ledger.placed + (state == COMMITTED))

    def effect(self, state: State, session: int, ledger: Ledger) -> State:
        """Apply a durable change by a request of a session."""
        late = session < 2 and OPENED in state.reported
        return state._replace(memory=ledger, wrong="the fenced has acted" if late else state.wrong)

    def ask_checks(self, state: State) -> Iterator[Step]:
        """Send a due check-back if a producer is connected: counted first, sent when that is durable."""
        ledger = state.memory
        if self.may_ask(ledger):
            queue_check = ledger._replace(checks=ledger.checks + 1)
            wrong = "the decided is asked" if ledger.state != OPEN else state.wrong
            yield "AskChecks", self.queue_check(state._replace(memory=queue_check, wrong=wrong))

    def may_ask(self, ledger: Ledger) -> bool:
        """Decide whether a check-back is due."""
        return ledger.state == OPEN and ledger.checks < CHECK_MAX

    def queue_check(self, state: State) -> State:
        """Queue a check-back that leaves with the sync."""
        return state._replace(unsent_checks=state.unsent_checks + 1)

    def tick(self, state: State) -> Iterator[Step]:
        """Park after the last unanswered check-back, or roll back if so configured."""
        if state.memory.state == OPEN and state.memory.checks == CHECK_MAX:
            yield "Tick", state._replace(memory=state.memory._replace(state=PARKED))
            if state.local != COMMIT:  # rollback by time is chosen only if no commit can come so late
                yield "Tick", state._replace(memory=self.apply_decision(state.memory, ROLLED_BACK))

    def park(self, state: State) -> Iterator[Step]:
        """Park a damaged or expired half message."""
        if state.memory.state == OPEN:
            yield "Park", state._replace(memory=state.memory._replace(state=PARKED))

    def recheck(self, state: State) -> Iterator[Step]:
        """Restart the check-back for an operator."""
        ledger = state.memory
        if ledger.state in (OPEN, PARKED) and ledger.rechecks < RECHECKS:
            reopened = ledger._replace(state=OPEN, checks=0, rechecks=ledger.rechecks + 1)
            yield "Recheck", state._replace(memory=reopened)

    def retain(self, state: State) -> Iterator[Step]:
        """Remove it from the log: undecided, it expires; decided, nothing is kept of it."""
        ledger = state.memory
        if ledger.state == PARKED:
            yield "Retain", state._replace(memory=ledger._replace(state=EXPIRED))
        elif ledger.state in (COMMITTED, ROLLED_BACK):
            yield "Retain", state._replace(memory=ledger._replace(state=GONE))

    def forget(self, state: State) -> Iterator[Step]:
        """Forget an unused session, except one with undecided transactions or the newest of its name."""
        ledger = state.memory
        if 1 in ledger.known and ledger.newest == 2 and self.may_forget(ledger):
            yield "Forget", state._replace(memory=ledger._replace(known=ledger.known - {1}))

    def may_forget(self, ledger: Ledger) -> bool:
        """Decide whether the older session may be forgotten."""
        return ledger.state not in (OPEN, PARKED)

    # The machine

    def add_response(self, state: State, fact: str) -> State:
        """Queue a response that leaves with the sync."""
        return state._replace(unsent=state.unsent | {fact}) if fact in _PROMISES - state.reported else state

    def sync(self, state: State) -> Iterator[Step]:
        """Sync memory to disk; then responses and check-backs leave."""
        if state.memory != state.disk or state.unsent or state.unsent_checks:
            yield (
                "sync",
                state._replace(
                    disk=state.memory,
                    reported=state.reported | state.unsent,
                    unsent=frozenset(),
                    checks_sent=state.checks_sent + state.unsent_checks,
                    unsent_checks=0,
                ),
            )

    def crash(self, state: State) -> Iterator[Step]:
        """Restart the broker from its disk."""
        if state.memory != state.disk or state.unsent or state.unsent_checks:
            yield "crash", state._replace(memory=state.disk, unsent=frozenset(), unsent_checks=0)


def broken(state: State) -> str | None:
    """Return the promise that a state breaks, or None."""
    reported = state.reported
    disk, memory = state.disk, state.memory
    if state.wrong:
        return state.wrong
    if {COMMITTED, ROLLED_BACK} <= reported:
        return "I5: both outcomes were told"
    if COMMITTED in reported and disk.state not in (COMMITTED, GONE):
        return "I1: a commit that was told is not on the disk"
    if ROLLED_BACK in reported and disk.state not in (ROLLED_BACK, GONE):
        return "I1: a rollback that was told is not on the disk"
    if PREPARED in reported and disk.state == NONE:
        return "I1: a prepare that was told is not on the disk"
    if max(disk.placed, memory.placed) > 1:
        return "I8: the message has two places"
    if memory.placed and memory.state not in (COMMITTED, GONE):
        return "I3: visible, and not committed"
    if memory.placed and state.local != COMMIT:
        return "visible, and the database has not committed"
    if memory.state == COMMITTED and not memory.placed:
        return "I8: committed without a place"
    if state.checks_sent > disk.checks + CHECK_MAX * disk.rechecks:
        return "I11: a question has left that is not counted on the disk"
    if memory.newest > 2:
        return "I7: a process was fenced by a request that came late"
    if OPENED in reported and disk.newest < 2:
        return "I7: a session that was told is not on the disk"
    return None


@dataclass(slots=True)
class Explored:
    """The result of an exploration. ``problem``: the broken promise, with the shortest path to it."""

    states: int
    steps: int
    names: set[str]
    problem: str | None = None
    path: tuple[str, ...] = ()


def explore(model: Model) -> Explored:
    """Explore every reachable state, nearest first, until one breaks a promise. Finally check that the transaction can
    settle from each of them (I14)."""
    first = State()
    before: dict[State, tuple[State, str] | None] = {first: None}
    backwards: dict[State, list[State]] = {}
    queue, steps, names = deque([first]), 0, set[str]()

    def path(state: State) -> tuple[str, ...]:
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
                return Explored(len(before), steps, names, problem, path(after))
            queue.append(after)
    rests = {state for state in before if state.disk.state in _SETTLED and state.memory == state.disk}
    reaches, queue = set(rests), deque(rests)
    while queue:
        for state in backwards.get(queue.popleft(), ()):
            if state not in reaches:
                reaches.add(state)
                queue.append(state)
    if stuck := next((state for state in before if state not in reaches), None):
        return Explored(len(before), steps, names, "I14: the transaction can never come to rest", path(stuck))
    return Explored(len(before), steps, names)
