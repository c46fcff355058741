"""Stored with the business change, sent once, and what is left again: for an idempotent consumer (docs/modes.md,
"Compensation").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from escrowmq.outbox.dialects import insert_new
from escrowmq.outbox.modes import Compensating
from escrowmq_lab.chaos.books import id_of
from escrowmq_lab.chaos.modes.inboxes import consumer_of
from escrowmq_lab.chaos.modes.seam import LOOK_SECONDS, Mode, Regret, Site

GROUP = "chaos-compensating"

metadata = sa.MetaData()
had = sa.Table("chaos_had", metadata, sa.Column("id", sa.LargeBinary(96), primary_key=True))
"""What makes the consumer idempotent: ids whose effect is in this database, under a unique key."""


class CompensatingMode(Mode):
    """``Compensating``; a consumer that inserts an id where it is absent, and has an effect only then."""

    name = "compensating"
    told = (
        "sent at least once, by the producer's table of what is not acknowledged; each effect exactly once because the "
        "consumer is "
        "idempotent: its own database has each id under a unique key, in the transaction of the effect"
    )

    def place(self, site: Site) -> None:
        """One business in ten changes its mind. What an earlier process left is sent first, and again at the end."""
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
                site.pause(LOOK_SECONDS)

    def _place_some(self, site: Site, way: Compensating) -> bool:
        """One local transaction; whether all of it is out."""
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
        """Consume: a batch is one transaction, acknowledged afterwards."""
        metadata.create_all(site.engine)
        with consumer_of(site, f"{GROUP}-{site.number}", self.topic(site.number)) as consumer:
            while not site.ended.is_set():
                for batch in consumer.batches(idle_timeout=LOOK_SECONDS):
                    with site.engine.begin() as connection:
                        self._have(site, connection, [message.body for message in batch])
                    batch.ack()

    def _have(self, site: Site, connection: sa.Connection, bodies: Sequence[bytes]) -> None:
        """Write the effects of the bodies whose ids had none."""
        named: dict[bytes, Any] = {id_of(body).encode(): body for body in bodies}
        new = insert_new(connection, had.c.id, [{"id": identity} for identity in named])
        site.books.effect(connection, self.name, [body for identity, body in named.items() if identity in new])
