"""Nodes of one shard: who leads, what a standby says, take-over, fencing, hand-over."""

import threading
import time
from contextlib import closing
from itertools import islice

import pytest
from nodes import PATIENCE, SILENCE, OneNode, Shard, until

import escrowmq as mq
from escrowmq.broker.replicas import node
from escrowmq.broker.writer import upkeep
from escrowmq.errors import Code, EscrowError, Misuse, Overloaded, Unknown, error
from escrowmq.ledger.ledger import Ledger
from escrowmq.platform.disk import RealDisk
from escrowmq.testing.ledgers import outgoing
from escrowmq.testing.partitions import MemoryKafka
from escrowmq.wire import Exchange


@pytest.fixture
def two(tmp_path):
    """Of which the standby takes over what is released, however long the leader stands still meanwhile."""
    with closing(Shard(tmp_path, "a", "b", silence=10 * PATIENCE)) as shard:
        yield shard


@pytest.fixture
def quick(tmp_path):
    """Of which the standby takes over after a second without a sign of life."""
    with closing(Shard(tmp_path, "a", "b")) as shard:
        yield shard


def same(one: Ledger, other: Ledger) -> bool:
    """Table by table."""
    left, right = one.snapshot(), other.snapshot()
    return left.keys() == right.keys() and all(left[name].equals(right[name]) for name in left)


def bodies(node: OneNode, group: str = "g") -> list[bytes]:
    with node.bus() as bus, bus.consumer(group, "t") as consumer:
        stored = bus.admin.read("t", columns=["offset"]).read_all().num_rows
        messages = islice(consumer.messages(idle_timeout=PATIENCE), stored)
        return [message.body for message in (*messages, *consumer.messages(idle_timeout=0.3))]


def test_one_leads_and_the_other_says_who(two) -> None:
    a, b = two.nodes
    assert (a.leads, b.leads) == (True, False)
    with a.bus() as bus:
        bus.producer("p").send("t", b"one")
    two.level()
    refusals = []
    for call in (
        lambda: b.link().action("topics.list", {}, 60),
        lambda: b.link().read({"topic": "t"}),
        lambda: b.link().watch(1, print),
    ):
        with pytest.raises(Overloaded) as refused:
            call()
        refusals.append(refused.value)
    assert {(problem.code, problem.hint) for problem in refusals} == {(Code.NOT_LEADER, a.url)}
    until(lambda: b.door.action("hello", {}).get("leader") == a.url)
    leading, following = a.door.action("hello", {}), b.door.action("hello", {})
    assert (leading["role"], following["role"]) == ("leader", "standby")
    assert following["replicas"] == [b.url, a.url]
    assert leading["shard"] == following["shard"]
    assert leading["epoch"] == following["epoch"]
    assert b.door.action("health", {})["status"] == "standby"
    assert a.url in b.door.action("health", {})["reason"]
    assert a.door.action("health", {})["status"] == "ok"
    numbers = [node.door.action("stats", {}) for node in (a, b)]
    assert [one["leads"] for one in numbers] == [1, 0]
    assert [one["take_overs_total"] for one in numbers] == [1, 0]
    assert 0 <= numbers[1]["log_silent_seconds"] < 60


@pytest.mark.invariant("I1")
def test_a_clean_stop_hands_over_at_once_with_everything(two) -> None:
    a, b = two.nodes
    with a.bus() as bus:
        bus.producer("p").send_batch([mq.Message("t", b"%d" % i) for i in range(100)])
        half = bus.producer("h", unasked=True).prepare("t", b"half")
        ledger = a.door.engine.shard.ledger
        a.stop()
    two.led_by(b)
    with b.bus() as bus:
        assert bus.admin.commit(half.transaction_id) is Code.COMMITTED
    assert sorted(bodies(b)) == sorted([b"%d" % i for i in range(100)] + [b"half"])
    assert ledger.next_position < b.door.engine.shard.ledger.next_position


