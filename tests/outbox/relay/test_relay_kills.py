"""Sender, relay, broker, receiver as processes, each killed between every two of its steps; then everything is compared
by id.

I24: each order has one effect. I37: a business row stands if and only if its outbox row does. I38: each outbox row was
published and had its effect. I39: nothing skipped, order per key. I40: rows leave only after a durable receipt.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import relay_nodes
import sqlalchemy as sa
from relay_checks import eventually
from relay_nodes import business, effects

import escrowmq as mq
from escrowmq import model, outbox
from escrowmq.outbox.tables import State, trans_message
from escrowmq_lab.databases import databases
from escrowmq_lab.servers.process import free_port
from zygote import Zygote

POINTS: dict[str, list[str]] = {
    "sender": ["sender.changed:3", "sender.sent:3", "sender.committed:3"],
    "relay": [
        *(
            f"relay.{name}"
            for name in ("leased", "read:2", "built:2", "sent:2", "marked:2", "fenced", "marking", "freed:3")
        ),
    ],
    "broker": ["broker.decided:20", "broker.synced:20", "broker.answered:20"],
    "receiver": [f"receiver.{name}:2" for name in ("received", "claimed", "affected", "committed", "acknowledged")],
}
BROKER = ["--auto-create-topics", "off", "--lease-seconds", "1", "--max-attempts", "100000", "--retry-backoff", "0.05"]
FEW: dict[str, list[str]] = {
    "sender": ["sender.sent:3"],
    "relay": ["relay.sent:2", "relay.marking"],
    "broker": [],
    "receiver": ["receiver.affected:2"],
}
"""The worst of them, for databases whose steps are the same."""
PATIENCE = 180.0


class Role:
    """One of the processes: dies at each of its points in turn, and is started again; at last without any. ``given``:
    the role of the zygote's child, and its arguments."""

    def __init__(
        self, name: str, zygote: Zygote, given: tuple[str, dict[str, Any]], log: Path, points: list[str]
    ) -> None:
        self.name, self._zygote, self._given, self._log, self._points = name, zygote, given, log, points
        self.died: list[str] = []
        self._pid: int | None = None
        self._lock = threading.Lock()  # around what the zygote is asked of one child: it answers an end once
        self._thread = threading.Thread(target=self._through, name=name, daemon=True)
        self.wounded = threading.Event()
        """Died at all of its points."""

    def start(self) -> None:
        self._thread.start()

    def launch(self, point: str | None = None) -> None:
        role, arguments = self._given
        with self._lock:
            self._pid = self._zygote.start(role, point, log=self._log, **arguments)

    def ended(self) -> int | None:
        """The exit code of the child that was launched last, told once."""
        with self._lock:
            code = 0 if self._pid is None else self._zygote.poll(self._pid)
            if code is not None:
                self._pid = None
        return code

    def wait(self) -> int:
        while (code := self.ended()) is None:
            time.sleep(0.01)
        return code

    def _through(self) -> None:
        for point in self._points:
            self.launch(point)
            code = self.wait()
            self.died.append(point if code == -signal.SIGKILL else f"{point} with {code}")
        self.launch()
        self.wounded.set()

    def signal(self, number: int) -> None:
        """Send a signal to the child, if there is one."""
        with self._lock:
            if self._pid is not None:
                os.kill(self._pid, number)

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        self._points = []
        while self._thread.is_alive():
            self.signal(signal.SIGKILL)
            self._thread.join(0.05)
        self.signal(signal.SIGKILL)
        self.wait()


