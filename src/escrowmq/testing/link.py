"""An in-memory fake of a link and its broker, for client tests, with fault injection. Cancelling the future of a
receive withdraws it. Implemented: message ids are de-duplicated, the first decision is final, only the owner's group
may end a transaction, messages become visible by COMMIT, receives lease and acks settle. Not implemented: durability,
time (delays, leases and back-offs never expire), tags, order, dead letters."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partialmethod
from typing import Any

import pyarrow as pa

from escrowmq import schemas, wire
from escrowmq.errors import Code, EscrowError, Unknown, error
from escrowmq.model import Act, Outcome, TransactionId
from escrowmq.wire import ANSWER, BatchStream, Exchange, ExchangeOptions, Json, ParcelsByExchange


@dataclass(slots=True)
class TwinTransaction:
    """One transaction of the twin."""

    group: str
    rows: list[dict[str, Any]]
    outcome: Outcome | None = None


@dataclass(slots=True)
class Request:
    """One exchange received by the twin."""

    kind: Exchange
    batch: pa.RecordBatch
    options: dict[str, Any]
    future: Future[pa.RecordBatch] = field(default_factory=Future)


@dataclass(slots=True)
class TwinStream:
    """A check-back subscription of the twin."""

    on_checks: Callable[[pa.RecordBatch], None]
    closed: bool = False
    broken: bool = False
    problem: EscrowError | None = None

    def close(self) -> None:
        """Close the subscription."""
        self.closed = True


class TwinLink(ParcelsByExchange):
    """A broker in memory behind the :class:`~escrowmq.wire.Link` calls, answering at once on the caller's thread.
    Faults: ``hold`` keeps exchanges of a kind unanswered until :meth:`release`; ``lose`` answers the next exchanges of
    a kind with DISCONNECTED, either before or after they are applied; ``refuse`` fails them as a whole; ``forget``
    deletes all sessions. ``requests`` records every exchange, including lost ones."""

    def __init__(self, shard: int = 1, address: str = "twin:1") -> None:
        self.shard = shard
        self.address = address
        self.requests: list[Request] = []
        self.actions: list[tuple[str, dict[str, Any]]] = []
        self.topics: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.transactions: dict[bytes, TwinTransaction] = {}
        self.limits: dict[str, Any] = {}
        self.streams: dict[int, TwinStream] = {}
        self.away = False
        self.closed = False
        self._sessions: dict[int, str] = {}  # the group of each
        self._epochs = itertools.count(1)
        self._known: dict[tuple[str, bytes], tuple[list[Any], tuple[Any, ...]]] = {}
        self._positions = itertools.count(10)
        self._next_offsets: dict[str, int] = defaultdict(int)
        self._returned: dict[str, deque[tuple[str, int, int]]] = defaultdict(deque)
        self._leased: dict[tuple[str, int, int], tuple[str, int, int]] = {}
        self._settled: set[tuple[str, int, int]] = set()  # acknowledged: by group, lease, offset
        self._subscribed: dict[str, list[str]] = {}
        self.acked: dict[str, list[tuple[str, int]]] = defaultdict(list)
        self._held: set[Exchange] = set()
        self._losses: dict[Exchange, deque[bool]] = defaultdict(deque)
        self._refusals: dict[Exchange, deque[EscrowError]] = defaultdict(deque)
        self._waiting: list[Request] = []
        self._lock = threading.RLock()
        self._published = threading.Condition(self._lock)

    # Faults

    def hold(self, kind: Exchange) -> None:
        """Keep exchanges of this kind unanswered (and unapplied) until :meth:`release`."""
        self._held.add(kind)

    def release(self, kind: Exchange) -> None:
        """Answer held exchanges in order, and stop holding."""
        with self._lock:
            self._held.discard(kind)
            waiting, self._waiting = self._waiting, [one for one in self._waiting if one.kind is not kind]
        for request in waiting:
            if request.kind is kind:
                self._answer(request)

    def lose(self, kind: Exchange, *, applied: bool, times: int = 1) -> None:
        """Answer the next ``times`` exchanges of this kind with DISCONNECTED; ``applied``: after they took effect."""
        self._losses[kind].extend([applied] * times)

    def refuse(self, kind: Exchange, problem: EscrowError) -> None:
        """Fail the next exchange of this kind as a whole."""
        self._refusals[kind].append(problem)

    def forget(self) -> None:
        """Delete all producer sessions."""
        with self._lock:
            self._sessions.clear()

    def seen(self, kind: Exchange) -> list[pa.RecordBatch]:
        """Return the batches of all exchanges of a kind, in order."""
        return [request.batch for request in self.requests if request.kind is kind]

    def ask(self, session: int, attempt: int = 1) -> None:
        """Send the member behind ``session`` a check-back for every undecided transaction."""
        undecided = [transaction for transaction in self.transactions.values() if transaction.outcome is None]
        rows = [{**row, "attempt": attempt} for transaction in undecided for row in transaction.rows]
        self.streams[session].on_checks(pa.RecordBatch.from_pylist(rows, schema=schemas.CHECKS))

    # The link

    def exchange(self, kind: Exchange, batch: pa.RecordBatch, options: ExchangeOptions) -> Future[pa.RecordBatch]:
        """Run an exchange like the protocol; see the class for what is not implemented."""
        request = Request(kind, batch, dict(options))
        with self._lock:
            self.requests.append(request)
            if kind in self._held or (kind is Exchange.RECEIVE and not self._has_any(request.options)):
                self._waiting.append(request)
                return request.future
        self._answer(request)
        if kind is not Exchange.RECEIVE:
            self._answer_receives()
        return request.future

    def action(self, name: str, request: Any, timeout: float) -> Json:
        """Run hello, session.open, groups.subscribe, topics.list, .offsets (no times) or .wait, else NOT_FOUND."""
        self.actions.append((name, request))
        self._check_there()
        with self._lock:
            match name:
                case "hello":
                    return {"protocol": 1, "shard": self.shard, "epoch": 1, "limits": self.limits}
                case "session.open":
                    number = next(self._epochs)
                    self._sessions[number] = request["group"]
                    return {"session": number}
                case "groups.subscribe":
                    self._subscribed[request["group"]] = request["topics"]
                    return {"group": request["group"], "created": True}
                case "topics.list":
                    return {"topics": [{"name": topic, "queues": [{"queue": 0}]} for topic in self.topics]}
                case "topics.offsets" | "topics.wait":
                    return self._offsets(request)
        raise error(Code.NOT_FOUND, name)

    def _offsets(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the one queue of a topic; ``topics.wait`` waits until it has messages."""
        topic = request["topic"]
        if topic not in self.topics:
            raise error(Code.UNKNOWN_TOPIC)
        first = max((offset for _, offset in request.get("after", ())), default=-1)
        if not self._published.wait_for(lambda: len(self.topics[topic]) > first, request.get("wait_ms", 0) / 1000):
            return {"queues": []}
        return {"shard": self.shard, "queues": [{"queue": 0, "head": 0, "end": len(self.topics[topic])}]}

    def read(self, request: wire.ReadRequest) -> BatchStream:
        """Read a topic's messages from ``start`` to ``end``; with the faults of actions."""
        self._check_there()
        messages = self.topics[request["source"]]
        last = request.get("end")
        end = len(messages) if last is None else min(last, len(messages))
        rows = [self._delivery_row(request["source"], at, -1, 0) for at in range(request.get("start") or 0, end)]
        names = request.get("columns") or schemas.DELIVERY.names
        every = wire.read_schema(request["source"], damaged=wire.DAMAGED_COLUMN in names)
        schema = pa.schema([every.field(name) for name in names])
        return BatchStream(schema, [pa.RecordBatch.from_pylist(rows, schema=schema)])

    def watch(self, session: int, on_checks: Callable[[pa.RecordBatch], None]) -> TwinStream:
        """Store the subscription in ``streams``; :meth:`ask` uses it."""
        stream = TwinStream(on_checks)
        self.streams[session] = stream
        return stream

    def close(self) -> None:
        """Fail held exchanges."""
        with self._lock:
            self.closed = True
            waiting, self._waiting = self._waiting, []
        for request in waiting:
            if request.future.set_running_or_notify_cancel():
                request.future.set_exception(Unknown(Code.CLOSED))

    def _check_there(self) -> None:
        if self.away:
            raise Unknown(Code.DISCONNECTED, "the twin is away")

    # The broker

    def _answer(self, request: Request) -> None:
        if not request.future.set_running_or_notify_cancel():
            return
        try:
            with self._lock:
                self._check_there()
                losses, refusals = self._losses[request.kind], self._refusals[request.kind]
                lost = losses.popleft() if losses else None
                if refusals:
                    raise refusals.popleft()
                answer = None if lost is False else getattr(self, f"_{request.kind}")(request.batch, request.options)
                if lost is not None:
                    raise Unknown(Code.DISCONNECTED)
        except EscrowError as problem:
            request.future.set_exception(problem)
        else:
            request.future.set_result(answer)

    def _produce(self, batch: pa.RecordBatch, options: dict[str, Any], *, half: bool) -> pa.RecordBatch:
        answers = [self._produce_one(row, options, half) for row in batch.to_pylist()]
        rows = [dict(zip(schemas.PRODUCED.names, answer, strict=True)) for answer in answers]
        return pa.RecordBatch.from_pylist(rows, schema=ANSWER[Exchange.SEND])

    def _produce_one(self, row: dict[str, Any], options: dict[str, Any], half: bool) -> tuple[Any, ...]:
        if self._is_unknown_session(options):
            return (Code.UNKNOWN_SESSION, -1, -1, -1, None)
        name = row["topic"], row["message_id"]
        content = [half, *(row[column] for column in ("key", "tag", "properties", "body"))]
        if name not in self._known:
            self._known[name] = content, self._store(row, options, half)
        first, answer = self._known[name]
        return answer if first == content else (Code.MESSAGE_ID_TAKEN, -1, -1, -1, None)

    _send = partialmethod(_produce, half=False)
    _prepare = partialmethod(_produce, half=True)

    def _is_unknown_session(self, options: dict[str, Any]) -> bool:
        return bool(options.get("session")) and options["session"] not in self._sessions

    def _store(self, row: dict[str, Any], options: dict[str, Any], half: bool) -> tuple[Any, ...]:
        position = next(self._positions)
        if not half:
            return (Code.OK, position, 0, self._publish(row, position), None)
        group = self._sessions[options["session"]]
        identity = row["transaction"] or bytes(TransactionId(self.shard, options["session"], position))
        transaction = self.transactions.setdefault(identity, TwinTransaction(group, []))
        if transaction.outcome is not None:
            return (Code.TRANSACTION_DECIDED, -1, -1, -1, None)
        transaction.rows.append({**row, "position": position, "transaction": identity})
        return (Code.OK, position, 0, -1, identity)

    def _publish(self, row: dict[str, Any], position: int) -> int:
        self.topics[row["topic"]].append({**row, "position": position})
        self._published.notify_all()
        return len(self.topics[row["topic"]]) - 1

    def _end(self, batch: pa.RecordBatch, options: dict[str, Any]) -> pa.RecordBatch:
        codes = [self._decide(row["transaction"], Outcome(row["outcome"]), options) for row in batch.to_pylist()]
        return pa.RecordBatch.from_pydict({"code": codes}, schema=schemas.ENDED)

    def _decide(self, identity: bytes, outcome: Outcome, options: dict[str, Any]) -> Code:
        if self._is_unknown_session(options):
            return Code.UNKNOWN_SESSION
        transaction = self.transactions.get(identity)
        if transaction is None:
            return Code.UNKNOWN_TRANSACTION
        if self._sessions[options["session"]] != transaction.group:
            return Code.WRONG_GROUP
        if outcome is Outcome.UNKNOWN:
            return Code.NOTED
        if transaction.outcome is not None:
            same = transaction.outcome is outcome
            already = Code.ALREADY_COMMITTED if outcome is Outcome.COMMIT else Code.ALREADY_ROLLED_BACK
            return already if same else Code.CONFLICT
        transaction.outcome = outcome
        if outcome is Outcome.ROLLBACK:
            return Code.ROLLED_BACK
        for row in transaction.rows:
            self._publish(row, row["position"])
        return Code.COMMITTED

    def _has_any(self, options: dict[str, Any]) -> bool:
        group = options["group"]
        ends = {f"{group} {topic}": len(self.topics[topic]) for topic in self._subscribed[group]}
        return bool(self._returned[group]) or any(self._next_offsets[name] < end for name, end in ends.items())

    def _receive(self, batch: pa.RecordBatch, options: dict[str, Any]) -> pa.RecordBatch:
        group, room = options["group"], options["max_messages"]
        found: list[tuple[str, int, int]] = []
        while self._returned[group] and len(found) < room:
            found.append(self._returned[group].popleft())
        for topic in self._subscribed[group]:
            start = self._next_offsets[f"{group} {topic}"]
            end = min(len(self.topics[topic]), start + room - len(found))
            self._next_offsets[f"{group} {topic}"] = max(end, start)
            found.extend((topic, offset, 1) for offset in range(start, end))
        lease = next(self._positions)
        rows = []
        for topic, offset, attempt in found:
            self._leased[group, lease, offset] = (topic, offset, attempt)
            rows.append(self._delivery_row(topic, offset, lease, attempt))
        return pa.RecordBatch.from_pylist(rows, schema=schemas.DELIVERY)

    def _delivery_row(self, topic: str, offset: int, lease: int, attempt: int) -> dict[str, Any]:
        row = self.topics[topic][offset]
        more = {"queue": 0, "offset": offset, "stored_us": 0, "lease": lease, "attempt": attempt}
        return {**{name: row.get(name) for name in schemas.DELIVERY.names}, **more}

    def _settle(self, batch: pa.RecordBatch, options: dict[str, Any]) -> pa.RecordBatch:
        group = options["group"]
        codes = []
        for row in batch.to_pylist():
            offsets = range(row["start"], row["start"] + row["count"])
            found = [self._leased.get((group, row["lease"], offset)) for offset in offsets]
            repeated = row["act"] == Act.ACK and (group, row["lease"], row["start"]) in self._settled
            codes.append(Code.OK if any(found) or repeated else Code.LEASE_LOST)
            for topic, offset, attempt in filter(None, found):
                if row["act"] == Act.EXTEND:
                    continue
                del self._leased[group, row["lease"], offset]
                if row["act"] == Act.ACK:
                    self.acked[group].append((topic, offset))
                    self._settled.add((group, row["lease"], offset))
                elif row["act"] != Act.REJECT:
                    self._returned[group].append((topic, offset, attempt + (row["act"] != Act.RELEASE)))
        return pa.RecordBatch.from_pydict({"code": codes}, schema=schemas.ENDED)

    def _answer_receives(self) -> None:
        """Answer a waiting receive if messages are available now."""
        with self._lock:
            receives = [request for request in self._waiting if request.kind is Exchange.RECEIVE not in self._held]
            ready = next((request for request in receives if self._has_any(request.options)), None)
            if ready is None:
                return
            self._waiting.remove(ready)
        self._answer(ready)
        self._answer_receives()
