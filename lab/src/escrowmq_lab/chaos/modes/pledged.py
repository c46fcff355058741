"""The producer of plain messages: it records each message in its database, and sends it until a broker has it."""

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
MOST_PENDING = 400
"""Maximum number of unsent ids while a broker is unreachable."""


class PledgeMode(Mode):
    """Plain sends under the producer's own ids, ``qos=2``. The business row is a pledge: after its commit the producer
    sends the message under its id until a broker has accepted it (confirmed). So a message may be sent repeatedly, also
    by another process of the node, and the brokers must store it once."""

    def key(self, identity: str) -> str:
        """Return one of a few keys: pending messages are sent in the order of the pledges."""
        return key_of(identity)

    def place(self, site: Site) -> None:
        """Send messages of earlier processes, then pledge new ones; pending messages are sent until the end."""
        pending = self._read_pending(site)
        sent: tuple[list[str], list[int]] = [], []
        with site.bus.producer(f"chaos-{self.name}", instance=site.name, qos=2, timeout=CALL_SECONDS) as producer:
            while not site.ended.is_set():
                if site.closing.is_set():
                    site.placed.set()
                elif len(pending) < MOST_PENDING:
                    pending += self._pledge(site)
                if not pending:
                    site.ended.wait()
                elif sent[0] and site.chance.random() < 0.05:
                    self._send_again(producer, *sent)
                else:
                    pending, sent = self._send(site, producer, pending)
                    if pending:
                        site.pause(PAUSE_SECONDS)

    def _read_pending(self, site: Site) -> list[str]:
        """Return pending ids by number, the order within each process; different processes share no key."""
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

    def _send(
        self, site: Site, producer: Producer, pending: list[str]
    ) -> tuple[list[str], tuple[list[str], list[int]]]:
        """Send pending messages. Returns those still pending, and those accepted now with their positions."""
        try:
            receipts = self._send_batch(producer, pending)
        except (Unknown, Overloaded) as problem:
            _log.info("%d messages are owed still: %s", len(pending), problem)
            return pending, ([], [])
        taken = receipts.codes == Code.OK
        mine = [one for one, is_taken in zip(pending, taken.tolist(), strict=True) if is_taken]
        if mine:
            site.books.confirm(self.name, mine)
        left = [one for one, is_taken in zip(pending, taken.tolist(), strict=True) if not is_taken]
        return left, (mine, receipts.positions[taken].tolist())

    def _send_again(self, producer: Producer, ids: Sequence[str], positions: Sequence[int]) -> None:
        """Send accepted messages again. Raises Contradiction unless they get the first receipt."""
        try:
            receipts = self._send_batch(producer, ids)
        except (Unknown, Overloaded):
            return
        for row in np.flatnonzero(receipts.codes == Code.OK).tolist():
            if receipts.positions[row] != positions[row]:
                where = f"first at {positions[row]}, then at {receipts.positions[row]}"
                raise Contradiction(f"{ids[row]} was taken twice, {where}")

    def _send_batch(self, producer: Producer, ids: Sequence[str]) -> Receipts:
        """Send a batch. Raises Contradiction for a rejection that no fault explains."""
        receipts = producer.send_batch(self.addressed(ids))
        if wrong := np.flatnonzero((receipts.codes != Code.OK) & ~OPEN[receipts.codes]).tolist():
            raise Contradiction(f"{ids[wrong[0]]} is refused with {Code(receipts.codes[wrong[0]]).name}")
        return receipts
