"""Forgetting by the clock: who is spared, that restarts change nothing, and that its work is bounded."""

import numpy as np
import pyarrow as pa
import pytest
from broker_bench import Bench, asked
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from escrowmq.broker.writer import upkeep
from escrowmq.ledger.commands import CommitBatch, ForgetWriter
from escrowmq.model import COMMIT, message_id
from escrowmq.schemas import ID

DAY = 86_400


def commit(bench, session, writer, batch, *ids):
    return bench.do(CommitBatch(message_id(writer), batch, pa.array(ids, ID), session))


def sessions(bench):
    return bench.engine.shard.ledger.sessions.idle(1 << 62).tolist()


def live(bench, seconds):
    """Let time pass, the broker waking when it wants to."""
    end = bench.clock.now_us() + round(seconds * 1e6)
    while (wake := bench.engine.wake_us) < end:
        bench.pass_time(max(wake - bench.clock.now_us(), 0) / 1e6)
        bench.await_save()
    bench.pass_time((end - bench.clock.now_us()) / 1e6)


def test_idle_producers_go_by_themselves():
    bench = Bench(producer_expiration=1000.0)
    writer = bench.session("spark.q")
    commit(bench, writer, "q", 0)
    live(bench, 990)
    assert sessions(bench) == [writer]
    live(bench, 80)
    assert sessions(bench) == []
    assert bench.engine.shard.ledger.writers.last(message_id("q")) is None


def test_who_listens_for_questions_is_spared_also_right_after_a_restart():
    bench = Bench(producer_expiration=100.0)
    session = bench.session()
    member = bench.engine.listeners.join("g", session)
    live(bench, 500)
    assert sessions(bench) == [session]
    bench.restart()
    live(bench, 50)
    assert sessions(bench) == [session], "its process may not be back yet"
    again = bench.engine.listeners.join("g", session)
    live(bench, 500)
    assert sessions(bench) == [session]
    for one in (member, again):
        bench.engine.listeners.leave(one)
    live(bench, 70)
    assert sessions(bench) == []


@pytest.mark.invariant("I35")
def test_a_broker_that_is_restarted_every_day_forgets_too_clean_or_not():
    bench = Bench(producer_expiration=30.0 * DAY)
    bench.session()
    for day in range(30):
        assert sessions(bench) == [1], day
        live(bench, 61)
        bench.clock.advance(DAY)
        bench.restart(clean=day % 3 > 0)
    live(bench, 61)
    assert sessions(bench) == []
    bench.restart(clean=False)
    assert sessions(bench) == []
    assert bench.session() == 2


def test_what_a_member_prepared_is_asked_after_its_session_would_have_been_forgotten():
    bench = Bench(producer_expiration=100.0, check_interval=3600.0, transaction_timeout=2000.0)
    session = bench.session(instance="gone")
    [prepared] = bench.prepare(session, {})
    live(bench, 1000)
    peer = bench.session(instance="peer")
    member = bench.engine.listeners.join("g", peer)
    live(bench, 1001)
    [question] = asked(member)
    assert question["transaction"] == prepared["transaction"]
    assert bench.end(peer, COMMIT, prepared["transaction"])
    live(bench, 200)
    assert sessions(bench) == [peer]


def test_a_look_is_bounded_and_the_rest_follows_soon(monkeypatch):
    monkeypatch.setattr(upkeep, "FORGET_ROWS", 4)
    bench = Bench(producer_expiration=100.0)
    for n in range(10):
        bench.session(instance=f"{n}")
    live(bench, 59)
    bench.clock.advance(101)
    left = []
    for _ in range(4):
        bench.pass_time(upkeep.PAUSE_US / 1e6)
        left.append(len(sessions(bench)))
    assert left == [6, 2, 0, 0]


def test_many_writers_one_after_the_other_under_a_small_limit():
    bench = Bench(producer_expiration=3600.0, max_writers=70, max_groups=70, segment_bytes=1 << 20)
    for n in range(300):
        session = bench.session(f"spark.{n}")
        [prepared] = bench.prepare(session, {"body": b"x" * 100})
        assert commit(bench, session, f"{n}", 0, prepared["transaction"])["status"] == "COMMITTED"
        live(bench, 60)
    assert 55 <= len(bench.engine.shard.ledger.writers) <= 62
    before = bench.engine.shard.ledger.snapshot()["sessions"]
    bench.restart(clean=False)
    assert bench.engine.shard.ledger.snapshot()["sessions"].equals(before)


days = st.lists(
    st.one_of(
        st.tuples(st.just("work"), st.integers(0, 4)),
        st.tuples(st.just("by hand"), st.integers(0, 4)),
        st.tuples(st.just("wait"), st.integers(1, 40)),
        st.tuples(st.just("restart"), st.booleans()),
    ),
    max_size=20,
)


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(days)
def test_restarts_at_any_time_change_nothing_of_what_is_remembered(history):
    """Replay and snapshots give what a broker that never stopped has."""
    benches = [Bench(producer_expiration=10.0 * DAY, snapshot_frames=5) for _ in range(2)]
    for act, number in history:
        for steady, bench in zip((True, False), benches, strict=True):
            ledger = bench.engine.shard.ledger
            if act == "work":
                commit(bench, bench.session(f"spark.{number}"), f"{number}", bench.clock.now_us())
            elif act == "by hand" and ledger.writers.last(message_id(f"{number}")) is not None:
                bench.do(ForgetWriter(message_id(f"{number}")))
            elif act == "wait":
                bench.clock.advance(number * DAY)
                for _ in range(2):
                    bench.pass_time(61)
            elif act == "restart" and not steady:
                bench.restart(clean=number)
    tables = [bench.engine.shard.ledger.snapshot() for bench in benches]
    for name in ("sessions", "producer_groups", "writers"):
        assert tables[0][name].equals(tables[1][name], check_metadata=True)
    assert np.array_equal(sessions(benches[0]), sessions(benches[1]))
