"""A broker, embedded or served: the same tests for both. A served one is a real process on a fresh folder, with its log
there or in a fresh partition of a real Kafka: of one node in the suite, of three in the long form.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import escrowmq as mq
from escrowmq.broker import actions, calls, embedded
from escrowmq.log.commit_log import open_log
from escrowmq.log.kafka.cluster.opening import create_topics
from escrowmq.log.kafka.replica import PartitionReplica
from escrowmq.log.seam import CommitLog
from escrowmq.platform.disk import RealDisk
from escrowmq.testing.partitions import MemoryKafka
from escrowmq.wire.actions.table import ACTIONS
from escrowmq_lab.servers.process import free_port
from escrowmq_lab.servers.seam import Absent
from forked import Forked
from wire_conformance import check

QUICK = {
    "transaction_timeout": 0.2,
    "check_interval": 0.2,
    "check_max": 1000,
    "retry_backoff": 0.05,
    "lease_seconds": 120.0,
}
"""Settings under which check-back and redelivery come to pass within a test. On a machine that stands still for a
minute, no transaction is parked, and no lease ends.
"""


class Broker:
    """One broker on one folder. ``connect()`` and ``aconnect()`` make buses; ``restart()`` needs all of them closed
    when it is embedded."""

    is_served = False

    def __init__(
        self, folder: Path, settings: dict[str, Any], log: str | None = None, *, silence: str | None = None
    ) -> None:
        self.folder = folder
        self.settings = settings
        self.log = log
        self.silence = silence or SILENCE

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

    is_served = True
    process: subprocess.Popen[str] | None = None
    address = ""

    @property
    def url(self) -> str:
        return f"escrow://{self.address}"

    def options(self) -> dict[str, Any]:
        return {}

    def start(self) -> None:
        if self.address:
            assert self._starts(self.address), "the broker did not start"
        else:
            self.address = next(address for address in _free_addresses() if self._starts(address))
        if self.log is not None:
            self._wait_until_it_leads()

    def _starts(self, address: str) -> bool:
        """Start it there; whether it does."""
        flags = [part for name, value in self.settings.items() for part in (f"--{name.replace('_', '-')}", str(value))]
        command = [sys.executable, "-m", "escrowmq", "serve", "-d", str(self.folder), "-l", address, "--json"]
        if self.log is not None:
            command += ["--log", self.log, "--silence", self.silence]
        self.process = Forked([*command, *flags], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        ready = self.process.stdout.readline()
        if not ready:
            self.process.wait()
            self.process.stdout.close()
            self.process = None
            return False
        assert json.loads(ready)["url"] == f"escrow://{address}"
        return True

    def _wait_until_it_leads(self) -> None:
        """It listens before it leads: what was connected stays so, and a new connection is refused until then."""
        deadline = time.monotonic() + 240.0
        while True:
            try:
                with self.connect() as bus:
                    bus.router.links[0].action("hello", {}, 30.0)
                return
            except mq.errors.Unknown:
                assert time.monotonic() < deadline, "the broker does not lead"
                time.sleep(0.05)

    def dies_of(self, act: Callable[[], object]) -> None:
        """Call what kills the broker at a failpoint, and see that it is dead: that an answer is late does not say
        so."""
        assert self.process is not None
        while self.process.returncode is None:
            with pytest.raises(mq.Unknown):
                act()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(60)
        assert self.process.returncode == -signal.SIGKILL

    def stop(self, *, kill: bool = False) -> None:
        if self.process is not None:
            (self.process.kill if kill else self.process.terminate)()
            try:
                code = self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.send_signal(signal.SIGABRT)  # it writes where its threads are, and ends
                code = self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()
            self.process = None
            assert kill or code == 0, f"the broker stopped with {code}"


def _free_addresses() -> Iterator[str]:
    """Addresses to try. No connection gets such a port by chance while a broker that was killed is away."""
    for _ in range(5):
        yield f"127.0.0.1:{free_port()}"


class OnPartition(Broker):
    """An embedded broker whose log is a partition of a Kafka in memory, the folder its mirror. ``restart`` loses the
    folder."""

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
    replica = PartitionReplica(disk, kafka.partitions(), url="escrow://here:1", **options)
    while replica.is_behind():
        replica.follow(1.0)
    return replica.take_over(version)


KINDS = {"embedded": Broker, "served": Served, "partition": OnPartition, "kafka": Served, "kafka-three": Served}
SERVED = [kind for kind, made in KINDS.items() if made.is_served]
STOP_SECONDS = 120.0
"""A broker that has not ended so long after SIGTERM hangs."""

SILENCE = "4"
"""Seconds after which a broker that was killed leads again, at least. With less a busy machine is late with its signs
of life, and the broker refuses calls.
"""
SHARED_SILENCE = "60"
"""The same of brokers that are never killed."""
LOGS = 64
"""Partitions that a topic for logs has: to make them at once costs a tenth of what a topic for each broker does."""


class Logs:
    """Fresh partitions of Kafka, by the kind of broker: their URLs."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._request = request
        self._free: dict[str, list[str]] = {}

    def take(self, kind: str) -> str | None:
        """One for a broker of this kind; None if its log is in its folder."""
        if not kind.startswith("kafka"):
            return None
        free = self._free.setdefault(kind, [])
        if not free:
            free += self._make(kind)
        return free.pop(0)

    def _make(self, kind: str) -> list[str]:
        three = kind == "kafka-three"
        url = self._request.getfixturevalue("three_nodes_url" if three else "kafka_url")
        topic, asked = f"logs-{uuid.uuid4().hex[:8]}", f"replication={3 if three else 1}"
        create_topics(f"{url}/{topic}?{asked}", partitions=LOGS)
        return [f"{url}/{topic}/{number}?{asked}" for number in range(LOGS)]


