"""The producer of modes whose messages are plain: it pledges them in its database, and sends each until a broker has
it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import sqlalchemy as sa

from escrowmq.client.producing.producer import Producer
from escrowmq.client.producing.results import Receipts
from escrowmq.errors import Code, Overloaded, Unknown
from escrowmq_lab.chaos.books import business, confirmed
from escrowmq_lab.chaos.modes.seam import CALL_SECONDS, OPEN, PAUSE_SECONDS, Contradiction, Mode, Site, key_of

_log = logging.getLogger(__name__)
MOST_OWED = 400
"""Ids that wait for a broker which is away, before a producer pledges no more."""


class PledgeMode(Mode):
    """Plain sends under ids of the producer's own, ``qos=2``.

    The business row is a pledge: from its commit on, the producer owes the message, and sends it under its id until a
    broker has taken it (confirmed). So a message may be on its way again and again, also by another process of the
    node, and the brokers must have it once.
    """

    def key(self, identity: str) -> str:
        """One of a few: what is owed is sent in the order of the pledges."""
        return key_of(identity)

    def place(self, site: Site) -> None:
        """First what earlier processes owe, then pledge by pledge; what is owed is sent until the end."""
        owed = self._owed(site)
        sent: tuple[list[str], list[int]] = [], []
        with site.bus.producer(f"chaos-{self.name}", instance=site.name, qos=2, timeout=CALL_SECONDS) as producer:
            while not site.ended.is_set():
                if site.closing.is_set():
                    site.placed.set()
                elif len(owed) < MOST_OWED:
                    owed += self._pledge(site)
                if not owed:
                    site.ended.wait()
                elif sent[0] and site.chance.random() < 0.05:
                    self._send_again(producer, *sent)
                else:
                    owed, sent = self._send(site, producer, owed)
                    if owed:
                        site.pause(PAUSE_SECONDS)

    def _owed(self, site: Site) -> list[str]:
        """By number, which is the order within each process; those of several processes share no key."""
        query = sa.select(business.c.id).outerjoin(confirmed, confirmed.c.id == business.c.id)
        theirs = query.where(business.c.mode == self.name, confirmed.c.id.is_(None))
        with site.engine.connect() as connection:
            return sorted(connection.scalars(theirs), key=lambda one: int(one.split(".")[3]))

    def _pledge(self, site: Site) -> list[str]:
        ids = self.ids(site)
        site.books.intend(self.name, ids)
        with site.engine.begin() as connection:
            site.books.enter(connection, self.name, ids)
        return ids

    def _send(self, site: Site, producer: Producer, owed: list[str]) -> tuple[list[str], tuple[list[str], list[int]]]:
        """Send what is pending. Returns what is still pending, and the accepted ids with their positions."""
        try:
            receipts = self._taken(producer, owed)
        except (Unknown, Overloaded) as problem:
            _log.info("%d messages are owed still: %s", len(owed), problem)
            return owed, ([], [])
        taken = receipts.codes == Code.OK
        mine = [one for one, is_taken in zip(owed, taken.tolist(), strict=True) if is_taken]
        if mine:
            site.books.confirm(self.name, mine)
        left = [one for one, is_taken in zip(owed, taken.tolist(), strict=True) if not is_taken]
        return left, (mine, receipts.positions[taken].tolist())

    def _send_again(self, producer: Producer, ids: Sequence[str], positions: Sequence[int]) -> None:
        """Forget that they were taken. Raises Contradiction unless they get the first receipt."""
        try:
            receipts = self._taken(producer, ids)
        except (Unknown, Overloaded):
            return
        for row in np.flatnonzero(receipts.codes == Code.OK).tolist():
            if receipts.positions[row] != positions[row]:
                where = f"first at {positions[row]}, then at {receipts.positions[row]}"
                raise Contradiction(f"{ids[row]} was taken twice, {where}")

    def _taken(self, producer: Producer, ids: Sequence[str]) -> Receipts:
        """Return the receipts of the brokers for a batch. Raises Contradiction for a refusal that no fault explains."""
        receipts = producer.send_batch(self.addressed(ids))
        if wrong := np.flatnonzero((receipts.codes != Code.OK) & ~OPEN[receipts.codes]).tolist():
            raise Contradiction(f"{ids[wrong[0]]} is refused with {Code(receipts.codes[wrong[0]]).name}")
        return receipts
