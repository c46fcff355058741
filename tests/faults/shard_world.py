"""A shard on a disk that can stop at any operation, and the outside world, which remembers what it was told.

The world's memory survives the broker's crash, as that of clients does. A script is a plain function that talks through
:meth:`World.call` under names; what was answered once is not asked again, so after a crash the same script goes on
where it was cut off, repeating only the call that got no answer.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from escrowmq.broker.calls import Calls
from escrowmq.broker.writer.checkback import Listener, Questions
from escrowmq.broker.writer.engine import Engine
from escrowmq.errors import Code, EscrowError
from escrowmq.ledger.commands import Command, End, Leased, Prepare, Receive, Send, Settle
from escrowmq.log.commit_log import open_log
from escrowmq.message.row import OutgoingRow
from escrowmq.model import Act, DecidedBy, Outcome, TransactionId, message_id
from escrowmq.schemas import ENDING, ID, SETTLING
from escrowmq.settings import BrokerSettings
from escrowmq.testing.clock import SimulatedClock
from escrowmq.testing.disks import FaultDisk
from escrowmq.testing.ledgers import outgoing
from escrowmq.wire import ANSWER, Exchange, Parcel

SEED = bytes(range(1, 13))
SETTINGS = BrokerSettings(
    transaction_timeout=1,
    check_interval=2,
    check_max=3,
    half_retention=40,
    lease_seconds=5,
    max_attempts=3,
    retry_backoff=0.5,
    retry_backoff_max=0.5,
    retention=100,
    segment_bytes=12_288,
    default_queues=2,
    producer_expiration=150,
)


class Violation(AssertionError):
    """A promise was broken."""


class InlineExecutor:
    """Snapshots are saved at once, on the caller's thread: every run does the same operations in the same order."""

    def submit(self, act: Callable[..., Any], *arguments: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(act(*arguments))
        except Exception as problem:  # a SimulatedCrash is none, and goes on up
            done.set_exception(problem)
        return done

    def shutdown(self, wait: bool = True) -> None:
        pass


@dataclass
class Memory:
    """What the outside world knows. Grows only; :meth:`copy` is what it knew at one instant."""

    now_us: int = 1_700_000_000_000_000
    answers: dict[str, Any] = field(default_factory=dict)  # by name: answered, therefore durable
    tried: dict[str, Command] = field(default_factory=dict)  # by name: sent, answered or not
    owners: dict[bytes, str] = field(default_factory=dict)  # message id -> its transaction's name
    decided: dict[str, Code] = field(default_factory=dict)  # transaction's name -> what it came to
    asked: list[tuple[int, int, int]] = field(default_factory=list)  # (position, era, attempt) put to a member
    acked: set[tuple[str, int, int]] = field(default_factory=set)  # (group, queue id, offset)
    delivered: set[tuple[str, int, int, int]] = field(default_factory=set)  # the same and the position
    offsets: dict[tuple[int, int], int] = field(
        default_factory=dict
    )  # (queue id, offset) -> position, as anybody saw it
    parked: set[int] = field(default_factory=set)  # transactions seen parked
    queue_of: dict[int, int] = field(default_factory=dict)  # lease -> queue id
    ids: dict[int, bytes] = field(default_factory=dict)  # position -> message id, as a consumer got it
    eras: dict[int, int] = field(default_factory=dict)  # rechecks tried of a transaction
    calls: int = 0

    def copy(self) -> Memory:
        """An independent copy (the values in it are never changed)."""
        return dataclasses.replace(
            self, **{f.name: v.copy() for f in dataclasses.fields(self) if hasattr(v := getattr(self, f.name), "copy")}
        )


def _parcel_of(command: Command) -> Parcel | None:
    """The same request as rows; None: it has none."""
    if isinstance(command, Send | Prepare):
        batch = command.batch.select(OutgoingRow._fields)
        kind = Exchange.SEND if isinstance(command, Send) else Exchange.PREPARE
        options: Any = {"session": int(command.sessions[0])}
    elif isinstance(command, End) and command.by != DecidedBy.OPERATOR:
        kind, batch = Exchange.END, command.batch
        options = {"session": int(command.sessions[0]), "by": int(command.by)}
    elif isinstance(command, Settle):
        kind, batch, options = Exchange.SETTLE, command.batch, {"group": command.group}
    else:
        return None
    rows = list(zip(*(column.to_pylist() for column in batch.columns), strict=True))
    return Parcel(kind, rows, options, (0, 0))


class World:
    """A running shard on ``disk`` and the world around it."""

    def __init__(self, disk: FaultDisk, memory: Memory | None = None, settings: BrokerSettings = SETTINGS) -> None:
        self.memory = memory or Memory()
        self.disk = disk
        self.clock = SimulatedClock(self.memory.now_us)
        self.log = open_log(disk, segment_bytes=settings.segment_bytes, version="t", clock=self.clock, seed=SEED)
        self.engine = Engine(self.log, self.clock, settings)
        self.engine.upkeep.finish()
        self.engine.upkeep._thread = InlineExecutor()
        self.ledger = self.engine.shard.ledger
        self._calls = Calls(self.engine)
        self.members: dict[int, Listener] = {}
        self._broken: list[Violation] = []  # found in callbacks of futures, which swallow what is raised in them

    # Talking

    def call(self, name: str, command: Command) -> Any:
        """The answer to a command, from memory if there was one. Raises EscrowError (refusals are not remembered)."""
        return self.call_all({name: command})[0]

    def call_all(self, commands: dict[str, Command]) -> list[Any]:
        """Several commands in one round."""
        futures = {}
        for name, command in commands.items():
            if name not in self.memory.answers:
                self.memory.tried[name] = command
                futures[name] = self._submit(name, command)
                futures[name].add_done_callback(lambda done, n=name, c=command: self._note(n, c, done))
        if futures:
            self.engine.step()
        for violation in self._broken:
            raise violation
        for future in futures.values():
            future.result(timeout=0)
        return [self.memory.answers[name] for name in commands]

    def _submit(self, name: str, command: Command) -> Future[Any]:
        """Most requests of messages, decisions and acknowledgements go as parcels, some as batches: by their names, so
        that one that is repeated goes the same way."""
        parcel = _parcel_of(command) if zlib.crc32(name.encode()) % 3 else None
        if parcel is None:
            return self.engine.submit(command)
        answered: Future[Any] = Future()

        def done(answer: Any) -> None:
            if isinstance(answer, EscrowError):
                answered.set_exception(answer)
                return
            schema = ANSWER[parcel.kind]
            columns = zip(*answer, strict=True) if isinstance(answer, list) else [np.frombuffer(answer, np.uint8)]
            arrays = [pa.array(column, type_) for column, type_ in zip(columns, schema.types, strict=True)]
            answered.set_result(pa.RecordBatch.from_arrays(arrays, schema=schema))

        self._calls.parcel(parcel, done)
        return answered

    def once(self, command: Command) -> Any:
        """A command without a name: asked again after a crash."""
        self.memory.calls += 1
        return self.call(f"call {self.memory.calls}", command)

    def _note(self, name: str, command: Command, done: Future[Any]) -> None:
        try:
            self._answered(name, command, done)
        except Violation as violation:
            self._broken.append(violation)

    def _answered(self, name: str, command: Command, done: Future[Any]) -> None:
        if done.exception() is not None:
            return
        answer = done.result()
        self.memory.answers[name] = answer
        if isinstance(command, Receive):
            self._delivered(command.group, answer)
        elif isinstance(command, Settle):
            self._settled(command, answer)
        elif isinstance(command, Send):
            for row in answer.to_pylist():
                if row["code"] == Code.OK and row["offset"] >= 0:
                    queue_id = self.ledger.queue_id(command.batch.column("topic")[0].as_py(), row["queue"])
                    self.saw(queue_id, row["offset"], row["position"])

    def _delivered(self, group: str, leased: Leased) -> None:
        columns = (leased.leases, leased.queue_ids, leased.offsets, leased.positions, leased.attempts)
        for lease, queue_id, offset, position, attempt in zip(*(c.tolist() for c in columns), strict=True):
            if (group, queue_id, offset) in self.memory.acked:
                raise Violation(f"I22: {group} acknowledged offset {offset} of queue {queue_id}, and it came again")
            if attempt == 1 and (group, queue_id, offset, position) in self.memory.delivered:
                raise Violation(f"I23: {group} got offset {offset} of queue {queue_id} twice as if for the first time")
            self.memory.delivered.add((group, queue_id, offset, position))
            self.memory.ids[position] = self.log.read(np.array([position])).column("message_id")[0].as_py()
            self.memory.queue_of[lease] = queue_id
            self.saw(queue_id, offset, position)

    def saw(self, queue_id: int, offset: int, position: int) -> None:
        """Somebody was told that this message stands at this place."""
        if self.memory.offsets.setdefault((queue_id, offset), position) != position:
            before = self.memory.offsets[queue_id, offset]
            raise Violation(f"I17: offset {offset} of queue {queue_id} was position {before} and is {position}")

    def _settled(self, command: Settle, answer: pa.RecordBatch) -> None:
        for row, code in zip(command.batch.to_pylist(), answer.column("code").to_pylist(), strict=True):
            if row["act"] == Act.ACK and code == Code.OK:
                self.memory.acked.add((command.group, self.memory.queue_of[row["lease"]], row["start"]))

    # Messages

    def send(self, name: str, *rows: dict[str, Any], session: int = 0) -> list[dict[str, Any]]:
        """Plain messages; ids are made of the name."""
        batch = self._batch(name, rows)
        return self._rows(self.call(name, Send(batch, np.full(batch.num_rows, session))))

    def prepare(self, name: str, session: int, *rows: dict[str, Any], join: bytes | None = None) -> bytes:
        """Half messages of one transaction (``join``: a later part of it); the transaction's id."""
        if join is None:
            join = self.prepare_all(session, {name: list(rows[:1])})[0]
            name, rows = f"{name} and", rows[1:]
        if rows:
            self.prepare_all(session, {name: list(rows)}, join)
        return join

    def prepare_all(
        self, session: int, named: dict[str, list[dict[str, Any]]], join: bytes | None = None
    ) -> list[bytes]:
        """Several requests in one round (every row that joins nothing begins a transaction); the transactions' ids."""
        commands: dict[str, Command] = {}
        for name, rows in named.items():
            batch = self._batch(name, tuple({**row, "transaction": join} for row in rows))
            for identity in batch.column("message_id").to_pylist():
                self.memory.owners[identity] = name.split(" ")[0]
            commands[name] = Prepare(batch, np.full(batch.num_rows, session))
        return [self._rows(answer)[0]["transaction"] for answer in self.call_all(commands)]

    @staticmethod
    def _batch(name: str, rows: tuple[dict[str, Any], ...]) -> pa.RecordBatch:
        full = [
            {"body": f"{name}/{n}".encode() * 40, "key": f"k{n}", "properties": {"n": str(n)}, **row}
            for n, row in enumerate(rows)
        ]
        return outgoing([{"message_id": message_id(f"{name}/{n}"), **row} for n, row in enumerate(full)])

    @staticmethod
    def _rows(answer: pa.RecordBatch) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = answer.to_pylist()
        if any(row["code"] != Code.OK for row in rows):
            raise Violation(f"refused: {[Code(row['code']).name for row in rows]}")
        return rows

    def end(
        self, name: str, session: int, outcome: Outcome, *transactions: bytes, by: DecidedBy = DecidedBy.PRODUCER
    ) -> list[Code]:
        """Decide; a code a transaction. Names look like ``t1,t2 reason``: which transactions they are about."""
        arrays = [pa.array(transactions, ID), pa.array([int(outcome)] * len(transactions), pa.uint8())]
        command = End(pa.RecordBatch.from_arrays(arrays, schema=ENDING), np.full(len(transactions), session), by)
        codes = [Code(code) for code in self.call(name, command).column("code").to_pylist()]
        final = {Code.ALREADY_COMMITTED: Code.COMMITTED, Code.ALREADY_ROLLED_BACK: Code.ROLLED_BACK}
        for who, code in zip(name.split(" ")[0].split(","), codes, strict=True):
            code = final.get(code, code)
            final_now = code in (Code.COMMITTED, Code.ROLLED_BACK, Code.EXPIRED)
            if final_now and self.memory.decided.setdefault(who, code) != code:
                raise Violation(f"I5: {who} was {self.memory.decided[who].name} and is {code.name}")
        return codes

    def receive(self, name: str | None, group: str, most: int = 100) -> Leased:
        """Lease up to ``most`` messages."""
        command = Receive(group, 7, most, 5_000_000)
        leased: Leased = self.call(name, command) if name is not None else self.once(command)
        return leased

    def settle(self, name: str | None, group: str, leased: Leased, act: Act, rows: slice = slice(None)) -> list[Code]:
        """Acknowledge (or not) some rows of what was leased."""
        leases, offsets = leased.leases[rows].tolist(), leased.offsets[rows].tolist()
        given = [
            {"lease": lease, "start": offset, "count": 1, "act": int(act), "delay_us": 0, "cause": "told so"}
            for lease, offset in zip(leases, offsets, strict=True)
        ]
        command = Settle(group, pa.RecordBatch.from_pylist(given, schema=SETTLING))
        answer = self.call(name, command) if name is not None else self.once(command)
        return [Code(code) for code in answer.column("code").to_pylist()]

    # Time and check-back

    def pass_time(self, name: str, seconds: float) -> None:
        """Let broker time pass, once in a script."""
        if name not in self.memory.answers:
            self.memory.answers[name] = seconds
            self.tick(seconds)

    def tick(self, seconds: float = 0.5) -> None:
        """Let broker time pass, and the engine do what is due."""
        self.memory.now_us = self.clock.advance(seconds)
        self.engine.step()

    def listen(self, group: str, session: int) -> None:
        """Be a member to ask, as long as this broker lives."""
        if session not in self.members:
            member = self.members[session] = self.engine.listeners.join(group, session)
            member.put = self._asked  # type: ignore[method-assign]

    def _asked(self, questions: Questions) -> None:
        for position, attempt in zip(questions.transactions.tolist(), questions.attempts.tolist(), strict=True):
            era = self.memory.eras.get(position, 0)
            before = [a for p, e, a in self.memory.asked if (p, e) == (position, era)]
            if attempt > SETTINGS.check_max or (before and attempt <= before[-1]):
                raise Violation(f"I11: {position} asked {before}, then again as attempt {attempt}")
            self.memory.asked.append((position, era, attempt))

    def times_asked(self, transaction: bytes) -> int:
        """How often a member was asked about a transaction (since it was last opened anew)."""
        position = TransactionId.from_bytes(transaction).position
        era = self.memory.eras.get(position, 0)
        return sum((p, e) == (position, era) for p, e, _ in self.memory.asked)

    def until(self, name: str, condition: Callable[[], bool], most: int = 60) -> None:
        """Let time pass in half seconds until ``condition``, once in a script."""
        left = most
        while name not in self.memory.answers:
            if condition():
                self.memory.answers[name] = True
                return
            if not left:
                raise Violation(f"I14: {name} did not come in time")
            left -= 1
            self.tick()

    def state(self, transaction: bytes) -> str:
        """A transaction's state, as anybody may see it: durable."""
        from escrowmq.ledger import listings

        identity = TransactionId.from_bytes(transaction)
        looked = self.engine.look(lambda: listings.transaction(self.ledger, identity)["state"])
        self.engine.step()
        state = str(looked.result(timeout=0))
        if state == "parked":
            self.memory.parked.add(identity.position)
        return state

    def recall(self, name: str, act: Callable[[], Any]) -> Any:
        """What ``act`` gave the first time that it came to its end."""
        if name not in self.memory.answers:
            self.memory.answers[name] = act()
        return self.memory.answers[name]

    def snapshot(self, name: str) -> None:
        """Save a snapshot, once in a script."""
        if name not in self.memory.answers:
            self.engine.shard.save(self.engine.shard.take_snapshot())
            self.memory.answers[name] = True

    def refused(self, act: Callable[[], Any]) -> Code:
        """The code with which ``act`` is refused."""
        try:
            act()
        except EscrowError as problem:
            return problem.code
        raise Violation("not refused")
