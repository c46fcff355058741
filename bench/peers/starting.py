"""What the peers share: servers that are started in order and always stopped, and the command of a Python load."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from measuring import descendants
from seam import Missing, Running

from escrowmq_lab.servers.process import Server
from escrowmq_lab.servers.seam import Absent

LOADS = Path(__file__).parent / "loads"


@dataclass
class Started:
    """Servers of ours, started in order; the last one is the peer's, and is the one that is killed and measured."""

    servers: list[Server]
    address: str
    pids: Callable[[], Sequence[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.pids = lambda: descendants(self.servers[-1].pid)

    def kill(self) -> None:
        """See :class:`seam.Running`."""
        self.servers[-1].kill()

    def restart(self) -> None:
        """See :class:`seam.Running`."""
        self.servers[-1].start()


@contextlib.contextmanager
def started(servers: list[Server], address: str) -> Iterator[Running]:
    """The servers, running; stopped at the end, the last one first."""
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.callback(server.stop)
            server.start()
        yield Started(servers, address)


@contextlib.contextmanager
def absent_is_missing() -> Iterator[None]:
    """What the package's own server starters say, in the words of this benchmark."""
    try:
        yield
    except Absent as problem:
        raise Missing(str(problem)) from None


def python_load(name: str, address: str) -> list[str]:
    """The command of a Python load program."""
    return [sys.executable, str(LOADS / f"{name}_load.py"), address]
