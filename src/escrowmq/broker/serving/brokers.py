"""The broker that a process serves: alone with its log, or one of the nodes that share one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from escrowmq.broker.calls import Calls, Dispatcher
from escrowmq.broker.embedded import lent_link, open_engine
from escrowmq.broker.guarded import GuardedCalls
from escrowmq.broker.reads.lookups import warm_up
from escrowmq.broker.reads.standing import Standing, standing
from escrowmq.broker.replicas.door import Door
from escrowmq.broker.replicas.node import Node
from escrowmq.errors import Code, EscrowError, error
from escrowmq.log.kafka.partition import Partitions
from escrowmq.log.kafka.replica import PartitionReplica
from escrowmq.platform.disk import Disk, note_url
from escrowmq.rights import Guard
from escrowmq.rights.guard import NOBODY
from escrowmq.settings import BrokerSettings
from escrowmq.wire import Link

SILENCE = 2.0
"""Seconds without a sign of life of the leader after which another node takes over."""


@dataclass(frozen=True, slots=True)
class Replication:
    """A log that several brokers share. ``open`` gives the partitions that keep it; ``advertise`` is the URL at which
    clients reach this one (None: where it listens), ``replicas`` those of all. ``link`` connects what runs beside a
    broker to the leader, by the URLs of brokers and a token; None: to this one, which refuses calls while it does not
    lead."""

    open: Callable[[], Partitions]
    silence: float = SILENCE
    advertise: str | None = None
    replicas: Sequence[str] = ()
    link: Callable[[Sequence[str], str | None], Link] | None = None


class Broker(Protocol):
    """A broker that :func:`~escrowmq.broker.serving.serve.serve` serves."""

    def begin(self, running: ExitStack) -> Dispatcher:
        """Start the broker on its folder, until ``running`` ends. Returns the dispatcher to which carriers give
        calls."""

    def listening(self, url: str, let_go: Callable[[], None], running: ExitStack) -> None:
        """Take note that the server listens now, at ``url``. ``let_go`` closes the connections of all clients."""

    def link(self, token: str | None = None, guard: Guard | None = None, *, is_nobody: bool = False) -> Link:
        """Return a link for a service in this process, with the rights of a token if there is a guard; ``is_nobody``:
        of a caller without a token and without any right. Raises Denied(UNAUTHENTICATED), Overloaded."""

    def stand(self) -> Mapping[str, Sequence[Standing]]:
        """Return the state of every topic and group, for the metrics page; empty on a standby."""

    @property
    def failed(self) -> bool:
        """Return whether the broker stopped by a fault."""

    @property
    def failure(self) -> BaseException | None:
        """The error by which the broker ended by itself; the process ends with it. None if there is none."""

    @property
    def ended(self) -> bool:
        """Return whether the broker has ended by itself, so that the process must end."""


class BrokerAlone:
    """A broker with a log of its own in its folder."""

    ended, failure = False, None
    """A shard that has stopped continues saying so until somebody stops the process."""

    def __init__(self, folder: Path, settings: BrokerSettings, disk: Callable[[Path], Disk]) -> None:
        self._folder, self._settings, self._disk = folder, settings, disk

    def begin(self, running: ExitStack) -> Dispatcher:
        """Open the folder and start its engine. Returns the engine's calls."""
        self._engine = engine = open_engine(self._folder, self._settings, self._disk)
        self._calls = calls = Calls(engine)
        running.callback(calls.close)
        running.callback(engine.stop)
        running.callback(calls.give_back)
        engine.start()
        warm_up(engine)
        return calls

    def listening(self, url: str, let_go: Callable[[], None], running: ExitStack) -> None:
        """Write the URL into the folder, for programs that read the folder."""
        note_url(self._folder, url)

    def link(self, token: str | None = None, guard: Guard | None = None, *, is_nobody: bool = False) -> Link:
        """See :meth:`Broker.link`."""
        return _lend(self._folder, self._calls, token, guard, is_nobody)

    def stand(self) -> Mapping[str, Sequence[Standing]]:
        """See :func:`escrowmq.broker.reads.standing.standing`."""
        return standing(self._engine)

    @property
    def failed(self) -> bool:
        """Return whether the shard stopped by a fault. The process continues, and rejects requests."""
        return self._engine.shard.failure is not None


