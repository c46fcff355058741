"""Failover under load, with clients that know nothing of it: ``python tests/system/failover.py --fault kill --runs 20``.

Each run has a log of its own in one Kafka, served brokers that share it, and a program that only knows ``escrow://a|b``: threads of transactions, some of
which roll back, and a consumer. In the middle the leader is struck. In the end every id is looked at: one that the program committed and that is not in
the topic is *lost*, one that is there at two offsets is *repeated*, one that was rolled back and is there is *leaked*.

Printed for each run: seconds from the fault to the first answer of a transaction that was begun after it, and what was lost, repeated and leaked.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import escrowmq as mq
from escrowmq.chaos.proxy import Proxy, Route
from escrowmq.errors import EscrowError
from escrowmq.log.kafka.cluster.opening import create_topics, open_partitions
from escrowmq.testing.servers import kafka
from escrowmq.testing.servers.escrow import serving
from escrowmq.testing.servers.process import Server, accepts, free_port

PATIENCE = 60.0
"""For what has to happen; a run takes some seconds."""
CUT_HOST = "127.0.0.2"
"""Where the leader finds Kafka in the fault ``cut``: the proxy's."""
SHORT = ("--retention", "1s", "--segment-bytes", "1MiB", "--dedup-window", "1s")
"""Settings of a log of which parts leave soon."""
WRITERS = 4
ROLLED_BACK = 7
"""Every so many transactions of a writer one rolls back."""


def eventually(what: Callable[[], bool], why: str | Callable[[], str]) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + PATIENCE
    while not what():
        if time.monotonic() > deadline:
            raise AssertionError(why() if callable(why) else why)
        time.sleep(0.01)


@dataclass
class Program:
    """The application: transactions and a consumer, over one URL. ``committed``, ``rolled_back``: what its database says."""

    url: str
    committed: set[str] = field(default_factory=set)
    rolled_back: set[str] = field(default_factory=set)
    answered: list[tuple[float, float]] = field(default_factory=list)
    """When each transaction was begun, and when its commit was answered."""
    problems: list[str] = field(default_factory=list)
    consumed: Counter[str] = field(default_factory=Counter)

    def __enter__(self) -> Program:
        self._end, self._read = threading.Event(), threading.Event()
        self._bus = mq.connect(self.url)
        self._producer = self._bus.producer("shop", checker=self._check)
        self._writers = [threading.Thread(target=self._write, args=(n,), daemon=True) for n in range(WRITERS)]
        self._reader = threading.Thread(target=self._consume, daemon=True)
        for thread in (*self._writers, self._reader):
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._read.set()
        for thread in (*self._writers, self._reader):
            thread.join(PATIENCE)
        self._bus.close()

    def _check(self, asked: mq.Check) -> mq.Outcome:
        key = asked.messages[0].key or ""
        return mq.COMMIT if key in self.committed else mq.ROLLBACK if key in self.rolled_back else mq.UNKNOWN

    def _write(self, writer: int) -> None:
        for number in itertools.count():
            if self._end.is_set():
                return
            key, begun = f"{writer}-{number}", time.monotonic()
            try:
                with self._producer.transaction() as txn:
                    txn.send("orders", key.encode() * 500, key=key)
                    if number % ROLLED_BACK == 0:
                        self.rolled_back.add(key)
                        raise _Undone
                    self.committed.add(key)  # the local commit
                self.answered.append((begun, time.monotonic()))
            except _Undone:
                pass
            except EscrowError as problem:
                if key not in self.committed:
                    self.rolled_back.add(key)
                self.problems.append(f"{key}: {problem}")

    def _consume(self) -> None:
        with self._bus.consumer("cart", ["orders"]) as consumer:
            while not self._read.is_set():
                try:
                    for message in consumer.messages(idle_timeout=0.5):
                        self.consumed[message.key or ""] += 1
                        message.ack()
                except EscrowError as problem:
                    self.problems.append(f"consumer: {problem}")

    def first_answer(self, since: float) -> float | None:
        """Seconds from a moment to the first answer of a transaction that was begun after it."""
        return min((answer - since for begun, answer in list(self.answered) if begun >= since), default=None)

    def finish(self) -> None:
        """Begin no more, and consume what was committed."""
        self._end.set()
        for thread in self._writers:
            thread.join(PATIENCE)
        eventually(lambda: self.committed <= set(self.consumed), f"not consumed: {self._missing()}")
        self._read.set()
        self._reader.join(PATIENCE)

    def _missing(self) -> list[str]:
        return sorted(self.committed - set(self.consumed))[:5]


