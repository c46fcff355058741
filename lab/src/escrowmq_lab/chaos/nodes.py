"""The program of a node: a broker on a folder, a producer or a consumer with its database, controlled over a pipe.

A node is forked from a server that has imported the product already (:mod:`escrowmq_lab.chaos.fleet`), because imports
are most of the cost of a start. It ends with its director: by the signal that the system sends when the parent dies,
and by the end of the pipe.

Messages of a node: ``("ready", "")``, ``("placed", mode)`` (that mode of a producer has stopped placing, and has no
more business rows to come), ``("failed", mode, text)`` (a finding), ``("stopped", text)`` (it could not start, and
ends). Commands to a node: ``"close"`` (place nothing new), ``"end"``.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from escrowmq.errors import EscrowError
from escrowmq.settings import BrokerSettings
from escrowmq_lab.chaos.application import Application, ApplicationPlan
from escrowmq_lab.chaos.disks import fillable_disk
from escrowmq_lab.chaos.orphans import die_with_the_parent

_log = logging.getLogger(__name__)

SETTINGS = BrokerSettings(
    # Short times: the effects of a fault (check-backs, redeliveries, compaction) are resolved while the run continues.
    transaction_timeout=1.0,
    check_interval=1.0,
    # Each kill or cut of a member costs a check-back; no transaction may be parked because of that.
    check_max=10_000,
    lease_seconds=5.0,
    retry_backoff=0.1,
    retry_backoff_max=1.0,
    # Nor may a message become a dead letter because its consumer was killed often.
    max_attempts=10_000,
    # Kills hit segment rolls and snapshots.
    segment_bytes=1 << 20,
    snapshot_bytes=1 << 20,
    snapshot_frames=2_000,
)


@dataclass(frozen=True, slots=True)
class BrokerPlan:
    """Configuration of a broker's node."""

    name: str
    folder: Path
    """Its own folder: data in ``data``, and :data:`~escrowmq_lab.chaos.disks.MARKER` while its disk is full."""
    port: int


@dataclass(frozen=True, slots=True)
class ProgramPlan:
    """A program beside the nodes, which exchanges no messages (:meth:`escrowmq_lab.chaos.modes.Mode.beside`)."""

    name: str
    folder: Path
    host: str
    """Its own loopback address, through which it reaches the brokers."""
    command: tuple[str, ...]


def main(plan: BrokerPlan | ApplicationPlan | ProgramPlan, channel: Connection, log: Path, starts: int) -> None:
    """Run a node until it gets the command to end. The process's program: see :mod:`escrowmq_lab.chaos.nodes`.
    ``starts``: number of earlier starts."""
    die_with_the_parent()
    log_to(log)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the director
    if isinstance(plan, ProgramPlan):
        os.setsid()  # it is killed with all its children
        os.set_inheritable(channel.fileno(), True)  # while it is open, the program runs
        os.execv(plan.command[0], plan.command)
    sending = threading.Lock()

    def say(*words: str) -> None:
        with sending:
            try:
                channel.send(words)
            except OSError:
                os._exit(1)  # the director has gone

    _log.info("started as process %d", os.getpid())
    status = 0
    try:
        status = _serve(plan, channel, say) if isinstance(plan, BrokerPlan) else _apply(plan, channel, say, starts)
    except EscrowError as problem:
        _log.exception("it could not run")
        say("stopped", f"{problem.code.name}: {problem.message}")
        status = 1
    _log.info("ends with status %d", status)
    logging.shutdown()
    os._exit(status)  # do not wait for threads of abandoned modes


def _serve(plan: BrokerPlan, channel: Connection, say: Callable[..., None]) -> int:
    from escrowmq.broker.serving.serve import serve

    stop = threading.Event()
    _obey_director(channel, {"end": stop.set})
    rights = os.environ.get("ESCROWMQ_RIGHTS")
    return serve(
        plan.folder / "data",
        listen=f"127.0.0.1:{plan.port}",
        settings=SETTINGS,
        rights=Path(rights) if rights else None,
        announce=lambda _: say("ready", ""),
        stop=stop,
        disk=fillable_disk(plan.folder),
    )


def _apply(plan: ApplicationPlan, channel: Connection, say: Callable[..., None], starts: int) -> int:
    application = Application(plan, say, starts)
    _obey_director(channel, {"close": application.closing.set, "end": application.end})
    application.run()
    return 0


def _obey_director(channel: Connection, acts: dict[str, Callable[[], Any]]) -> None:
    """Run the director's commands on a separate thread; without a director the node exits."""

    def listen() -> None:
        try:
            while True:
                acts.get(channel.recv(), lambda: None)()
        except (EOFError, OSError):
            os._exit(1)

    threading.Thread(target=listen, name="director", daemon=True).start()


def log_to(path: Path) -> None:
    """Redirect standard error and the logs to the end of this file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(threadName)s %(levelname)s %(message)s", force=True)
