"""Draining: the table says what is left, not the lanes of the relay that asks; and whoever ends gives its leases
back."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa
from relay_checks import bodies, eventually, expire_leases, left, numbered, put, rows, states

import forked
from escrowmq import outbox
from escrowmq.errors import Code
from escrowmq.outbox.relay import Relay
from escrowmq.outbox.relay.worker import Worker
from escrowmq.outbox.tables import LANES, State, trans_lane, trans_message, trans_relay
from escrowmq.platform import failpoints
from escrowmq.testing.memory_target import MemoryTarget

MakeRelay = Callable[..., Relay]


class Killed(BaseException):
    """A process that dies at a failpoint, as far as one process can play that."""


def die_holding_its_lanes(dying: Relay) -> None:
    def die() -> None:
        raise Killed

    failpoints.arm(failpoints.Failpoint("relay.leased", 1, die))
    with pytest.raises(Killed):
        dying.run_once()
    failpoints.arm()


def owners(engine: sa.Engine) -> set[str]:
    with engine.connect() as connection:
        owned = sa.select(trans_lane.c.owner).where(trans_lane.c.owner.is_not(None)).distinct()
        return set(connection.scalars(owned))


def lanes_owned(engine: sa.Engine) -> int:
    with engine.connect() as connection:
        owned = sa.select(sa.func.count()).select_from(trans_lane).where(trans_lane.c.owner.is_not(None))
        return connection.scalar(owned) or 0


@pytest.mark.invariant("I38")
def test_what_a_dead_relay_has_leased_is_waited_for(tables: sa.Engine, target: MemoryTarget, relay: MakeRelay) -> None:
    die_holding_its_lanes(relay(lease=3600.0))
    ids = put(tables, *[m for key in range(5) for m in numbered(f"k{key}", 10)])
    running = relay()
    assert not running.drain(0.0)
    assert (running.backlog().pending, running.statistics.sent) == (50, 0)
    assert running.backlog().lag > 0
    # the lease of the dead ends when the other has looked into the table, and it takes the lanes over
    failpoints.arm(failpoints.Failpoint("relay.looked", 1, lambda: expire_leases(tables)))
    assert running.drain()
    assert sorted(target.ids) == sorted(ids)
    assert running.backlog() == outbox.relay.Backlog()


def test_what_a_living_relay_has_leased_is_waited_for(
    tables: sa.Engine, target: MemoryTarget, relay: MakeRelay
) -> None:
    going_on = threading.Event()
    busy = relay(lease=3600.0)
    busy.run_once()
    put(tables, *numbered("k", 5))
    done = []

    def drain() -> None:
        done.append(waiting.drain())

    waiting = relay()
    thread = threading.Thread(target=drain)
    waiting_target = failpoints.Failpoint("relay.looked", 1, going_on.set)
    failpoints.arm(waiting_target)
    thread.start()
    assert going_on.wait(60)  # it has looked into the table, and goes on waiting
    assert not done
    assert busy.drain()
    thread.join()
    assert done == [True]
    assert waiting.statistics.sent + busy.statistics.sent == 5
    assert bodies(target.taken, "k") == ["0", "1", "2", "3", "4"]


def test_a_relay_that_has_drained_leaves_no_lease_behind(
    tables: sa.Engine, target: MemoryTarget, relay: MakeRelay
) -> None:
    put(tables, ("k", "0"))
    assert relay().drain()
    assert not owners(tables)
    target.answer = lambda _: Code.DISCONNECTED
    put(tables, ("k", "1"))
    assert not relay(backoff=0.01).drain(0.05)
    assert not owners(tables)

    def fail() -> None:
        raise outbox.relay.relay.Misuse(Code.BAD_SETTING, "a target that cannot go on")

    target.before = fail
    with pytest.raises(outbox.relay.relay.Misuse):
        relay().drain()
    assert not owners(tables)


@pytest.mark.invariant("I38")
def test_the_lag_is_that_of_the_oldest_row_in_the_table(
    tables: sa.Engine, target: MemoryTarget, relay: MakeRelay
) -> None:
    """Also of one that another relay has, that is retried, or that a dead target keeps waiting; a WAITING one is a
    person's."""
    running = relay(redelivery_interval=3600.0, redeliveries=0)
    assert running.backlog().lag == 0.0
    put(tables, *numbered("k", 2), *numbered("other", 2))
    age(tables, 10_000)
    assert 10_000 <= running.backlog().lag < 20_000
    target.answer = lambda _: Code.DISCONNECTED
    with relay(redelivery_interval=3600.0) as first:
        eventually(lambda: first.statistics.lag >= 10_000)
        target.answer = lambda taken: Code.OK if taken.key == "other" else Code.UNKNOWN_TOPIC
        eventually(lambda: first.statistics.refused)
        age(tables, 10_000)
        eventually(lambda: first.statistics.lag >= 20_000)  # the refused one is not sent yet
    assert states(tables) == [State.RETRYING, State.HELD]
    with tables.begin() as connection:
        connection.execute(sa.update(trans_message).where(trans_message.c.attempts > 0).values(state=State.WAITING))
    found = running.backlog()
    assert (found.waiting, found.held, found.unsent, found.lag) == (1, 1, 0, 0.0)


