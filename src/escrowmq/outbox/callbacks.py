"""Callbacks from consumer to sender: after a success the sender's outbox row is set to DONE.

The consumer's side writes the callback into its own outbox, in the transaction of the effect (:func:`confirm_tx`; its
relay sends it), or sends it itself (:func:`report`). The sender's side listens (:class:`CallbackListener`), or has a
callback of its own, by HTTP for example, that calls :func:`mark_done`. A repeated callback, or one before the relay's
own mark, does no harm: DONE is the final state of a row.

A callback is a message whose body is one or many message ids, 16 bytes each.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from escrowmq import model
from escrowmq.errors import Code, EscrowError, Misuse
from escrowmq.outbox.dialects import database_now_us, in_a_line
from escrowmq.outbox.inbox import identity_of
from escrowmq.outbox.sending import send_batch_tx
from escrowmq.outbox.session import AnySession, transaction_of
from escrowmq.outbox.tables import State, trans_message

if TYPE_CHECKING:
    from escrowmq.client.consuming.consumer import Consumer
    from escrowmq.client.consuming.received import ReceivedBatch
    from escrowmq.client.producing.producer import Producer

DEFAULT_TOPIC = "outbox.done"
CHUNK_IDS = 1_000
"""Ids of one UPDATE."""
BODY_IDS = 10_000
"""Ids of one message: 160 kB."""

logger = logging.getLogger(__name__)
_ENDED = [State.DONE.value, State.DISCARDED.value]


# The consumer's side


def confirm_tx(session: AnySession, message: Any, to: str = DEFAULT_TOPIC) -> None:
    """Confirm to the sender that ``message`` had its effect: write a callback to topic ``to`` into your outbox, in the
    transaction of ``session``, which is the effect's.

    ``message`` is anything with a ``message_id``, or the id. Errors as :func:`escrowmq.outbox.send_tx`.
    """
    confirm_batch_tx(session, [message], to)


def confirm_batch_tx(session: AnySession, messages: Iterable[Any], to: str = DEFAULT_TOPIC) -> None:
    """Confirm many messages as :func:`confirm_tx` does: one row for up to 10,000 of them."""
    send_batch_tx(session, [model.Message(to, body) for body in _bodies(messages)])


def report(producer: Producer, messages: Iterable[Any], to: str = DEFAULT_TOPIC) -> None:
    """Send the callbacks of messages that had their effect to topic ``to`` at once; for consumers without a database.
    Durable when it returns; errors as :meth:`Producer.send`."""
    for body in _bodies(messages):
        producer.send(to, body)


def _bodies(messages: Iterable[Any]) -> Iterator[bytes]:
    ids = [identity_of(message) for message in messages]
    for at in range(0, len(ids), BODY_IDS):
        yield b"".join(ids[at : at + BODY_IDS])


# The sender's side


def mark_done(engine: sa.Engine, ids: Iterable[Any]) -> int:
    """Set the outbox rows of these messages to DONE, in a transaction of its own; return how many rows changed.

    ``ids`` as in :func:`confirm_tx`. Unknown and purged ids, and DONE and discarded rows, are skipped. One UPDATE per
    thousand ids.
    """
    wanted, done, row = sorted({identity_of(identity) for identity in ids}), 0, trans_message.c
    with engine.begin() as connection, transaction_of(connection, trans_message):
        for at in range(0, len(wanted), CHUNK_IDS):
            open_ = sa.update(trans_message).where(row.id.in_(wanted[at : at + CHUNK_IDS]), row.state.not_in(_ENDED))
            now = database_now_us(connection)
            # a callback before the relay's own mark proves the send too
            sent_us = sa.func.coalesce(row.sent_us, now)
            done += connection.execute(open_.values(state=State.DONE.value, done_us=now, sent_us=sent_us)).rowcount
    return done


class CallbackListener:
    """Consumes callbacks and marks the rows of ``engine`` DONE: one transaction and one acknowledgement per batch.

    ``consumer`` is a consumer of the topic of :func:`confirm_tx`, with a group of its own:
    ``bus.consumer("orders-callbacks", ["orders.done"])``.
    """

    def __init__(self, consumer: Consumer, engine: sa.Engine) -> None:
        if not isinstance(engine, sa.Engine):
            raise Misuse(Code.BAD_ARGUMENT, f"{type(engine).__name__} is not a SQLAlchemy engine")
        self._consumer = consumer
        self._engine = engine
        self.marked = 0
        """Rows set to DONE so far."""

    def run(self, *, idle_timeout: float | None = None) -> int:
        """Listen until the consumer is closed, or no callback arrives for ``idle_timeout`` seconds. Returns how many
        rows were set to DONE.

        An invalid callback goes to the dead letters. If the database is away, callbacks are redelivered.
        """
        before = self.marked
        for batch in self._consumer.batches(idle_timeout=idle_timeout):
            self._take(batch)
        return self.marked - before

    def _take(self, batch: ReceivedBatch) -> None:
        bodies = batch.arrow.column("body")
        sound = pc.equal(pc.bit_wise_and(pc.binary_length(bodies), 15), 0)
        ids = b"".join(bodies.filter(sound).to_pylist())
        try:
            self.marked += mark_done(self._engine, (ids[at : at + 16] for at in range(0, len(ids), 16)))
        except DBAPIError as problem:
            logger.warning("callbacks could not be marked and come again: %s", in_a_line(problem))
            return batch.nack(cause=f"{type(problem).__name__}: {problem}"[:500], wait=False)
        except Exception:
            batch.nack(0.0, "the listener cannot mark", wait=False)
            raise
        try:
            if pc.all(sound).as_py():
                return batch.ack()
            for message, good in zip(batch, sound.to_pylist(), strict=True):
                if good:
                    message.ack()
                else:
                    message.nack(cause="the body is no list of 16-byte message ids")
        except EscrowError as problem:  # the rows stay marked
            logger.info("callbacks were marked but not acknowledged: %s", problem)
