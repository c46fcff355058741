"""The consumer of modes with a deduplication record per message id: the inbox's loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from sqlalchemy.orm import Session, sessionmaker

from escrowmq.client.consuming.consumer import Consumer
from escrowmq.client.consuming.received import Received
from escrowmq.outbox import inbox
from escrowmq_lab.chaos.books import id_of
from escrowmq_lab.chaos.modes.seam import POLL_SECONDS, Contradiction, KeyOrder, Mode, Site

ATTEMPTS = 100_000
"""Maximum deliveries of a message; high, because no operator would retry the dead letters of a full database."""


def consumer_of(site: Site, group: str, topic: str, **options: Any) -> Consumer:
    """Create a consumer with short retry delays."""
    return site.bus.consumer(
        group, [topic], retry_backoff=0.1, retry_backoff_max=1.0, max_attempts=ATTEMPTS, timeout=20.0, **options
    )


class InboxMode(Mode):
    """A mode whose consumer claims each id in the transaction of its effect."""

    ordered: ClassVar[bool] = False
    """Whether the messages of a key are ordered, and the group keeps the order."""

    def take(self, site: Site) -> None:
        """Run the inbox's loop."""
        database, topic = sessionmaker(site.engine), self.topic(site.number)
        seen = _OrderCheck() if self.ordered else None
        with consumer_of(site, f"chaos-{topic}", topic, ordered=self.ordered) as consumer:
            while not site.ended.is_set():
                inbox.consume(
                    consumer,
                    database,
                    _remember,
                    within=self._effect_writer(site),
                    after=seen,
                    idle_timeout=POLL_SECONDS,
                )
                if seen is not None and seen.problem is not None:
                    raise seen.problem

    def _effect_writer(self, site: Site) -> Callable[[Session, Any], None]:
        def write(session: Session, _: object) -> None:
            site.books.effect(session, self.name, session.info.pop(_HANDLED, ()))

        return write


class _OrderCheck:
    """Checks the key order of messages whose transaction has committed."""

    def __init__(self) -> None:
        self.problem: Contradiction | None = None
        self._order = KeyOrder()

    def __call__(self, messages: Sequence[Received]) -> None:
        try:
            self._order.see(id_of(message.body) for message in messages if message.attempt == 1)
        except Contradiction as problem:
            self.problem = self.problem or problem


_HANDLED = "chaos-handled"


def _remember(session: Session, message: Any) -> None:
    """Collect new messages of this transaction; one statement writes their effects at its end."""
    session.info.setdefault(_HANDLED, []).append(message.body)
