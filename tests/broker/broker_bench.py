"""A broker on a test's bench: fault disk, simulated clock, no threads; the test says when a round is run."""

import time
from typing import Any

import numpy as np
import pyarrow as pa

from escrowmq.broker.writer.checkback import Listener
from escrowmq.broker.writer.engine import Engine
from escrowmq.errors import Code
from escrowmq.ledger.commands import Command, End, OpenSession, Prepare, Receive, Send, Settle, Subscribe, Subscription
from escrowmq.log.commit_log import open_log
from escrowmq.model import Act, DecidedBy, Outcome
from escrowmq.schemas import CHECKS, ENDING, SETTLING
from escrowmq.settings import BrokerSettings
from escrowmq.testing.clock import SimulatedClock
from escrowmq.testing.disks import FaultDisk
from escrowmq.testing.ledgers import outgoing

SEED = bytes(range(1, 13))


class Bench:
    def __init__(self, disk: FaultDisk | None = None, **settings: Any) -> None:
        self.disk = disk or FaultDisk()
        self.clock = SimulatedClock()
        self.settings = BrokerSettings(**{"segment_bytes": 1 << 20, **settings})
        self.engine = self._open()

    def _open(self) -> Engine:
        log = open_log(self.disk, segment_bytes=self.settings.segment_bytes, clock=self.clock, seed=SEED)
        return Engine(log, self.clock, self.settings)

    def restart(self, *, clean: bool = True) -> None:
        """Stop and open anew; not ``clean``: what a crash leaves, with everything unsynced lost."""
        if clean:
            self.engine.stop()
        else:
            self.engine.upkeep.finish()
            self.disk = self.disk.survivors("dropped")
        self.engine = self._open()

    def do(self, command: Command) -> Any:
        future = self.engine.submit(command)
        self.engine.step()
        return future.result(timeout=0)

    def look(self, act: Any) -> Any:
        future = self.engine.look(act)
        self.engine.step()
        return future.result(timeout=0)

    def session(self, group: str = "g", instance: str = "i", *, transactional: bool = True) -> int:
        return self.do(OpenSession(group, instance, transactional))

    def prepare(self, session: int, *rows: dict[str, Any]) -> list[dict[str, Any]]:
        return self.do(prepare(session, *rows)).to_pylist()

    def end(self, session: int, outcome: Outcome, *ids: bytes, by: DecidedBy = DecidedBy.PRODUCER) -> list[Code]:
        return [Code(c) for c in self.do(end(session, outcome, *ids, by=by)).column("code").to_pylist()]

    def subscribe(self, group: str = "c", topic: str = "orders", **options: Any) -> None:
        self.do(Subscribe(group, Subscription(topics=(topic,), **options)))

    def receive(self, group: str = "c", member: int = 1, count: int = 100, lease: float = 60.0) -> list[int]:
        """Positions of the messages leased."""
        return self.do(Receive(group, member, count, round(lease * 1e6))).positions.tolist()

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.engine.step()

    def await_save(self) -> None:
        """Wait until the snapshot that is being saved, if any, is saved and the upkeep has noted it."""
        deadline = time.monotonic() + 60
        while self.engine.upkeep.saving is not None:
            assert time.monotonic() < deadline, "the snapshot is not saved"
            time.sleep(0.001)


def send(session: int, *rows: dict[str, Any]) -> Send:
    batch = outgoing(rows)
    return Send(batch, np.full(batch.num_rows, session))


def prepare(session: int, *rows: dict[str, Any]) -> Prepare:
    batch = outgoing(rows)
    return Prepare(batch, np.full(batch.num_rows, session))


def end(session: int, outcome: Outcome, *ids: bytes, by: DecidedBy = DecidedBy.PRODUCER) -> End:
    outcomes = pa.array([int(outcome)] * len(ids), pa.uint8())
    batch = pa.RecordBatch.from_arrays([pa.array(ids, pa.binary(16)), outcomes], schema=ENDING)
    return End(batch, np.full(len(ids), session), by)


def settle(group: str, leased: Any, act: Act = Act.ACK) -> Settle:
    rows = [
        {"lease": lease, "start": offset, "count": 1, "act": int(act), "delay_us": -1, "cause": None}
        for lease, offset in zip(leased.leases.tolist(), leased.offsets.tolist(), strict=True)
    ]
    return Settle(group, pa.RecordBatch.from_pylist(rows, schema=SETTLING))


def asked(member: Listener) -> list[dict[str, Any]]:
    """The questions that a member has got since the last time, as rows of CHECKS."""
    rows: list[dict[str, Any]] = []
    while member.waiting:
        for batch in member.batches_of(member.take()):
            assert batch.schema.equals(CHECKS)
            rows += batch.to_pylist()
    return rows