class World:
    """The two databases, the broker's address, and the four roles."""

    def __init__(
        self,
        zygote: Zygote,
        folder: Path,
        sender_url: str,
        receiver_url: str,
        points: dict[str, list[str]],
        relay_options: list[str],
        relays: int,
    ) -> None:
        self.sender, self.receiver = (relay_nodes.engine_at(url) for url in (sender_url, receiver_url))
        for engine in (self.sender, self.receiver):
            if engine.dialect.name == "sqlite":
                with engine.connect() as connection:
                    connection.exec_driver_sql("PRAGMA journal_mode = WAL")
            outbox.migrate(engine)
            relay_nodes.metadata.create_all(engine)
        address = f"127.0.0.1:{free_port()}"
        self.broker_url = f"escrow://{address}"
        serve = ["serve", "-d", str(folder / "data"), "-l", address, *BROKER]
        given: dict[str, tuple[str, dict[str, Any]]] = {
            "broker": ("command", {"line": serve}),
            "sender": ("sender", {"database": sender_url, "pause": 0.03}),
            "receiver": ("receiver", {"database": receiver_url, "broker": self.broker_url}),
        }
        relay = ["outbox", "relay", "-d", sender_url, "--to", self.broker_url, "--lease", "1s"]
        relay += ["--redeliveries", "100000", "--redelivery-interval", "200ms", "--poll-interval", "50ms"]
        relay += ["-o", "timeout=0.5", *relay_options]
        for number in range(relays):
            given[f"relay{number or ''}"] = ("command", {"line": relay})
        self.roles = {
            name: Role(name, zygote, one, folder / f"{name}.log", points.get(name, [])) for name, one in given.items()
        }

    def close(self) -> None:
        for role in self.roles.values():
            role.kill()
        self.sender.dispose()
        self.receiver.dispose()

    def make_topic(self, name: str) -> None:
        def made() -> bool:
            with mq.connect(self.broker_url) as bus:
                bus.admin.create_topic(name, 2, may_exist=True)
                return True

        eventually(lambda: _tried(made), f"no topic {name}", PATIENCE)

    def numbers(self, table: sa.Table) -> list[int]:
        engine = self.sender if table is business else self.receiver
        column = table.c.number
        with engine.connect() as connection:
            return list(connection.scalars(sa.select(column).order_by(*table.primary_key)))

    def outbox_rows(self) -> list[Any]:
        with self.sender.connect() as connection:
            return list(connection.execute(sa.select(trans_message.c.id, trans_message.c.state)).all())

    def run(self) -> None:
        """Everybody dies at every point; then faults stop, the sender too, and the rest drains."""
        self.roles["broker"].start()
        self.make_topic("orders")
        for name, role in self.roles.items():
            if name != "broker":
                role.start()
        relay = self.roles["relay"]
        eventually(lambda: "relay.marking" in relay.died, f"the relay died at {relay.died} only", PATIENCE)
        self.make_topic("late")
        for role in self.roles.values():
            assert role.wounded.wait(PATIENCE), (
                f"{role.name} died at {role.died} only:\n{role._log.read_text()[-3000:]}"
            )
            assert role.died == role._points
        eventually(lambda: len(self.numbers(business)) > 40, "the sender is stuck", PATIENCE)
        assert self.roles["sender"].stop() == 0
        orders = set(self.numbers(business))
        eventually(lambda: set(self.numbers(effects)) >= orders, "not all orders had their effect", PATIENCE)

    def judge(self, *, kept: bool) -> None:
        """I24 and I37 to I40, by id."""
        orders = self.numbers(business)
        assert orders == list(range(1, len(orders) + 1))
        happened = self.numbers(effects)
        assert sorted(happened) == orders  # each once: none lost, none twice, none from nowhere
        if kept:
            rows = self.outbox_rows()
            assert sorted(bytes(row.id) for row in rows) == sorted(
                model.message_id(relay_nodes.identity(n)) for n in orders
            )
            assert {State(row.state) for row in rows} == {State.SENT}
        else:
            eventually(lambda: not self.outbox_rows(), "rows are left in the outbox")
        for topic in relay_nodes.TOPICS:
            for key in range(relay_nodes.KEYS):
                ours = [
                    n
                    for n in happened
                    if n % 7 and n % relay_nodes.KEYS == key and relay_nodes.TOPICS[n % 11 == 0] == topic
                ]
                assert ours == sorted(ours), f"key {key} of {topic} came out of order"


def _tried(act: Any) -> bool:
    try:
        return bool(act())
    except mq.EscrowError:
        return False


def matrix(
    zygote: Zygote, folder: Path, urls: list[str], *, kept: bool, points: dict[str, list[str]] = POINTS, relays: int = 1
) -> None:
    world = World(zygote, folder, urls[0], urls[1], points, ["--keep", "1h"] if kept else [], relays)
    try:
        world.run()
        world.judge(kept=kept)
        for name, role in world.roles.items():
            if name != "sender":
                assert role.stop() == 0, f"{name} did not stop cleanly"
        with world.sender.connect() as connection:
            assert not connection.scalar(sa.text("SELECT COUNT(*) FROM trans_lane WHERE owner IS NOT NULL"))
    finally:
        world.close()


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    made = Zygote(Path(relay_nodes.__file__))
    yield made
    made.close()


def sqlite_files(folder: Path) -> list[str]:
    return [f"sqlite:///{folder / name}.db" for name in ("sender", "receiver")]


@pytest.mark.invariant("I24", "I37", "I38", "I40")
def test_everybody_killed_between_every_two_steps(zygote: Zygote, tmp_path: Path) -> None:
    matrix(zygote, tmp_path, sqlite_files(tmp_path), kept=True)


@pytest.fixture(params=["postgresql", "mariadb"])
def two_databases(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[str]]:
    """Fresh databases of the sender and the receiver, on a real server."""
    server = request.getfixturevalue("postgres_url" if request.param == "postgresql" else "mariadb_url")
    names = [f"{name}_{uuid.uuid4().hex[:12]}" for name in ("sender", "receiver")]
    with databases(names, tmp_path, server) as urls:
        yield urls


@pytest.mark.invariant("I38")
def test_killed_where_it_hurts_on_real_databases(zygote: Zygote, tmp_path: Path, two_databases: list[str]) -> None:
    matrix(zygote, tmp_path, two_databases, kept=False, points=FEW)


@pytest.mark.long
@pytest.mark.parametrize("kept", [True, False], ids=["rows are kept", "rows are deleted"])
@pytest.mark.parametrize("relays", [1, 3])
def test_everybody_killed_on_sqlite(zygote: Zygote, tmp_path: Path, kept: bool, relays: int) -> None:
    matrix(zygote, tmp_path, sqlite_files(tmp_path), kept=kept, relays=relays)


@pytest.mark.long
@pytest.mark.parametrize("kept", [True, False], ids=["rows are kept", "rows are deleted"])
@pytest.mark.parametrize("relays", [1, 3])
def test_everybody_killed_on_real_databases(
    zygote: Zygote, tmp_path: Path, two_databases: list[str], kept: bool, relays: int
) -> None:
    matrix(zygote, tmp_path, two_databases, kept=kept, relays=relays)
