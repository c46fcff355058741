"""A simulated broker: the product's engine, calls and connections on a fault disk. The product's own code: everything
below the server (:class:`~escrowmq.broker.calls.Calls`, the engine with its threads, log and ledger), and of the server
its connections, requests, streams and workers; only the selector of its loop is replaced."""

from __future__ import annotations

import struct
from collections.abc import Callable
from random import Random
from typing import Any

from escrowmq.broker.calls import Calls
from escrowmq.broker.serving.connection import Connection
from escrowmq.broker.serving.requests import MAX_REQUESTS, Requests
from escrowmq.broker.serving.room import Room
from escrowmq.broker.serving.streams import Workers
from escrowmq.broker.writer.engine import Engine
from escrowmq.errors import EscrowError
from escrowmq.log.commit_log import open_log
from escrowmq.settings import BrokerSettings
from escrowmq.testing.disks import MODES, FaultDisk, Mode
from escrowmq.wire import PROTOCOL_VERSION, frames
from escrowmq.wire.actions.brokers import HELLO
from escrowmq.wire.addresses import DEFAULT_PORT
from escrowmq.wire.channel import Channel
from escrowmq_lab.simulation import threads
from escrowmq_lab.simulation.network import End, Network
from escrowmq_lab.simulation.scheduler import Node, Scheduler

_MOST_REQUEST_BYTES, _MOST_ANSWER_BYTES = 64 << 20, 80 << 20
POLL_SECONDS = 0.25


class NodeDisk(FaultDisk):
    """The disk of a broker; a crash at one of its operations stops the broker's task immediately."""

    stopped: Callable[[], None] = staticmethod(lambda: None)
    waits: Callable[[], None] = staticmethod(lambda: None)
    """Called for the duration of a sync."""

    def _sync(self, node: Any) -> None:
        self.waits()
        super()._sync(node)

    def _end(self) -> None:
        if self.crashed:
            self.stopped()

    def _begin(self, what: str) -> int | None:
        if self.crashed:
            self.stopped()
        self.journal.clear()  # it is not read here
        return super()._begin(what)

    def left(self, mode: Mode, seed: int) -> NodeDisk:
        """Return the disk after a crash, like :meth:`survivors`."""
        return NodeDisk(self.seed, files=self.survivors(mode, seed).files())


class NodeClock:
    """The clock of one start of a broker: the wall clock of that moment, which may have jumped, continued."""

    def __init__(self, scheduler: Scheduler, start_us: int) -> None:
        self._scheduler = scheduler
        self._start_us = start_us - scheduler.now_ns // 1000

    def now_us(self) -> int:
        """Return microseconds since 1970."""
        return self._start_us + self._scheduler.now_ns // 1000


