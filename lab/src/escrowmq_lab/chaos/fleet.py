"""The nodes as processes: start, kill, pause, tell and hear them. Only those that were started here.

They are forked by Python's fork server, which has imported the product and runs no thread of ours.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from escrowmq_lab.chaos import nodes
from escrowmq_lab.chaos.application import ApplicationPlan
from escrowmq_lab.chaos.nodes import BrokerPlan, ProgramPlan

PRELOADED = (
    "escrowmq_lab.chaos.orphans",
    "__main__",
    "escrowmq_lab.chaos.nodes",
    "escrowmq.broker.serving.serve",
    "escrowmq.client.bus",
    "escrowmq.client.links.link",
    "escrowmq.outbox.targets.escrow",
    "sqlalchemy.dialects.sqlite",
    "sqlalchemy.dialects.postgresql.psycopg",
)
"""Imported once: about a second of processor time, which each start would take else."""
STOP_SECONDS = 30.0
"""A node that was told to end and has not by then is killed."""

Plan = BrokerPlan | ApplicationPlan | ProgramPlan


@dataclass(frozen=True, slots=True)
class Heard:
    """What a node said (see :mod:`escrowmq_lab.chaos.nodes`), or ``words`` ("ended", exit code): negative: the signal
    that killed it."""

    node: str
    words: tuple[str, ...]


@dataclass(slots=True)
class _Node:
    plan: Plan
    log: Path
    process: ForkServerProcess | None = None
    channel: Connection | None = None
    starts: int = 0
    ready: bool = False
    said: list[tuple[str, ...]] = field(default_factory=list)


class Fleet:
    """All nodes of a run. Used by one thread. A context manager: what still runs at its end is killed."""

    def __init__(self, plans: Mapping[str, Plan], logs: Path) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(PRELOADED))
        self._nodes = {name: _Node(plan, logs / f"{name}.log") for name, plan in plans.items()}

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._nodes:
            self.kill(name)

    @property
    def running(self) -> list[str]:
        """Nodes that have a process."""
        return [name for name, node in self._nodes.items() if node.process is not None]

    def ready(self, name: str) -> bool:
        """Return whether it has said so since it was started."""
        return self._nodes[name].ready

    def start(self, name: str) -> None:
        """Start a node that does not run."""
        node = self._nodes[name]
        assert node.process is None, f"{name} runs"
        here, there = self._context.Pipe()
        node.process = self._context.Process(
            target=nodes.main, args=(node.plan, there, node.log, node.starts), name=name
        )
        node.process.start()
        there.close()
        node.channel, node.ready = here, isinstance(node.plan, ProgramPlan)
        node.starts += 1

    def kill(self, name: str) -> None:
        """SIGKILL, paused or not, and wait until it is gone; what it said before is still heard."""
        node = self._nodes[name]
        if node.process is not None:
            if isinstance(node.plan, ProgramPlan) and node.process.pid is not None:
                with contextlib.suppress(ProcessLookupError):  # it has ended, or has no group of its own yet
                    os.killpg(node.process.pid, signal.SIGKILL)
            node.process.kill()
            self._bury(node)

    def pause(self, name: str) -> None:
        """SIGSTOP."""
        self._signal(name, signal.SIGSTOP)

    def resume(self, name: str) -> None:
        """SIGCONT."""
        self._signal(name, signal.SIGCONT)

    def tell(self, name: str, word: str) -> None:
        """Say something to a node; one that has died hears nothing."""
        channel = self._nodes[name].channel
        if channel is not None:
            try:
                channel.send(word)
            except OSError:
                pass

    def hear(self, seconds: float) -> Iterator[Heard]:
        """Yield the messages of nodes as they arrive, for at most ``seconds``."""
        if left := [Heard(name, words) for name, node in self._nodes.items() for words in node.said]:
            for node in self._nodes.values():
                node.said.clear()
            yield from left
            return
        there = {node.channel: name for name, node in self._nodes.items() if node.channel is not None}
        for channel in multiprocessing.connection.wait(list(there), max(seconds, 0.0)):
            name = there[channel]  # type: ignore[index]
            node = self._nodes[name]
            try:
                words: tuple[str, ...] = node.channel.recv() if node.channel is not None else ()
            except (EOFError, OSError):
                code = self._bury(node)
                yield from (Heard(name, words) for words in node.said)
                node.said.clear()
                yield Heard(name, ("ended", str(code)))
                continue
            node.ready = node.ready or words[0] == "ready"
            yield Heard(name, words)

    def _signal(self, name: str, number: signal.Signals) -> None:
        process = self._nodes[name].process
        if process is not None and process.is_alive() and process.pid is not None:
            os.kill(process.pid, number)

    def _bury(self, node: _Node) -> int:
        """Wait for the end of a process that has ended, or will; its exit code."""
        assert node.process is not None
        assert node.channel is not None
        node.process.join(STOP_SECONDS)
        if node.process.is_alive():
            node.process.kill()
            node.process.join()
        code = node.process.exitcode or 0
        try:
            while node.channel.poll():
                node.said.append(node.channel.recv())
        except (EOFError, OSError):
            pass
        node.process.close()
        node.channel.close()
        node.process = node.channel = None
        node.ready = False
        return code
