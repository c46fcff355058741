"""Threads at a running engine: rounds may overlap with syncs, answers may not overtake them.

Images of the disk are taken at every operation, on whatever thread does it; each must hold whatever had been answered
when it was taken. A disk that fails in the middle must stop everybody.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from shard_judge import demand
from shard_world import SEED, Violation

from escrowmq.broker.writer.engine import Engine
from escrowmq.errors import Code, EscrowError
from escrowmq.ledger import listings
from escrowmq.ledger.commands import End, OpenSession, Prepare, Send
from escrowmq.log.commit_log import open_log
from escrowmq.model import TransactionId, message_id
from escrowmq.platform.clock import SystemClock
from escrowmq.schemas import ENDING, ID
from escrowmq.settings import BrokerSettings
from escrowmq.testing.disks import FaultDisk
from escrowmq.testing.ledgers import outgoing

SETTINGS = BrokerSettings(segment_bytes=65_536, snapshot_bytes=1 << 16)
THREADS, CALLS = 6, 40
Fact = tuple[str, bytes, int]


class Facts:
    """What was answered so far; noted in the callback of the answer itself."""

    def __init__(self) -> None:
        self.told: list[Fact] = []
        self.errors: list[EscrowError] = []
        self._lock = threading.Lock()

    def note(self, done: Future[Any], facts: Callable[[Any], list[Fact]]) -> None:
        with self._lock:
            problem = done.exception()
            if isinstance(problem, EscrowError):
                self.errors.append(problem)
            else:
                demand(not self.errors or problem is not None, "I34: answered after a failed sync")
                self.told += facts(done.result())


class WatchedDisk(FaultDisk):
    """Takes what a crash would leave before some of its operations, and the facts told by then."""

    def __init__(self, facts: Facts, **options: Any) -> None:
        super().__init__(3, **options)
        self.images: list[tuple[int, FaultDisk]] = []
        self._facts = facts
        self._serial = threading.RLock()

    def _begin(self, what: str) -> int | None:
        with self._serial:
            told = len(self._facts.told)  # before the survivors: what is told while they are taken need not be there
            self.images.append((told, self.survivors("dropped", self.operations)))
            return super()._begin(what)


def opened(disk: FaultDisk) -> Engine:
    clock = SystemClock()
    return Engine(open_log(disk, segment_bytes=SETTINGS.segment_bytes, clock=clock, seed=SEED), clock, SETTINGS)


def client(engine: Engine, facts: Facts, number: int) -> None:
    """Send, prepare and commit, one after the other, several on their way at a time."""

    def put(command: Any, told: Callable[[Any], list[Fact]]) -> Any:
        future = engine.submit(command)
        noted = threading.Event()
        future.add_done_callback(lambda done: (facts.note(done, told), noted.set()))
        assert noted.wait(60)
        return future.result(timeout=0)

    try:
        session = put(OpenSession("shop", f"i{number}", True), lambda _: [])
        plain = put(OpenSession("plain", f"i{number}", False), lambda _: [])
        for n in range(CALLS):
            one = message_id(f"{number}/{n}")
            batch = outgoing([{"message_id": one, "body": bytes(300)}])
            put(
                Send(batch, np.array([plain])),
                lambda a, i=one: [("sent", i, a.column("position")[0].as_py())],
            )
            two = message_id(f"{number}/{n}/half")
            half = put(
                Prepare(outgoing([{"message_id": two, "body": bytes(300)}]), np.array([session])),
                lambda a, i=two: [("prepared", i, a.column("position")[0].as_py())],
            )
            identity = half.column("transaction")[0].as_py()
            put(_commit(identity, session), lambda _, i=identity: [("committed", i, 0)])
    except EscrowError as problem:
        demand(problem.code is Code.SHARD_STOPPED, f"refused: {problem}")


def _commit(identity: bytes, session: int) -> End:
    arrays = [pa.array([identity], ID), pa.array([1], pa.uint8())]
    return End(pa.RecordBatch.from_arrays(arrays, schema=ENDING), np.array([session]))


def load(disk: WatchedDisk, facts: Facts) -> None:
    engine = opened(disk)
    engine.start()
    threads = [threading.Thread(target=client, args=(engine, facts, number)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    engine.stop()


def verify(disk: FaultDisk, told: list[Fact]) -> None:
    """Everything told is there."""
    engine = opened(disk)
    ledger, log = engine.shard.ledger, engine.log
    at = np.array([position for kind, _, position in told if kind != "committed"], np.int64)
    demand(not len(at) or at.max() < log.next_position, "I1: positions are missing")
    ids = log.read(at).column("message_id").to_pylist()
    demand(ids == [identity for kind, identity, _ in told if kind != "committed"], "I1: another message stands there")
    visible = set[int]()
    for queue in ledger.topics.queues:
        visible |= set(queue.positions(queue.head, queue.end).tolist())
    demand({position for kind, _, position in told if kind == "sent"} <= visible, "I1: a message is lost")
    states = {t["position"]: t["state"] for t in listings.transactions(ledger, limit=100_000)}
    for kind, identity, _ in told:
        if kind == "committed":
            position = TransactionId.from_bytes(identity).position
            demand(states.get(position) == "committed" and position in visible, "I1: a commit is lost")
    engine.stop()


@pytest.mark.invariant("I1")
def test_nothing_is_answered_before_it_is_durable_however_rounds_and_syncs_overlap() -> None:
    facts = Facts()
    disk = WatchedDisk(facts)
    load(disk, facts)
    assert not facts.errors
    assert len(facts.told) == 3 * THREADS * CALLS
    step = max(len(disk.images) // 30, 1)
    for count, image in disk.images[::step]:
        verify(image, facts.told[:count])
    verify(disk.survivors("dropped", 1), facts.told)


@pytest.mark.invariant("I34")
@pytest.mark.parametrize("operation", [60, 90, 133, 160])
def test_a_failing_disk_stops_everybody_and_what_was_answered_is_there(operation: int) -> None:
    facts = Facts()
    disk = WatchedDisk(facts, failures=dict.fromkeys(range(operation, operation + 5), errno.EIO))
    load(disk, facts)
    assert facts.errors
    assert {problem.code for problem in facts.errors} == {Code.SHARD_STOPPED}
    verify(disk.survivors("dropped", 2), facts.told)
    verify(disk.survivors("kept", 2), facts.told)


def test_the_watch_notices_answers_that_overtake_the_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = Facts()
    disk = WatchedDisk(facts)
    monkeypatch.setattr(WatchedDisk, "_sync", lambda self, node: self._begin("sync") and None)
    load(disk, facts)
    with pytest.raises((Violation, EscrowError)):
        verify(disk.survivors("dropped", 1), facts.told)
