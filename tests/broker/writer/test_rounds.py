"""Rounds: what is merged, in which order it runs, and that nothing is answered before it is durable."""

import errno

import pytest
from broker_bench import Bench, end, prepare, send, settle
from hypothesis import given
from hypothesis import strategies as st

from escrowmq.broker.writer.rounds import MERGE_BYTES, Request, arrange
from escrowmq.errors import Code, EscrowError, Overloaded, Rejected, Unknown
from escrowmq.ledger.commands import CreateTopic, OpenSession, Receive
from escrowmq.model import COMMIT, ROLLBACK
from escrowmq.testing.disks import FaultDisk


def test_small_neighbours_of_one_kind_become_one_command_and_get_their_own_answers():
    bench = Bench()
    one, other = bench.session(instance="1"), bench.session(instance="2")
    sequence = bench.engine.log.next_sequence
    futures = [bench.engine.submit(prepare(s, {"key": f"{n}"})) for n in range(10) for s in (one, other)]
    bench.engine.step()
    positions = [f.result(timeout=0)["position"][0].as_py() for f in futures]
    assert len(set(positions)) == 20
    assert bench.engine.log.next_sequence == sequence + 2, "one frame for the new topic, one for all messages"


@pytest.mark.invariant("I19")
def test_answers_of_one_kind_keep_the_order_of_their_requests():
    bench = Bench()
    session = bench.session()
    futures = [bench.engine.submit(prepare(session, *[{} for _ in range(n)])) for n in (1, 3, 2)]
    bench.engine.step()
    rows = [f.result(timeout=0).num_rows for f in futures]
    firsts = [f.result(timeout=0)["position"][0].as_py() for f in futures]
    assert rows == [1, 3, 2]
    assert firsts == sorted(firsts)


@pytest.mark.invariant("I19")
@given(st.lists(st.tuples(st.sampled_from(["send", "prepare", "end", "topic"]), st.integers(1, 3)), max_size=20))
def test_arranging_keeps_every_request_once_and_each_kind_in_order(kinds):
    make = {
        "send": lambda n: send(0, *[{} for _ in range(n)]),
        "prepare": lambda n: prepare(1, *[{} for _ in range(n)]),
        "end": lambda n: end(1, COMMIT, *[bytes(16)] * n),
        "topic": lambda n: CreateTopic(f"t{n}"),
    }
    requests = [Request(make[kind](n)) for kind, n in kinds]
    works = arrange(requests)
    ran = [request for work in works for request in work.requests]
    assert sorted(map(id, ran)) == sorted(map(id, requests))
    for kind in {type(r.command) for r in requests}:
        assert [r for r in ran if type(r.command) is kind] == [r for r in requests if type(r.command) is kind]
    for work in works:
        if len(work.requests) > 1:
            assert work.command.batch.num_rows == sum(r.command.batch.num_rows for r in work.requests)


def test_large_requests_are_not_merged():
    requests = [Request(send(0, {"body": bytes(MERGE_BYTES - 1000)})) for _ in range(3)]
    assert [len(work.requests) for work in arrange(requests)] == [1, 1, 1]


def test_one_refused_request_does_not_spoil_the_round_of_others():
    bench = Bench(max_topics=1, default_queues=1)
    good = bench.engine.submit(send(0, {"topic": "a"}))
    bad = bench.engine.submit(CreateTopic("a b"))
    bench.engine.step()
    assert good.result(timeout=0)["code"].to_pylist() == [Code.OK]
    with pytest.raises(Rejected) as caught:
        bad.result(timeout=0)
    assert caught.value.code == Code.BAD_TOPIC_NAME


def test_a_receive_of_the_same_round_sees_what_the_round_sent():
    bench = Bench()
    bench.subscribe()
    waiting = bench.engine.receive(Receive("c", 1, 10, 1_000_000), 60_000_000)
    bench.engine.step()
    assert not waiting.done()
    sent = bench.engine.submit(send(0, {}, {}))
    bench.engine.step()
    assert sorted(waiting.result(timeout=0).positions.tolist()) == sorted(
        sent.result(timeout=0)["position"].to_pylist()
    )


