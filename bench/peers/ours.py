"""EscrowMQ as a peer: served, served with ends that are not waited for, and embedded."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from seam import Missing, Running, Work
from starting import python_load, started

import escrowmq as mq
from escrowmq_lab.servers.process import Server, accepts, free_port

OURS = "EscrowMQ"


class EscrowMQ:
    """This project, served."""

    name = OURS
    promise = "prepare and end are synced and answered"
    server = OURS
    reference = False
    settles_s = 0.0
    remark = ""
    recovers = ""
    program: Sequence[str] = ("-m", "escrowmq")
    """What Python runs as the broker."""

    def lacks(self, work: Work) -> str:
        return ""

    def prepare(self) -> None:
        """Nothing to fetch."""

    @contextlib.contextmanager
    def running(self, folder: Path) -> Iterator[Running]:
        port = free_port()
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, *self.program, "serve", "-d", str(folder / "data"), "-l", f"127.0.0.1:{port}"]
        server = Server(
            url="", command=command, ready=lambda _: accepts(port), log=folder / "log", environment=environment()
        )
        with started([server], f"escrow://127.0.0.1:{port}") as running:
            yield running

    def load(self, address: str) -> list[str]:
        return python_load("escrow", address)


class OneWay(EscrowMQ):
    """The same with ``confirm="oneway"``."""

    name = 'EscrowMQ, confirm="oneway"'
    promise = "the prepare is synced and answered; the end is not waited for (RocketMQ's semantics)"
    recovers = f"as {OURS}"

    def lacks(self, work: Work) -> str:
        return "the ends of a batch are an answer of their own" if work.kind in ("batches", "queue") else ""

    def prepare(self) -> None:
        """Raises Missing where this version has no such option."""
        if "confirm" not in inspect.signature(mq.Bus.producer).parameters:
            raise Missing("this version of EscrowMQ has no producers that do not wait for their ends")

    def load(self, address: str) -> list[str]:
        return python_load("escrow", f"{address}#oneway")


@dataclass
class Inside:
    """A broker that runs in whichever load program opens its folder."""

    address: str
    pids: Callable[[], Sequence[int]] = list

    def kill(self) -> None:
        """See :class:`seam.Running`."""

    def restart(self) -> None:
        """See :class:`seam.Running`."""


class Embedded(EscrowMQ):
    """The broker inside the process that calls it."""

    name = "EscrowMQ, embedded"
    promise = "prepare and end are synced; client and broker are one process, whose time is the client's here"
    server = name
    recovers = f"as {OURS}"

    def lacks(self, work: Work) -> str:
        if work.processes > 1 or work.beside:
            return "one process at a time has the folder"
        return "it has no process of its own" if work.kind == "queue" else ""

    @contextlib.contextmanager
    def running(self, folder: Path) -> Iterator[Running]:
        folder.mkdir(parents=True, exist_ok=True)
        yield Inside(f"file:{folder}/data")


def environment() -> dict[str, str]:
    """This checkout's package for a process that starts in another folder."""
    given = os.environ.get("PYTHONPATH")
    return (
        {"PYTHONPATH": os.pathsep.join(str(Path(path).resolve()) for path in given.split(os.pathsep))} if given else {}
    )
