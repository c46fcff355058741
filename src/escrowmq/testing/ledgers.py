"""Drives a ledger in tests: runs commands, keeps the events, and checks that ``decide`` is pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from escrowmq.ledger import commands
from escrowmq.ledger.commands import AskChecks, Asked, Command, Prepare, Rules, Send, Tick
from escrowmq.ledger.events import Repeats
from escrowmq.ledger.ledger import Ledger
from escrowmq.ledger.messages.contents import differing, refused
from escrowmq.model import DecidedBy, Outcome, message_id
from escrowmq.platform.times import to_us
from escrowmq.schemas import ENDING, OUTGOING, STORED, Kind

_counter = iter(range(1 << 62))
_DEFAULTS: dict[str, Any] = {"topic": "orders", "body": b"", "queue": -1, "born_us": 0, "delay_us": 0, "immunity_us": 0}


def outgoing(rows: Iterable[dict[str, Any]]) -> pa.RecordBatch:
    """Return a batch of schema OUTGOING; what a row leaves out has its default, ``message_id`` a fresh one."""
    filled = [_DEFAULTS | row for row in rows]
    for row in filled:
        known: Any = row.get("message_id")
        fresh = (7).to_bytes(8, "big") + next(_counter).to_bytes(8, "big") if known is None else b""
        row["message_id"] = fresh or message_id(known)
    if unknown := {name for row in filled for name in row} - set(OUTGOING.names):
        raise TypeError(f"no such columns: {sorted(unknown)}")
    return pa.RecordBatch.from_pylist(filled, schema=OUTGOING)


def tables_equal(one: dict[str, pa.Table], other: dict[str, pa.Table]) -> bool:
    """Return whether two snapshots are the same."""
    return one.keys() == other.keys() and all(one[name].equals(other[name], check_metadata=True) for name in one)


def wake_us(ledger: Ledger, now_us: int) -> int:
    """Return when a Tick next has work, after one at ``now_us``: a Tick without work moves that time."""
    ledger.decide(Tick(), now_us)
    return ledger.wake_us


def ask_us(ledger: Ledger, now_us: int, group: str = "g") -> int:
    """Return when a check of a producer group is next due, after a request for checks at ``now_us``."""
    ledger.decide(AskChecks(group, 1), now_us)
    return ledger.checkback.ask_us(group)


class LedgerDriver:
    """A ledger with a log that is a list. ``strict`` checks after every decide that it changed nothing."""

    def __init__(self, rules: Rules | None = None, *, shard: int = 0xE5C0, strict: bool = True) -> None:
        self.ledger = Ledger(shard)
        self.events: list[tuple[Kind, pa.RecordBatch, int, int]] = []
        self.now_us = 1_700_000_000_000_000
        self.strict = strict
        if rules is not None:
            self.do(commands.Configure(rules))

    def do(self, command: Command) -> Any:
        """Decide, and apply every event. Returns the answer."""
        before = self.ledger.snapshot() if self.strict else {}
        decision = self.ledger.decide(command, self.now_us)
        if self.strict and not tables_equal(before, self.ledger.snapshot()):
            raise AssertionError(f"decide changed the state: {command}")
        for event in decision.events:
            if not event.batch.schema.equals(STORED[event.kind]):
                raise AssertionError(f"{event.kind.name} is not of its schema")
            event.batch.validate(full=True)
            position = self.ledger.next_position
            self.events.append((event.kind, event.batch, position, self.now_us))
            self.ledger.apply(event.kind, event.batch, position, self.now_us, event.rows)
        if decision.repeats is None:
            return decision.answer
        return self._compare(command, decision.repeats, decision.answer)

    def _compare(self, command: Any, repeats: Repeats, answer: pa.RecordBatch) -> pa.RecordBatch:
        """Refuse repeats whose content differs from that of the message that they repeat, as the shard does."""
        given = command.batch.take(pa.array(repeats.rows))
        return refused(answer, repeats.rows[differing(given, self.read(repeats.positions))])

    def read(self, positions: npt.NDArray[np.int64]) -> pa.RecordBatch:
        """Return the stored messages at some positions."""
        kinds = (Kind.PLAIN, Kind.HALF)
        frames = [(position, batch) for kind, batch, position, _ in self.events if kind in kinds]
        return pa.concat_batches(
            batch.slice(wanted - position, 1)
            for wanted in positions.tolist()
            for position, batch in frames
            if position <= wanted < position + batch.num_rows
        )

    def replay(self) -> Ledger:
        """Return a new ledger folded from the same events."""
        fresh = Ledger(self.ledger.shard)
        for kind, batch, position, time_us in self.events:
            fresh.apply(kind, batch, position, time_us)
        return fresh

    def advance(self, seconds: float) -> None:
        """Advance broker time."""
        self.now_us += to_us(seconds)

    def session(self, group: str = "g", instance: str = "i", *, transactional: bool = True) -> int:
        """Open a producer session. Returns its epoch."""
        return int(self.do(commands.OpenSession(group, instance, transactional)))

    def send(self, *rows: dict[str, Any], session: int = 0) -> list[dict[str, Any]]:
        """Send plain messages. Returns the rows of the answer."""
        return self._produce(Send, session, rows)

    def prepare(self, session: int, *rows: dict[str, Any]) -> list[dict[str, Any]]:
        """Prepare half messages. Returns the rows of the answer."""
        return self._produce(Prepare, session, rows)

    def _produce(
        self, command: type[Send | Prepare], session: int, rows: Iterable[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        batch = outgoing(rows)
        answer: list[dict[str, Any]] = self.do(command(batch, np.full(batch.num_rows, session))).to_pylist()
        return answer

    def replace(self, session: int, *rows: dict[str, Any]) -> list[dict[str, Any]]:
        """Prepare half messages that replace undecided ones of their ids. Returns the rows of the answer."""
        batch = outgoing(rows)
        command = Prepare(batch, np.full(batch.num_rows, session), replace=True)
        same = np.zeros(batch.num_rows, np.bool_)
        if (repeats := self.ledger.repeats_of(command)) is not None:
            given = batch.take(pa.array(repeats.rows))
            same[repeats.rows] = ~differing(given, self.read(repeats.positions))
        answer: list[dict[str, Any]] = self.do(dataclasses.replace(command, same=same)).to_pylist()
        return answer

    def end(self, session: int, *pairs: tuple[bytes, Outcome], by: DecidedBy = DecidedBy.PRODUCER) -> list[int]:
        """Decide transactions. Returns one code per row."""
        rows = [{"transaction": transaction, "outcome": int(outcome)} for transaction, outcome in pairs]
        batch = pa.RecordBatch.from_pylist(rows, schema=ENDING)
        codes: list[int] = self.do(commands.End(batch, np.full(len(pairs), session), by)).column("code").to_pylist()
        return codes

    def ask(self, group: str = "g", limit: int = 1000) -> Asked:
        """Take the checks that are due."""
        asked: Asked = self.do(AskChecks(group, limit))
        return asked

    def tick(self) -> None:
        """Process whatever is due."""
        self.do(Tick())

    def queue(self, topic: str = "orders", queue: int = 0) -> list[int]:
        """Log positions of a queue's messages, in offset order."""
        index = self.ledger.queue(self.ledger.queue_id(topic, queue))
        positions: list[int] = index.positions(index.head, index.end).tolist()
        return positions

    def visible(self, topic: str = "orders") -> list[int]:
        """Log positions of everything that consumers of a topic can see, sorted."""
        if not self.ledger.topics.has(topic):
            return []
        return sorted(p for q in range(len(self.ledger.topics.queue_ids(topic))) for p in self.queue(topic, q))
