"""The local message table: the message is a row of the business transaction, the node's relay sends it, the consumer's
inbox marks its id.
"""

from __future__ import annotations

from sqlalchemy.orm import Session

from escrowmq import outbox
from escrowmq_lab.chaos.modes.inboxes import InboxMode
from escrowmq_lab.chaos.modes.seam import Regret, Site, key_of


class OutboxMode(InboxMode):
    """``send_batch_tx``, a relay beside the producer, ``claim_tx``; each key in the order of its transactions, in an
    ordered group.

    Confirmed is what the local transaction committed: from there on the row is in the table, and that it comes out is
    the relay's promise. (That it has come out is known to nobody but the relay, which deletes the row.)
    """

    name = "outbox"
    told = (
        "each effect exactly once: the producer's database holds the message until a broker has it, the consumer's "
        "the inbox's mark"
    )

    ordered = True

    def key(self, identity: str) -> str:
        """One of a few, within which the relay keeps the order."""
        return key_of(identity)

    def place(self, site: Site) -> None:
        """One business transaction in ten is rolled back, its messages with it."""
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
