"""Offsets in the consumer's database: each moves in the transaction of the effects; the broker stores none."""

from __future__ import annotations

from sqlalchemy.orm import Session

from escrowmq import outbox
from escrowmq.outbox.modes import Taken
from escrowmq_lab.chaos.books import id_of
from escrowmq_lab.chaos.modes.pledged import PledgeMode
from escrowmq_lab.chaos.modes.seam import KeyOrder, Site


class OffsetsMode(PledgeMode):
    """Plain sends under fixed ids, ``OffsetConsumer``; messages of a key arrive in order."""

    name = "offsets"
    promise = (
        "each effect exactly once: the brokers know the message ids, the consumer's database holds an offset for "
        "each queue"
    )

    def take(self, site: Site) -> None:
        """Consume all queues of the topic at all brokers; the next process resumes them as the same owner."""

        order = KeyOrder()

        def effect(session: Session, messages: Taken) -> None:
            bodies = messages.arrow.column("body").to_pylist()
            order.see(id_of(body) for body in bodies)
            site.books.effect(session, self.name, bodies)

        topic = self.topic(site.number)
        with outbox.OffsetConsumer(site.bus, site.engine, f"chaos-{self.name}", topic, owner=site.name) as consumer:
            consumer.run(effect, stop=site.ended)