def test_a_cancelled_receive_gets_no_lease():
    bench = Bench()
    bench.subscribe()
    waiting = bench.engine.receive(Receive("c", 1, 10, 1_000_000), 60_000_000)
    bench.engine.step()
    assert bench.engine.receiving() == 1
    assert waiting.cancel()
    bench.do(send(0, {}))
    assert bench.engine.receiving() == 0
    assert len(bench.receive(member=2)) == 1


def test_a_receive_ends_empty_when_its_time_is_over():
    bench = Bench()
    bench.subscribe()
    waiting = bench.engine.receive(Receive("c", 1, 10, 1_000_000), 500_000)
    bench.engine.step()
    wake = bench.engine.wake_us
    assert wake == bench.clock.now_us() + 500_000
    bench.pass_time(0.5)
    assert len(waiting.result(timeout=0).leases) == 0


@pytest.mark.invariant("I1", "I34")
def test_a_failed_sync_fails_every_answer_and_stops_the_shard():
    """I34"""
    bench = Bench()
    session = bench.session()
    bench.disk.fail_next_sync = True
    futures = [bench.engine.submit(prepare(session, {})), bench.engine.submit(OpenSession("h", "i", False))]
    futures.append(bench.engine.look(lambda: 1))
    bench.engine.step()
    for future in futures:
        with pytest.raises(Unknown) as caught:
            future.result(timeout=0)
        assert caught.value.code == Code.SHARD_STOPPED
    assert bench.engine.status == "stopped"
    later = bench.engine.submit(prepare(session, {}))
    bench.engine.step()
    with pytest.raises(Unknown):
        later.result(timeout=0)


@pytest.mark.invariant("I34")
def test_after_a_failed_sync_a_restart_shows_only_whole_frames():
    bench = Bench()
    session = bench.session()
    (row,) = bench.prepare(session, {"body": b"safe"})
    bench.disk.fail_next_sync = True
    bench.engine.submit(prepare(session, {"body": b"perhaps"}))
    bench.engine.step()
    bench.restart(clean=False)
    assert bench.end(session, COMMIT, row["transaction"]) == [Code.COMMITTED]


@pytest.mark.invariant("I1")
def test_what_was_answered_survives_a_crash_and_what_was_not_may_not():
    """I1"""
    bench = Bench()
    session = bench.session()
    rows = bench.prepare(session, {"body": b"1"}, {"body": b"2"})
    assert bench.end(session, COMMIT, rows[0]["transaction"]) == [Code.COMMITTED]
    bench.restart(clean=False)
    assert bench.end(session, ROLLBACK, rows[0]["transaction"]) == [Code.CONFLICT]
    assert bench.end(session, ROLLBACK, rows[1]["transaction"]) == [Code.ROLLED_BACK]


@pytest.mark.invariant("I33")
def test_a_full_disk_refuses_writers_lets_acks_and_decisions_go_on_and_recovers():
    """I33"""
    bench = Bench(FaultDisk(budget=3 << 20))
    session = bench.session()
    bench.subscribe()
    bench.do(send(0, {"body": b"x"}))
    rows, body = [], bytes(100_000)

    def fill() -> None:
        while True:
            rows.extend(bench.prepare(session, {"body": body}))

    with pytest.raises(Overloaded) as caught:
        fill()
    assert caught.value.code == Code.DISK_FULL
    assert caught.value.retry_after > 0
    assert bench.engine.status == "full"
    positions = bench.engine.log.next_position
    with pytest.raises(Overloaded):
        bench.prepare(session, {"body": body})
    assert bench.engine.log.next_position == positions, "a refused write changes nothing"
    leased = bench.do(Receive("c", 1, 1, 60_000_000))
    assert bench.do(settle("c", leased))["code"].to_pylist() == [Code.OK]
    assert bench.end(session, COMMIT, rows[0]["transaction"]) == [Code.COMMITTED]
    bench.disk.budget = 30 << 20
    assert bench.prepare(session, {"body": body})[0]["code"] == Code.OK
    assert bench.engine.status == "ok"


