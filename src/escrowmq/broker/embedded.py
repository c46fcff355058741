"""A broker inside this process, called by plain function calls. One engine per folder, shared by all its links."""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import pyarrow as pa

from escrowmq.broker.calls import Calls, Dispatcher
from escrowmq.broker.failures import answer
from escrowmq.broker.reads.lookups import warm_up
from escrowmq.broker.recording import resolve
from escrowmq.broker.writer.checkback import Listener
from escrowmq.broker.writer.engine import Engine
from escrowmq.errors import Code, EscrowError, Misuse, error
from escrowmq.log.commit_log import SegmentLog, open_log
from escrowmq.platform.clock import Clock, SystemClock
from escrowmq.platform.disk import Disk, RealDisk
from escrowmq.platform.forks import FORKED, tell_in_child
from escrowmq.platform.logs import tell
from escrowmq.settings import BrokerSettings
from escrowmq.wire import BatchStream, Exchange, ExchangeOptions, Json, Parcel, ReadRequest
from escrowmq.wire.parcels import Done


@dataclass(slots=True)
class _Shared:
    """A running engine and how many links use it."""

    calls: Calls
    users: int = 0

    def stop(self) -> None:
        self.calls.engine.stop()
        self.calls.close()


CLOSED = "the connection is closed"
_open: dict[Path, _Shared] = {}
_opening = threading.RLock()  # the collector of cycles may close another bus on the thread that opens one


def open_engine(
    folder: Path, settings: BrokerSettings, disk: Callable[[Path], Disk] = RealDisk, clock: Clock | None = None
) -> Engine:
    """Open the log of a folder, with recovery, and return its engine, not started. Unfinished operator actions are
    resolved. Raises Misuse(FOLDER_IN_USE, NOT_A_DATA_FOLDER), Corrupt, Overloaded(DISK_FULL)."""
    clock = clock or SystemClock()
    log = open_log(
        disk(folder),
        segment_bytes=settings.segment_bytes,
        compression=settings.compression,
        version=version("escrowmq"),
        clock=clock,
    )
    try:
        engine = Engine(log, clock, settings)
        _log_opened(log, engine)
        resolve(log.acts, engine.shard.ledger, engine.clock.now_us())
        return engine
    except BaseException:
        log.close(clean=False)
        raise


def _log_opened(log: SegmentLog, engine: Engine) -> None:
    facts = {"shard": log.shard, "epoch": log.epoch, "position": log.next_position}
    facts["undecided"] = sum(engine.shard.ledger.transactions.open.values())
    words = ", ".join(f"{name} {value}" for name, value in facts.items())
    tell(logging.INFO, "opened", f"opened: {words}", **facts)
    if log.cut is not None:
        cut = {"file": log.cut.file, "offset": log.cut.offset, "bytes": log.cut.size, "what": log.cut.what}
        sentence = (
            f"recovered: {log.cut.size} bytes at {log.cut.offset} of {log.cut.file} were cut off: "
            f"{log.cut.what}; they were never acknowledged"
        )
        tell(logging.INFO, "recovered", sentence, **cut)


def open_embedded(folder: Path, settings: BrokerSettings) -> EmbeddedLink:
    """Return a link to the engine of ``folder``. The first link starts the engine, closing the last one stops it.
    Misuse(BAD_SETTING) if it is open with other settings; else as :func:`open_engine`."""
    folder = Path(folder).resolve()
    with _opening:
        shared = _open.get(folder)
        if shared is None:
            engine = open_engine(folder, settings)
            engine.start()
            shared = _open[folder] = _Shared(Calls(engine))
            warm_up(engine)
        elif shared.calls.engine.settings != settings:
            text = f"{folder} is open in this process with other settings"
            raise Misuse(Code.BAD_SETTING, text, "open it with the same ones")
        shared.users += 1
        return EmbeddedLink(folder, shared.calls, lambda: _leave(folder))


def _leave(folder: Path) -> None:
    """Remove one user of the engine of ``folder``; the last one stops it."""
    with _opening:
        shared = _open[folder]
        shared.users -= 1
        if not shared.users:
            del _open[folder]
            shared.calls.give_back()
            shared.stop()


@atexit.register
def _exit() -> None:
    """Refuse calls on all links and stop all engines, because the interpreter exits: a thread that runs Arrow then
    crashes the process."""
    for link in list(_links):
        link.end()
    with _opening:
        left = list(_open.values())
        _open.clear()
    for shared in left:
        shared.stop()