@pytest.mark.invariant("I1")
def test_a_leader_that_is_cut_off_answers_nothing_and_follows_again(quick) -> None:
    a, b = quick.nodes
    with a.bus() as bus:
        bus.producer("p").send("t", b"before")
    quick.level()
    cut = a.partitions[-1]
    a.change(cut_off=True)
    answers: list[object] = []
    batch = outgoing([{"topic": "t", "body": b"in doubt"}])
    a.link().exchange(Exchange.SEND, batch, {}).add_done_callback(lambda done: answers.append(done.exception()))
    quick.led_by(b)
    with b.bus() as bus:
        bus.producer("q").send("t", b"after")
    for partition in cut.opened:
        partition.change(cut_off=False)
    until(lambda: not a.leads, "the fenced leader goes on")
    until(lambda: len(answers) == 1)
    assert getattr(answers[0], "code", None) is Code.SHARD_STOPPED
    quick.level()
    assert bodies(b) == [b"before", b"after"]
    until(lambda: a.door.action("hello", {}).get("leader") == b.url)


@pytest.mark.invariant("I1")
def test_looks_of_a_leader_that_cannot_prove_it_are_refused(quick) -> None:
    a, _ = quick.nodes
    with a.bus() as bus:
        bus.producer("p").send("t", b"one")
    a.change(cut_off=True)
    time.sleep(SILENCE)  # the last proof grows old: this is what the bound says
    with pytest.raises(Overloaded) as refused:
        a.link().action("topics.list", {}, 60)
    assert refused.value.code is Code.NOT_LEADER


def test_step_down_hands_over_and_is_in_the_record(two) -> None:
    a, b = two.nodes
    with a.bus() as bus:
        bus.producer("p").send("t", b"one")
    two.level()
    epoch = a.door.action("hello", {})["epoch"]
    with pytest.raises(EscrowError) as wrong:
        a.door.action("step_down", {"epoch": epoch - 1})
    assert wrong.value.code is Code.BAD_REQUEST
    with pytest.raises(Overloaded) as elsewhere:
        b.door.action("step_down", {"epoch": epoch})
    assert elsewhere.value.code is Code.NOT_LEADER
    said = a.door.action("step_down", {"epoch": epoch, "by": "ann", "why": "service"})
    assert (said["leader"], said["epoch"]) == (b.url, epoch)
    two.led_by(b)  # its claim is in the log; it opens its door when it has followed up to it
    assert said["seconds"] < PATIENCE
    (act,) = b.door.action("acts.list", {})["acts"]
    assert (act["act"], act["by"], act["why"]) == ("step_down", "ann", "service")
    assert act["ended"] == {"epoch": epoch, "stepped_down": True}
    assert not a.leads


def test_a_hand_over_back_is_as_quick_as_the_first(two, monkeypatch) -> None:
    monkeypatch.setattr(node, "HOLDS_BACK", 1000.0)  # longer than anybody waits here
    a, b = two.nodes
    for leader, standby in ((a, b), (b, a)):
        two.led_by(leader)
        two.level()
        said = leader.door.action("step_down", {"epoch": leader.door.action("hello", {})["epoch"]})
        assert said["leader"] == standby.url
    two.led_by(a)


def test_who_stepped_down_leads_again_if_nobody_else_does(tmp_path) -> None:
    shard = Shard(tmp_path, "a")
    try:
        (a,) = shard.nodes
        epoch = a.door.action("hello", {})["epoch"]
        said = a.door.action("step_down", {"epoch": epoch})
        assert said["leader"] == a.url
        assert a.door.action("hello", {})["epoch"] == epoch + 1
    finally:
        shard.close()


def test_two_standbys_and_one_takes_over(tmp_path) -> None:
    shard = Shard(tmp_path, "a", "b", "c")
    try:
        a, b, c = shard.nodes
        with a.bus() as bus:
            bus.producer("p").send_batch([mq.Message("t", b"%d" % i) for i in range(10)])
        shard.level()
        a.stop()
        shard.nodes.remove(a)

        def send_one_more() -> bool:
            """On a busy machine the first to lead may lose to the other before it is asked."""
            if (leader := shard.leader) is None:
                return False
            try:
                with leader.bus() as bus:
                    bus.producer("p").send("t", b"10", message_id="ten")  # stored once
            except Unknown:
                return False
            return True

        until(send_one_more)
        shard.level()
        assert [b.leads, c.leads].count(True) == 1
        assert sorted(map(int, bodies(shard.leader))) == list(range(11))
    finally:
        shard.close()


