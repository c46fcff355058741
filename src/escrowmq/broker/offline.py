"""A data folder behind :class:`escrowmq.wire.Link` without a broker: reads and listings only, nothing is ever written.

For programs that read much: the audit, the Spark source. The ledger is folded from the newest snapshot and the frames after it,
once; reads then run the same code as a broker's. A folder in use is seen as it was durable when it was opened.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import NoReturn, TypeVar

import pyarrow as pa

from escrowmq.broker.actions import act
from escrowmq.broker.failures import answer
from escrowmq.broker.reads.views import open_view
from escrowmq.broker.writer.recovery import fold
from escrowmq.errors import Code, EscrowError, error
from escrowmq.log.offline import OfflineLog, open_offline
from escrowmq.platform.clock import Clock, ContinuedClock, SystemClock
from escrowmq.platform.disk import RealDisk
from escrowmq.settings import BrokerSettings, nearest
from escrowmq.wire import Exchange, ExchangeOptions, Json, ParcelsByExchange, ReadRequest
from escrowmq.wire.actions.table import ACTIONS

T = TypeVar("T")

READ_ONLY = [action.name for action in ACTIONS.values() if action.reads_only]


class _NoConnections:
    """The producers that are connected to a folder: none."""

    def count(self, group: str) -> int:
        """None of any producer group."""
        return 0

    def about(self, transaction: int) -> tuple[int | None, int | None]:
        """Nobody is asked, and nobody has answered."""
        return None, None


class OfflineShard:
    """A :class:`~escrowmq.broker.reads.readable.Readable` of a log and the ledger folded from it."""

    failure: EscrowError | None = None
    full = False
    full_because = ""

    def __init__(self, log: OfflineLog) -> None:
        self.log = log
        self.settings = BrokerSettings()
        self.clock: Clock = ContinuedClock(SystemClock(), log.last_time_us)
        self.shard = self
        self.listeners = _NoConnections()
        self.time_us = log.last_time_us
        self.ledger, _ = fold(log)
        self._lock = threading.Lock()

    def receiving(self, group: str) -> int:
        """None of any consumer group."""
        return 0

    @property
    def status(self) -> str:
        """ok or damaged."""
        return "damaged" if self.log.is_damaged else "ok"

    def look(self, look: Callable[[], T]) -> Future[T]:
        """Run ``look`` at once; one at a time, as on a broker's writer."""
        with self._lock:
            try:
                return answer(Future(), look())
            except EscrowError as problem:
                return answer(Future(), problem)

    def glance(self, look: Callable[[], T]) -> Future[T]:
        """As :meth:`look`."""
        return self.look(look)

    def wait_for(self, look: Callable[[], T], wait_us: int) -> Future[T]:
        """As :meth:`look`: nothing will ever come."""
        return self.look(look)


def open_shard(folder: Path) -> OfflineShard:
    """The shard in a folder. Raises Misuse(NOT_A_DATA_FOLDER), Corrupt(DAMAGED, NEWER_FORMAT)."""
    disk = RealDisk(folder, read_only=True)
    return OfflineShard(open_offline(disk, in_use=disk.in_use()))


class OfflineLink(ParcelsByExchange):
    """A :class:`escrowmq.wire.Link` that only reads. Whatever would write raises Denied."""

    def __init__(self, folder: Path) -> None:
        self._folder = Path(folder).absolute()
        self._shard = open_shard(folder)

    @property
    def address(self) -> str:
        """``file:FOLDER``."""
        return f"file:{self._folder}"

    def exchange(self, kind: Exchange, batch: pa.RecordBatch, options: ExchangeOptions) -> Future[pa.RecordBatch]:
        """Denied."""
        return answer(Future(), self._denied(str(kind)))

    def action(self, name: str, request: Mapping[str, object], timeout: float) -> Json:
        """The actions that only read; Denied for the others."""
        if name not in READ_ONLY:
            raise self._denied(name)
        return act(self._shard, name, request)

    def read(self, request: ReadRequest) -> pa.RecordBatchReader:
        """See :meth:`escrowmq.wire.Link.read`."""
        return open_view(self._shard, request)

    def watch(self, session: int, on_checks: Callable[[pa.RecordBatch], None]) -> NoReturn:
        """Denied."""
        raise self._denied("watch")

    def _denied(self, what: str) -> EscrowError:
        there = nearest(what, READ_ONLY)
        return error(Code.DENIED, f"{self.address} is open for reading only: no {what!r}", there)

    def close(self) -> None:
        """Nothing is held."""