class Broker:
    """A broker that can be started, crashed and restarted. ``recovered`` is called with its engine before it serves."""

    def __init__(
        self,
        scheduler: Scheduler,
        network: Network,
        random: Random,
        name: str,
        settings: BrokerSettings,
        sync_seconds: float,
        recovered: Callable[[Broker, Engine], None],
        trace: Callable[[str], None],
        accepted: Callable[[End], Channel],
    ) -> None:
        self.name = name
        self.settings = settings
        self.disk = NodeDisk(random.getrandbits(32))
        self.engine: Engine | None = None
        self.calls: Calls | None = None
        self.node = Node(name)
        self.node.dead = True
        self.skew_us = 0
        self.starts = 0
        self.crashes = 0
        self.problem: BaseException | None = None
        """Error of the last failed start."""
        self._scheduler, self._network, self._random = scheduler, network, random
        self._recovered, self._trace, self._accepted = recovered, trace, accepted
        self._sync_seconds = sync_seconds
        self._identity = random.randbytes(struct.calcsize("<IQ"))

    @property
    def up(self) -> bool:
        """Return whether its process runs."""
        return not self.node.dead

    # Lifecycle

    def start(self) -> None:
        """Start its process."""
        self.node = Node(self.name)
        self.disk.stopped = self._on_crash
        self.disk.waits = self._wait_for_sync
        self.starts += 1
        self._scheduler.spawn(self.node, self._serve, f"{self.name}-start")

    def crash(self, mode: Mode | None = None) -> None:
        """Stop its machine now; ``mode`` decides which unsynced data the disk keeps."""
        if not self.up:
            return
        left: Mode = self._random.choice(MODES) if mode is None else mode
        self._trace(f"{self.name} crashes ({left})")
        self.crashes += 1
        self.node.dead = True
        self._network.drop_node(self.node)
        self.engine = self.calls = None
        self.disk = self.disk.left(left, self.crashes)

    def crash_in(self, operations: int) -> None:
        """Make it crash at a later operation of its disk."""
        if self.up and self.disk.crash_at is None:
            self.disk.crash_at = self.disk.operations + operations

    def _on_crash(self) -> None:
        self.crash()
        self._scheduler.die()

    def _wait_for_sync(self) -> None:
        if self._sync_seconds:
            self._scheduler.park(self._sync_seconds * (0.5 + self._random.random()))

    def _serve(self) -> None:
        clock = NodeClock(self._scheduler, 1_700_000_000_000_000 + self._scheduler.now_ns // 1000 + self.skew_us)
        try:
            log = open_log(
                self.disk,
                segment_bytes=self.settings.segment_bytes,
                compression=self.settings.compression,
                version="simulated",
                clock=clock,
                seed=self._identity,
            )
            engine = Engine(log, clock, self.settings)
        except EscrowError as problem:
            self._trace(f"{self.name} cannot start: {problem}")
            self.problem = problem
            self.crash("kept")
            return
        self._recovered(self, engine)
        calls = Calls(engine)
        self.engine, self.calls = engine, calls
        engine.start()
        room, workers = Room(self.settings.max_held_bytes, self.settings.max_calls), Workers()
        limits = frames.Welcome(
            frames.FORMAT_VERSION,
            PROTOCOL_VERSION,
            "simulated",
            _MOST_REQUEST_BYTES,
            MAX_REQUESTS,
            _MOST_ANSWER_BYTES,
        )
        self._trace(f"{self.name} serves, epoch {log.epoch}, position {log.next_position}")

        def accept(end: End) -> None:
            client = Client(end, self._accepted, calls, room, workers, limits)
            self._scheduler.spawn(self.node, client.run, f"{self.name}-client")

        self._network.listen(self.name, DEFAULT_PORT, self.node, accept)


class Client:
    """One connection at its broker: the work of the server's loop for it."""

    def __init__(
        self,
        end: End,
        accepted: Callable[[End], Channel],
        calls: Calls,
        room: Room,
        workers: Workers,
        limits: frames.Welcome,
    ) -> None:
        end.setblocking(False)
        self._end = end
        self._connection = Connection(
            accepted(end),
            end.far.name,
            limits.max_answer_bytes,
            self._attend,
            frames.Assembler(frames.MAX_HELLO_BYTES),
        )
        self._requests = Requests(
            calls, room, self._connection, workers, lambda: (limits, calls.action(HELLO.name, {}))
        )
        self._wake = threads.Event()

    def _attend(self, connection: Connection) -> None:
        self._wake.set()

    def run(self) -> None:
        """Serve the connection until it ends."""
        self._end.woken = self._wake.set
        connection, requests = self._connection, self._requests
        while True:
            self._wake.clear()
            if self._readable and not requests.paused and not self._read():
                break
            if connection.owes:
                connection.flush()
            if requests.paused:
                requests.go_on()
            if connection.broken or (requests.done and not requests.no_longer):
                break
            if not self._readable or requests.paused:
                self._wake.wait(POLL_SECONDS if requests.paused else None)
        connection.close()
        requests.end()

    @property
    def _readable(self) -> bool:
        return self._end.readable or self._connection.buffered

    def _read(self) -> bool:
        """Process received data. Returns False when the client is gone."""
        try:
            received = self._connection.receive()
        except EscrowError as problem:
            self._requests.refuse(problem)
            return True
        if received is None:
            return False
        self._requests.take(received)
        return True
