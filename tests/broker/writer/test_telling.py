"""What an operator is told when it happens, each thing once, with its id."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from broker_bench import Bench, send

import escrowmq as mq
from escrowmq.broker.writer import telling
from escrowmq.broker.writer.telling import MOST_LINES, Refusals
from escrowmq.errors import Code

QUICK = {"transaction_timeout": 0.05, "check_interval": 0.05, "check_max": 1, "retry_backoff": 0.01}


def facts(caplog: pytest.LogCaptureFixture, event: str) -> list[dict[str, Any]]:
    found = [record.__dict__.get("facts", {}) for record in caplog.records]
    return [one for one in found if one.get("event") == event]


def until(told: Callable[[], bool], bus: mq.Bus) -> None:
    """Wait for a line of the log; each round of the broker may bring it."""
    deadline = time.monotonic() + 60
    while not told():
        assert time.monotonic() < deadline, "it was not told"
        bus.admin.hello()


def test_a_parked_transaction_is_told_with_its_id(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with mq.connect(f"file:{tmp_path}", **QUICK) as bus:
        producer = bus.producer("shop", checker=lambda message: mq.UNKNOWN)
        receipt = producer.prepare("orders", b"one")
        until(lambda: bool(facts(caplog, "parked")), bus)
        (told,) = facts(caplog, "parked")
        assert told["transaction"] == str(receipt.transaction_id)
        assert (told["group"], told["checks"]) == ("shop", 1)


def test_each_dead_letter_is_told_and_of_many_how_many(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with mq.connect(f"file:{tmp_path}", **QUICK, default_queues=1) as bus:
        bus.producer("shop").send_batch([mq.Message("orders", b"%d" % n) for n in range(MOST_LINES + 5)])
        with bus.consumer("cart", "orders", max_attempts=1) as consumer:
            batch = next(consumer.batches(1000))
            batch.nack(0.0, "spoilt")
        dead = bus.admin.dead_letters("cart")
        assert len(dead) == MOST_LINES + 5
        told = facts(caplog, "dead")
        assert [(one["topic"], one["offset"], one["cause"]) for one in told[:-1]] == [
            ("orders", n, "spoilt, attempt 1 of 1") for n in range(MOST_LINES)
        ]
        assert told[-1] == {"event": "dead", "more": 5}


def test_an_opened_broker_says_what_it_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "escrowmq")
    with mq.connect(f"file:{tmp_path}") as bus:
        shard = bus.admin.hello()[0]["shard"]
    (told,) = facts(caplog, "opened")
    assert (told["shard"], told["epoch"], told["undecided"]) == (shard, 1, 0)


def test_the_first_refusal_is_told_at_once_and_the_others_are_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telling, "REFUSALS_SECONDS", 3600.0)
    refusals = Refusals()
    for _ in range(1000):
        refusals.count(Code.QUEUE_FULL)
    (first,) = facts(caplog, "refused")
    assert (first["code"], first["count"]) == ("QUEUE_FULL", 1)
    refusals.settle()
    assert len(facts(caplog, "refused")) == 1, "its time is not over"
    monkeypatch.setattr(telling, "REFUSALS_SECONDS", 0.0)
    refusals.settle(last=True)
    assert [one["count"] for one in facts(caplog, "refused")] == [1, 999]
    refusals.settle(last=True)
    assert len(facts(caplog, "refused")) == 2, "nothing more was refused"


def test_what_waits_beyond_its_bound_is_told_as_refused(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(max_waiting_bytes=10_000)
    futures = [bench.engine.submit(send(0, {"body": bytes(3000)})) for _ in range(10)]
    refused = sum(future.done() for future in futures)
    assert refused > 1
    bench.engine.start()
    bench.engine.stop()
    assert sum(one["count"] for one in facts(caplog, "refused")) == refused
