"""The nodes as processes: starts, kills, pauses and messages them. Only those started here. They are forked by Python's
fork server, which has imported the product and runs none of our threads."""

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
"""Imported once: saves about a second of processor time per start."""
STOP_SECONDS = 30.0
"""Time (s) for a node to end on request before it is killed."""

Plan = BrokerPlan | ApplicationPlan | ProgramPlan


@dataclass(frozen=True, slots=True)
class NodeMessage:
    """A message of a node (:mod:`escrowmq_lab.chaos.nodes`), or ("ended", code); negative: the killing signal."""

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
    unread: list[tuple[str, ...]] = field(default_factory=list)


class Fleet:
    """All nodes of a run. Used by one thread. A context manager: remaining processes are killed at its end."""

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
        """Decide whether a node has reported that it is ready since it was started."""
        return self._nodes[name].ready

    def start(self, name: str) -> None:
        """Start a node that is not running."""
        node = self._nodes[name]
        assert node.process is None, f"{name} runs"
        here, by_channel = self._context.Pipe()
        node.process = self._context.Process(
            target=nodes.main, args=(node.plan, by_channel, node.log, node.starts), name=name
        )
        node.process.start()
        by_channel.close()
        node.channel, node.ready = here, isinstance(node.plan, ProgramPlan)
        node.starts += 1

    def kill(self, name: str) -> None:
        """Kill a node (SIGKILL), paused or not, and wait for its end; earlier messages are still delivered."""
        node = self._nodes[name]
        if node.process is not None:
            if isinstance(node.plan, ProgramPlan) and node.process.pid is not None:
                with contextlib.suppress(ProcessLookupError):  # it has ended, or has no process group yet
                    os.killpg(node.process.pid, signal.SIGKILL)
            node.process.kill()
            self._reap(node)

    def pause(self, name: str) -> None:
        """Pause a node (SIGSTOP)."""
        self._signal(name, signal.SIGSTOP)

    def resume(self, name: str) -> None:
        """Resume a node (SIGCONT)."""
        self._signal(name, signal.SIGCONT)

    def send(self, name: str, word: str) -> None:
        """Send a message to a node; a dead one is ignored."""
        channel = self._nodes[name].channel
        if channel is not None:
            try:
                channel.send(word)
            except OSError:
                pass

    def receive(self, seconds: float) -> Iterator[NodeMessage]:
        """Receive messages from nodes: waits at most ``seconds`` for a first one, then yields all available."""
        if left := [NodeMessage(name, words) for name, node in self._nodes.items() for words in node.unread]:
            for node in self._nodes.values():
                node.unread.clear()
            yield from left
            return
        by_channel = {node.channel: name for name, node in self._nodes.items() if node.channel is not None}
        for channel in multiprocessing.connection.wait(list(by_channel), max(seconds, 0.0)):
            name = by_channel[channel]  # type: ignore[index]
            node = self._nodes[name]
            try:
                words: tuple[str, ...] = node.channel.recv() if node.channel is not None else ()
            except (EOFError, OSError):
                code = self._reap(node)
                yield from (NodeMessage(name, words) for words in node.unread)
                node.unread.clear()
                yield NodeMessage(name, ("ended", str(code)))
                continue
            node.ready = node.ready or words[0] == "ready"
            yield NodeMessage(name, words)

    def _signal(self, name: str, number: signal.Signals) -> None:
        process = self._nodes[name].process
        if process is not None and process.is_alive() and process.pid is not None:
            os.kill(process.pid, number)

    def _reap(self, node: _Node) -> int:
        """Wait for a process that has ended, or will. Returns its exit code."""
        assert node.process is not None
        assert node.channel is not None
        node.process.join(STOP_SECONDS)
        if node.process.is_alive():
            node.process.kill()
            node.process.join()
        code = node.process.exitcode or 0
        try:
            while node.channel.poll():
                node.unread.append(node.channel.recv())
        except (EOFError, OSError):
            pass
        node.process.close()
        node.channel.close()
        node.process = node.channel = None
        node.ready = False
        return code