def lent_link(folder: Path, calls: Dispatcher, leave: Callable[[], None] = lambda: None) -> EmbeddedLink:
    """Return a link to a broker that its caller has started. Closing the link calls ``leave``; the caller stops the
    broker."""
    return EmbeddedLink(Path(folder).absolute(), calls, leave)


class _Watch:
    """A check-back subscription on a thread of its own."""

    def __init__(self, calls: Dispatcher, member: Listener, on_checks: Callable[[pa.RecordBatch], None]) -> None:
        self._calls = calls
        self._member = member
        self._closed = False
        self._thread = threading.Thread(target=self._work, args=(on_checks,), name="escrowmq-checks", daemon=True)
        self._thread.start()

    def _work(self, on_checks: Callable[[pa.RecordBatch], None]) -> None:
        try:
            for batch in self._member.batches():
                on_checks(batch)
        finally:
            self._calls.leave(self._member)

    @property
    def broken(self) -> bool:
        """Return whether the subscription ended by itself: the engine stopped, or ``on_checks`` raised."""
        return not self._closed and not self._thread.is_alive()

    @property
    def problem(self) -> EscrowError | None:
        """The error with which the broker closed the subscription; None if there is none."""
        return self._member.problem

    def close(self) -> None:
        """End the subscription. Waits up to a second for its thread."""
        self._closed = True
        self._calls.leave(self._member)
        if self._thread is not threading.current_thread():
            self._thread.join(1.0)


class EmbeddedLink:
    """One user of an engine in this process; a :class:`escrowmq.wire.Link`. ``leave`` is called once, at its close."""

    def __init__(self, folder: Path, calls: Dispatcher, leave: Callable[[], None]) -> None:
        self.address = f"file:{folder}"
        self._calls = calls
        self._leave = leave
        self._closed = ""  # the reason for refusing calls
        self._lock = threading.Lock()
        self._receives: weakref.WeakSet[Future[pa.RecordBatch]] = weakref.WeakSet()  # not answered yet
        self._watches: list[_Watch] = []
        tell_in_child(self)
        _links.add(self)

    def end(self) -> None:
        """Refuse all further calls, because the process ends."""
        self._closed = CLOSED

    def on_fork(self) -> None:
        """Close the link in a forked child, without stopping anything: the engine and its folder are the parent's."""
        self._closed = FORKED
        _open.clear()

    def exchange(self, kind: Exchange, batch: pa.RecordBatch, options: ExchangeOptions) -> Future[pa.RecordBatch]:
        """See :meth:`escrowmq.wire.Link.exchange`."""
        if self._closed:
            return answer(Future(), error(Code.CLOSED, self._closed))
        future = self._calls.exchange(kind, batch, options)
        if kind == Exchange.RECEIVE:
            with self._lock:
                self._receives.add(future)
        return future

    def parcel(self, parcel: Parcel, done: Done) -> None:
        """See :meth:`escrowmq.wire.Link.parcel`."""
        if self._closed:
            done(error(Code.CLOSED, self._closed))
        else:
            self._calls.parcel(parcel, done)

    def action(self, name: str, request: Mapping[str, object], timeout: float) -> Json:
        """See :meth:`escrowmq.wire.Link.action`; a function call needs no ``timeout``."""
        self._check_open()
        return self._calls.action(name, request)

    def read(self, request: ReadRequest) -> BatchStream:
        """See :meth:`escrowmq.wire.Link.read`."""
        self._check_open()
        return self._calls.read(request)

    def watch(self, session: int, on_checks: Callable[[pa.RecordBatch], None]) -> _Watch:
        """See :meth:`escrowmq.wire.Link.watch`."""
        self._check_open()
        watch = _Watch(self._calls, self._calls.watch(session), on_checks)
        with self._lock:
            self._watches.append(watch)
        return watch

    def _check_open(self) -> None:
        if self._closed:
            raise error(Code.CLOSED, self._closed)

    def close(self) -> None:
        """Cancel waiting receives, end subscriptions, and call ``leave``, by which the last link stops the engine."""
        with self._lock:
            if self._closed:
                return
            self._closed = CLOSED
            receives, watches = list(self._receives), self._watches
        for receive in receives:
            receive.cancel()
        for watch in watches:
            watch.close()
        self._leave()


_links: weakref.WeakSet[EmbeddedLink] = weakref.WeakSet()
