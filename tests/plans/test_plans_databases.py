"""Plans over rows of a database: outbox, stuck rows, cases; a kill is told from the database's own record."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa

import escrowmq as mq
from escrowmq import outbox
from escrowmq.compensation.cases import CaseState, list_cases
from escrowmq.outbox import State, send_tx
from escrowmq.outbox.acts import list_acts, verify_acts
from escrowmq.outbox.attention import list_messages
from escrowmq.outbox.modes import list_stuck
from escrowmq.outbox.modes.journal import Stage
from escrowmq.outbox.tables import trans_compensation_case, trans_driven, trans_message
from escrowmq.plans import Plans, Ramp
from escrowmq.platform.failpoints import Failpoint, arm

AT_ONCE = Ramp((100.0,), 0.0)


class Killed(BaseException):
    """What a kill is here."""


def kill() -> None:
    raise Killed


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    arm()


def waiting(engine: sa.Engine, count: int) -> list[str]:
    """Outbox rows that wait for a person; every third for another reason. Their ids."""
    outbox.migrate(engine)
    with engine.begin() as connection:
        ids = [send_tx(connection, "orders", b"x", key=f"k{number}") for number in range(count)]
        for number, identity in enumerate(ids):
            reason = "TIMED_OUT: no answer in 30 s" if number % 3 else f"BODY_TOO_LARGE: {number} bytes"
            change = sa.update(trans_message).where(trans_message.c.id == identity)
            connection.execute(change.values(state=State.WAITING.value, attempts=5, due_us=number + 1, error=reason))
    return [identity.hex() for identity in ids]


def states(engine: sa.Engine) -> dict[str, State]:
    return {row.id.hex(): row.state for row in list_messages(engine, state=None, limit=10_000)}


def test_rows_of_the_outbox_are_chosen_looked_at_and_sent_again(engine: sa.Engine, plans: Plans) -> None:
    ids = waiting(engine, 9)
    plan = plans.make(
        engine, "outbox.retry", {"state": "waiting", "error": "TIMED_OUT: no answer in # s"}, why="it is back"
    )
    assert {row["id"] for row in plans.rows(plan.id)} == {one for number, one in enumerate(ids) if number % 3}
    with engine.begin() as connection:  # one was seen to, one was tried again and waits again, one is gone
        change = sa.update(trans_message).where(trans_message.c.id == bytes.fromhex(ids[1]))
        connection.execute(change.values(due_us=99))
        connection.execute(sa.delete(trans_message).where(trans_message.c.id == bytes.fromhex(ids[2])))
    expected = {"done": 4, "already": 1, "changed": 1}
    assert plans.dry_run(plan.id, engine).by_outcome == expected
    assert set(states(engine).values()) == {State.WAITING}
    report = plans.run(plan.id, engine, ramp=Ramp(pause=0.0))
    assert (report.state, report.outcomes) == ("finished", expected)
    now = states(engine)
    assert {now[one] for number, one in enumerate(ids) if number % 3 and number > 2} == {State.PENDING}
    assert {now[one] for number, one in enumerate(ids) if number % 3 == 0} == {State.WAITING}
    acts = list_acts(engine)
    assert all(act["why"].startswith(f"plan {plan.id} ") and act["why"].endswith(": it is back") for act in acts)
    assert not verify_acts(engine)["broken"]
    for act, count in (("outbox.discard", 4), ("outbox.settle", 0)):
        try:
            made = plans.make(engine, act, {"containing": "" if act == "outbox.discard" else "nothing so"})
        except mq.Rejected as problem:
            assert (problem.code.name, count) == ("NOT_FOUND", 0)  # noqa: PT017
            continue
        assert made.rows == count
        assert plans.run(made.id, engine, ramp=AT_ONCE).outcomes == {"done": count}


@pytest.mark.invariant("I44")
@pytest.mark.parametrize("point", ["outbox.act-done", "outbox.act-committed", "plans.done"])
def test_killed_around_an_act_each_row_is_done_once(engine: sa.Engine, plans: Plans, point: str) -> None:
    ids = waiting(engine, 12)
    plan = plans.make(engine, "outbox.discard", {})
    arm(Failpoint(point, 2, kill))
    with pytest.raises(Killed):
        plans.run(plan.id, engine, ramp=AT_ONCE, batch=5)
    arm()
    outbox.attention.settle(engine, [ids[11]])
    report = plans.run(plan.id, engine, ramp=AT_ONCE, batch=5)
    assert (report.state, report.outcomes) == ("finished", {"done": 11, "changed": 1})
    named = [one for act in list_acts(engine) if act["act"] == "outbox.discard" for one in act["what"]["messages"]]
    assert sorted(named) == sorted(ids[:11])


def test_stuck_rows_and_cases(engine: sa.Engine, plans: Plans) -> None:
    outbox.migrate(engine)
    with engine.begin() as connection:
        for number in range(6):
            row: dict[str, Any] = {
                "id": number.to_bytes(16, "big"), "producer_group": "shop", "state": int(Stage.STUCK),
                "was": int(Stage.COMMITTING), "reason": "CONFLICT", "topic": "orders", "body": b"", "attempts": 1,
                "created_us": 5, "shard": 1, "delay_us": 0,
            }  # fmt: skip
            connection.execute(sa.insert(trans_driven).values(row))
            case = {
                "name": "cart", "message_id": number.to_bytes(16, "big"), "state": CaseState.STUCK.value, "attempts": 3,
                "first_us": 1, "changed_us": 2, "reason": f"no such order {number}",
            }  # fmt: skip
            connection.execute(sa.insert(trans_compensation_case).values(case))
    plan = plans.make(engine, "stuck.settle", {"group": "shop", "state": "stuck"})
    assert plan.counts["reason"] == {"CONFLICT": 6}
    outbox.modes.retry_stuck(engine, [number.to_bytes(16, "big") for number in range(2)])
    assert plans.dry_run(plan.id, engine).by_outcome == {"done": 4, "already": 2}
    assert plans.run(plan.id, engine, ramp=AT_ONCE).outcomes == {"done": 4, "already": 2}
    assert not list_stuck(engine)
    with pytest.raises(mq.Misuse, match="compensation"):
        plans.make(engine, "compensation.retry", {})
    cases = plans.make(
        engine, "compensation.retry", {"compensation": "cart", "state": "stuck", "reason": "no such order #"}
    )
    assert (cases.rows, cases.settings) == (6, {"compensation": "cart"})
    assert plans.run(cases.id, engine, ramp=AT_ONCE).outcomes == {"done": 6}
    assert {case.state for case in list_cases(engine, "cart", states=None)} == {CaseState.RETRY}


def test_a_plan_for_another_kind_of_place_is_refused(engine: sa.Engine, plans: Plans, bus: mq.Bus) -> None:
    outbox.migrate(engine)
    for where, act, selection in (
        (bus, "outbox.retry", {}),
        (engine, "transactions.commit", {}),
        (engine, "outbox.retry", {"state": "done"}),
        (engine, "outbox.retry", {"database": "sqlite:///other.db"}),
    ):
        with pytest.raises(mq.Misuse):
            plans.make(where, act, selection)  # type: ignore[arg-type]
