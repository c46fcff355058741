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
    """One kind of load. ``processes`` load programs with ``callers`` each (threads, or transactions in flight), ``rows`` a call."""

    name: str
    kind: str
    """threads, flight, batches, seen, prepare, asked or queue: what the load programs know it as."""
    callers: int = 1
    processes: int = 1
    rows: int = 1
    figure: str = "rate"
    """What of the outcome is the figure: rate (transactions per second), p50_ms or p99_ms."""


class Running(Protocol):
    """A started server."""

    pids: Callable[[], Sequence[int]]
    """The processes of the server, now."""
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
    """What an answer of it says, for those who read the table."""

    def can(self, work: Work) -> bool:
        """Whether it has such a call at all."""
        ...

    def prepare(self) -> None:
        """Fetch and build what it needs. Raises Missing."""
        ...

    def running(self, folder: Path) -> AbstractContextManager[Running]:
        """A server with its data in ``folder``."""
        ...

    def load(self, address: str) -> list[str]:
        """The command of the load program, to which the measuring adds: work, callers, seconds, body bytes, rows, start."""
        ...
