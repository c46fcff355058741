"""The folder of a broker that runs, read without taking it: all that was answered is there, or it is said what may be
missing."""

from __future__ import annotations

import logging
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import escrowmq as mq
from escrowmq import connecting
from escrowmq.platform import disk
from escrowmq_lab.servers.process import pause

Make = Callable[..., Any]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the answer of a broker that is only slow."""
    monkeypatch.setattr(connecting, "ASK_SECONDS", 60.0)


def reading(folder: Path) -> mq.Bus:
    return mq.connect(f"file:{folder}", read_only=True)


def health(bus: mq.Bus) -> tuple[str, str]:
    (one,) = bus.admin.health()
    assert one.get("missing", "") == (one["reason"] if one["status"] == "incomplete" else "")
    return one["status"], one["reason"]


def keys(bus: mq.Bus, topic: str) -> list[str]:
    return sorted(bus.admin.read(topic, columns=["key"], queue=0).read_all()["key"].to_pylist())


@pytest.mark.invariant("I41")
def test_the_last_answer_of_a_served_broker_is_in_its_folder(make_broker: Make, served_kind: str) -> None:
    broker = make_broker(served_kind)
    with broker.connect() as bus:
        bus.admin.create_topic("t", 1)
        producer, shop = bus.producer("p"), bus.producer("shop", checker=lambda check: mq.UNKNOWN)
        for number in range(10):
            producer.send("t", b"", key=f"k{number}")
            with reading(broker.folder) as folder:
                assert keys(folder, "t") == [f"k{n}" for n in range(number + 1)]
                assert health(folder) == ("ok", "")
        shop.commit(shop.prepare("t", b"", key="of a transaction").transaction_id)
        with reading(broker.folder) as folder:
            assert "of a transaction" in keys(folder, "t")
            assert folder.admin.read("%op").read_all().num_rows == 1


@pytest.mark.invariant("I41")
def test_the_folder_of_a_broker_within_another_program_says_what_may_be_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with mq.connect(f"file:{tmp_path / 'data'}") as bus:
        bus.admin.create_topic("t", 1)
        for number in range(3):
            bus.producer("p").send("t", b"", key=f"k{number}")
        with caplog.at_level(logging.WARNING), reading(tmp_path / "data") as folder, reading(tmp_path / "data"):
            assert keys(folder, "t") == ["k0", "k1"]
            status, reason = health(folder)
        assert status == "incomplete"
        assert f"is in use by process {os.getpid()}" in reason
        assert reason.endswith("what it acknowledged last may be missing")
        assert [record.getMessage() for record in caplog.records] == [reason], "told once"
    with reading(tmp_path / "data") as folder:
        assert (keys(folder, "t"), health(folder)) == (["k0", "k1", "k2"], ("ok", ""))


def test_a_broker_that_does_not_answer_is_named(make_broker: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    broker = make_broker("served")
    with broker.connect() as bus:
        bus.admin.create_topic("t", 1)
        for number in range(3):
            bus.producer("p").send("t", b"", key=f"k{number}")
    monkeypatch.setattr(connecting, "ASK_SECONDS", 0.3)
    pause(broker.process.pid)
    try:
        with reading(broker.folder) as folder:
            status, reason = health(folder)
            assert set(keys(folder, "t")) >= {"k0", "k1"}
    finally:
        broker.process.send_signal(signal.SIGCONT)
    assert status == "incomplete"
    assert broker.url in reason


def test_another_broker_at_the_address_is_not_believed(make_broker: Make, tmp_path: Path) -> None:
    other = make_broker("served")
    with other.connect() as bus:
        bus.producer("p").send_batch([mq.Message("t", b"") for _ in range(1000)]).check()
    with mq.connect(f"file:{tmp_path / 'own'}") as bus:
        bus.admin.create_topic("t", 1)
        for number in range(3):
            bus.producer("p").send("t", b"", key=f"k{number}")
        for url in (other.url, f"file:{tmp_path / 'none'}", "nonsense"):
            disk.note_url(tmp_path / "own", url)
            with reading(tmp_path / "own") as folder:
                assert keys(folder, "t") == ["k0", "k1"]
                status, reason = health(folder)
            assert status == "incomplete"
            assert url in reason
    assert not (tmp_path / "none").exists()


def test_an_address_is_its_owners_and_ends_with_the_broker(
    make_broker: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = make_broker("served")
    lock = broker.folder / disk.LOCK_NAME
    assert broker.url in lock.read_text()
    assert lock.stat().st_mode & 0o777 == 0o600
    with broker.connect() as bus:
        bus.producer("p").send("t", b"")
    shutil.copytree(broker.folder, tmp_path / "copy")
    monkeypatch.setattr(connecting, "_query_durable", lambda url: pytest.fail("a folder that nobody has was asked for"))
    with reading(tmp_path / "copy") as folder:
        assert health(folder) == ("ok", "")
    broker.stop(kill=True)
    with reading(broker.folder) as folder:
        assert health(folder) == ("ok", "")
    with mq.connect(f"file:{broker.folder}"):
        assert lock.read_text() == f"{os.getpid()}\n"
    broker.start()


def test_a_copy_of_a_log_on_kafka_that_nobody_keeps_up_says_so(make_broker: Make) -> None:
    broker = make_broker("kafka")
    with broker.connect() as bus:
        bus.producer("p").send("t", b"")
    broker.stop()
    with reading(broker.folder) as folder:
        status, reason = health(folder)
    broker.start()
    assert status == "incomplete"
    assert "is a copy of a log on Kafka" in reason


def test_the_folder_of_a_standby_has_the_last_answer_of_the_leader(make_broker: Make, tmp_path: Path) -> None:
    leader = make_broker("kafka")
    standby = type(leader)(tmp_path / "standby", leader.settings, leader.log)
    try:
        with leader.connect() as bus:
            bus.admin.create_topic("t", 1)
            standby.start()
            for number in range(5):
                bus.producer("p").send("t", b"", key=f"k{number}")
                with reading(standby.folder) as folder:
                    assert health(folder) == ("ok", "")
                    assert keys(folder, "t") == [f"k{n}" for n in range(number + 1)]
    finally:
        standby.stop()


def test_who_opens_the_folder_is_sent_to_its_broker(make_broker: Make) -> None:
    broker = make_broker("served")
    with pytest.raises(mq.Misuse, match=f"FOLDER_IN_USE.*connect to it: {broker.url}"):
        mq.connect(f"file:{broker.folder}")