def test_a_full_disk_is_looked_at_again_without_anybody_writing():
    bench = Bench(FaultDisk(budget=2 << 20))
    while bench.engine.status == "ok":
        bench.engine.submit(send(0, {"body": bytes(10_000)}))
        bench.engine.step()
    bench.pass_time(1)
    assert bench.engine.status == "full"
    bench.disk.budget = 30 << 20
    assert bench.engine.wake_us <= bench.clock.now_us() + 1_000_000
    bench.pass_time(1)
    assert bench.engine.status == "ok"


def test_a_writer_that_dies_leaves_nobody_waiting(monkeypatch):
    bench = Bench()
    bench.subscribe()
    parked = bench.engine.receive(Receive("c", 1, 1, 1_000_000), 60_000_000)
    bench.engine.step()
    monkeypatch.setattr(bench.engine.shard, "finishing", lambda pairs: 1 / 0)
    future = bench.engine.submit(send(0, {}))
    bench.engine.start()
    for waiting in (future, parked):
        assert waiting.exception(timeout=60).code == Code.SHARD_STOPPED
    assert bench.engine.submit(send(0, {})).exception(timeout=60).code == Code.SHARD_STOPPED
    assert bench.engine.status == "stopped"
    bench.engine.stop()


@pytest.mark.invariant("I35")
def test_too_much_waiting_is_refused_at_once():
    """I35"""
    bench = Bench(max_waiting_bytes=10_000)
    futures = [bench.engine.submit(send(0, {"body": bytes(3000)})) for _ in range(10)]
    refused = [f for f in futures if f.done()]
    assert 6 <= len(refused) <= 8
    problem = refused[0].exception()
    assert isinstance(problem, Overloaded)
    assert problem.code == Code.QUEUE_FULL
    bench.engine.step()
    assert all(f.result(timeout=0)["code"][0].as_py() == 0 for f in futures if f not in refused)
    assert bench.engine.waiting == (0, 0)


def test_a_write_error_without_a_cause_of_space_stops_the_shard():
    bench = Bench()
    bench.disk.failures = {bench.disk.operations + 1: errno.EIO}
    with pytest.raises(EscrowError) as caught:
        bench.do(send(0, {}))
    assert caught.value.code == Code.SHARD_STOPPED


def test_early_answers_come_also_when_the_sync_fails():
    bench = Bench()
    future = bench.engine.submit(send(0, {}), early=True)
    bench.disk.fail_next_sync = True
    bench.engine.step()
    assert future.result(timeout=0)["code"].to_pylist() == [Code.OK]


def test_snapshots_bound_the_replay_and_restart_to_the_same_state():
    """I28, I29"""
    bench = Bench(snapshot_bytes=20_000)
    session = bench.session()
    for n in range(30):
        bench.prepare(session, *[{"body": bytes(500), "key": f"{n}"} for _ in range(5)])
        bench.await_save()
    before = bench.engine.shard.ledger.snapshot()
    names = [n for n in bench.disk.list() if "snapshot" in n]
    assert names
    bench.restart(clean=False)
    after = bench.engine.shard.ledger.snapshot()
    assert {k: v for k, v in before.items() if k != "ledger"} == {k: v for k, v in after.items() if k != "ledger"}


def test_retention_drops_old_segments_and_expires_what_is_undecided_in_them():
    bench = Bench(retention=3600.0, half_retention=1000.0, segment_bytes=1 << 16)
    session = bench.session()
    (lost,) = bench.prepare(session, {"body": b"undecided"})
    for _ in range(30):
        bench.do(send(0, {"body": bytes(10_000)}))
    size = len([n for n in bench.disk.list() if "segment" in n or n.endswith(".log")])
    bench.clock.advance(2 * 3600)
    bench.do(send(0, {"body": b"new"}))
    for _ in range(4):  # mark, save, drop
        bench.pass_time(61)
        bench.await_save()
    assert bench.engine.log.first_position > lost["position"]
    assert len([n for n in bench.disk.list() if "segment" in n or n.endswith(".log")]) < size
    assert bench.end(session, COMMIT, lost["transaction"]) in ([Code.EXPIRED], [Code.UNKNOWN_TRANSACTION])
    bench.restart(clean=False)
    assert bench.end(session, COMMIT, lost["transaction"]) in ([Code.EXPIRED], [Code.UNKNOWN_TRANSACTION])


