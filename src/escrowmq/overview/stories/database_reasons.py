"""Why a message waits in a database: in the outbox, in a delivery mode's table, or as a case of a compensation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from escrowmq.compensation.cases import CaseState
from escrowmq.outbox.inbox import stands
from escrowmq.outbox.modes.journal import Stage
from escrowmq.outbox.tables import State
from escrowmq.overview.stories.database_events import error_of
from escrowmq.overview.stories.known import InDatabase
from escrowmq.overview.stories.reasons import Rank, Reason
from escrowmq.overview.values import Offer
from escrowmq.overview.words import at, many, quoted, since


def in_database(row: InDatabase, at_brokers: bool, now_us: int) -> Iterator[Reason]:
    """Why it waits in a database. ``at_brokers``: a broker has it."""
    if row.outbox is not None:
        yield _outbox(row, row.outbox, at_brokers, now_us)
    if row.driven is not None:
        yield _driven(row, row.driven)
    for case in row.cases:
        yield _case(row, case)
    for entry in row.sets:
        if entry["what"] == "taken":
            yield Reason(Rank.HANDS, "taken", f"A scheduler of compensation {entry['name']} is about to repair it.")
        elif entry["what"] == "half":
            yield Reason(
                Rank.TIME,
                "announced",
                f"Compensation {entry['name']} compares it with what was handled, once it is old enough.",
            )
    standing = [mark for mark in row.marks if stands(mark["topic"])]
    if standing and not at_brokers:
        groups = ", ".join(mark["consumer_group"] for mark in standing[:5])
        yield Reason(Rank.DONE, "consumed", f"It does not wait: {groups} consumed it.")


def _outbox(row: InDatabase, outbox: Mapping[str, Any], at_brokers: bool, now_us: int) -> Reason:
    state, attempts, why = State(outbox["state"]), outbox["attempts"], quoted(error_of(outbox))
    offers = tuple(
        Offer(f"outbox.{act}", {"database": row.database, "ids": [outbox["id"].hex()]})
        for act in ("retry", "discard", "settle")
    )
    tries = many(attempts, "try", "tries")
    if state is State.WAITING:
        what = (
            "no callback came for it"
            if outbox["sent_us"] is not None
            else f"the relay gave it up after {tries} ({why})"
        )
        return Reason(Rank.PERSON, "outbox_waiting", f"In the outbox: {what}; a person decides.", offers)
    if state is State.RETRYING:
        when = (
            f"it is tried again {at(outbox['due_us'], now_us)}"
            if outbox["due_us"] > now_us
            else "it is tried again as soon as a relay runs"
        )
        return Reason(Rank.TIME, "outbox_retrying", f"In the outbox: refused in {tries} ({why}); {when}.", offers)
    if state is State.HELD:
        return Reason(
            Rank.LINE,
            "outbox_held",
            "In the outbox: it is held behind an earlier message of its key, which could not be sent.",
        )
    if state is State.PENDING:
        text = f"In the outbox {since(outbox['created_us'], now_us)}: no relay has sent it yet."
        return Reason(Rank.SOMEBODY, "outbox_pending", text)
    if state is State.DISCARDED:
        return Reason(
            Rank.DONE,
            "outbox_discarded",
            "It does not wait: a person decided that its outbox row is not to be sent.",
            offers[:1],
        )
    if state is State.SENT and not at_brokers:
        return Reason(
            Rank.DONE,
            "outbox_sent",
            "It was sent, its row is kept, and no callback has come yet; none of these brokers has it.",
        )
    return Reason(Rank.DONE, "outbox_done", "It does not wait in the outbox: it was sent.")


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


def _driven(row: InDatabase, driven: Mapping[str, Any]) -> Reason:
    stage = Stage(driven["state"])
    rank, text = _STAGES[stage]
    offers: tuple[Offer, ...] = ()
    if stage is Stage.STUCK:
        if driven["was"] is not None:
            text = f"it is stuck: it stood at {Stage(driven['was']).name}, and the broker answered {driven['reason']}; a person decides"
        acts = ("retry", "commit", "rollback", "resend", "settle")
        about = {"database": row.database, "ids": [driven["id"].hex()]}
        offers = tuple(Offer(f"stuck.{act}", about) for act in acts)
    return Reason(
        rank, stage.name.lower(), f"In the table of producer group {driven['producer_group']}: {text}.", offers
    )


def _case(row: InDatabase, case: Mapping[str, Any]) -> Reason:
    state, name = CaseState(case["state"]), case["name"]
    selection = {"database": row.database, "compensation": name, "ids": [bytes(case["message_id"]).hex()]}
    offers = (Offer("compensation.retry", selection), Offer("compensation.settle", selection))
    if state in (CaseState.STUCK, CaseState.CONFLICT):
        return Reason(
            Rank.PERSON,
            state.name.lower(),
            f"Compensation {name} could not deal with it ({quoted(case['reason'])}); a person decides.",
            offers,
        )
    if state in (CaseState.TRYING, CaseState.RETRY):
        return Reason(
            Rank.SOMEBODY,
            state.name.lower(),
            f"Compensation {name} tries it again with the next run of its scheduler ({quoted(case['reason'])}).",
            offers[1:],
        )
    word = "a person settled it" if state is CaseState.SETTLED else "it was dealt with after all"
    return Reason(Rank.DONE, state.name.lower(), f"It does not wait for compensation {name}: {word}.")
