"""Links that meet brokers that do not lead: those that say so, those that say otherwise, those that are silent."""

from __future__ import annotations

import threading
import time

import pytest

import escrowmq as mq
from escrowmq.client.links import seeking
from escrowmq.connecting import links
from escrowmq.errors import Code
from escrowmq_lab.servers.escrow import serving
from not_leading import Standby

NOBODY = 4_000_000_000
"""A session that no broker knows."""


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    """A broker that leads, as a process."""
    with serving(tmp_path_factory.mktemp("leads")) as server:
        yield server


@pytest.fixture(scope="module")
def shard(broker):
    with mq.connect(broker.url) as bus:
        return bus.admin.hello()[0]["shard"]


@pytest.fixture
def standby(broker, shard):
    with Standby(shard, broker.url) as made:
        yield made


@pytest.fixture
def unhurried(monkeypatch):
    """All brokers are heard before one of them is chosen, and what one of them refused counts until the end."""
    for name in ("ANSWER_SECONDS", "CONNECT_SECONDS", "FIRST_SECONDS", "GRACE_SECONDS", "SILENT_SECONDS"):
        monkeypatch.setattr(seeking, name, 60.0)
    monkeypatch.setattr(seeking, "CALM_SECONDS", 3600.0)


def listed(*urls):
    return "escrow://" + "|".join(url.removeprefix("escrow://") for url in urls)


def test_whoever_is_given_a_standby_works_with_the_leader(broker, standby, t, g):
    with mq.connect(standby.url) as bus:
        producer, consumer = bus.producer(g, checker=lambda check: mq.COMMIT), bus.consumer(g, t)
        with producer.transaction() as txn:
            txn.send(t, b"x")
        assert [message.body for message in consumer.receive(10, wait=60)] == [b"x"]
        assert bus.admin.hello()[0].get("role", "leader") == "leader"
        assert [row["status"] for row in bus.admin.health()] == ["ok"]
    assert standby.refused == 0  # it was asked who leads, and nothing else


def test_exactly_a_standby_can_be_asked_who_it_is(standby):
    with mq.connect(f"{standby.url}?replicas=listed") as bus:
        assert bus.admin.hello()[0]["role"] == "standby"


def test_two_shards_in_the_list_of_one_are_refused_whatever_is_called_first(broker, shard, t, g):
    with Standby(shard + 1, broker.url) as stranger, mq.connect(listed(broker.url, stranger.url)) as bus:
        for call in (
            lambda: bus.producer(g).send(t, b"x"),
            lambda: bus.consumer(g, t),
            bus.admin.topics,
            lambda: bus.admin.read(t),
        ):
            with pytest.raises(mq.Misuse, match="BAD_URL") as raised:
                call()
            assert f"{shard:08x}" in raised.value.message
            assert f"{shard + 1:08x}" in raised.value.message
    with mq.connect(broker.url) as bus:
        assert t not in {topic["name"] for topic in bus.admin.topics()}


def test_one_broker_in_two_shards_of_a_url_is_refused(broker, standby, g, t):
    other = broker.url.replace("127.0.0.1", "localhost")
    with (
        mq.connect(f"{listed(broker.url, standby.url)},{other.removeprefix('escrow://')}") as bus,
        pytest.raises(mq.Misuse, match="are the same broker"),
    ):
        bus.producer(g).send(t, b"x")


def test_one_that_boasts_is_left_and_not_asked_without_pause(broker, shard, t, g):
    """It says in ``hello`` that it leads, and refuses everything else."""
    with Standby(shard, broker.url) as boaster, mq.connect(f"{listed(boaster.url)}?replicas=listed") as bus:
        boaster.boasts = 99
        producer, began = bus.producer(g, timeout=2.0), time.monotonic()
        while not boaster.refused:
            with pytest.raises(mq.Unknown) as lost:
                producer.send(t, b"x")
            assert lost.value.code is Code.TIMED_OUT
        most = 30 * (time.monotonic() - began)
        assert boaster.refused < most
        assert boaster.asked < most
    with Standby(shard, broker.url) as boaster, mq.connect(listed(boaster.url, broker.url)) as bus:
        boaster.boasts = 99
        assert bus.producer(g).send(t, b"x").offset is not None  # by its hint


def test_a_subscription_that_is_refused_is_made_at_the_leader_next(broker, standby, eventually, unhurried):
    """Nothing else is asked of the one that seemed to lead."""
    standby.boasts = 99
    [link] = links(listed(standby.url, broker.url), {})

    def refusal():
        with pytest.raises(mq.EscrowError) as refused:
            link.watch(NOBODY, lambda batch: None)
        return refused.value.code

    assert refusal() is Code.DISCONNECTED
    assert standby.refused == 1
    eventually(lambda: refusal() is Code.UNKNOWN_SESSION)  # the answer of a broker that leads
    assert standby.refused == 1
    link.close()


def test_a_read_that_is_refused_goes_to_the_leader_next(broker, standby, t, g, eventually, unhurried):
    with mq.connect(broker.url) as bus:
        bus.producer(g).send(t, b"x")
    standby.boasts = 99
    [link] = links(listed(standby.url, broker.url), {})
    wanted = {"source": t, "columns": ["body"], "queue": 0, "start": 0, "end": 0}

    def read():
        try:
            return link.read(wanted).read_all()
        except mq.Unknown:
            return None

    assert read() is None
    eventually(lambda: read() is not None)
    assert standby.refused == 1
    link.close()


def test_a_silent_leader_is_left_once_another_leads(broker, shard, standby, g, t):
    with mq.connect(listed(broker.url, standby.url)) as bus:
        producer = bus.producer(g, timeout=120.0)
        producer.send(t, b"before")
        broker.pause()
        try:
            receipts = []
            sends = threading.Thread(target=lambda: receipts.append(producer.send(t, b"during")))
            sends.start()
            standby.boasts = 1 << 20  # it took the shard over, as far as anybody can see
            while not standby.refused:  # what was lost is sent there
                assert sends.is_alive()
                sends.join(0.05)
            standby.boasts = None
        finally:
            broker.resume()
        sends.join()
        assert len(receipts) == 1
        assert sorted(bus.admin.read(t).read_all()["body"].to_pylist()) == [b"before", b"during"]
