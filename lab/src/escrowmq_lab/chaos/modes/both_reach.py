"""De-duplication by the consumer: it matches ordinary PREPARE and COMMIT messages (docs/modes.md, "Both reach")."""

from __future__ import annotations

from sqlalchemy.orm import Session

from escrowmq.outbox.modes import BothReachConsumer, BothReachProducer
from escrowmq_lab.chaos.modes.seam import POLL_SECONDS, Mode, Regret, Site

GROUP = "chaos-both-reach"


class BothReachMode(Mode):
    """``BothReachProducer``, plain and merged at random; ``BothReachConsumer``, the only reader of its topic."""

    name = "both-reach"
    promise = (
        "each effect exactly once: the producer's database holds the state of each message until its end was "
        "acknowledged, "
        "the consumer's the stored prepare, and a mark when it is done"
    )

    def place(self, site: Site) -> None:
        """Place messages; one business in ten is rolled back. An earlier process's work is finished first, and at the
        end."""
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
                site.pause(POLL_SECONDS)

    def _place_some(self, site: Site, way: BothReachProducer) -> bool:
        """Run one local transaction. Returns whether all messages are out."""
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
        """Consume: the effects are in the transaction that deletes the stored prepares."""
        consumer = BothReachConsumer(
            site.engine,
            f"{GROUP}-{site.number}",
            lambda session, messages: site.books.effect(session, self.name, [one.body for one in messages]),
        )
        while not site.ended.is_set():
            consumer.consume(site.bus, self.topic(site.number), idle_timeout=POLL_SECONDS)