@pytest.fixture(scope="session")
def three_nodes_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a Kafka of three nodes."""
    from escrowmq_lab.servers import kafka

    try:
        kafka.libraries()
    except Absent as problem:
        pytest.skip(str(problem))
    with kafka.cluster(tmp_path_factory.mktemp("three")) as made:
        yield made.url


@pytest.fixture(scope="session")
def logs(request: pytest.FixtureRequest) -> Logs:
    """Where brokers of the kinds on Kafka keep their logs."""
    return Logs(request)


@pytest.fixture(autouse=True)
def answers_have_their_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every answer of an embedded broker to an action has the type that the wire says."""

    def act(engine: Any, name: str, request: Any) -> Any:
        answer = actions.act(engine, name, request)
        check(answer, ACTIONS[name].answer, f"answer of {name}")
        return answer

    monkeypatch.setattr(calls, "act", act)


@pytest.fixture
def make_broker(tmp_path: Path, logs: Logs) -> Iterator[Callable[..., Broker]]:
    """Make brokers of a kind, with settings, on folders of their own; all are stopped at the end."""
    made: list[Broker] = []

    def make(kind: str, **settings: Any) -> Broker:
        broker = KINDS[kind](tmp_path / f"data-{len(made)}", {**QUICK, **settings}, logs.take(kind))
        broker.start()
        made.append(broker)
        return broker

    yield make
    for broker in made:
        broker.stop()


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory, logs: Logs) -> Iterator[Callable[[str], Broker]]:
    """One broker a kind for all tests that need nothing special; their names do not meet. It is not to be killed."""
    made: dict[str, Broker] = {}

    def get(kind: str) -> Broker:
        if kind not in made:
            made[kind] = KINDS[kind](
                tmp_path_factory.mktemp("shared") / "data", QUICK, logs.take(kind), silence=SHARED_SILENCE
            )
            made[kind].start()
        return made[kind]

    yield get
    for broker in made.values():
        broker.stop()


ON_KAFKA = ["kafka", pytest.param("kafka-three", marks=pytest.mark.long)]


@pytest.fixture(params=["embedded", "served", *ON_KAFKA, pytest.param("partition", marks=pytest.mark.long)])
def kind(request: pytest.FixtureRequest) -> str:
    """Where the broker is, and its log."""
    if request.param not in ("embedded", "served") and request.module.__name__ == "test_damage":
        pytest.skip("what is damaged in a mirror is followed again")
    return str(request.param)


@pytest.fixture(params=["served", *ON_KAFKA])
def served_kind(request: pytest.FixtureRequest) -> str:
    """The same, of the served ones: for tests that kill or pause the broker's process."""
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
        deadline = time.monotonic() + 60.0
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