class BrokerNode:
    """A broker that shares its log with others."""

    def __init__(
        self, folder: Path, settings: BrokerSettings, disk: Callable[[Path], Disk], replication: Replication
    ) -> None:
        self._folder, self._settings, self._disk, self._replication = folder, settings, disk, replication
        self._node: Node | None = None

    def begin(self, running: ExitStack) -> Dispatcher:
        """Return the node's door, which rejects calls until this node leads. :meth:`listening` starts the node."""
        self._door = Door(self._settings, list(self._replication.replicas))
        return self._door

    def listening(self, url: str, let_go: Callable[[], None], running: ExitStack) -> None:
        """Start the node: it follows the log, and leads when it may. Clients reach it at ``advertise``, else at
        ``url``."""
        settings, replication = self._settings, self._replication
        here = url
        self._door.url = url = replication.advertise or url
        self._door.on_doubt = let_go

        opened: list[Partitions] = []

        def opening() -> PartitionReplica:
            opened[:] = [replication.open()]
            replica = PartitionReplica(
                self._disk(self._folder),
                opened[0],
                url=url,
                segment_bytes=settings.segment_bytes,
                compression=settings.compression,
            )
            note_url(self._folder, here)
            return replica

        def give_up() -> None:
            for partitions in opened:
                partitions.close()

        self._node = node = Node(opening, self._door, settings, silence=replication.silence, give_up=give_up)
        running.callback(node.stop)
        node.start()

    def link(self, token: str | None = None, guard: Guard | None = None, *, is_nobody: bool = False) -> Link:
        """Return a client's link that follows the leader, so that a service beside a standby gets the leader's answers.
        Without :attr:`Replication.link`, return a link to this node."""
        others = [url for url in self._replication.replicas if url != self._door.url]
        if self._replication.link is None:
            return _lend(self._folder, self._door, token, guard, is_nobody)
        return self._replication.link([self._door.url, *others], token)

    def stand(self) -> Mapping[str, Sequence[Standing]]:
        """Return the state of every topic and group while this node leads; else an empty mapping."""
        engine = self._door.engine
        if engine is None:
            return {}
        try:
            return standing(engine)
        except EscrowError as problem:
            if problem.code not in (Code.SHARD_STOPPED, Code.NOT_LEADER):
                raise
            return {}

    @property
    def failed(self) -> bool:
        """Return whether the node ended by itself, by an error that is permanent."""
        return self._node is not None and self._node.ended

    @property
    def failure(self) -> BaseException | None:
        """The error by which the node ended by itself; None if there is none."""
        return self._node.failure if self._node is not None else None

    @property
    def ended(self) -> bool:
        """Return whether the node has ended by itself: its process ends, too, so that its supervisor or a person sees
        why."""
        return self.failed


def _lend(folder: Path, calls: Dispatcher, token: str | None, guard: Guard | None, is_nobody: bool) -> Link:
    """Return a link to a broker of this process, with the rights of a token. If there is a guard, the link is closed
    when the token is no longer valid."""
    if guard is None:
        return lent_link(folder, calls)
    if is_nobody:
        return lent_link(folder, GuardedCalls(calls, guard, NOBODY))
    links: list[Link] = []
    caller = guard.enter(token, (), "this process", lambda: _close(links))
    links.append(lent_link(folder, GuardedCalls(calls, guard, caller), lambda: guard.leave(caller)))
    return links[0]


def _close(links: Sequence[Link]) -> None:
    for link in links:
        link.close()


def check_advertised(host: str, replication: Replication) -> None:
    """Raise Misuse(BAD_ARGUMENT) for a node that listens at all addresses and does not advertise one."""
    if replication.advertise is None and host in ("", "0.0.0.0", "::"):
        text = f"{host or 'an empty host'} is no address that others could be sent to"
        raise error(Code.BAD_ARGUMENT, text, "say where clients reach this broker: --advertise escrow://HOST:PORT")