def test_retention_also_runs_on_a_broker_that_is_restarted_all_the_time():
    bench = Bench(retention=3600.0, segment_bytes=1 << 16)
    for _ in range(20):
        bench.do(send(0, {"body": bytes(10_000)}))
    bench.clock.advance(2 * 3600)
    bench.do(send(0, {"body": b"new"}))
    for _ in range(3):
        bench.restart()
        bench.pass_time(2)
        bench.await_save()
        bench.pass_time(1)
    assert bench.engine.log.first_position > 0


@pytest.mark.invariant("I36")
def test_broker_time_goes_on_from_the_log_when_the_wall_clock_was_set_back():
    """I36"""
    bench = Bench()
    bench.do(send(0, {}))
    last = bench.engine.log.last_time_us
    bench.engine.stop()
    bench.clock = type(bench.clock)(last - 3_600_000_000)
    bench.engine = bench._open()
    bench.do(send(0, {}))
    assert bench.engine.log.last_time_us >= last


def test_changed_settings_are_an_event_of_the_log():
    bench = Bench(check_max=3)
    assert bench.engine.shard.ledger.rules.check_max == 3
    bench.settings = type(bench.settings)(segment_bytes=1 << 20, check_max=7)
    bench.restart()
    assert bench.engine.shard.ledger.rules.check_max == 7
    positions = bench.engine.log.next_position
    bench.restart()
    assert bench.engine.log.next_position == positions + 1, "only the opening itself"


def test_stopping_finishes_what_waits_and_refuses_what_comes():
    bench = Bench()
    future = bench.engine.submit(send(0, {}))
    bench.engine.stop()
    assert future.result(timeout=0)["code"].to_pylist() == [Code.OK]
    late = bench.engine.submit(send(0, {}))
    assert late.exception(timeout=0).code == Code.SHARD_STOPPED
    bench.engine.stop()


def test_many_small_frames_bring_a_snapshot_too():
    bench = Bench(snapshot_frames=40)
    for _ in range(60):
        bench.do(send(0, {"topic": "t", "body": b"x"}))
    bench.engine.upkeep.finish()
    assert any(name.endswith(".snapshot") for name in bench.disk.list())


def test_a_snapshot_of_another_version_is_passed_over_while_the_frames_are_there(monkeypatch):
    """I29, I32"""
    bench = Bench()
    bench.do(send(0, {"topic": "t", "body": b"x"}))
    monkeypatch.setattr("escrowmq.ledger.ledger.FORMAT", 99)
    bench.restart()
    monkeypatch.undo()
    before = bench.engine.shard.ledger.snapshot()["queue_entries"]
    bench.restart(clean=False)
    assert bench.engine.shard.ledger.snapshot()["queue_entries"].equals(before)


@pytest.mark.invariant("I20")
def test_receives_of_a_group_are_served_in_the_order_in_which_they_were_asked():
    """I20: a consumer with several receives under way must not be given a later message first."""
    bench = Bench()
    bench.subscribe(topic="t")
    first = bench.engine.receive(Receive("c", 1, 1, 1_000_000), 60_000_000)
    bench.engine.step()  # it waits
    bench.do(send(0, *({"topic": "t", "queue": 0, "body": b"%d" % n} for n in range(2))))
    second = bench.engine.receive(Receive("c", 1, 1, 1_000_000), 60_000_000)
    bench.engine.step()
    assert [f.result(timeout=0).offsets.tolist() for f in (first, second)] == [[0], [1]]


@pytest.mark.invariant("I20")
def test_a_receive_that_arrives_with_the_message_does_not_overtake_one_that_waits():
    """I20"""
    bench = Bench()
    bench.subscribe(topic="t")
    first = bench.engine.receive(Receive("c", 1, 1, 1_000_000), 60_000_000)
    bench.engine.step()
    bench.engine.submit(send(0, *({"topic": "t", "queue": 0, "body": b"%d" % n} for n in range(2))))
    second = bench.engine.receive(Receive("c", 1, 1, 1_000_000), 60_000_000)
    bench.engine.step()
    assert [f.result(timeout=0).offsets.tolist() for f in (first, second)] == [[0], [1]]
