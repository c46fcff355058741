"""The local message table: the business transaction stores a row, the relay sends it, the inbox records its id."""

from __future__ import annotations

from sqlalchemy.orm import Session

from escrowmq import outbox
from escrowmq_lab.chaos.modes.inboxes import InboxMode
from escrowmq_lab.chaos.modes.seam import Regret, Site, key_of


class OutboxMode(InboxMode):
    """``send_batch_tx``, a relay beside the producer, ``claim_tx``; messages of a key in transaction order, in an
    ordered group. Confirmed means committed by the local transaction: sending the row is then the relay's promise. Only
    the relay knows when the row was sent, and deletes it then."""

    name = "outbox"
    promise = (
        "each effect exactly once: the producer's database holds the message until a broker has it, the consumer's "
        "the inbox's mark"
    )

    ordered = True

    def key(self, identity: str) -> str:
        """Return one of a few keys, within which the relay keeps the order."""
        return key_of(identity)

    def place(self, site: Site) -> None:
        """Place messages; one business transaction in ten is rolled back with its messages."""
        while not site.closing.is_set():
            ids = self.ids(site)
            dooms = site.chance.random() < 0.1
            site.books.intend(self.name, ids, dooms=dooms)
            try:
                with Session(site.engine) as session, session.begin():
                    outbox.send_batch_tx(session, self.addressed(ids))
                    site.books.enter(session, self.name, ids)
                    if dooms:
                        raise Regret
            except Regret:
                continue
            site.books.confirm(self.name, ids)
        site.placed.set()
        site.ended.wait()
