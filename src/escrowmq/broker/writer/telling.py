"""Log lines for operators: a transaction is parked, a message is dead, requests are refused.

Each line has its facts as fields, too (``record.facts``), for searches in a log of JSON. One event names at most
:data:`MOST_LINES` items and counts the others; ``escrowmq transactions list`` and ``dead-letters list`` show all.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from math import inf

import numpy as np

from escrowmq.errors import Code
from escrowmq.ledger.events import Event
from escrowmq.ledger.groups.cursors import PENDING
from escrowmq.ledger.ledger import Ledger
from escrowmq.model import TransactionId
from escrowmq.platform.logs import EVENTS, tell
from escrowmq.schemas import Kind

logger = logging.getLogger(EVENTS)

LOGGED = frozenset({Kind.PARKED, Kind.DEAD, Kind.BURIED})
MOST_LINES = 20
REFUSALS_SECONDS = 60.0  # between two lines about refused requests


def log_before(ledger: Ledger, event: Event) -> None:
    """Log an event (:data:`LOGGED`) before it is applied: afterwards its leases may be gone. Never raises."""
    try:
        (_log_parked if event.kind is Kind.PARKED else _log_dead)(ledger, event)
    except Exception:  # a missing line is no reason to stop
        logger.exception("cannot log an event: %s", event.kind.name)


class Refusals:
    """Requests that were refused because of overload: the first is logged at once, the others are counted and logged
    at intervals. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[Code] = Counter()
        self._since = self._quiet_until = -inf

    def count(self, code: Code) -> None:
        """Count one refused request."""
        with self._lock:
            if not self._counts:
                self._since = time.monotonic()
            self._counts[code] += 1
        self.settle()

    def settle(self, *, last: bool = False) -> None:
        """Log how many requests were refused since the last such line, if :data:`REFUSALS_SECONDS` have passed or this
        is the ``last`` call."""
        if not self._counts:
            return
        now = time.monotonic()
        with self._lock:
            if not self._counts or (now < self._quiet_until and not last):
                return
            counts, self._counts = self._counts, Counter()
            seconds, self._quiet_until = now - self._since, now + REFUSALS_SECONDS
        for code, count in sorted(counts.items()):
            within = f" within {seconds:.0f} s" if count > 1 else ""
            sentence = (
                f"refused: {count:,} {'requests' if count > 1 else 'request'} with {code.name}{within}; their "
                "clients try again later"
            )
            tell(logging.WARNING, "refused", sentence, code=code.name, count=count, seconds=round(seconds, 3))


def _log_parked(ledger: Ledger, event: Event) -> None:
    positions = event.batch.column("transaction").to_numpy()
    table = ledger.transactions
    ordinals = table.find(positions[:MOST_LINES])
    epochs, checks = table.column("epoch", ordinals), table.column("checks", ordinals)
    groups = [ledger.sessions.groups.get(int(group)) for group in table.groups_of(ordinals)]
    rows = zip(positions[:MOST_LINES].tolist(), epochs.tolist(), checks.tolist(), groups, strict=True)
    for position, epoch, asked, group in rows:
        name = str(TransactionId(ledger.shard, epoch, position))
        sentence = f"parked: transaction {name} of {group} is undecided after {asked} questions and waits for a person"
        tell(logging.WARNING, "parked", sentence, transaction=name, group=group, checks=asked)
    _log_more("parked", "transactions", len(positions))


def _log_dead(ledger: Ledger, event: Event) -> None:
    count = 0
    for id, start, size, cause in zip(*(column.to_pylist() for column in event.batch.columns), strict=True):
        lease = ledger.groups.leases.live.get(id)
        if lease is None:
            continue
        if count >= MOST_LINES:  # only counted: thousands may die at once, and a lease is as long
            count += size
            continue
        mask = np.frombuffer(lease.copy_mask(), np.uint8)[start - lease.start :][:size]
        offsets = start + np.flatnonzero(mask == PENDING)
        place, group = ledger.topics.queues[lease.cursor.queue_id].place, ledger.groups.groups[lease.group].name
        for offset in offsets[: MOST_LINES - count].tolist():
            where = f"{place.topic}/{place.queue}/{offset}"
            facts = {"topic": place.topic, "queue": place.queue, "offset": offset, "group": group}
            sentence = f"dead: {where} is a dead letter of {group}: {cause}"
            tell(logging.WARNING, "dead", sentence, **facts, attempts=lease.attempt, cause=cause)
        count += len(offsets)
    _log_more("dead", "messages", count)


def _log_more(what: str, things: str, count: int) -> None:
    if count > MOST_LINES:
        tell(logging.WARNING, what, f"{what}: {count - MOST_LINES:,} more {things} at once", more=count - MOST_LINES)
