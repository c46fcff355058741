"""4.3 and 4.7: one broker for one transaction, one half message that counts for one id, one decision for ever."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import sqlalchemy as sa
from modes_roles import identity

import escrowmq as mq
from escrowmq.errors import Code, Rejected, Unknown
from escrowmq.outbox.modes import Compensating, Driven, Redriven
from escrowmq.outbox.modes.journal import Stage
from escrowmq.outbox.tables import trans_driven


@pytest.fixture
def local(make_database: Callable[[str], str]) -> Any:
    engine = sa.create_engine(make_database("local"))
    yield engine
    engine.dispose()


@pytest.fixture
def pair(make_served: Any) -> Any:
    """A bus over two brokers."""
    first, second = make_served(), make_served()
    with mq.connect(f"{first.url},{second.url.removeprefix('escrow://')}") as bus:
        yield bus, first, second


def halves(bus: mq.Bus, message_id: bytes) -> int:
    """Half messages of an id, at all brokers."""
    return bus.admin.read("%half").read_all().column("message_id").to_pylist().count(message_id)


class Unpinned:
    """A planted bug: each prepare goes to whoever's turn it is."""

    def __init__(self, carrier: Any) -> None:
        self._carrier = carrier

    def __getattr__(self, name: str) -> Any:
        return getattr(self._carrier, name)

    def prepare(self, batch: pa.RecordBatch, shards: Any) -> Any:
        return self._carrier.prepare(batch, self._carrier.place(batch))


def deaf_once(driven: Driven) -> None:
    """The first prepare arrives, its answer does not."""
    prepare = driven._carrier.prepare

    def deaf(batch: pa.RecordBatch, shards: Any) -> Any:
        prepare(batch, shards)
        driven._carrier.prepare = prepare  # type: ignore[method-assign]
        return np.full(batch.num_rows, Code.TIMED_OUT, np.uint8), pa.nulls(batch.num_rows, pa.binary(16))

    driven._carrier.prepare = deaf  # type: ignore[method-assign]


@pytest.mark.parametrize("planted", [False, True], ids=["pinned", "planted"])
def test_a_prepare_is_never_retried_at_another_broker(pair: Any, local: sa.Engine, t: str, planted: bool) -> None:
    bus, _, _ = pair
    found = []
    for number in range(4):
        driven = Driven(bus, local, "shop")
        if planted:
            driven._carrier = Unpinned(driven._carrier)
        deaf_once(driven)
        with pytest.raises(Unknown):
            driven.send(mq.Message(t, b"x", message_id=identity(t, number)), lambda session: None)
        assert driven.redrive() == Redriven(rolled_back=1)
        found.append(halves(bus, identity(t, number)))
    if planted:
        assert found == [2] * 4, "the bug was not caught"
    else:
        assert found == [1] * 4
        assert not bus.admin.transactions("open")


def test_a_transaction_waits_for_the_broker_that_took_it(pair: Any, local: sa.Engine, t: str) -> None:
    """With that broker away, COMMIT goes nowhere else; also from another process with the brokers in another order."""
    bus, first, second = pair
    driven = Driven(bus, local, "shop")
    driven._carrier.end = lambda batch, *_: np.full(batch.num_rows, Code.TIMED_OUT, np.uint8)  # type: ignore[method-assign]
    for number in range(4):
        driven.send(mq.Message(t, b"%d" % number), lambda session: None)
    first.stop()
    impatient, committed = Driven(bus, local, "shop", timeout=1.0), 0
    while committed < 2:  # once, unless the other broker needs longer than a second, too
        report = impatient.redrive()
        committed += report.committed
    assert (committed, report.left) == (2, 2)
    first.start()
    with mq.connect(f"{second.url},{first.url.removeprefix('escrow://')}") as turned:
        assert Driven(turned, local, "shop").redrive() == Redriven(committed=2)
        assert sorted(turned.admin.read(t).read_all().column("body").to_pylist()) == [b"0", b"1", b"2", b"3"]


