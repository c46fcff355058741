"""A data folder as a :class:`escrowmq.wire.Link` without a broker, read-only.

For programs that read much: the audit, the Spark source. The ledger is folded from the newest snapshot and the frames
after it, once; reads then run the same code as a broker's. Of a folder in use, the part that its broker reported as
durable at the opening is read. If the broker does not answer, or the folder is behind, ``health`` and the log report
what may be missing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import NoReturn, TypeVar

import pyarrow as pa

from escrowmq.broker.actions import act
from escrowmq.broker.failures import answer
from escrowmq.broker.reads.views import open_view
from escrowmq.broker.writer.consumers import Consumers
from escrowmq.broker.writer.recovery import fold
from escrowmq.errors import Code, EscrowError, error
from escrowmq.log.offline import Durable, OfflineLog, open_offline
from escrowmq.platform.clock import Clock, ContinuedClock, SystemClock
from escrowmq.platform.disk import Holder, RealDisk
from escrowmq.settings import BrokerSettings, nearest
from escrowmq.wire import BatchStream, Exchange, ExchangeOptions, Json, ParcelsByExchange, ReadRequest
from escrowmq.wire.actions.brokers import HEALTH
from escrowmq.wire.actions.table import ACTIONS

T = TypeVar("T")

Ask = Callable[[str], Durable]  # requests from the broker at a URL how far its log is durable; raises EscrowError

LAG_SECONDS = 2.0  # how long a folder may be behind its broker: a node writes it a moment after Kafka has the data
_LAG_PAUSE = 0.02

logger = logging.getLogger(__name__)

READ_ONLY = [action.name for action in ACTIONS.values() if action.reads_only]


class _NoConnections:
    """No connected producers."""

    def count(self, group: str) -> int:
        return 0

    def about(self, transaction: int) -> tuple[int | None, int | None]:
        return None, None


class OfflineShard:
    """A :class:`.Readable` of a log and the ledger folded from it. ``missing``: what may be missing in it, or empty."""

    failure: EscrowError | None = None
    full = False
    full_because = ""

    def __init__(self, log: OfflineLog, missing: str = "") -> None:
        self.log = log
        self.missing = missing
        self.settings = BrokerSettings()
        self.clock: Clock = ContinuedClock(SystemClock(), log.last_time_us)
        self.shard = self
        self.listeners = _NoConnections()
        self.consumers = Consumers()
        self.time_us = log.last_time_us
        self.ledger = fold(log).ledger
        self._lock = threading.Lock()

    def receiving(self, group: str) -> int:
        """Return 0: without a broker no receive waits."""
        return 0

    @property
    def status(self) -> str:
        """``ok``, or ``damaged``: the log is, in places."""
        return "damaged" if self.log.is_damaged else "ok"

    def look(self, look: Callable[[], T]) -> Future[T]:
        """Run ``look`` at once, one at a time. Returns a done future with its result or its EscrowError."""
        with self._lock:
            try:
                return answer(Future(), look())
            except EscrowError as problem:
                return answer(Future(), problem)

    glance = look

    def wait_for(self, look: Callable[[], T], wait_us: int) -> Future[T]:
        """As :meth:`look`, once."""
        return self.look(look)


def open_shard(folder: Path, ask: Ask | None = None) -> OfflineShard:
    """Open the shard in a folder for reading, without its broker. If a broker uses the folder, only what ``ask``
    reports as durable is read; waits a moment for a folder that is behind. Raises Misuse(NOT_A_DATA_FOLDER),
    Corrupt(DAMAGED, NEWER_FORMAT)."""
    disk, deadline = RealDisk(folder, read_only=True), time.monotonic() + LAG_SECONDS
    while True:
        holder = disk.holder()
        durable, why = (None, "") if holder is None else _ask_holder(holder, ask)
        log = open_offline(disk, in_use=holder is not None, durable=durable)
        if disk.holder() == holder:  # otherwise it was opened or closed meanwhile
            missing, is_lag = _describe_missing(folder, log, holder, durable, why)
            if not is_lag or time.monotonic() > deadline:
                return OfflineShard(log, missing)
        time.sleep(_LAG_PAUSE)


def _describe_missing(
    folder: Path, log: OfflineLog, holder: Holder | None, durable: Durable | None, why: str
) -> tuple[str, bool]:
    """Return a text about messages that may be missing in a folder ("" if none), and whether they may arrive within a
    moment, so that opening it again helps. ``holder``: the broker that uses the folder, None if none does; ``durable``:
    how far it reported its log to be durable, None if it did not; ``why``: the reason why not, for the text."""
    if holder is None:
        text = f"{folder} is a copy of a log on Kafka that no broker updates now: newer messages may be missing"
        return text if log.is_mirror else "", False
    if durable is not None and durable.shard != log.shard:
        why = f"{holder.url} is shard {durable.shard:08x}, and the folder {log.shard:08x}"
    elif durable is not None:
        is_whole = log.epoch == durable.epoch and log.next_position >= durable.position
        text = (
            f"{folder} has the log up to position {log.next_position} (opened {log.epoch} times), and its broker up to "
            f"{durable.position} ({durable.epoch}): the rest may be missing"
        )
        return "" if is_whole else text, not is_whole
    text = (
        f"{folder} is in use by process {holder.process}, which did not report how far its log is durable ({why}): "
        "what it acknowledged last may be missing"
    )
    return text, False


def _ask_holder(holder: Holder, ask: Ask | None) -> tuple[Durable | None, str]:
    """Request from the broker that uses a folder how far its log is durable. Returns that and "", or None and the
    reason."""
    if ask is None or holder.url is None:
        return None, "it serves at no URL"
    try:
        return ask(holder.url), ""
    except EscrowError as problem:
        return None, f"{holder.url}: {problem.message}"


_logged: set[str] = set()  # by this process: a stream opens its folder for each batch


class OfflineLink(ParcelsByExchange):
    """A :class:`escrowmq.wire.Link` that only reads. Calls that would write raise Denied."""

    def __init__(self, folder: Path, ask: Ask | None = None) -> None:
        folder = Path(folder).absolute()
        self.address = f"file:{folder}"
        self._shard = open_shard(folder, ask)
        if (missing := self._shard.missing) and missing not in _logged:
            _logged.add(missing)
            logger.warning("%s", missing)

    def exchange(self, kind: Exchange, batch: pa.RecordBatch, options: ExchangeOptions) -> Future[pa.RecordBatch]:
        """Return a future that failed with Denied: exchanges write, and the folder is open for reading only."""
        return answer(Future(), self._deny(str(kind)))

    def action(self, name: str, request: Mapping[str, object], timeout: float) -> Json:
        """Run an action that only reads. Raises Denied for the others. The answer to ``health`` also reports what may
        be missing."""
        if name not in READ_ONLY:
            raise self._deny(name)
        answer, missing = act(self._shard, name, request), self._shard.missing
        if name != HEALTH.name or not missing:
            return answer
        status = "incomplete" if answer["status"] == "ok" else answer["status"]
        return {"status": status, "reason": "; ".join(filter(None, (answer["reason"], missing))), "missing": missing}

    def read(self, request: ReadRequest) -> BatchStream:
        """See :meth:`escrowmq.wire.Link.read`."""
        return open_view(self._shard, request)

    def watch(self, session: int, on_checks: Callable[[pa.RecordBatch], None]) -> NoReturn:
        """Raise Denied: without a broker there are no check-backs."""
        raise self._deny("watch")

    def _deny(self, what: str) -> EscrowError:
        there = nearest(what, READ_ONLY)
        return error(Code.DENIED, f"{self.address} is open for reading only: no {what!r}", there)

    def close(self) -> None:
        """Do nothing: nothing is held open."""