class _Undone(Exception):
    """The local transaction rolls back."""


class Shard:
    """Served brokers of one log. ``cut``: the first of them finds Kafka at the proxy."""

    def __init__(
        self,
        folder: Path,
        kafka_url: str,
        names: str,
        stack: ExitStack,
        cut_url: str | None = None,
        more: tuple[str, ...] = (),
    ) -> None:
        topic = f"log-{uuid.uuid4().hex[:12]}"
        create_topics(f"{kafka_url}/{topic}?replication=1")
        ports = [free_port() for _ in names]
        self.log = f"{kafka_url}/{topic}?replication=1"
        self.url = "escrow://" + "|".join(f"127.0.0.1:{port}" for port in ports)
        self.nodes: list[Server] = []
        self._folder, self._stack = folder, stack
        for name, port in zip(names, ports, strict=True):
            at = kafka_url if cut_url is None or self.nodes else cut_url
            self._options = ["--replicas", self.url, "--half-retention", "1h", "--transaction-timeout", "2s", *more]
            self._options += ["--lease-seconds", "2s"]  # what the struck consumer held comes again soon
            self._start(name, port, f"{at}/{topic}?replication=1")

    def _start(self, name: str, port: int, log: str) -> None:
        made = serving(self._folder / name, "--log", log, *self._options, port=port)
        self.nodes.append(self._stack.enter_context(made))
        eventually(lambda: self.leader() is not None, "nobody leads")

    def hello(self, node: Server) -> dict[str, object]:
        """What a node says of itself; empty if it does not answer."""
        try:
            with mq.connect(f"{node.url}?replicas=listed") as bus:
                return dict(bus.router.links[0].action("hello", {}, 2.0))
        except EscrowError:
            return {}

    def level(self) -> bool:
        """Whether all nodes have followed about as far."""
        positions = []
        for node in self.nodes:
            with suppress(EscrowError), mq.connect(f"{node.url}?replicas=listed") as bus:
                positions.append(float(str(bus.router.links[0].action("stats", {}, 2.0)["log_position"])))
        return len(positions) == len(self.nodes) and max(positions) - min(positions) < 200

    def leader(self) -> Server | None:
        """The node that leads."""
        return next((node for node in self.nodes if self.hello(node).get("role") == "leader"), None)


FAULTS = ("kill", "stop", "cut", "clean", "step-down", "two-standbys", "behind")


@dataclass
class Outcome:
    """What one run showed."""

    seconds: float
    committed: int
    lost: int
    repeated: int
    leaked: int
    problems: int


def run(fault: str, folder: Path, kafka_url: str, cut: tuple[str, Proxy] | None, before: float = 1.0) -> Outcome:
    """One run."""
    with ExitStack() as stack:
        names = "abc" if fault == "two-standbys" else "ab"
        at = cut[0] if cut is not None and fault == "cut" else None
        shard = Shard(folder, kafka_url, names, stack, at, SHORT if fault == "behind" else ())
        with Program(shard.url) as program:
            eventually(lambda: len(program.answered) > 20, f"nothing is answered: {program.problems[:3]}")
            time.sleep(before)
            leader = shard.leader()
            assert leader is not None
            if fault == "behind":
                leave_behind(shard, leader, program)
            since = time.monotonic()
            strike(fault, shard, leader, cut)
            eventually(lambda: program.first_answer(since) is not None, f"no answer: {program.problems[-3:]}")
            heal(fault, leader, cut)
            time.sleep(before)
            eventually(lambda: shard.leader() not in (None, leader), "the leader is the same as before")
            if fault not in ("kill", "two-standbys", "clean", "behind"):
                eventually(lambda: shard.hello(leader).get("role") == "standby", "the old leader does not follow")
            program.finish()
            seconds = program.first_answer(since)
        assert seconds is not None
        stored = read_all(shard.url)
        kept = (
            program.committed & set(program.consumed) if fault == "behind" else set(stored)
        )  # the rest has left the log
        return Outcome(
            seconds,
            len(program.committed),
            len(program.committed - kept),
            sum(count > 1 for count in stored.values()),
            len(program.rolled_back & set(stored)),
            len(program.problems),
        )


