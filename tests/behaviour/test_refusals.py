"""Bad input, wrong names, missing brokers, several brokers: clear errors with hints, and nothing changed."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading

import pytest

import escrowmq as mq
from escrowmq_lab.servers.process import pause
from forked import Forked


@pytest.mark.parametrize(
    "url",
    [
        "",
        "nothing",
        "http://a:1",
        "escrow:a:1",
        "escrow://",
        "escrow://a:0",
        "escrow://a:99999",
        "escrow://a:b",
        "escrow://a,",
        "escrow://a:1,a:1",
        "escrow://a b:1",
        "escrow://a?carrier=pigeon",
        "file:",
        "file://host/x",
        "file:a\x00b",
        None,
        7,
    ],
)
def test_bad_urls(url):
    with pytest.raises(mq.Misuse, match="BAD_URL") as raised:
        mq.connect(url)
    assert raised.value.hint


def test_bad_options(tmp_path):
    with pytest.raises(mq.Misuse, match="check_max"):
        mq.connect(f"file:{tmp_path}/d", chek_max=3)
    with pytest.raises(mq.Misuse, match="lease_seconds"):
        mq.connect(f"file:{tmp_path}/d", lease_seconds="soon")
    with pytest.raises(mq.Misuse, match="lease_seconds"):
        mq.connect("escrow://127.0.0.1:1", lease_seconds=3)
    assert not (tmp_path / "d").exists()


def test_a_folder_in_use_is_told(tmp_path):
    code = f"import escrowmq, sys; escrowmq.connect('file:{tmp_path}/d'); print('open', flush=True); sys.stdin.read()"
    process = Forked([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "open\n"
        with pytest.raises(mq.Misuse, match="FOLDER_IN_USE"):
            mq.connect(f"file:{tmp_path}/d")
    finally:
        process.communicate()


def test_nobody_there_is_unknown_in_time():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]  # nobody listens there, and nobody else gets it
        with mq.connect(f"escrow://127.0.0.1:{port}") as bus:
            with pytest.raises(mq.Unknown, match="TIMED_OUT"):
                bus.producer("p", timeout=0.3).send("t", b"x")
            assert bus.admin.health()[0]["status"] == "unreachable"


def test_limits_of_the_broker_are_known_to_the_client(own, t, g):
    broker = own(max_body_bytes=100, max_key_bytes=10)
    with broker.connect() as bus:
        producer = bus.producer(g)
        with pytest.raises(mq.Rejected, match="BODY_TOO_LARGE"):
            producer.send(t, b"x" * 101)
        with pytest.raises(mq.Rejected, match="KEY_TOO_LARGE"):
            producer.send(t, b"", key="k" * 11)
        assert producer.send(t, b"x" * 100, key="k" * 10).offset == 0


def test_a_check_immunity_over_half_retention_is_refused_by_that_name(own, t, g):
    broker = own(half_retention=60.0, max_delay=3600.0)
    with broker.connect() as bus:
        producer = bus.producer(g)
        producer.checker(lambda check: mq.ROLLBACK)
        with pytest.raises(
            mq.Rejected, match=r"BAD_DELAY: check_immunity 61 is not within 0 to 60.0 seconds"
        ) as raised:
            producer.prepare(t, b"x", check_immunity=61)
        assert raised.value.hint == "half_retention"
        with pytest.raises(mq.Rejected, match=r"delay 3601 is not within 0 to 3600.0 seconds") as raised:
            producer.prepare(t, b"x", delay=3601)
        assert raised.value.hint == "max_delay"
        assert producer.prepare(t, b"x", check_immunity=60).transaction_id is not None


def test_rows_are_refused_one_by_one(bus, t, g):
    import pyarrow as pa

    table = pa.table({"topic": [t, "%bad", t], "body": [b"1", b"2", b"3"], "delay_us": [0, 0, -5]})
    receipts = bus.producer(g).send_batch(table)
    assert receipts.codes.tolist() == [0, mq.Code.BAD_TOPIC_NAME, mq.Code.BAD_DELAY]
    assert bus.admin.read(t).read_all().num_rows == 1


@pytest.mark.invariant("I46")
def test_a_slice_is_judged_by_its_own_rows(bus, t, g):
    import pyarrow as pa

    pairs = pa.array([[("a", None)], [("a", "b")], None, [("c", None)]], pa.map_(pa.utf8(), pa.utf8()))
    table = pa.table({"topic": [t] * 4, "body": [b"0", b"1", b"2", b"3"], "properties": pairs})
    producer = bus.producer(g)
    for wrong in (table, table.slice(0, 2), table.slice(2)):
        with pytest.raises(mq.Rejected, match="BAD_BATCH: column 'properties' has null names or values"):
            producer.send_batch(wrong)
    assert producer.send_batch(table.slice(1, 2)).ok
    assert bus.admin.read(t).read_all()["properties"].to_pylist() == [[("a", "b")], None]


def test_unknown_topics_without_auto_creation(own, t, g):
    broker = own(auto_create_topics=False)
    with broker.connect() as bus:
        producer = bus.producer(g)
        with pytest.raises(mq.Rejected, match="UNKNOWN_TOPIC"):
            producer.send(t, b"x")
        bus.admin.create_topic(t, 2)
        assert producer.send(t, b"x", queue=1).queue == 1
        with pytest.raises(mq.Rejected, match="BAD_QUEUE"):
            producer.send(t, b"x", queue=2)
        with pytest.raises(mq.Rejected, match="ALREADY_EXISTS"):
            bus.admin.create_topic(t)
        (topic,) = [topic for topic in bus.admin.topics() if topic["name"] == t]
        assert len(topic["queues"]) == 2


def test_reading_what_is_not_there(bus, t):
    with pytest.raises(mq.Rejected, match="UNKNOWN_TOPIC"):
        bus.admin.read(t)
    assert bus.admin.lookup(key=t) == []
    with pytest.raises(mq.Misuse):
        bus.admin.lookup()


def test_the_admin_sees_groups_and_producers(bus, t, g):
    producer = bus.producer(g, checker=lambda check: mq.UNKNOWN)
    assert producer.wait_until_listening()
    receipt = producer.prepare(t, b"x", key=g)
    bus.consumer(g, [t], tags="a", ordered=True)
    (found,) = [group for group in bus.admin.groups() if group["name"] == g]
    assert (found["topics"], found["tags"], found["ordered"]) == ([t], ["a"], True)
    (mine,) = [one for one in bus.admin.producers() if one["group"] == g]
    assert (mine["transactional"], mine["members"], mine["open"]) == (True, 1, 1)
    (listed,) = bus.admin.transactions(state="open", group=g)
    assert listed["id"] == str(receipt.transaction_id)
    assert bus.admin.transactions(group=g, older_than=3600) == []
    shown = bus.admin.transaction(receipt.transaction_id)
    assert [message["body"] for message in shown["messages"]] == [b"x"]
    assert shown["timeline"][0]["event"] == "prepared"
    assert bus.admin.health()[0]["status"] == "ok"
    producer.rollback(receipt.transaction_id)


def test_two_brokers_share_a_topic_and_pin_transactions(make_broker, kind, t, g, drain):
    brokers = [make_broker(kind) for _ in range(2)]
    if brokers[0].is_served:
        bus = mq.connect("escrow://" + ",".join(broker.address for broker in brokers))
    else:
        from escrowmq.client.bus import Bus
        from escrowmq.connecting import links

        bus = Bus([links(broker.url, broker.options())[0] for broker in brokers])
    with bus:
        producer = bus.producer(g, checker=lambda check: mq.COMMIT)
        shards = set()
        for i in range(20):
            with producer.transaction() as txn:
                txn.send(t, f"{i} a".encode(), key=f"key {i}")
                txn.send(t, f"{i} b".encode(), key=f"other {i}")
            shards.add(txn.id.shard)
        assert len(shards) == 2
        receipts = producer.prepare_batch([mq.Message(t, str(i).encode(), key=str(i)) for i in range(100)])
        assert {receipt.transaction_id.shard for receipt in receipts} == shards
        assert producer.end_batch(receipts.transactions, mq.COMMIT).ok
        undecided = producer.prepare(t, b"checked", key="x")
        found = drain(bus.consumer(g, [t]), 141)
        assert len({message.body for message in found}) == 141
        assert undecided.message_id in {message.message_id for message in found}
        assert len(bus.admin.topics()) == 2
        with pytest.raises(mq.Rejected, match="WRONG_SHARD"):
            producer.commit(mq.TransactionId(12345, 1, 1))


def is_sent(producer, topic, body, message_id):
    """Whether the broker answers in the producer's short time."""
    try:
        producer.send(topic, body, message_id=message_id)
    except mq.Unknown:
        return False
    return True


