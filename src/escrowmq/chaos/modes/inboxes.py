"""The consumer of modes whose mark is a row per message id: the inbox's loop."""

from __future__ import annotations

from typing import Any

from sqlalchemy.orm import Session, sessionmaker

from escrowmq.chaos.modes.seam import LOOK_SECONDS, Mode, Site
from escrowmq.client.consuming.consumer import Consumer
from escrowmq.outbox import inbox

ATTEMPTS = 100_000
"""Deliveries of a message before it is a dead letter. Whose database is full for a while must not come to the end of them: a dead letter
waits for a person, and there is none."""


def consumer_of(site: Site, group: str, topic: str, **options: Any) -> Consumer:
    """A consumer of which what fails comes again soon."""
    return site.bus.consumer(
        group, [topic], retry_backoff=0.1, retry_backoff_max=1.0, max_attempts=ATTEMPTS, timeout=20.0, **options
    )


class InboxMode(Mode):
    """A mode whose consumer claims each id in the transaction of its effect."""

    def take(self, site: Site) -> None:
        """The inbox's loop."""

        def write(session: Session, _: object) -> None:
            site.books.effect(session, self.name, session.info.pop(_HANDLED, ()))

        database, topic = sessionmaker(site.engine), self.topic(site.number)
        with consumer_of(site, f"chaos-{topic}", topic) as consumer:
            while not site.ended.is_set():
                inbox.consume(consumer, database, _remember, within=write, idle_timeout=LOOK_SECONDS)


_HANDLED = "chaos-handled"


def _remember(session: Session, message: Any) -> None:
    """What is new in this transaction, whose effects are written at its end by one statement."""
    session.info.setdefault(_HANDLED, []).append(message.body)
