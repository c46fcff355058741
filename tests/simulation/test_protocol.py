"""The small model of the decision protocol: no state breaks a promise, each mistake in its rules is found, and it knows
the code's names.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from escrowmq.errors import Code
from escrowmq.ledger.commands import Command
from escrowmq.ledger.transactions import ending
from escrowmq.model import Outcome, TransactionState
from escrowmq.schemas import Kind
from escrowmq_lab.simulation import protocol
from escrowmq_lab.simulation.protocol import COMMANDS, COMMIT, COMMITTED, EVENTS, NONE, OPEN, Ledger, Model, State, Step


@pytest.mark.invariant("I5", "I7", "I10", "I11", "I12", "I14", "I28")
def test_no_state_breaks_a_promise() -> None:
    explored = protocol.explore(Model())
    print(f"{explored.states} states, {explored.steps} steps")
    assert explored.problem is None, (explored.problem, explored.path)
    assert explored.states > 1000
    rules = {name for name, rule in COMMANDS.items() if not rule.startswith("outside")}
    assert rules <= explored.names, "every rule was used"
    assert {"sync", "crash", "local commit", "local rollback"} <= explored.names


class AnswerBeforeTheSync(Model):
    def add_response(self, state: State, fact: str) -> State:
        return state._replace(reported=state.reported | {fact})


class AcceptTheOpposite(Model):
    def answer(self, state: str, outcome: str) -> str:
        return "ok" if outcome != "unknown" and state != "expired" else super().answer(state, outcome)


class SayTheOppositeWasDone(Model):
    def answer(self, state: str, outcome: str) -> str:
        found = super().answer(state, outcome)
        return (
            "rolled back"
            if found == "conflict" and outcome == "rollback"
            else "committed"
            if found == "conflict"
            else found
        )


class ApplyACommitTwice(Model):
    def answer(self, state: str, outcome: str) -> str:
        return "ok" if (state, outcome) == (COMMITTED, COMMIT) else super().answer(state, outcome)


class PlaceAtThePrepare(Model):
    def prepare(self, state: State, session: int) -> Iterator[Step]:
        for name, after in super().prepare(state, session):
            placed = int(after.memory.state == OPEN)
            yield name, after._replace(memory=after.memory._replace(placed=max(after.memory.placed, placed)))


class DoNotFence(Model):
    def refusal(self, ledger: Ledger, session: int) -> str | None:
        return None


class ForgetTheFence(Model):
    """What is not known any more is let in."""

    def refusal(self, ledger: Ledger, session: int) -> str | None:
        return None if session not in ledger.known else super().refusal(ledger, session)

    def may_forget(self, ledger: Ledger) -> bool:
        return True


class LetALateRequestFence(Model):
    """A broker that cannot tell a repeat from a new process."""

    def open_again(self, state: State, process: int) -> Iterator[Step]:
        yield "OpenSession", state._replace(memory=state.memory._replace(newest=3))


class CountAfterTheQuestion(Model):
    def queue_check(self, state: State) -> State:
        return state._replace(checks_sent=state.checks_sent + 1)


class AskTheDecided(Model):
    def may_ask(self, ledger: Ledger) -> bool:
        return ledger.state != NONE and ledger.checks < protocol.CHECK_MAX


class KeepMemoryInACrash(Model):
    """A recovery that takes what was not synced for durable, and loses what was."""

    def crash(self, state: State) -> Iterator[Step]:
        for name, after in super().crash(state):
            yield name, after._replace(memory=Ledger(newest=after.memory.newest, known=after.memory.known))


class ReplayADecisionTwice(Model):
    def crash(self, state: State) -> Iterator[Step]:
        for name, after in super().crash(state):
            yield name, after._replace(memory=after.memory._replace(placed=2 * after.memory.placed))


class NeverPark(Model):
    def tick(self, state: State) -> Iterator[Step]:
        yield from ()

    def park(self, state: State) -> Iterator[Step]:
        yield from ()

    def recheck(self, state: State) -> Iterator[Step]:
        yield from ()

    def end(self, state: State, session: int, outcome: str) -> Iterator[Step]:
        if session == 1:  # and its successor may not decide
            yield from super().end(state, session, outcome)


class RollBackWhileSomebodyCommits(Model):
    def tick(self, state: State) -> Iterator[Step]:
        for name, after in super().tick(state):
            yield name, self.add_response(after._replace(memory=after.memory._replace(placed=1)), COMMITTED)


MISTAKES: dict[type[Model], str] = {
    AnswerBeforeTheSync: "I",
    AcceptTheOpposite: "I",
    SayTheOppositeWasDone: "I1",
    ApplyACommitTwice: "I8",
    PlaceAtThePrepare: "I3",
    DoNotFence: "fenced",
    ForgetTheFence: "fenced",
    LetALateRequestFence: "late",
    CountAfterTheQuestion: "I11",
    AskTheDecided: "decided",
    KeepMemoryInACrash: "I1",
    ReplayADecisionTwice: "I8",
    NeverPark: "I14",
    RollBackWhileSomebodyCommits: "I",
}


@pytest.mark.invariant("I5", "I7", "I10", "I11", "I12", "I14")
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_in_the_rules_is_found(mistake: type[Model]) -> None:
    explored = protocol.explore(mistake())
    assert explored.problem is not None
    assert MISTAKES[mistake] in explored.problem
    assert explored.path, "and the shortest way there is told"


def _kinds(kind: type) -> set[type]:
    return {one for sub in kind.__subclasses__() for one in (sub, *_kinds(sub))}


def test_the_model_knows_every_command_and_event() -> None:
    """One that the code gains or loses must be thought of in the model."""
    bases = {base for kind in _kinds(Command) for base in kind.__mro__[1:]}
    assert set(COMMANDS) == {kind.__name__ for kind in _kinds(Command) if kind not in bases}
    assert set(EVENTS) == {kind.name for kind in Kind}
    assert all(hasattr(Model, rule) or rule.startswith("outside") for rule in COMMANDS.values())
    named = {rule for rules in EVENTS.values() if not rules.startswith("outside") for rule in rules.split(", ")}
    assert named <= set(COMMANDS.values())


def test_the_table_of_answers_is_that_of_the_code() -> None:
    words = {Code.OK: "ok", **{code: code.name.lower().replace("_", " ") for code in Code if code}}
    states = {TransactionState[state.upper().replace(" ", "_")]: row for state, row in protocol.ANSWER.items()}
    assert set(states) == set(TransactionState)
    for state, row in states.items():
        assert [row[outcome.name.lower()] for outcome in Outcome] == [
            words[Code(int(code))] for code in np.asarray(ending.ANSWER[state])
        ]
