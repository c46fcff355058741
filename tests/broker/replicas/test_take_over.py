"""Take-overs that are struck themselves: by a death between two steps, by a frozen disk, by two settings of silence;
and a leader that was asleep.
"""

import logging
import threading
import time
from itertools import islice

import pytest
from nodes import PATIENCE, OneNode, Shard, until

import escrowmq as mq
from escrowmq.broker.replicas.proof import LeaderProof
from escrowmq.errors import Code
from escrowmq.log.kafka.kafka_log import KafkaLog
from escrowmq.platform import clock, failpoints
from escrowmq.platform.failpoints import Failpoint
from escrowmq.testing.ledgers import outgoing
from escrowmq.wire import Exchange


class Dies(BaseException):
    """The node's thread ends here, and does nothing more."""


def bodies(node: OneNode) -> list[bytes]:
    with node.bus() as bus, bus.consumer("g", "t") as consumer:
        stored = bus.admin.read("t", columns=["offset"]).read_all().num_rows
        messages = islice(consumer.messages(idle_timeout=PATIENCE), stored)
        return [message.body for message in (*messages, *consumer.messages(idle_timeout=0.3))]


@pytest.fixture
def failpoint():
    yield failpoints.arm
    failpoints.arm()


@pytest.mark.invariant("I1")
@pytest.mark.parametrize("place", ["kafka.claim_sent", "kafka.claimed", "node.claimed"])
def test_a_node_that_dies_within_its_take_over_is_followed_by_the_next(tmp_path, failpoint, place) -> None:
    """Its claim is in the log, and nothing else of it: whoever comes next claims behind it."""
    shard = Shard(tmp_path, "a", "b", "c")
    try:
        a = shard.nodes[0]
        with a.bus() as bus:
            bus.producer("p").send_batch([mq.Message("t", b"%d" % number) for number in range(20)])
            half = bus.producer("h", unasked=True).prepare("t", b"half")
        shard.level()
        died = threading.Event()

        def die() -> None:
            died.set()
            raise Dies

        failpoint(Failpoint(place, 1, die))
        a.change(cut_off=True)
        assert died.wait(60)
        until(lambda: any(node.node.ended for node in shard.nodes[1:]))
        (dead,) = (node for node in shard.nodes[1:] if node.node.ended)
        (left,) = (node for node in shard.nodes[1:] if node is not dead)
        shard.led_by(left)
        with left.bus() as bus:
            assert bus.admin.commit(half.transaction_id) is Code.COMMITTED
            bus.producer("q").send("t", b"after")
        assert sorted(bodies(left)) == sorted([*(b"%d" % number for number in range(20)), b"half", b"after"])
        assert not dead.leads
    finally:
        shard.close()


def test_both_nodes_started_anew_at_one_moment_have_one_leader_and_everything(tmp_path) -> None:
    shard = Shard(tmp_path, "a", "b")
    try:
        with shard.nodes[0].bus() as bus:
            bus.producer("p").send_batch([mq.Message("t", b"%d" % number) for number in range(20)])
        shard.level()
        for node in shard.nodes:
            node.change(cut_off=True)  # nothing more of them is stored, as if they were killed
        for node in shard.nodes:
            node.stop()
        shard.nodes.clear()
        for name in "ab":
            shard.add(name)
        until(lambda: shard.leader is not None)
        shard.level()
        assert [node.leads for node in shard.nodes].count(True) == 1
        leader = shard.leader
        assert leader is not None
        assert sorted(bodies(leader), key=int) == [b"%d" % number for number in range(20)]
    finally:
        shard.close()


def test_others_go_on_before_a_leader_that_stops_has_saved_its_snapshot(tmp_path, monkeypatch) -> None:
    shard = Shard(tmp_path, "a", "b", silence=10 * PATIENCE)
    saves, real = [], KafkaLog.save_snapshot
    try:
        a, b = shard.nodes
        with a.bus() as bus:
            bus.producer("p").send("t", b"one")
        shard.level()

        def save(log, *args):
            until(lambda: b.leads, "it waits for the snapshot of the one that stops")
            saves.append(log)
            return real(log, *args)

        monkeypatch.setattr(KafkaLog, "save_snapshot", save)
        a.stop()
        assert b.leads
        assert len(saves) == 1
        monkeypatch.setattr(KafkaLog, "save_snapshot", real)
        assert bodies(b) == [b"one"]
    finally:
        monkeypatch.setattr(KafkaLog, "save_snapshot", real)
        shard.close()