def test_the_lag_is_told_by_the_databases_clock(
    tables: sa.Engine, relay: MakeRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time_ns", lambda: 1)  # a sender whose clock stands at 1970
    put(tables, ("k", "0"), ("k", "1"))
    put(tables, ("k", "2"))
    monkeypatch.undo()
    assert 0 <= relay().backlog().lag < 3600


def test_a_row_put_aside_because_its_broker_is_away_is_waited_for(
    tables: sa.Engine, target: MemoryTarget, relay: MakeRelay
) -> None:
    put(tables, ("here", "0"), ("away", "0"), ("away", "1"))
    away = [Code.TIMED_OUT, Code.TIMED_OUT]
    target.answer = lambda taken: away.pop() if taken.key == "away" and away else Code.OK
    running = relay(backoff=0.01, redelivery_interval=0.05)
    assert running.drain()
    assert not rows(tables)
    assert not away


def test_a_refused_row_is_named_and_not_waited_for(tables: sa.Engine, target: MemoryTarget, relay: MakeRelay) -> None:
    put(tables, *numbered("bad", 3), ("good", "0"))
    target.answer = lambda taken: Code.UNKNOWN_TOPIC if taken.key == "bad" else Code.OK
    running = relay(redelivery_interval=3600.0)
    assert running.drain()
    found = running.backlog()
    assert (found.pending, found.retrying, found.held, found.waiting, found.unsent) == (0, 1, 2, 0, 1)


def age(engine: sa.Engine, seconds: int) -> None:
    with engine.begin() as connection:
        connection.execute(sa.update(trans_message).values(created_us=trans_message.c.created_us - seconds * 1_000_000))


@pytest.mark.invariant("I38")
def test_once_beside_a_killed_relay_sends_everything(tmp_path: Path) -> None:
    """The command, as a person meets it: kill -9 a relay, commit 50 rows, ``relay --once``."""
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    engine = sa.create_engine(url, connect_args={"timeout": 60})
    outbox.migrate(engine)
    relay = [sys.executable, "-m", "escrowmq", "outbox", "relay", "-d", url, "--to"]
    killed = forked.Forked([*relay, f"file:{tmp_path / 'other'}", "--lease", "10m"])
    eventually(lambda: lanes_owned(engine) == LANES)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    ids = put(engine, *[(f"k{number % 5}", str(number)) for number in range(50)])
    once = [*relay, f"file:{tmp_path / 'data'}", "--once"]
    early = forked.run([*once, "--patience", "1ms"])
    assert (early.returncode, "50" in early.stderr, "not sent" in early.stderr) == (4, True, True), early.stderr
    assert left(engine) == set(ids)
    with forked.Forked(once, stderr=subprocess.PIPE, text=True) as waiting:
        with engine.begin() as connection:  # ten minutes later
            for column in (trans_lane.c.leased_until_us, trans_relay.c.alive_until_us):
                connection.execute(sa.update(column.table).values({column: column - 600_000_000}))
        _, told = waiting.communicate()
    assert (waiting.returncode, "50 sent" in told) == (0, True), told
    assert not rows(engine)
    engine.dispose()


def test_stopping_from_another_thread_leaves_the_connection_to_the_step_that_uses_it(
    tables: sa.Engine, target: MemoryTarget, relay: MakeRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tables, *numbered("k", 3))
    running = relay()
    sending, stopped, closed_by = threading.Event(), threading.Event(), list[str]()
    send, close = target.send, Worker.close

    def slow(batch: object) -> object:
        sending.set()
        assert running._stopping.wait(60)
        assert not stopped.wait(0.1), "it was stopped in the middle of a step"
        return send(batch)

    def noting(worker: Worker) -> None:
        closed_by.append(threading.current_thread().name)
        close(worker)

    monkeypatch.setattr(target, "send", slow)
    monkeypatch.setattr(Worker, "close", noting)
    draining = threading.Thread(target=running.drain, name="draining")
    draining.start()
    assert sending.wait(60)
    running.stop()
    stopped.set()
    draining.join(60)
    assert not draining.is_alive()
    assert closed_by == ["draining"]
    assert len(target.ids) == 3
    assert lanes_owned(tables) == 0


def test_a_signal_that_comes_before_the_first_step_is_not_lost(tables: sa.Engine, relay: MakeRelay) -> None:
    die_holding_its_lanes(relay(lease=3600.0))
    put(tables, ("k", "0"))
    running = relay()
    running.ask_to_stop()
    assert not running.drain()  # else it would wait for the lease of the dead
    running.stop()
    running.ask_to_stop()
    running.run()
    assert running.backlog().pending == 1
