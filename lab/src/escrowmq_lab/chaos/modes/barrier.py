"""Transactions with the barrier: change and decision share a local transaction; the inbox records each id."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from escrowmq import outbox
from escrowmq.client.producing.producer import Producer
from escrowmq.errors import DONE, Code, Fenced, Overloaded, Rejected, Unknown, flags
from escrowmq.model import COMMIT, ROLLBACK, Outcome
from escrowmq_lab.chaos.modes.inboxes import InboxMode
from escrowmq_lab.chaos.modes.seam import CALL_SECONDS, OPEN, PAUSE_SECONDS, Contradiction, Regret, Site

_log = logging.getLogger(__name__)
_DONE = np.frombuffer(flags(DONE), np.bool_)
ENDINGS = ("once", "twice", "never", "unheard", "contrary")
"""Ways in which a producer ends a bound transaction: normally, repeated, not at all, without waiting for the response,
and with a second opposite decision."""


@dataclass(frozen=True, slots=True)
class _Context:
    """The objects with which a producer places messages."""

    site: Site
    producer: Producer
    barrier: outbox.Barrier


class BarrierMode(InboxMode):
    """Half messages, ``bind_tx`` or ``bind_batch_tx``, check-back by ``Barrier``; ``claim_tx``. One transaction in ten
    is rolled back. Most are ended normally; some twice, some only by the check-back, some without waiting, and some get
    the opposite decision afterwards, which must be rejected. The producers share no group: each answers for its own
    database only."""

    name = "barrier"
    promise = (
        "each effect exactly once: the producer's database holds the barrier's row, the consumer's the inbox's mark"
    )

    def place(self, site: Site) -> None:
        """Place whole transactions or batches of them at random; answer check-backs until the end."""
        barrier = outbox.Barrier(site.engine)
        group = f"chaos-{self.name}-{site.name}"
        with site.bus.producer(group, instance=site.name, checker=barrier, timeout=CALL_SECONDS) as producer:
            place = _Context(site, producer, barrier)
            while not site.closing.is_set():
                together = site.chance.random() < 0.4
                ids = self.ids(site, 12 if together else 60)
                dooms = site.chance.random() < 0.1
                site.books.intend(self.name, ids, dooms=dooms)
                try:
                    (self._place_together if together else self._place_separately)(place, ids, dooms)
                except (Unknown, Overloaded) as problem:
                    _log.info("the check-back settles what was begun: %s", problem)
                    site.closing.wait(PAUSE_SECONDS)
                except Fenced as problem:
                    if problem.code is not Code.LATE_COMMIT:
                        raise
                    _log.info("the business took too long, and is rolled back: %s", problem)
                except Rejected as problem:
                    if problem.code is not Code.TRANSACTION_DECIDED:  # as above, before its last message
                        raise Contradiction(str(problem)) from problem
            site.placed.set()
            site.ended.wait()

    def _place_together(self, place: _Context, ids: Sequence[str], dooms: bool) -> None:
        """Place one transaction of messages to several consumers."""
        site = place.site
        try:
            with place.producer.transaction() as txn, Session(site.engine) as session, session.begin():
                for message in self.addressed(ids):
                    txn.send(message)
                outbox.bind_tx(session, txn)
                site.books.enter(session, self.name, ids)
                if dooms:
                    raise Regret
        except Regret:
            return
        site.books.confirm(self.name, ids)

    def _place_separately(self, place: _Context, ids: Sequence[str], dooms: bool) -> None:
        """Place a transaction per message, as columns; the business covers those that the brokers accepted."""
        site = place.site
        receipts = place.producer.prepare_batch(self.addressed(ids))
        taken = np.flatnonzero(receipts.codes == Code.OK)
        if not len(taken):
            raise Overloaded(Code.BROKER_AWAY)
        transactions = receipts.transactions.take(pa.array(taken))
        mine = [ids[row] for row in taken.tolist()]
        try:
            with Session(site.engine) as session, session.begin():
                outbox.bind_batch_tx(session, transactions)
                site.books.enter(session, self.name, mine)
                if dooms:
                    raise Regret
        except Regret:
            self._end(place, transactions, ROLLBACK)
        except DBAPIError:  # it may have committed: the database knows
            if site.chance.random() < 0.5:
                check_decided(place.producer.end_batch(transactions, place.barrier.decide_ids(transactions)).codes)
            raise
        else:
            done = self._end(place, transactions, COMMIT)
            if confirmed := [one for one, is_done in zip(mine, done.tolist(), strict=True) if is_done]:
                site.books.confirm(self.name, confirmed)

    def _end(self, place: _Context, transactions: pa.Array, outcome: Outcome) -> npt.NDArray[np.bool_]:
        """End the transactions like the local one, in one of the ways. Returns which are known to be decided."""
        site, producer = place.site, place.producer
        way = site.chance.choices(ENDINGS, (6, 1, 1, 1, 1))[0]
        done = np.zeros(len(transactions), np.bool_)
        if way == "never":
            return done
        if way == "unheard":
            for one in transactions.to_pylist():
                producer.end(one, outcome, confirm="oneway")
            return done
        done = check_decided(producer.end_batch(transactions, outcome).codes)
        if way == "twice":
            done |= check_decided(producer.end_batch(transactions, outcome).codes)
        if way == "contrary":
            check_opposite_rejected(
                producer, transactions.filter(pa.array(done)), ROLLBACK if outcome is COMMIT else COMMIT
            )
        return done


def check_decided(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """Return which decisions, equal to the database's, are durable. Raises Contradiction for a rejection."""
    if wrong := np.flatnonzero(~(_DONE | OPEN)[codes]).tolist():
        raise Contradiction(f"as the database decided, and the broker answers {Code(codes[wrong[0]]).name}")
    return np.asarray(_DONE[codes])


def check_opposite_rejected(producer: Producer, transactions: pa.Array, outcome: Outcome) -> None:
    """Try the opposite outcome of decided transactions. Raises Contradiction if the broker accepts it."""
    try:
        codes: Any = producer.end_batch(transactions, outcome).codes
    except (Unknown, Overloaded):
        return
    if wrong := np.flatnonzero((codes != Code.CONFLICT) & ~OPEN[codes]).tolist():
        raise Contradiction(f"{outcome.name} after the opposite, and the broker answers {Code(codes[wrong[0]]).name}")
