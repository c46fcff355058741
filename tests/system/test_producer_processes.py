"""Producers as processes of their own: whoever of the group is left is asked; nobody there costs no attempt."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from load import QUICK, Broker, eventually

import escrowmq as mq
from forked import Forked

PROGRAM = """
import json, sys, threading
import escrowmq as mq

url, instance, outcome, act = sys.argv[1:]

def tell(**facts):
    print(json.dumps(facts), flush=True)

with mq.connect(url) as bus:
    producer = bus.producer("shop", instance=instance)

    @producer.checker
    def decide(check):
        tell(asked=str(check.transaction_id), attempt=check.attempt, bodies=[m.body.decode() for m in check.messages])
        return mq.Outcome[outcome]

    assert producer.wait_until_listening(60)
    if act == "prepare":
        txn = producer.transaction()
        txn.send("orders", b"order 1", key="o-1")
        txn.send("points", b"points for order 1", key="o-1")
        tell(prepared=str(txn.id))
    else:
        tell(listening=instance)
    threading.Event().wait()
"""


class Producer:
    """One producer process; it speaks in JSON lines."""

    def __init__(self, url: str, instance: str, outcome: str, act: str) -> None:
        command = [sys.executable, "-c", PROGRAM, url, instance, outcome, act]
        self.process = Forked(command, stdout=subprocess.PIPE, text=True)
        self._lines = queue.SimpleQueue[str]()
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def hear(self) -> dict[str, Any]:
        line = self._lines.get()
        assert line, f"the producer ended with {self.process.wait()}"
        heard: dict[str, Any] = json.loads(line)
        return heard

    def has_spoken(self) -> bool:
        return not self._lines.empty()

    def hear_question(self) -> dict[str, Any]:
        """That it listens, and its first question: it may be asked before it has said that it listens."""
        heard: dict[str, Any] = {}
        while not {"listening", "asked"} <= heard.keys():
            heard = {**self.hear(), **heard}
        return heard

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reading.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker(tmp_path / "data", **QUICK) as broker:
        yield broker


@pytest.fixture
def admin(broker: Broker) -> Iterator[mq.Admin]:
    with mq.connect(broker.url) as bus:
        yield bus.admin


def state(admin: mq.Admin, transaction: str) -> dict[str, Any]:
    return admin.transaction(transaction)


def members(admin: mq.Admin) -> int:
    return sum(group["members"] for group in admin.producers() if group["group"] == "shop")


def orphan(broker: Broker, admin: mq.Admin) -> str:
    """A transaction whose producer was killed and is known to be gone. That may have been asked before, but only
    once: on a machine that stood still meanwhile another one is made."""
    while True:
        sender = Producer(broker.url, "one", "UNKNOWN", "prepare")
        while "prepared" not in (heard := sender.hear()):
            pass  # it may be asked before it has said so
        prepared = heard["prepared"]
        sender.kill()
        eventually("the broker notices", lambda: members(admin) == 0)
        if state(admin, prepared)["checks"] <= 1:
            return str(prepared)
        assert admin.rollback(prepared) is mq.Code.ROLLED_BACK


@pytest.mark.invariant("I14")
def test_the_sender_is_killed_and_another_of_its_group_settles(broker: Broker, admin: mq.Admin) -> None:
    prepared = orphan(broker, admin)
    assert state(admin, prepared)["state"] == "open"
    other = Producer(broker.url, "two", "COMMIT", "listen")
    try:
        question = other.hear_question()
        assert question["listening"] == "two"
        assert question["asked"] == prepared
        assert question["bodies"] == ["order 1", "points for order 1"]
        eventually("it is committed", lambda: state(admin, prepared)["state"] == "committed")
    finally:
        other.kill()
    for topic, body in (("orders", b"order 1"), ("points", b"points for order 1")):
        assert admin.read(topic).read_all().column("body").to_pylist() == [body]


@pytest.mark.invariant("I11")
def test_nobody_there_spends_no_attempt_and_who_comes_later_is_asked(broker: Broker, admin: mq.Admin) -> None:
    prepared = orphan(broker, admin)
    spent = state(admin, prepared)["checks"]
    # Well past check_max intervals; another transaction's life is the clock.
    with mq.connect(broker.url) as bus:
        clock = bus.producer("clock", checker=lambda check: mq.UNKNOWN)
        ticking = clock.prepare("ticks", b"").transaction_id
        eventually("time passes", lambda: admin.transaction(ticking)["state"] == "parked")
    assert state(admin, prepared)["checks"] == spent
    assert state(admin, prepared)["state"] == "open"
    late = Producer(broker.url, "three", "ROLLBACK", "listen")
    try:
        assert late.hear_question()["attempt"] == spent + 1
        eventually("it is rolled back", lambda: state(admin, prepared)["state"] == "rolled_back")
    finally:
        late.kill()
    assert admin.read("orders").read_all().num_rows == 0


@pytest.mark.invariant("I11")
def test_a_broker_killed_between_questions_goes_on_counting(broker: Broker, admin: mq.Admin) -> None:
    silent = Producer(broker.url, "one", "UNKNOWN", "prepare")
    try:
        heard = [silent.hear()]
        while "prepared" not in heard[-1]:  # it may be asked before it has said so
            heard.append(silent.hear())
        prepared = heard.pop()["prepared"]
        attempts: list[int] = []

        def over() -> bool:
            return bool(attempts) and state(admin, prepared)["state"] == "parked"

        while True:
            # A question that was counted when the broker died does not come again; it may have been the last.
            eventually("it goes on", lambda: heard or silent.has_spoken() or over())
            if not heard and not silent.has_spoken():
                break
            question = heard.pop(0) if heard else silent.hear()
            assert question["asked"] == prepared
            attempts.append(question["attempt"])
            broker.kill()
            broker.start()
            if question["attempt"] == QUICK["check_max"]:
                break
        assert attempts == sorted(set(attempts)), "no attempt is asked twice"
        assert attempts[-1] <= QUICK["check_max"]
        eventually("it is parked", lambda: state(admin, prepared)["state"] == "parked")
        assert state(admin, prepared)["checks"] == QUICK["check_max"]
    finally:
        silent.kill()
