"""Consumer groups, at least once: all consumers share a topic's queues; the broker reassigns a dead one's messages."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress

from sqlalchemy.exc import DBAPIError

from escrowmq.client.consuming.consumer import Consumer
from escrowmq.client.consuming.received import ReceivedBatch
from escrowmq.errors import EscrowError
from escrowmq_lab.chaos.books import id_of
from escrowmq_lab.chaos.modes.inboxes import consumer_of
from escrowmq_lab.chaos.modes.pledged import PledgeMode
from escrowmq_lab.chaos.modes.seam import PAUSE_SECONDS, POLL_SECONDS, KeyOrder, Site

_log = logging.getLogger(__name__)
KINDS = ("shared", "ordered")
"""Kinds of topics and groups: any consumer gets any message, or a key belongs to one consumer at a time."""


class GroupsMode(PledgeMode):
    """Plain sends under fixed ids; one group of all consumers, which write the effect first and then acknowledge.
    Without deduplication records an effect may be repeated, in the same database or in another."""

    name = "groups"
    promise = "each effect at least once: nobody's database holds a mark, the broker keeps what is not acknowledged"
    repeats = True
    shares = True

    @classmethod
    def topic(cls, consumer: int) -> str:
        """Return the one topic of each kind for all consumers."""
        return f"{cls.name}-{KINDS[consumer % len(KINDS)]}"

    def ids(self, site: Site, most: int = 40, consumer: int | None = None) -> list[str]:
        """Return ids for the groups of one kind."""
        return super().ids(site, most, consumer or site.chance.randrange(len(KINDS)) + 1)

    def take(self, site: Site) -> None:
        """Run a consumer of each kind, until one of them fails."""
        stop = threading.Event()
        with ThreadPoolExecutor(len(KINDS), "chaos-groups") as pool:
            loops = [pool.submit(self._consume, site, kind, stop) for kind in range(len(KINDS))]
            wait(loops, return_when=FIRST_COMPLETED)
            stop.set()
        for loop in loops:
            loop.result()

    def _consume(self, site: Site, kind: int, stop: threading.Event) -> None:
        topic, ordered = self.topic(kind), KINDS[kind] == "ordered"
        order = KeyOrder() if ordered else None
        with consumer_of(site, f"chaos-{topic}", topic, ordered=ordered) as consumer:
            while not (stop.is_set() or site.ended.is_set()):
                for batch in consumer.batches(200, idle_timeout=POLL_SECONDS):
                    self._handle(site, consumer, batch, order)
                    if stop.is_set() or site.ended.is_set():
                        return

    def _handle(self, site: Site, consumer: Consumer, batch: ReceivedBatch, order: KeyOrder | None) -> None:
        """Write the effect, then acknowledge; unacknowledged messages are redelivered."""
        messages = list(batch)
        if order is not None:
            order.see(id_of(message.body) for message in messages if message.attempt == 1)
        try:
            with site.engine.begin() as connection:
                site.books.effect(connection, self.name, [message.body for message in messages])
        except DBAPIError:
            with suppress(EscrowError):
                batch.nack(PAUSE_SECONDS, "the database refuses")
            site.pause(PAUSE_SECONDS)
            return
        try:
            match site.chance.choices(("at once", "one by one", "given back", "extended"), (12, 4, 1, 2))[0]:
                case "one by one":
                    for message in messages:
                        message.ack()
                    consumer.flush()
                case "given back":
                    batch.nack(0.0, "as if it had failed after all")
                case "extended":
                    batch.extend(1.0)
                    batch.ack()
                case _:
                    batch.ack()
        except EscrowError as problem:
            _log.info("%d messages come again: %s", len(batch), problem)
