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
from escrowmq.overview.stories.reasons import Rank, Reason, Sentence
from escrowmq.overview.values import Offer
from escrowmq.overview.words import at, many, quoted, since

_OUTBOX = {
    "given up": Sentence(
        Rank.PERSON,
        "outbox_waiting",
        "In the outbox: the relay gave it up after {tries} ({error}); a person decides.",
    ),
    "no callback": Sentence(Rank.PERSON, "outbox_waiting", "In the outbox: no callback came for it; a person decides."),
    "retrying": Sentence(
        Rank.TIME, "outbox_retrying", "In the outbox: refused in {tries} ({error}); it is tried again {due}."
    ),
    "held": Sentence(
        Rank.LINE,
        "outbox_held",
        "In the outbox: it is held behind an earlier message of its key, which could not be sent.",
    ),
    "pending": Sentence(Rank.SOMEBODY, "outbox_pending", "In the outbox {since}: no relay has sent it yet."),
    "discarded": Sentence(
        Rank.DONE, "outbox_discarded", "It does not wait: a person decided that its outbox row is not to be sent."
    ),
    "no broker": Sentence(
        Rank.DONE,
        "outbox_sent",
        "It was sent, its row is kept, and no callback has come yet; none of these brokers has it.",
    ),
    "sent": Sentence(Rank.DONE, "outbox_done", "It does not wait in the outbox: it was sent."),
}

_STAGES = {
    Stage.STORED: (Rank.HANDS, "its local transaction is to decide it"),
    Stage.ABANDONED: (Rank.SOMEBODY, "it was given up, and a process of the group is to roll it back"),
    Stage.COMMITTING: (Rank.SOMEBODY, "it is decided, and a process of the group is to commit it at the broker"),
    Stage.ROLLING_BACK: (Rank.SOMEBODY, "its local transaction failed, and a process of the group is to roll it back"),
    Stage.TO_SEND: (Rank.SOMEBODY, "it is decided, and a process of the group is to send it"),
    Stage.STUCK: (Rank.PERSON, "it is stuck: the broker holds another decision than the row, so a person looks"),
    Stage.DECIDED: (
        Rank.SOMEBODY,
        "it was decided while its broker was away, and is to be prepared and committed there",
    ),
}

_TROUBLE = Sentence(Rank.PERSON, "", "Compensation {name} could not deal with it ({cause}); a person decides.")
_AGAIN = Sentence(Rank.SOMEBODY, "", "Compensation {name} tries it again with the next run of its scheduler ({cause}).")
_CASES = {
    CaseState.STUCK: _TROUBLE,
    CaseState.CONFLICT: _TROUBLE,
    CaseState.TRYING: _AGAIN,
    CaseState.RETRY: _AGAIN,
    CaseState.SETTLED: Sentence(Rank.DONE, "", "It does not wait for compensation {name}: a person settled it."),
}
_DEALT_WITH = Sentence(Rank.DONE, "", "It does not wait for compensation {name}: it was dealt with after all.")

_SETS = {
    "taken": Sentence(Rank.HANDS, "taken", "A scheduler of compensation {name} is about to repair it."),
    "half": Sentence(
        Rank.TIME, "announced", "Compensation {name} compares it with what was handled, once it is old enough."
    ),
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
    facts = {"tries": many(outbox["attempts"], "try", "tries"), "error": quoted(error_of(outbox))}
    match State(outbox["state"]):
        case State.WAITING:
            return _OUTBOX["given up" if outbox["sent_us"] is None else "no callback"].fill(offers, **facts)
        case State.RETRYING:
            later = outbox["due_us"] > now_us
            due = at(outbox["due_us"], now_us) if later else "as soon as a relay runs"
            return _OUTBOX["retrying"].fill(offers, due=due, **facts)
        case State.HELD:
            return _OUTBOX["held"].fill()
        case State.PENDING:
            return _OUTBOX["pending"].fill(since=since(outbox["created_us"], now_us))
        case State.DISCARDED:
            return _OUTBOX["discarded"].fill(offers[:1])
        case State.SENT if not at_brokers:
            return _OUTBOX["no broker"].fill()
    return _OUTBOX["sent"].fill()


def _explain_driven(row: InDatabase, driven: Mapping[str, Any]) -> Reason:
    stage = Stage(driven["state"])
    rank, text = _STAGES[stage]
    offers: tuple[Offer, ...] = ()
    if stage is Stage.STUCK:
        if driven["was"] is not None:
            was = Stage(driven["was"]).name
            text = f"it is stuck: it stood at {was}, and the broker answered {driven['reason']}; a person decides"
        selection = {"database": row.database, "ids": [driven["id"].hex()]}
        acts = ("retry", "commit", "rollback", "resend", "settle")
        offers = tuple(Offer(f"stuck.{act}", selection) for act in acts)
    sentence = f"In the table of producer group {driven['producer_group']}: {text}."
    return Reason(rank, stage.name.lower(), sentence, offers)


def _explain_case(row: InDatabase, case: Mapping[str, Any]) -> Reason:
    state, name = CaseState(case["state"]), case["name"]
    selection = {"database": row.database, "compensation": name, "ids": [bytes(case["message_id"]).hex()]}
    sentence = _CASES.get(state, _DEALT_WITH)
    acts = {Rank.PERSON: ("retry", "settle"), Rank.SOMEBODY: ("settle",)}.get(sentence.rank, ())
    offers = tuple(Offer(f"compensation.{act}", selection) for act in acts)
    return sentence._replace(state=state.name.lower()).fill(offers, name=name, cause=quoted(case["reason"]))
