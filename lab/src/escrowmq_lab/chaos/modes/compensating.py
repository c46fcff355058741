"""Messages stored with the change, sent once, resent if unacknowledged (docs/modes.md, "Compensation")."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from escrowmq.outbox.dialects import insert_new
from escrowmq.outbox.modes import Compensating
from escrowmq_lab.chaos.books import id_of
from escrowmq_lab.chaos.modes.inboxes import consumer_of
from escrowmq_lab.chaos.modes.seam import POLL_SECONDS, Mode, Regret, Site

GROUP = "chaos-compensating"

metadata = sa.MetaData()
had = sa.Table("chaos_had", metadata, sa.Column("id", sa.LargeBinary(96), primary_key=True))
"""Makes the consumer idempotent: ids with an effect in this database, under a unique key."""


class CompensatingMode(Mode):
    """``Compensating``; a consumer that inserts an id if it is absent, and has an effect only then."""

    name = "compensating"
    promise = (
        "sent at least once, by the producer's table of what is not acknowledged; each effect exactly once because the "
        "consumer is "
        "idempotent: its own database has each id under a unique key, in the transaction of the effect"
    )

    def place(self, site: Site) -> None:
        """Place messages; one business in ten is rolled back. An earlier process's messages are sent first, and at the
        end."""
        with site.bus.producer(f"{GROUP}-{site.name}", instance=site.name, timeout=20.0) as producer:
            way = Compensating(producer, site.engine, GROUP)
            left = True
            while not site.closing.is_set():
                if left or site.chance.random() < 0.02:
                    way.resend()
                left = not self._place_some(site, way)
            site.placed.set()
            while not site.ended.is_set():
                way.resend()
                site.pause(POLL_SECONDS)

    def _place_some(self, site: Site, way: Compensating) -> bool:
        """Run one local transaction. Returns whether all messages are out."""
        consumer, ids = self.batch(site, 100)
        dooms = site.chance.random() < 0.1
        site.books.intend(self.name, ids, dooms=dooms)

        def business(session: Session) -> None:
            site.books.enter(session, self.name, ids)
            if dooms:
                raise Regret

        try:
            codes = way.send(self.messages(consumer, ids), business)
        except Regret:
            return True
        if out := [one for one, code in zip(ids, codes.tolist(), strict=True) if code == 0]:
            site.books.confirm(self.name, out)
        return len(out) == len(ids)

    def take(self, site: Site) -> None:
        """Consume: a batch is one transaction, and is acknowledged afterwards."""
        metadata.create_all(site.engine)
        with consumer_of(site, f"{GROUP}-{site.number}", self.topic(site.number)) as consumer:
            while not site.ended.is_set():
                for batch in consumer.batches(idle_timeout=POLL_SECONDS):
                    with site.engine.begin() as connection:
                        self._apply_new(site, connection, [message.body for message in batch])
                    batch.ack()

    def _apply_new(self, site: Site, connection: sa.Connection, bodies: Sequence[bytes]) -> None:
        """Record the effects of bodies whose ids are new."""
        named: dict[bytes, Any] = {id_of(body).encode(): body for body in bodies}
        new = insert_new(connection, had.c.id, [{"id": identity} for identity in named])
        site.books.effect(connection, self.name, [body for identity, body in named.items() if identity in new])
