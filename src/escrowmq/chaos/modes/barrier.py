"""Transactions with the barrier: the business change and the decision are one local transaction; the consumer's inbox marks each id."""

from __future__ import annotations

from sqlalchemy.orm import Session

from escrowmq import outbox
from escrowmq.chaos.modes.seam import Mode, Regret, Site
from escrowmq.outbox import inbox


class BarrierMode(Mode):
    """Half messages, ``bind_tx``, check-back by ``Barrier``; ``claim_tx``."""

    name = "barrier"
    told = "each effect exactly once: the producer's database holds the barrier's row, the consumer's the inbox's mark"

    def place(self, site: Site) -> None:
        """One transaction in ten is rolled back; one in ten forgets to end, and is asked about."""
        checker = outbox.Barrier(site.engine)
        with site.bus.producer("chaos-barrier", instance=site.name, checker=checker, timeout=20.0) as producer:
            while not site.closing.is_set():
                consumer, ids = self.batch(site, 8)
                dooms = site.chance.random() < 0.1
                site.books.intend(self.name, ids, dooms=dooms)
                try:
                    with producer.transaction() as txn, Session(site.engine) as session, session.begin():
                        for message in self.messages(consumer, ids):
                            txn.send(message.topic, message.body, key=message.key, message_id=message.message_id)
                        outbox.bind_tx(session, txn)
                        site.books.enter(session, self.name, ids)
                        if dooms:
                            raise Regret
                except Regret:
                    continue
                site.books.confirm(self.name, ids)
            site.placed.set()
            site.ended.wait()  # questions are answered until the end

    def take(self, site: Site) -> None:
        """The inbox's loop."""
        with site.bus.consumer(f"chaos-barrier-{site.number}", [self.topic(site.number)], timeout=20.0) as consumer:
            site.at_end(consumer.close)
            inbox.consume(
                consumer,
                site.engine,
                lambda session, message: site.books.effect(session, self.name, [message.body]),
            )