def test_the_warm_ledger_is_the_one_that_a_replay_gives(two) -> None:
    a, b = two.nodes
    with a.bus() as bus:
        bus.producer("p").send_batch([mq.Message("t", b"%d" % i, key=str(i % 7)) for i in range(500)])
        bus.producer("h", unasked=True).prepare("t", b"half")
    assert len(bodies(a)) == 500
    two.level()
    a.stop()
    two.led_by(b)
    from escrowmq.broker.writer.recovery import fold

    engine = b.door.engine
    warm = engine.shard.ledger
    engine.look(lambda: None).result()
    assert engine.look(lambda: same(warm, fold(engine.log).ledger)).result()


def test_a_standby_that_is_behind_the_cut_begins_anew_and_takes_over(tmp_path) -> None:
    settings = {"segment_bytes": 1 << 16, "retention": 1, "dedup_window": 1}
    shard = Shard(tmp_path, "a", "b", silence=5 * SILENCE, **settings)
    try:
        a, b = shard.nodes
        b.stop()
        with a.bus() as bus:
            for _ in range(8):
                bus.producer("p").send_batch([mq.Message("t", bytes(1000)) for _ in range(50)])
        a.stop()
        shard.nodes.clear()
        a = shard.add("a")  # retention runs soon after a start
        until(lambda: shard.kafka.log.first > 0, "retention cuts nothing")
        shard.led_by(a)
        with a.bus() as bus:
            half = bus.producer("h", unasked=True).prepare("t", b"half")
        b = shard.add("b")
        shard.level()
        a.stop()
        shard.led_by(b)
        with b.bus() as bus:
            assert bus.admin.commit(half.transaction_id) is Code.COMMITTED
            assert b"half" in bus.admin.read("t").read_all()["body"].to_pylist()
    finally:
        shard.close()


def test_kafka_away_changes_no_leader(quick) -> None:
    a, b = quick.nodes
    with a.bus() as bus:
        bus.producer("p").send("t", b"one")
    quick.level()
    quick.kafka.set_away(True)
    until(lambda: "Kafka does not answer" in b.door.action("health", {})["reason"])
    assert a.door.action("health", {})["status"] in ("ok", "standby")
    quick.kafka.set_away(False)
    quick.led_by(a)
    with a.bus() as bus:
        bus.producer("p").send("t", b"two")
    quick.level()
    assert (a.leads, b.leads) == (True, False)


def events(caplog, name: str) -> list[str]:
    return [r.getMessage() for r in caplog.records if getattr(r, "facts", {}).get("event") == name]


def test_a_node_starts_while_kafka_is_away_says_so_once_and_follows(tmp_path, caplog, monkeypatch) -> None:
    monkeypatch.setattr("escrowmq.log.kafka.replica.CHECK_SECONDS", 0.05)
    monkeypatch.setattr("escrowmq.broker.replicas.node.PAUSE_SECONDS", 0.01)
    shard = Shard(tmp_path)
    try:
        shard.kafka.set_away(True)
        a = shard.add("a")
        until(lambda: len(a.partitions) > 3, "it tries no more")
        health = a.door.action("health", {})
        assert health["status"] == "standby"
        assert "memory/0 does not answer" in health["reason"]
        with pytest.raises(Overloaded) as refused:
            a.door.action("hello", {})
        assert refused.value.code is Code.NOT_LEADER
        assert a.node.failure is None
        assert len(events(caplog, "term")) == 1
        shard.kafka.set_away(False)
        shard.led_by(a)
        assert events(caplog, "over") == ["it follows the log again"]
    finally:
        shard.close()


