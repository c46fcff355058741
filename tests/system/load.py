"""Real brokers, and a load whose every call goes into a history.

The load is what the demo's shop is in small: each writer prepares two messages of one transaction, in two topics, runs
a "local transaction" (an entry in its books), and commits, rolls back, or falls silent; its checker answers from the
books.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import escrowmq as mq
import forked
from escrowmq.errors import EscrowError
from escrowmq.model import TransactionState
from escrowmq_lab.history import Act, History, Kind, payload, unpack
from escrowmq_lab.servers.process import free_port, pause
from forked import Forked

PATIENCE = 120.0
"""Seconds without progress after which a run fails."""
TOPICS = ("orders", "points")
QUICK = {"transaction_timeout": 1, "check_interval": 1, "check_max": 4, "lease_seconds": 3, "max_attempts": 1000}
"""Settings that make everything happen within seconds."""


def eventually(what: str, condition: Callable[[], Any], patience: float = PATIENCE) -> Any:
    """The first true value of ``condition``; fails for lack of progress."""
    deadline = time.monotonic() + patience
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"no progress: {what}")
        threading.Event().wait(0.02)
    return found


class Broker:
    """``escrowmq serve`` in a process of its own; after a restart it has the same port."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.log = folder.with_suffix(".log")
        self._flags = [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", str(value))]
        self._listen = f"127.0.0.1:{free_port()}"
        self.process: subprocess.Popen[str] | None = None
        self.url = ""

    def launch(self) -> None:
        """Start it, without waiting until it is ready."""
        command = [sys.executable, "-m", "escrowmq", "serve", "--json", "-d", str(self.folder), "-l", self._listen]
        with self.log.open("ab") as log:
            self.process = Forked([*command, *self._flags], stdout=subprocess.PIPE, stderr=log, text=True)

    def start(self) -> Broker:
        """Start it and wait until it answers."""
        self.launch()
        assert self.process is not None
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"it ended with {self.process.wait()}: {self.log.read_text()[-2000:]}"
        self.url = json.loads(line)["url"]
        self._listen = self.url.removeprefix("escrow://")
        return self

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        assert self.process is not None
        self.process.send_signal(number)

    def pause(self) -> None:
        """Stop all its threads (SIGSTOP)."""
        assert self.process is not None
        pause(self.process.pid)

    def kill(self) -> None:
        """``kill -9``, and wait until it is gone."""
        self.send_signal(signal.SIGKILL)
        self.wait()

    def wait(self) -> int:
        """Its exit code."""
        assert self.process is not None
        assert self.process.stdout is not None
        code = self.process.wait(PATIENCE)
        self.process.stdout.close()
        return code

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self.send_signal(signal.SIGTERM)
        return self.wait()

    def __enter__(self) -> Broker:
        return self.start()

    def __exit__(self, *_: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.send_signal(signal.SIGCONT)
            self.kill()


class Books:
    """A writer's database: what its local transactions came to. UNKNOWN while they run."""

    def __init__(self, process: str, history: History) -> None:
        self._process, self._history = process, history
        self._entries: dict[str, mq.Outcome] = {}

    def write(self, transaction: str, outcome: mq.Outcome) -> None:
        """The local transaction is done."""
        self._entries[transaction] = outcome

    def decide(self, check: mq.Check) -> mq.Outcome:
        """The checker."""
        content, _ = unpack(check.messages[0].body)
        name = str(content["transaction"])
        self._history.add(self._process, Act.ASKED, Kind.OK, transaction=name, attempt=check.attempt)
        outcome = self._entries.get(name, mq.UNKNOWN)
        told = {mq.COMMIT: "committed", mq.ROLLBACK: "rolled_back"}.get(outcome, "unknown")
        self._history.add(self._process, Act.ANSWER, Kind.UNKNOWN, value=told, transaction=name)
        return outcome


class Writer(threading.Thread):
    """One producer: transactions and plain messages until told to stop, then its checker alone until :meth:`close`."""

    def __init__(self, bus: mq.Bus, name: str, history: History, *, timeout: float = 4.0) -> None:
        super().__init__(name=name, daemon=True)
        self.history, self.books = history, Books(name, history)
        self.producer = bus.producer("shop", instance=name, timeout=timeout, checker=self.books.decide)
        self.plain = bus.producer("bulletin", instance=name, timeout=timeout)
        self.stopping = threading.Event()
        self._chance = random.Random(name)
        self.left = 0
        """Transactions that nobody will ever decide."""
        self.problem: BaseException | None = None

    def run(self) -> None:
        number = 0
        try:
            while not self.stopping.is_set():
                number += 1
                if self._chance.random() < 0.3:
                    self.send(f"{self.name}-{number}", TOPICS[number % 2])
                else:
                    self.transact(f"{self.name}-t{number}")
        except BaseException as problem:
            self.problem = problem

    def send(self, value: str, topic: str) -> None:
        """One plain message."""
        with self.history.call(self.name, Act.SEND, value=value, topic=topic) as call:
            receipt = self.plain.send(topic, payload(value), key=value, properties={"by": self.name})
            call.details |= {"message_id": receipt.message_id.hex(), "queue": receipt.queue, "offset": receipt.offset}

    def prepare(self, value: str, transaction: str, topic: str, join: mq.TransactionId | None) -> mq.Receipt | None:
        """One half message; its receipt if it surely stands."""
        receipt: mq.Receipt | None = None
        with self.history.call(self.name, Act.PREPARE, value=value, transaction=transaction, topic=topic) as call:
            body = payload(value, transaction=transaction)
            receipt = self.producer.prepare(topic, body, key=value, transaction_id=join)
            call.details["message_id"] = receipt.message_id.hex()
        return receipt if call.result is Kind.OK else None

    def transact(self, name: str) -> None:
        """One transaction over both topics, to one of five ends."""
        first = self.prepare(f"{name}-a", name, "orders", None)
        second = first and self.prepare(f"{name}-b", name, "points", first.transaction_id)
        plan = self._chance.choices(
            ("commit", "rollback", "silent commit", "silent rollback", "never"), (60, 20, 7, 7, 6)
        )
        end = plan[0] if second is not None else "rollback" if first is not None else "silent rollback"
        if end == "never":
            self.left += 1
        else:
            self.books.write(name, mq.COMMIT if "commit" in end else mq.ROLLBACK)
        if first is None or end not in ("commit", "rollback"):
            return
        identity = first.transaction_id
        assert identity is not None
        with self.history.call(self.name, Act.COMMIT if end == "commit" else Act.ROLLBACK, transaction=name):
            (self.producer.commit if end == "commit" else self.producer.rollback)(identity)


class Reader(threading.Thread):
    """One consumer of a group: acknowledges most of what it gets, returns some, forgets some."""

    def __init__(
        self, bus: mq.Bus, name: str, group: str, topic: str, history: History, *, careless: bool = True
    ) -> None:
        super().__init__(name=name, daemon=True)
        self.history, self.group, self.careless = history, group, careless
        self.consumer = bus.consumer(group, topic, retry_backoff=0.1, retry_backoff_max=1.0, timeout=PATIENCE)
        self._chance = random.Random(name)
        self.problem: BaseException | None = None

    def run(self) -> None:
        try:
            for batch in self.consumer.batches(max_messages=200):
                self.take(batch)
        except BaseException as problem:
            self.problem = problem

    def take(self, batch: mq.ReceivedBatch) -> None:
        """Note every message, then settle the batch."""
        rows = []
        for row in batch.arrow.to_pylist():
            content, intact = unpack(row["body"])
            value = str(content.get("value"))
            place = {name: row[name] for name in ("topic", "queue", "offset", "attempt")}
            rows.append((value, row["attempt"]))
            self.history.add(self.name, Act.RECEIVE, Kind.OK, value=value, group=self.group, intact=intact, **place)
        fate = self._chance.random() if self.careless else 1.0
        if fate < 0.05:
            return  # forgotten: it comes back when the lease ends
        result = Kind.OK
        try:
            (batch.nack if fate < 0.1 else batch.ack)()
        except EscrowError as problem:
            result = Kind.UNKNOWN if isinstance(problem, mq.Unknown) else Kind.FAIL
        if fate >= 0.1:
            for value, attempt in rows:
                self.history.add(self.name, Act.ACK, result, value=value, group=self.group, attempt=attempt)


def settle(admin: mq.Admin) -> None:
    """Wait until no transaction is open and every group is done with everything."""
    eventually("transactions settle", lambda: not _asked(lambda: admin.transactions(state="open"), [None]))
    eventually("consumers drain", lambda: _asked(lambda: _drained(admin), False))


def _asked(ask: Callable[[], Any], otherwise: Any) -> Any:
    """An answer, or ``otherwise`` while the broker is away."""
    try:
        return ask()
    except EscrowError:
        return otherwise


def _drained(admin: mq.Admin) -> bool:
    queues = [queue for group in admin.groups() for queue in group["queues"]]
    return all(queue["floor"] == queue["end"] for queue in queues)


def audit(url: str, history: History, name: str | None = None) -> None:
    """The last phase's reading of one broker: what stands in the topics, what became of every transaction."""
    with mq.connect(url) as bus:
        known = {topic["name"] for topic in bus.admin.topics()}
        for topic in [topic for topic in TOPICS if topic in known]:
            for row in bus.admin.read(topic).read_all().to_pylist():
                content, intact = unpack(row["body"])
                place = {"topic": topic, "queue": row["queue"], "offset": row["offset"], "broker": name}
                value = str(content.get("value"))
                identity = row["message_id"].hex()
                history.add("audit", Act.STANDS, Kind.OK, value=value, message_id=identity, intact=intact, **place)
        states: dict[str, tuple[str, int]] = {}
        for row in bus.admin.read("%half", columns=["body", "state", "checks"]).read_all().to_pylist():
            transaction = str(unpack(row["body"])[0].get("transaction"))
            states[transaction] = (TransactionState(row["state"]).name.lower(), row["checks"])
        for transaction, (state, checks) in states.items():
            history.add("audit", Act.STATE, Kind.OK, value=state, transaction=transaction, attempt=checks)


def dumped(folder: Path) -> subprocess.CompletedProcess[str]:
    """``escrowmq log dump --check`` of a folder."""
    command = [sys.executable, "-m", "escrowmq", "log", "dump", "--check", str(folder)]
    return forked.run(command, env={**os.environ, "COLUMNS": "200"})
