"""Commands of golden scripts for the ledger: what a command answers, and which events it puts into the log.

| command | does |
| --- | --- |
| ``rules NAME=VALUE ...`` | change the shard's rules; times with ``_us`` left out: ``check_interval=30s`` |
| ``topic NAME queues=N`` | create a topic |
| ``session GROUP [plain]`` | open a producer session of a group |
| ``prepare GROUP id=.. [topic=.. key=.. body=.. delay=.. joins=..]`` | store a half message; ``joins``: an id |
| ``send GROUP id=.. ...`` | send a plain message; group ``-``: no session |
| ``commit|rollback|unknown GROUP ID ...`` | end the transactions of these ids |
| ``tick TIME`` | let time pass, do what is due, ask the check-backs that are due |
| ``subscribe GROUP TOPIC [ordered] [max_attempts=N] [tags=a,b]`` | make a consumer group |
| ``receive GROUP [max=N] [lease=TIME] [member=N]`` | lease messages |
| ``ack|nack|release GROUP ID ...`` | settle messages that the group was given; ``nack``: ``cause=..`` |
| ``retry|discard GROUP ID ...`` | settle dead letters |
| ``restart [snapshot]`` | fold the log anew, or load a snapshot |
| ``show TOPIC`` | the visible messages, queue by queue |
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from escrowmq.errors import Code, EscrowError
from escrowmq.ledger.columns.arrays import Int64s
from escrowmq.ledger.commands import (
    Configure,
    CreateTopic,
    Receive,
    Rules,
    Settle,
    SettleDead,
    Subscribe,
    Subscription,
)
from escrowmq.ledger.groups.order import numbers
from escrowmq.ledger.ledger import Ledger
from escrowmq.message.hashes import hash_keys
from escrowmq.model import Act, Outcome, message_id
from escrowmq.schemas import SETTLING, Kind
from escrowmq.testing.ledgers import LedgerDriver

_UNITS = {"us": 1, "ms": 1_000, "s": 1_000_000, "min": 60_000_000, "h": 3_600_000_000}


def microseconds(text: str) -> int:
    """``6s`` as microseconds."""
    number = text.rstrip("abcdefghijklmnopqrstuvwxyz")
    return int(float(number) * _UNITS[text[len(number) :]])


class LedgerScript:
    """One ledger that a script drives. Call it with a command."""

    def __init__(self) -> None:
        self._driver = LedgerDriver(Rules(default_queues=1))
        self._given: dict[str, Any] = {"default_queues": 1}
        self._sessions: dict[str, int] = {"-": 0}
        self._transactions: dict[str, bytes] = {}
        self._names: dict[int, str] = {}  # position -> id
        self._ids: dict[bytes, str] = {}
        self._leased: dict[tuple[str, str], tuple[int, int]] = {}  # (group, id) -> lease, offset
        self._groups: list[str] = []  # by number
        self._group_of: dict[int, str] = {}  # lease -> group
        self._seen = len(self._driver.events)
        self._driver.ledger.ask_keys_of(self._keys_of)

    def __call__(self, name: str, words: list[str], options: dict[str, str]) -> Iterator[str]:
        try:
            yield from getattr(self, f"_{name}")(words, options)
        except EscrowError as problem:
            yield f"{problem.code.name}: {problem.message}"

    # Commands

    def _rules(self, words: list[str], options: dict[str, str]) -> Iterator[str]:
        for name, text in options.items():
            timed = f"{name}_us" in Rules.__dataclass_fields__
            self._given[f"{name}_us" if timed else name] = microseconds(text) if timed else int(text)
        self._driver.do(Configure(Rules(**self._given)))
        self._seen = len(self._driver.events)
        yield from ()

    def _topic(self, words: list[str], options: dict[str, str]) -> Iterator[str]:
        self._driver.do(CreateTopic(words[0], int(options.get("queues", 1))))
        yield from self._events()

    def _session(self, words: list[str], options: dict[str, str]) -> Iterator[str]:
        instance = options.get("instance", "one")
        self._sessions[words[0]] = self._driver.session(words[0], instance, transactional="plain" not in words)
        yield from self._events()

    def _prepare(self, words: list[str], options: dict[str, str]) -> Iterator[str]:
        yield from self._produce(self._driver.prepare, words[0], options)

    def _send(self, words: list[str], options: dict[str, str]) -> Iterator[str]:
        yield from self._produce(lambda session, row: self._driver.send(row, session=session), words[0], options)

    def _produce(self, act: Any, group: str, options: dict[str, str]) -> Iterator[str]:
        name = options.pop("id")
        row: dict[str, Any] = {"message_id": name, "topic": options.pop("topic", "orders")}
        if "delay" in options:
            row["delay_us"] = microseconds(options.pop("delay"))
        if "joins" in options:
            row["transaction"] = self._transactions[options.pop("joins")]
        row["body"] = options.pop("body", "").encode()
        (answer,) = act(self._sessions[group], {**row, **options})
        self._ids[message_id(name)] = name
        if answer["transaction"] is not None:
            self._transactions.setdefault(name, answer["transaction"])
        yield from self._events()
        place = "" if answer["offset"] < 0 else f" queue={answer['queue']} offset={answer['offset']}"
        yield f"{name}: {Code(answer['code']).name}{place}"

    def _end(self, outcome: Outcome, words: list[str]) -> Iterator[str]:
        group, *names = words
        codes = self._driver.end(self._sessions[group], *((self._transactions[one], outcome) for one in names))
        yield from self._events()
        for name, code in zip(names, codes, strict=True):
            yield f"{name}: {Code(code).name}"

    def _commit(self, words: list[str], options: dict[str, str]) -> Iterator[str]:
        yield from self._end(Outcome.COMMIT, words)

    def _rollback(self, words: list[str], options: dict[str, str]) -> Iterator[str]:
        yield from self._end(Outcome.ROLLBACK, words)

    def _unknown(self, words: list[str], options: dict[str, str]) -> Iterator[str]:
        yield from self._end(Outcome.UNKNOWN, words)

    def _tick(self, words: list[str], options: dict[str, str]) -> Iterator[str]:
        self._driver.advance(microseconds(words[0]) / 1e6)
        self._driver.tick()
        yield from self._events()
        for group in self._sessions:
            if group != "-":
                asked = self._driver.ask(group)
                yield from self._events()
                for position, attempt in zip(asked.transactions.tolist(), asked.attempts.tolist(), strict=True):
                    yield f"CHECK {self._names[position]} attempt={attempt}"

    def _subscribe(self, words: list[str], options: dict[str, str]) -> Iterator[str]:
        group, topic = words[:2]
        given: dict[str, Any] = {"ordered": "ordered" in words}
        if "tags" in options:
            given["tags"] = tuple(options["tags"].split(","))
        if "max_attempts" in options:
            given["max_attempts"] = int(options["max_attempts"])
        self._driver.do(Subscribe(group, Subscription(topics=(topic,), **given)))
        yield from self._events()

    def _receive(self, words: list[str], options: dict[str, str]) -> Iterator[str]:
        (group,) = words
        command = Receive(
            group,
            int(options.get("member", 1)),
            int(options.get("max", 100)),
            microseconds(options.get("lease", "30s")),
        )
        found = self._driver.do(command)
        yield from self._events()
        columns = (found.leases, found.offsets, found.attempts, found.positions)
        for lease, offset, attempt, position in zip(*(one.tolist() for one in columns), strict=True):
            name = self._names[position]
            self._leased[group, name] = lease, offset
            yield f"{name}: offset={offset} attempt={attempt}"
        if not len(found.leases):
            yield "nothing"

    def _settle(self, act: Act, words: list[str], options: dict[str, str]) -> Iterator[str]:
        group, *names = words
        for name in names:
            lease, offset = self._leased[group, name]
            row = {"lease": lease, "start": offset, "count": 1, "act": int(act), "delay_us": -1}
            batch = pa.RecordBatch.from_pylist([{**row, "cause": options.get("cause")}], SETTLING)
            (code,) = self._driver.do(Settle(group, batch)).column("code").to_pylist()
            yield from self._events()
            yield f"{name}: {Code(code).name}"

    def _ack(self, words: list[str], options: dict[str, str]) -> Iterator[str]:
        yield from self._settle(Act.ACK, words, options)

    def _nack(self, words: list[str], options: dict[str, str]) -> Iterator[str]:
        yield from self._settle(Act.NACK, words, options)

    def _release(self, words: list[str], options: dict[str, str]) -> Iterator[str]:
        yield from self._settle(Act.RELEASE, words, options)

    def _settle_dead(self, words: list[str], retry: bool) -> Iterator[str]:
        group, *names = words
        for name in names:
            _, offset = self._leased[group, name]
            queue = np.array([self._queue_of(name)])
            codes = self._driver.do(SettleDead(group, queue, np.array([offset]), retry))
            yield from self._events()
            yield f"{name}: {Code(int(codes[0])).name}"

    def _retry(self, words: list[str], options: dict[str, str]) -> Iterator[str]:
        yield from self._settle_dead(words, retry=True)

    def _discard(self, words: list[str], options: dict[str, str]) -> Iterator[str]:
        yield from self._settle_dead(words, retry=False)

    def _restart(self, words: list[str], options: dict[str, str]) -> Iterator[str]:
        ledger = self._driver.ledger
        if "snapshot" in words:
            self._driver.ledger = Ledger.restore(ledger.shard, ledger.snapshot())
        else:
            self._driver.ledger = self._driver.replay()
        self._driver.ledger.ask_keys_of(self._keys_of)
        yield from ()

    def _show(self, words: list[str], options: dict[str, str]) -> Iterator[str]:
        (topic,) = words
        if not self._driver.ledger.topics.has(topic):
            yield "no such topic"
            return
        for queue in range(len(self._driver.ledger.topics.queue_ids(topic))):
            yield f"queue {queue}: {' '.join(self._names[one] for one in self._driver.queue(topic, queue)) or 'empty'}"

    def _keys_of(self, positions: Int64s) -> Int64s:
        return numbers(hash_keys(self._driver.read(positions).column("key")))

    # Events

    def _queue_of(self, name: str) -> int:
        for kind, batch, position, _ in self._driver.events:
            if kind in (Kind.PLAIN, Kind.HALF):
                for row, raw in enumerate(batch.column("message_id").to_pylist()):
                    if self._ids.get(raw) == name:
                        return int(batch.column("queue_id")[row].as_py())
        raise KeyError(name)

    def _events(self) -> Iterator[str]:
        """What was put into the log since the last call, a line for each row."""
        for kind, batch, position, _ in self._driver.events[self._seen :]:
            for number, row in enumerate(batch.to_pylist()):
                if kind in (Kind.PLAIN, Kind.HALF):
                    self._names[position + number] = name = self._ids.setdefault(
                        row["message_id"], row["message_id"].hex()
                    )
                    yield f"  {kind.name} {name}"
                else:
                    if kind is Kind.GROUP:
                        self._groups.append(row["name"])
                    yield f"  {kind.name} {self._describe(row)}".rstrip()
        self._seen = len(self._driver.events)

    def _describe(self, row: dict[str, Any]) -> str:
        shown = []
        if "group" in row and "lease" in row:
            self._group_of[row["lease"]] = self._groups[row["group"]]
        if "lease" in row:
            shown.append(self._group_of[row["lease"]])
        for name, value in row.items():
            if name in ("transaction", "position") and value in self._names:
                shown.append(self._names[value])
            elif name == "state":
                shown.append({1: "COMMITTED", 2: "ROLLED_BACK", 3: "EXPIRED"}.get(value, str(value)))
            elif name in _SHOWN and value is not None:
                shown.append(f"{name}={value}")
        return " ".join(shown)


_SHOWN = ("start", "count", "attempt", "cause", "name", "queues", "offset", "instance")
