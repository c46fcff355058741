"""``kill -9`` of a served broker in a loop, under load: nothing acknowledged is lost, nothing stands twice, counts
survive.

The short form is part of the suite. The long form (``make chaos``, or ``pytest -m long``) kills 100 times;
``ESCROWMQ_KILLS`` sets another number for it.
"""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest
from load import QUICK, Broker, Reader, Writer, audit, dumped, eventually, settle

import escrowmq as mq
from escrowmq_lab.checker import Report, check
from escrowmq_lab.history import Act, History, Kind

SEGMENTS = {"segment_bytes": 1 << 20, "snapshot_bytes": 1 << 18}
"""Small, so that kills also fall into rolls and snapshots."""


def kill_loop(folder: Path, kills: int, seed: int) -> Report:
    """A load, kills at random times, then a phase without faults; what the checker says."""
    chance = random.Random(seed)
    history = History(folder / "history.jsonl")
    with Broker(folder / "data", **QUICK, **SEGMENTS) as broker, mq.connect(broker.url) as bus:
        readers = [Reader(bus, f"cart-{n}", "cart", "orders", history) for n in range(2)]
        readers += [Reader(bus, "points-1", "points", "points", history)]
        writers = [Writer(bus, f"w{n}", history) for n in range(4)]
        for thread in (*readers, *writers):
            thread.start()
        for number in range(kills):
            disturb(broker, history, chance, number)
        finish(bus, writers, readers)
        audit(broker.url, history)
        assert broker.stop() == 0
    history.close()
    found = dumped(folder / "data")
    assert found.returncode == 0, found.stdout + found.stderr
    return check(history.events, check_max=QUICK["check_max"])


def disturb(broker: Broker, history: History, chance: random.Random, number: int) -> None:
    """Let the load get somewhere, kill the broker at some moment, sometimes also while it starts."""
    before = len(history.events)
    eventually("the load goes on", lambda: sum(e.kind is Kind.OK for e in history.events[before:]) > 80)
    threading.Event().wait(chance.random() * 0.3)
    broker.kill()
    history.add("monkey", Act.KILL, Kind.OK, note=f"kill {number}")
    while chance.random() < 0.25:
        broker.launch()
        threading.Event().wait(chance.random() * 1.5)
        broker.kill()
        history.add("monkey", Act.KILL, Kind.OK, note=f"kill {number}, while it started")
    broker.start()


def finish(bus: mq.Bus, writers: list[Writer], readers: list[Reader]) -> None:
    """No more faults: writers end, as soon as one of their transactions will be parked, checks are answered, consumers
    drain."""
    eventually("the load goes on", lambda: any(writer.left or writer.problem for writer in writers))
    for writer in writers:
        writer.stopping.set()
    for writer in writers:
        writer.join()
    settle(bus.admin)
    for reader in readers:
        reader.consumer.close()
    for reader in readers:
        reader.join()
    for thread in (*writers, *readers):
        assert thread.problem is None, thread.problem


def demand(report: Report, kills: int) -> None:
    """Nothing is wrong, and the run was worth it."""
    print(report)
    assert report.ok, str(report)
    counts = report.counts
    assert counts["kill ok"] >= kills
    assert counts["committed"] > 10 * kills
    assert counts["transactions rolled_back"] > 0
    assert counts["transactions parked"] > 0
    assert counts["asked ok"] > 0
    assert counts["receive ok"] > counts["committed"] / 2


@pytest.mark.invariant("I1", "I8", "I22", "I23")
def test_a_broker_killed_again_and_again_loses_and_repeats_nothing(tmp_path: Path) -> None:
    demand(kill_loop(tmp_path, kills=6, seed=1), 6)


@pytest.mark.invariant("I1")
@pytest.mark.long
@pytest.mark.timeout(0)
def test_a_hundred_kills(tmp_path: Path) -> None:
    kills = int(os.environ.get("ESCROWMQ_KILLS", "100"))
    demand(kill_loop(tmp_path, kills=kills, seed=2), kills)
