"""A broker, embedded or served: the same tests for both. A served one is a real process on a fresh folder."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import escrowmq as mq
from escrowmq.broker import actions, calls, embedded
from escrowmq.log.commit_log import open_log
from escrowmq.log.kafka.replica import open_replica
from escrowmq.log.seam import CommitLog
from escrowmq.platform.disk import RealDisk
from escrowmq.testing.partitions.memory import MemoryKafka
from escrowmq.wire.actions.table import ACTIONS
from forked import Forked
from wire_conformance import check

QUICK = {"transaction_timeout": 0.2, "check_interval": 0.2, "retry_backoff": 0.05, "lease_seconds": 30.0}
"""Settings under which check-back and redelivery come to pass within a test."""


class Broker:
    """One broker on one folder. ``connect()`` and ``aconnect()`` make buses; ``restart()`` needs all of them closed
    when it is embedded."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder = folder
        self.settings = settings

    @property
    def url(self) -> str:
        return f"file:{self.folder}"

    def options(self) -> dict[str, Any]:
        return self.settings

    def connect(self) -> mq.Bus:
        return mq.connect(self.url, **self.options())

    async def aconnect(self) -> mq.AsyncBus:
        return await mq.aconnect(self.url, **self.options())

    def start(self) -> None:
        """Serve, if this is a served broker."""

    def stop(self, *, kill: bool = False) -> None:
        """Stop serving, if this is a served broker."""

    def restart(self, *, kill: bool = False) -> None:
        self.stop(kill=kill)
        self.start()


class Served(Broker):
    """A broker in a process of its own."""

    process: subprocess.Popen[str] | None = None
    address = "127.0.0.1:0"

    @property
    def url(self) -> str:
        return f"escrow://{self.address}"

    def options(self) -> dict[str, Any]:
        return {}

    def start(self) -> None:
        flags = [part for name, value in self.settings.items() for part in (f"--{name.replace('_', '-')}", str(value))]
        command = [sys.executable, "-m", "escrowmq", "serve", "-d", str(self.folder), "-l", self.address, "--json"]
        self.process = Forked([*command, *flags], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        ready = self.process.stdout.readline()
        assert ready, "the broker did not start"
        self.address = json.loads(ready)["url"].removeprefix("escrow://")

    def stop(self, *, kill: bool = False) -> None:
        if self.process is not None:
            (self.process.kill if kill else self.process.terminate)()
            code = self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()
            self.process = None
            assert kill or code == 0, f"the broker stopped with {code}"


class OnPartition(Broker):
    """An embedded broker whose log is a partition of a Kafka in memory, the folder its mirror. ``restart`` loses the folder."""

    def start(self) -> None:
        embedded.open_log = _open_log
        PARTITIONS.setdefault(self.folder.resolve(), MemoryKafka())

    def restart(self, *, kill: bool = False) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


PARTITIONS: dict[Path, MemoryKafka] = {}


def _open_log(disk: RealDisk, **options: Any) -> CommitLog:
    """A log in a folder, or on a partition if the folder is a mirror's."""
    kafka = PARTITIONS.get(getattr(disk, "folder", None))
    if kafka is None:
        return open_log(disk, **options)
    version = options.pop("version")
    replica = open_replica(disk, kafka.partitions(), url="escrow://here:1", **options)
    while replica.is_behind():
        replica.follow(1.0)
    return replica.take_over(version)


KINDS = {"embedded": Broker, "served": Served, "partition": OnPartition}


@pytest.fixture(autouse=True)
def answers_have_their_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every answer of an embedded broker to an action has the type that the wire says."""

    def act(engine: Any, name: str, request: Any) -> Any:
        answer = actions.act(engine, name, request)
        check(answer, ACTIONS[name].answer, f"answer of {name}")
        return answer

    monkeypatch.setattr(calls, "act", act)


@pytest.fixture
def make_broker(tmp_path: Path) -> Iterator[Callable[..., Broker]]:
    """Make brokers of a kind, with settings, on folders of their own; all are stopped at the end."""
    made: list[Broker] = []

    def make(kind: str, **settings: Any) -> Broker:
        broker = KINDS[kind](tmp_path / f"data-{len(made)}", {**QUICK, **settings})
        broker.start()
        made.append(broker)
        return broker

    yield make
    for broker in made:
        broker.stop()


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Broker]]:
    """One broker a kind for all tests that need nothing special; their names do not meet."""
    made: dict[str, Broker] = {}

    def get(kind: str) -> Broker:
        if kind not in made:
            made[kind] = KINDS[kind](tmp_path_factory.mktemp("shared") / "data", QUICK)
            made[kind].start()
        return made[kind]

    yield get
    for broker in made.values():
        broker.stop()


@pytest.fixture(params=["embedded", "served", pytest.param("partition", marks=pytest.mark.long)])
def kind(request: pytest.FixtureRequest) -> str:
    """Where the broker is, and its log."""
    if request.param == "partition" and request.module.__name__ == "test_damage":
        pytest.skip("what is damaged in a mirror is followed again")
    return str(request.param)


@pytest.fixture
def broker(shared: Callable[[str], Broker], kind: str) -> Broker:
    """A broker with quick settings, shared with other tests."""
    return shared(kind)


@pytest.fixture
def own(make_broker: Callable[..., Broker], kind: str) -> Callable[..., Broker]:
    """Make a broker for this test alone, with settings."""
    return lambda **settings: make_broker(kind, **settings)


@pytest.fixture
def bus(broker: Broker) -> Iterator[mq.Bus]:
    """A bus to it."""
    with broker.connect() as bus:
        yield bus


@pytest.fixture
def drain() -> Callable[..., list[Any]]:
    """Receive and acknowledge until a group has ``count`` messages, then make sure that no more come."""

    def take(consumer: mq.Consumer, count: int, *, quiet: float = 0.1) -> list[Any]:
        found: list[Any] = []
        deadline = time.monotonic() + 30.0
        while len(found) < count:
            assert time.monotonic() < deadline, f"{len(found)} of {count} messages came"
            for message in consumer.receive(1000, wait=1.0):
                found.append(message)
                message.ack()
        for message in consumer.receive(1000, wait=quiet):
            found.append(message)
        consumer.flush()
        assert len(found) == count, f"{len(found)} messages came instead of {count}"
        return found

    return take