@pytest.mark.invariant("I1")
def test_of_two_settings_of_silence_the_longer_counts_and_is_told(tmp_path, caplog) -> None:
    """A leader answers looks until half of its own silence has passed: nobody claims by the clock before that is
    over."""
    shard = Shard(tmp_path, "a", silence=3.0)
    try:
        (a,) = shard.nodes
        shard.silence = 1.0
        b = shard.add("b")
        shard.level()
        a.change(cut_off=True)
        with caplog.at_level(logging.INFO, "escrowmq.events"):
            shard.led_by(b)
        facts = [record.facts for record in caplog.records if hasattr(record, "facts")]
        (claimed,) = [fact for fact in facts if fact["event"] == "claims"]
        assert claimed["silent_for"] >= 3.0
    finally:
        shard.close()
    (told,) = [record.facts for record in caplog.records if getattr(record, "facts", {}).get("event") == "silence"]
    assert (told["its"], told["own"]) == (3.0, 1.0)


class Log:
    """As much of a log as a proof asks for."""

    def __init__(self) -> None:
        self.proved_at, self.fenced = clock.uptime(), False


@pytest.mark.invariant("I1")
@pytest.mark.skipif(clock._BOOT_TIME is None, reason="this system has no clock that goes on while it sleeps")
def test_a_proof_grows_old_while_the_machine_is_suspended(monkeypatch) -> None:
    proof, real, asleep = LeaderProof(Log(), 2.0), time.clock_gettime, 0.0  # type: ignore[arg-type]
    monkeypatch.setattr(
        time, "clock_gettime", lambda which: real(which) + (asleep if which == time.CLOCK_BOOTTIME else 0.0)
    )
    assert proof.is_fresh()
    asleep = 3600.0  # Python's monotonic clock stands still meanwhile
    assert not proof.is_fresh()
    assert proof.age >= 3600.0


@pytest.mark.skipif(clock._BOOT_TIME is None, reason="this system has no clock that goes on while it sleeps")
def test_a_leader_that_wakes_looks_for_a_new_proof_before_it_answers(tmp_path, monkeypatch) -> None:
    shard = Shard(tmp_path, "a", "b")
    real, asleep = time.clock_gettime, 0.0
    try:
        a = shard.nodes[0]
        with a.bus() as bus:
            bus.producer("p").send("t", b"one")
        a.change(cut_off=True)
        monkeypatch.setattr(
            time, "clock_gettime", lambda which: real(which) + (asleep if which == time.CLOCK_BOOTTIME else 0.0)
        )
        asleep = 3600.0
        with pytest.raises(mq.Overloaded) as refused:
            a.link().action("topics.list", {}, 5)
        assert refused.value.code is Code.NOT_LEADER
    finally:
        monkeypatch.undo()
        shard.close()


@pytest.mark.invariant("I1")
def test_what_was_under_way_at_a_frozen_leader_is_not_answered_by_it_when_it_wakes(tmp_path) -> None:
    """Its records are held for as long as the silence, and then stored behind the claim."""
    shard = Shard(tmp_path, "a", "b")
    try:
        a, b = shard.nodes
        with a.bus() as bus:
            bus.producer("p").send("t", b"before")
        shard.level()
        a.change(slow=True)
        answers: list[object] = []
        sent = a.link().exchange(Exchange.SEND, outgoing([{"topic": "t", "body": b"in doubt"}]), {})
        sent.add_done_callback(lambda done: answers.append(done.exception()))
        shard.led_by(b)
        a.change(slow=False)
        until(lambda: bool(answers) and not a.leads)
        assert getattr(answers[0], "code", None) is Code.SHARD_STOPPED
        shard.level()
        assert bodies(b) == [b"before"]
    finally:
        shard.close()
