"""Bugs that FastMiniMQ shipped, each as a test that it would fail here."""

from __future__ import annotations

import pyarrow as pa
import pytest
from bug_shard import BugShard

from escrowmq.errors import Code
from escrowmq.ledger.commands import Receive, Settle, Subscribe, Subscription
from escrowmq.model import COMMIT, ROLLBACK, TransactionId
from escrowmq.schemas import SETTLING
from escrowmq.testing.ledgers import LedgerDriver


def test_commit_of_an_unknown_id_answered_ok_and_dropped_the_message():
    driver = LedgerDriver()
    session = driver.session()
    unknown = bytes(TransactionId(driver.ledger.shard, session, 4711))
    events = len(driver.events)
    assert driver.end(session, (unknown, COMMIT)) == [Code.UNKNOWN_TRANSACTION]
    assert len(driver.events) == events


def test_commit_of_a_rolled_back_id_answered_ok_and_dropped_the_message():
    driver = LedgerDriver()
    session = driver.session()
    [answer] = driver.prepare(session, {})
    driver.end(session, (answer["transaction"], ROLLBACK))
    assert driver.end(session, (answer["transaction"], COMMIT)) == [Code.CONFLICT]
    assert driver.visible() == []


@pytest.mark.parametrize("half", [False, True])
def test_a_40_kb_body_was_accepted_and_then_blocked_its_queue_for_ever(half):
    """Whatever is accepted can be read, and what is refused is refused at the door; the queue goes on after both."""
    limit = 1 << 18
    shard = BugShard(max_body_bytes=limit, default_queues=1)
    session = shard.session() if half else 0

    def produce(*bodies: bytes) -> list[Code]:
        if not half:
            return [Code(a["code"]) for a in shard.send(*({"body": body} for body in bodies))]
        answers = shard.prepare(session, *({"body": body} for body in bodies))
        good = [a["transaction"] for a in answers if a["code"] == Code.OK]
        assert shard.end(session, COMMIT, *good) == [Code.COMMITTED] * len(good)
        return [Code(a["code"]) for a in answers]

    bodies = [b"before", b"x" * 40_000, b"y" * limit, b"z" * (limit + 1), b"after"]
    assert produce(*bodies) == [Code.OK, Code.OK, Code.OK, Code.BODY_TOO_LARGE, Code.OK]
    shard.subscribe()
    assert shard.consume() == [*bodies[:3], b"after"]
    assert produce(b"and on") == [Code.OK]
    assert shard.consume() == [b"and on"]


def test_its_checker_compared_counts_so_one_lost_and_one_repeated_message_cancelled_out():
    """What became of each message is kept by offset, so that both sides can be compared as sets.

    The audit's own test of this is ``test_one_lost_and_one_repeated_cancel_out_in_counts_and_are_both_named``.
    """
    driver = LedgerDriver()
    driver.send(*[{"queue": 0}] * 4)
    driver.do(Subscribe("cart", Subscription(topics=("orders",))))
    leased = driver.do(Receive("cart", 1, 4, 60_000_000))
    rows = [
        {"lease": int(leased.leases[0]), "start": offset, "count": 1, "act": 0, "delay_us": 0, "cause": None}
        for offset in (0, 2, 2, 3)
    ]
    answer = driver.do(Settle("cart", pa.RecordBatch.from_pylist(rows, schema=SETTLING)))
    assert answer.column("code").to_pylist() == [Code.OK] * 4, "four acknowledgements of four messages, by count"
    account = driver.ledger.groups.account("cart", driver.ledger.queue_id("orders", 0), driver.ledger.topics)
    assert account["acked"].tolist() == [0, 2, 3]
    assert account["leased"].tolist() == [1]
