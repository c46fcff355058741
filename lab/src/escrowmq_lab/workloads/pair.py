"""Outbox pair: a shop writes its orders and the messages about them in one local transaction; relays send the rows;
consumers record each id with its effect. The committed rows and the effects must be the same, by id. The target is the
product's (:class:`~escrowmq.outbox.targets.escrow.EscrowTarget`). The table replaces one in a database, which cannot
run in virtual time: it follows the rules of :mod:`escrowmq.outbox.relay` about leases and records."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import pyarrow as pa

from escrowmq.errors import Code
from escrowmq.outbox.targets.escrow import EscrowTarget
from escrowmq.schemas import OUTGOING
from escrowmq_lab import promises
from escrowmq_lab.checker import Violation
from escrowmq_lab.history import Act, Event, Kind, payload
from escrowmq_lab.workloads.reading import Reader
from escrowmq_lab.workloads.seam import Operation, Role, Site, Workload, to_do

LEASE = 3.0
"""Duration (s) of a relay's lease of the table."""
MOST_ROWS = 20
"""Rows of one batch."""


@dataclass(frozen=True, slots=True)
class Row:
    """A message that waits to be sent."""

    seq: int
    value: str
    topic: str
    key: str | None
    body: bytes

    @property
    def id(self) -> bytes:
        """The message id."""
        return hashlib.blake2b(self.value.encode(), digest_size=16).digest()


class Tables:
    """The local message table and the consumers' records of handled ids. Each method is one transaction."""

    def __init__(self) -> None:
        self.pending: dict[int, Row] = {}
        self.marks: set[bytes] = set()
        self._next = 0
        self._holder, self._until = "", 0.0

    def number(self) -> int:
        """Return the next number of a row; assigned before the row is committed, as in databases."""
        self._next += 1
        return self._next

    def commit(self, rows: Iterable[Row]) -> None:
        """Commit a local transaction with these rows."""
        self.pending.update((row.seq, row) for row in rows)

    def lease(self, name: str, now: float) -> bool:
        """Lease the table to the relay ``name`` for a while. Returns whether it has the lease."""
        if name != self._holder and now < self._until:
            return False
        self._holder, self._until = name, now + LEASE
        return True

    def first(self) -> list[Row]:
        """Return the next rows to send: the lowest remaining numbers first."""
        return [self.pending[seq] for seq in sorted(self.pending)[:MOST_ROWS]]

    def delete(self, name: str, now: float, rows: Iterable[Row]) -> None:
        """Delete sent rows; does nothing if another relay may have the lease."""
        if name == self._holder and now < self._until:
            for row in rows:
                self.pending.pop(row.seq, None)

    def mark(self, identity: bytes) -> bool:
        """Claim an id. Returns False if it is claimed."""
        fresh = identity not in self.marks
        self.marks.add(identity)
        return fresh


def tables(shared: dict[str, Any]) -> Tables:
    """Return the database of a run."""
    found: Tables = shared.setdefault("tables", Tables())
    return found


class OutboxPair(Workload):
    """See the module."""

    name = "outbox pair"

    def roles(self, chance: Random, size: int) -> list[Role]:
        """Return two shops over one table, two relays of which one works, two consumers of a shared group."""

        def read(site: Site, plan: Iterable[Operation]) -> None:
            _consume(site)

        def order(number: int, shop: str) -> Operation:
            rows = [
                (chance.choice(TOPICS), chance.choice((None, "a", "b"))) for _ in range(chance.choice((1, 1, 2, 12)))
            ]
            details = {"rows": rows, "thinks": chance.random() * 0.3, "commits": chance.random() < 0.8}
            return Operation("order", f"{shop}-{number}", chance.random() * 0.3, details)

        return [
            *(Role(shop, _sell, [order(number, shop) for number in range(size)]) for shop in ("shop-1", "shop-2")),
            *(Role(f"relay-{n}", _relay, drains=True) for n in (1, 2)),
            *(Role(f"points-{n}", read, drains=True) for n in (1, 2)),
        ]

    def check(self, events: Sequence[Event]) -> list[Violation]:
        """Check that rows and effects are the same, by id, and that the rows of a key are in order."""
        return [*super().check(events), *promises.unpaired(events), *promises.disordered(events)]

    def left(self, shared: dict[str, Any]) -> list[str]:
        """Return the number of unsent rows."""
        return [f"{len(tables(shared).pending)} rows are not sent"] if tables(shared).pending else []


TOPICS = ("sales", "returns")


def _sell(site: Site, plan: Iterable[Operation]) -> None:
    """Run local transactions, one after the other; some are rolled back."""
    mine = tables(site.shared)
    for operation in to_do(site, plan):
        rows = [
            Row(mine.number(), value, topic, key, payload(value, 40))
            for number, (topic, key) in enumerate(operation.details["rows"])
            for value in [f"{operation.name}-{number}"]
        ]
        for row in rows:
            site.history.add(site.name, Act.SEND, Kind.INVOKE, value=row.value, topic=row.topic, key=row.key)
        site.pause(operation.details["thinks"])  # others commit meanwhile; a shop that dies here has written nothing
        commits = operation.details["commits"]
        if commits:
            mine.commit(rows)
        for row in rows:
            site.history.add(
                site.name, Act.SEND, Kind.OK if commits else Kind.FAIL,
                value=row.value, topic=row.topic, key=row.key, message_id=row.id.hex(),
            )  # fmt: skip


def _relay(site: Site, plan: Iterable[Operation]) -> None:
    """Send the existing rows, and delete those that the target confirmed as durable."""
    mine = tables(site.shared)
    target = EscrowTarget.over(site.connect_each(), timeout=3.0)
    site.kept["receives"] = True
    while True:
        if not mine.lease(site.name, site.seconds) or not (rows := mine.first()):
            site.pause(0.2)
            continue
        codes = target.send(_batch(rows)).tolist()
        mine.delete(site.name, site.seconds, [row for row, code in zip(rows, codes, strict=True) if code == Code.OK])
        if any(codes):
            site.pause(0.2)


def _batch(rows: Sequence[Row]) -> pa.RecordBatch:
    common = {"queue": -1, "born_us": 0, "delay_us": 0, "immunity_us": 0}
    listed = [{**common, "topic": row.topic, "key": row.key, "body": row.body, "message_id": row.id} for row in rows]
    return pa.RecordBatch.from_pylist(listed, OUTGOING)


def _consume(site: Site) -> None:
    """Consume: the effect and the record of its id are one local transaction."""
    mine = tables(site.shared)

    def effect(content: dict[str, Any], row: dict[str, Any]) -> None:
        site.pause(0.01 * site.chance.random())
        if mine.mark(row["message_id"]):
            site.history.add(
                site.name, Act.EFFECT, Kind.OK, value=str(content.get("value")), message_id=row["message_id"].hex()
            )

    Reader(site, "points", list(TOPICS), careless=0.2, effect=effect).work()
