"""When the relay looks: at once where PostgreSQL notifies, soon where it must poll; and the command, started and
stopped.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import sqlalchemy as sa
from relay_checks import PATIENCE, eventually, put, rows

import escrowmq as mq
import forked
from escrowmq import outbox
from escrowmq.outbox.relay import Relay
from escrowmq.outbox.relay.waking import FIRST_PAUSE, Pause
from escrowmq.outbox.targets.seam import Codes
from escrowmq.testing.memory_target import MemoryTarget

MakeRelay = Callable[..., Relay]


def came(target: MemoryTarget) -> threading.Event:
    arrived = threading.Event()
    target.after = arrived.set
    return arrived


def test_postgresql_wakes_the_relay(tables: sa.Engine, target: MemoryTarget, relay: MakeRelay) -> None:
    if tables.dialect.name != "postgresql":
        pytest.skip("only PostgreSQL notifies")
    arrived = came(target)
    with relay(poll_interval=3600.0, lease=7200.0, workers=2) as running:
        assert running._listener.listening.wait(PATIENCE)
        put(tables, ("k", "first"))
        assert arrived.wait(PATIENCE)
        eventually(lambda: not rows(tables))
        for worker in running._threads:  # asleep for an hour, or two seconds until the leases are looked at
            assert worker.is_alive()
        with tables.connect() as connection:  # told only when it commits
            outbox.send_tx(connection, "orders", b"second", key="k")
            arrived.clear()
            connection.commit()
        assert arrived.wait(PATIENCE)


def test_a_producer_in_the_same_process_can_wake_it(tables: sa.Engine, target: MemoryTarget, relay: MakeRelay) -> None:
    arrived = came(target)
    with relay(poll_interval=3600.0, lease=7200.0) as running:
        eventually(lambda: running.statistics.lanes)
        put(tables, ("k", "1"))
        running.wake()
        assert arrived.wait(PATIENCE)


def test_pauses_grow_from_milliseconds_and_start_anew_after_activity() -> None:
    pause = Pause(0.05)
    assert [pause.take() for _ in range(6)] == pytest.approx([0.005, 0.01, 0.02, 0.04, 0.05, 0.05])
    pause.reset()
    assert pause.take() == FIRST_PAUSE
    assert Pause(0.001).take() == 0.001


class TestCommand:
    """``escrowmq outbox relay`` as a process."""

    @pytest.fixture
    def database(self, tmp_path: Path) -> Iterator[tuple[str, sa.Engine]]:
        url = f"sqlite:///{tmp_path / 'sender.db'}"
        engine = sa.create_engine(url)
        outbox.migrate(engine)
        yield url, engine
        engine.dispose()

    @staticmethod
    def command(*arguments: str) -> list[str]:
        return [sys.executable, "-W", "error", "-m", "escrowmq", "outbox", "relay", *arguments]

    def test_it_runs_tells_and_stops_cleanly(self, database: tuple[str, sa.Engine], tmp_path: Path) -> None:
        url, engine = database
        put(engine, *[(f"k{n}", str(n)) for n in range(5)])
        command = self.command("-d", url, "--to", f"file:{tmp_path}/data", "--json", "--status-interval", "50ms")
        with forked.Forked(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            lines = [json.loads(process.stdout.readline())]
            while lines[-1]["sent"] < 5 or lines[-1]["lag"]:
                lines.append(json.loads(process.stdout.readline()))
            process.send_signal(signal.SIGTERM)
            rest, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        assert lines[0]["event"] == "started"
        last = json.loads(rest.splitlines()[-1])
        assert (last["event"], last["sent"], last["lanes"]) == ("stopped", 5, 0)
        with mq.connect(f"file:{tmp_path}/data") as bus:
            assert bus.admin.read("orders").read_all().num_rows == 5

    def test_once_drains_and_says_when_it_could_not(self, database: tuple[str, sa.Engine], tmp_path: Path) -> None:
        url, engine = database
        put(engine, ("k", "1"))
        away = self.command(
            "-d", url, "--to", "escrow://127.0.0.1:1", "--once", "--patience", "100ms", "-o", "timeout=0.1"
        )
        assert forked.run(away).returncode == 4
        assert len(rows(engine)) == 1
        there = self.command("-d", url, "--to", f"file:{tmp_path}/data", "--once")
        assert forked.run(there).returncode == 0
        assert not rows(engine)

    def test_without_tables_it_says_how_to_make_them(self, tmp_path: Path) -> None:
        done = forked.run(self.command("-d", f"sqlite:///{tmp_path}/new.db", "--to", f"file:{tmp_path}/data"))
        assert done.returncode == 2
        assert "outbox migrate" in done.stderr.replace("\n", " ")


def test_an_engine_that_begins_transactions_by_a_listener_is_not_kept_locked(tmp_path: Path) -> None:
    """SQLAlchemy's own recipe for SQLite: without a commit after each statement, the relay would hold the file's lock
    while it sends and while it waits."""
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'shop.db'}", connect_args={"timeout": 0.05})

    @sa.event.listens_for(engine, "connect")
    def on_connect(connection: Any, _record: Any) -> None:
        connection.isolation_level = None

    @sa.event.listens_for(engine, "begin")
    def on_begin(connection: sa.Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    class Writing(MemoryTarget):
        def send(self, batch: pa.RecordBatch) -> Codes:
            if not self.taken:
                put(engine, ("late", "while sending"))
            return super().send(batch)

    outbox.migrate(engine)
    put(engine, ("k", "first"))
    target = Writing()
    relay = Relay(engine, target, workers=1)
    relay.run_once()
    put(engine, ("k", "between turns"))  # "database is locked" if the relay still had it
    assert relay.drain(60)
    relay.stop()
    assert {b"first", b"while sending", b"between turns"} <= {taken.body for taken in target.taken}
    engine.dispose()