def test_a_paused_broker_is_unknown_in_time_and_a_repeat_under_the_same_id_is_the_same_message(
    make_broker, served_kind, t, g
):
    broker = make_broker(served_kind)
    with broker.connect() as bus:
        producer = bus.producer(g, qos=2, timeout=0.5)
        while not is_sent(producer, t, b"1", f"{t}-1"):
            pass
        pause(broker.process.pid)
        try:
            with pytest.raises(mq.Unknown, match="TIMED_OUT") as raised:
                producer.send(t, b"2")
        finally:
            broker.process.send_signal(signal.SIGCONT)
        patient = bus.producer(g, qos=2)
        receipt = patient.send(t, b"2", message_id=raised.value.message_id)
        assert receipt.message_id == raised.value.message_id
        assert sorted(bus.admin.read(t).read_all().column("body").to_pylist()) == [b"1", b"2"]


@pytest.mark.invariant("I1", "I8")
def test_a_served_broker_killed_under_load_loses_and_doubles_nothing(make_broker, served_kind, t, g, drain):
    broker = make_broker(served_kind, transaction_timeout=3600)
    with broker.connect() as bus:
        producer = bus.producer(g, checker=lambda check: mq.UNKNOWN, timeout=120.0)
        committed, stop = [], threading.Event()

        def work(index):
            i = 0
            while not stop.is_set():
                body = f"{index}-{i}".encode()
                with producer.transaction() as txn:
                    txn.send(t, body)
                committed.append(body)
                i += 1

        threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
        for thread in threads:
            thread.start()
        for _ in range(3):
            before = len(committed)
            while len(committed) < before + 50:
                stop.wait(0.01)
            broker.restart(kill=True)
        stop.set()
        for thread in threads:
            thread.join()
        found = [message.body for message in drain(bus.consumer(g, [t]), len(committed))]
        assert sorted(found) == sorted(committed)
