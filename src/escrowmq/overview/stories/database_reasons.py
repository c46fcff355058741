"""Reasons why a message waits in a database: in the outbox, in a mode's table, or as a case of a compensation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from escrowmq.compensation.cases import CaseState
from escrowmq.outbox.inbox import stands
from escrowmq.outbox.modes.journal import Stage
from escrowmq.outbox.tables import State
from escrowmq.overview.stories.database_events import error_of
from escrowmq.overview.stories.known import InDatabase
from escrowmq.overview.stories.reasons import DONE, OPERATOR, PROCESS, TIME, TURN, WORK, Rank, Reason
from escrowmq.overview.values import Offer
from escrowmq.overview.words import at, many, quote, since

_OUTBOX = {
    "given up": OPERATOR(
        "outbox_waiting", "In the outbox: the relay stopped after {tries} ({error}); an operator must decide."
    ),
    "no callback": OPERATOR("outbox_waiting", "In the outbox: no callback arrived for it; an operator must decide."),
    "retrying": TIME("outbox_retrying", "In the outbox: refused in {tries} ({error}); it is sent again {due}."),
    "held": TURN("outbox_held", "In the outbox: it is held behind an earlier message of its key that failed."),
    "pending": PROCESS("outbox_pending", "In the outbox {since}: no relay has sent it yet."),
    "discarded": DONE("outbox_discarded", "It does not wait: an operator discarded its outbox row."),
    "no broker": DONE("outbox_sent", "It was sent, without a callback yet; its row is kept. No broker here has it."),
    "sent": DONE("outbox_done", "It does not wait in the outbox: it was sent."),
}

_STAGES = {
    Stage.STORED: (Rank.WORK, "its local transaction is to decide it"),
    Stage.ABANDONED: (Rank.PROCESS, "it was abandoned, and a process of the group must roll it back"),
    Stage.COMMITTING: (Rank.PROCESS, "it is decided, and a process of the group must commit it at the broker"),
    Stage.ROLLING_BACK: (Rank.PROCESS, "its local transaction failed, and a process of the group must roll it back"),
    Stage.TO_SEND: (Rank.PROCESS, "it is decided, and a process of the group must send it"),
    Stage.STUCK: (Rank.OPERATOR, "it is stuck: the broker has another decision than the row; an operator must decide"),
    Stage.DECIDED: (Rank.PROCESS, "it was decided without its broker, where a process must prepare and commit it"),
}

_TROUBLE = OPERATOR("", "Compensation {name} could not resolve it ({cause}); an operator must decide.")
_AGAIN = PROCESS("", "Compensation {name} retries it in the next run of its scheduler ({cause}).")
_CASES = {
    CaseState.STUCK: _TROUBLE,
    CaseState.CONFLICT: _TROUBLE,
    CaseState.TRYING: _AGAIN,
    CaseState.RETRY: _AGAIN,
    CaseState.SETTLED: DONE("", "It does not wait for compensation {name}: an operator settled it."),
}
_RESOLVED = DONE("", "It does not wait for compensation {name}: it was resolved.")

_SETS = {
    "taken": WORK("taken", "A scheduler of compensation {name} is about to repair it."),
    "half": TIME("announced", "Compensation {name} compares it with the handled ids, once it is old enough."),
}


def explain_in_database(row: InDatabase, at_brokers: bool, now_us: int) -> Iterator[Reason]:
    """Yield the reasons why a message waits in a database. ``at_brokers``: a broker has the message, too."""
    if row.outbox is not None:
        yield _explain_outbox(row, row.outbox, at_brokers, now_us)
    if row.driven is not None:
        yield _explain_driven(row, row.driven)
    for case in row.cases:
        yield _explain_case(row, case)
    for entry in row.sets:
        if entry["what"] in _SETS:
            yield _SETS[entry["what"]].fill(name=entry["name"])
    standing = [mark for mark in row.marks if stands(mark["topic"])]
    if standing and not at_brokers:
        groups = ", ".join(mark["consumer_group"] for mark in standing[:5])
        yield Reason(Rank.DONE, "consumed", f"It does not wait: {groups} consumed it.")


def _explain_outbox(row: InDatabase, outbox: Mapping[str, Any], at_brokers: bool, now_us: int) -> Reason:
    selection = {"database": row.database, "ids": [outbox["id"].hex()]}
    offers = tuple(Offer(f"outbox.{act}", selection) for act in ("retry", "discard", "settle"))
    facts = {"tries": many(outbox["attempts"], "attempt"), "error": quote(error_of(outbox))}
    state = State(outbox["state"])
    if state is State.RETRYING:
        facts["due"] = at(outbox["due_us"], now_us) if outbox["due_us"] > now_us else "as soon as a relay runs"
    elif state is State.PENDING:
        facts["since"] = since(outbox["created_us"], now_us)
    names = {
        State.WAITING: "given up" if outbox["sent_us"] is None else "no callback", State.RETRYING: "retrying",
        State.HELD: "held", State.PENDING: "pending", State.DISCARDED: "discarded",
        State.SENT: "sent" if at_brokers else "no broker",
    }  # fmt: skip
    possible = {State.WAITING: offers, State.RETRYING: offers, State.DISCARDED: offers[:1]}
    return _OUTBOX[names.get(state, "sent")].fill(possible.get(state, ()), **facts)


def _explain_driven(row: InDatabase, driven: Mapping[str, Any]) -> Reason:
    stage = Stage(driven["state"])
    rank, text = _STAGES[stage]
    offers: tuple[Offer, ...] = ()
    if stage is Stage.STUCK:
        if driven["was"] is not None:
            was = Stage(driven["was"]).name
            text = f"it is stuck: it was {was}, and the broker answered {driven['reason']}; an operator must decide"
        selection = {"database": row.database, "ids": [driven["id"].hex()]}
        acts = ("retry", "commit", "rollback", "resend", "settle")
        offers = tuple(Offer(f"stuck.{act}", selection) for act in acts)
    sentence = f"In the table of producer group {driven['producer_group']}: {text}."
    return Reason(rank, stage.name.lower(), sentence, offers)


def _explain_case(row: InDatabase, case: Mapping[str, Any]) -> Reason:
    state, name = CaseState(case["state"]), case["name"]
    selection = {"database": row.database, "compensation": name, "ids": [bytes(case["message_id"]).hex()]}
    sentence = _CASES.get(state, _RESOLVED)
    acts = {Rank.OPERATOR: ("retry", "settle"), Rank.PROCESS: ("settle",)}.get(sentence.rank, ())
    offers = tuple(Offer(f"compensation.{act}", selection) for act in acts)
    return sentence._replace(state=state.name.lower()).fill(offers, name=name, cause=quote(case["reason"]))
