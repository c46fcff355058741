"""Delivery modes that are wrong, each in one place: a run must find it. They kill their own process at the worst
moment, once.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

from sqlalchemy.orm import Session

from escrowmq.client.consuming.consumer import Consumer
from escrowmq.client.producing.producer import Producer
from escrowmq_lab.chaos.modes import Mode, Site

LAST = ".last"
"""In the ids of what is placed when there are no faults any more: what follows from it does not depend on them."""


def die_once(site: Site, bodies: Sequence[bytes]) -> None:
    """The process is gone the first time that this node comes here with one of the last messages."""
    mark = site.folder / "died"
    if not mark.exists() and any(LAST.encode() in body for body in bodies):
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


class _Plain(Mode):
    """Plain sends before the business commits."""

    changes_its_mind = False
    """About the last messages, when they are out."""

    def place(self, site: Site) -> None:
        with site.bus.producer(f"planted-{self.name}-{site.name}", timeout=60.0) as producer:
            while not site.closing.is_set():
                self._place(site, producer, self.ids(site, 5))
            last = [f"{self.name}.{site.name}.{site.process}{LAST}{number}.1" for number in range(10)]
            self._place(site, producer, last, regrets=self.changes_its_mind)
        site.placed.set()
        site.ended.wait()

    def _place(self, site: Site, producer: Producer, ids: Sequence[str], regrets: bool = False) -> None:
        site.books.intend(self.name, ids)
        for message in self.addressed(ids):
            producer.send(message.topic, message.body, key=message.key, message_id=message.message_id)
        if not regrets:
            with site.engine.begin() as connection:
                site.books.enter(connection, self.name, ids)
            site.books.confirm(self.name, ids)

    def take(self, site: Site) -> None:
        topic = self.topic(site.number)
        with site.bus.consumer(f"planted-{topic}", [topic], timeout=60.0) as consumer:
            while not site.ended.is_set():
                self.handle(site, consumer)

    def handle(self, site: Site, consumer: Consumer) -> None:
        for message in consumer.receive(10, wait=0.2):
            with Session(site.engine) as session, session.begin():
                site.books.effect(session, self.name, [message.body])
            message.ack()


class Unmarked(_Plain):
    """There is no mark: an effect whose ack was lost is done again."""

    name = "unmarked"
    told = ""

    def handle(self, site: Site, consumer: Consumer) -> None:
        for message in consumer.receive(10, wait=0.2):
            with Session(site.engine) as session, session.begin():
                site.books.effect(session, self.name, [message.body])
            die_once(site, [message.body])
            message.ack()


class AckFirst(_Plain):
    """Acked before its effect is committed: lost with the process."""

    name = "ack-first"
    told = ""

    def handle(self, site: Site, consumer: Consumer) -> None:
        messages = consumer.receive(10, wait=0.2)
        for message in messages:
            message.ack()
        consumer.flush(60)
        die_once(site, [message.body for message in messages])
        with Session(site.engine) as session, session.begin():
            site.books.effect(session, self.name, [message.body for message in messages])


class Hasty(_Plain):
    """Sent without a decision: what the business did not do gets its effect all the same."""

    name = "hasty"
    told = ""
    changes_its_mind = True