def test_a_node_that_waits_for_kafka_stops_at_once(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("escrowmq.log.kafka.replica.CHECK_SECONDS", PATIENCE)
    shard = Shard(tmp_path)
    shard.kafka.set_away(True)
    a = OneNode.__new__(OneNode)
    began = threading.Thread(target=lambda: a.__init__("a", tmp_path, shard.kafka, shard.settings, SILENCE))  # type: ignore[misc]
    began.start()
    until(lambda: bool(getattr(a, "partitions", None)), "it does not open")
    before = time.monotonic()
    a.stop()
    began.join()
    assert time.monotonic() - before < PATIENCE  # it would be waited for until then
    assert a.node.failure is None


@pytest.mark.parametrize("code", [Code.UNKNOWN_TOPIC, Code.DENIED, Code.BAD_SETTING])
def test_what_is_wrong_at_the_start_ends_it(tmp_path, code) -> None:
    kafka = MemoryKafka()
    kafka.refusal = error(code, "no")
    with pytest.raises(EscrowError) as refused:
        Shard(tmp_path, "a", kafka=kafka)
    assert refused.value.code is code


@pytest.mark.parametrize("code", [Code.UNKNOWN_TOPIC, Code.DENIED])
def test_what_a_node_is_refused_that_has_followed_may_pass(tmp_path, code, caplog) -> None:
    shard = Shard(tmp_path, "a")
    try:
        (a,) = shard.nodes
        shard.kafka.refusal = error(code, "no")
        a.change(failure=RuntimeError("the producer ended"))
        until(lambda: code.name in a.door.action("health", {}).get("reason", ""))
        shard.kafka.refusal = None
        shard.led_by(a)
    finally:
        shard.close()


def test_the_hosts_of_kafka_may_be_called_otherwise(tmp_path) -> None:
    """It is the same cluster, partition and mirror: nothing is fetched again. Another cluster is refused."""
    shard = Shard(tmp_path)
    try:
        shard.kafka.hosts = "kafka://k1:9092,k2:9092/"
        a = shard.add("a")
        shard.led_by(a)
        with a.bus() as bus:
            bus.producer("p").send("t", b"one")
        a.stop()
        first = {name for name in RealDisk(a.folder, read_only=True).list() if name.endswith(".segment")}
        shard.kafka.hosts = "kafka://k2:9092,k3:9092/"
        shard.nodes.clear()
        a = shard.add("a")
        shard.led_by(a)
        assert bodies(a) == [b"one"]
        assert first <= set(RealDisk(a.folder, read_only=True).list())
        a.stop()
        shard.nodes.clear()
        shard.kafka.hosts, shard.kafka.cluster = "kafka://k4:9092/", "another"
        with pytest.raises(Misuse) as refused:
            shard.add("a")
        assert refused.value.code is Code.BAD_SETTING
    finally:
        shard.close()


def test_a_log_that_fails_makes_the_leader_follow_and_lead_again(tmp_path, monkeypatch) -> None:
    """Though nobody appends: it is noticed by a sign of life."""
    monkeypatch.setattr(upkeep, "FIRST_US", upkeep.RETENTION_US)
    shard = Shard(tmp_path, "a")
    try:
        (a,) = shard.nodes
        with a.bus() as bus:
            bus.producer("p").send("t", b"one")
        a.change(failure=RuntimeError("the producer ended"))
        until(lambda: not a.leads)
        shard.led_by(a)
        assert bodies(a) == [b"one"]
    finally:
        shard.close()


def test_a_folder_of_something_else_ends_the_start(tmp_path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "letters.txt").write_text("dear")
    with pytest.raises(Misuse) as refused:
        Shard(tmp_path, "a")
    assert refused.value.code is Code.NOT_A_DATA_FOLDER


def test_the_standbys_folder_is_read_while_it_follows(two) -> None:
    """As any folder in use: as of the last frame that a later one says is durable."""
    a, b = two.nodes
    with a.bus() as bus:
        for count in range(3):
            bus.producer("p").send_batch([mq.Message("t", b"%d" % i) for i in range(10 * count, 10 * count + 10)])
    two.level()
    with mq.connect(f"file:{b.folder}", read_only=True) as bus:
        (topic,) = bus.admin.topics()
        assert topic["name"] == "t"
    assert RealDisk(b.folder, read_only=True).in_use()
    assert not b.leads
