"""Several at once: committers whose numbers interleave, relays that share, die, sleep, and come back."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from relay_checks import bodies, eventually, expire_leases, left, lost, numbered, out_of_order, put, rows, states

from escrowmq import outbox
from escrowmq.errors import Code
from escrowmq.model import Message
from escrowmq.outbox.relay import Relay
from escrowmq.outbox.relay.reading import COLUMNS, outgoing
from escrowmq.outbox.tables import LANES, State, trans_lane, trans_message
from escrowmq.platform import failpoints
from escrowmq.testing.memory_target import MemoryTarget

MakeRelay = Callable[..., Relay]


class Killed(BaseException):
    """A process that dies at a failpoint, as far as one process can play that."""


def die_at(name: str) -> None:
    def die() -> None:
        raise Killed

    failpoints.arm(failpoints.Failpoint(name, 1, die))


class Paging:
    """The classic relay: remembers the last number and asks for those after it. Planted, to show that the check sees
    it."""

    def __init__(self, engine: sa.Engine, target: MemoryTarget) -> None:
        self._engine, self._target, self._last = engine, target, 0

    def drain(self) -> None:
        c = trans_message.c
        with self._engine.begin() as connection:
            page = connection.execute(sa.select(*COLUMNS).where(c.seq > self._last).order_by(c.seq)).all()
            if page:
                self._target.send(outgoing(page))
                self._last = page[-1].seq
                connection.execute(sa.delete(trans_message).where(c.seq.in_([row.seq for row in page])))


def late_commit(engine: sa.Engine, drain: Callable[[], Any]) -> list[bytes]:
    """One transaction takes a low number and commits after another, with a higher one, was relayed; all committed
    ids."""
    with engine.connect() as slow:
        ids = outbox.send_batch_tx(slow, [Message("orders", b"0", key="slow")])
        ids += put(engine, ("quick", "0"))
        drain()
        ids += outbox.send_batch_tx(slow, [Message("orders", b"1", key="slow")])
        drain()
        slow.commit()
    drain()
    return ids


@pytest.fixture
def interleaving(tables: sa.Engine) -> sa.Engine:
    """A database in which two transactions can write at once."""
    if tables.dialect.name == "sqlite":
        pytest.skip("SQLite has one writer at a time: numbers are in the order of commits")
    return tables


@pytest.mark.invariant("I39")
def test_a_low_number_that_commits_late_is_sent(
    interleaving: sa.Engine, target: MemoryTarget, relay: MakeRelay
) -> None:
    ids = late_commit(interleaving, relay().drain)
    assert not lost(ids, target.ids, interleaving)
    assert sorted(target.ids) == sorted(ids)
    assert not rows(interleaving)


@pytest.mark.invariant("I39")
def test_planted_a_relay_that_pages_by_number_is_caught(interleaving: sa.Engine, target: MemoryTarget) -> None:
    paging = Paging(interleaving, target)
    ids = late_commit(interleaving, paging.drain)
    skipped = set(ids) - set(target.ids)
    assert skipped == {ids[0], ids[2]} or skipped == {ids[0]}
    assert left(interleaving) == skipped  # there for ever: no later page has them


def commit_all(engine: sa.Engine, writer: int, count: int, done: list[bytes]) -> None:
    """Transactions of one to four messages, some rolled back, some of two keys; a key has one writer, and so an
    order."""
    chance = random.Random(writer)
    number = 0
    while number < count:
        size = chance.randint(1, 4)
        batch = [
            Message("orders", str(number + n).encode(), key=f"w{writer}-{chance.randint(0, 1)}") for n in range(size)
        ]
        batch.append(Message("orders", b"", key=None))
        with engine.connect() as connection:
            ids = outbox.send_batch_tx(connection, batch)
            if chance.random() < 0.2:
                connection.rollback()
                continue
            connection.commit()
        done += ids
        number += size


@pytest.mark.invariant("I39")
@pytest.mark.parametrize("relays", [1, 3])
def test_concurrent_committers_and_relays_skip_nothing_and_keep_the_order(
    tables: sa.Engine, target: MemoryTarget, relay: MakeRelay, relays: int
) -> None:
    committed: list[list[bytes]] = [[] for _ in range(4)]
    writers = [threading.Thread(target=commit_all, args=(tables, n, 60, committed[n])) for n in range(4)]
    running = [relay(workers=2, batch_rows=16) for _ in range(relays)]
    for each in running:
        each.start()
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    ids = [identity for part in committed for identity in part]
    eventually(lambda: not rows(tables))
    for each in running:
        each.stop()
    assert sorted(target.ids) == sorted(ids)
    assert not out_of_order(target.taken)


def test_relays_share_the_lanes_evenly_and_give_them_back(tables: sa.Engine, relay: MakeRelay) -> None:
    def owned() -> list[int]:
        with tables.connect() as connection:
            found = connection.execute(
                sa.select(sa.func.count()).where(trans_lane.c.owner.is_not(None)).group_by(trans_lane.c.owner)
            )
            return sorted(found.scalars())

    running = [relay(lease=0.9) for _ in range(3)]
    running[0].start()
    eventually(lambda: owned() == [LANES])
    running[1].start()
    running[2].start()
    eventually(lambda: owned() == [21, 21, 22])
    running[0].stop()
    eventually(lambda: owned() == [32, 32])
    running[1].stop()
    running[2].stop()
    assert owned() == []


@pytest.mark.invariant("I38", "I40")
@pytest.mark.parametrize("place", ["leased", "read", "built", "sent", "marked"])
def test_a_relay_that_dies_anywhere_loses_nothing_and_another_takes_over(
    tables: sa.Engine, target: MemoryTarget, relay: MakeRelay, place: str
) -> None:
    ids = put(tables, *[m for key in range(5) for m in numbered(f"k{key}", 4)])
    dying = relay(lease=3600.0)
    die_at(f"relay.{place}")
    with pytest.raises(Killed):
        dying.run_once()
    failpoints.arm()
    assert not lost(ids, target.ids, tables)
    ids += put(tables, *[m for key in range(5) for m in numbered(f"k{key}", 4, 4)])
    taken = len(target.ids)
    other = relay()
    assert (other.drain(0.05), len(target.ids)) == (False, taken)  # the lanes of the dead are still leased
    assert other.backlog().unsent >= 20
    expire_leases(tables)
    assert other.drain()
    assert set(target.ids) == set(ids)
    assert not left(tables)
    assert not out_of_order(target.taken)
    repeats = len(target.ids) - len(ids)
    assert repeats == (20 if place == "sent" else 0)


@pytest.mark.invariant("I39")
@pytest.mark.parametrize("place", ["fenced", "marking", "freed"])
def test_a_relay_that_dies_while_it_puts_aside_leaves_the_keys_as_they_were(
    tables: sa.Engine, target: MemoryTarget, relay: MakeRelay, place: str
) -> None:
    ids = put(tables, *numbered("k", 4), *numbered("other", 4))
    refusing = [ids[1]]
    target.answer = lambda taken: Code.UNKNOWN_TOPIC if taken.message_id in refusing else Code.OK
    dying = relay(redelivery_interval=0.01)
    die_at(f"relay.{place}")
    with pytest.raises(Killed):
        dying.run_once()
    failpoints.arm()
    expire_leases(tables)
    target.answer = lambda _: Code.OK
    with relay(redelivery_interval=0.01):
        eventually(lambda: not rows(tables))
    assert set(target.ids) == set(ids)
    assert not out_of_order(target.taken)


@pytest.mark.invariant("I39")
def test_a_zombie_that_wakes_after_its_lease_changes_nothing(
    tables: sa.Engine, target: MemoryTarget, relay: MakeRelay
) -> None:
    """It sleeps in the middle of its send; meanwhile another has its lanes, and was refused."""
    ids = put(tables, *numbered("k", 3), *numbered("other", 2))
    heir_target = MemoryTarget()
    heir_target.answer = lambda taken: Code.UNKNOWN_TOPIC if taken.message_id == ids[0] else Code.OK
    heir = relay(heir_target, redelivery_interval=3600.0)

    def sleep() -> None:
        expire_leases(tables)
        assert heir.drain()

    target.after = sleep
    zombie = relay()
    zombie.run_once()
    assert states(tables) == [State.RETRYING, State.HELD, State.HELD]  # as the heir left them
    assert zombie.statistics.repeated == 5
    target.after = lambda: None
    put(tables, *numbered("k", 1, 3))
    assert zombie.drain()  # the heir has given its lanes back; what it found out is in the table
    assert bodies(target.taken, "k") == ["0", "1", "2"]
    assert states(tables) == [State.RETRYING, State.HELD, State.HELD, State.HELD]
    assert not lost(ids, target.ids + heir_target.ids, tables)


@pytest.mark.invariant("I39")
def test_a_zombie_that_was_refused_holds_no_key_of_its_heirs(
    tables: sa.Engine, target: MemoryTarget, relay: MakeRelay
) -> None:
    ids = put(tables, *numbered("k", 3))
    heir = relay(MemoryTarget())

    def sleep() -> None:
        expire_leases(tables)
        assert heir.drain()
        put(tables, *numbered("k", 2, 3))

    target.answer = lambda taken: Code.UNKNOWN_TOPIC if taken.message_id == ids[0] else Code.OK
    target.after = sleep
    zombie = relay(redeliveries=0)
    zombie.run_once()
    assert states(tables) == [State.PENDING, State.PENDING]
    assert heir.drain()
    assert not rows(tables)


def test_a_lease_that_ended_before_the_send_sends_nothing(
    tables: sa.Engine, target: MemoryTarget, relay: MakeRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tables, *numbered("k", 3))
    running = relay()
    assert running.run_once() == 3
    put(tables, *numbered("k", 3, 3))
    worker = running._single
    assert worker is not None
    monkeypatch.setattr(type(worker.leases), "valid", property(lambda self: False))
    running.run_once()
    assert len(target.ids) == 3
    monkeypatch.undo()
    assert running.drain()
    assert len(target.ids) == 6
