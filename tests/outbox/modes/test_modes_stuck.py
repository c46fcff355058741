"""What a person does with rows of the modes: each act puts a row where the next redrive ends it, and is recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from modes_roles import identity, noted, offset_effect, reach_effect
from test_modes_both_reach import count, end, nothing, prepare
from test_modes_driven import answering, bodies, leave, rows
from test_modes_offsets import drain, fill

import escrowmq as mq
from escrowmq.errors import Code, Fenced, Misuse
from escrowmq.outbox.acts import list_acts, verify_acts
from escrowmq.outbox.modes import (
    BothReachConsumer,
    Compensating,
    Driven,
    OffsetConsumer,
    Redriven,
    Slot,
    commit_stuck,
    discard_prepares,
    divide,
    fence,
    list_places,
    list_prepares,
    list_stuck,
    move,
    resend_stuck,
    retry_stuck,
    rollback_stuck,
    settle_stuck,
)
from escrowmq.outbox.modes.journal import Stage
from escrowmq.outbox.tables import trans_driven, trans_prepared, trans_recv_log, trans_recv_offset

Act = Callable[..., Any]


@pytest.fixture
def local(make_database: Callable[[str], str]) -> Iterator[sa.Engine]:
    engine = sa.create_engine(make_database("local"))
    yield engine
    engine.dispose()


def stuck(bus: mq.Bus, engine: sa.Engine, t: str) -> tuple[Driven, bytes]:
    """A row whose transaction an operator rolled back: its business change is committed."""
    driven = Driven(bus, engine, "shop")
    leave(driven, t, Stage.COMMITTING)
    (transaction,) = bus.admin.transactions("open")
    bus.admin.rollback(transaction["id"])
    assert driven.redrive() == Redriven(stuck=1)
    (row,) = list_stuck(engine)
    return driven, row.id


def refused(bus: mq.Bus, engine: sa.Engine, t: str, stage: Stage) -> tuple[Driven, bytes]:
    """A row whose end no broker takes."""
    driven = Driven(bus, engine, "shop")
    leave(driven, t, stage)
    _, driven._carrier.end = answering(Code.WRONG_SHARD)  # type: ignore[method-assign]
    assert driven.redrive() == Redriven(stuck=1)
    del driven._carrier.end
    (row,) = list_stuck(engine)
    return driven, row.id


def test_a_stuck_row_says_where_it_stood_and_what_the_broker_answered(bus: mq.Bus, database: sa.Engine, t: str) -> None:
    _, id_ = stuck(bus, database, t)
    (row,) = list_stuck(database, "shop")
    assert (row.id, row.was, row.reason, row.topic, row.group) == (id_, Stage.COMMITTING, "CONFLICT", t, "shop")
    assert row.transaction is not None
    assert list_stuck(database, "another") == []
    assert list_stuck(database, after=id_) == []
    (done,) = retry_stuck(database, [id_], by="ann", why="mended")
    assert (done.code, done.state) == (Code.OK, Stage.COMMITTING)
    (act,) = list_acts(database)
    assert (act["act"], act["by"], act["why"]) == ("stuck.retry", "ann", "mended")
    assert "CONFLICT" in act["ended"]["notes"][id_.hex()]
    assert str(row.transaction) in act["ended"]["notes"][id_.hex()]


def test_what_was_refused_is_committed_once_the_cause_is_mended(bus: mq.Bus, local: sa.Engine, t: str) -> None:
    driven, id_ = refused(bus, local, t, Stage.COMMITTING)
    assert [done.code for done in retry_stuck(local, [id_, b"?" * 16])] == [Code.OK, Code.NOT_FOUND]
    assert driven.redrive() == Redriven(committed=1)
    assert len(bodies(bus, t)) == 1
    assert [done.code for done in retry_stuck(local, [id_])] == [Code.NOT_FOUND]


@pytest.mark.parametrize(
    ("act", "report", "visible"),
    [(commit_stuck, Redriven(committed=1), 1), (rollback_stuck, Redriven(rolled_back=1), 0)],
)
@pytest.mark.parametrize("was", [Stage.COMMITTING, Stage.ROLLING_BACK])
def test_a_person_decides_it_whatever_was_tried_before(
    bus: mq.Bus, local: sa.Engine, t: str, act: Act, report: Redriven, visible: int, was: Stage
) -> None:
    driven, id_ = refused(bus, local, t, was)
    assert [done.code for done in act(local, [id_])] == [Code.OK]
    assert driven.redrive() == report
    assert rows(local) == []
    assert (len(bodies(bus, t)), bus.admin.transactions("open")) == (visible, [])


def test_a_message_whose_transaction_is_lost_is_sent_anew(
    tmp_path: Any, make_database: Callable[[str], str], t: str, eventually: Callable[..., Any]
) -> None:
    engine = sa.create_engine(make_database("local"))
    with mq.connect(f"file:{tmp_path / 'data'}", default_queues=1, dedup_window=0.001, transaction_timeout=3600) as bus:
        driven, id_ = stuck(bus, engine, t)
        assert [done.code for done in commit_stuck(engine, [id_])] == [Code.OK]
        assert driven.redrive() == Redriven(stuck=1), "it was rolled back, and stays so"
        filler = bus.producer("filler")

        def anew() -> bool:
            filler.send(t + "-other", b"the window moves on with what is stored")
            assert [done.code for done in resend_stuck(engine, [id_])] == [Code.OK]
            return driven.redrive().stuck == 0

        eventually(anew)
        assert (rows(engine), len(bodies(bus, t))) == ([], 1)
    engine.dispose()


def test_a_row_of_version_3_does_not_say_what_was_tried(bus: mq.Bus, local: sa.Engine, t: str) -> None:
    _, id_ = stuck(bus, local, t)
    with local.begin() as connection:
        connection.execute(sa.update(trans_driven).values(was=None, reason=None, transaction_id=None))
    (done,) = retry_stuck(local, [id_])
    assert (done.code, done.state) == (Code.CONFLICT, Stage.STUCK)
    (done,) = rollback_stuck(local, [id_])
    assert (done.code, done.state) == (Code.OK, Stage.ABANDONED), "its transaction is learnt first"


def test_what_is_settled_is_gone_and_the_record_keeps_what_it_said(bus: mq.Bus, local: sa.Engine, t: str) -> None:
    _, id_ = stuck(bus, local, t)
    (done,) = settle_stuck(local, [id_.hex()], why="refunded")
    assert (done.code, done.state, rows(local)) == (Code.OK, None, [])
    (act,) = list_acts(local)
    assert act["what"] == {"messages": [id_.hex()]}
    assert f"shop; STUCK, was COMMITTING; CONFLICT; {t}" in act["ended"]["notes"][id_.hex()]
    assert verify_acts(local)["broken"] == []


@pytest.mark.parametrize("act", [retry_stuck, commit_stuck, rollback_stuck, resend_stuck, settle_stuck])
def test_what_is_under_way_is_left_alone(bus: mq.Bus, local: sa.Engine, t: str, act: Act) -> None:
    driven = Driven(bus, local, "shop")
    leave(driven, t, Stage.COMMITTING)
    with local.connect() as connection:
        (id_,) = connection.scalars(sa.select(trans_driven.c.id))
    (done,) = act(local, [id_])
    assert (done.code, done.state, rows(local)) == (Code.CONFLICT, Stage.COMMITTING, [Stage.COMMITTING])


def test_what_compensation_mode_cannot_send_is_listed_and_settled(bus: mq.Bus, local: sa.Engine, t: str) -> None:
    with bus.producer("plain") as producer, local.begin() as connection:
        (id_,) = Compensating(producer, local, "shop").store_tx(connection, [mq.Message(t, b"x")])
    assert list_stuck(local) == []
    assert [row.id for row in list_stuck(local, state=Stage.TO_SEND)] == [id_]
    assert [done.code for done in settle_stuck(local, [id_])] == [Code.OK]
    assert rows(local) == []


# Offsets


def test_offsets_that_nobody_owns_are_moved_and_others_are_not(bus: mq.Bus, database: sa.Engine, t: str) -> None:
    ids = fill(bus, t, 5)
    with OffsetConsumer(bus, database, "cart", t, owner="c-1") as consumer:
        assert drain(consumer) == 5
        (slot,) = consumer.positions
        (done,) = move(database, "cart", t, {slot: 2})
        assert (done.code, done.was) == (Code.CONFLICT, 5)
    missing = Slot(slot.shard, 99)
    done, absent = move(database, "cart", t, {slot: 2, missing: 0}, by="ann", why="a bad release")
    assert [(one.code, one.was) for one in (done, absent)] == [(Code.OK, 5), (Code.NOT_FOUND, None)]
    (place,) = list_places(database, "cart")
    assert (place.next_offset, place.owner, place.slot) == (2, None, slot)
    assert list_places(database, topic="another") == list_places(database, after=place) == []
    with OffsetConsumer(bus, database, "cart", t, owner="c-1") as again:
        assert drain(again) == 3
    assert noted(database, "effects") == ids + ids[2:]
    refused, moved = list_acts(database)
    assert (refused["act"], refused["ended"]["results"]) == ("offsets.move", {"CONFLICT": 1})
    assert moved["what"]["places"] == [[slot.shard, slot.queue, 1, 0, 2], [slot.shard, 99, 1, 0, 0]]
    assert moved["ended"] == {"results": {"OK": 1, "NOT_FOUND": 1}, "each": [["OK", 5], ["NOT_FOUND", None]]}
    with database.connect() as connection:
        guards = connection.scalar(sa.select(sa.func.count()).where(trans_recv_offset.c.queue == 99))
    assert guards == 0
    for wrong in (-1, True, "2"):
        with pytest.raises(Misuse):
            move(database, "cart", t, {slot: wrong})  # type: ignore[dict-item]


def test_who_let_go_of_what_was_moved_cannot_move_it_any_more(bus: mq.Bus, local: sa.Engine, t: str) -> None:
    fill(bus, t, 3)
    old = OffsetConsumer(bus, local, "cart", t, owner="c-1")
    (slot,) = old.positions
    with local.begin() as connection:  # as close() does, but that the consumer goes on
        old._rows.release(connection, old._claims.values())
    move(local, "cart", t, {slot: 0})
    with pytest.raises(Fenced):
        old.poll(offset_effect)


def test_fencing_and_dividing_are_recorded(bus: mq.Bus, local: sa.Engine, t: str) -> None:
    fill(bus, t, 2)
    silent = OffsetConsumer(bus, local, "cart", t, owner="c-1")
    (slot,) = silent.positions
    fence(local, "cart", t, [slot], by="ann", why="its machine burnt")
    assert len(divide(local, "cart", t, slot.shard, slot.queue, 2, why="too slow")) == 2
    fenced, divided = list_acts(local)
    assert (fenced["act"], fenced["by"], fenced["why"]) == ("offsets.fence", "ann", "its machine burnt")
    assert (fenced["what"]["slots"], fenced["ended"]) == ([[slot.shard, slot.queue, 1, 0]], {"owners": ["c-1"]})
    assert (divided["act"], divided["what"]["stride"], divided["ended"]) == ("offsets.divide", 2, {"slots": 2})
    with pytest.raises(Misuse):
        divide(local, "cart", t, slot.shard, 77, 2)
    assert len(list_acts(local)) == 2, "what was refused was not done, and is not recorded"


def test_a_take_over_by_a_program_is_recorded_if_it_takes_something_from_somebody(
    bus: mq.Bus, database: sa.Engine, t: str
) -> None:
    fill(bus, t, 2)
    for _ in range(2):  # nobody's, and its own
        OffsetConsumer(bus, database, "cart", t, owner="c-1", take_over=True)
    assert list_acts(database) == []
    with OffsetConsumer(bus, database, "cart", t, owner="c-2", take_over=True) as other:
        assert drain(other) == 2
        (slot,) = other.positions
    (act,) = list_acts(database)
    assert act["what"] == {"group": "cart", "topic": t, "owner": "c-2", "slots": [[slot.shard, slot.queue, 1, 0]]}
    assert (act["act"], act["ended"]) == ("offsets.take_over", {"owners": ["c-1"]})


# Stored prepares


def test_a_prepare_whose_end_does_not_come_is_discarded_and_a_late_commit_has_no_effect(database: sa.Engine) -> None:
    consumer = BothReachConsumer(database, "cart", reach_effect)
    consumer.handle([prepare(1), prepare(2)], nothing)
    first, second = list_prepares(database, "cart")
    assert {first.message_id, second.message_id} == {identity("t", 1), identity("t", 2)}
    assert list_prepares(database, "cart", after=first.message_id) == [second]
    assert list_prepares(database, "cart", older_than=3600.0) == list_prepares(database, "another") == []
    done = discard_prepares(database, "cart", [identity("t", 1), identity("t", 9)], why="its producer is dead")
    assert [one.code for one in done] == [Code.OK, Code.NOT_FOUND]
    consumer.handle([prepare(1), end(1), end(2)], nothing)
    assert noted(database, "effects") == [identity("t", 2)]
    assert (count(database, trans_prepared), count(database, trans_recv_log)) == (0, 2)
    (act,) = list_acts(database)
    assert (act["act"], act["what"]["group"]) == ("prepared.discard", "cart")
    assert act["ended"]["notes"][identity("t", 1).hex()].startswith("t; prepared_us ")
