""":class:`Readable`, the interface that reads and look-ups use: an engine, or a data folder without a broker."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

from escrowmq.broker.writer.consumers import Consumers
from escrowmq.errors import EscrowError
from escrowmq.ledger.ledger import Ledger
from escrowmq.log.seam import StoredLog
from escrowmq.platform.clock import Clock
from escrowmq.settings import BrokerSettings

T = TypeVar("T")


class HoldsLedger(Protocol):
    """A ledger as of a time, and whether it can continue."""

    ledger: Ledger
    time_us: int
    failure: EscrowError | None
    full: bool
    full_because: str


class Connected(Protocol):
    """The producers that are connected."""

    def count(self, group: str) -> int:
        """Return how many sessions of a producer group are connected."""

    def about(self, transaction: int) -> tuple[int | None, int | None]:
        """Return the session that is asked about a transaction now, and when UNKNOWN was last answered about it
        (microseconds); None for each if not known."""


class Readable(Protocol):
    """A shard whose ledger and log can be read."""

    settings: BrokerSettings
    clock: Clock

    @property
    def log(self) -> StoredLog: ...
    @property
    def shard(self) -> HoldsLedger: ...
    @property
    def listeners(self) -> Connected: ...
    @property
    def consumers(self) -> Consumers: ...
    @property
    def status(self) -> str: ...

    def receiving(self, group: str) -> int:
        """Return how many receives of a consumer group wait for messages."""

    def look(self, look: Callable[[], T]) -> Future[T]:
        """Run ``look`` where the ledger may be read. The future is done when what it read is durable."""

    def glance(self, look: Callable[[], T]) -> Future[T]:
        """As :meth:`look`, for a query that changes nothing, derived data included; perhaps on the calling thread."""

    def wait_for(self, look: Callable[[], T], wait_us: int) -> Future[T]:
        """As :meth:`look`, again until it is not None; None after ``wait_us``."""