def leave_behind(shard: Shard, leader: Server, program: Program) -> None:
    """Stop the standby until what it would have followed next has left the log, and start it again."""
    (standby,) = (node for node in shard.nodes if node is not leader)
    standby.stop()
    answered = len(program.answered)
    eventually(lambda: len(program.answered) > answered + 200, "nothing is answered without a standby")
    leader.stop()
    leader.start()  # retention runs soon after a start, else once a minute
    eventually(lambda: shard.leader() is leader, "it does not lead again")
    partition = open_partitions(shard.log).log()
    try:
        eventually(lambda: partition.ends(5.0)[0] > 0, "retention cuts nothing")
    finally:
        partition.close()
    standby.start()
    eventually(
        lambda: shard.level(), lambda: f"the standby does not follow: {standby.log.read_text(errors='replace')[-2000:]}"
    )


def strike(fault: str, shard: Shard, leader: Server, cut: tuple[str, Proxy] | None) -> None:
    """The fault, at the leader."""
    if fault in ("kill", "two-standbys", "behind"):
        leader.kill()
    elif fault == "stop":
        leader.pause()
    elif fault == "cut":
        assert cut is not None
        cut[1].cut("leader")
    elif fault == "clean":
        leader.stop()
    else:
        with mq.connect(shard.url) as bus:
            print("  handed over:", bus.admin.step_down(why="a test")[0])


def heal(fault: str, leader: Server, cut: tuple[str, Proxy] | None) -> None:
    """The old leader comes back, and finds that it does not lead."""
    if fault == "stop":
        leader.resume()
    elif fault == "cut":
        assert cut is not None
        cut[1].heal("leader")


def read_all(url: str) -> Counter[str]:
    """How often each key stands in the topic."""
    with mq.connect(url) as bus:
        rows = bus.admin.read("orders", columns=["key"]).read_all().column("key").to_pylist()
    return Counter(rows)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", choices=FAULTS, action="append")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    options = parser.parse_args()
    figures = {}
    bad = 0
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        kafka_url, cut = stack.enter_context(cluster(Path(folder)))
        for fault in options.fault or FAULTS:
            outcomes = []
            for number in range(options.runs):
                one = run(fault, Path(folder) / f"{fault}-{number}", kafka_url, cut)
                outcomes.append(one)
                print(f"{fault} {number}: {one}", flush=True)
            seconds = sorted(one.seconds for one in outcomes)
            sums = {name: sum(getattr(one, name) for one in outcomes) for name in ("lost", "repeated", "leaked")}
            figures[fault] = {"runs": len(outcomes), "p50": median(seconds), "worst": seconds[-1], **sums}
            bad += sum(sums.values())
            print(f"{fault}: {json.dumps(figures[fault])}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))
    return 1 if bad else 0


@contextmanager
def cluster(folder: Path) -> Iterator[tuple[str, tuple[str, Proxy]]]:
    """One Kafka; and the address at which it can be cut off, with what cuts it."""
    port = free_port()
    with (
        kafka.serving(folder / "kafka", beside=[(CUT_HOST, port)]) as server,
        Proxy([Route("leader", CUT_HOST, "kafka", port)], folder / "proxy.log") as proxy,
    ):
        eventually(lambda: accepts(port), "Kafka's second listener does not answer")
        yield server.url, (f"kafka://{CUT_HOST}:{port}", proxy)


if __name__ == "__main__":
    sys.exit(main())
