"""``escrow://a,b``: queues spread over both brokers, transactions pinned to one, and one of them dies meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from load import QUICK, Broker, Reader, Writer, audit, eventually, settle

import escrowmq as mq
from escrowmq.errors import Code
from escrowmq_lab.checker import check
from escrowmq_lab.history import Act, History, Kind


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Broker, Broker]]:
    with Broker(tmp_path / "a", **QUICK) as a, Broker(tmp_path / "b", **QUICK) as b:
        yield a, b


def both(pair: tuple[Broker, Broker]) -> str:
    return "escrow://" + ",".join(broker.url.removeprefix("escrow://") for broker in pair)


@pytest.mark.invariant("I4")
def test_keys_and_batches_spread_and_transactions_stay(pair: tuple[Broker, Broker]) -> None:
    with mq.connect(both(pair)) as bus:
        producer = bus.producer("shop", timeout=60.0, checker=lambda check: mq.UNKNOWN)
        shards = {hello["shard"] for hello in bus.admin.hello()}
        assert len(shards) == 2
        used = Counter[int]()
        for n in range(40):
            with producer.transaction() as txn:
                first = txn.send("orders", b"1", key=f"o-{n}")
                second = txn.send("points", b"2", key=f"other key {n}")
                assert first.transaction_id == second.transaction_id == txn.id
            used[first.transaction_id.shard] += 1
        assert set(used) == shards, "keys go to both brokers"
        # the same key always goes to the same broker
        again = {producer.prepare("orders", b"3", key="o-7").transaction_id.shard for _ in range(5)}
        assert len(again) == 1
        # a transaction is ended by its id, whoever has it; an id of nowhere is refused
        receipts = producer.prepare_batch([mq.Message("orders", b"4", key=f"p-{n}") for n in range(20)])
        assert {receipt.transaction_id.shard for receipt in receipts} == shards
        assert producer.end_batch(receipts.transactions, mq.ROLLBACK).ok
        with pytest.raises(mq.Rejected) as refusal:
            producer.commit(mq.TransactionId(12345, 1, 1))
        assert refusal.value.code is Code.WRONG_SHARD
        stands = bus.admin.read("orders").read_all()
        assert stands.num_rows == 40


@pytest.mark.invariant("I1")
def test_one_of_two_is_killed_and_comes_back_under_load(pair: tuple[Broker, Broker]) -> None:
    history = History()
    with mq.connect(both(pair)) as bus:
        readers = [
            Reader(bus, "cart-1", "cart", "orders", history),
            Reader(bus, "points-1", "points", "points", history),
        ]
        writers = [Writer(bus, f"w{n}", history) for n in range(3)]
        for thread in (*readers, *writers):
            thread.start()
        for broker in pair:
            progress(history, 80)
            broker.kill()
            history.add("monkey", Act.KILL, Kind.OK)
            broker.start()
            eventually("both are there again", lambda: not bus.missing())
        progress(history, 80)
        eventually("both take messages", lambda: min(stored(broker) for broker in pair) > 20)
        for writer in writers:
            writer.stopping.set()
        for writer in writers:
            writer.join()
        settle(bus.admin)
        for reader in readers:
            reader.consumer.close()
            reader.join()
        for thread in (*writers, *readers):
            assert thread.problem is None, thread.problem
    for name, broker in zip("ab", pair, strict=True):
        audit(broker.url, history, name)
    report = check(history.events, check_max=QUICK["check_max"])
    assert report.ok, str(report)
    stands = Counter(event.broker for event in history.events if event.act is Act.STANDS)
    assert min(stands["a"], stands["b"]) > 20


def stored(broker: Broker) -> int:
    """How many messages stand in one broker's topics now."""
    with mq.connect(broker.url) as bus:
        return sum(bus.admin.read(topic).read_all().num_rows for topic in ("orders", "points"))


def progress(history: History, count: int) -> None:
    """Wait until that many more calls have succeeded."""
    before = len(history.events)
    eventually("the load goes on", lambda: sum(e.kind is Kind.OK for e in history.events[before:]) > count)
