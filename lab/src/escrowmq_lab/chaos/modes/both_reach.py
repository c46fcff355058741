"""De-duplication by the consumer: PREPARE and COMMIT are ordinary messages, matched in its database (docs/modes.md,
"Both reach").
"""

from __future__ import annotations

from sqlalchemy.orm import Session

from escrowmq.outbox.modes import BothReachConsumer, BothReachProducer
from escrowmq_lab.chaos.modes.seam import LOOK_SECONDS, Mode, Regret, Site

GROUP = "chaos-both-reach"


class BothReachMode(Mode):
    """``BothReachProducer``, plain and merged by turns of chance; ``BothReachConsumer``, which has its topic for
    itself."""

    name = "both-reach"
    told = (
        "each effect exactly once: the producer's database holds the state of each message until its end was "
        "acknowledged, "
        "the consumer's the stored prepare, and a mark when it is done"
    )

    def place(self, site: Site) -> None:
        """One business in ten changes its mind. What an earlier process left is driven to its end first, and again at
        the end."""
        with site.bus.producer(f"{GROUP}-{site.name}", instance=site.name, timeout=20.0) as producer:
            plain = BothReachProducer(producer, site.engine, GROUP)
            merged = BothReachProducer(producer, site.engine, f"{GROUP}-merged", merged=True)
            ways = (plain, merged)
            left = True
            while not site.closing.is_set():
                if left or site.chance.random() < 0.02:
                    for way in ways:
                        way.redrive()
                left = not self._place_some(site, site.chance.choice(ways))
            site.placed.set()
            while not site.ended.is_set():
                for way in ways:
                    way.redrive()
                site.pause(LOOK_SECONDS)

    def _place_some(self, site: Site, way: BothReachProducer) -> bool:
        """One local transaction; whether all of it is out."""
        consumer, ids = self.batch(site, 100)
        dooms = site.chance.random() < 0.1
        site.books.intend(self.name, ids, dooms=dooms)

        def business(session: Session) -> None:
            site.books.enter(session, self.name, ids)
            if dooms:
                raise Regret

        try:
            results = way.run_batch(self.messages(consumer, ids), business)
        except Regret:
            return True
        if out := [one for one, result in zip(ids, results, strict=True) if result.done]:
            site.books.confirm(self.name, out)
        return results.done

    def take(self, site: Site) -> None:
        """Effects in the transaction that deletes the stored prepares."""
        consumer = BothReachConsumer(
            site.engine,
            f"{GROUP}-{site.number}",
            lambda session, messages: site.books.effect(session, self.name, [one.body for one in messages]),
        )
        while not site.ended.is_set():
            consumer.consume(site.bus, self.topic(site.number), idle_timeout=LOOK_SECONDS)
