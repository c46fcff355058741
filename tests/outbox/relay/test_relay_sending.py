"""The relay on every database: what is committed comes out, whole, in order per key, past whatever fails."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa
from relay_checks import PATIENCE, bodies, eventually, lost, numbered, out_of_order, put, rows, states

import escrowmq as mq
from escrowmq import outbox
from escrowmq.errors import Code, Misuse
from escrowmq.outbox.relay import Relay
from escrowmq.outbox.tables import State, trans_message
from escrowmq.outbox.targets.escrow import EscrowTarget
from escrowmq.testing.memory_target import MemoryTarget, Taken

MakeRelay = Callable[..., Relay]


def test_a_message_arrives_with_all_its_columns_and_its_row_leaves(
    tables: sa.Engine, target: MemoryTarget, relay: MakeRelay
) -> None:
    whole = mq.Message("orders", b"\x00\xff", key="Käse", tag="paid", properties={"a": "1", "β": "ü"}, delay=2.5)
    ids = put(tables, whole, mq.Message("points", b""), mq.Message("orders", b"x", properties={}))
    assert relay().drain()
    assert target.ids == ids
    assert target.taken[0] == Taken(ids[0], "orders", "Käse", "paid", {"a": "1", "β": "ü"}, b"\x00\xff", 2_500_000)
    assert target.taken[1] == Taken(ids[1], "points", None, None, None, b"", 0)
    assert not rows(tables)


@pytest.mark.invariant("I37")
def test_a_transaction_that_rolled_back_sends_nothing(
    tables: sa.Engine, target: MemoryTarget, relay: MakeRelay
) -> None:
    with tables.connect() as connection:
        outbox.send_tx(connection, "orders", b"never")
        connection.rollback()
    (kept,) = put(tables, ("k", "1"))
    assert relay().drain()
    assert target.ids == [kept]


def test_many_keys_in_many_batches_keep_their_order(tables: sa.Engine, target: MemoryTarget, relay: MakeRelay) -> None:
    ids: list[bytes] = []
    for start in range(0, 40, 10):
        ids += put(tables, *[m for key in range(20) for m in numbered(f"k{key}", 10, start)])
    ids += put(tables, *numbered(None, 50))
    running = relay(batch_rows=64)
    assert running.drain()
    assert sorted(target.ids) == sorted(ids)
    assert not out_of_order(target.taken)
    assert target.batches > 10
    assert running.statistics.sent == len(ids)


def test_one_key_with_a_long_row_does_not_make_small_batches(
    tables: sa.Engine, target: MemoryTarget, relay: MakeRelay
) -> None:
    put(tables, *numbered("hot", 3000))
    assert relay(batch_rows=500).drain()
    assert bodies(target.taken, "hot") == [str(n) for n in range(3000)]
    assert target.batches < 25  # lanes that are full are read deeper and deeper


def test_a_refused_message_holds_its_key_and_no_other(
    tables: sa.Engine, target: MemoryTarget, relay: MakeRelay
) -> None:
    put(tables, *numbered("bad", 3), *numbered("good", 3), *numbered(None, 2))
    target.answer = lambda taken: Code.BODY_TOO_LARGE if (taken.key, taken.body) == ("bad", b"1") else Code.OK
    running = relay(redelivery_interval=3600.0)
    assert running.drain()
    assert bodies(target.taken, "bad") == ["0"]
    assert bodies(target.taken, "good") == ["0", "1", "2"]
    assert len(bodies(target.taken, None)) == 2
    assert states(tables) == [State.RETRYING, State.HELD]
    put(tables, *numbered("bad", 2, 3))  # later ones of the key are held as they come
    assert running.drain()
    assert states(tables) == [State.RETRYING, State.HELD, State.HELD, State.HELD]
    (first, *_) = rows(tables)
    assert first.attempts == 1
    assert first.error.startswith("BODY_TOO_LARGE")
    assert running.statistics.refused == 1


@pytest.mark.invariant("I39")
def test_a_message_that_is_taken_at_the_third_try_comes_before_what_it_held(
    tables: sa.Engine, target: MemoryTarget, relay: MakeRelay
) -> None:
    put(tables, *numbered("k", 5), *numbered("other", 5))
    tries, more = [], threading.Event()

    def answer(taken: Taken) -> Code:
        if (taken.key, taken.body) == ("k", b"2"):
            tries.append(taken.message_id)
            if len(tries) > 2:
                more.wait(PATIENCE)
            return Code.OK if len(tries) > 2 else Code.UNKNOWN_TOPIC
        return Code.OK

    target.answer = answer
    with relay(redelivery_interval=0.3) as running:
        eventually(lambda: State.HELD in states(tables))
        put(tables, *numbered("k", 3, 5))
        more.set()
        eventually(lambda: not rows(tables))
    assert len(tries) == 3
    assert bodies(target.taken, "k") == [str(n) for n in range(8)]
    assert not out_of_order(target.taken)
    assert running.statistics.waiting == 0


@pytest.mark.invariant("I39")
@pytest.mark.parametrize("redeliveries", [0, 3])
def test_tries_run_out_and_the_message_waits_for_a_person(
    tables: sa.Engine, target: MemoryTarget, relay: MakeRelay, redeliveries: int
) -> None:
    (bad, *_) = put(tables, *numbered("k", 3), ("other", "0"))
    tries = []

    def answer(taken: Taken) -> Code:
        if taken.message_id == bad:
            tries.append(1)
            return Code.BODY_TOO_LARGE
        return Code.OK

    target.answer = answer
    with relay(redeliveries=redeliveries) as running:
        eventually(lambda: running.statistics.waiting)
    assert len(tries) == redeliveries + 1
    assert states(tables) == [State.WAITING, State.HELD, State.HELD]
    assert [row.id for row in outbox.attention.list_messages(tables)] == [bad]
    again = relay()  # another relay knows it from the table
    put(tables, *numbered("k", 1, 3), *numbered("other", 1, 1))
    assert again.drain()
    assert bodies(target.taken, "k") == []
    assert bodies(target.taken, "other") == ["0", "1"]
    target.answer = lambda _: Code.OK
    assert outbox.attention.retry(tables, [bad])[0].code is Code.OK
    with relay():
        again.stop()
        eventually(lambda: not rows(tables))
    assert bodies(target.taken, "k") == ["0", "1", "2", "3"]


def test_a_person_discards_the_message_and_what_it_held_goes_on(
    tables: sa.Engine, target: MemoryTarget, relay: MakeRelay
) -> None:
    (bad, *others) = put(tables, *numbered("k", 3))
    target.answer = lambda taken: Code.BAD_DELAY if taken.message_id == bad else Code.OK
    with relay(redeliveries=0) as running:
        eventually(lambda: running.statistics.waiting)
        outbox.attention.discard(tables, [bad])
        eventually(lambda: len(target.ids) == 2)
    assert target.ids == others
    eventually(lambda: states(tables) == [State.DISCARDED])


def test_with_pass_a_waiting_message_holds_nothing(tables: sa.Engine, target: MemoryTarget, relay: MakeRelay) -> None:
    (bad, *others) = put(tables, *numbered("k", 3))
    target.answer = lambda taken: Code.BAD_DELAY if taken.message_id == bad else Code.OK
    with relay(redeliveries=1, on_exhausted="pass"):
        eventually(lambda: target.ids == others)
    assert states(tables) == [State.WAITING]


@pytest.mark.invariant("I38")
def test_a_target_away_for_an_hour_costs_no_attempt_and_no_message(
    tables: sa.Engine, target: MemoryTarget, relay: MakeRelay
) -> None:
    """An hour at the default pauses is about 120 tries; here they are milliseconds apart."""
    ids = put(tables, *[m for key in range(5) for m in numbered(f"k{key}", 4)])
    target.answer = lambda _: Code.DISCONNECTED
    with relay(redeliveries=0) as running:
        eventually(lambda: running.statistics.target_failures > 150)
        ids += put(tables, *[m for key in range(5) for m in numbered(f"k{key}", 4, 4)])
        assert {row.attempts for row in rows(tables)} == {0}
        assert set(states(tables)) == {State.PENDING}
        assert running.statistics.sent == 0
        target.answer = lambda _: Code.OK
        eventually(lambda: not rows(tables))
    assert sorted(target.ids) == sorted(ids)
    assert not out_of_order(target.taken)
    assert running.statistics.refused == running.statistics.waiting == 0


def test_a_target_that_raises_is_away(tables: sa.Engine, target: MemoryTarget, relay: MakeRelay) -> None:
    put(tables, ("k", "1"))

    def fail() -> None:
        raise ConnectionResetError

    target.before = fail
    with relay() as running:
        eventually(lambda: running.statistics.target_failures > 2)
        target.before = lambda: None
        eventually(lambda: not rows(tables))


def test_one_of_several_brokers_away_stops_only_its_own_keys(
    tables: sa.Engine, target: MemoryTarget, relay: MakeRelay
) -> None:
    put(tables, *[m for key in ("here", "away") for m in numbered(key, 30)])
    target.answer = lambda taken: Code.TIMED_OUT if taken.key == "away" else Code.OK
    with relay(batch_rows=8, redelivery_interval=0.01, redeliveries=0) as running:
        eventually(lambda: len(bodies(target.taken, "here")) == 30)
        put(tables, *numbered("here", 30, 30), *numbered("away", 10, 30))
        eventually(lambda: len(bodies(target.taken, "here")) == 60)
        assert {row.attempts for row in rows(tables)} == {0}
        target.answer = lambda _: Code.OK
        eventually(lambda: not rows(tables))
    assert bodies(target.taken, "away") == [str(n) for n in range(40)]
    assert running.statistics.waiting == 0


def test_a_broker_away_does_not_hide_the_others_behind_its_backlog(
    tables: sa.Engine, target: MemoryTarget, relay: MakeRelay
) -> None:
    class Several(MemoryTarget):
        def partly_there(self) -> bool:
            return True

    several = Several()
    put(tables, *[m for n in range(64) for m in numbered(f"away{n}", 20)])
    several.answer = lambda taken: Code.TIMED_OUT if (taken.key or "").startswith("away") else Code.OK
    with relay(several, backoff=1.0, backoff_max=1.0, redelivery_interval=0.01):
        put(tables, *numbered("here", 5))
        eventually(lambda: len(bodies(several.taken, "here")) == 5)
        several.answer = lambda _: Code.OK
        eventually(lambda: not rows(tables))
    assert not out_of_order(several.taken)


def test_a_thousand_refused_messages_slow_nobody_down(
    tables: sa.Engine, target: MemoryTarget, relay: MakeRelay
) -> None:
    put(tables, *[(f"bad{n}", "0") for n in range(1000)], *numbered("bad0", 500, 1))
    target.answer = lambda taken: Code.BODY_TOO_LARGE if taken.topic == "orders" else Code.OK
    running = relay(batch_rows=100, redelivery_interval=3600.0)
    running.drain()
    ids = put(tables, *[mq.Message("points", b"", key=f"bad{n + 1000}") for n in range(200)])
    batches = target.batches
    assert running.drain()
    assert set(target.ids) == set(ids)
    assert target.batches - batches <= 8  # 200 rows, 100 a batch: what was put aside is not read again


def test_nothing_runs_without_tables(engine: sa.Engine) -> None:
    running = Relay(engine, MemoryTarget())
    for start in (running.start, running.run_once, running.drain, running.run):
        with pytest.raises(Misuse) as refused:
            start()
        assert refused.value.code is Code.NO_TABLES


def test_rows_marked_while_on_their_way_stay_as_they_are(
    tables: sa.Engine, target: MemoryTarget, relay: MakeRelay
) -> None:
    ids = put(tables, *numbered("k", 2))
    target.after = lambda: (outbox.attention.discard(tables, [ids[1]]), None)[1]
    running = relay()
    assert running.drain()
    assert states(tables) == [State.DISCARDED]
    assert not lost(ids, target.ids, tables)
    assert running.statistics.repeated == 1


def test_bodies_of_all_sizes_do_not_fill_memory(tables: sa.Engine, target: MemoryTarget, relay: MakeRelay) -> None:
    put(tables, *[mq.Message("orders", b"x" * 50_000, key=str(n)) for n in range(200)])
    assert relay(batch_bytes=1 << 20).drain()
    assert len(target.ids) == 200
    assert target.batches >= 4  # the first is a guess, the others have about 20: as many as fit
    with tables.connect() as connection:
        assert connection.scalar(sa.select(sa.func.count()).select_from(trans_message)) == 0


def test_a_row_whose_id_another_message_of_its_topic_has_waits_for_a_person(
    tables: sa.Engine, relay: MakeRelay, tmp_path: Path
) -> None:
    """The first row of the id was sent and deleted long ago; nothing may be marked sent that is stored nowhere."""
    url = f"file:{tmp_path / 'broker'}"
    target = EscrowTarget(url, timeout=60)

    def row(topic: str, body: bytes) -> mq.Message:
        return mq.Message(topic, body, message_id="order-17")

    for topic, body in (("orders", b"first"), ("points", b"elsewhere"), ("orders", b"first")):
        put(tables, row(topic, body))
        assert relay(target).drain(60)
    (other,) = put(tables, row("orders", b"another"))
    with relay(target, redeliveries=0) as running:
        eventually(lambda: running.statistics.waiting)
    (waiting,) = outbox.attention.list_messages(tables)
    assert (waiting.id, waiting.state) == (other, State.WAITING)
    assert "MESSAGE_ID_TAKEN" in str(waiting.error)
    target.close()
    with mq.connect(url) as bus:
        assert bus.admin.read("orders").read_all()["body"].to_pylist() == [b"first"]
        assert bus.admin.read("points").read_all()["body"].to_pylist() == [b"elsewhere"]