def test_compensation_sends_again_to_the_same_broker_only(pair: Any, local: sa.Engine, t: str) -> None:
    bus, first, _ = pair
    way = Compensating(bus.producer("plain", timeout=1.0), local, "shop")
    with local.begin() as connection:
        way.store_tx(connection, [mq.Message(t, b"%d" % number, key=f"k{number}") for number in range(20)])
    with local.begin() as connection:
        shards = set(connection.execute(sa.select(trans_driven.c.shard)).scalars())
    assert len(shards) == 2
    first.stop()
    while (left := way.resend()) == 20:  # the other broker needs longer than a second, too
        pass
    assert 0 < left < 20
    first.start()
    while way.resend():  # until the client has noticed
        pass
    assert len(bus.admin.read(t).read_all()) == 20


# 4.3 at the broker


def half(bus: mq.Bus, t: str, body: bytes = b"x") -> Any:
    producer = bus.producer("p", checker=lambda check: mq.UNKNOWN)
    return producer, mq.Message(t, body, message_id=identity(t, 1))


@pytest.mark.invariant("I9")
def test_one_half_message_counts_however_often_an_id_is_prepared(bus: mq.Bus, t: str) -> None:
    """Within the de-duplication window a repeat is answered with the first one's transaction: first and last are
    one."""
    producer, message = half(bus, t)
    first, again = producer.prepare(message), producer.prepare(message)
    assert again.transaction_id == first.transaction_id
    assert halves(bus, identity(t, 1)) == 1
    assert producer.commit(first.transaction_id) is Code.COMMITTED
    assert producer.prepare(message).transaction_id == first.transaction_id
    assert len(bus.admin.read(t).read_all()) == 1


@pytest.mark.invariant("I5")
def test_the_first_decision_takes_effect_and_later_ones_are_skipped(bus: mq.Bus, t: str) -> None:
    """FastMiniMQ answers OK to all of them; here the producer hears which of both it was."""
    producer, message = half(bus, t)
    transaction = producer.prepare(message).transaction_id
    assert producer.end(transaction, mq.COMMIT) is Code.COMMITTED
    assert producer.end(transaction, mq.COMMIT) is Code.ALREADY_COMMITTED
    with pytest.raises(Rejected) as raised:
        producer.rollback(transaction)
    assert raised.value.code is Code.CONFLICT
    assert len(bus.admin.read(t).read_all()) == 1


@pytest.mark.invariant("I9")
def test_beyond_the_window_the_last_prepare_counts_because_the_table_says_so(
    make_served: Any, local: sa.Engine, t: str
) -> None:
    """A prepare that was repeated after the window makes a second half message: the row names one, the other is rolled
    back."""
    served = make_served(dedup_window=0.0, transaction_timeout=0.3, check_interval=0.1, check_max=1_000_000)
    with mq.connect(served.url) as bus:
        driven = Driven(bus, local, "shop")
        driven._journal.decide = _die  # type: ignore[method-assign]
        with pytest.raises(SystemExit):
            driven.send(mq.Message(t, b"x", message_id=identity(t, 1)), lambda session: None)
        del driven._journal.decide
        other = bus.producer("filler")  # the window moves on with what is stored
        for number in range(50):
            other.send(t + "-other", b"%d" % number)
        assert driven.redrive(lambda session, messages: None) == Redriven(committed=1)
        deadline = time.monotonic() + 60.0
        while bus.admin.transactions("open"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        states = bus.admin.read("%half").read_all().column("state").to_pylist()
        assert states == [mq.TransactionState.ROLLED_BACK, mq.TransactionState.COMMITTED]
        assert len(bus.admin.read(t).read_all()) == 1


def _die(*_: Any) -> None:
    raise SystemExit


def test_the_row_names_its_shard_before_the_prepare_leaves(bus: mq.Bus, local: sa.Engine, t: str) -> None:
    driven = Driven(bus, local, "shop")
    driven._carrier.prepare = _die  # type: ignore[method-assign]
    with pytest.raises(SystemExit):
        driven.send(mq.Message(t, b"x"), lambda session: None)
    with local.begin() as connection:
        row = connection.execute(sa.select(trans_driven)).one()
    assert (row.state, row.shard, row.transaction_id) == (Stage.STORED, bus.router.shard_of(0, 5.0), None)
