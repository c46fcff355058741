"""Producer-driven transactions: the producer's table holds the pending ones (docs/modes.md, "Driven")."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from escrowmq import outbox
from escrowmq.model import Message
from escrowmq.outbox.modes import Driven, DrivenResults
from escrowmq_lab.chaos.books import intended
from escrowmq_lab.chaos.modes.inboxes import InboxMode
from escrowmq_lab.chaos.modes.leftovers import roll_back_leftovers
from escrowmq_lab.chaos.modes.seam import POLL_SECONDS, Regret, Site

_log = logging.getLogger(__name__)

GROUP = "chaos-driven"


class DrivenMode(InboxMode):
    """``Driven``, plain and merged at random; consumers with an even number keep offsets, the others claim."""

    name = "driven"
    promise = (
        "each effect exactly once: the producer's database holds the state of each message until its end was answered, "
        "the consumer's the inbox's mark, or the offset of the queue"
    )

    def place(self, site: Site) -> None:
        """Place messages; one business in ten is rolled back. Work left by an earlier process is finished first, and
        again at the end. Each producer has its own groups, because only its own database can answer check-backs for its
        messages."""
        group = f"{GROUP}-{site.name}"
        options: dict[str, Any] = {"instance": site.name, "timeout": 20.0}
        with (
            Driven(site.bus, site.engine, group, **options) as plain,
            Driven(site.bus, site.engine, group, merged=True, **options) as merged,
        ):
            ways = (plain, merged)
            left = True
            while not site.closing.is_set():
                if left or site.chance.random() < 0.02:
                    self._redrive(site, ways)
                left = not self._place_some(site, site.chance.choice(ways))
            site.placed.set()
            while not site.ended.is_set():
                for way in ways:
                    way.redrive()
                roll_back_leftovers(site, merged.producer)
                site.pause(POLL_SECONDS)

    def _redrive(self, site: Site, ways: Sequence[Driven]) -> None:
        """Finish the remaining transactions; stored and undecided ones are given up, or their business is repeated."""

        def redo(session: Session, messages: Sequence[Message]) -> None:
            ids = [message.key or "" for message in messages]
            doomed = sa.select(sa.func.count()).where(intended.c.id.in_(ids), intended.c.dooms)
            if session.scalar(doomed):
                raise Regret
            site.books.enter(session, self.name, ids)

        for way in ways:
            try:
                way.redrive(redo if site.chance.random() < 0.5 else None)
            except Regret:
                _log.info("a business that was done again changed its mind")

    def _place_some(self, site: Site, way: Driven) -> bool:
        """Run one local transaction, as a block or as a function. Returns whether all messages are out."""
        consumer, ids = self.batch(site, 100)
        dooms = site.chance.random() < 0.1
        site.books.intend(self.name, ids, dooms=dooms)
        messages = self.messages(consumer, ids)

        def business(session: Session) -> None:
            site.books.enter(session, self.name, ids)
            if dooms:
                raise Regret

        try:
            if site.chance.random() < 0.5:
                results = way.run_batch(messages, business)
            else:
                got: list[DrivenResults] = []
                with way.transaction(messages, got) as session:
                    business(session)
                results = got[0]
        except Regret:
            return True
        if out := [one for one, result in zip(ids, results, strict=True) if result.done]:
            site.books.confirm(self.name, out)
        return results.done

    def take(self, site: Site) -> None:
        """Consume by offsets in the own database, or by the inbox."""
        if site.number % 2:
            super().take(site)
            return
        topic = self.topic(site.number)
        with outbox.OffsetConsumer(site.bus, site.engine, GROUP, topic, owner=site.name) as reader:
            reader.run(
                lambda session, messages: site.books.effect(session, self.name, [one.body for one in messages]),
                stop=site.ended,
            )
