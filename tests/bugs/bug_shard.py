"""A shard on a fault disk with a simulated clock and no threads: for the bugs that only show with a log underneath."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from escrowmq.broker.writer.engine import Engine
from escrowmq.errors import Code
from escrowmq.ledger.commands import Command, End, OpenSession, Prepare, Receive, Send, Settle, Subscribe, Subscription
from escrowmq.log.commit_log import open_log
from escrowmq.model import DecidedBy, Outcome
from escrowmq.schemas import ENDING, SETTLING
from escrowmq.settings import BrokerSettings
from escrowmq.testing.clock import SimulatedClock
from escrowmq.testing.disks import FaultDisk
from escrowmq.testing.ledgers import outgoing

SEED = bytes(range(12))


class BugShard:
    """An engine whose rounds the test runs."""

    def __init__(self, disk: FaultDisk | None = None, **settings: Any) -> None:
        self.disk = disk or FaultDisk()
        self.clock = SimulatedClock()
        self.settings = BrokerSettings(**{"segment_bytes": 1 << 16, **settings})
        log = open_log(self.disk, segment_bytes=self.settings.segment_bytes, clock=self.clock, seed=SEED)
        self.engine = Engine(log, self.clock, self.settings)
        self.engine.upkeep.finish()

    def after_a_crash(self, disk: FaultDisk | None = None) -> BugShard:
        """Another process on what the disk kept (by default only what was synced)."""
        self.engine.upkeep.finish()
        shard = BugShard(disk or self.disk.survivors("dropped"))
        shard.clock.advance((self.clock.now_us() - shard.clock.now_us()) / 1e6)
        return shard

    def do(self, command: Command) -> Any:
        """One command in a round of its own."""
        future = self.engine.submit(command)
        self.engine.step()
        return future.result(timeout=0)

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.engine.step()

    def session(self, group: str = "g", instance: str = "i", *, transactional: bool = True) -> int:
        return self.do(OpenSession(group, instance, transactional))

    def send(self, *rows: dict[str, Any]) -> list[dict[str, Any]]:
        batch = outgoing(rows)
        return self.do(Send(batch, np.zeros(batch.num_rows, np.int64))).to_pylist()

    def prepare(self, session: int, *rows: dict[str, Any]) -> list[dict[str, Any]]:
        batch = outgoing(rows)
        return self.do(Prepare(batch, np.full(batch.num_rows, session))).to_pylist()

    def end(self, session: int, outcome: Outcome, *raws: bytes, by: DecidedBy = DecidedBy.PRODUCER) -> list[Code]:
        outcomes = pa.array([int(outcome)] * len(raws), pa.uint8())
        batch = pa.RecordBatch.from_arrays([pa.array(raws, pa.binary(16)), outcomes], schema=ENDING)
        return [Code(c) for c in self.do(End(batch, np.full(len(raws), session), by)).column("code").to_pylist()]

    def subscribe(self, group: str = "cart", topic: str = "orders") -> None:
        self.do(Subscribe(group, Subscription(topics=(topic,))))

    def consume(self, group: str = "cart", count: int = 1000) -> list[bytes]:
        """Bodies of everything that is there, read from the log and acknowledged."""
        leased = self.do(Receive(group, 1, count, 60_000_000))
        if not len(leased.positions):
            return []
        bodies: list[bytes] = self.engine.log.read(leased.positions).column("body").to_pylist()
        rows = [
            {"lease": lease, "start": offset, "count": 1, "act": 0, "delay_us": 0, "cause": None}
            for lease, offset in zip(leased.leases.tolist(), leased.offsets.tolist(), strict=True)
        ]
        codes = self.do(Settle(group, pa.RecordBatch.from_pylist(rows, schema=SETTLING))).column("code").to_pylist()
        assert set(codes) == {Code.OK}
        return bodies
