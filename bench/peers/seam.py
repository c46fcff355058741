"""What a peer is: a server that can be started, killed and measured, and programs that load it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class Missing(Exception):
    """This peer, or something that it needs, is not here; the message says what to install."""


@dataclass(frozen=True, slots=True)
class Work:
    """One kind of load. ``processes`` load programs with ``callers`` each (threads, or transactions in flight),
    ``rows`` a call."""

    name: str
    kind: str
    """threads, flight, batches, seen, paced, prepare, first, asked or queue: what the load programs know it as."""
    callers: int = 1
    processes: int = 1
    rows: int = 1
    beside: int = 0
    """Transactions per second of another load program, beside this one."""
    shows: tuple[str, ...] = ("rate",)
    """What of the outcome the tables show: rate (transactions per second), p10_ms, p50_ms, p99_ms."""
    goal: bool = True
    """Whether a goal speaks of it; others get fewer rounds."""


class Running(Protocol):
    """A started server."""

    pids: Callable[[], Sequence[int]]
    """The processes of the server, now; none if it runs inside the load program."""
    address: str

    def kill(self) -> None:
        """``kill -9``."""
        ...

    def restart(self) -> None:
        """Start it again on the same data; returns when it takes connections."""
        ...


class Peer(Protocol):
    """One system that is measured."""

    name: str
    promise: str
    """What an answer of it says, and what it does not, for those who read the table."""
    remark: str
    """What those who read the tables should know besides."""
    server: str
    """Peers that say the same name here are measured on one server."""
    reference: bool
    """Whether no goal speaks of it: it gets fewer rounds."""
    settles_s: float
    """Seconds after its start before which it is not measured."""
    recovers: str
    """Why it has no figure of a recovery with undecided half messages; empty: it has one."""

    def lacks(self, work: Work) -> str:
        """Why it has no figure for this work; empty: it has one."""
        ...

    def prepare(self) -> None:
        """Fetch and build what it needs. Raises Missing."""
        ...

    def running(self, folder: Path) -> AbstractContextManager[Running]:
        """A server with its data in ``folder``."""
        ...

    def load(self, address: str) -> list[str]:
        """The command of the load program, to which the measuring adds: work, callers, seconds, seconds to warm up,
        body bytes, rows."""
        ...
