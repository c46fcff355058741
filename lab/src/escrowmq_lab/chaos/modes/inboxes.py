"""The consumer of modes whose mark is a row per message id: the inbox's loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from sqlalchemy.orm import Session, sessionmaker

from escrowmq.client.consuming.consumer import Consumer
from escrowmq.client.consuming.received import Received
from escrowmq.outbox import inbox
from escrowmq_lab.chaos.books import id_of
from escrowmq_lab.chaos.modes.seam import LOOK_SECONDS, Contradiction, KeyOrder, Mode, Site

ATTEMPTS = 100_000
"""Deliveries of a message before it is a dead letter. Whose database is full for a while must not come to the end of
them: a dead letter waits for a person, and there is none.
"""


def consumer_of(site: Site, group: str, topic: str, **options: Any) -> Consumer:
    """Return a consumer of which what fails comes again soon."""
    return site.bus.consumer(
        group, [topic], retry_backoff=0.1, retry_backoff_max=1.0, max_attempts=ATTEMPTS, timeout=20.0, **options
    )


class InboxMode(Mode):
    """A mode whose consumer claims each id in the transaction of its effect."""

    ordered: ClassVar[bool] = False
    """Whether the messages of a key have an order, and the group keeps it."""

    def take(self, site: Site) -> None:
        """Run the receive log's loop."""
        database, topic = sessionmaker(site.engine), self.topic(site.number)
        seen = _Seen() if self.ordered else None
        with consumer_of(site, f"chaos-{topic}", topic, ordered=self.ordered) as consumer:
            while not site.ended.is_set():
                inbox.consume(
                    consumer,
                    database,
                    _remember,
                    within=self._writing(site),
                    after=seen,
                    idle_timeout=LOOK_SECONDS,
                )
                if seen is not None and seen.problem is not None:
                    raise seen.problem

    def _writing(self, site: Site) -> Callable[[Session, Any], None]:
        def write(session: Session, _: object) -> None:
            site.books.effect(session, self.name, session.info.pop(_HANDLED, ()))

        return write


class _Seen:
    """Called with messages whose transaction has committed: whether they came in the order of their keys."""

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
    """Collect new messages of this transaction; their effects are written at its end by one statement."""
    session.info.setdefault(_HANDLED, []).append(message.body)
