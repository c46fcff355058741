"""Commits numbered batches of a named writer (a Spark query) once at every broker, even when they are retried.

Every broker gets the commit, even without a part of the batch, so that each remembers it. If a driver crashes between
two brokers, the retried batch is dropped by the first broker and accepted by the second. This is correct only if a row
goes to the same broker each time, so rows are spread by key, or, without one, by their content, never in rotation.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from escrowmq.client.links.answers import patient_action
from escrowmq.client.producing.production import Production
from escrowmq.client.producing.session import Session
from escrowmq.errors import Code, Rejected
from escrowmq.model import TransactionId
from escrowmq.wire.actions.writers import COMMIT, SHOW, Committed


@dataclass(frozen=True, slots=True)
class BatchCommit:
    """The brokers' answer to a numbered batch. ``status``: COMMITTED, or ALREADY_COMMITTED if every broker had this
    batch, or a later one; ``rolled_back``: transactions of this attempt that lost."""

    status: Code
    rolled_back: int


def commit_batch(production: Production, writer: str, batch: int, ids: Sequence[TransactionId]) -> BatchCommit:
    """Commit a numbered batch of a writer at every broker, each with its part of the transactions; see
    :meth:`Producer.commit_batch`."""
    by_broker: dict[int, list[str]] = {number: [] for number in range(len(production.sessions))}
    if any(production.router.known_shard(identity.shard) is None for identity in ids):
        for number in by_broker:  # waits for a broker that is away as long as the commit itself
            production.router.shard_of(number, production.timeout, patient=True)
    for identity in ids:
        by_broker[production.router.of_shard(identity.shard, production.timeout)].append(str(identity))
    sessions, timeout = production.sessions, production.timeout
    answers = [_commit(sessions[number], writer, batch, mine, timeout) for number, mine in by_broker.items()]
    fresh = any(answer["status"] == Code.COMMITTED.name for answer in answers)
    status = Code.COMMITTED if fresh else Code.ALREADY_COMMITTED
    return BatchCommit(status, sum(answer["rolled_back"] for answer in answers))


def _commit(session: Session, writer: str, batch: int, ids: list[str], timeout: float) -> Committed:
    """Commit the part of a numbered batch at one broker; under a new session if the broker has forgotten this one."""

    def attempt(number: int) -> Committed:
        call = COMMIT({"writer": writer, "batch": batch, "transactions": ids, "session": number})
        return patient_action(session.link, call, time.monotonic() + timeout)

    number = session.open(True)
    try:
        return attempt(number)
    except Rejected as problem:
        if problem.code is not Code.UNKNOWN_SESSION:
            raise
    session.renew(number)
    return attempt(session.open(True))


def last_batch(production: Production, writer: str) -> int | None:
    """Return the number of the last batch of a writer that every broker has decided; None if a broker has none."""
    batches: list[int] = []
    for link in production.router.links:
        answer = patient_action(link, SHOW({"writer": writer}), time.monotonic() + production.timeout)
        if (batch := answer["batch"]) is None:
            return None
        batches.append(batch)
    return min(batches)
