"""Log lines for operators, as it happens: a transaction is parked, a message is dead, the disk is full and
has space again, requests are refused.

Each line has its facts as fields, too (``record.facts``), so that a log of JSON can be searched by them. One event
tells of at most :data:`MOST_LINES` things by name, and of the others by number: whoever needs all asks ``escrowmq
transactions list`` or ``dead-letters list``.
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

TOLD = frozenset({Kind.PARKED, Kind.DEAD, Kind.BURIED})
MOST_LINES = 20
REFUSALS_SECONDS = 60.0
"""Between two lines about refused requests."""


def tell_before(ledger: Ledger, event: Event) -> None:
    """Tell of an event of a kind in :data:`TOLD`, before it is applied: afterwards its leases may have gone. Never
    raises."""
    try:
        if event.kind is Kind.PARKED:
            _on_parked(ledger, event)
        else:
            _dead(ledger, event)
    except Exception:  # a line less is no reason to stop
        logger.exception("an event cannot be told: %s", event.kind.name)


class Refusals:
    """Requests that were refused because there was too much of everything: the first is logged at once, the others are
    counted and logged now and then. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[Code] = Counter()
        self._since = self._quiet_until = -inf

    def saw(self, code: Code) -> None:
        """One more."""
        with self._lock:
            if not self._counts:
                self._since = time.monotonic()
            self._counts[code] += 1
        self.settle()

    def settle(self, *, last: bool = False) -> None:
        """Tell how many there were, unless that was done within :data:`REFUSALS_SECONDS`; in the ``last`` call in any
        case."""
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


def _on_parked(ledger: Ledger, event: Event) -> None:
    positions = event.batch.column("transaction").to_numpy()
    table = ledger.transactions
    ordinals = table.find(positions[:MOST_LINES])
    epochs, checks = table.column("epoch", ordinals), table.column("checks", ordinals)
    groups = [ledger.sessions.groups.get(int(group)) for group in table.groups_of(ordinals)]
    for position, epoch, asked, group in zip(
        positions.tolist(), epochs.tolist(), checks.tolist(), groups, strict=False
    ):
        identity = str(TransactionId(ledger.shard, epoch, position))
        sentence = (
            f"parked: transaction {identity} of {group} is undecided after {asked} questions and waits for a person"
        )
        tell(logging.WARNING, "parked", sentence, transaction=identity, group=group, checks=asked)
    _more("parked", "transactions", len(positions))


def _dead(ledger: Ledger, event: Event) -> None:
    count = 0
    for id, start, size, cause in zip(*(column.to_pylist() for column in event.batch.columns), strict=True):
        lease = ledger.groups.leases.live.get(id)
        if lease is None:
            continue
        if count >= MOST_LINES:  # looked at no more: thousands may die at once, and a lease is as long
            count += size
            continue
        pending = (
            np.frombuffer(lease.copy_mask(), np.uint8)[start - lease.start : start - lease.start + size] == PENDING
        )
        offsets = start + np.flatnonzero(pending)
        place, group = ledger.topics.queues[lease.cursor.queue_id].place, ledger.groups.groups[lease.group].name
        for offset in offsets[: MOST_LINES - count].tolist():
            where = f"{place.topic}/{place.queue}/{offset}"
            sentence = f"dead: {where} is a dead letter of {group}: {cause}"
            facts = {"topic": place.topic, "queue": place.queue, "offset": offset, "group": group}
            tell(logging.WARNING, "dead", sentence, **facts, attempts=lease.attempt, cause=cause)
        count += len(offsets)
    _more("dead", "messages", count)


def _more(what: str, things: str, count: int) -> None:
    if count > MOST_LINES:
        tell(logging.WARNING, what, f"{what}: {count - MOST_LINES:,} more {things} at once", more=count - MOST_LINES)
