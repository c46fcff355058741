"""A data folder behind the calls of ``wire.py`` without a broker: reads and listings only, nothing is ever written.

For those who look at much: the audit, the Spark source. The ledger is folded from the newest snapshot and the frames after it,
once; reads then run the same code as a broker's. A folder in use is seen as it was durable when it was opened.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import pyarrow as pa

from escrowmq.broker.actions import (
    hello,
    list_dead_letters,
    list_groups,
    list_members,
    list_producers,
    list_topics,
    list_transactions,
    list_writers,
    lookup,
    show,
    show_writer,
    topic_offsets,
    wait_for_messages,
)
from escrowmq.broker.reads.readable import Readable
from escrowmq.broker.reads.views import open_view
from escrowmq.broker.requests import Fields
from escrowmq.broker.writer.recovery import fold
from escrowmq.errors import Code, EscrowError, error
from escrowmq.log.offline import OfflineLog, open_offline
from escrowmq.platform.clock import SystemClock
from escrowmq.platform.disk import RealDisk
from escrowmq.settings import BrokerSettings, nearest
from escrowmq.wire import Exchange

T = TypeVar("T")

ACTIONS: dict[str, Callable[[Readable, Fields], dict[str, Any]]] = {
    "hello": hello,
    "topics.list": list_topics,
    "topics.offsets": topic_offsets,
    "topics.wait": wait_for_messages,
    "groups.list": list_groups,
    "groups.members": list_members,
    "producers.list": list_producers,
    "transactions.list": list_transactions,
    "transactions.show": show,
    "dead_letters.list": list_dead_letters,
    "writers.show": show_writer,
    "writers.list": list_writers,
    "lookup": lookup,
}


class _Nobody:
    """Who is connected to a folder."""

    def count(self, group: str) -> int:
        """Nobody."""
        return 0


class OfflineShard:
    """A :class:`Readable` of a log and the ledger folded from it."""

    def __init__(self, log: OfflineLog) -> None:
        self.log = log
        self.settings = BrokerSettings()
        self.clock = SystemClock()
        self.shard = self
        self.listeners = _Nobody()
        self.time_us = log.last_time_us
        self.ledger, _ = fold(log)
        self._lock = threading.Lock()

    def look(self, look: Callable[[], T]) -> Future[T]:
        """Run ``look`` at once; one at a time, as on a broker's writer."""
        future: Future[T] = Future()
        with self._lock:
            try:
                future.set_result(look())
            except EscrowError as problem:
                future.set_exception(problem)
        return future

    def wait_for(self, look: Callable[[], T], wait_us: int) -> Future[T]:
        """As :meth:`look`: nothing will ever come."""
        return self.look(look)


def open_shard(folder: Path) -> OfflineShard:
    """The shard in a folder. Raises Misuse(NOT_A_DATA_FOLDER), Corrupt(DAMAGED, NEWER_FORMAT)."""
    disk = RealDisk(folder, read_only=True)
    return OfflineShard(open_offline(disk, in_use=disk.in_use()))


class OfflineLink:
    """A :class:`escrowmq.wire.Link` that only reads. Whatever would write raises Denied."""

    def __init__(self, folder: Path) -> None:
        self._folder = Path(folder).absolute()
        self._shard = open_shard(folder)

    @property
    def address(self) -> str:
        """``file:FOLDER``."""
        return f"file:{self._folder}"

    def exchange(self, kind: Exchange, batch: pa.RecordBatch, options: dict[str, Any]) -> Future[pa.RecordBatch]:
        """Denied."""
        failed: Future[pa.RecordBatch] = Future()
        failed.set_exception(self._denied(str(kind)))
        return failed

    def action(self, name: str, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        """The actions that only look; Denied for the others."""
        if name == "health":
            return {"status": "ok", "reason": ""}
        if (act := ACTIONS.get(name)) is None:
            raise self._denied(name)
        return act(self._shard, Fields(request))

    def read(self, request: dict[str, Any]) -> pa.RecordBatchReader:
        """See :meth:`escrowmq.wire.Link.read`."""
        return open_view(self._shard, request)

    def watch(self, session: int, on_checks: Callable[[pa.RecordBatch], None]) -> NoReturn:
        """Denied."""
        raise self._denied("watch")

    def _denied(self, what: str) -> EscrowError:
        there = nearest(what, list(ACTIONS))
        return error(Code.DENIED, f"{self.address} is open for reading only: no {what!r}", there)

    def close(self) -> None:
        """Nothing is held."""
